"""8 bits on the host executor, through `moe_layer`: the suite of all implementations that multiply them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.testing import make_inputs
from tests.fp8_suite import Fp8Suite
from tests.layer_calls import layer, schedule_in
from tests.quantized_layer import SIZES


class TestMegakernel(Fp8Suite):
    implementation = "megakernel"
    dtypes = (jnp.bfloat16, jnp.float16)
    plans = (
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=6),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=3, ring_tiles=5, chunk_rows=3, keep_tokens=True),
    )


@pytest.mark.parametrize("kind", ["128x128", "mxfp4"])
def test_gradients_beside_decoded_experts_have_the_same_bits_whatever_is_kept(kind):
    """Gate and up of a forward pass that decodes weights are those that its backward pass would compute again."""
    arguments = make_inputs(3, routing="zipf", **SIZES)
    experts = jax.jit(functools.partial(jaxmoe.quantize, block=kind))(arguments.experts)
    precision = "w4a16" if kind == "mxfp4" else "w8a16"

    def gradients(residuals):
        run = layer("in shard_map", implementation="megakernel", precision=precision, residuals=residuals)
        loss = lambda x, weights: jnp.sum(  # noqa: E731
            jnp.sin(run(arguments._replace(x=x, topk_weights=weights, experts=experts)))
        )
        gradient = jax.jit(jax.grad(loss, (0, 1))).lower(arguments.x, arguments.topk_weights)
        carried = schedule_in(gradient.as_text(), "jaxmoe_backward")
        assert carried.weight_slots > 0
        return carried.saved_tiles, gradient.compile()(arguments.x, arguments.topk_weights)

    (nothing, again), (kept, saved) = gradients("recompute"), gradients("save")
    assert nothing == 0 < kept
    for one, other in zip(again, saved, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).any()
