"""JAX's strict modes: `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"`.

With and without 64 bits, where what JAX counts by itself has other dtypes.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmoe
from jaxmoe.formats import FLOAT_DTYPES, at_least_float32
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.network.plan import WAYS
from jaxmoe.nnx import MoE
from jaxmoe.testing import make_inputs
from tests.layer_calls import mesh_of

ROUTERS = {
    "softmax": jaxmoe.RouterConfig(top_k=2),
    "topk_softmax": jaxmoe.RouterConfig(top_k=2, score="topk_softmax"),
    "sigmoid in groups": jaxmoe.RouterConfig(
        top_k=2, score="sigmoid", num_groups=4, top_groups=2, renormalize=True, scaling_factor=2.5
    ),
    "sqrtsoftplus": jaxmoe.RouterConfig(top_k=2, score="sqrtsoftplus", renormalize=True),
}
QUANTIZED = ("fp8", "mxfp4", "nvfp4")
# Bits of the widest dtypes, and logits.
LOGITS = [(32, jnp.bfloat16), (32, jnp.float32), (64, jnp.bfloat16), (64, jnp.float32), (64, jnp.float64)]


@pytest.fixture(params=[32, 64], ids=["32 bits", "64 bits"])
def widest(request: pytest.FixtureRequest) -> Iterator[int]:
    """Bits of JAX's widest dtypes."""
    with jax.enable_x64(request.param == 64):
        yield request.param


def arrays(kind: str = "wide", dtype: Any = jnp.bfloat16) -> Any:
    """Arguments of a layer in one dtype with biases, the experts of one kind, but for "mixed" ones in it too."""
    inputs = make_inputs(0, tokens=32, hidden=128, intermediate=128, dtype=dtype, biases=True)
    experts = inputs.experts
    if kind == "fused":
        experts = experts.fuse("halves")
    elif kind == "mixed":
        experts = experts.astype(jnp.float32)
    elif kind in QUANTIZED:
        experts = jaxmoe.quantize(experts, "128x128" if kind == "fp8" else kind)
    return inputs._replace(experts=experts)


def assert_the_same_under_strict_modes(function: Any, *arguments: Any) -> None:
    """No promotion is left to JAX: the program is the same, and with it every bit of the results."""

    def program() -> str:
        return jax.jit(lambda *arguments: function(*arguments)).lower(*arguments).as_text()

    expected = program()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert program() == expected


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_the_dtype_of_sums_is_the_promotion_of_jax_and_known_under_strict_modes(dtype):
    expected = jnp.promote_types(dtype, jnp.float32)
    with jax.numpy_dtype_promotion("strict"):
        assert at_least_float32(dtype) == expected


@pytest.mark.parametrize(("widest", "dtype"), LOGITS, indirect=["widest"])
@pytest.mark.parametrize("router", ROUTERS)
def test_routers_losses_and_statistics_promote_nothing_implicitly(router, dtype, widest):
    def loss(logits: jax.Array, bias: jax.Array) -> Any:
        valid = jnp.arange(logits.shape[1])[None] < jnp.array([16, 9])[:, None]
        routing = jaxmoe.route(logits, ROUTERS[router], selection_bias=bias, token_valid=valid)
        again = jaxmoe.route(logits, ROUTERS[router], topk_ids=routing.topk_ids, token_valid=valid)
        aux = jaxmoe.router_aux(routing, logits, token_valid=valid)
        stats = jaxmoe.load_stats(routing.topk_ids, 8, token_valid=valid)
        total = aux.load_balancing_loss + aux.router_z_loss
        total += jaxmoe.load_balancing_loss(routing) + jaxmoe.router_z_loss(logits, token_valid=valid)
        total += jnp.sum(jnp.sin(routing.topk_weights) + jnp.cos(again.topk_weights))
        bias = jaxmoe.update_selection_bias(bias, stats.rows_per_expert)
        return total, (routing, stats, stats.max_over_mean_load, aux.stats, bias)

    logits = jax.random.normal(jax.random.key(0), (2, 16, 8)).astype(dtype)
    assert_the_same_under_strict_modes(jax.value_and_grad(loss, has_aux=True), logits, jnp.linspace(0, 0.1, 8))


def layer_with_gradients(kind: str, implementation: Any, **options: Any) -> Any:
    """A function of x, ids, weights and experts: output, statistics, and the gradients of what has some."""

    options = {"axis_name": None, "implementation": implementation} | options

    def loss(x: jax.Array, weights: jax.Array, experts: Any, ids: jax.Array) -> Any:
        y, stats = jaxmoe.moe_layer(x, ids, weights, experts, return_stats=True, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, stats)

    differentiated = (0, 1) if kind in QUANTIZED else (0, 1, 2)
    gradients = jax.value_and_grad(loss, argnums=differentiated, has_aux=True)
    return lambda x, ids, weights, experts: gradients(x, weights, experts, ids)


@pytest.mark.parametrize("kind", ["wide", "fused", "mixed", *QUANTIZED])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layers_and_their_gradients_promote_nothing_implicitly(implementation, kind, widest):
    assert_the_same_under_strict_modes(layer_with_gradients(kind, implementation), *arrays(kind)[:4])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_layers_of_tokens_in_float64_promote_nothing_implicitly(implementation):
    with jax.enable_x64(True):
        function = layer_with_gradients("wide", implementation)
        assert_the_same_under_strict_modes(function, *arrays(dtype=jnp.float64)[:4])


@pytest.mark.parametrize("way", WAYS)
def test_layers_over_several_hosts_promote_nothing_implicitly(way, widest):
    network = jaxmoe.NetworkPlan(2, way, chunks=1, round_tokens=2)
    function = layer_with_gradients("wide", "xla", axis_name="expert", mesh=mesh_of("expert"), network=network)
    assert_the_same_under_strict_modes(function, *arrays()[:4])


def test_rows_that_take_several_batches_promote_nothing_implicitly(widest):
    function = layer_with_gradients("wide", "xla", plan=jaxmoe.Plan(batch_rows=16))
    assert_the_same_under_strict_modes(function, *arrays()[:4])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_layers_that_round_rows_promote_nothing_implicitly(implementation, widest):
    function = layer_with_gradients("wide", implementation, precision="fp8")
    assert_the_same_under_strict_modes(function, *arrays()[:4])


@pytest.mark.parametrize("products", [False, True], ids=["rows", "products"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dispatch_and_combine_and_their_gradients_promote_nothing_implicitly(implementation, products, widest):
    x, ids, weights, experts = arrays()[:4]
    where: dict[str, Any] = {"axis_name": None, "implementation": implementation}

    def loss(x: jax.Array, weights: jax.Array, into: jax.Array, back: jax.Array) -> jax.Array:
        if products:
            there = jaxmoe.dispatch_matmul(x, ids, into, **where)
            y = jaxmoe.matmul_combine(there.rows, back, weights, there.handle)
        else:
            arrived = jaxmoe.dispatch(x, ids, num_experts=experts.num_experts, **where)
            y = jaxmoe.combine(arrived.wide_rows, weights, arrived.handle)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    function = jax.value_and_grad(loss, argnums=(0, 1, 2, 3) if products else (0, 1))
    assert_the_same_under_strict_modes(function, x, weights, experts.w_gate, experts.w_down)


def test_flax_layers_promote_nothing_implicitly(widest):
    options: dict[str, Any] = {"biases": True, "router_bias": True, "shared_intermediate": 64, "shared_gate": True}
    moe = MoE(32, 48, 8, ROUTERS["softmax"], axis_name=None, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(moe)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        y, aux = nnx.merge(graph, state)(x)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + aux.load_balancing_loss

    x = jax.random.normal(jax.random.key(1), (2, 16, 32)).astype(jnp.bfloat16)
    assert_the_same_under_strict_modes(jax.value_and_grad(lambda x, state: loss(state, x)), x, state)
