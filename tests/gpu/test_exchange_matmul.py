"""Halves of a layer by the GPU kernels: the suite of all implementations, and thousands of them on one arena."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import machine
from jaxmoe.testing import dense, make_inputs, relative_error, tolerance
from tests.layer_calls import gradients_of, mesh_of, widened
from tests.matmul_suite import KernelSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]


class TestKernels(KernelSuite):
    """Experts of several row tiles, some of them narrow, and columns that fill no tile."""

    dtype = jnp.bfloat16
    hidden, inner, width, tokens = 192, 712, 328, 1280

    def test_an_activation_of_ones_own_between_the_halves_is_a_layer_to_the_tolerance_of_16_bits(self):
        sizes: dict[str, Any] = {"tokens": 256, "num_experts": 8, "top_k": 3, "hidden": 256, "intermediate": 128}
        arguments = make_inputs(9, **sizes, routing="zipf", dtype=jnp.bfloat16)

        def own(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            both = jnp.concatenate([experts.w_gate, experts.w_up], -1)
            arrived = self.dispatch_matmul(x, ids, both)
            gate, up = jnp.split(arrived.rows.astype(jnp.float32), 2, -1)
            h = (jax.nn.silu(gate) * up).astype(x.dtype)
            return jaxmoe.matmul_combine(h, experts.w_down, weights, arrived.handle)

        split = P("expert")
        sharded = jax.shard_map(own, mesh=mesh_of("expert"), in_specs=split, out_specs=split)
        run = lambda arguments: sharded(*arguments[:4])  # noqa: E731
        for compiled in (jax.jit, gradients_of):
            found, truth = compiled(run)(arguments), compiled(dense)(widened(arguments))
            rough = compiled(lambda arguments: dense(arguments, compute_dtype=jnp.bfloat16))(arguments)
            for got, want, low in zip(*map(jax.tree.leaves, (found, truth, rough)), strict=True):
                assert relative_error(got, want) <= 1.5 * tolerance(low, want, jnp.bfloat16)


class TestKernelsInF16(KernelSuite):
    """Of decode batches: experts with few rows."""

    dtype = jnp.float16
    hidden, inner, width = 128, 264, 512


def test_halves_and_layers_of_changing_sizes_follow_each_other_on_one_arena_with_the_same_bits():
    mesh, programs = mesh_of("expert"), []
    for seed, (tokens, hidden, experts) in enumerate([(64, 128, 8), (8, 256, 8), (1024, 128, 16)]):
        of_size = {"num_experts": experts, "top_k": 3, "hidden": hidden, "intermediate": 192, "dtype": jnp.bfloat16}
        x, ids, weights, matrices, _ = make_inputs(seed, tokens=tokens, routing="zipf", **of_size)

        def all_of_them(x: Any, ids: Any, weights: Any, matrices: Any, capacity: int = 2 * tokens) -> Any:
            options = {"mesh": mesh, "implementation": "megakernel", "capacity": capacity, "alignment": 8}
            arrived = jaxmoe.dispatch_matmul(x, ids, matrices.w_gate, **options)
            y = jaxmoe.matmul_combine(jax.nn.relu(arrived.rows), matrices.w_down, weights, arrived.handle)
            layer = jaxmoe.moe_layer(x, ids, weights, matrices, mesh=mesh, implementation="megakernel")
            return arrived.rows, arrived.dropped_rows, y, layer

        compiled = jax.jit(all_of_them).lower(x, ids, weights, matrices).compile()
        placed = jax.tree.map(jax.device_put, (x, ids, weights, matrices), compiled.input_shardings[0])
        programs.append((compiled, placed, jax.device_get(compiled(*placed))))
    assert any(results[1].any() for _, _, results in programs), "no row was dropped"
    order = np.random.default_rng(0).integers(0, len(programs), 1500)
    for start in range(0, len(order), 100):
        results = [(number, programs[number][0](*programs[number][1])) for number in order[start : start + 100]]
        for number, result in results:
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), programs[number][2])


def test_halves_run_beside_collectives_that_do_not_depend_on_them():
    """As losses and gradients of a training step do, whose collectives XLA may put on streams of their own."""
    mesh = mesh_of("expert")
    x, ids, weights, experts, _ = make_inputs(
        1, tokens=1024, num_experts=16, top_k=4, hidden=512, intermediate=256, routing="uniform", dtype=jnp.bfloat16
    )

    def step(x: Any, ids: Any, weights: Any, experts: Any, other: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            x, other = carry
            arrived = jaxmoe.dispatch_matmul(x, ids, experts.w_gate, implementation="megakernel")
            other = jax.lax.psum(other, "expert") / mesh.size
            gathered = jax.lax.all_gather(other, "expert", tiled=True)
            y = jaxmoe.matmul_combine(jax.nn.relu(arrived.rows), experts.w_down, weights, arrived.handle)
            return (y, jax.lax.psum_scatter(gathered, "expert", tiled=True) / mesh.size), None

        return jax.lax.scan(one, (x, other), length=50)[0]

    split = P("expert")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split))
    other = jnp.ones((2048, 64), jnp.float32)
    first = jax.device_get(sharded(x, ids, weights, experts, other))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded(x, ids, weights, experts, other)), first)
