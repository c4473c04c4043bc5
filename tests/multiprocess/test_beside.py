"""Programs that run the layer beside other work, in several processes that all do the same.

The programs on GPUs are in tests/gpu/test_beside_processes.py; this runs the same worker.
"""

import json
import re

import pytest

from tests.multiprocess.launcher import launch

pytestmark = pytest.mark.multiprocess

# One of every kind: whole arrays, ranks and both passes, two groups, calls of the host and a thread of it.
PROGRAMS = ("both", "scatters", "groups", "callback", "prefetch")


@pytest.mark.slow
def test_all_processes_check_and_time_the_programs_alike():
    # Which compiles soonest. What the implementations do in several processes is in test_layer.py.
    options = {
        "programs": PROGRAMS,
        "tokens": (8,),
        "shape": (16, 24, 8, 2),
        "seconds": 0.05,
        "rounds": True,
        "implementation": "reference",
    }
    outputs = launch(
        "tests.multiprocess.workers.beside",
        processes=2,
        devices_per_process=1,
        arguments=(json.dumps(options),),
        timeout_s=270,
        silence_s=120,
    )
    lines = [re.findall(r"^\w+ +8 .*$", output, re.M) for output in outputs]
    assert [line.split()[0] for line in lines[0]] == list(PROGRAMS)
    assert lines[0] == lines[1]  # times too: those of the slowest process
    results = [json.loads(text) for text in re.findall(r"^result (.*)$", outputs[0], re.M)]
    assert [(result["program"], result["failure"]) for result in results] == [(name, None) for name in PROGRAMS]
    assert "result" not in outputs[1]
    assert [result["program"] for result in results if result["rounds"]] == ["both", "scatters", "groups"]
