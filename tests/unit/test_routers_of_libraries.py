"""The routers that the pages name for other libraries weigh as those do: their rules, in NumPy and by their sources."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.convert import from_hf
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


MAXTEXT = "docs/use_in_maxtext.md"


def maxtext(decoder, score, norm_topk_prob):
    """`get_topk` and `deepseek_scale_weights` of MaxText 0.2.5, from logits to ids and weights."""
    logits = LOGITS.astype(np.float64)
    scores = {"": logits, "sigmoid": sigmoid(logits), "softmax": softmax(logits)}.get(score)
    if scores is None:
        scores = np.sqrt(np.log1p(np.exp(logits)))
    ids, weights = chosen(scores)
    if decoder == "DeepSeek":
        weights = by_sum(weights) if score in ("sigmoid", "sqrtsoftplus") else weights
        return ids, weights * SCALING
    weights = np.take_along_axis(softmax(logits), ids, -1) if decoder == "Gemma 4" else softmax(weights)
    return ids, by_sum(weights) if norm_topk_prob else weights


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(
    ("begins", "decoder", "score"),
    [
        ("most decoders: Mixtral, Qwen3, gpt-oss", "Mixtral", ""),
        ("DeepSeek, `sigmoid`", "DeepSeek", "sigmoid"),
        ("DeepSeek, `sqrtsoftplus`", "DeepSeek", "sqrtsoftplus"),
        ("DeepSeek, `softmax`", "DeepSeek", "softmax"),
        ("Gemma 4", "Gemma 4", ""),
    ],
)
def test_the_router_of_a_maxtext_decoder_weighs_as_its_get_topk(begins, decoder, score, norm_topk_prob):
    configs = routers(row(MAXTEXT, begins), norm_topk_prob=norm_topk_prob)
    assert configs
    for config in configs:
        check(config, *maxtext(decoder, score, norm_topk_prob))


@pytest.mark.parametrize("preset", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_presets_of_the_maxtext_page_weigh_as_most_decoders(preset):
    check(getattr(jaxmoe.RouterConfig, preset)(top_k=TOP_K), *maxtext("Mixtral", "", norm_topk_prob=False))


def test_the_one_expert_of_llama_4_has_weight_one():
    (config,) = routers(row(MAXTEXT, "Llama 4"))
    check(config, np.argmax(LOGITS, -1)[:, None], np.ones((TOKENS, 1)))


@pytest.mark.parametrize(("limit", "alpha", "offset", "preset"), [(7, 1.702, 1, "gpt_oss"), (10, 1, 0, "deepseek_v4")])
def test_the_activation_is_that_of_mlp_activations_limit(limit, alpha, offset, preset):
    code = f"jaxmoe.SwiGLU.{preset}()"
    assert code in row(MAXTEXT, "`mlp_activations_limit`")
    gate, up = np.linspace(-20, 20, 41)[:, None], np.linspace(-20, 20, 17)
    clipped, linear = np.minimum(gate, limit), np.clip(up, -limit, limit)
    wanted = clipped * sigmoid(clipped * alpha) * (linear + offset)
    activation = eval(code, {"jaxmoe": jaxmoe})
    got = activation.value(*jnp.broadcast_arrays(jnp.float32(gate), jnp.float32(up)))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_layer_of_maxtext_s_scanned_parameters_is_an_index_of_axis_1():
    (code,) = re.findall(r"`(jax\.tree\.map\([^`]*params\))`", text_of(MAXTEXT))
    layers = [{"wi_0": np.full((4, 8, 6), layer), "gate": {"kernel": np.full((8, 4), layer)}} for layer in range(3)]
    params = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *layers)
    for layer, wanted in enumerate(layers):
        jax.tree.map(np.testing.assert_array_equal, eval(code, {"jax": jax, "params": params, "layer": layer}), wanted)


def test_gradients_lie_as_maxtext_splits_its_experts_over_fsdp_and_context():
    arguments = re.findall(r"`(\w+_axis)=([^`]*)`", text_of(MAXTEXT))
    axes = {name: eval(value) for name, value in arguments}  # the last one of each name
    shape = {"fsdp": 2, "context": 2, "tensor": 1, "expert": 2}
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(jax.sharding.AxisType.Auto,) * 4)
    into, back = P("expert", ("fsdp", "context"), "tensor"), P("expert", "tensor", ("fsdp", "context"))
    experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=EXPERTS, hidden=32, intermediate=48)
    x = jax.random.normal(jax.random.key(1), (4, 16, 32))
    routing = jaxmoe.route(jnp.asarray(LOGITS).reshape(4, 16, EXPERTS), jaxmoe.RouterConfig(top_k=2))

    def loss(experts):
        y = jaxmoe.moe_layer(x, routing, experts, axis_name="expert", data_axes=P("fsdp", "context"), **axes)
        return (y**2).sum()

    with jax.set_mesh(mesh):
        experts = jaxmoe.Experts(
            *map(jax.device_put, (experts.w_gate, experts.w_up, experts.w_down), (into, into, back))
        )
        gradients = jax.jit(jax.grad(loss))(experts)
    for name in ("w_gate", "w_up", "w_down"):
        gradient, matrix = getattr(gradients, name), getattr(experts, name)
        assert gradient.sharding.is_equivalent_to(matrix.sharding, 3), name


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


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("page", ["README.md", "from_hf"])
def test_the_router_named_for_olmoe_and_qwen2_moe_weighs_as_hugging_face_s(page, norm_topk_prob):
    text = str(from_hf.__doc__) if page == "from_hf" else text_of(page).split("## Checkpoints")[1].split("\n## ")[0]
    (code,) = re.findall(r"RouterConfig\.qwen3_moe\([^)]*\)", text)
    ids, weights = chosen(softmax(LOGITS.astype(np.float64)))
    check(router(code, norm_topk_prob=norm_topk_prob), ids, by_sum(weights) if norm_topk_prob else weights)
