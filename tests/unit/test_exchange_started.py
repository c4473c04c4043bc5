"""A dispatch and a combine that other work can run beside: what both return, on CPUs, where nothing runs beside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import make_ids
from tests.exchange_suite import assert_maps_are_refused
from tests.layer_calls import mesh_of

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 24, 8, 2
IMPLEMENTATIONS = ("reference", "xla", "megakernel")


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    tokens = (jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.float32) for _ in range(2))
    ids = jnp.asarray(make_ids(rng, TOKENS, EXPERTS, TOP_K, "unused-slots"))
    weights = jnp.asarray(rng.random((TOKENS, TOP_K)), jnp.float32)
    return *tokens, ids, weights, jnp.asarray(rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)), jnp.float32)


def in_turn(x: Any, other: Any, ids: Any, weights: Any, matrices: Any, beside: bool, **options: Any) -> Any:
    """Two micro-batches, one beside the other or one after the other."""

    def experts(sent: jaxmoe.Dispatched) -> Any:
        return jnp.tanh(jax.lax.ragged_dot(sent.rows, matrices, sent.group_sizes))

    options |= {"num_experts": EXPERTS, "capacity": 20, "alignment": 4}
    if not beside:
        sent = [jaxmoe.dispatch(each, ids, **options) for each in (x, other)]
        return tuple(jaxmoe.combine(experts(each), weights, each.handle) for each in sent)
    first = jaxmoe.start_dispatch(x, ids, **options).finish()
    outputs, second = jaxmoe.start_dispatch(other, ids, **options).beside(experts, first)
    others, y = jaxmoe.start_combine(outputs, weights, first.handle, multiprocessors=8).beside(experts, second)
    return y, jaxmoe.start_combine(others, weights, second.handle).finish()


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_beside_the_other_gives_what_one_after_the_other_gives_with_gradients(implementation):
    given, mesh = arrays(), mesh_of("data", "expert")

    def both(beside: bool) -> Any:
        def of_rank(*given: Any) -> Any:
            def layer(carry: Any, _: Any) -> Any:
                ys = in_turn(*carry, *given[2:], beside=beside, implementation=implementation)
                return tuple(before + y for before, y in zip(carry, ys, strict=True)), None

            return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), given[:2], length=2)[0]

        split = P(("data", "expert"))
        specs = split, split, split, split, P("expert")
        sharded = jax.shard_map(of_rank, mesh=mesh, in_specs=specs, out_specs=split)
        loss = lambda *given: sum(jnp.sum(jnp.sin(y)) for y in sharded(*given))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 3, 4)))

    found, truth = both(True)(*given), both(False)(*given)
    assert all(np.asarray(gradient).any() for gradient in truth[1])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), found, truth)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_outside_of_shard_map_rows_in_8_bits_come_back_too(implementation):
    x, _, ids, _, _ = arrays()
    x = jnp.tile(x, (1, 16))[:, :256]
    options: dict[str, Any] = {"num_experts": EXPERTS, "precision": "fp8", "mesh": mesh_of("expert")}
    options["implementation"] = implementation

    @jax.jit
    def both(x: Any) -> Any:
        squared, sent = jaxmoe.start_dispatch(x, ids, **options).beside(jnp.square, x)
        return squared, sent, jaxmoe.dispatch(x, ids, **options)

    squared, sent, expected = both(x)
    np.testing.assert_array_equal(squared, x**2)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(sent), jax.tree.leaves(expected))
    through = lambda start: lambda x: start(x).wide_rows.sum()  # noqa: E731
    started = through(lambda x: jaxmoe.start_dispatch(x, ids, **options).finish())
    plain = through(lambda x: jaxmoe.dispatch(x, ids, **options))
    np.testing.assert_array_equal(jax.jit(jax.grad(started))(x), jax.jit(jax.grad(plain))(x))


@pytest.mark.parametrize("shape", [(0, HIDDEN), (0, 3, HIDDEN)])
def test_zero_tokens_are_started_too(shape):
    x, ids = jnp.zeros(shape), jnp.zeros((*shape[:-1], 2), jnp.int32)

    @jax.jit
    def both(x: Any) -> Any:
        sent = jaxmoe.start_dispatch(x, ids, num_experts=4, axis_name=None, alignment=4).finish()
        return sent, jaxmoe.start_combine(sent.rows, None, sent.handle).finish()

    sent, y = both(x)
    assert y.shape == shape
    assert not np.asarray(sent.rows).any()


def test_a_scan_carries_what_was_started_after_what_was_not():
    x, other, ids, weights, _ = arrays()
    options: dict[str, Any] = {"num_experts": EXPERTS, "axis_name": None}

    @jax.jit
    def pipeline(batches: Any) -> Any:
        def turn(arrived: jaxmoe.Dispatched, batch: Any) -> Any:
            outputs, following = jaxmoe.start_dispatch(batch, ids, **options).beside(jnp.square, arrived.rows)
            return following, jaxmoe.combine(outputs, weights, arrived.handle)

        last, ys = jax.lax.scan(turn, jaxmoe.dispatch(x, ids, **options), batches)
        return jnp.concatenate([ys, jaxmoe.combine(jnp.square(last.rows), weights, last.handle)[None]])

    sums = jnp.where(ids >= 0, weights, 0).sum(-1, keepdims=True)
    batches = jnp.stack([other, x])
    expected = jnp.concatenate([x[None], batches]) ** 2 * sums
    np.testing.assert_allclose(pipeline(batches), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_raises_in_the_name_of_what_was_called_and_says_what_takes_tokens(implementation):
    x, _, ids, _, _ = arrays()

    def send(x: Any) -> Any:
        return jaxmoe.start_dispatch(x, ids, num_experts=EXPERTS, axis_name=None, implementation=implementation)

    rows, handle = jax.eval_shape(lambda x: (send(x).finish().rows, send(x).finish().handle), x)
    functions = {
        "start_dispatch": (lambda x, handle: send(x).finish().rows, x),
        "start_combine": (lambda rows, handle: jaxmoe.start_combine(rows, None, handle).finish(), rows),
    }
    for name, (function, array) in functions.items():
        told = rf"^{name}: .*start_dispatch takes x .*pass the batch dimension along"
        assert_maps_are_refused(function, array, handle, told)


def test_gradients_of_rows_in_8_bits_are_refused_in_the_name_of_what_was_called():
    x, _, ids, _, _ = arrays()

    def loss(x: Any) -> Any:
        sent = jaxmoe.start_dispatch(x, ids, num_experts=EXPERTS, axis_name=None, precision="fp8").finish()
        return sent.rows.astype(jnp.float32).sum()

    with pytest.raises(TypeError, match=r"^start_dispatch: .*gradients with respect to rows in 8 bits"):
        jax.eval_shape(jax.grad(loss), x)


@pytest.mark.parametrize("multiprocessors", [0, 3, 66, 2.5, "all"])
@pytest.mark.usefixtures("unchecked_shapes")
def test_multiprocessors_that_leave_the_program_too_few_or_come_in_no_pairs_are_refused(multiprocessors):
    x, _, ids, _, _ = arrays()
    message = r"multiprocessors=.*even number from 2 to 64"
    with pytest.raises(ValueError, match="start_dispatch: " + message):
        jaxmoe.start_dispatch(x, ids, num_experts=EXPERTS, axis_name=None, multiprocessors=multiprocessors)
    sent = jaxmoe.dispatch(x, ids, num_experts=EXPERTS, axis_name=None)
    with pytest.raises(ValueError, match="start_combine: " + message):
        jaxmoe.start_combine(sent.rows, None, sent.handle, multiprocessors=multiprocessors)
