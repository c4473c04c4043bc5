"""The table of activations: closed forms against JAX's own derivative and against published implementations."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmoe
from jaxmoe import sharding
from jaxmoe.activation import ACTIVATIONS, resolve
from jaxmoe.implementations.megakernel import limits
from jaxmoe.testing import make_inputs, relative_error

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


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ["limit", "alpha", "up_offset"])
def test_a_traced_number_of_swiglu_is_an_error_that_says_what_is_needed(name):
    with pytest.raises(TypeError, match=f"SwiGLU: {name}=.* must be a number that is known where the layer is traced"):
        jax.jit(lambda value: jaxmoe.SwiGLU(**{name: value}).value(jnp.ones(2), jnp.ones(2)))(1.5)
    known: dict[str, Any] = {name: jnp.float32(1.5)}
    assert getattr(jaxmoe.SwiGLU(**known), name) == 1.5


@pytest.mark.usefixtures("unchecked_shapes")
def test_none_is_a_limit_and_no_other_number_of_swiglu():
    assert jaxmoe.SwiGLU(limit=None).limit is None
    with pytest.raises(TypeError, match="SwiGLU: alpha=None must be a number"):
        jaxmoe.SwiGLU(alpha=None)  # pyright: ignore[reportArgumentType]


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


# Functions of the user's.


def squared_times(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate * gate * up


def bent_sum(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Not zero where both are."""
    return jax.nn.softplus(gate + 0.5 * up)


def either(gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
    return jnp.tanh(gate) if up is None else jnp.tanh(gate) + up


def gradients(activation: Any, implementation: str, gated: bool = True) -> Any:
    """Returns output and gradients of a layer with biases, unused slots and several batches of rows."""
    x, ids, weights, experts, _ = make_inputs(0, biases=True, gated=gated)
    ids = ids.at[:5, 0].set(-1)
    plan = jaxmoe.Plan(batch_rows=16) if implementation == "xla" else None

    def loss(x: jax.Array, weights: jax.Array, experts: jaxmoe.Experts) -> Any:
        y = jaxmoe.moe_layer(
            x,
            ids,
            weights,
            experts,
            axis_name=None,
            activation=activation,
            implementation=implementation,  # pyright: ignore[reportArgumentType]
            plan=plan,
        )
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(x, weights, experts)


def assert_near(value: Any, truth: Any) -> None:
    for got, want in zip(jax.tree.leaves(value), jax.tree.leaves(truth), strict=True):
        assert relative_error(got, want) < 5e-6


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jax.nn.silu, "silu"),
        (jax.nn.swish, "silu"),
        (nnx.silu, "silu"),
        (jax.nn.relu, "relu"),
        (jax.nn.gelu, "gelu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=True), "gelu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=False), "gelu"),
    ],
)
def test_functions_of_jax_that_the_table_has_are_taken_for_their_names(function, name):
    assert resolve(function) is ACTIVATIONS[name]
    x = jnp.linspace(-8, 8, 1001)
    np.testing.assert_allclose(resolve(function).value(x, None), function(x), rtol=2e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_function_that_is_silu_computes_and_differentiates_what_the_name_does(implementation):
    for function in (lambda gate, up: gate * jax.nn.sigmoid(gate) * up, lambda gate: gate * jax.nn.sigmoid(gate)):
        assert_near(gradients(function, implementation), gradients("silu", "reference"))
    assert_near(
        gradients(lambda gate: gate * jax.nn.sigmoid(gate), implementation, False),
        gradients("silu", "reference", False),
    )


@pytest.mark.slow
@pytest.mark.parametrize("function", [squared_times, bent_sum, either])
def test_xla_computes_with_functions_of_gate_and_up_what_the_reference_does(function):
    assert_near(gradients(function, "xla"), gradients(function, "reference"))


def test_the_arguments_of_a_function_say_whether_it_takes_up():
    gate, up = jnp.array([-3.0]), jnp.array([2.0])
    assert resolve(jax.nn.leaky_relu).value(gate, up) == pytest.approx(-0.03 * 2)  # up is not its slope
    assert resolve(functools.partial(jax.nn.leaky_relu, negative_slope=0.5)).value(gate, up) == -3
    assert resolve(squared_times).value(gate, up) == 18
    assert resolve(either).value(gate, up) == pytest.approx(2 + np.tanh(-3))
    assert resolve(either).value(gate, None) == pytest.approx(np.tanh(-3))
    assert [resolve(f).needs_up for f in (squared_times, either, jax.nn.elu)] == [True, False, False]


class Scaled:
    """No pytree: what it holds cannot be seen."""

    def __init__(self, slope: Any) -> None:
        self.slope = slope

    def __call__(self, gate: jax.Array) -> jax.Array:
        return gate * self.slope


@jax.tree_util.register_pytree_node_class
class ScaledPytree(Scaled):
    def tree_flatten(self):
        return (self.slope,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


class ScaledModule(nnx.Module, pytree=False):
    def __init__(self) -> None:
        self.slope = nnx.Param(jnp.ones(()))

    def __call__(self, gate: jax.Array) -> jax.Array:
        return gate * self.slope

    of_another_name = __call__


@pytest.mark.parametrize(
    ("activation", "named"),
    [
        (nnx.PReLU(), "a PReLU"),
        (ScaledModule(), "a ScaledModule"),
        (ScaledModule().of_another_name, "a method of a ScaledModule"),
        (ScaledPytree(1.0), "a ScaledPytree"),
        (functools.partial(ScaledPytree(jnp.ones(()))), "a partial of a ScaledPytree"),
        (jax.tree_util.Partial(jax.nn.leaky_relu, negative_slope=0.5), "a Partial"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_values_that_may_change_is_refused_with_what_to_do(activation, named):
    x, ids, weights, experts, _ = make_inputs(0)
    told = f"moe_layer: activation is {named}, which has values of its own.*dispatch_matmul and jaxmoe.matmul_combine"
    with pytest.raises(TypeError, match=told):
        jaxmoe.moe_layer(x, ids, weights, experts, axis_name=None, activation=activation)


def test_pytrees_without_values_and_objects_are_taken():
    for activation in (jax.tree_util.Partial(jnp.tanh), functools.partial(jnp.tanh), Scaled(2.0), jax.jit(jnp.tanh)):
        assert resolve(activation).value(jnp.ones(1), jnp.ones(1)).shape == (1,)


@pytest.mark.parametrize("options", [{"implementation": "xla"}, {"implementation": "reference", "precision": "fp8"}])
@pytest.mark.parametrize("kind", ["function", "partial", "object", "default", "of a helper"])
def test_derivatives_of_a_layer_whose_activation_closes_over_a_traced_value_say_so(kind, options):
    x, ids, weights, experts, _ = make_inputs(0)

    def loss(x: jax.Array, slope: Any) -> jax.Array:
        def of_helper(gate: Any) -> Any:  # which also holds itself
            return scaled(gate) if of_helper else gate

        def scaled(gate: Any) -> Any:
            return gate * slope

        activation = {
            "function": lambda gate: gate * slope,
            "partial": functools.partial(jax.nn.leaky_relu, negative_slope=slope),
            "object": Scaled(slope),
            "default": lambda gate, slope=slope: gate * slope,
            "of a helper": of_helper,
        }[kind]
        return jnp.sum(jaxmoe.moe_layer(x, ids, weights, experts, axis_name=None, activation=activation, **options))

    assert jax.eval_shape(jax.jit(loss), x, 2.0).shape == ()
    with pytest.raises(TypeError, match=r"moe_layer: activation=.* closes over a value that JAX traces"):
        jax.jit(jax.grad(loss))(x, 2.0)
    assert jax.eval_shape(jax.grad(functools.partial(loss, slope=2.0)), x).shape == x.shape


def test_calls_with_one_function_are_one_program_and_with_equal_ones_two():
    x, ids, weights, experts, _ = make_inputs(0)
    calls = [
        jaxmoe.explain(x, ids, weights, experts, axis_name=None, activation=function).call
        for function in (squared_times, squared_times, lambda gate, up: gate * gate * up)
    ]
    assert calls[0] == calls[1]
    assert hash(calls[0]) == hash(calls[1])
    assert calls[0] != calls[2]


def test_without_a_named_implementation_a_function_runs_on_xla_and_explain_says_why(monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda *_: "gpu")
    monkeypatch.setattr(limits, "check_platform", lambda *_: None)
    arguments = make_inputs(0, dtype=jnp.bfloat16)[:4]
    told = jaxmoe.explain(*arguments, axis_name=None, activation=squared_times)
    assert told.implementation == "xla"
    assert "'megakernel' cannot run this call (moe_layer: activation=squared_times exists in Python only" in str(told)
    with pytest.raises(NotImplementedError, match="Use one of those, pass implementation='xla', or None to choose"):
        jaxmoe.explain(*arguments, axis_name=None, activation=squared_times, implementation="megakernel")
