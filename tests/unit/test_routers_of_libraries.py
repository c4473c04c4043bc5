"""The routers that the pages name for other libraries weigh as those do: their rules, in NumPy and by their sources."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from tests.documents import ROOT

TOKENS, EXPERTS, TOP_K, SCALING = 64, 16, 4, 2.5
LOGITS = np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)).astype(np.float32)
CODE = r"`(?:jaxmoe\.)?(RouterConfig(?:\.\w+)?\([^`]*\))`"
PAGES = ["README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md")))]


def text_of(page):
    return (ROOT / page).read_text()


def row(page, *begins):
    """Returns the only row of a page's tables whose cells begin so."""
    rows = [line for line in text_of(page).splitlines() if line.startswith("| " + " | ".join(begins))]
    assert len(rows) == 1, (page, begins, rows)
    return rows[0]


def router(code, **names):
    """Returns what code of a page makes, where names of the other library have values."""
    known = {"top_k": TOP_K, "num_experts_per_tok": TOP_K, "routed_scaling_factor": SCALING, "norm_topk_prob": False}
    return eval(code, {"RouterConfig": jaxmoe.RouterConfig} | known | names)


def routers(text, **names):
    return [router(code, **names) for code in re.findall(CODE, text)]


def softmax(rows):
    return np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)


def sigmoid(rows):
    return 1 / (1 + np.exp(-rows))


def chosen(scores, top_k=TOP_K):
    """Returns the ids of the best scores, and those."""
    ids = np.argsort(-scores, -1, kind="stable")[..., :top_k]
    return ids, np.take_along_axis(scores, ids, -1)


def by_sum(weights):
    return weights / weights.sum(-1, keepdims=True)


def check(config, ids, weights, logits=LOGITS):
    routing = jaxmoe.route(jnp.asarray(logits), config)
    np.testing.assert_array_equal(routing.topk_ids, ids)
    np.testing.assert_allclose(routing.topk_weights, weights, rtol=1e-5)


@pytest.mark.parametrize("page", PAGES)
def test_routers_in_the_text_of_a_page_can_be_made(page):
    routers(text_of(page))


EASYDEL = "docs/use_in_easydel.md"


def easydel(strategy, top_k, method="fused_moe"):
    """`get_experts_location` of EasyDeL 0.3.0 with the default hook of a strategy, from logits to ids and weights."""
    logits = LOGITS.astype(np.float64)
    ids, weights = chosen(logits if method == "standard_moe" else softmax(logits), top_k)
    if strategy == "TOP_K" and top_k > 1:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-8)
    if strategy == "SWITCH":
        weights = np.ones_like(weights)
    if strategy in ("HASH", "EMPTY_CHOICE"):
        weights = np.full_like(weights, 1 / top_k)
    return ids, by_sum(weights) if method == "dense_moe" else weights


@pytest.mark.parametrize(
    ("strategy", "top_k"), [("TOP_K", 1), ("TOP_K", TOP_K), ("TOP_K_NDIV", 1), ("TOP_K_NDIV", TOP_K), ("SWITCH", 1)]
)
def test_the_router_of_an_easydel_strategy_weighs_as_its_fused_layer(strategy, top_k):
    (config,) = routers(row(EASYDEL, f"`MoeRoutingStrategy.{strategy}`"), top_k=top_k)
    check(config, *easydel(strategy, top_k))


@pytest.mark.parametrize("strategy", ["HASH", "EMPTY_CHOICE"])
def test_easydel_s_strategies_without_a_router_weigh_evenly(strategy):
    (code,) = re.findall(r"`(moe_layer[^`]*)`", row(EASYDEL, "`MoeRoutingStrategy.HASH`, `EMPTY_CHOICE`"))
    ids, wanted = easydel(strategy, TOP_K)
    given = {"moe_layer": lambda x, ids, weights, experts: weights, "x": None, "experts": None}
    np.testing.assert_allclose(eval(code, given | {"jnp": jnp, "ids": ids, "top_k": TOP_K}), wanted, rtol=1e-6)


@pytest.mark.parametrize("top_k", [1, TOP_K])
@pytest.mark.parametrize("strategy", ["TOP_K", "TOP_K_NDIV"])
def test_the_router_of_easydel_s_dense_layer_divides_by_the_sum(strategy, top_k):
    (config,) = routers(row(EASYDEL, "`dense_moe`"), top_k=top_k)
    check(config, *easydel(strategy, top_k, "dense_moe"))


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"])
def test_no_router_weighs_as_easydel_s_standard_layer(score):
    assert row(EASYDEL, "`standard_moe`", "none;")
    ids, wanted = easydel("TOP_K", TOP_K, "standard_moe")
    routing = jaxmoe.route(jnp.asarray(LOGITS), jaxmoe.RouterConfig(top_k=TOP_K, score=score))
    np.testing.assert_array_equal(routing.topk_ids, ids)
    assert np.abs(routing.topk_weights - wanted).max() > 0.1


TRANSFORMER_ENGINE = "docs/beside_transformer_engine.md"


def transformer_engine(score, top_k, groups=None):
    """`fused_topk_with_score_function` of TransformerEngine; groups are `(num_groups, group_topk)`."""
    logits = LOGITS.astype(np.float64)
    scores = {"softmax": logits, "pre_softmax": softmax(logits), "sigmoid": sigmoid(logits)}.get(score)
    if scores is None:
        scores = np.sqrt(np.log1p(np.exp(logits)))
    choice = scores
    if groups is not None:
        num_groups, group_topk = groups
        grouped = scores.reshape(TOKENS, num_groups, -1)
        of_groups = np.sort(grouped, -1)[..., -(top_k // group_topk) :].sum(-1)
        kept = np.zeros((TOKENS, num_groups), bool)
        np.put_along_axis(kept, chosen(of_groups, group_topk)[0], values=True, axis=1)
        choice = np.where(kept[..., None], grouped, -np.inf).reshape(scores.shape)
    ids, weights = chosen(choice, top_k)
    if score == "softmax":
        weights = softmax(weights)
    return ids, by_sum(weights) if score in ("sigmoid", "sqrtsoftplus") and top_k > 1 else weights


SCORES = [
    ('`score_function="softmax"`', "softmax"),
    ("the same with `use_pre_softmax`", "pre_softmax"),
    ('`score_function="sigmoid"`', "sigmoid"),
    ('`score_function="sqrtsoftplus"`', "sqrtsoftplus"),
]


@pytest.mark.parametrize("top_k", [1, TOP_K])
@pytest.mark.parametrize(("begins", "score"), SCORES)
def test_the_router_of_a_score_function_weighs_as_transformer_engine(begins, score, top_k):
    (config,) = routers(row(TRANSFORMER_ENGINE, begins), top_k=top_k)
    check(config, *transformer_engine(score, top_k))


@pytest.mark.parametrize(("begins", "score"), SCORES)
def test_groups_are_those_of_transformer_engine_where_it_adds_the_best_two_of_each(begins, score):
    assert "where `num_experts_per_tok` is twice `group_topk`" in row(TRANSFORMER_ENGINE, "`num_groups`, `group_topk`")
    (config,) = routers(row(TRANSFORMER_ENGINE, begins))
    of_two = dataclasses.replace(config, num_groups=4, top_groups=2)
    check(of_two, *transformer_engine(score, TOP_K, groups=(4, 2)))
    of_four = dataclasses.replace(config, num_groups=4, top_groups=1)
    ids, _ = transformer_engine(score, TOP_K, groups=(4, 1))
    assert (np.asarray(jaxmoe.route(jnp.asarray(LOGITS), of_four).topk_ids) != ids).any()
