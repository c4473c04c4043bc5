"""Ranks that compare `moe_layer` with experts in 8 or 4 bits over several processes with sums in float64, which each
computes for itself.

    argument 1   the mesh over all devices, as of the worker `layer`
    argument 2   the implementation
    argument 3   if given, "sums": only tokens in 8 bits, and answers are added up at experts before they travel

Experts are quantised where they lie, split over the processes, and come out as those that one process quantises alone.
Every rank compares outputs and gradients of tokens and routing weights, and prints a digest of them, so that the test
can compare processes.
"""

import functools
import hashlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.options import Arguments
from jaxmoe.testing import make_inputs, relative_error
from tests.layer_calls import SUMS, cotangent
from tests.multiprocess.rank import join, step
from tests.multiprocess.workers.layer import make_mesh, shards, spread
from tests.quantized_layer import assert_as_exact

SIZES: dict[str, Any] = {"tokens": 64, "hidden": 128, "intermediate": 256, "num_experts": 16, "top_k": 3}
# What experts are quantised to, for each precision.
BLOCKS = {"fp8": "128x128", "fp8-e8m0": "128x128", "fp8-static": "expert", "w8a16": "channel", "w4a16": "mxfp4"}
IN_8_BITS = ("fp8", "fp8-e8m0", "fp8-static")
CALLS = 10


def quantized(precision: str, experts: jaxmoe.Experts) -> jaxmoe.Experts:
    scale_dtype = jnp.float8_e8m0fnu if precision == "fp8-e8m0" else None
    found = jaxmoe.quantize(experts, BLOCKS[precision], scale_dtype=scale_dtype)
    return jaxmoe.with_input_scales(found, 5 / 448, 9 / 448) if precision == "fp8-static" else found


def check(precision: Any, mesh: Mesh, implementation: Any, plan: jaxmoe.KernelPlan | None) -> None:
    local = make_inputs(1, **SIZES, biases=precision == "w4a16", routing="zipf", dtype=jnp.bfloat16)
    given = spread(local, mesh)
    quantize = jax.jit(functools.partial(quantized, precision))
    narrow, alone = quantize(given.experts), quantize(local.experts)
    for (where, place, value), whole in zip(shards(narrow), _repeated(alone, narrow), strict=True):
        assert value.tobytes() == np.asarray(whole)[place].tobytes(), f"{precision}: other bits in {where}{place}"

    everywhere = NamedSharding(mesh, P())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def program(arguments: Arguments) -> Any:
        def loss(x: jax.Array, weights: jax.Array) -> Any:
            y = jaxmoe.moe_layer(
                x,
                arguments.topk_ids,
                weights,
                arguments.experts,
                mesh=mesh,
                data_axes=mesh.axis_names[:-1],
                implementation=implementation,
                precision=precision,
                plan=plan,
            )
            return jnp.sum(y.astype(jnp.float32) * cotangent(y)), y

        gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(arguments.x, arguments.topk_weights)
        return y, *gradients

    results = [
        [np.asarray(leaf.addressable_data(0)) for leaf in program(given._replace(experts=narrow))] for _ in range(CALLS)
    ]
    y, *gradients = results[0]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        exact = local._replace(experts=alone)
        assert_as_exact(y, exact, precision)
        # Of the layer that rounds nothing, with the decoded experts.
        wide = local._replace(experts=jaxmoe.dequantize(alone, jnp.float32), x=local.x.astype(jnp.float32))

        def reference(x: jax.Array, weights: jax.Array) -> jax.Array:
            y = jaxmoe.moe_layer(x, wide.topk_ids, weights, wide.experts, axis_name=None, implementation="reference")
            return jnp.sum(y * cotangent(y))

        for found, wanted in zip(gradients, jax.grad(reference, (0, 1))(wide.x, wide.topk_weights), strict=True):
            error = relative_error(found, wanted)
            assert error < 2e-2, f"{precision}: error {error:.2e} of gradients"
    for call in results:
        assert [leaf.tobytes() for leaf in call] == [leaf.tobytes() for leaf in results[0]], f"{precision}: other bits"
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in results[0])).hexdigest()
    step(f"{precision}: near the sums in float64, {CALLS} calls gave the bits {digest}")


def _repeated(alone: Any, narrow: Any) -> list[Any]:
    """Returns each whole array as often as this process has shards of it."""
    pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(narrow), strict=True)
    return [whole for whole, split in pairs for _ in split.addressable_shards]


def main() -> None:
    join()
    name, implementation, *sums = sys.argv[1:]
    assert sums in ([], ["sums"]), sums
    mesh = make_mesh(name)
    for precision in IN_8_BITS if sums else BLOCKS:
        check(precision, mesh, implementation, SUMS if sums else None)


if __name__ == "__main__":
    main()
