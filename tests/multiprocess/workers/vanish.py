"""Ranks of which the last one ends, as the argument says, while the others wait for it in a collective."""

import os
import signal
import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multiprocess.rank import join, step


def main() -> None:
    rank = join()
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()))
    values = np.arange(jax.device_count(), dtype=np.float32)
    x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("all")), values.__getitem__)
    step(f"sum {float(total(x)[0]):g}")
    if rank.index == rank.processes - 1:
        match sys.argv[1]:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("wrong result")
            case "exits":
                sys.exit("wrong result")
    total(x).block_until_ready()
    step("the sum over a dead rank has a value")


if __name__ == "__main__":
    main()
