"""Experts in 8 and 4 bits that lie with several processes."""

import re

import pytest

from tests.multiprocess.launcher import launch
from tests.multiprocess.test_layer import MESH, SILENCE_S, TIMEOUT_S
from tests.multiprocess.workers.few_bits import BLOCKS

pytestmark = pytest.mark.multiprocess


def results_of(output: str) -> dict[str, str]:
    """A digest of the results for each precision that a rank has compared."""
    return dict(re.findall(r"^(\S+): near the sums in float64, \d+ calls gave the bits (\w+)$", output, re.M))


@pytest.mark.slow
def test_every_process_quantizes_its_experts_and_gets_outputs_and_gradients_with_the_same_bits():
    outputs = launch(
        "tests.multiprocess.workers.few_bits",
        processes=2,
        devices_per_process=4,
        arguments=(MESH, "xla"),
        timeout_s=TIMEOUT_S,
        silence_s=SILENCE_S,
    )
    first, second = map(results_of, outputs)
    assert set(first) == set(BLOCKS)
    assert first == second
