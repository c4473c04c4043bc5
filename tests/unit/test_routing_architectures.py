"""`route` against the routers of published models, as Hugging Face's modules compute them.

The arrays come from tests/golden/make_router_golden.py, which says what each of them is.
"""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "routers.npz")

CONFIGS = {
    "mixtral": jaxmoe.RouterConfig.mixtral(),
    "qwen3_moe": jaxmoe.RouterConfig.qwen3_moe(),
    "qwen3_moe_unnormalized": dataclasses.replace(jaxmoe.RouterConfig.qwen3_moe(), renormalize=False),
    "deepseek_v3": jaxmoe.RouterConfig.deepseek_v3(),
    "kimi_k2": jaxmoe.RouterConfig.kimi_k2(),
    "gpt_oss": jaxmoe.RouterConfig.gpt_oss(),
    "deepseek_v4": jaxmoe.RouterConfig.deepseek_v4(),
}


def golden(case: str, name: str) -> np.ndarray:
    return GOLDEN[f"{case}/{name}"]


def by_id(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots in the order of their ids, since some of the modules leave theirs unsorted."""
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def route(case: str, config: jaxmoe.RouterConfig) -> tuple[np.ndarray, np.ndarray]:
    bias = jnp.asarray(golden(case, "bias")) if f"{case}/bias" in GOLDEN else None
    routing = jaxmoe.route(jnp.asarray(golden(case, "logits")), config, selection_bias=bias)
    return np.asarray(routing.topk_ids), np.asarray(routing.topk_weights)


@pytest.mark.parametrize("case", CONFIGS)
def test_ids_and_weights_are_those_of_hugging_face(case: str) -> None:
    ids, weights = by_id(*route(case, CONFIGS[case]))
    wanted_ids, wanted_weights = by_id(golden(case, "ids"), golden(case, "weights"))
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted_weights, rtol=1e-6)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_slots_have_the_order_of_hugging_face_where_it_sorts_them(case: str) -> None:
    np.testing.assert_array_equal(route(case, CONFIGS[case])[0], golden(case, "ids"))


def test_the_hash_layers_of_deepseek_v4_weigh_the_experts_of_their_table() -> None:
    case = "deepseek_v4_hash"
    ids = jnp.asarray(golden(case, "ids"))
    routing = jaxmoe.route(jnp.asarray(golden(case, "logits")), jaxmoe.RouterConfig.deepseek_v4(), topk_ids=ids)
    np.testing.assert_allclose(routing.topk_weights, golden(case, "weights"), rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("deepseek_v3", {"num_groups": 1, "top_groups": 1}),
        ("deepseek_v3", {"scaling_factor": 1.0}),
        ("kimi_k2", {"score": "sqrtsoftplus"}),
        ("deepseek_v4", {"score": "sigmoid"}),
        ("qwen3_moe", {"renormalize": False}),
        ("gpt_oss", {"score": "softmax", "renormalize": False}),
    ],
)
def test_the_golden_data_tells_routers_apart(case: str, change: dict[str, object]) -> None:
    ids, weights = by_id(*route(case, dataclasses.replace(CONFIGS[case], **change)))
    wanted_ids, wanted_weights = by_id(golden(case, "ids"), golden(case, "weights"))
    assert (ids != wanted_ids).any() or not np.allclose(weights, wanted_weights, rtol=1e-3)


@pytest.mark.parametrize("case", ["deepseek_v3", "kimi_k2", "deepseek_v4"])
def test_the_golden_selection_bias_changes_the_choice(case: str) -> None:
    zeros = jnp.zeros(golden(case, "bias").shape)
    without = jaxmoe.route(jnp.asarray(golden(case, "logits")), CONFIGS[case], selection_bias=zeros).topk_ids
    assert (np.sort(without) != np.sort(golden(case, "ids"))).any()


def test_the_balance_loss_is_that_of_hugging_face_divided_by_top_k() -> None:
    case = "load_balancing_loss"
    routing = jaxmoe.route(jnp.asarray(golden(case, "logits")), jaxmoe.RouterConfig.mixtral())
    mask = jnp.asarray(golden(case, "mask"))
    np.testing.assert_allclose(2 * jaxmoe.load_balancing_loss(routing), golden(case, "loss"), rtol=1e-6)
    masked = 2 * jaxmoe.load_balancing_loss(routing, token_valid=mask)
    np.testing.assert_allclose(masked, golden(case, "masked_loss"), rtol=1e-6)


def test_the_golden_data_says_what_made_it() -> None:
    assert json.loads(str(GOLDEN["metadata"]))["transformers"] == "5.23.0"


def test_presets_take_what_differs_from_the_published_router():
    for preset in (jaxmoe.RouterConfig.qwen3_moe, jaxmoe.RouterConfig.deepseek_v3, jaxmoe.RouterConfig.gpt_oss):
        assert preset(top_k=3) == dataclasses.replace(preset(), top_k=3)
        with pytest.raises(TypeError, match="topk"):
            preset(topk=3)
