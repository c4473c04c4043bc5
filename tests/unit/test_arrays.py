"""What is an array, wherever users pass one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from tests.other_arrays import tensor
from tests.unit.blocks_by_hand import fill
from tests.unit.flax_layers import NNXLayer

X, IDS, WEIGHTS = jnp.ones((16, 8)), jnp.zeros((16, 2), jnp.int32), jnp.ones((16, 2))
EXPERTS = jaxmoe.Experts.init(jax.random.key(0), 4, 8, 8)
ROUTER = jaxmoe.RouterConfig(top_k=2)


def moe_layer(**changes: Any) -> Any:
    return jaxmoe.moe_layer(
        **{"x": X, "topk_ids": IDS, "topk_weights": WEIGHTS, "experts": EXPERTS, "axis_name": None} | changes
    )


def route(**changes: Any) -> Any:
    return jaxmoe.route(**{"logits": X, "config": ROUTER} | changes)


def dispatch(function: Callable[..., Any] = jaxmoe.dispatch, **changes: Any) -> Any:
    return function(**{"x": X, "topk_ids": IDS, "num_experts": 4, "axis_name": None} | changes)


def combine(function: Callable[..., Any] = jaxmoe.combine, rows: str = "outputs", **changes: Any) -> Any:
    handle = dispatch().handle
    handle = dataclasses.replace(handle, **{name: changes.pop(name) for name in ("slot_rows",) if name in changes})
    return function(**{rows: jnp.ones((32, 8)), "topk_weights": WEIGHTS, "handle": handle} | changes)


def matmul_combine(**changes: Any) -> Any:
    return combine(jaxmoe.matmul_combine, "rows", **{"matrices": jnp.ones((4, 8, 8))} | changes)


def flax_layer(**changes: Any) -> Any:
    layer = NNXLayer()
    return layer.calling()(fill(layer.shapes()), None, changes.get("x", jnp.zeros((4, 16))), changes.get("token_valid"))


def update(**changes: Any) -> Any:
    return jaxmoe.update_selection_bias(
        **{"selection_bias": jnp.zeros(4), "rows_per_expert": jnp.zeros(4, jnp.int32)} | changes
    )


CALLS: list[tuple[Callable[..., Any], str, Any]] = [
    *((moe_layer, name, tensor(16, 2)) for name in ("x", "topk_ids", "topk_weights")),
    (moe_layer, "token_valid", tensor(16, dtype="torch.bool")),
    (route, "logits", tensor(16, 8)),
    (route, "selection_bias", tensor(8)),
    (route, "token_valid", tensor(16, dtype="torch.bool")),
    (route, "topk_ids", tensor(16, 2, dtype="torch.int64")),
    (dispatch, "x", tensor(16, 8)),
    (dispatch, "topk_ids", tensor(16, 2, dtype="torch.int64")),
    (dispatch, "token_valid", tensor(16, dtype="torch.bool")),
    (combine, "outputs", tensor(32, 8)),
    (combine, "topk_weights", tensor(16, 2)),
    (combine, "slot_rows", tensor(16, 2, dtype="torch.int32")),
    (matmul_combine, "matrices", tensor(4, 8, 8)),
    (flax_layer, "x", tensor(4, 16)),
    (flax_layer, "token_valid", tensor(4, dtype="torch.bool")),
    (lambda logits: jaxmoe.router_z_loss(logits), "logits", tensor(16, 8)),
    (lambda topk_ids: jaxmoe.load_stats(topk_ids, 4), "topk_ids", tensor(16, 2)),
    (update, "selection_bias", tensor(4)),
    (update, "rows_per_expert", tensor(4, dtype="torch.int64")),
    (update, "rate", tensor()),
]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("call", "name", "given"), CALLS)
def test_a_tensor_of_another_library_is_named_by_what_takes_arrays(call, name, given):
    with pytest.raises(TypeError, match=rf"^[\w. ]+: {name}( of the handle)? is a Tensor; it must be .*(array|number)"):
        call(**{name: given})


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_has_a_shape_and_no_dtype_is_no_array():
    with pytest.raises(TypeError, match=r"route: logits is a Tensor; it must be an array of NumPy or JAX\."):
        route(logits=tensor(16, 8, dtype=None))


@pytest.mark.usefixtures("unchecked_shapes")
def test_experts_of_tensors_of_another_library_have_a_repr():
    given = tensor(4, 8, 8)
    assert repr(jaxmoe.Experts(given, None, given)).startswith("Experts(w_gate=<")
