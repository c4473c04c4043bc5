"""The fused kernel with one process per GPU, with several GPUs in each of several processes, and on shared GPUs."""

import json
import re
from collections.abc import Collection
from typing import Any

import jax
import pytest

from jaxmoe import machine
from jaxmoe.experts import LAYOUTS
from jaxmoe.testing import ROUTING_KINDS
from tests.multiprocess.launcher import launch
from tests.multiprocess.test_few_bits import results_of
from tests.multiprocess.test_hosts import assert_all_are_told
from tests.multiprocess.workers.few_bits import BLOCKS, IN_8_BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]
# Processes that share GPUs are tested on one as on eight.
several_gpus = pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
GPUS = jax.device_count()
TIMEOUT_S, SILENCE_S = 150, 90
SHARED_RANKS = 8
SHARED: dict[str, Any] = {"processes": SHARED_RANKS, "devices_per_process": 1, "shared_gpus": min(GPUS, SHARED_RANKS)}


def start(
    worker: str,
    *arguments: str,
    waits_s: int = 60,
    ranks_of_host: int | None = None,
    may_fail: Collection[int] = (),
    **ranks: Any,
) -> tuple[str, ...]:
    """Runs a worker as all ranks, one for each GPU where `ranks` does not say otherwise; returns what they printed."""
    # Beside the tests' own JAX on the same GPUs.
    environment = {"JAXMOE_TIMEOUT_SECONDS": str(waits_s), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Where times decide which product XLA takes, two programs may have other bits.
    environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    return launch(
        f"tests.multiprocess.workers.{worker}",
        **{"processes": GPUS, "devices_per_process": 1} | ranks,
        arguments=arguments,
        platform="gpu",
        timeout_s=TIMEOUT_S,
        silence_s=SILENCE_S,
        may_fail=may_fail,
        # JAX takes the ranks of one index for those of a host.
        environment=lambda rank: (
            environment | ({"JAX_PARTITION_INDEX": str(rank // ranks_of_host)} if ranks_of_host else {})
        ),
    )


def in_processes_of(devices: int) -> dict[str, Any]:
    return {"processes": GPUS // devices, "devices_per_process": devices}


def meshes(ranks: int) -> list[str]:
    """All ranks as one group, and every number of equal groups of two or more."""
    groups = [count for count in range(2, ranks // 2 + 1) if ranks % count == 0]
    return [f"expert {ranks}", *(f"data {count} x expert {ranks // count}" for count in groups)]


def assert_right_with_the_same_bits(mesh: str, *network: str, **ranks: Any) -> None:
    """Outputs and gradients of every routing, and equal replicas in all processes."""
    outputs = start("layer", mesh, "megakernel", *network, **ranks)
    digests: dict[str, str] = {}
    for output in outputs:
        assert "calls gave the same bits" in output
        for kind in ROUTING_KINDS:
            assert re.search(rf"^{kind}: \d+ shards near the reference", output, re.M)
        for shard, digest in re.findall(r"^digest (.+) ([0-9a-f]{64})$", output, re.M):
            assert digests.setdefault(shard, digest) == digest, shard


@pytest.mark.parametrize("way", ["gather", "send"])
def test_eight_ranks_that_share_gpus_as_two_hosts_of_four_get_the_output_and_gradients_of_the_reference(way):
    network = {"ranks_per_host": 4, "way": way} | ({"chunks": 2} if way == "gather" else {"round_tokens": 50})
    assert_right_with_the_same_bits("expert 8", json.dumps(network), **SHARED)


@several_gpus
@pytest.mark.parametrize("mesh", meshes(GPUS))
def test_every_process_gets_the_output_and_gradients_of_the_reference_with_the_same_bits_each_time(mesh):
    assert_right_with_the_same_bits(mesh)


@several_gpus
def test_every_process_quantizes_its_experts_and_gets_outputs_and_gradients_with_the_same_bits():
    results = [results_of(output) for output in start("few_bits", f"expert {GPUS}", "megakernel")]
    assert set(results[0]) == set(BLOCKS)
    assert all(found == results[0] for found in results)


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
@pytest.mark.parametrize("mesh", meshes(GPUS))
def test_groups_across_two_processes_of_several_gpus_get_the_output_and_gradients_of_the_reference(mesh):
    assert_right_with_the_same_bits(mesh, **in_processes_of(GPUS // 2))


@pytest.mark.skipif(GPUS >= SHARED_RANKS, reason="there is a GPU for every rank")
@pytest.mark.parametrize("mesh", meshes(SHARED_RANKS))
def test_eight_ranks_that_share_gpus_get_the_output_and_gradients_of_the_reference(mesh):
    assert_right_with_the_same_bits(mesh, **SHARED)


@pytest.mark.skipif(GPUS >= SHARED_RANKS, reason="there is a GPU for every rank")
@pytest.mark.parametrize("layout", ["apart", *LAYOUTS])
def test_eight_ranks_that_share_gpus_split_experts_inside_and_get_the_output_and_gradients_of_the_reference(layout):
    for output in start("splits", "megakernel", layout, **SHARED):
        assert "calls gave the same bits" in output
        for kind in ROUTING_KINDS:
            assert re.search(rf"^{kind}: \d+ shards near the reference", output, re.M)


@pytest.mark.skipif(GPUS >= SHARED_RANKS, reason="there is a GPU for every rank")
def test_eight_ranks_that_share_gpus_get_the_same_bits_call_after_call():
    for output in start("megakernel", "layer", **SHARED):
        assert "1000 calls gave the same bits" in output


@pytest.mark.skipif(GPUS >= SHARED_RANKS, reason="there is a GPU for every rank")
def test_eight_ranks_that_share_gpus_add_up_answers_at_experts_to_the_same_bits_call_after_call():
    for output in start("megakernel", "sums", **SHARED):
        assert "1000 calls gave the same bits" in output


@pytest.mark.skipif(GPUS >= SHARED_RANKS, reason="there is a GPU for every rank")
@pytest.mark.parametrize("sums", [(), ("sums",)])
def test_eight_ranks_that_share_gpus_get_outputs_in_few_bits_and_gradients_with_the_same_bits(sums):
    results = [results_of(output) for output in start("few_bits", "expert 8", "megakernel", *sums, **SHARED)]
    assert set(results[0]) == set(IN_8_BITS if sums else BLOCKS)
    assert all(found == results[0] for found in results)


@several_gpus
def test_ranks_in_processes_of_their_own_agree_with_the_reference_call_after_call():
    for output in start("megakernel", "layer"):
        assert "1000 calls gave the same bits" in output


@several_gpus
def test_ranks_in_processes_of_their_own_train_through_exchanges_halves_and_micro_batches_in_turn():
    for output in start("exchange", "megakernel", "300"):
        assert "in turn has the bits of one after the other" in output
        assert "300 calls gave the same bits" in output


@pytest.mark.skipif(GPUS >= SHARED_RANKS, reason="there is a GPU for every rank")
def test_eight_ranks_that_share_gpus_train_through_exchanges_halves_and_micro_batches_in_turn():
    for output in start("exchange", "megakernel", "30", **SHARED):
        assert "30 calls gave the same bits" in output


@several_gpus
def test_a_process_that_forgets_its_programs_gets_the_same_bits_as_before_with_those_that_do_not():
    for output in start("megakernel", "forgetful", waits_s=20):
        assert "the same bits whoever has forgotten" in output


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("devices_per_process", [1, 2, 4])
def test_memory_of_a_group_outlives_the_communicators_that_xla_destroys(devices_per_process):
    for output in start("megakernel", "programs", **in_processes_of(devices_per_process)):
        assert "right: beside a larger group again" in output


def test_of_two_hosts_groups_on_one_each_and_groups_across_both_get_the_megakernel_and_run():
    shared = GPUS if GPUS < 4 else None
    for output in start("hosts", ranks_of_host=2, processes=4, devices_per_process=1, shared_gpus=shared):
        assert_all_are_told(output)
        assert output.count("ran over {'data': 2, 'expert': 2}") == 2


@pytest.mark.parametrize("sizes", [("2", "4"), ("4", "2"), ("1", "4", "2")], ids=" then ".join)
def test_groups_of_different_sizes_over_the_same_devices_get_the_output_of_the_reference(sizes):
    ranks: dict[str, Any] = {"processes": 4, "devices_per_process": 1, "shared_gpus": min(GPUS, 4)}
    for output in start("megakernel", "sizes", *sizes, waits_s=20, **ranks):
        for size in sizes:
            assert output.count(f"groups of {size}: right") == 2


@several_gpus
@pytest.mark.parametrize("sizes", [("1", str(GPUS)), (str(GPUS), "1")], ids=" then ".join)
def test_groups_of_one_and_of_all_over_the_same_devices_get_the_output_of_the_reference(sizes):
    for output in start("megakernel", "sizes", *sizes, waits_s=20):
        for size in sizes:
            assert output.count(f"groups of {size}: right") == 2


@several_gpus
def test_a_rank_that_asks_how_far_its_launches_are_makes_no_context_on_the_gpu_of_another():
    for output in start("megakernel", "progress"):
        [(elsewhere, waited)] = re.findall(
            r"^contexts elsewhere before \[\], after \[(.*)\]; .* (\d+) times", output, re.M
        )
        assert elsewhere == ""
        assert int(waited) > 0


@several_gpus
def test_two_threads_get_right_results_or_an_error_that_names_them():
    [output] = start("megakernel", "threads", waits_s=3, **in_processes_of(GPUS))
    for told in re.findall("thread: (.*)", output):
        too_late = " waited 3 s for " in told or "came within 3 s" in told
        assert told == "100 calls were right" or "two threads of this process" in told or too_late
    assert output.count("thread: ") == 2
