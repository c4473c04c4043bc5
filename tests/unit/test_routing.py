"""`route`, the balance losses and the load statistics: closed forms, and a router written as loops in plain Python."""

import dataclasses
import fractions
import math
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxmoe

SCORES = ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus")
GROUPED = jaxmoe.RouterConfig(top_k=3, score="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5)
PRESETS = {
    name: getattr(jaxmoe.RouterConfig, name)()
    for name in ("mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "gpt_oss", "deepseek_v4")
}


def random_logits(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def config_of(fields: dict[str, Any]) -> jaxmoe.RouterConfig:
    defaults: dict[str, Any] = {"top_k": 2}
    return jaxmoe.RouterConfig(**(defaults | fields))


# --- an independent router -------------------------------------------------------------------------------------------


def route_in_loops(
    logits: list[float], config: jaxmoe.RouterConfig, bias: list[float]
) -> tuple[list[int], list[float], list[float], float]:
    """Ids, weights, scores as probabilities, and the smallest gap between two values that a choice compared."""

    def softmax(values: list[float]) -> list[float]:
        exponentials = [math.exp(value - max(values)) for value in values]
        return [value / sum(exponentials) for value in exponentials]

    if config.score == "softmax":
        scores = softmax(logits)
    elif config.score == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    elif config.score == "sqrtsoftplus":
        scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    else:
        scores = list(logits)
    choice = [score + offset for score, offset in zip(scores, bias, strict=True)]
    size = len(logits) // config.num_groups
    groups = [choice[start : start + size] for start in range(0, len(logits), size)]
    group_scores = [sum(sorted(group)[-2:]) for group in groups] if config.num_groups > 1 else [0.0]
    kept_groups = sorted(range(len(groups)), key=lambda group: -group_scores[group])[: config.top_groups]
    candidates = [expert for expert in range(len(logits)) if expert // size in kept_groups]
    ids = sorted(candidates, key=lambda expert: -choice[expert])[: config.top_k]
    weights = [scores[expert] for expert in ids]
    if config.score == "topk_softmax":
        weights = softmax(weights)
    elif config.renormalize:
        weights = [weight / sum(weights) for weight in weights]
    weights = [weight * config.scaling_factor for weight in weights]
    independent = config.score in ("sigmoid", "sqrtsoftplus")
    probabilities = [score / sum(scores) for score in scores] if independent else softmax(logits)
    gaps = [
        high - low
        for values in (choice, group_scores)
        for low, high in zip(sorted(set(values)), sorted(set(values))[1:], strict=False)
    ]
    return ids, weights, probabilities, min(gaps, default=1.0)


@st.composite
def routing_problems(draw: st.DrawFn) -> tuple[np.ndarray, jaxmoe.RouterConfig, np.ndarray]:
    """Few different values, so that most tokens have ties between experts and between groups."""
    # One shape of logits: every further one would be compiled again.
    tokens, num_experts = 4, 12
    num_groups = draw(st.sampled_from([1, 1, 2, 3, 4, 6]))
    size = num_experts // num_groups
    top_groups = draw(st.integers(1, num_groups))
    config = jaxmoe.RouterConfig(
        top_k=draw(st.sampled_from([top_k for top_k in (1, 2, 3, 8) if top_k <= top_groups * size])),
        score=draw(st.sampled_from(SCORES)),
        renormalize=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )
    logit = st.sampled_from([-1.31, -0.42, -0.0, 0.0, 0.77, 1.93])
    offset = st.sampled_from([-0.13, 0.0, 0.071])
    logits = draw(st.lists(logit, min_size=tokens * num_experts, max_size=tokens * num_experts))
    bias = draw(st.lists(offset, min_size=num_experts, max_size=num_experts))
    return np.array(logits, np.float32).reshape(tokens, num_experts), config, np.array(bias, np.float32)


@hypothesis.settings(max_examples=60)
@hypothesis.given(problem=routing_problems())
def test_route_equals_a_router_written_as_loops(problem: tuple[np.ndarray, jaxmoe.RouterConfig, np.ndarray]) -> None:
    logits, config, bias = problem
    routing = jaxmoe.route(jnp.asarray(logits), config, selection_bias=jnp.asarray(bias))
    assert routing.topk_ids.shape == routing.topk_weights.shape == (len(logits), config.top_k)
    for token, row in enumerate(logits):
        ids, weights, probabilities, gap = route_in_loops(row.tolist(), config, bias.tolist())
        hypothesis.assume(gap > 1e-5)  # else float32 and float64 may rightly order two sums differently
        assert routing.topk_ids[token].tolist() == ids
        np.testing.assert_allclose(routing.topk_weights[token], weights, rtol=2e-6)
        np.testing.assert_allclose(routing.scores[token], probabilities, rtol=2e-6)


# --- closed forms ----------------------------------------------------------------------------------------------------


def test_softmax_after_top_k_equals_softmax_top_k_renormalise() -> None:
    logits = random_logits(50, 16)
    before = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=4, score="softmax", renormalize=True))
    after = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=4, score="topk_softmax"))
    assert (before.topk_ids == after.topk_ids).all()
    np.testing.assert_allclose(before.topk_weights, after.topk_weights, rtol=1e-6)


@pytest.mark.parametrize("score", SCORES)
def test_equal_logits_go_to_the_lowest_ids(score: Any) -> None:
    routing = jaxmoe.route(jnp.full((3, 300), 0.5), jaxmoe.RouterConfig(top_k=8, score=score))
    assert (routing.topk_ids == jnp.arange(8)).all()
    np.testing.assert_allclose(routing.topk_weights, 1 / 8, rtol=1e-6)


def test_positive_and_negative_zero_are_a_tie() -> None:
    config = jaxmoe.RouterConfig(top_k=4, score="topk_softmax")
    for route in (jaxmoe.route, jax.jit(jaxmoe.route)):
        assert route(jnp.array([-0.0, 0.0, -0.0, 0.0]), config).topk_ids.tolist() == [0, 1, 2, 3]


def test_equal_groups_go_to_the_lowest_group() -> None:
    logits = jnp.tile(jnp.array([0.0, 2.0, 1.0]), 4)
    assert jaxmoe.route(logits, GROUPED).topk_ids.tolist() == [1, 4, 2]


def test_a_group_counts_by_its_best_two_and_hides_better_experts_of_other_groups() -> None:
    config = jaxmoe.RouterConfig(top_k=2, score="topk_softmax", num_groups=2, top_groups=1)
    logits = jnp.array([[9.0, 0.0, 0.0, 5.0, 5.0, 0.0], [9.0, 0.0, 2.0, 5.0, 5.0, 4.9]])
    assert jaxmoe.route(logits, config).topk_ids.tolist() == [[3, 4], [0, 2]]


def test_the_selection_bias_moves_the_choice_but_not_the_weights() -> None:
    config = jaxmoe.RouterConfig(top_k=2, score="sigmoid", renormalize=False)
    logits = jnp.array([2.0, 1.0, 0.0])
    routing = jaxmoe.route(logits, config, selection_bias=jnp.array([0.0, 0.0, 10.0]))
    assert routing.topk_ids.tolist() == [2, 0]
    np.testing.assert_allclose(routing.topk_weights, jax.nn.sigmoid(logits[jnp.array([2, 0])]), rtol=1e-6)
    np.testing.assert_array_equal(routing.scores, jaxmoe.route(logits, config).scores)


@pytest.mark.parametrize("name", PRESETS)
def test_weights_of_every_preset_sum_to_its_scaling_factor(name: str) -> None:
    config = PRESETS[name]
    routing = jaxmoe.route(random_logits(2, 5, 64), config)
    np.testing.assert_allclose(routing.topk_weights.sum(-1), config.scaling_factor, rtol=1e-6)
    np.testing.assert_allclose(routing.scores.sum(-1), 1, rtol=1e-6)
    assert (jnp.diff(routing.topk_weights) <= 0).all(), "without a bias the best expert comes first"


def test_bfloat16_logits_are_routed_in_float32() -> None:
    logits = random_logits(20, 32).astype(jnp.bfloat16)
    routing = jaxmoe.route(logits, GROUPED, selection_bias=jnp.zeros(32, jnp.bfloat16))
    wanted = jaxmoe.route(logits.astype(jnp.float32), GROUPED, selection_bias=jnp.zeros(32))
    assert (routing.topk_ids.dtype, routing.topk_weights.dtype, routing.scores.dtype) == (
        jnp.int32,
        jnp.float32,
        jnp.float32,
    )
    jax.tree.map(np.testing.assert_array_equal, routing, wanted)


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        routing = jaxmoe.route(jnp.array([0.0, 1.0], jnp.float64), jaxmoe.RouterConfig(top_k=2))
        assert routing.topk_weights.dtype == routing.scores.dtype == jnp.float64
        assert routing.topk_ids.dtype == jnp.int32
        np.testing.assert_allclose(routing.topk_weights[0], 1 / (1 + math.exp(-1)), rtol=1e-15)


def test_a_choice_made_elsewhere_is_weighted_like_the_routers_own() -> None:
    logits = random_logits(7, 16)
    for config in (GROUPED, jaxmoe.RouterConfig(top_k=3, score="topk_softmax")):
        own = jaxmoe.route(logits, config)
        jax.tree.map(np.testing.assert_array_equal, jaxmoe.route(logits, config, topk_ids=own.topk_ids), own)


@pytest.mark.parametrize("score", SCORES)
def test_unused_slots_of_a_given_choice_weigh_nothing(score: Any) -> None:
    config = jaxmoe.RouterConfig(top_k=3, score=score)
    logits = jnp.array([[0.3, 0.1, 0.9, 0.2]] * 2)
    given = jnp.array([[2, -1, 4], [-1, -1, -1]])
    routing = jaxmoe.route(logits, config, topk_ids=given)
    np.testing.assert_array_equal(routing.topk_ids, given)
    np.testing.assert_allclose(routing.topk_weights, [[1, 0, 0], [0, 0, 0]], rtol=1e-6)


# --- masked tokens and extreme logits --------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
def test_nan_in_a_masked_token_reaches_no_output_and_no_gradient(score: Any) -> None:
    config = jaxmoe.RouterConfig(top_k=2, score=score)
    clean = random_logits(3, 6)
    token_valid = jnp.array([True, False, True])
    dirty = clean.at[1].set(jnp.nan)

    def objective(logits: jax.Array) -> tuple[jax.Array, jaxmoe.Routing]:
        routing = jaxmoe.route(logits, config, token_valid=token_valid)
        losses = jaxmoe.load_balancing_loss(routing) + jaxmoe.router_z_loss(logits, token_valid=token_valid)
        return losses + (routing.topk_weights * jnp.arange(1.0, 3.0)).sum(), routing

    value_and_grad = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (value, routing), gradient = value_and_grad(dirty)
    assert routing.topk_ids[1].tolist() == [-1, -1]
    assert routing.topk_weights[1].tolist() == [0, 0]
    assert (routing.scores[1] == 0).all()
    assert (gradient[1] == 0).all()
    without = jnp.array([0, 2])
    alone = jaxmoe.route(clean[without], config)
    for got, wanted in zip(jax.tree.leaves(routing), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got[without], wanted, rtol=1e-6)
    (clean_value, _), clean_gradient = value_and_grad(clean)
    np.testing.assert_array_equal(value, clean_value)
    np.testing.assert_array_equal(gradient, clean_gradient)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("extreme", [-math.inf, -200.0, 200.0])
def test_an_extreme_logit_gives_finite_weights_and_gradients(score: Any, extreme: float) -> None:
    config = jaxmoe.RouterConfig(top_k=2, score=score)

    def objective(logits: jax.Array) -> jax.Array:
        routing = jaxmoe.route(logits, config)
        return routing.topk_weights[0] + (routing.scores * jnp.arange(4.0)).sum()

    value, gradient = jax.value_and_grad(objective)(jnp.array([0.0, 1.0, extreme, -1.0]))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_scores_that_all_underflow_give_zero_weights_and_finite_gradients(score: Any) -> None:
    config = jaxmoe.RouterConfig(top_k=2, score=score)
    logits = jnp.full(4, -300.0)
    assert jaxmoe.route(logits, config).topk_weights.tolist() == [0, 0]
    gradient = jax.grad(lambda logits: jaxmoe.route(logits, config).topk_weights[0])(logits)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)])
@pytest.mark.parametrize("config", [jaxmoe.RouterConfig(top_k=3), GROUPED], ids=["ungrouped", "grouped"])
def test_any_batch_shape_is_routed_even_an_empty_one(shape: tuple[int, ...], config: jaxmoe.RouterConfig) -> None:
    routing = jaxmoe.route(jnp.zeros(shape), config)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (*shape[:-1], 3)
    assert routing.scores.shape == shape


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "renormalize"),
    [("softmax", True), ("softmax", False), ("topk_softmax", False), ("sigmoid", True), ("sqrtsoftplus", True)],
)
def test_gradients_equal_finite_differences_in_float64(score: Any, renormalize: bool) -> None:
    config = dataclasses.replace(GROUPED, score=score, renormalize=renormalize)
    with jax.enable_x64(True):
        # Evenly spread logits: no finite step changes the choice.
        logits = jnp.asarray(np.random.default_rng(1).permuted(np.tile(np.linspace(-2, 2, 12), (5, 1)), axis=1))
        bias = jnp.linspace(-0.01, 0.01, 12)

        def outputs(logits: jax.Array) -> Any:
            routing = jaxmoe.route(logits, config, selection_bias=bias)
            losses = jaxmoe.load_balancing_loss(routing), jaxmoe.router_z_loss(logits)
            return routing.topk_weights, routing.scores, losses

        jax.test_util.check_grads(jax.jit(outputs), (logits,), order=1, modes=("fwd", "rev"), atol=1e-7, rtol=1e-7)


def test_the_selection_bias_has_no_gradient() -> None:
    def objective(bias: jax.Array) -> jax.Array:
        routing = jaxmoe.route(random_logits(5, 12), GROUPED, selection_bias=bias)
        return routing.topk_weights[:, 0].sum() + jaxmoe.load_balancing_loss(routing)

    assert (jax.grad(objective)(jnp.linspace(-0.1, 0.1, 12)) == 0).all()


# --- transformations and meshes --------------------------------------------------------------------------------------


def everything(logits: jax.Array, axis_name: str | tuple[str, ...] | None = None) -> Any:
    token_valid = logits[..., 0] > -1
    routing = jaxmoe.route(logits, GROUPED, token_valid=token_valid, selection_bias=jnp.linspace(0, 0.1, 12))
    replicated = (
        jaxmoe.load_balancing_loss(routing, axis_name=axis_name),
        jaxmoe.router_z_loss(logits, token_valid=token_valid, axis_name=axis_name),
        jaxmoe.load_stats(routing.topk_ids, 12, token_valid=token_valid, axis_name=axis_name),
        jaxmoe.router_aux(routing, logits, token_valid=token_valid, axis_name=axis_name),
    )
    return routing, replicated


def assert_close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, wanted)


def test_a_config_is_a_static_argument_of_jit_and_equal_ones_share_a_compilation() -> None:
    traced = []

    @jax.jit
    def route(logits: jax.Array, config: jaxmoe.RouterConfig) -> jaxmoe.Routing:
        traced.append(config)
        return jaxmoe.route(logits, config)

    logits = random_logits(4, 12)
    assert_close(route(logits, GROUPED), jaxmoe.route(logits, GROUPED))
    route(logits, dataclasses.replace(GROUPED))
    assert traced == [GROUPED]
    route(logits, dataclasses.replace(GROUPED, top_k=2))
    assert len(traced) == 2


def test_vmap_equals_a_loop() -> None:
    logits = random_logits(3, 4, 12)
    one = jax.jit(everything)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *[one(row) for row in logits])
    assert_close(jax.jit(jax.vmap(everything))(logits), stacked)


def sum_of_losses(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], jax.Array]:
    def total(logits: jax.Array) -> jax.Array:
        routing, (balance, z_loss, _, aux) = function(logits)
        together = aux.load_balancing_loss + aux.router_z_loss
        return balance + z_loss + 0.5 * together + routing.topk_weights[..., 0].sum()

    return total


@pytest.mark.parametrize("names", [("expert",), ("data", "expert")])
def test_inside_shard_map_the_axis_makes_losses_and_counts_those_of_the_global_batch(names: tuple[str, ...]) -> None:
    logits = random_logits(16, 12)
    split = PartitionSpec(names)
    sharded = jax.shard_map(
        lambda rows: everything(rows, names),
        mesh=mesh_of((4,) if len(names) == 1 else (2, 2), names),
        in_specs=split,
        out_specs=(split, PartitionSpec()),
    )
    assert_close(jax.jit(sharded)(logits), jax.jit(everything)(logits))
    gradient, wanted = (jax.jit(jax.grad(sum_of_losses(function)))(logits) for function in (sharded, everything))
    assert_close(gradient, wanted)


def test_a_gradient_taken_inside_shard_map_is_that_of_the_global_loss() -> None:
    logits = random_logits(16, 12)

    def loss(logits: jax.Array, axis_name: str | None) -> jax.Array:
        return jaxmoe.load_balancing_loss(jaxmoe.route(logits, GROUPED), axis_name=axis_name)

    split = PartitionSpec("expert")
    inside = jax.shard_map(
        jax.grad(lambda rows: loss(rows, "expert")), mesh=mesh_of((4,), ("expert",)), in_specs=split, out_specs=split
    )
    assert_close(jax.jit(inside)(logits), jax.jit(jax.grad(lambda logits: loss(logits, None)))(logits))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_need_no_axis_name_under_jit(kind: AxisType) -> None:
    mesh = mesh_of((2, 2), ("data", "expert"), kind)
    logits = random_logits(8, 4, 12)
    functions = everything, jax.grad(sum_of_losses(everything))
    wanted = [jax.jit(function)(logits) for function in functions]
    with jax.set_mesh(mesh):
        sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "expert")))
        got = [jax.jit(function)(sharded) for function in functions]
    assert_close(jax.device_get(got), wanted)


# --- balance ---------------------------------------------------------------------------------------------------------


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


@hypothesis.given(
    load=st.lists(st.integers(0, 2**22), min_size=6, max_size=6) | st.integers(0, 2**28).map(lambda n: [n] * 6)
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


# --- load statistics -------------------------------------------------------------------------------------------------


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
    assert int(stats.rows_per_expert.sum() + stats.dropped_rows + stats.unused_slots) == size
    assert stats.dropped_rows == 0
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(("rows", "wanted"), [([3, 3, 3], 1.0), ([0, 0, 6], 3.0), ([4, 1, 1], 2.0), ([0, 0, 0], 1.0)])
def test_max_over_mean_load(rows: list[int], wanted: float) -> None:
    ids = jnp.array([expert for expert, count in enumerate(rows) for _ in range(count)], jnp.int32)[:, None]
    load = jaxmoe.load_stats(ids, 3).max_over_mean_load
    assert load == wanted
    assert load.dtype == jnp.float32


def test_narrow_ids_are_counted_like_any_other() -> None:
    for dtype in (jnp.int8, jnp.int16):
        assert jaxmoe.load_stats(jnp.array([[0, 2], [2, 1]], dtype), 300).rows_per_expert[:3].tolist() == [1, 1, 2]


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k=0 must be an integer of at least 1"),
        ({"top_k": True}, ValueError, "top_k=True"),
        ({"top_k": 2.0}, TypeError, "top_k=2.0 must be a Python integer"),
        ({"score": "tanh"}, ValueError, "score='tanh' is not known. Use one of 'softmax', 'topk_softmax', 'sigmoid'"),
        ({"num_groups": 0}, ValueError, "num_groups=0"),
        ({"num_groups": 2, "top_groups": 3}, ValueError, "top_groups=3 exceeds num_groups=2"),
        ({"scaling_factor": 0.0}, ValueError, "scaling_factor=0.0 must be positive"),
        ({"scaling_factor": math.nan}, ValueError, "scaling_factor=nan"),
        ({"epsilon": -1e-9}, ValueError, "epsilon=-1e-09 must be zero or positive"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config_of(fields)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("config", "arguments", "error", "message"),
    [
        ({"top_k": 9}, {}, ValueError, "route: top_k=9 exceeds num_experts=8"),
        ({"num_groups": 3}, {}, ValueError, "num_experts=8 cannot be split into num_groups=3 .*up to 4"),
        ({"num_groups": 8}, {}, ValueError, "num_groups=8 equal groups of at least 2"),
        (
            {"top_k": 5, "num_groups": 4, "top_groups": 2},
            {},
            ValueError,
            "top_k=5 exceeds the 4 experts of top_groups=2",
        ),
        ({}, {"logits": jnp.zeros((3, 8), jnp.int32)}, TypeError, "logits are int32"),
        ({}, {"logits": jnp.zeros(())}, ValueError, "logits have no dimension"),
        ({}, {"config": "mixtral"}, TypeError, "config is a str; pass jaxmoe.RouterConfig"),
        ({}, {"selection_bias": jnp.zeros(7)}, ValueError, r"selection_bias has shape \(7,\).*\(8,\)"),
        ({}, {"selection_bias": jnp.zeros(8, jnp.int32)}, TypeError, "selection_bias is int32"),
        ({}, {"token_valid": jnp.ones(4, bool)}, ValueError, r"token_valid has shape \(4,\).*logits: \(3,\)"),
        ({}, {"token_valid": jnp.ones(3)}, TypeError, "token_valid is float32; it must be bool"),
        ({}, {"topk_ids": jnp.zeros((3, 3), jnp.int32)}, ValueError, r"topk_ids has shape \(3, 3\).*\(3, 2\)"),
        ({}, {"topk_ids": jnp.zeros((3, 2))}, TypeError, "topk_ids is float32"),
        (
            {},
            {"topk_ids": jnp.zeros((3, 2), jnp.int32), "selection_bias": jnp.zeros(8)},
            ValueError,
            "topk_ids and selection_bias are both given",
        ),
    ],
)
def test_route_says_what_it_was_given_and_what_it_needs(
    config: dict[str, Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"logits": jnp.zeros((3, 8)), "config": config_of(config)} | arguments
    with pytest.raises(error, match=message):
        jaxmoe.route(**arguments)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxmoe.load_stats(jnp.zeros((2, 1)), 4), TypeError, "load_stats: topk_ids is float32"),
        (
            lambda: jaxmoe.load_stats(jnp.zeros((2, 1), jnp.int32), 0),
            ValueError,
            "num_experts=0 must be at least 1",
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
            lambda: jaxmoe.update_selection_bias(jnp.zeros(4), jnp.zeros(5, jnp.int32)),
            ValueError,
            r"selection_bias has shape \(4,\) and rows_per_expert \(5,\)",
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


def test_an_axis_that_the_surrounding_shard_map_leaves_automatic_is_refused() -> None:
    shard = jax.shard_map(
        lambda ids: jaxmoe.load_stats(ids, 4, axis_name=("expert", "data")).rows_per_expert,
        mesh=mesh_of((2, 2), ("data", "expert")),
        in_specs=PartitionSpec("expert"),
        out_specs=PartitionSpec(),
        axis_names={"expert"},
    )
    with pytest.raises(ValueError, match="names 'data', which is not a manual mesh axis here"):
        jax.jit(shard)(jnp.zeros((4, 1), jnp.int32))
