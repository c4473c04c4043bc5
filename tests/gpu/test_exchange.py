"""Dispatch and combine by the GPU kernels: the suite of all implementations, and thousands of them on one arena."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import machine
from jaxmoe.testing import dense, make_ids, make_inputs, relative_error, tolerance
from tests.exchange_suite import ExchangeSuite
from tests.layer_calls import gradients_of, mesh_of, widened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]


class TestKernels(ExchangeSuite):
    implementation = "megakernel"
    dtype = jnp.bfloat16
    outputs_dtype = jnp.float16
    other_dtypes: ClassVar = {"one rank": (jnp.float16, jnp.bfloat16)}
    hidden = 128  # so that rows in 8 bits have whole blocks

    def test_a_scan_over_checkpointed_layers_of_ones_own_gives_what_moe_layer_gives(self):
        """In 16 bits, which is what the kernels take; with gradients, and with the tolerance of that."""
        sizes: dict[str, Any] = {"tokens": 256, "num_experts": 8, "top_k": 3, "hidden": 256, "intermediate": 128}
        arguments = make_inputs(9, **sizes, routing="zipf", dtype=jnp.bfloat16)

        def own(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            @jax.checkpoint
            def layer(x: Any) -> Any:
                arrived = self.dispatch(x, ids, num_experts=8, alignment=8)
                times = functools.partial(jax.lax.ragged_dot, group_sizes=arrived.group_sizes)
                gate, up = times(arrived.rows, experts.w_gate), times(arrived.rows, experts.w_up)
                h = (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(x.dtype)
                return jaxmoe.combine(times(h, experts.w_down), weights, arrived.handle)

            return layer(x)

        split = P("expert")
        sharded = jax.shard_map(own, mesh=mesh_of("expert"), in_specs=split, out_specs=split)
        run = lambda arguments: sharded(*arguments[:4])  # noqa: E731
        for compiled in (jax.jit, gradients_of):
            found, truth = compiled(run)(arguments), compiled(dense)(widened(arguments))
            rough = compiled(functools.partial(dense, compute_dtype=jnp.bfloat16))(arguments)
            for got, want, low in zip(*map(jax.tree.leaves, (found, truth, rough)), strict=True):
                assert relative_error(got, want) <= tolerance(low, want, jnp.bfloat16)


def test_layers_and_dispatches_of_changing_sizes_follow_each_other_on_one_arena_with_the_same_bits():
    """Each launch clears the counters of the next one, and none waits for a barrier at its end."""
    mesh = mesh_of("expert")
    sizes = [(64, 128, 8), (8, 256, 8), (512, 128, 16)]
    programs = []
    for seed, (tokens, hidden, experts) in enumerate(sizes):
        of_size = {"num_experts": experts, "top_k": 3, "hidden": hidden, "intermediate": 64, "dtype": jnp.bfloat16}
        x, ids, weights, matrices, _ = make_inputs(seed, tokens=tokens, routing="zipf", **of_size)

        def both(x, ids, weights, matrices, experts=experts):
            arrived = jaxmoe.dispatch(x, ids, num_experts=experts, mesh=mesh, implementation="megakernel")
            y = jaxmoe.combine(arrived.rows, weights, arrived.handle)
            return y, jaxmoe.moe_layer(x, ids, weights, matrices, mesh=mesh, implementation="megakernel")

        compiled = jax.jit(both).lower(x, ids, weights, matrices).compile()
        placed = jax.tree.map(jax.device_put, (x, ids, weights, matrices), compiled.input_shardings[0])
        programs.append((compiled, placed, jax.device_get(compiled(*placed))))
    order = np.random.default_rng(0).integers(0, len(programs), 1500)
    for start in range(0, len(order), 100):
        results = [(number, programs[number][0](*programs[number][1])) for number in order[start : start + 100]]
        for number, result in results:
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), programs[number][2])


def test_a_dispatch_runs_beside_collectives_that_do_not_depend_on_it():
    """As losses and gradients of a training step do, whose collectives XLA may put on streams of their own."""
    mesh = mesh_of("expert")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((1024, 1024)), jnp.bfloat16)
    ids = jnp.asarray(make_ids(rng, 1024, 16, 4, "uniform"))
    weights = jnp.full(ids.shape, 0.25, jnp.float32)

    def step(x, ids, weights, other):
        def one(carry, _):
            x, other = carry
            arrived = jaxmoe.dispatch(x, ids, num_experts=16, implementation="megakernel")
            other = jax.lax.psum(other, "expert") / mesh.size
            gathered = jax.lax.all_gather(other, "expert", tiled=True)
            y = jaxmoe.combine(arrived.rows, weights, arrived.handle)
            return (y, jax.lax.psum_scatter(gathered, "expert", tiled=True) / mesh.size), None

        return jax.lax.scan(one, (x, other), length=50)[0]

    split = P("expert")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split))
    other = jnp.ones((2048, 64), jnp.float32)
    first = jax.device_get(sharded(x, ids, weights, other))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded(x, ids, weights, other)), first)
    np.testing.assert_array_equal(first[0], x)  # weights add up to one, and powers of two are exact
