"""The balance losses, the update of the selection bias and the load statistics: closed forms and counts."""

import fractions
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from tests.unit.router_inputs import random_logits

# --- losses -----------------------------------------------------------------------------------------------------------


def routing_of(scores: Any, topk_ids: Any) -> jaxmoe.Routing:
    topk_ids = jnp.asarray(topk_ids, jnp.int32)
    return jaxmoe.Routing(topk_ids=topk_ids, topk_weights=jnp.ones(topk_ids.shape), scores=jnp.asarray(scores))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_balance_loss_is_one_when_the_load_is_even(top_k: int) -> None:
    logits = jnp.stack([jnp.roll(jnp.arange(8.0), shift) for shift in range(8)])
    routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=top_k))
    np.testing.assert_allclose(jaxmoe.load_balancing_loss(routing), 1, rtol=1e-6)


def test_the_balance_loss_is_the_number_of_experts_when_one_gets_everything() -> None:
    one_hot = jnp.eye(8)[jnp.array([3, 3, 3])]
    np.testing.assert_allclose(jaxmoe.load_balancing_loss(routing_of(one_hot, [[3], [3], [3]])), 8, rtol=1e-6)


def test_the_balance_loss_of_two_tokens_by_hand() -> None:
    # f = (3/4, 1/4, 0), P = (0.5, 0.3, 0.2): 3 * (0.375 + 0.075).
    routing = routing_of([[0.6, 0.2, 0.2], [0.4, 0.4, 0.2]], [[0, 1], [0, 0]])
    np.testing.assert_allclose(jaxmoe.load_balancing_loss(routing), 1.35, rtol=1e-6)


def test_the_gradient_of_the_balance_loss_pushes_probability_off_the_busy_expert() -> None:
    gradient = jax.grad(lambda scores: jaxmoe.load_balancing_loss(routing_of(scores, [[0], [0], [1]])))(
        jnp.ones((3, 2)) / 2
    )
    np.testing.assert_allclose(gradient, [[2 * 2 / 3 / 3, 2 * 1 / 3 / 3]] * 3, rtol=1e-6)


def test_tokens_left_out_of_the_balance_loss_do_not_count() -> None:
    logits = random_logits(9, 8)
    token_valid = jnp.arange(9) % 3 > 0
    config = jaxmoe.RouterConfig(top_k=2)
    wanted = jaxmoe.load_balancing_loss(jaxmoe.route(logits[token_valid], config))
    masked_in_route = jaxmoe.load_balancing_loss(jaxmoe.route(logits, config, token_valid=token_valid))
    masked_in_loss = jaxmoe.load_balancing_loss(jaxmoe.route(logits, config), token_valid=token_valid)
    np.testing.assert_allclose([masked_in_route, masked_in_loss], wanted, rtol=1e-6)


def test_a_token_whose_ids_name_no_expert_takes_no_part_in_the_balance_loss() -> None:
    scores = jnp.array([[0.6, 0.2, 0.2], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]])
    wanted = jaxmoe.load_balancing_loss(routing_of(scores[:2], [[0, 1], [0, 0]]))
    loss = jax.value_and_grad(lambda scores, ids: jaxmoe.load_balancing_loss(routing_of(scores, ids)))
    for unused in ([-1, -1], [3, -1], [3, 7], [-2, 3]):
        value, gradient = loss(scores, [[0, 1], [0, 0], unused])
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        np.testing.assert_array_equal(gradient[2], 0)


def test_the_sequence_wise_loss_of_deepseek_v3_is_the_mean_over_sequences() -> None:
    logits = np.asarray(random_logits(3, 10, 6))
    config = jaxmoe.RouterConfig(top_k=2, score="sigmoid")
    got = jnp.mean(jax.vmap(jaxmoe.load_balancing_loss)(jaxmoe.route(jnp.asarray(logits), config)))
    wanted = 0.0
    for sequence in 1 / (1 + np.exp(-logits)):
        for expert in range(6):
            chosen = sum(expert in np.argsort(-token)[:2] for token in sequence)
            share = np.mean([token[expert] / token.sum() for token in sequence])
            wanted += 6 / (2 * 10) * chosen * share / 3
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_losses_without_any_valid_token_are_zero_with_zero_gradients() -> None:
    def losses(logits: jax.Array) -> jax.Array:
        nobody = jnp.zeros(logits.shape[0], bool)
        routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2), token_valid=nobody)
        return jaxmoe.load_balancing_loss(routing) + jaxmoe.router_z_loss(logits, token_valid=nobody)

    for tokens in (0, 3):
        value, gradient = jax.jit(jax.value_and_grad(losses))(jnp.full((tokens, 4), jnp.nan))
        assert value == 0
        assert (gradient == 0).all()


def test_the_z_loss_of_shifted_uniform_logits_is_the_square_of_log_experts_plus_shift() -> None:
    logits = jnp.array([0.0, 2.0])[:, None] + jnp.zeros(8)
    wanted = (math.log(8) ** 2 + (math.log(8) + 2) ** 2) / 2
    np.testing.assert_allclose(jaxmoe.router_z_loss(logits), wanted, rtol=1e-6)
    np.testing.assert_allclose(jaxmoe.router_z_loss(logits.astype(jnp.bfloat16)), wanted, rtol=1e-6)


# --- selection bias ---------------------------------------------------------------------------------------------------


@hypothesis.given(
    load=st.lists(st.integers(0, 2**31 - 1), min_size=6, max_size=6) | st.integers(0, 2**31 - 1).map(lambda n: [n] * 6)
)
def test_the_bias_moves_by_the_rate_towards_the_mean_load(load: list[int]) -> None:
    mean = fractions.Fraction(sum(load), 6)
    wanted = [0.25 + 0.5 * ((mean > rows) - (mean < rows)) for rows in load]
    got = jaxmoe.update_selection_bias(jnp.full(6, 0.25), jnp.array(load, jnp.int32), rate=0.5)
    assert got.tolist() == wanted
    assert got.dtype == jnp.float32


def test_repeated_bias_updates_even_out_a_skewed_router() -> None:
    logits = random_logits(512, 8) + jnp.linspace(-1, 1, 8)
    config = jaxmoe.RouterConfig(top_k=2, score="sigmoid")

    def step(bias: jax.Array, _: None) -> tuple[jax.Array, jaxmoe.MoEStats]:
        routing = jaxmoe.route(logits, config, selection_bias=bias)
        stats = jaxmoe.load_stats(routing.topk_ids, 8)
        return jaxmoe.update_selection_bias(bias, stats.rows_per_expert, 1e-2), stats

    _, stats = jax.lax.scan(step, jnp.zeros(8), length=100)
    assert stats.max_over_mean_load.shape == (100,)
    assert stats.max_over_mean_load[0] > 1.8
    assert stats.max_over_mean_load[-1] < 1.1


# --- load statistics --------------------------------------------------------------------------------------------------


@hypothesis.given(
    data=st.data(), num_experts=st.sampled_from([1, 5]), shape=st.sampled_from([(0, 2), (3, 4), (80, 1), (6,)])
)
def test_every_slot_is_counted_once(data: st.DataObject, num_experts: int, shape: tuple[int, ...]) -> None:
    size, tokens = math.prod(shape), math.prod(shape[:-1])
    ids = data.draw(st.lists(st.integers(-3, num_experts + 2) | st.just(2**31 - 1), min_size=size, max_size=size))
    valid = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    stats = jaxmoe.load_stats(
        jnp.array(ids, jnp.int32).reshape(shape), num_experts, token_valid=jnp.array(valid, bool).reshape(shape[:-1])
    )
    of_valid = [expert for slot, expert in enumerate(ids) if valid[slot // shape[-1]]]
    assert stats.rows_per_expert.tolist() == [of_valid.count(expert) for expert in range(num_experts)]
    assert int(stats.out_of_range_ids) == sum(expert < -1 or expert >= num_experts for expert in of_valid)
    assert int(stats.rows_per_expert.sum() + stats.unused_slots) == size
    assert stats.dropped_rows == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(("rows", "wanted"), [([3, 3, 3], 1.0), ([0, 0, 6], 3.0), ([4, 1, 1], 2.0), ([0, 0, 0], 1.0)])
def test_max_over_mean_load(rows: list[int], wanted: float) -> None:
    ids = jnp.array([expert for expert, count in enumerate(rows) for _ in range(count)], jnp.int32)[:, None]
    load = jaxmoe.load_stats(ids, 3).max_over_mean_load
    assert load == wanted
    assert load.dtype == jnp.float32


def test_the_mean_load_of_counts_whose_sum_is_no_int32() -> None:
    counts = [2**30, 2**30, 2**30, 2**29]
    stats = jaxmoe.MoEStats(jnp.array([*counts, 0, 0], jnp.int32))
    np.testing.assert_allclose(stats.max_over_mean_load, 2**30 / (sum(counts) / 4), rtol=1e-6)


@pytest.mark.usefixtures("unchecked_shapes")
def test_counts_of_numpy_that_need_64_bits_move_the_bias_by_all_of_them() -> None:
    rows: Any = np.array([2**32, 2**32 + 1, 5])
    assert jaxmoe.update_selection_bias(jnp.zeros(3), rows, 1.0).tolist() == [-1.0, -1.0, 1.0]


def test_narrow_ids_are_counted_like_any_other() -> None:
    for dtype in (jnp.int8, jnp.int16):
        assert jaxmoe.load_stats(jnp.array([[0, 2], [2, 1]], dtype), 300).rows_per_expert[:3].tolist() == [1, 1, 2]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxmoe.load_stats(jnp.zeros((2, 1)), 4), TypeError, "load_stats: topk_ids is float32"),
        (
            lambda: jaxmoe.load_stats(jnp.zeros((2, 1), jnp.int32), 0),
            ValueError,
            "num_experts=0 must be an integer of at least 1",
        ),
        *(
            (
                lambda experts=experts: jaxmoe.load_stats(jnp.zeros((2, 1), jnp.int32), experts),  # pyright: ignore[reportArgumentType]
                ValueError,
                f"num_experts={experts!r} must be an integer of at least 1",
            )
            for experts in (8.0, "8", True)
        ),
        (
            lambda: jaxmoe.load_stats(jnp.zeros((2, 1), jnp.int32), 4, token_valid=jnp.ones((2, 1), bool)),
            ValueError,
            r"load_stats: token_valid has shape \(2, 1\).*topk_ids: \(2,\)",
        ),
        (
            lambda: jaxmoe.update_selection_bias(jnp.zeros(4), jnp.zeros(4)),
            TypeError,
            "rows_per_expert is float32; it must hold integer counts",
        ),
        (
            lambda: jaxmoe.update_selection_bias(jnp.zeros(2), [1, 2]),  # pyright: ignore[reportArgumentType]
            TypeError,
            "update_selection_bias: rows_per_expert is a list; it must be an array",
        ),
        (
            lambda: jaxmoe.update_selection_bias(jnp.zeros(4), jnp.zeros(5, jnp.int32)),
            ValueError,
            r"selection_bias has shape \(4,\) and rows_per_expert \(5,\)",
        ),
        (
            lambda: jaxmoe.load_stats([[0]], 4),  # pyright: ignore[reportArgumentType]
            TypeError,
            "load_stats: topk_ids is a list; it must be an array",
        ),
        (
            lambda: jaxmoe.load_stats(jnp.zeros((1, 1), jnp.int32), 4, token_valid=[True]),  # pyright: ignore
            TypeError,
            "load_stats: token_valid is a list; it must be an array",
        ),
        (
            lambda: jaxmoe.router_aux([[0]]),  # pyright: ignore[reportArgumentType]
            TypeError,
            "router_aux: routing is a list; it must be the jaxmoe.Routing that route returned",
        ),
        (
            lambda: jaxmoe.router_aux(jaxmoe.route(jnp.eye(4), jaxmoe.RouterConfig(top_k=1)), [[0.0] * 4] * 4),  # pyright: ignore[reportArgumentType]
            TypeError,
            "router_aux: logits is a list; it must be an array",
        ),
        (
            lambda: jaxmoe.load_balancing_loss(jnp.zeros((2, 1), jnp.int32)),  # pyright: ignore[reportArgumentType]
            TypeError,
            "load_balancing_loss: routing is an ArrayImpl; it must be the jaxmoe.Routing",
        ),
        (
            lambda: jaxmoe.router_z_loss([[0.0]]),  # pyright: ignore[reportArgumentType]
            TypeError,
            "router_z_loss: logits is a list; it must be an array",
        ),
        (
            lambda: jaxmoe.router_z_loss(jnp.zeros((2, 4)), axis_name="expert"),
            ValueError,
            "router_z_loss: axis_name='expert' names 'expert', which is not a manual mesh axis here",
        ),
    ],
)
def test_losses_and_stats_say_what_they_were_given_and_what_they_need(
    call: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.float16])
def test_a_bias_in_which_steps_get_lost_is_refused(dtype):
    with pytest.raises(TypeError, match=rf"selection_bias is {jnp.dtype(dtype)}, .* Keep it in float32: .*astype"):
        jaxmoe.update_selection_bias(jnp.ones(2, dtype), jnp.array([1, 2]))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("rate", "error", "told"),
    [
        (jnp.ones(2), ValueError, r"rate has shape \(2,\)"),
        (np.ones(1), ValueError, r"rate has shape \(1,\)"),
        (jnp.ones((2, 1)), ValueError, r"rate has shape \(2, 1\)"),
        (jnp.complex64(1), TypeError, "rate is complex64"),
        (np.bool_(True), TypeError, "rate is bool"),
        ([0.5, 0.5], TypeError, "rate is a list"),
        (True, TypeError, "rate is a bool"),
        (None, TypeError, "rate is a NoneType"),
    ],
)
def test_a_rate_that_is_not_one_number_is_refused(rate, error, told):
    needed = "it must be one number, or an array without dimensions"
    with pytest.raises(error, match=f"update_selection_bias: {told}; {needed}"):
        jaxmoe.update_selection_bias(jnp.zeros(2), jnp.array([1, 2]), rate)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("rate", [0.5, np.float32(0.5), np.array(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)])
def test_a_rate_is_a_number_or_an_array_without_dimensions(rate):
    for update in (jaxmoe.update_selection_bias, jax.jit(jaxmoe.update_selection_bias)):
        assert update(jnp.zeros(2), jnp.array([1, 2]), rate).tolist() == [0.5, -0.5]


@pytest.mark.usefixtures("unchecked_shapes")
def test_statistics_in_the_place_of_their_counts_are_an_error_that_says_so():
    stats: Any = jaxmoe.load_stats(jnp.array([[0], [1]]), 2)
    with pytest.raises(TypeError, match="rows_per_expert is a MoEStats; pass its rows_per_expert"):
        jaxmoe.update_selection_bias(jnp.zeros(2), stats)
