"""Ranks that load a layer of a checkpoint together, and say which experts they have read.

argument 1   the directory of a checkpoint of Mixtral
argument 2   the layer
"""

import sys

import numpy as np
from jax.experimental import multihost_utils

from jaxmoe.convert import from_hf, open_safetensors, to_hf
from tests.multiprocess.rank import join, step
from tests.multiprocess.workers.layer import make_mesh
from tests.unit.checkpoints import Counting


def main() -> None:
    folder, layer = sys.argv[1], int(sys.argv[2])
    join()
    tensors = open_safetensors(folder)
    counting = Counting(tensors)
    weights = from_hf(counting, "mixtral", layer, mesh=make_mesh("expert 8"))
    stem = f"model.layers.{layer}.block_sparse_moe."
    own = set()
    for field, name in (("w_gate", "w1"), ("w_up", "w3"), ("w_down", "w2")):
        for shard in getattr(weights.experts, field).addressable_shards:
            for row, expert in enumerate(range(*shard.index[0].indices(weights.experts.num_experts))):
                own.add(expert)
                wanted = tensors[f"{stem}experts.{expert}.{name}.weight"].T
                np.testing.assert_array_equal(np.asarray(shard.data)[row], wanted)
    for shard in weights.router_kernel.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), tensors[f"{stem}gate.weight"].T)
    step(f"experts of this process: {sorted(own)}")
    step(f"experts read: {sorted({int(name.split('.')[5]) for name in counting.reads if '.experts.' in name})}")
    try:
        to_hf(weights, "mixtral", layer)
    except ValueError as error:
        step(str(error))
    gathered = multihost_utils.process_allgather(weights, tiled=True)
    again = to_hf(gathered, "mixtral", layer)
    assert all(np.array_equal(array, tensors[name]) for name, array in again.items())
    step(f"{len(again)} tensors came back")


if __name__ == "__main__":
    main()
