"""What the tests of the layer beside other work share: one run of all programs, and what has to hold of each."""

import json
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import pytest

from jaxmoe import machine
from jaxmoe.bench.beside import TIMEOUT_SECONDS
from jaxmoe.bench.beside_programs import PROGRAMS
from jaxmoe.bench.beside_table import is_longer
from jaxmoe.bench.options import NARROW
from tests.multiprocess.launcher import LaunchError, launch

TOKENS = (64, 1024, 8192)
CASES = [(tokens, program) for tokens in TOKENS for program in PROGRAMS]
# For which each program is timed.
SECONDS = float(os.environ.get("JAXMOE_TEST_SECONDS", "3"))
# A program is timed once, its other work for half as long; compiling and comparing come to about as much as this, and
# the few that are timed again to less.
CASE_S, START_S, SILENCE_S = 1.5 * SECONDS + 5, 120, 120
GPUS = jax.device_count()

SLOWEST = 3  # times the median

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
    pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"),
    # The first test of a file waits for the run of all.
    pytest.mark.timeout(START_S + len(CASES) * CASE_S + 60),
]


class Lines:
    """The results of one run of the programs, over all GPUs.

    Args:
      suite: what the run is of.
      cases: tokens per rank and programs.
    """

    def __init__(self, suite: type["BesideSuite"], cases: Iterable[tuple[int, str]]) -> None:
        cases = list(cases)
        tokens = [number for number in TOKENS if number in {case[0] for case in cases}]
        programs = [name for name in PROGRAMS if name in {case[1] for case in cases}]
        options = {"tokens": tokens, "programs": programs, "seconds": SECONDS}
        options |= {"implementation": "megakernel", "dtype": suite.dtype, "precision": suite.precision}
        options |= {"network": suite.network}
        # Beside the tests' own JAX on the same GPUs.
        environment = {"JAXMOE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.ending = "the run has ended well"
        try:
            outputs = launch(
                "tests.multiprocess.workers.beside",
                processes=suite.processes,
                devices_per_process=GPUS // suite.processes,
                arguments=(json.dumps(options),),
                platform="gpu",
                timeout_s=START_S + len(tokens) * len(programs) * CASE_S,
                silence_s=SILENCE_S,
                environment=lambda rank: environment,
            )
        except LaunchError as error:
            outputs, self.ending = error.outputs, str(error)
        lines = outputs[0].splitlines()
        print(*(line for line in lines if not line.startswith("result ")), sep="\n")
        results = [json.loads(line.removeprefix("result ")) for line in lines if line.startswith("result ")]
        self.results = {(result["tokens"], result["program"]): result for result in results}

    def of(self, tokens: int, program: str) -> dict[str, Any]:
        """Returns a result with figures; fails the test with the reason where there are none."""
        if (tokens, program) not in self.results:
            pytest.fail(f"there is no line of {program} with {tokens} tokens. {self.ending}")
        result = self.results[tokens, program]
        assert result["failure"] is None
        return result


def selected(session: pytest.Session, suite: type["BesideSuite"]) -> set[tuple[int, str]]:
    """The cases of a `BesideSuite` that are to be tested, of those that `pytest -k` and the like have left."""
    found = set()
    for item in session.items:
        if isinstance(item, pytest.Function) and item.cls is suite:
            if suite.dtype in NARROW and PROGRAMS[str(item.callspec.params["program"])].trains:
                continue
            found.add((item.callspec.params["tokens"], item.callspec.params["program"]))
    return found


def times_of(result: dict[str, Any]) -> str:
    """What pytest cuts off: the times of a line, microseconds."""
    names = ("microseconds", "slowest", "paused", "layer", "work", "work_slowest", "rounds")
    return ", ".join(f"{name} {result[name]}" for name in names)


def assert_steady(result: dict[str, Any]) -> None:
    """No call stands still, but where the host pauses for as long without the layer."""
    of_host = result["layer"] + 2 * result["work_slowest"]
    assert result["slowest"] <= max(SLOWEST * result["microseconds"], of_host), times_of(result)


def assert_no_longer_than_its_parts(result: dict[str, Any]) -> None:
    """The layer and the other work beside each other are hardly slower than one after the other.

    Where single calls are, hosts may be what bounds them: then in rounds inside one jit, where none stands in between.
    """
    if is_longer(result["microseconds"], result["layer"], result["work"]):
        assert result["rounds"] is not None, times_of(result)
        assert not is_longer(*result["rounds"]), times_of(result)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tokens", TOKENS)
class BesideSuite:
    """What has to hold of every program, in `processes` processes. One run, `lines` (conftest.py), serves all tests."""

    processes: int
    dtype: str = "bf16"  # a key of DTYPES or NARROW of the benchmark's options
    precision: str | None = None  # of the layer, whose experts are wide
    network: ClassVar[dict[str, Any] | None] = None  # fields of a plan between hosts

    @pytest.fixture(autouse=True)
    def _possible(self, program) -> None:
        if self.dtype in NARROW and PROGRAMS[program].trains:
            pytest.skip("these experts have no gradients")

    def test_it_ends_and_returns_what_layer_and_other_work_return_alone(self, lines, tokens, program):
        lines.of(tokens, program)

    def test_no_call_takes_three_times_the_median(self, lines, tokens, program):
        assert_steady(lines.of(tokens, program))

    def test_it_takes_hardly_longer_than_layer_and_other_work_one_after_the_other(self, lines, tokens, program):
        assert_no_longer_than_its_parts(lines.of(tokens, program))
