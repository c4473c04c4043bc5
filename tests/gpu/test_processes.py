"""The fused kernel with one process per GPU, and with several GPUs in each of several processes."""

import re

import jax
import pytest

from jaxmoe import native
from tests.multiprocess.launcher import LaunchError, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.cuda_status().available, reason=native.cuda_status().reason or "the CUDA part runs"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]
WORKER = "tests.multiprocess.workers.megakernel"
TIMEOUT_S, SILENCE_S = 150, 90


def run(what: str, devices_per_process: int = 1) -> tuple[str, ...]:
    return launch(
        WORKER,
        processes=jax.device_count() // devices_per_process,
        devices_per_process=devices_per_process,
        arguments=(what,),
        platform="gpu",
        timeout_s=TIMEOUT_S,
        silence_s=SILENCE_S,
        # Beside the tests' own JAX on the same GPUs.
        environment=lambda rank: {"JAXMOE_TIMEOUT_SECONDS": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )


def test_ranks_in_processes_of_their_own_agree_with_the_reference_call_after_call():
    for output in run("layer"):
        assert "300 calls gave the same bits" in output


def test_a_rank_that_stays_away_is_named_in_the_error_of_the_next_call():
    try:
        outputs = run("absent")
    except LaunchError as error:  # the coordinator may notice a rank that is gone
        outputs = error.outputs
    absent = len(outputs) - 1
    for rank, output in enumerate(outputs[:-1]):
        assert "the output is NaN" in output
        waited = rf"jaxmoe: rank {rank} sm \d+ \w+ waited 3 s for inputs_ready\[{absent}\]: seen 1 of 2"
        assert re.search(rf"{waited} \(from rank {absent}\)", output)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("devices_per_process", [1, 2, 4])
def test_memory_of_a_group_outlives_the_communicators_that_xla_destroys(devices_per_process):
    for output in run("programs", devices_per_process):
        assert "right: beside a larger group again" in output


def test_two_threads_get_right_results_or_an_error_that_names_them():
    [output] = run("threads", jax.device_count())
    for told in re.findall("thread: (.*)", output):
        assert told == "100 calls were right" or "two threads of this process" in told or " waited 3 s for " in told
    assert output.count("thread: ") == 2
