"""Which ranks of a group are of one host, and which have the same place on every host.

`call.py` asks for the levels of a call; the two ways to move tokens use the groups.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from jaxmoe import reach
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.sharding import ExpertGroup, devices_of_groups


@dataclasses.dataclass(frozen=True)
class Levels:
    """A group of ranks on several hosts. Hosts are numbered as they come in the group, and have equally many ranks.

    Experts are spread over the whole group as without levels, so that those of a host follow each other.

    Args:
      on_host: the ranks of one host.
      across: the ranks of one place, one of each host.
      plan: what travels between hosts and how, with nothing left to choose.
    """

    on_host: ExpertGroup
    across: ExpertGroup
    plan: NetworkPlan

    @property
    def hosts(self) -> int:
        """Of the group."""
        return self.across.size

    def ids_on_host(self, topk_ids: Int[Array, "..."], host: Int[Array, "..."], num_experts: int) -> Int[Array, "..."]:
        """Returns the ids among the experts of a host; -1 where a slot is unused or names another host's expert.

        Args:
          topk_ids: among the experts of the whole group, or -1.
          host: its number, of a shape that goes with that of the ids.
          num_experts: of the whole group.
        """
        of_host = num_experts // self.hosts
        local = topk_ids - host * of_host
        return jnp.where((topk_ids >= 0) & (local >= 0) & (local < of_host), local, -1)


def split(group: ExpertGroup, ranks_per_host: int, mesh: Mesh | AbstractMesh) -> tuple[ExpertGroup, ExpertGroup]:
    """Returns the ranks of one host and those of one place, where each so many ranks that follow each other are a host.

    Args:
      group: all ranks.
      ranks_per_host: divides their number.
      mesh: has the axes of the group.
    """
    hosts, names = group.size // ranks_per_host, group.axis_names
    for last in range(len(names) + 1):
        if math.prod(mesh.shape[name] for name in names[last:]) == ranks_per_host:
            return _of(names[last:], ranks_per_host), _of(names[:last], hosts)
    rows = tuple(tuple(range(host * ranks_per_host, (host + 1) * ranks_per_host)) for host in range(hosts))
    return ExpertGroup(names, ranks_per_host, rows), ExpertGroup(names, hosts, tuple(zip(*rows, strict=True)))


def _of(names: tuple[str, ...], size: int) -> ExpertGroup:
    return ExpertGroup(names, size) if size > 1 else ExpertGroup()


def ranks_per_host(group: ExpertGroup, mesh: Mesh | AbstractMesh | None, stated: int | None) -> int:
    """Returns how many ranks of a group are on one host: all of them where nothing says otherwise.

    Args:
      group: all ranks.
      mesh: what the user passed, if anything.
      stated: by the user, or `None`: then the devices say so. A group whose hosts do not have equally many ranks that
        follow each other counts as one host; `reach.obstacle` then tells why `"megakernel"` is not chosen.

    Raises:
      ValueError: what is stated does not divide the group.
    """
    if stated is not None:
        if stated < group.size and group.size % stated:
            raise ValueError(
                f"moe_layer: network has ranks_per_host={stated}, and the {group.size} ranks of mesh axes "
                f"{group.axis_names}, over which the experts are spread, are no whole number of such hosts. Use a "
                f"divisor of {group.size}."
            )
        return min(stated, group.size)
    groups = None if group.size == 1 else devices_of_groups(group, mesh)
    if groups is None or _is_of_several_cpu_processes(groups):
        return group.size
    found = {_equal_runs(devices) for devices in groups}
    return found.pop() or group.size if len(found) == 1 else group.size


def _is_of_several_cpu_processes(groups: Any) -> bool:
    """Processes of CPUs are for tests, and usually of one machine."""
    return groups.flat[0].platform == "cpu" if hasattr(groups.flat[0], "platform") else False


def _equal_runs(devices: Any) -> int:
    """Returns the devices of each host, where each host has equally many that follow each other; otherwise 0."""
    if len({device.process_index for device in devices}) == 1:
        return len(devices)
    runs = [(host, len(list(run))) for host, run in itertools.groupby(map(reach.host_of, devices))]
    hosts, lengths = {host for host, _ in runs}, {length for _, length in runs}
    return lengths.pop() if len(hosts) == len(runs) and len(lengths) == 1 else 0
