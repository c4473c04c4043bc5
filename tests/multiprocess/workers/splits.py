"""Ranks whose experts are split inside: gathered over axis "fsdp", computed in parts over axis "tensor".

    argument 1   the implementation
    argument 2   how gate and up lie: "apart", "halves" or "interleaved"

Each process compares its shards of outputs and gradients with the dense reference, as in `layer.py`. Halves have no
parts, so they are split over "fsdp" alone.
"""

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.experts import arrays_of
from jaxmoe.options import Arguments
from jaxmoe.testing import ROUTING_KINDS, make_inputs
from tests.multiprocess.rank import join, step
from tests.multiprocess.workers.layer import DTYPES, check_bits, check_routings, outputs_and_gradients

# A part of the intermediate dimension is a multiple of 8, and fills no tile.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 64, "hidden": 24, "intermediate": 40, "num_experts": 8, "top_k": 3},
    "gpu": {"tokens": 1024, "hidden": 256, "intermediate": 400, "num_experts": 16, "top_k": 3},
}
SPECS = {
    "w_gate": P("expert", "fsdp", "tensor"),
    "w_up": P("expert", "fsdp", "tensor"),
    "w_gate_up": P("expert", "fsdp", "tensor"),
    "w_down": P("expert", "tensor", "fsdp"),
    "b_gate": P("expert", "tensor"),
    "b_up": P("expert", "tensor"),
    "b_gate_up": P("expert", "tensor"),
    "b_down": P("expert", "fsdp"),
}
CALLS = 20


def spread(arguments: Arguments, mesh: Mesh) -> Arguments:
    """Global arrays of which each process gives its part of `arguments`."""

    def put(array: Any, spec: P) -> Any:
        if array is None:
            return None
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)

    arrays = {name: put(array, SPECS[name]) for name, array in arrays_of(arguments.experts).items()}
    if isinstance(arguments.experts, jaxmoe.FusedExperts):
        experts: Any = jaxmoe.FusedExperts(**arrays, layout=arguments.experts.layout)
    else:
        experts = jaxmoe.Experts(**arrays)
    tokens = (put(array, P(("fsdp", "expert"))) for array in (*arguments[:3], arguments.token_valid))
    x, ids, weights, valid = tokens
    return Arguments(x, ids, weights, experts, valid)


def main() -> None:
    join()
    implementation, layout = sys.argv[1:]
    platform, count = jax.default_backend(), jax.device_count()
    sizes = (count // 2, 2, 1) if layout == "halves" else (count // 4, 2, 2)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(sizes), ("fsdp", "expert", "tensor"))

    def layer(arguments: Arguments) -> Any:
        x, ids, weights, experts, valid = arguments
        axes = {"data_axes": "fsdp", "hidden_axis": "fsdp", "intermediate_axis": "tensor" if sizes[-1] > 1 else None}
        options: dict[str, Any] = {"mesh": mesh, "implementation": implementation, "token_valid": valid, **axes}
        return jaxmoe.moe_layer(x, ids, weights, experts, return_stats=True, **options)

    structure: dict[str, Any] = {"biases": True, "token_valid": True, "dtype": DTYPES[platform]}
    structure["layout"] = None if layout == "apart" else layout
    local = [make_inputs(seed, **SIZES[platform], **structure, routing=kind) for seed, kind in enumerate(ROUTING_KINDS)]
    inputs = [spread(arguments, mesh) for arguments in local]
    program = jax.jit(outputs_and_gradients(layer)).lower(inputs[0]).compile()
    step("compiled")
    results = [program(inputs[call % len(inputs)]) for call in range(CALLS)]
    jax.block_until_ready(results)
    step(f"{CALLS} calls ended")
    gradients, experts = results[0][1][2], inputs[0].experts
    for got, array in zip(jax.tree.leaves(gradients), jax.tree.leaves(experts), strict=True):
        assert got.sharding.is_equivalent_to(array.sharding, array.ndim), "gradients lie otherwise than experts"
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for kind, number in check_routings(DTYPES[platform], local, results).items():
            step(f"{kind}: {number} shards near the reference")
    check_bits(results, len(inputs))


if __name__ == "__main__":
    main()
