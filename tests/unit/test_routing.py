"""`route`: closed forms, and a router written as loops in plain Python."""

import dataclasses
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

import jaxmoe
from tests.unit.router_inputs import GROUPED, random_logits

SCORES = ("softmax", "topk_softmax", "sigmoid", "sqrtsoftplus")
PRESETS = {
    name: getattr(jaxmoe.RouterConfig, name)()
    for name in ("mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "gpt_oss", "deepseek_v4")
}


def config_of(fields: dict[str, Any]) -> jaxmoe.RouterConfig:
    defaults: dict[str, Any] = {"top_k": 2}
    return jaxmoe.RouterConfig(**(defaults | fields))


# --- an independent router --------------------------------------------------------------------------------------------


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


# --- closed forms -----------------------------------------------------------------------------------------------------


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
    routing = jaxmoe.route(random_logits(2, 5, 64), config, selection_bias=jnp.zeros(64))
    np.testing.assert_allclose(routing.topk_weights.sum(-1), config.scaling_factor, rtol=1e-6)
    np.testing.assert_allclose(routing.scores.sum(-1), 1, rtol=1e-6)
    assert (jnp.diff(routing.topk_weights) <= 0).all(), "without a bias the best expert comes first"


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2", "deepseek_v4"])
def test_a_preset_whose_model_has_a_selection_bias_warns_without_one(name: str) -> None:
    logits, config = random_logits(2, 5, 64), PRESETS[name]
    for changes in ({}, {"top_k": 4}):
        with pytest.warns(UserWarning, match=rf"{name}\(\) comes without selection_bias.*jnp.zeros\(64\)") as warned:
            jaxmoe.route(logits, dataclasses.replace(config, **changes))
        assert len(warned) == 1
    # Here a warning is an error: with a bias, a choice made elsewhere, or a router of one's own there is none.
    jaxmoe.route(logits, config, selection_bias=jnp.zeros(64))
    jaxmoe.route(logits, config, topk_ids=jnp.zeros((*logits.shape[:-1], config.top_k), int))
    jaxmoe.route(logits, dataclasses.replace(config, scaling_factor=1.0))


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


@pytest.mark.usefixtures("unchecked_shapes")
def test_numbers_of_numpy_make_the_router_that_those_of_python_make():
    plain = jaxmoe.RouterConfig(top_k=2, score="sigmoid", scaling_factor=2.5, epsilon=0.5)
    top_k: Any = np.int64(2)
    config = jaxmoe.RouterConfig(top_k=top_k, score="sigmoid", scaling_factor=np.float64(2.5), epsilon=np.float64(0.5))
    assert config == plain
    assert repr(config) == repr(plain)
    with jax.enable_x64(True):
        logits = jnp.array([[0.5, -1.0, 2.0]], jnp.float32)
        found, want = (jaxmoe.route(logits, each).topk_weights for each in (config, plain))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, want)


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


# --- masked tokens and extreme logits ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("config", "logit"),
    [
        (jaxmoe.RouterConfig.qwen3_moe(top_k=2), -200.0),
        (jaxmoe.RouterConfig.qwen3_moe(top_k=2), -np.inf),
        (jaxmoe.RouterConfig.gpt_oss(top_k=2), -np.inf),
    ],
)
def test_a_choice_made_elsewhere_of_experts_without_any_score_weighs_nothing_and_has_finite_gradients(
    config: jaxmoe.RouterConfig, logit: float
) -> None:
    logits = jnp.array([[0.0, logit, logit, 1.0]])

    def weights(logits: jax.Array) -> jax.Array:
        return jaxmoe.route(logits, config, topk_ids=jnp.array([[1, 2]])).topk_weights

    np.testing.assert_array_equal(weights(logits), 0)
    gradient = jax.grad(lambda logits: jnp.sum(weights(logits) * jnp.array([1.0, 3.0])))(logits)
    assert np.isfinite(gradient).all()


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


# --- NaN --------------------------------------------------------------------------------------------------------------

LIMITED: dict[str, Any] = {"num_groups": 4, "top_groups": 2}


@pytest.mark.parametrize("nan", [math.nan, -math.nan], ids=["positive", "negative"])
@pytest.mark.parametrize("fields", [{}, {"renormalize": False}, LIMITED], ids=["all", "not renormalised", "groups"])
@pytest.mark.parametrize("score", SCORES)
def test_a_nan_logit_gives_its_token_a_nan_weight_and_leaves_others_alone(score: Any, fields: Any, nan: float) -> None:
    config, clean = config_of({"score": score} | fields), random_logits(40, 8)
    logits = clean.at[jnp.arange(8), jnp.arange(8)].set(nan)
    for route in (jaxmoe.route, jax.jit(jaxmoe.route)):
        routing, wanted = route(logits, config), route(clean, config)
        assert jnp.isnan(routing.topk_weights[:8]).any(-1).all()
        jax.tree.map(lambda got, want: np.testing.assert_array_equal(got[8:], want[8:]), routing, wanted)


@pytest.mark.parametrize("nan", [math.nan, -math.nan], ids=["positive", "negative"])
@pytest.mark.parametrize("experts", [[5], range(8)], ids=["one", "all"])
@pytest.mark.parametrize("fields", [{}, {"renormalize": False}, LIMITED], ids=["all", "not renormalised", "groups"])
@pytest.mark.parametrize("score", SCORES)
def test_nan_in_the_selection_bias_gives_every_valid_token_a_nan_weight_and_reaches_no_masked_one(
    score: Any, fields: Any, experts: Any, nan: float
) -> None:
    config, logits = config_of({"score": score} | fields), random_logits(6, 8)
    bias = jnp.zeros(8).at[jnp.array(experts)].set(nan)
    token_valid = jnp.arange(6) % 3 > 0

    def objective(logits: jax.Array) -> tuple[jax.Array, jaxmoe.Routing]:
        routing = jaxmoe.route(logits, config, selection_bias=bias, token_valid=token_valid)
        return (routing.topk_weights * jnp.arange(1.0, 3.0)).sum(), routing

    gradient, routing = jax.jit(jax.grad(objective, has_aux=True))(logits)
    assert (jnp.isnan(routing.topk_weights).any(-1) == token_valid).all()
    assert (routing.topk_weights[~token_valid] == 0).all()
    assert (gradient[~token_valid] == 0).all()


@pytest.mark.parametrize(
    "config",
    [*(config_of({"score": score} | LIMITED) for score in SCORES), jaxmoe.RouterConfig.mixtral()],
    ids=[*SCORES, "mixtral, whose epsilon is zero"],
)
def test_debug_nans_finds_none_where_logits_are_finite_or_masked(config: jaxmoe.RouterConfig) -> None:
    logits, token_valid = random_logits(6, 8).at[2, 1].set(-math.inf), jnp.arange(6) != 1
    bias = jnp.linspace(-0.1, 0.1, 8).at[3].set(-math.inf)

    def objective(logits: jax.Array) -> jax.Array:
        routing = jaxmoe.route(logits, config, selection_bias=bias, token_valid=token_valid)
        return (routing.topk_weights * jnp.arange(1.0, 3.0)).sum() + jaxmoe.load_balancing_loss(routing)

    masked_nan = logits.at[1].set(math.nan)
    with jax.debug_nans(True):
        assert jnp.isfinite(jax.grad(objective)(logits)).all()
        assert jnp.isfinite(jax.jit(jax.grad(objective))(masked_nan)).all()


# --- gradients --------------------------------------------------------------------------------------------------------


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


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("given", [False, True])
def test_a_boolean_of_numpy_is_one(given: bool) -> None:
    logits = jnp.arange(12.0).reshape(3, 4)
    found, wanted = (jaxmoe.route(logits, config_of({"renormalize": kind(given)})) for kind in (np.bool_, bool))
    np.testing.assert_array_equal(found.topk_weights, wanted.topk_weights)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k=0 must be an integer of at least 1"),
        ({"top_k": True}, ValueError, "top_k=True"),
        ({"top_k": 2.0}, TypeError, "top_k=2.0 must be a Python integer"),
        ({"top_k": jnp.array(2)}, TypeError, r"top_k=Array\(2, .* must be a Python integer"),
        ({"renormalize": "no"}, TypeError, "renormalize='no' must be True or False"),
        ({"renormalize": None}, TypeError, "renormalize=None must be True or False"),
        ({"scaling_factor": jnp.array(2.0)}, TypeError, r"scaling_factor=Array\(2.* must be a Python number; float\("),
        ({"scaling_factor": np.ones(3)}, TypeError, r"scaling_factor=array\(.* must be a Python number"),
        ({"epsilon": jnp.array(0.0)}, TypeError, r"epsilon=Array\(0.* must be a Python number"),
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
        ({}, {"logits": [[0.0] * 8] * 3}, TypeError, "route: logits is a list; it must be an array"),
        ({}, {"selection_bias": [0.0] * 8}, TypeError, "route: selection_bias is a list; it must be an array"),
        ({}, {"token_valid": [True] * 3}, TypeError, "route: token_valid is a list; it must be an array"),
        ({}, {"topk_ids": [[0, 1]] * 3}, TypeError, "route: topk_ids is a list; it must be an array"),
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


def test_an_expert_of_a_kept_group_comes_before_those_of_others_also_where_its_score_is_minus_infinity():
    logits = jnp.array([[1.0, 1, 1, 5, 4, -jnp.inf]])
    config = jaxmoe.RouterConfig(top_k=3, score="topk_softmax", num_groups=2, top_groups=1)
    routing = jaxmoe.route(logits, config)
    assert routing.topk_ids.tolist() == [[3, 4, 5]]
    np.testing.assert_allclose(routing.topk_weights, [[*np.asarray(jax.nn.softmax(jnp.array([5.0, 4]))), 0]], rtol=1e-6)
    bias = jnp.zeros(6).at[5].set(-jnp.inf)
    config = jaxmoe.RouterConfig(top_k=3, score="sigmoid", num_groups=2, top_groups=1)
    chosen = jaxmoe.route(jnp.array([[1.0, 1, 1, 5, 4, 3]]), config, selection_bias=bias).topk_ids
    assert chosen.tolist() == [[3, 4, 5]]


def test_of_groups_with_masked_experts_the_one_with_the_best_usable_expert_comes_first() -> None:
    masked = -math.inf
    logits = jnp.array([[masked, masked, 1, masked, 3, masked], [0.5, 0.25, 5, masked, masked, masked]])
    config = jaxmoe.RouterConfig(top_k=2, score="topk_softmax", num_groups=3, top_groups=1)
    routing = jaxmoe.route(logits, config)
    assert routing.topk_ids.tolist() == [[4, 5], [0, 1]]  # two usable experts come before one, as in a sum
    assert routing.topk_weights[0].tolist() == [1, 0]


def test_a_selection_bias_that_masks_experts_leaves_groups_with_usable_ones_in_the_order_of_their_scores() -> None:
    config = jaxmoe.RouterConfig(top_k=2, score="sigmoid", num_groups=4, top_groups=2)
    bias = jnp.zeros(8).at[jnp.array([0, 1, 3, 5, 7])].set(-math.inf)
    logits = jnp.array([[9.0, 9, -20, 9, -18, 9, -22, 9], [9.0, 9, 1, 9, 2, 9, 3, 9]])
    ids = jaxmoe.route(logits, config, selection_bias=bias).topk_ids
    assert ids.tolist() == [[4, 2], [6, 4]]


@pytest.mark.parametrize("score", SCORES)
def test_a_token_whose_logits_are_all_minus_infinity_weighs_nothing_and_leaves_others_their_loss(score: Any) -> None:
    config = config_of({"score": score})
    logits = jnp.array([[-math.inf] * 4, [0.0, 3.0, 1.0, 2.0]])

    def objective(logits: jax.Array) -> Any:
        routing = jaxmoe.route(logits, config)
        return routing.topk_weights[:, 0].sum() + jaxmoe.load_balancing_loss(routing), routing

    with jax.debug_nans(True):
        gradient, routing = jax.grad(objective, has_aux=True)(logits)
    alone = jaxmoe.route(logits[1:], config)
    assert not routing.topk_weights[0].any()
    assert not routing.scores[0].any()
    np.testing.assert_array_equal(routing.topk_weights[1:], alone.topk_weights)
    np.testing.assert_array_equal(routing.scores[1:], alone.scores)
    assert (gradient[0] == 0).all()
    assert jnp.isfinite(gradient).all()
