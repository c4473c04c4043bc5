"""`jaxmoe.nnx.MoE` and `jaxmoe.linen.MoE` against blocks written out by hand; both inherit one suite of behaviours."""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
import jaxmoe.linen
import jaxmoe.nnx
from jaxmoe import RouterConfig, SwiGLU
from jaxmoe.options import Arguments
from jaxmoe.routing import MoEAux
from jaxmoe.testing import dense, relative_error

BATCH, LENGTH, HIDDEN, INTERMEDIATE, SHARED, EXPERTS = 8, 3, 16, 24, 20, 8
DEEPSEEK_V3 = RouterConfig(top_k=2, score="sigmoid", num_groups=2, top_groups=1, scaling_factor=2.5)
LOSS_WEIGHTS = (0.3, 0.2)  # of the load-balancing loss and the z-loss


# The layers by hand: every expert on every token, weighted by a dense [tokens, experts] matrix.


@dataclasses.dataclass(frozen=True)
class Block:
    """One published architecture: the arguments that make it, and what it computes."""

    arguments: Mapping[str, Any]
    weights: Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array, jax.Array]]
    activation: Callable[[jax.Array, jax.Array], jax.Array]
    shared_activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def largest(scores: jax.Array, count: int) -> jax.Array:
    """Which scores are among the largest of their row; without ties."""
    return scores >= jnp.sort(scores, axis=-1)[:, -count, None]


def softmax_then_top2(logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    del bias
    scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    chosen = largest(scores, 2)
    weights = jnp.where(chosen, scores, 0)
    return weights / weights.sum(-1, keepdims=True), chosen, scores


def top2_then_softmax(logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    del bias
    chosen = largest(logits, 2)
    weights = jnp.where(chosen, jnp.exp(logits), 0)
    return weights / weights.sum(-1, keepdims=True), chosen, jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)


def best_group_then_sigmoid(logits: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores = 1 / (1 + jnp.exp(-logits))
    choice = (scores + bias).reshape(-1, 2, EXPERTS // 2)
    best_two = jnp.sort(choice, axis=-1)[..., -2:].sum(-1)
    choice = jnp.where(largest(best_two, 1)[..., None], choice, -jnp.inf).reshape(-1, EXPERTS)
    chosen = largest(choice, 2)
    weights = jnp.where(chosen, scores, 0)
    return 2.5 * weights / weights.sum(-1, keepdims=True), chosen, scores / scores.sum(-1, keepdims=True)


def sqrt_softplus(logits: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores = jnp.sqrt(jnp.log(1 + jnp.exp(logits)))
    chosen = largest(scores + bias, 2)
    weights = jnp.where(chosen, scores, 0)
    return 1.5 * weights / weights.sum(-1, keepdims=True), chosen, scores / scores.sum(-1, keepdims=True)


def silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1 + jnp.exp(-gate)) * up


def clamped(limit: float, alpha: float, offset: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
        return (up + offset) * gate / (1 + jnp.exp(-alpha * gate))

    return activation


BLOCKS = {
    "mixtral": Block({"router": RouterConfig.mixtral()}, softmax_then_top2, silu_times),
    # Limits far below the published ones, so that inputs of unit scale meet them.
    "gpt-oss": Block(
        {
            "router": RouterConfig(top_k=2, score="topk_softmax"),
            "activation": SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0),
            "biases": True,
            "router_bias": True,
        },
        top2_then_softmax,
        clamped(0.7, 1.702, 1.0),
    ),
    "deepseek-v3": Block(
        {"router": DEEPSEEK_V3, "selection_bias": True, "shared_intermediate": SHARED},
        best_group_then_sigmoid,
        silu_times,
        silu_times,
    ),
    "deepseek-v4": Block(
        {
            "router": RouterConfig(top_k=2, score="sqrtsoftplus", scaling_factor=1.5),
            "activation": SwiGLU(limit=0.5),
            "selection_bias": True,
            "shared_intermediate": SHARED,
        },
        sqrt_softplus,
        clamped(0.5, 1.0, 0.0),
        clamped(0.5, 1.0, 0.0),
    ),
    # Every parameter that a layer can have, and a shared expert with an activation of its own.
    "everything": Block(
        {
            "router": DEEPSEEK_V3,
            "activation": SwiGLU(limit=0.5),
            "selection_bias": True,
            "biases": True,
            "router_bias": True,
            "shared_intermediate": SHARED,
            "shared_activation": "silu",
        },
        best_group_then_sigmoid,
        clamped(0.5, 1.0, 0.0),
        silu_times,
    ),
}


def by_hand(block: Block, p: Mapping[str, jax.Array], bias: jax.Array | None, tokens: jax.Array) -> Any:
    """Returns the output for tokens `[tokens, hidden]`, both losses and the rows per expert."""
    logits = tokens @ p["router_kernel"] + p.get("router_bias", 0)
    weights, chosen, probabilities = block.weights(logits, bias)
    gate = jnp.einsum("td,edf->tef", tokens, p["w_gate"]) + p.get("b_gate", 0)
    up = jnp.einsum("td,edf->tef", tokens, p["w_up"]) + p.get("b_up", 0)
    out = jnp.einsum("tef,efd->ted", block.activation(gate, up), p["w_down"]) + p.get("b_down", 0)
    y = jnp.einsum("te,ted->td", weights, out)
    if block.shared_activation is not None:
        gate = tokens @ p["shared_w_gate"] + p.get("shared_b_gate", 0)
        up = tokens @ p["shared_w_up"] + p.get("shared_b_up", 0)
        y += block.shared_activation(gate, up) @ p["shared_w_down"] + p.get("shared_b_down", 0)
    rows = chosen.sum(0)
    balance = EXPERTS * jnp.sum(rows / rows.sum() * probabilities.mean(0))
    return y, balance, jnp.mean(jnp.log(jnp.exp(logits).sum(-1)) ** 2), rows


# Inputs. Both libraries name their parameters alike, so both layers get the same numbers.


def numbers(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray((np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32))


def fill(shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns random parameters of unit outputs, biases included."""
    filled = {}
    for seed, (name, like) in enumerate(sorted(shapes.items())):
        is_bias = "b_" in name or name.endswith("bias")
        filled[name] = numbers(seed, *like.shape, scale=0.3 if is_bias else like.shape[-2] ** -0.5)
    return filled


def fill_boxes(boxes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Linen's parameters with random values, in their boxes of metadata."""
    arrays = fill({name: box.value for name, box in boxes.items()})
    return {name: box.replace_boxed(arrays[name]) for name, box in boxes.items()}


X = functools.partial(numbers, 100, BATCH, LENGTH, HIDDEN)
COTANGENT = functools.partial(numbers, 101, BATCH, LENGTH, HIDDEN)
BIAS = functools.partial(numbers, 102, EXPERTS, scale=0.2)
VALID = np.random.default_rng(103).random((BATCH, LENGTH)) < 0.7


@dataclasses.dataclass
class Result:
    """What one differentiated call gave: output, losses and load, and gradients of the objective."""

    y: jax.Array
    aux: Any
    parameters: dict[str, jax.Array]
    bias: jax.Array | None
    x: jax.Array


@functools.cache
def expected(name: str, masked: bool = False) -> Result:
    """The block by hand, with masked tokens not there at all."""
    block, keep = BLOCKS[name], VALID if masked else np.ones_like(VALID)
    shapes = {key: value.shape for key, value in LinenLayer().shapes(**block.arguments).items()}
    parameters = fill({key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()})
    bias = BIAS() if block.arguments.get("selection_bias") else None

    def objective(p: Any, tokens: jax.Array) -> Any:
        y, balance, z, rows = by_hand(block, p, bias, tokens)
        loss = jnp.sum(y * COTANGENT()[keep]) + LOSS_WEIGHTS[0] * balance + LOSS_WEIGHTS[1] * z
        return loss, (y, (balance, z, rows))

    run = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
    (gradients, x_gradient), (y, aux) = run(parameters, X()[keep])

    def scatter(rows: jax.Array) -> jax.Array:
        return jnp.zeros((BATCH, LENGTH, HIDDEN)).at[keep].set(rows)

    return Result(scatter(y), aux, gradients, bias, scatter(x_gradient))


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def two_layers_by_hand(stacked: Mapping[str, jax.Array]) -> Any:
    """Returns gradients of two residual layers in a row, their output and their rows per expert."""
    tokens, rows = X().reshape(-1, HIDDEN), []
    for index in range(2):
        layer = {name: array[index] for name, array in stacked.items()}
        out, *_, load = by_hand(BLOCKS["deepseek-v3"], layer, jnp.zeros(EXPERTS), tokens)
        tokens, rows = tokens + out, [*rows, load]
    return jnp.sum(tokens * COTANGENT().reshape(-1, HIDDEN)), (tokens, jnp.stack(rows))


# Meshes: data 2 x expert 4, where an axis type is given.

MESHES = {
    "no mesh": (None, {"axis_name": None}, None),
    "auto": (AxisType.Auto, {"data_axes": "data"}, P(("data", "expert"))),
    "explicit": (AxisType.Explicit, {"data_axes": "data"}, P("data")),
    "explicit, experts over both axes": (AxisType.Explicit, {"axis_name": ("data", "expert")}, P(("data", "expert"))),
}


def make_mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axis_type, axis_type))


def place(array: jax.Array, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


DEFAULTS: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": INTERMEDIATE,
    "num_experts": EXPERTS,
    "router": RouterConfig.mixtral(),
    "axis_name": None,
}


class NNXLayer:
    """`jaxmoe.nnx.MoE` as a pure function of parameters by name."""

    def make(self, **arguments: Any) -> Any:
        return jaxmoe.nnx.MoE(**(DEFAULTS | arguments), rngs=nnx.Rngs(0))

    def abstract(self, **arguments: Any) -> Any:
        return nnx.eval_shape(lambda: self.make(**arguments))

    def filled(self, parameters: Mapping[str, Any], bias: Any, **arguments: Any) -> Any:
        moe = self.abstract(**arguments)
        for name, array in parameters.items():
            getattr(moe, name).set_value(array)
        if moe.selection_bias is not None:
            moe.selection_bias.set_value(bias)
        return moe

    def shapes(self, **arguments: Any) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(self.abstract(**arguments), nnx.Param))

    def names(self, **arguments: Any) -> dict[str, tuple[Any, ...] | None]:
        """Returns the axis names of every parameter."""
        state = nnx.state(self.abstract(**arguments), nnx.Param)
        return {name: variable.get_metadata().get("out_sharding") for name, variable in state.items()}

    def initial(self, **arguments: Any) -> dict[str, jax.Array]:
        """Returns the parameters as they are made."""
        moe = nnx.jit(lambda: self.make(**arguments))()
        return {name: variable[...] for name, variable in nnx.state(moe, nnx.Param).items()}

    def calling(self, **arguments: Any) -> Callable[..., tuple[jax.Array, MoEAux]]:
        def call(parameters: Any, bias: Any, x: Any, token_valid: Any = None) -> tuple[jax.Array, MoEAux]:
            return self.filled(parameters, bias, **arguments)(x, token_valid)

        return call

    def moved_bias(self, bias: jax.Array, stats: jaxmoe.MoEStats, rate: float) -> jax.Array:
        moe = self.filled({}, bias, selection_bias=True)
        moe.update_selection_bias(stats, rate)
        return moe.selection_bias[...]


class LinenLayer:
    """`jaxmoe.linen.MoE` as a pure function of parameters by name."""

    def make(self, **arguments: Any) -> Any:
        return jaxmoe.linen.MoE(**(DEFAULTS | arguments))

    def abstract(self, **arguments: Any) -> dict[str, Any]:
        x = jnp.zeros((BATCH, LENGTH, arguments.get("hidden", HIDDEN)))
        return jax.eval_shape(self.make(**arguments).init, jax.random.key(0), x)["params"]

    def shapes(self, **arguments: Any) -> dict[str, Any]:
        return {name: getattr(box, "value", box) for name, box in self.abstract(**arguments).items()}

    def names(self, **arguments: Any) -> dict[str, tuple[Any, ...] | None]:
        return {name: getattr(box, "names", None) for name, box in self.abstract(**arguments).items()}

    def initial(self, **arguments: Any) -> dict[str, jax.Array]:
        boxed = jax.jit(self.make(**arguments).init)(jax.random.key(0), X())["params"]
        return {name: getattr(box, "value", box) for name, box in boxed.items()}

    def calling(self, **arguments: Any) -> Callable[..., tuple[jax.Array, MoEAux]]:
        moe = self.make(**arguments)

        def call(parameters: Any, bias: Any, x: Any, token_valid: Any = None) -> tuple[jax.Array, MoEAux]:
            variables = {"params": parameters} | ({} if bias is None else {"moe_state": {"selection_bias": bias}})
            y, sown = moe.apply(variables, x, token_valid, mutable=["losses", "intermediates"])
            losses, (stats,) = sown["losses"], sown["intermediates"]["moe_stats"]
            return y, MoEAux(losses["load_balancing_loss"][0], losses["router_z_loss"][0], stats)

        return call

    def moved_bias(self, bias: jax.Array, stats: jaxmoe.MoEStats, rate: float) -> jax.Array:
        state, intermediates = {"selection_bias": bias}, {"moe_stats": (stats,)}
        return jaxmoe.linen.update_selection_bias(state, intermediates, rate)["selection_bias"]


@functools.cache
def run(layer: type, name: str, mesh_name: str = "no mesh", masked: bool = False) -> Result:
    """Calls and differentiates a layer on the inputs of `expected`; masked tokens hold NaN."""
    block, (axis_type, mesh_arguments, spec) = BLOCKS[name], MESHES[mesh_name]
    arguments = {**block.arguments, **mesh_arguments}
    x = jnp.where(VALID[..., None], X(), jnp.nan) if masked else X()
    token_valid = jnp.asarray(VALID) if masked else None
    parameters = fill(layer().shapes(**block.arguments))
    bias = BIAS() if block.arguments.get("selection_bias") else None
    call = layer().calling(**arguments)

    def objective(p: Any, bias: Any, x: jax.Array, token_valid: Any) -> Any:
        y, aux = call(p, bias, x, token_valid)
        loss = (
            jnp.sum(y * COTANGENT()) + LOSS_WEIGHTS[0] * aux.load_balancing_loss + LOSS_WEIGHTS[1] * aux.router_z_loss
        )
        return loss, (y, aux)

    grad = jax.jit(jax.grad(objective, argnums=(0, 1, 2), has_aux=True, allow_int=True))
    if axis_type is None:
        (gradients, bias_gradient, x_gradient), (y, aux) = grad(parameters, bias, x, token_valid)
        return Result(y, aux, gradients, bias_gradient, x_gradient)
    mesh = make_mesh(axis_type)
    experts = P(mesh_arguments.get("axis_name", "expert"))
    with jax.set_mesh(mesh):
        placed = {
            key: place(array, mesh, experts if key[:2] in ("w_", "b_") else P()) for key, array in parameters.items()
        }
        x = place(x, mesh, spec)
        (gradients, bias_gradient, x_gradient), (y, aux) = grad(placed, bias, x, token_valid)
    return Result(y, aux, gradients, bias_gradient, x_gradient)


def assert_equal(result: Result, truth: Result) -> None:
    balance, z, rows = truth.aux
    assert relative_error(result.y, truth.y) < 1e-5
    assert relative_error(result.aux.load_balancing_loss, balance) < 1e-5
    assert relative_error(result.aux.router_z_loss, z) < 1e-5
    np.testing.assert_array_equal(result.aux.stats.rows_per_expert, rows)
    assert result.parameters.keys() == truth.parameters.keys()
    for name, gradient in truth.parameters.items():
        assert relative_error(result.parameters[name], gradient) < 2e-5, name
    assert relative_error(result.x, truth.x) < 2e-5


class Behaviours:
    """What a layer of either library does."""

    layer: Any

    @pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3", "deepseek-v4"])
    def test_output_losses_and_gradients_are_those_of_the_block_written_by_hand(self, name):
        assert_equal(run(self.layer, name), expected(name))

    @pytest.mark.parametrize("mesh_name", [name for name in MESHES if name != "no mesh"])
    def test_on_a_mesh_it_computes_what_it_computes_on_one_device(self, mesh_name):
        assert_equal(run(self.layer, "everything", mesh_name, masked=True), expected("everything", masked=True))

    @pytest.mark.parametrize("mesh_name", [name for name in MESHES if name.startswith("explicit")])
    def test_with_explicit_axes_the_output_is_split_as_the_input_and_the_losses_are_scalars_of_all_tokens(
        self, mesh_name
    ):
        result, spec = run(self.layer, "everything", mesh_name, masked=True), MESHES[mesh_name][2]
        assert jax.typeof(result.y).sharding.spec == P(*spec, None, None)
        for scalar in (result.aux.load_balancing_loss, result.aux.router_z_loss, result.aux.stats.unused_slots):
            assert scalar.shape == ()
            assert scalar.sharding.is_fully_replicated

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

    def test_every_expert_draws_its_own_weights_of_variance_one_over_fan_in(self):
        arguments = {"intermediate": 64, "num_experts": 32, "shared_intermediate": 256, "biases": True, "gated": False}
        parameters = self.layer().initial(**arguments)
        for name, array in parameters.items():
            if array.ndim >= 2 and "b_" not in name:
                assert abs(np.std(array) * array.shape[-2] ** 0.5 - 1) < 0.06, name
            else:
                np.testing.assert_array_equal(array, 0)
        assert np.unique(np.asarray(parameters["w_gate"][:, 0, 0])).size == 32
        assert set(self.layer().names(**arguments).values()) == {None}  # without mesh axes no sharding metadata

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_parameters_carry_their_axes_and_lie_where_these_say(self, axis_type):
        arguments = {
            **BLOCKS["everything"].arguments,
            "axis_name": "expert",
            "data_axes": "data",
            "hidden_axis": "data",
        }
        ones = jax.nn.initializers.ones
        mesh = make_mesh(axis_type)
        with jax.set_mesh(mesh):
            names = self.layer().names(**arguments)
            parameters = self.layer().initial(**arguments, kernel_init=ones, router_init=ones)
        assert names == {
            "router_kernel": (None, None),
            "router_bias": (None,),
            "w_gate": ("expert", "data", None),
            "w_up": ("expert", "data", None),
            "w_down": ("expert", None, "data"),
            "b_gate": ("expert", None),
            "b_up": ("expert", None),
            "b_down": ("expert", "data"),
            "shared_w_gate": ("data", None),
            "shared_w_up": ("data", None),
            "shared_w_down": (None, "data"),
            "shared_b_gate": (None,),
            "shared_b_up": (None,),
            "shared_b_down": ("data",),
        }
        for name, array in parameters.items():
            assert array.sharding.is_equivalent_to(NamedSharding(mesh, P(*names[name])), array.ndim), name
        for shard in parameters["w_gate"].addressable_shards:
            expert_rank = np.argwhere(mesh.devices == shard.device)[0][1]
            assert shard.index[0] == slice(2 * expert_rank, 2 * expert_rank + 2)

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_a_layer_made_under_jit_never_has_all_experts_on_one_device(self, axis_type):
        arguments = {"axis_name": "expert", "intermediate": 256, "num_experts": 64, "gated": False}
        with jax.set_mesh(make_mesh(axis_type)):
            memory = jax.jit(lambda: self.layer().initial(**arguments)).lower().compile().memory_analysis()
        all_experts = 2 * 64 * HIDDEN * 256 * 4
        assert memory is not None
        assert memory.output_size_in_bytes + memory.temp_size_in_bytes < all_experts

    def test_parameters_may_be_split_over_their_hidden_dimension_too(self):
        mesh = make_mesh(AxisType.Explicit)
        arguments = {
            **BLOCKS["everything"].arguments,
            "axis_name": "expert",
            "data_axes": "data",
            "hidden_axis": "data",
        }
        with jax.set_mesh(mesh):
            parameters, names = fill(self.layer().shapes(**arguments)), self.layer().names(**arguments)
            placed = {name: place(array, mesh, P(*names[name])) for name, array in parameters.items()}
            # The tokens' hidden dimension is split as well, over the axis that the experts use.
            x = place(X(), mesh, P("data", None, "expert"))
            y, _ = jax.jit(self.layer().calling(**arguments))(placed, BIAS(), x)
        assert jax.typeof(y).sharding.spec == P("data", None, "expert")
        assert relative_error(y, expected("everything").y) < 1e-5

    def test_updating_the_selection_bias_evens_the_load(self):
        arguments = {"router": RouterConfig(top_k=2, score="sigmoid"), "selection_bias": True}
        p = fill(self.layer().shapes(**arguments))
        # Tokens have a direction in common, and some experts like it.
        p["router_kernel"] += 0.3 * numbers(8, 1, EXPERTS)
        x = numbers(9, 128, HIDDEN) + 0.3
        call = jax.jit(self.layer().calling(**arguments, implementation="reference"))
        bias, loads = jnp.zeros(EXPERTS), []
        for _ in range(40):
            _, aux = call(p, bias, x)
            loads.append(float(aux.stats.max_over_mean_load))
            bias = self.layer().moved_bias(bias, aux.stats, 0.02)
        assert loads[0] > 2
        assert max(loads[-5:]) < 1.4

    @pytest.mark.usefixtures("unchecked_shapes")
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"hidden": 0}, ValueError, "MoE: hidden=0 must be an integer of at least 1"),
            ({"num_experts": 8.0}, TypeError, r"MoE: num_experts=8\.0 must be an integer"),
            ({"shared_intermediate": -1}, ValueError, "MoE: shared_intermediate=-1 must be"),
            ({"router": 2}, TypeError, r"MoE: router is a int; pass jaxmoe.RouterConfig\(top_k=...\)"),
            ({"router": RouterConfig(top_k=9)}, ValueError, "top_k=9 exceeds num_experts=8"),
            ({"router": RouterConfig(top_k=1, num_groups=3)}, ValueError, "num_experts=8 cannot be split"),
            ({"activation": "swish"}, ValueError, "activation='swish' is not known. Use one of 'silu'"),
            ({"shared_activation": "silu"}, ValueError, "there is no shared expert. Set shared_intermediate="),
            ({"activation": SwiGLU(), "gated": False}, ValueError, "gated=False: SwiGLU multiplies two projections"),
            ({"implementation": "cuda"}, ValueError, "implementation='cuda' is not known"),
            ({"axis_name": "expert", "num_experts": 6}, ValueError, "num_experts=6 cannot be spread over the 4 ranks"),
            ({"axis_name": "ep"}, ValueError, "axis 'ep' is not in the mesh"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused_before_parameters_exist(self, arguments, error, message):
        with jax.set_mesh(make_mesh(AxisType.Auto)), pytest.raises(error, match=message):
            self.layer().shapes(**arguments)

    @pytest.mark.usefixtures("unchecked_shapes")
    @pytest.mark.parametrize(
        ("x", "token_valid", "error", "message"),
        [
            (jnp.zeros((4, 15)), None, ValueError, r"MoE: x has shape \(4, 15\); it must be .* with hidden=16"),
            (jnp.zeros(16), None, ValueError, r"MoE: x has shape \(16,\)"),
            (jnp.zeros((4, 16), int), None, TypeError, "MoE: x is int32; it must be a float array"),
            ([1.0], None, TypeError, "MoE: x is a list; it must be an array"),
            (jnp.zeros((4, 16)), jnp.ones(4), TypeError, "MoE: token_valid is float32; it must be bool"),
            (jnp.zeros((4, 16)), jnp.ones(3, bool), ValueError, r"MoE: token_valid has shape \(3,\)"),
            (jnp.zeros((4, 16)), [True], TypeError, "MoE: token_valid is a list"),
        ],
    )
    def test_inputs_that_do_not_fit_are_refused(self, x, token_valid, error, message):
        parameters = fill(self.layer().shapes())
        with pytest.raises(error, match=message):
            self.layer().calling()(parameters, None, x, token_valid)

    def test_a_layer_spread_over_an_axis_asks_for_a_mesh_when_it_is_called(self):
        parameters = fill(self.layer().shapes())
        with pytest.raises(ValueError, match=r"axis_name=.* needs a mesh and none is set"):
            self.layer().calling(axis_name="expert")(parameters, None, X())


class TestNNX(Behaviours):
    layer = NNXLayer

    def test_training_in_the_way_of_nnx_lowers_the_loss(self):
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            arguments = {**BLOCKS["everything"].arguments, "axis_name": "expert"}
            names = self.layer().names(**arguments)
            parameters = fill(self.layer().shapes(**arguments))
            placed = {name: place(array, mesh, P(*names[name])) for name, array in parameters.items()}
            moe = self.layer().filled(placed, jnp.zeros(EXPERTS), **arguments)
            optimizer = nnx.Optimizer(moe, optax.adam(1e-2), wrt=nnx.Param)
            x, target = (place(array, mesh, P(("data", "expert"))) for array in (X(), COTANGENT()))

            @nnx.jit
            def step(moe, optimizer, x, target):
                def objective(moe):
                    y, aux = nnx.remat(lambda moe, x: moe(x))(moe, x)
                    return jnp.mean((y - target) ** 2) + 0.01 * aux.load_balancing_loss, aux

                (loss, aux), gradients = nnx.value_and_grad(objective, has_aux=True)(moe)
                optimizer.update(moe, gradients)
                moe.update_selection_bias(aux.stats, 1e-3)
                return loss, aux

            losses, bias = [], np.zeros(EXPERTS, np.float32)
            for _ in range(4):
                loss, aux = step(moe, optimizer, x, target)
                losses.append(float(loss))
                rows = np.asarray(aux.stats.rows_per_expert)
                bias += 1e-3 * np.sign(rows.mean() - rows)
            moments = nnx.state(optimizer)["opt_state"][0]["mu"]["w_gate"]
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4
        np.testing.assert_allclose(moe.selection_bias[...], bias, atol=1e-6)
        assert np.any(bias)
        assert jax.typeof(moe.w_gate[...]).sharding.spec == P("expert", None, None)
        assert jax.typeof(moments[...]).sharding.spec == P("expert", None, None)

    def test_scan_over_stacked_layers_is_the_loop_over_layers(self):
        arguments = {**BLOCKS["deepseek-v3"].arguments, "axis_name": "expert", "data_axes": "data"}
        metadata = {nnx.PARTITION_NAME: None}

        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata=metadata)
        def create(rngs):
            return jaxmoe.nnx.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, rngs=rngs)

        @nnx.jit
        @functools.partial(nnx.value_and_grad, has_aux=True)
        def scanned(stack, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=metadata)
            @nnx.remat
            def body(moe, x):
                y, aux = moe(x)
                return x + y, aux

            y, aux = body(stack, x)
            return jnp.sum(y * COTANGENT()), (y, aux)

        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            stack: Any = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
            state = nnx.state(stack, nnx.Param)
            arrays = fill(nnx.to_pure_dict(state))
            specs: Any = nnx.get_partition_spec(state)
            for name, array in arrays.items():
                getattr(stack, name).set_value(place(array, mesh, specs[name].get_value()))
            stack.selection_bias.set_value(jnp.zeros((2, EXPERTS)))
            (_, (y, aux)), gradients = scanned(stack, X())
            stack.update_selection_bias(aux.stats, 0.5)
        assert specs["w_gate"].get_value() == P(None, "expert", None, None)

        expected_gradients, (truth, rows) = two_layers_by_hand(arrays)
        assert relative_error(y.reshape(-1, HIDDEN), truth) < 1e-5
        np.testing.assert_array_equal(aux.stats.rows_per_expert, rows)
        for name, gradient in expected_gradients.items():
            assert relative_error(gradients[name][...], gradient) < 2e-5, name
        mean = rows.sum(-1, keepdims=True) / EXPERTS
        np.testing.assert_array_equal(stack.selection_bias[...], 0.5 * np.sign(mean - rows))

    def test_inside_shard_map_a_split_layer_gives_what_it_gives_outside(self):
        arguments = {**BLOCKS["everything"].arguments, "axis_name": "expert", "data_axes": "data"}
        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            moe = self.layer().filled(fill(self.layer().shapes(**arguments)), BIAS(), **arguments)
            graphdef, state = nnx.split(moe)
            tokens = P(("data", "expert"))

            def on_rank(state, x, token_valid):
                moe: Any = nnx.merge(graphdef, state)
                return moe(x, token_valid)

            specs = (nnx.get_partition_spec(state), tokens, tokens)
            inside = jax.jit(jax.shard_map(on_rank, in_specs=specs, out_specs=(tokens, P())))
            y, aux = inside(state, X(), jnp.asarray(VALID))
        truth = expected("everything", masked=True)
        assert relative_error(y, truth.y) < 1e-5
        assert relative_error(aux.load_balancing_loss, truth.aux[0]) < 1e-5
        assert relative_error(aux.router_z_loss, truth.aux[1]) < 1e-5
        np.testing.assert_array_equal(aux.stats.rows_per_expert, truth.aux[2])

    def test_a_layer_made_without_a_mesh_keeps_its_names_for_later(self):
        moe = self.layer().make(axis_name="expert", selection_bias=True, kernel_init=jax.nn.initializers.ones)
        assert moe.w_gate.get_metadata()["out_sharding"] == ("expert", None, None)
        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            state = nnx.state(moe)
            nnx.update(moe, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        assert moe.w_gate[...].sharding.spec == P("expert", None, None)
        assert moe.selection_bias[...].sharding.is_fully_replicated

    def test_a_mesh_may_be_passed(self):
        mesh = make_mesh(AxisType.Explicit)
        arguments = {"axis_name": "expert", "data_axes": "data", "shared_intermediate": SHARED, "mesh": mesh}
        moe = self.layer().make(**arguments, kernel_init=jax.nn.initializers.ones)
        assert moe.w_gate[...].sharding.spec == P("expert", None, None)
        y, _ = nnx.jit(lambda moe, x: moe(x))(moe, place(X(), mesh, P("data")))
        assert y.sharding.spec == P("data", None, None)

    def test_axis_names_may_be_logical(self):
        with jax.set_mesh(make_mesh(AxisType.Auto)), nnx.logical_axis_rules([("embed", "data"), ("mlp", None)]):
            arguments = {"axis_name": "expert", "hidden_axis": "embed", "intermediate_axis": "mlp"}
            moe = self.layer().make(**arguments, kernel_init=jax.nn.initializers.ones)
        assert moe.w_gate.get_metadata()["out_sharding"] == ("expert", "embed", "mlp")
        assert moe.w_gate[...].sharding.spec == P("expert", "data", None)

    def test_the_selection_bias_is_a_variable_of_its_own_kind(self):
        moe = self.layer().abstract(selection_bias=True)
        assert set(nnx.state(moe, jaxmoe.nnx.SelectionBias)) == {"selection_bias"}
        assert "selection_bias" not in nnx.state(moe, nnx.Param)
        assert moe.selection_bias.dtype == jnp.float32

    def test_layers_of_equal_arguments_have_equal_graphs(self):
        graphs = [nnx.graphdef(self.layer().abstract(**BLOCKS["everything"].arguments)) for _ in range(2)]
        assert graphs[0] == graphs[1]
        assert hash(graphs[0]) == hash(graphs[1])

    def test_updating_a_selection_bias_that_is_not_there_says_how_to_have_one(self):
        moe = self.layer().abstract()
        stats = jaxmoe.load_stats(jnp.zeros((1, 1), int), EXPERTS)
        with pytest.raises(ValueError, match=r"no selection bias\. Make it with selection_bias=True"):
            moe.update_selection_bias(stats)


class TestLinen(Behaviours):
    layer = LinenLayer

    def test_training_in_the_way_of_linen_lowers_the_loss(self):
        moe = self.layer().make(**BLOCKS["everything"].arguments, axis_name="expert", data_axes="data")
        with jax.set_mesh(make_mesh(AxisType.Auto)):
            variables = jax.eval_shape(moe.init, jax.random.key(0), X())
            parameters, state = fill_boxes(variables["params"]), {"selection_bias": jnp.zeros(EXPERTS)}
            optimizer = optax.adam(1e-2)
            moments = optimizer.init(parameters)

            @jax.jit
            def step(parameters, state, moments):
                def objective(parameters):
                    variables = {"params": parameters, "moe_state": state}
                    y, sown = moe.apply(variables, X(), mutable=["losses", "intermediates"])
                    (balance,) = sown["losses"]["load_balancing_loss"]
                    return jnp.mean((y - COTANGENT()) ** 2) + 0.01 * balance, sown["intermediates"]

                (loss, sown), gradients = jax.value_and_grad(objective, has_aux=True)(parameters)
                updates, moments_after = optimizer.update(gradients, moments)
                state_after = jaxmoe.linen.update_selection_bias(state, sown, 1e-3)
                return loss, optax.apply_updates(parameters, updates), state_after, moments_after

            losses = []
            for _ in range(4):
                loss, parameters, state, moments = step(parameters, state, moments)
                losses.append(float(loss))
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4
        assert jnp.any(state["selection_bias"])
        assert nn.get_partition_spec(parameters)["w_gate"] == P("expert", None, None)

    def test_scan_over_layers_is_the_loop_over_layers(self):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                arguments = {**BLOCKS["deepseek-v3"].arguments, "data_axes": "data"}
                moe = jaxmoe.linen.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, name="moe")
                scan = nn.scan(
                    nn.remat(lambda moe, x, _: (x + moe(x), None)),
                    variable_axes={"params": 0, "moe_state": 0, "losses": 0, "intermediates": 0},
                    split_rngs={"params": True},
                    length=2,
                    metadata_params={nn.PARTITION_NAME: None},
                )
                return scan(moe, x, None)[0]

        with jax.set_mesh(make_mesh(AxisType.Auto)):
            variables = jax.eval_shape(Stack().init, jax.random.key(0), X())
            boxes = fill_boxes(variables["params"]["moe"])
            assert boxes["w_gate"].names == (None, "expert", None, None)
            state = {"moe": {"selection_bias": jnp.zeros(variables["moe_state"]["moe"]["selection_bias"].shape)}}

            @jax.jit
            @functools.partial(jax.grad, has_aux=True)
            def scanned(parameters, state):
                all_variables = {"params": parameters, "moe_state": state}
                y, sown = Stack().apply(all_variables, X(), mutable=["losses", "intermediates"])
                return jnp.sum(y * COTANGENT()), (y, sown)

            gradients, (y, sown) = scanned({"moe": boxes}, state)
            state = jaxmoe.linen.update_selection_bias(state, sown["intermediates"], 0.5)

        expected_gradients, (truth, rows) = two_layers_by_hand(fill(nn.unbox(variables["params"]["moe"])))
        assert relative_error(y.reshape(-1, HIDDEN), truth) < 1e-5
        for name, gradient in expected_gradients.items():
            assert relative_error(gradients["moe"][name].value, gradient) < 2e-5, name
        (stats,) = sown["intermediates"]["moe"]["moe_stats"]
        np.testing.assert_array_equal(stats.rows_per_expert, rows)
        assert sown["losses"]["moe"]["load_balancing_loss"][0].shape == (2,)
        mean = rows.sum(-1, keepdims=True) / EXPERTS
        np.testing.assert_array_equal(state["moe"]["selection_bias"], 0.5 * np.sign(mean - rows))

    def test_losses_and_statistics_are_sown_by_every_call_where_their_collections_are_mutable(self):
        class Twice(nn.Module):
            @nn.compact
            def __call__(self, x):
                moe = jaxmoe.linen.MoE(
                    HIDDEN, INTERMEDIATE, EXPERTS, DEEPSEEK_V3, selection_bias=True, axis_name=None, name="moe"
                )
                return moe(moe(x))

        x = X()[:, 0]
        variables = jax.eval_shape(Twice().init, jax.random.key(0), x)
        assert variables.keys() == {"params", "moe_state"}  # else what init sowed would count at every call
        assert jax.eval_shape(Twice().apply, variables, x).shape == x.shape
        parameters = {"moe": fill(variables["params"]["moe"])}
        state: Any = {"moe": {"selection_bias": jnp.zeros(EXPERTS)}}
        apply = jax.jit(functools.partial(Twice().apply, mutable=["losses", "intermediates"]))
        sown: Any = apply({"params": parameters, "moe_state": state}, x)[1]
        assert [len(values) for values in sown["losses"]["moe"].values()] == [2, 2]
        first, second = sown["intermediates"]["moe"]["moe_stats"]
        rows = first.rows_per_expert + second.rows_per_expert
        assert rows.sum() == 2 * 2 * BATCH

        others = {**state, "norm": {"scale": jnp.ones(1)}, "step": jnp.zeros(())}
        state = jaxmoe.linen.update_selection_bias(others, sown["intermediates"], 0.5)
        np.testing.assert_array_equal(state["moe"]["selection_bias"], 0.5 * np.sign(rows.mean() - rows))
        assert state["norm"] == others["norm"]
        assert state["step"] is others["step"]
        with pytest.raises(ValueError, match=r"no moe_stats lie beside it in intermediates, only \[\]"):
            jaxmoe.linen.update_selection_bias(others, {})

    def test_axis_names_may_be_logical(self):
        moe = self.layer().make(
            axis_name="expert",
            hidden_axis="embed",
            partitioning=nn.with_logical_partitioning,
            kernel_init=jax.nn.initializers.ones,
        )
        rules = [("expert", "expert"), ("embed", "data")]
        with jax.set_mesh(make_mesh(AxisType.Explicit)), nn.logical_axis_rules(rules):
            variables: Any = jax.jit(moe.init)(jax.random.key(0), X())
            y = jax.eval_shape(moe.apply, variables, X())
        assert variables["params"]["w_gate"].names == ("expert", "embed", None)
        assert variables["params"]["w_gate"].value.sharding.spec == P("expert", "data", None)
        assert y.shape == X().shape

    def test_inside_shard_map_over_the_experts_it_says_what_to_call_instead(self):
        moe = self.layer().make(axis_name="expert")
        with jax.set_mesh(make_mesh(AxisType.Auto)):
            inside = jax.shard_map(
                lambda x: moe.init_with_output(jax.random.key(0), x)[0], in_specs=P("expert"), out_specs=P("expert")
            )
            with pytest.raises(NotImplementedError, match=r"shard_map over \['expert'\].* use jaxmoe.nnx.MoE or"):
                jax.eval_shape(inside, X())


@pytest.mark.parametrize("module", [jaxmoe.nnx, jaxmoe.linen])
def test_without_flax_the_import_says_how_to_install_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    spec = importlib.util.spec_from_file_location("without_flax", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(
        ModuleNotFoundError, match=r"needs Flax, which is not installed. Run: pip install 'jaxmoe\[flax"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
