"""A dispatch and a combine that are started beside the experts of another micro-batch, by the GPU kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import machine
from jaxmoe.testing import make_ids
from tests.layer_calls import mesh_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 1024, 1024, 512, 16, 4


def arrays(seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5, jnp.bfloat16)

    ids = jnp.asarray(make_ids(rng, TOKENS, EXPERTS, TOP_K, "zipf"))
    weights = jnp.asarray(rng.random((TOKENS, TOP_K)), jnp.float32)
    matrices = normal(EXPERTS, HIDDEN, INTERMEDIATE), normal(EXPERTS, INTERMEDIATE, HIDDEN)
    return normal(TOKENS, HIDDEN) * 30, normal(TOKENS, HIDDEN) * 30, ids, weights, *matrices


def experts(rows: Any, first: Any, second: Any) -> Any:
    return jnp.einsum("eci,eio->eco", jax.nn.relu(jnp.einsum("eci,eio->eco", rows, first)), second)


def in_turn(x: Any, other: Any, ids: Any, weights: Any, first: Any, second: Any, beside: int | None) -> Any:
    """Two micro-batches through experts of one's own, one beside the other or one after the other."""
    options: dict[str, Any] = {"num_experts": EXPERTS, "capacity": 512, "per_expert": True}
    compute = lambda sent: experts(sent.rows, first, second)  # noqa: E731
    if beside is None:
        sent = [jaxmoe.dispatch(each, ids, **options) for each in (x, other)]
        return tuple(jaxmoe.combine(compute(each), weights, each.handle) for each in sent)
    options["multiprocessors"] = beside
    one = jaxmoe.start_dispatch(x, ids, **options).finish()
    outputs, two = jaxmoe.start_dispatch(other, ids, **options).beside(compute, one)
    others, y = jaxmoe.start_combine(outputs, weights, one.handle, multiprocessors=beside).beside(compute, two)
    return y, jaxmoe.start_combine(others, weights, two.handle, multiprocessors=beside).finish()


def on_ranks(function: Any) -> Any:
    split = P("expert")
    return jax.jit(jax.shard_map(function, mesh=mesh_of("expert"), in_specs=split, out_specs=split))


@pytest.mark.parametrize("multiprocessors", [2, 24, 64])
def test_two_micro_batches_beside_each_other_have_the_bits_of_one_after_the_other(multiprocessors):
    given = arrays()
    together, apart = (on_ranks(functools.partial(in_turn, beside=beside)) for beside in (multiprocessors, None))
    expected = jax.device_get(apart(*given))
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(together(*given)), expected)


def test_gradients_have_the_same_bits_in_a_scan_over_checkpointed_layers():
    given = arrays(1)

    def loss(beside: int | None) -> Any:
        def of_rank(*given: Any) -> Any:
            def layer(carry: Any, _: Any) -> Any:
                ys = in_turn(*carry, *given[2:], beside=beside)
                return tuple(jnp.tanh(before + y) for before, y in zip(carry, ys, strict=True)), None

            return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), given[:2], length=3)[0]

        sharded = jax.shard_map(of_rank, mesh=mesh_of("expert"), in_specs=P("expert"), out_specs=P("expert"))
        return lambda *given: sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in sharded(*given))

    together, apart = (jax.jit(jax.value_and_grad(loss(beside), argnums=(0, 1, 3, 4, 5))) for beside in (24, None))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(together(*given)), jax.device_get(apart(*given)))


def test_an_array_that_xla_has_copied_in_between_is_told_and_not_read():
    """Outside of jit each part is a program of its own, and XLA copies what the finish returns."""
    x, _, ids, *_ = arrays()
    started = jaxmoe.start_dispatch(x, ids, num_experts=EXPERTS, axis_name=None, implementation="megakernel")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"not where they were.*same jax\.jit"):
        jax.block_until_ready(started.finish().rows)
    # What was started has ended meanwhile, and the next call runs as if nothing had been.
    rows = jaxmoe.dispatch(x, ids, num_experts=EXPERTS, axis_name=None, implementation="megakernel").rows
    assert np.asarray(rows, np.float32).any()


def test_started_kernels_run_beside_collectives_and_layers():
    given = arrays(2)

    def step(*given: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            x, other, sums = carry
            y, z = in_turn(x, other, *given[2:], beside=24)
            sums = jax.lax.psum(sums, "expert") / mesh_of("expert").size
            gathered = jax.lax.all_gather(sums, "expert", tiled=True)
            y = jaxmoe.moe_layer(
                y, given[2], given[3], jaxmoe.Experts(given[4], None, given[5]), implementation="megakernel"
            )
            scattered = jax.lax.psum_scatter(gathered, "expert", tiled=True) / mesh_of("expert").size
            return (jnp.tanh(y), jnp.tanh(z), scattered), None

        return jax.lax.scan(one, (*given[:2], jnp.ones((2048, 64)) + given[3][:1, :1]), length=20)[0]

    sharded = on_ranks(step)
    first = jax.device_get(sharded(*given))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(sharded(*given)), first)
