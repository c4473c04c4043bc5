"""What is known of ranks that share experts before anything runs: hosts from JAX, peer access from the driver."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxmoe import machine, reach
from jaxmoe.sharding import ExpertGroup

PAIR = ExpertGroup(("expert",), 2)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """As JAX shows the GPU of a process. `slice_index` is what it calls hosts of GPUs; None: a JAX that does not."""

    process_index: int
    slice_index: int | None = None
    local_hardware_id: int | None = None


def one_process_each(hosts: Sequence[int | None]) -> list[Gpu]:
    return [Gpu(process, host) for process, host in enumerate(hosts)]


@pytest.fixture
def job(monkeypatch):
    """Makes JAX show these devices, in these groups (None: the mesh is abstract), of which some have no peer access."""

    def make(groups: Any, devices: list[Gpu], no_access: Sequence[tuple[int, int]] = (), visible: Any = ()) -> None:
        asked = None if groups is None else np.array(groups, object)
        monkeypatch.setattr(reach, "devices_of_groups", lambda group, mesh: asked)
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "local_devices", lambda: devices)
        monkeypatch.setattr(jax, "process_count", lambda: len({device.process_index for device in devices}))
        monkeypatch.setattr(machine, "visible_gpus", lambda: list(visible))
        monkeypatch.setattr(machine, "peer_access", lambda gpu, peer: (gpu, peer) not in no_access)

    return make


def test_a_rank_alone_has_nobody_to_reach(job):
    job(None, one_process_each([0, 1]), no_access=[(0, 1)], visible=[0, 1])
    assert reach.obstacle(ExpertGroup(), None) == ""


def test_groups_that_lie_on_one_of_several_hosts_each_reach_their_peers(job):
    a, b, c, d = gpus = one_process_each([0, 0, 1, 1])
    job([[a, b], [d, c]], gpus)
    assert reach.obstacle(PAIR, None) == ""


def test_one_group_on_two_hosts_is_enough_of_an_obstacle(job):
    a, b, c, d, e, f = gpus = one_process_each([0, 0, 0, 1, 1, 1])
    job([[a, b], [c, d], [e, f]], gpus)
    expected = "a group of ranks has devices of 2 hosts, and 'megakernel' takes groups of one host"
    assert reach.obstacle(PAIR, None) == expected


def test_where_the_mesh_is_abstract_several_hosts_are_an_obstacle_and_one_is_none(job):
    job(None, one_process_each([0, 0, 1, 1]))
    told = reach.obstacle(PAIR, None)
    for part in ("devices of 2 hosts", "abstract mesh", "pass the jax.sharding.Mesh as mesh=", "name the impl"):
        assert part in told
    job(None, one_process_each([0, 0, 0, 0]))
    assert reach.obstacle(PAIR, None) == ""


def test_devices_of_one_process_are_on_one_host_whatever_number_they_were_given(job):
    gpus = [Gpu(0, 0, 0), Gpu(0, 1, 1)]
    job([gpus], gpus)
    assert reach.obstacle(PAIR, None) == ""


@pytest.mark.parametrize("number", [None, -1])
def test_a_process_counts_as_a_host_where_jax_has_no_number_for_that(job, number):
    a, b, *_ = gpus = one_process_each([number, number])
    job([[a, b]], gpus)
    told = reach.obstacle(PAIR, None)
    assert "2 processes, of which JAX does not say whether they share a host" in told
    both_of_one = [Gpu(0, number, 0), Gpu(0, number, 1)]
    job([both_of_one], both_of_one)
    assert reach.obstacle(PAIR, None) == ""


def test_gpus_without_access_to_each_other_are_named(job):
    gpus = [Gpu(0, 0, number) for number in (0, 1, 4, 5)]
    job([gpus[:2], gpus[2:]], gpus, no_access=[(5, 4)])
    assert reach.obstacle(PAIR, None) == "GPU 5 has no access to the memory of GPU 4, and 'megakernel' needs it"


def test_one_process_asks_for_pairs_of_one_group_alone_or_for_all_where_the_mesh_is_abstract(job):
    gpus = [Gpu(0, 0, number) for number in range(4)]
    across = [(0, 2), (2, 0), (1, 3), (3, 1), (0, 3), (3, 0), (1, 2), (2, 1)]
    job([gpus[:2], gpus[2:]], gpus, no_access=across)
    assert reach.obstacle(PAIR, None) == ""
    job(None, gpus, no_access=across)
    assert "GPU 0 has no access to the memory of GPU 2" in reach.obstacle(PAIR, None)


def test_several_processes_ask_for_all_gpus_that_they_see_since_those_of_others_are_among_them(job):
    a, b = gpus = [Gpu(0, 0, 0), Gpu(1, 0, None)]
    job([[a, b]], gpus, no_access=[(6, 7)], visible=[6, 7])
    assert reach.obstacle(PAIR, None) == "GPU 6 has no access to the memory of GPU 7, and 'megakernel' needs it"
    job([[a, b]], gpus, visible=[6])  # that sees one alone has nothing to ask
    assert reach.obstacle(PAIR, None) == ""
