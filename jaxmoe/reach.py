"""Whether the ranks that share experts reach each other's memory, as far as it is known before anything runs.

`call.py` asks for GPUs where no implementation is named. All processes of a job compile one program, so all of them
have to get the same answer: it follows from what JAX tells each of them about all devices, and from the GPUs of its
host. A group that turns out not to reach its peers gets an error from compiled code (ffi/cuda/host/symmetric_memory.h).
"""

import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmoe import machine
from jaxmoe.sharding import ExpertGroup, devices_of_groups


def obstacle(group: ExpertGroup, mesh: Mesh | AbstractMesh | None) -> str:
    """Returns why GPUs of one group may not reach each other's memory; empty where nothing that is known says so.

    Args:
      group: the ranks of the experts.
      mesh: what the user passed, if anything.
    """
    if group.size == 1:
        return ""
    groups = devices_of_groups(group, mesh)
    return _several_hosts(groups) or _no_access(groups)


def _several_hosts(groups: np.ndarray | None) -> str:
    needed = "'megakernel' takes groups of one host"
    if groups is not None:
        most = max(map(_hosts, groups), key=len)
        return f"a group of ranks has devices of {_counted(most)}, and {needed}" if len(most) > 1 else ""
    hosts = _hosts(jax.devices())
    if len(hosts) == 1:
        return ""
    return (
        f"there are devices of {_counted(hosts)}, {needed}, and an abstract mesh does not say which devices those "
        "have: pass the jax.sharding.Mesh as mesh=, or network=jaxmoe.NetworkPlan(ranks_per_host=...), or name the "
        "implementation"
    )


def _hosts(devices: Any) -> set[tuple[str, int]]:
    """Returns a name for each host that has one of the devices."""
    if len({device.process_index for device in devices}) == 1:  # which runs on one, whatever number it was given
        return {("host", 0)}
    return {host_of(device) for device in devices}


def host_of(device: Any) -> tuple[str, int]:
    """Returns a name of the device's host that all processes agree on.

    It is the number that JAX gives a host by its boot id, which the processes tell each other when GPUs are first used.
    Two things make it another number than that of a host: GPUs of several hosts on one NVLink fabric, which share
    theirs, and `jax.distributed.initialize(partition_index=...)`, which sets it. Where devices have no such number
    every process counts as a host.
    """
    number = getattr(device, "slice_index", None)
    return ("host", number) if isinstance(number, int) and number >= 0 else ("process", device.process_index)


def _counted(hosts: set[tuple[str, int]]) -> str:
    if any(kind == "process" for kind, _ in hosts):
        return f"{len(hosts)} processes, of which JAX does not say whether they share a host"
    return f"{len(hosts)} hosts"


def _no_access(groups: np.ndarray | None) -> str:
    """Asks the driver, which knows the GPUs that this process sees.

    A single process asks for those of each group. Of several, which may have one GPU each, every process asks for all
    GPUs that it sees and that could be in a group, so that processes of equal hosts get equal answers.
    """
    if jax.process_count() > 1:
        asked = [machine.visible_gpus()]
    else:
        asked = [[device.local_hardware_id for device in group] for group in _or_all(groups)]
    for gpus in asked:
        for gpu, peer in itertools.permutations(gpus, 2):
            if not machine.peer_access(gpu, peer):
                return f"GPU {gpu} has no access to the memory of GPU {peer}, and 'megakernel' needs it"
    return ""


def _or_all(groups: np.ndarray | None) -> Any:
    return [jax.local_devices()] if groups is None else groups
