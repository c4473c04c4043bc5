"""Ranks of two hosts, two processes each, that say what `implementation=None` chooses on several meshes and why.

On GPUs, where `JAX_PARTITION_INDEX` makes hosts of the processes, they also run what is chosen. On CPUs the process
makes itself look like one of another host, and is told that its devices are GPUs that can run everything: what is left
is what JAX says of hosts.
"""

import functools
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import machine, sharding
from jaxmoe.implementations.megakernel import limits
from jaxmoe.network import levels
from jaxmoe.options import Arguments
from jaxmoe.testing import dense, make_inputs
from tests.layer_calls import widened
from tests.multiprocess.rank import join, look_like_host, step, this_rank
from tests.multiprocess.workers.layer import check, spread


@functools.cache
def arguments() -> Arguments:
    return make_inputs(0, tokens=256, hidden=64, intermediate=96, num_experts=8, top_k=2, dtype=jnp.bfloat16)


def tell(case: str, *arrays: Any, **options: Any) -> None:
    told = jaxmoe.explain(*(arrays or arguments()[:4]), **options)
    levels = told.call.levels
    hosts = "one level" if levels is None else f"{levels.hosts} hosts x {levels.on_host.size} ranks"
    step(f"{case}: {told.call.implementation_reason} [{hosts}]")


def choices(within: Mesh, across: Mesh) -> None:
    tell("groups within hosts", mesh=within, data_axes="data")
    tell("groups across hosts", mesh=across, data_axes="data")
    tell("all devices", mesh=Mesh(within.devices.flatten(), ("expert",)))
    tell("no groups", axis_name=None)
    for name, mesh in (("within", within), ("across", across)):

        def in_jit(*arrays: Any, name: str = name) -> jax.Array:
            tell(f"groups {name} hosts, set, in jit", *arrays, data_axes="data")
            return arrays[0]

        def in_shard_map(*arrays: Any, name: str = name, mesh: Mesh = mesh) -> jax.Array:
            tell(f"groups {name} hosts, in shard_map", *arrays)
            tell(f"groups {name} hosts, in shard_map, passed", *arrays, mesh=mesh)
            return arrays[0]

        with jax.set_mesh(mesh):
            jax.jit(in_jit).trace(*arguments()[:4])
        rows, experts = P(("data", "expert")), P("expert")
        specs: Any = dict(in_specs=(rows, rows, rows, experts), out_specs=rows)
        jax.jit(jax.shard_map(in_shard_map, mesh=mesh, **specs)).trace(*arguments()[:4])


def run(mesh: Mesh) -> None:
    """The layer that is chosen on a mesh."""
    inputs = spread(arguments(), mesh)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *arrays: jaxmoe.moe_layer(*arrays, data_axes="data"))(*inputs[:4])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        here = jax.tree.map(np.asarray, arguments())
        check(y, dense(widened(here)), dense(here, compute_dtype=jnp.bfloat16))
    step(f"ran over {dict(mesh.shape)}")


def main() -> None:
    rank = this_rank()
    if rank.gpus is None and (hindrance := look_like_host(rank.index // 2)):
        step(f"cannot look like another host: {hindrance}")
        sys.exit()
    join()
    devices = np.array(sorted(jax.devices(), key=lambda device: device.process_index)).reshape(2, 2)
    within, across = Mesh(devices, ("data", "expert")), Mesh(devices.T, ("data", "expert"))
    if rank.gpus is not None:
        choices(within, across)
        run(within)
        run(across)
        return
    with (
        mock.patch.object(sharding, "platform", return_value="gpu"),
        mock.patch.object(limits, "check_megakernel"),
        mock.patch.object(machine, "visible_gpus", return_value=[]),
        mock.patch.object(levels, "_is_of_several_cpu_processes", return_value=False),
    ):
        choices(within, across)


if __name__ == "__main__":
    main()
