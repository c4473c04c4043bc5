"""The layer that `nnx.py` and `linen.py` wrap: its sizes, its parameters and its forward pass, on plain arrays.

    logits = x @ router_kernel + router_bias                      in float32
    routing = route(logits, router, selection_bias)
    y = moe_layer(x, routing, experts) + shared_expert(x)

Each library makes the arrays of `parameters` in its own way and passes them to `forward`; nothing here imports Flax.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmoe import activation as activations
from jaxmoe import call as calls
from jaxmoe.activation import Activation
from jaxmoe.api import run
from jaxmoe.experts import Experts, takes_experts
from jaxmoe.options import Arguments, CallOptions
from jaxmoe.routing import RouterConfig, route
from jaxmoe.routing.balance import MoEAux, router_aux, update_selection_bias
from jaxmoe.routing.stats import MoEStats, check_token_valid
from jaxmoe.sharding import axis_tuple, reshard_explicit

EXPERT_ARRAYS = tuple(field.name for field in dataclasses.fields(Experts))
Initializer = Callable[..., Any]
AxisName = str | tuple[str, ...] | None

# One object, so that two layers made with the defaults compare equal.
default_init: Initializer = jax.nn.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig(CallOptions):
    """Everything about a layer that is no array; hashable. The arguments are documented at `jaxmoe.nnx.MoE`."""

    hidden: int
    intermediate: int
    num_experts: int
    router: RouterConfig
    gated: bool
    biases: bool
    router_bias: bool
    selection_bias: bool
    shared_intermediate: int | None
    shared_activation: str | Activation | None
    hidden_axis: AxisName
    intermediate_axis: AxisName
    dtype: DTypeLike | None
    param_dtype: DTypeLike

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "shared_intermediate"):
            value = getattr(self, name)
            if name == "shared_intermediate" and value is None:
                continue
            try:
                positive = not isinstance(value, bool) and operator.index(value) >= 1
            except TypeError as error:
                raise TypeError(f"MoE: {name}={value!r} must be an integer.") from error
            if not positive:
                raise ValueError(f"MoE: {name}={value!r} must be an integer of at least 1.")
        if not isinstance(self.router, RouterConfig):
            raise TypeError(
                f"MoE: router is a {type(self.router).__name__}; pass jaxmoe.RouterConfig(top_k=...) or one of its "
                "presets, such as jaxmoe.RouterConfig.mixtral()."
            )
        if self.shared_activation is not None and self.shared_intermediate is None:
            raise ValueError(
                f"MoE: shared_activation={self.shared_activation!r} is given, but there is no shared expert. Set "
                "shared_intermediate= to its width, or leave shared_activation out."
            )
        if not self.gated and activations.resolve(self.shared_activation or self.activation).needs_up:
            raise ValueError(
                f"MoE: activation={self.activation!r}, shared_activation={self.shared_activation!r} with gated=False: "
                "SwiGLU multiplies two projections. Use gated=True, or an activation of one projection."
            )
        object.__setattr__(self, "axis_name", axis_tuple(self.axis_name, "axis_name") or None)
        object.__setattr__(self, "data_axes", axis_tuple(self.data_axes, "data_axes"))
        self._check_with_moe_layer()

    def _check_with_moe_layer(self) -> None:
        """Raises what `route` and `moe_layer` would at the first call, before any parameter is made."""
        logits = jax.ShapeDtypeStruct((1, self.num_experts), jnp.float32)
        routing = jax.eval_shape(lambda array: route(array, self.router), logits)
        # Without a mesh, or inside shard_map, the number of ranks is that of a later call.
        mesh = _mesh_to_enter(self.mesh)
        tokens = 1 if mesh is None else mesh.size
        arrays = {
            name: jax.ShapeDtypeStruct(parameter.shape, jnp.float32) for name, parameter in parameters(self).items()
        }
        arguments = Arguments(
            jax.ShapeDtypeStruct((tokens, self.hidden), jnp.float32),
            jax.ShapeDtypeStruct((tokens, self.router.top_k), routing.topk_ids.dtype),
            jax.ShapeDtypeStruct((tokens, self.router.top_k), routing.topk_weights.dtype),
            _experts(arrays),
        )
        on_one_rank = CallOptions(self.activation, None, (), None, self.implementation, self.plan, self.residuals)
        calls.check(arguments, on_one_rank if mesh is None else self)

    @property
    def is_placed(self) -> bool:
        """Whether any parameter has a mesh axis, so that all of them carry sharding metadata."""
        return any(axis is not None for axis in (self.axis_name, self.hidden_axis, self.intermediate_axis))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a layer.

    Args:
      shape: of the array.
      axes: mesh axis, several, or `None` for each dimension.
      init: called with a key, the shape and a dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[AxisName, ...]
    init: Initializer


def parameters(
    config: LayerConfig, *, kernel_init: Initializer = default_init, router_init: Initializer = default_init
) -> dict[str, Parameter]:
    """Returns the trainable arrays of a layer by name.

    Args:
      config: the layer.
      kernel_init: of one matrix `[in, out]`. Every expert draws its own, so that the number of experts is no part of
        the fan-in, as it would be if the initialiser saw `[experts, in, out]`.
      router_init: of the router's kernel.
    """
    hidden, hidden_axis = config.hidden, config.hidden_axis
    names = axis_tuple(config.axis_name, "axis_name")
    expert_axis = names[0] if len(names) == 1 else names or None
    table = {"router_kernel": Parameter((hidden, config.num_experts), (None, None), router_init)}
    if config.router_bias:
        table["router_bias"] = Parameter((config.num_experts,), (None,), _zeros)

    def feed_forward(prefix: str, width: int, stack: tuple[int, ...], stack_axis: tuple[AxisName, ...]) -> None:
        init = _each_expert(kernel_init, expert_axis, config.mesh) if stack else kernel_init
        into = Parameter((*stack, hidden, width), (*stack_axis, hidden_axis, config.intermediate_axis), init)
        back = Parameter((*stack, width, hidden), (*stack_axis, config.intermediate_axis, hidden_axis), init)
        matrices = {"gate": into, "up": into, "down": back} if config.gated else {"gate": into, "down": back}
        for name, matrix in matrices.items():
            table[f"{prefix}w_{name}"] = matrix
        if config.biases:
            for name, matrix in matrices.items():
                shape, axes = (*stack, matrix.shape[-1]), (*stack_axis, matrix.axes[-1])
                table[f"{prefix}b_{name}"] = Parameter(shape, axes, _zeros)

    feed_forward("", config.intermediate, (config.num_experts,), (expert_axis,))
    if config.shared_intermediate is not None:
        feed_forward("shared_", config.shared_intermediate, (), ())
    return table


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.zeros(shape, dtype)


def _each_expert(init: Initializer, expert_axis: AxisName, mesh: Mesh | AbstractMesh | None) -> Initializer:
    def stacked(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # Explicit axes are taken at their word: from keys that every device has, every device would draw all experts.
        # With Auto axes the compiler sees that only a part is kept.
        keys = _place_explicit(jax.random.split(key, shape[0]), PartitionSpec(expert_axis), mesh)
        return jax.vmap(lambda expert_key: init(expert_key, shape[1:], dtype))(keys)

    return stacked


def forward(
    config: LayerConfig,
    arrays: Mapping[str, Array],
    x: Float[Array, "*batch hidden"],
    *,
    selection_bias: Float[Array, " experts"] | None,
    token_valid: Bool[Array, "*batch"] | None,
) -> tuple[Float[Array, "*batch hidden"], MoEAux]:
    """Returns the output of the layer, in its compute dtype, and what it says about its routing.

    Args:
      config: the layer.
      arrays: the `parameters`, of whatever dtype.
      x: tokens.
      selection_bias: for `route`; gets no gradient.
      token_valid: `False` for padding.

    Raises:
      ValueError: `x` or `token_valid` does not fit the layer, or `moe_layer` cannot run here.
      TypeError: `x` or `token_valid` is of the wrong dtype.
    """
    _check(config, x, token_valid)
    dtype = _compute_dtype(config, x, arrays)
    mesh = jax.sharding.get_abstract_mesh() if config.mesh is None else config.mesh
    # Sharding in types (Explicit axes) refuses a matrix product over a dimension that only one side has split.
    tokens = _whole(x, mesh, but_first=x.ndim - 1)
    arrays = {name: array if name in EXPERT_ARRAYS else _whole(array, mesh) for name, array in arrays.items()}
    if token_valid is not None:
        # Before any arithmetic: a masked NaN times a zero cotangent would be a NaN in the gradient of every weight.
        token_valid = _split_as(token_valid, _split(tokens)[:-1], mesh)
        tokens = jnp.where(token_valid[..., None], tokens, 0)

    logits = _router_logits(arrays, tokens, dtype)
    bias = None if selection_bias is None else jax.lax.stop_gradient(selection_bias)
    routing = route(logits, config.router, selection_bias=bias, token_valid=token_valid)
    tokens = tokens.astype(dtype)
    experts = _experts_for(dtype, arrays)
    y, _ = run(Arguments(tokens, routing.topk_ids, routing.topk_weights, experts, token_valid), config)
    if config.shared_intermediate is not None:
        shared = _shared_expert(config, arrays, tokens)
        if token_valid is not None:
            shared = jnp.where(token_valid[..., None], shared, 0)
        y = (y.astype(shared.dtype) + shared).astype(dtype)
    aux = router_aux(routing, logits, token_valid=token_valid, axis_name=_manual_token_axes(config))
    return _split_as(y, _split(x), mesh), aux


def _experts_for(dtype: Any, arrays: Mapping[str, Array]) -> Experts:
    """Returns the experts to compute in `dtype`. In float32 they stay for 16-bit tokens: so do their gradients."""
    experts = _experts(arrays)
    return experts if takes_experts(experts.w_gate.dtype, dtype) else experts.astype(dtype)


def _check(config: LayerConfig, x: Any, token_valid: Any) -> None:
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"MoE: x is a {type(x).__name__}; it must be an array [..., tokens, hidden].")
    if len(x.shape) < 2 or x.shape[-1] != config.hidden:
        raise ValueError(
            f"MoE: x has shape {x.shape}; it must be [..., tokens, hidden] with hidden={config.hidden}, the width this "
            "layer was made for."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"MoE: x is {x.dtype}; it must be a float array.")
    if token_valid is not None and not (hasattr(token_valid, "shape") and hasattr(token_valid, "dtype")):
        raise TypeError(f"MoE: token_valid is a {type(token_valid).__name__}; it must be a bool array.")
    check_token_valid("MoE", token_valid, x.shape[:-1], "x")


def _compute_dtype(config: LayerConfig, x: Any, arrays: Mapping[str, Array]) -> Any:
    """The dtype that was asked for; without one, as in Flax's own layers, the promotion of input and parameters."""
    return jnp.dtype(config.dtype) if config.dtype is not None else jnp.result_type(x, *arrays.values())


def _router_logits(arrays: Mapping[str, Array], tokens: jax.Array, dtype: Any) -> jax.Array:
    """Logits in float32 (float64 for float64), whatever the layer computes in.

    Logits in bfloat16 change which experts are chosen, and with them the whole output: Fedus et al. 2021
    (arXiv:2101.03961, section 2.4, selective precision). HIGHEST keeps GPUs and TPUs from rounding the operands to TF32
    or bfloat16.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    kernel = arrays["router_kernel"].astype(wide)
    logits = jnp.dot(tokens.astype(wide), kernel, precision=jax.lax.Precision.HIGHEST)
    return logits + arrays["router_bias"].astype(wide) if "router_bias" in arrays else logits


def _experts(arrays: Mapping[str, Any]) -> Experts:
    return Experts(**{name: arrays.get(name) for name in EXPERT_ARRAYS})  # pyright: ignore[reportArgumentType]


def _shared_expert(config: LayerConfig, arrays: Mapping[str, Array], tokens: jax.Array) -> jax.Array:
    """The expert that every token visits: GEMMs in the layer's dtype, the rest in float32, as in the routed experts."""
    activation = activations.resolve(
        config.activation if config.shared_activation is None else config.shared_activation
    )
    wide = jnp.promote_types(tokens.dtype, jnp.float32)

    def project(rows: jax.Array, name: str) -> jax.Array | None:
        if f"shared_w_{name}" not in arrays:
            return None
        out = jnp.dot(rows, arrays[f"shared_w_{name}"].astype(rows.dtype)).astype(wide)
        return out + arrays[f"shared_b_{name}"].astype(wide) if f"shared_b_{name}" in arrays else out

    gate = project(tokens, "gate")
    assert gate is not None
    out = project(activation.value(gate, project(tokens, "up")).astype(tokens.dtype), "down")
    assert out is not None
    return out


def _manual_token_axes(config: LayerConfig) -> tuple[str, ...]:
    """Returns the axes over which `MoEAux` is summed: inside `shard_map` those of the tokens, outside none."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in (*config.data_axes, *(config.axis_name or ())) if name in manual)


def updated_bias(
    selection_bias: Float[Array, "*stack experts"], stats: MoEStats, rate: float | Float[Array, ""]
) -> Float[Array, "*stack experts"]:
    """Returns `jaxmoe.update_selection_bias` of one layer, or of layers stacked along leading dimensions."""

    def update(bias: jax.Array, rows: jax.Array) -> jax.Array:
        return update_selection_bias(bias, rows, rate)

    for _ in selection_bias.shape[:-1]:
        update = jax.vmap(update)
    return update(selection_bias, stats.rows_per_expert)


def place(value: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    """Spreads an array over a mesh, the context's for `mesh=None`; without a mesh returns it as it is."""
    mesh = _mesh_to_enter(mesh)
    if mesh is None:
        return value
    if AxisType.Explicit in mesh.axis_types:
        return reshard_explicit(value, spec, mesh)
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def _place_explicit(value: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    mesh = _mesh_to_enter(mesh)
    return value if mesh is None else reshard_explicit(value, spec, mesh)


def _mesh_to_enter(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """Returns the mesh over which arrays are to be spread here: none where none is set, nor inside `shard_map`."""
    context = jax.sharding.get_abstract_mesh()
    mesh = context if mesh is None else mesh
    return None if mesh.empty or context.manual_axes else mesh


def _whole(array: jax.Array, mesh: Mesh | AbstractMesh, but_first: int = 0) -> jax.Array:
    """Undoes the split over Explicit axes of all dimensions but the first few; Auto axes are left to the compiler."""
    return _split_as(array, _split(array)[:but_first], mesh)


def _split_as(array: jax.Array, split: tuple[Any, ...], mesh: Mesh | AbstractMesh) -> jax.Array:
    """Splits the first dimensions over Explicit axes as another array's are, the others not at all."""
    wanted = (*split, *(None for _ in array.shape[len(split) :]))
    return array if _split(array) == wanted else reshard_explicit(array, PartitionSpec(*wanted), mesh)


def _split(array: jax.Array) -> tuple[Any, ...]:
    """Returns the Explicit axes over which each dimension is split; nothing is known of Auto axes."""
    return tuple(jax.typeof(array).sharding.spec)
