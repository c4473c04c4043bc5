"""The dense reference: the suite of all implementations, and a loop over tokens in numpy as the truth's own truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.testing import dense, make_inputs
from tests.layer_calls import SIZES
from tests.layer_suite import LayerSuite


class TestReference(LayerSuite):
    implementation = "reference"


@pytest.mark.parametrize("gated", [True, False])
def test_the_reference_equals_a_loop_over_tokens_and_slots(gated):
    with jax.enable_x64(True):
        a = make_inputs(0, **SIZES, dtype=jnp.float64, biases=True, gated=gated, routing="unused-slots")
        y = np.asarray(dense(a))
        e = jax.tree.map(np.asarray, a.experts)
    x, ids, weights = (np.asarray(array) for array in a[:3])
    expected = np.zeros_like(x)
    for token, (token_ids, token_weights) in enumerate(zip(ids, weights, strict=True)):
        for i, weight in zip(token_ids, token_weights, strict=True):
            if i < 0:
                continue
            gate = x[token] @ e.w_gate[i] + e.b_gate[i]
            h = gate / (1 + np.exp(-gate))
            if gated:
                h = h * (x[token] @ e.w_up[i] + e.b_up[i])
            expected[token] += weight * (h @ e.w_down[i] + e.b_down[i])
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
