"""`jaxmoe.nnx.MoE` and `jaxmoe.linen.MoE` as pure functions of parameters by name, called and differentiated alike."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
import jaxmoe.linen
import jaxmoe.nnx
from jaxmoe import RouterConfig
from jaxmoe.testing import relative_error
from tests.unit.blocks_by_hand import (
    BATCH,
    BIAS,
    BLOCKS,
    COTANGENT,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LENGTH,
    LOSS_WEIGHTS,
    VALID,
    X,
    by_hand,
    fill,
)

DEFAULTS: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": INTERMEDIATE,
    "num_experts": EXPERTS,
    "router": RouterConfig.mixtral(),
    "axis_name": None,
}


class Aux(NamedTuple):
    """What layers of both libraries say about their routing."""

    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    stats: jaxmoe.MoEStats
    routing: jaxmoe.Routing | None
    logits: jax.Array | None


class NNXLayer:
    """`jaxmoe.nnx.MoE` as a pure function of parameters by name."""

    def make(self, **arguments: Any) -> Any:
        return jaxmoe.nnx.MoE(**(DEFAULTS | arguments), rngs=nnx.Rngs(0))

    def abstract(self, **arguments: Any) -> Any:
        return nnx.eval_shape(lambda: self.make(**arguments))

    def abstract_layer(self, **arguments: Any) -> Any:
        """Returns the layer, without arrays."""
        return self.abstract(**arguments)

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

    def calling(self, **arguments: Any) -> Callable[..., tuple[jax.Array, Aux]]:
        def call(parameters: Any, bias: Any, x: Any, token_valid: Any = None) -> tuple[jax.Array, Aux]:
            y, aux = self.filled(parameters, bias, **arguments)(x, token_valid)
            return y, Aux(aux.load_balancing_loss, aux.router_z_loss, aux.stats, aux.routing, aux.logits)

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

    def abstract_layer(self, **arguments: Any) -> Any:
        """Returns the layer, without arrays."""
        return self.make(**arguments)

    def shapes(self, **arguments: Any) -> dict[str, Any]:
        return {name: getattr(box, "value", box) for name, box in self.abstract(**arguments).items()}

    def names(self, **arguments: Any) -> dict[str, tuple[Any, ...] | None]:
        return {name: getattr(box, "names", None) for name, box in self.abstract(**arguments).items()}

    def initial(self, **arguments: Any) -> dict[str, jax.Array]:
        boxed = jax.jit(self.make(**arguments).init)(jax.random.key(0), X())["params"]
        return {name: getattr(box, "value", box) for name, box in boxed.items()}

    def calling(self, **arguments: Any) -> Callable[..., tuple[jax.Array, Aux]]:
        moe = self.make(**arguments)

        def call(parameters: Any, bias: Any, x: Any, token_valid: Any = None) -> tuple[jax.Array, Aux]:
            variables = {"params": parameters} | ({} if bias is None else {"moe_state": {"selection_bias": bias}})
            y, sown = moe.apply(variables, x, token_valid, mutable=["losses", "intermediates"])
            losses, others = sown["losses"], sown["intermediates"]
            assert all(len(values) == 1 for values in (*losses.values(), *others.values()))
            routing, logits = (others.get(name, (None,))[0] for name in ("moe_routing", "moe_logits"))
            balance, z = losses["load_balancing_loss"][0], losses["router_z_loss"][0]
            return y, Aux(balance, z, others["moe_stats"][0], routing, logits)

        return call

    def moved_bias(self, bias: jax.Array, stats: jaxmoe.MoEStats, rate: float) -> jax.Array:
        state, intermediates = {"selection_bias": bias}, {"moe_stats": (stats,)}
        return jaxmoe.linen.update_selection_bias(state, intermediates, rate)["selection_bias"]


# Meshes: data 2 x expert 4, where an axis type is given.

MESHES = {
    "no mesh": (None, {"axis_name": None}, None),
    "auto": (AxisType.Auto, {"axis_name": "expert", "data_axes": "data"}, P(("data", "expert"))),
    "auto, experts on two hosts": (
        AxisType.Auto,
        {"axis_name": "expert", "data_axes": "data", "network": jaxmoe.NetworkPlan(ranks_per_host=2)},
        P(("data", "expert")),
    ),
    "explicit": (AxisType.Explicit, {"axis_name": "expert", "data_axes": "data"}, P("data")),
    "explicit, experts over both axes": (AxisType.Explicit, {"axis_name": ("data", "expert")}, P(("data", "expert"))),
}


def make_mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axis_type, axis_type))


def place(array: jax.Array, mesh: jax.sharding.Mesh, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


# One differentiated call, of a layer and of the block by hand.


@dataclasses.dataclass
class Result:
    """What one differentiated call gave: output, losses and load, and gradients of the objective."""

    y: jax.Array
    aux: Any
    parameters: dict[str, jax.Array]
    bias: jax.Array | None
    x: jax.Array


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
