"""The table of activations: closed forms against JAX's own derivative and against published implementations."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.activation import ACTIVATIONS, resolve

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "activations.npz")
ALL = [*ACTIVATIONS.values(), jaxmoe.SwiGLU(), jaxmoe.SwiGLU(limit=1.5, alpha=1.702, up_offset=1.0)]


@pytest.mark.parametrize(
    ("activation", "gated"),
    [(a, gated) for a in ALL for gated in (True, False) if gated or not a.needs_up],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_closed_form_equals_the_derivative_of_the_value(activation, gated):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        gate, up, dh = jnp.asarray(3 * rng.standard_normal((3, 500)))
        up = up if gated else None
        value, vjp = jax.vjp(activation.value, gate, up)
        assert value.shape == gate.shape
        for got, want in zip(activation.vjp(gate, up, dh), vjp(dh), strict=True):
            if want is not None:
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        # gelu's value carries our own slope, so differences check what JAX's derivative cannot.
        step = 1e-6
        slope = (activation.value(gate + step, up) - activation.value(gate - step, up)) / (2 * step)
        kink = jnp.abs(gate) < 1e-5 if activation is ACTIVATIONS["relu"] else jnp.abs(gate - 1.5) < 1e-5
        got = activation.vjp(gate, up, jnp.ones_like(dh))[0]
        np.testing.assert_allclose(jnp.where(kink, 0, got), jnp.where(kink, 0, slope), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("silu", jax.nn.silu),
        ("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
        ("gelu_tanh", lambda x: jax.nn.gelu(x, approximate=True)),
        ("relu", jax.nn.relu),
    ],
)
def test_named_activations_are_those_of_jax(name, published):
    x = jnp.linspace(-8, 8, 1001)
    np.testing.assert_allclose(resolve(name).value(x, None), published(x), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(resolve(name).value(x, 2 * x), 2 * x * published(x), rtol=2e-6, atol=1e-6)


def test_swiglu_without_options_is_silu():
    x = jnp.linspace(-8, 8, 1001)
    np.testing.assert_allclose(jaxmoe.SwiGLU().value(x, 1 - x), resolve("silu").value(x, 1 - x), rtol=1e-6)


def test_the_slope_is_one_at_the_limit_and_zero_beyond():
    activation = jaxmoe.SwiGLU(limit=2.0)
    at, beyond = jnp.array([2.0, -2.0]), jnp.array([2.001, -2.001])
    ones = jnp.ones(2)
    assert (activation.vjp(ones, at, ones)[1] != 0).all()
    assert (activation.vjp(ones, beyond, ones)[1] == 0).all()
    assert activation.vjp(at, ones, ones)[0][0] != 0
    # The gate is clamped from above only.
    np.testing.assert_array_equal(activation.vjp(beyond, ones, ones)[0] == 0, [True, False])


@pytest.mark.parametrize("activation", ALL, ids=str)
def test_nan_and_infinity_are_not_hidden(activation):
    nan = jnp.array([jnp.nan])
    assert jnp.isnan(activation.value(nan, jnp.ones(1))).all()
    assert jnp.isfinite(activation.value(jnp.array([-80.0]), jnp.ones(1))).all()


@pytest.mark.parametrize(
    ("model", "activation"),
    [("gpt_oss", jaxmoe.SwiGLU.gpt_oss()), ("deepseek_v4", jaxmoe.SwiGLU.deepseek_v4())],
)
def test_swiglu_reproduces_the_clamped_activations_of_published_models(model, activation):
    gate, up, output = (GOLDEN[f"{model}/{name}"] for name in ("gate", "up", "output"))
    assert (np.abs(gate) > activation.limit).any()
    assert (np.abs(up) > activation.limit).any()
    np.testing.assert_allclose(activation.value(jnp.asarray(gate), jnp.asarray(up)), output, rtol=2e-6, atol=1e-6)
