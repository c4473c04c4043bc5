"""Halves of a layer that run anywhere: the suite of all implementations, float64, and what bad input gets."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import make_ids, relative_error
from tests.exchange_suite import own_layers, truth_of_own_layers, with_gradients
from tests.layer_calls import mesh_of
from tests.matmul_suite import MatmulSuite


class OnCpu(MatmulSuite):
    """What only a CPU has."""

    def test_gradients_equal_finite_differences_in_float64(self):
        with jax.enable_x64(True):
            rng = np.random.default_rng(0)
            x, ids = rng.standard_normal((16, 3)), make_ids(rng, 16, 8, 2, "unused-slots")
            weights, first, second = rng.random((16, 2)), rng.standard_normal((8, 3, 4)), rng.standard_normal((8, 4, 5))
            mesh, split = mesh_of("data", "expert"), P(("data", "expert"))

            def block(x: Any, weights: Any, first: Any, second: Any, ids: Any) -> Any:
                arrived = self.dispatch_matmul(x, ids, first, capacity=6)
                return jaxmoe.matmul_combine(jnp.sin(arrived.rows) + 0.1, second, weights, arrived.handle)

            specs = split, split, P("expert"), P("expert"), split
            layer: Any = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=split)
            loss = lambda *arrays: jnp.sum(layer(*arrays, ids) ** 2)  # noqa: E731
            loss = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
            at, step = tuple(map(jnp.asarray, (x, weights, first, second))), 1e-6
            _, gradients = loss(*at)
            assert all(gradient.dtype == jnp.float64 for gradient in gradients)
            for _ in range(3):
                along = [jnp.asarray(rng.standard_normal(array.shape)) for array in at]
                (ahead, _), (behind, _) = (
                    loss(*(array + sign * step * way for array, way in zip(at, along, strict=True))) for sign in (1, -1)
                )
                slope = sum(jnp.vdot(gradient, way) for gradient, way in zip(gradients, along, strict=True))
                np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6)

    def test_a_scan_over_checkpointed_layers_around_an_activation_of_ones_own_gives_what_moe_layer_gives(self):
        arguments, experts = own_layers(self.hidden)

        def layers(x: Any, ids: Any, weights: Any, experts: Any) -> Any:
            def layer(x: Any, experts: Any) -> Any:
                both = jnp.concatenate([experts.w_gate, experts.w_up], -1)
                arrived = self.dispatch_matmul(x, ids, both, alignment=8)
                gate, up = jnp.split(arrived.rows, 2, -1)
                return x + jaxmoe.matmul_combine(jax.nn.silu(gate) * up, experts.w_down, weights, arrived.handle), None

            return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, experts)[0]

        tokens = P(("data", "expert"))
        specs = tokens, tokens, tokens, P(None, "expert")
        sharded = jax.shard_map(layers, mesh=mesh_of("data", "expert"), in_specs=specs, out_specs=tokens)
        for value, truth in zip(
            jax.tree.leaves(with_gradients(sharded)(arguments, experts)), truth_of_own_layers(self.hidden), strict=True
        ):
            assert relative_error(value, truth) < 1e-5


class TestXla(OnCpu):
    implementation = "xla"


class TestReference(OnCpu):
    implementation = "reference"


# --- bad input ------------------------------------------------------------------------------------------------------

X, IDS, MATRICES = jnp.ones((16, 8)), jnp.zeros((16, 2), jnp.int32), jnp.ones((8, 8, 12))
ROUTING = jax.eval_shape(lambda: jaxmoe.route(jnp.zeros((16, 4)), jaxmoe.RouterConfig(top_k=2)))

# What is wrong -> (arguments, type, parts of the message: what was given, what is needed or what to do).
BAD_DISPATCH: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "x of one dimension": ({"x": X[0]}, ValueError, ["x has shape (8,)", "x[None]"]),
    "a matrix for all": ({"matrices": MATRICES[0]}, ValueError, ["matrices has shape (8, 12)", "[experts, 8, width]"]),
    "matrices of other tokens": ({"matrices": MATRICES.swapaxes(1, 2)}, ValueError, ["(8, 12, 8)", "8, width"]),
    "matrices of no width": ({"matrices": MATRICES[..., :0]}, ValueError, ["(8, 8, 0)", "8, width"]),
    "matrices of another dtype": (
        {"matrices": MATRICES.astype(jnp.bfloat16)},
        TypeError,
        ["matrices is bfloat16", "x float32", "matrices.astype(x.dtype)"],
    ),
    "matrices in 8 bits": (
        {"matrices": jaxmoe.BlockScaled(jnp.ones((8, 12, 8), jnp.float8_e4m3fn), jnp.ones((8, 1, 1)))},
        TypeError,
        ["matrices is a BlockScaled and x float32", "matrices.wide(x.dtype)"],
    ),
    "matrices that are a list": ({"matrices": [1.0]}, TypeError, ["matrices is a list", "array"]),
    "another number than the router's": ({"topk_ids": ROUTING}, ValueError, ["among 4 experts", "(8, 8, 12)"]),
    "per_expert without a capacity": ({"per_expert": True}, ValueError, ["needs capacity=", "capacity=32"]),
    "an unknown implementation": ({"implementation": "fast"}, ValueError, ["'fast'", "'xla'", "'reference'"]),
    "matrices that the axis does not divide": (
        {"matrices": MATRICES[:6], "axis_name": "expert", "mesh": mesh_of("data", "expert")},
        ValueError,
        ["num_experts=6", "4 ranks of mesh axis 'expert'"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("wrong", BAD_DISPATCH)
def test_a_bad_dispatch_matmul_raises_what_was_given_and_what_to_do(wrong):
    changes, kind, parts = BAD_DISPATCH[wrong]
    arguments: Any = {"x": X, "topk_ids": IDS, "matrices": MATRICES, "axis_name": None} | changes
    with pytest.raises(kind) as raised:
        jaxmoe.dispatch_matmul(**arguments)
    message = str(raised.value)
    assert message.startswith("dispatch_matmul: ")
    for part in parts:
        assert part in message, message


ARRIVED = jax.eval_shape(lambda: jaxmoe.dispatch_matmul(X, IDS, MATRICES, axis_name=None, capacity=24))
ROWS, SECOND, WEIGHTS = jnp.ones((24, 12)), jnp.ones((8, 12, 5)), jnp.ones((16, 2))
BAD_COMBINE: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "what dispatch_matmul returned": ({"handle": ARRIVED}, TypeError, ["handle is a Dispatched", "dispatched.handle"]),
    "rows of tokens": ({"rows": X}, ValueError, ["rows has shape (16, 8)", "[24, width]"]),
    "matrices of other rows": ({"matrices": MATRICES}, ValueError, ["matrices has shape (8, 8, 12)", "[8, 12, width]"]),
    "matrices of half of the experts": ({"matrices": SECOND[:4]}, ValueError, ["(4, 12, 5)", "[8, 12, width]"]),
    "matrices of another dtype": (
        {"matrices": SECOND.astype(jnp.float16)},
        TypeError,
        ["matrices is float16", "rows float32", "matrices.astype(rows.dtype)"],
    ),
    "matrices in 8 bits": (
        {"matrices": jaxmoe.BlockScaled(jnp.ones((8, 5, 12), jnp.float8_e4m3fn), jnp.ones((8, 1, 1)))},
        TypeError,
        ["matrices is a BlockScaled and rows float32", "matrices.wide(rows.dtype)"],
    ),
    "matrices that are a number": ({"matrices": 1.0}, TypeError, ["matrices is a float", "array"]),
    "weights in low precision": (
        {"topk_weights": WEIGHTS.astype(jnp.bfloat16)},
        TypeError,
        ["topk_weights is bfloat16", "float32", "astype"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("wrong", BAD_COMBINE)
def test_a_bad_matmul_combine_raises_what_was_given_and_what_to_do(wrong):
    changes, kind, parts = BAD_COMBINE[wrong]
    arguments: Any = {"rows": ROWS, "matrices": SECOND, "topk_weights": WEIGHTS, "handle": ARRIVED.handle} | changes
    with pytest.raises(kind) as raised:
        jaxmoe.matmul_combine(**arguments)
    message = str(raised.value)
    assert message.startswith("matmul_combine: ")
    for part in parts:
        assert part in message, message
