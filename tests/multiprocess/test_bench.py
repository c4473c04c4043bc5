"""The benchmark in several processes."""

import re

import pytest

from tests.multiprocess.launcher import LaunchError, launch

pytestmark = pytest.mark.multiprocess


def run(argument: str) -> tuple[str, ...]:
    return launch(
        "tests.multiprocess.workers.bench",
        processes=2,
        devices_per_process=2,
        arguments=(argument,),
        timeout_s=240,
        silence_s=120,
    )


@pytest.mark.slow
def test_the_slowest_process_is_the_time_of_all():
    outputs = run("clock")
    times = [re.findall(r"^microseconds \[(.*)\]$", output, re.M) for output in outputs]
    assert times[0] == times[1]
    [found] = times[0]
    microseconds = [int(time) for time in found.split(", ")]
    assert len(microseconds) == 3
    assert min(microseconds) >= 11_000


@pytest.mark.slow
def test_the_first_process_prints_what_all_measured():
    with pytest.raises(LaunchError) as error:  # on CPUs the megakernel runs in one process only, and its line says so
        run("flags")
    first, second = error.value.outputs
    assert "cpu x 4, 2 process(es)" in first
    assert re.search(r"^16,24,8,2 +24 +4 forward +megakernel +- +cannot run: moe_layer: 2 processes", first, re.M)
    for implementation in ("xla", "baseline-drops-rows"):
        assert re.search(rf"^16,24,8,2 +24 +4 forward +{implementation} +- +\d.\de-03 +\d+\.\d ", first, re.M)
    assert "16,24,8,2" not in second
    assert "HBM of rank" not in second
