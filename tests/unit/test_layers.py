"""What both Flax layers compute: the blocks written out by hand, in every dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import RouterConfig
from jaxmoe.options import Arguments
from jaxmoe.testing import dense, relative_error
from tests.unit.blocks_by_hand import (
    BATCH,
    BIAS,
    BLOCKS,
    EXPERTS,
    HIDDEN,
    LENGTH,
    SHARED,
    VALID,
    X,
    by_hand,
    fill,
    numbers,
    silu_times,
)
from tests.unit.flax_layers import LinenLayer, NNXLayer, assert_equal, expected, run


class Behaviours:
    """What a layer of either library computes."""

    layer: Any

    @pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3", "deepseek-v4", "qwen3-next"])
    def test_output_losses_and_gradients_are_those_of_the_block_written_by_hand(self, name):
        assert_equal(run(self.layer, name), expected(name))

    @pytest.mark.slow
    def test_masked_tokens_hold_nan_that_reaches_no_output_loss_or_gradient(self):
        result = run(self.layer, "everything", masked=True)
        assert_equal(result, expected("everything", masked=True))
        np.testing.assert_array_equal(result.y[~VALID], 0)
        np.testing.assert_array_equal(result.x[~VALID], 0)
        assert result.aux.stats.unused_slots == 2 * (~VALID).sum()

    def test_gradients_reach_every_parameter_but_not_the_selection_bias(self):
        result = run(self.layer, "everything", masked=True)
        assert {name for name, gradient in result.parameters.items() if not jnp.any(gradient)} == set()
        np.testing.assert_array_equal(result.bias, np.zeros(EXPERTS))

    def test_routed_output_is_that_of_the_dense_reference(self):
        shapes = self.layer().shapes(gated=False, biases=True)
        assert shapes.keys() == {"router_kernel", "w_gate", "w_down", "b_gate", "b_down"}
        p = fill(shapes)
        x = X().reshape(-1, HIDDEN)
        routing = jaxmoe.route(x @ p["router_kernel"], RouterConfig.mixtral())
        experts = jaxmoe.Experts(p["w_gate"], None, p["w_down"], p["b_gate"], None, p["b_down"])
        truth = dense(Arguments(x, routing.topk_ids, routing.topk_weights, experts, None), activation="gelu")
        call = self.layer().calling(gated=False, biases=True, activation="gelu", implementation="reference")
        y, _ = jax.jit(call)(p, None, x)
        assert relative_error(y, truth) < 1e-6

    def test_losses_of_ones_own_are_made_of_the_routing_and_the_logits_where_a_layer_is_asked_for_them(self):
        arguments = BLOCKS["everything"].arguments
        p, valid = fill(self.layer().shapes(**arguments)), jnp.asarray(VALID)
        asked, silent = (self.layer().calling(**arguments, return_routing=flag) for flag in (True, False))

        def losses_of_the_layer(p, x):
            aux = silent(p, BIAS(), x, valid)[1]
            assert (aux.routing, aux.logits) == (None, None)
            return aux.load_balancing_loss + aux.router_z_loss

        def losses_of_ones_own(p, x):
            aux = asked(p, BIAS(), x, valid)[1]
            balance = jaxmoe.load_balancing_loss(aux.routing, token_valid=valid)
            return balance + jaxmoe.router_z_loss(aux.logits, token_valid=valid), aux

        (loss, aux), gradients = jax.jit(jax.value_and_grad(losses_of_ones_own, argnums=(0, 1), has_aux=True))(p, X())
        truth, expected_gradients = jax.jit(jax.value_and_grad(losses_of_the_layer, argnums=(0, 1)))(p, X())
        assert relative_error(loss, truth) < 1e-6
        assert relative_error(gradients[1], expected_gradients[1]) < 1e-6
        assert relative_error(gradients[0]["router_kernel"], expected_gradients[0]["router_kernel"]) < 1e-6
        assert aux.logits.shape == (BATCH, LENGTH, EXPERTS)
        np.testing.assert_array_equal(aux.routing.topk_ids[~VALID], -1)
        np.testing.assert_array_equal(np.bincount(aux.routing.topk_ids[VALID].ravel()), aux.stats.rows_per_expert)

    @pytest.mark.slow
    def test_precision_rounds_tokens_and_experts_of_a_forward_pass_to_8_bits(self):
        p = fill(self.layer().shapes())
        x = X().reshape(-1, HIDDEN)
        routing = jaxmoe.route(x @ p["router_kernel"], RouterConfig.mixtral())
        experts = jaxmoe.Experts(p["w_gate"], p["w_up"], p["w_down"])
        arguments = Arguments(x, routing.topk_ids, routing.topk_weights, experts, None)
        y, _ = jax.jit(self.layer().calling(implementation="reference", precision="fp8"))(p, None, x)
        assert relative_error(y, dense(arguments, precision="fp8")) < 1e-3
        assert relative_error(y, dense(arguments)) > 0.01

    @pytest.mark.slow
    def test_routing_in_bfloat16_layers_is_that_of_float32_logits(self):
        p = fill(self.layer().shapes(shared_intermediate=SHARED))
        x = numbers(7, 16, 16, HIDDEN).astype(jnp.bfloat16)
        exact = x.astype(jnp.float32) @ p["router_kernel"]
        rounded = x @ p["router_kernel"].astype(jnp.bfloat16)
        rows, other_rows = (
            jaxmoe.load_stats(jaxmoe.route(logits, RouterConfig.mixtral()).topk_ids, EXPERTS).rows_per_expert
            for logits in (exact, rounded)
        )
        call = self.layer().calling(dtype=jnp.bfloat16, shared_intermediate=SHARED, implementation="reference")
        y, aux = jax.jit(call)(p, None, x)
        assert (rows != other_rows).any()  # the inputs can tell the two apart
        np.testing.assert_array_equal(aux.stats.rows_per_expert, rows)
        p32, x32 = jax.tree.map(lambda array: array.astype(jnp.bfloat16).astype(jnp.float32), (p, x))
        truth = by_hand(BLOCKS["mixtral"], p32 | {"router_kernel": p["router_kernel"]}, None, x32.reshape(-1, HIDDEN))[
            0
        ]
        truth += (
            silu_times(x32 @ p32["shared_w_gate"], x32 @ p32["shared_w_up"]).reshape(-1, SHARED) @ p32["shared_w_down"]
        )
        assert y.dtype == jnp.bfloat16
        assert relative_error(y.reshape(-1, HIDDEN), truth) < 0.01

    @pytest.mark.parametrize(
        ("x_dtype", "dtype", "param_dtype", "output"),
        [
            ("float32", None, "float32", "float32"),
            ("bfloat16", None, "float32", "float32"),
            ("bfloat16", None, "bfloat16", "bfloat16"),
            ("bfloat16", "bfloat16", "float32", "bfloat16"),
            ("float32", "bfloat16", "float32", "bfloat16"),
            ("float64", None, "float64", "float64"),
            ("float64", "float32", "float32", "float32"),
        ],
    )
    def test_it_computes_in_dtype_or_in_the_promotion_of_input_and_parameters(
        self, x_dtype, dtype, param_dtype, output
    ):
        arguments = {**BLOCKS["everything"].arguments, "dtype": dtype, "param_dtype": param_dtype}
        with jax.enable_x64(True):
            shapes = self.layer().shapes(**arguments)
            assert {array.dtype.name for array in shapes.values()} == {param_dtype}
            bias = jax.ShapeDtypeStruct((EXPERTS,), jnp.float32)
            x = jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), x_dtype)
            y, aux = jax.eval_shape(self.layer().calling(**arguments), shapes, bias, x)
        assert y.dtype == output
        assert aux.load_balancing_loss.dtype == ("float64" if output == "float64" else "float32")


class TestNNX(Behaviours):
    layer = NNXLayer


class TestLinen(Behaviours):
    layer = LinenLayer
