"""The fused kernel when something goes wrong on one rank: the others end in time, with an error that says why."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from jaxmoe import machine
from tests.gpu.test_processes import GPUS, in_processes_of, several_gpus, start
from tests.multiprocess.launcher import LaunchError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]
LIMIT_S = 3


def outputs_without_the_last(mode: str) -> Sequence[str]:
    """What the ranks print in a mode of the worker in which the last one goes away."""
    try:
        return start("faults", mode, waits_s=LIMIT_S)
    except LaunchError as error:  # the coordinator may notice a rank that is gone
        return error.outputs


@several_gpus
def test_a_rank_that_stays_away_is_named_in_the_error_of_the_next_call():
    outputs = outputs_without_the_last("absent")
    absent = len(outputs) - 1
    for rank, output in enumerate(outputs[:-1]):
        assert "the output is NaN" in output
        waited = rf"jaxmoe: rank {rank} sm \d+ \w+ waited 3 s for inputs_ready\[{absent}\]: seen 1 of 2"
        for told in ("asked", "next call"):
            assert re.search(rf"^{told}.*{waited} \(from rank {absent}\)", output, re.M)


@several_gpus
def test_a_failure_that_no_call_has_reported_is_printed_when_the_process_ends():
    outputs = outputs_without_the_last("silent")
    for output in outputs[:-1]:
        behind = output.partition("the output is NaN")[2]
        assert re.search(r"waited 3 s for inputs_ready.* That was the last that a layer of this process did", behind)


@several_gpus
def test_a_rank_that_stays_away_when_memory_grows_is_an_error_of_all_calls_from_then_on():
    outputs = outputs_without_the_last("away")
    for output in outputs[:-1]:
        late = r"Not all ranks came within 3 s .* Restart all processes"
        [first_s] = re.findall(rf"^first call after ([\d.]+) s: .*{late}", output, re.M)
        [next_s] = re.findall(rf"^next call after ([\d.]+) s: .*{late}", output, re.M)
        assert 3 <= float(first_s) < 30
        assert float(next_s) < 1
        assert re.search(r"^failures: \('jaxmoe: GPU \d+ of this process: Not all ranks came", output, re.M)


@several_gpus
def test_when_a_process_is_killed_in_the_middle_of_a_launch_the_others_get_an_error_within_the_limit():
    outputs = start("faults", "killed", waits_s=LIMIT_S, may_fail=[GPUS - 1])
    assert "the GPU still computes" not in outputs[-1]
    for output in outputs[:-1]:
        [seconds] = re.findall(r"^(?:NaN|error) after ([\d.]+) s", output, re.M)
        assert float(seconds) < LIMIT_S + 2
        told = rf"waited {LIMIT_S} s for \w+.* \(from rank {GPUS - 1}\).* Restart all processes"
        assert re.search(rf"^next call after [\d.]+ s: .*{told}", output, re.M)
        assert "the GPU still computes" in output


@several_gpus
def test_when_a_rank_raises_between_two_layers_the_others_get_an_error_within_the_limit():
    outputs = start("faults", "raises", waits_s=LIMIT_S, may_fail=[GPUS - 1])
    assert "RuntimeError: between two layers" in outputs[-1]
    for output in outputs[:-1]:
        assert "call 5: NaN" in output
        assert re.search(rf"^next call after .* waited {LIMIT_S} s for inputs_ready\[{GPUS - 1}\]", output, re.M)


@several_gpus
def test_a_process_that_is_late_when_memory_grows_ends_no_other():
    """Three processes that share all GPUs: a group of each two of them."""
    ranks: dict[str, Any] = {"processes": 3, "devices_per_process": 2, "shared_gpus": 1}
    for output in start("faults", "late", waits_s=120, **ranks):
        assert "6144 tokens: right" in output


@several_gpus
def test_memory_grows_behind_work_that_takes_longer_than_the_limit():
    for output in start("faults", "busy", waits_s=LIMIT_S):
        [seconds] = re.findall(r"^right after ([\d.]+) s, failures: \(\)", output, re.M)
        assert float(seconds) > LIMIT_S


@several_gpus
def test_memory_grows_behind_work_of_one_gpu_of_a_process_that_takes_longer_than_the_others_wait():
    [output] = start("faults", "one is busy", waits_s=LIMIT_S, **in_processes_of(GPUS))
    [seconds] = re.findall(r"^right after ([\d.]+) s, failures: \(\)", output, re.M)
    assert float(seconds) > LIMIT_S + 10


@several_gpus
def test_too_little_memory_on_one_gpu_is_an_error_of_the_call_on_all_of_them():
    [output] = start("faults", "full", **in_processes_of(GPUS))
    for number in range(2):
        told = re.findall(rf"^call {number}: (.*)", output, re.M)
        assert len(told) == 2 * GPUS
        for error in told:
            assert "of GPU memory outside of XLA's pool" in error
            assert "the call fails on all of them" in error
    assert "right: large at last" in output


@several_gpus
def test_too_little_memory_of_one_process_is_an_error_in_all_of_them_and_smaller_calls_go_on():
    outputs = start("faults", "short")
    for rank, output in enumerate(outputs):
        is_short = rank == GPUS - 1
        told = "of GPU memory outside of XLA's pool" if is_short else f"rank {GPUS - 1} could not allocate its arena"
        for number in range(2):
            assert re.search(rf"^call {number} after [\d.]+ s: .*{told}", output, re.M)
        assert "right: small again" in output
        assert "right: large at last" in output


@several_gpus
def test_a_host_that_is_late_is_named_and_waited_for():
    outputs = start("faults", "late host", waits_s=LIMIT_S)
    last = len(outputs) - 1
    for process, output in enumerate(outputs):
        assert "the same bits after" in output
        waited = f"of process {process} has waited [3-9] s and not ended"
        told = rf"{waited}\. Late are process {last} on \S+ \(has started \d+\)"
        assert bool(re.search(rf"^failures: .*{told}", output, re.M)) == (process != last)
        assert output.count("jaxmoe: launch ") == 2 * (process != last)  # printed, and among the failures


@several_gpus
def test_a_host_that_is_lost_is_named():
    outputs = start("faults", "lost host", waits_s=LIMIT_S, may_fail=[GPUS - 1])
    for output in outputs[:-1]:
        [(seconds, told)] = re.findall(r"^after ([\d.]+) s: (.*)", output, re.M)
        assert float(seconds) < 2 * LIMIT_S
        assert f"Late are process {GPUS - 1} on " in told
