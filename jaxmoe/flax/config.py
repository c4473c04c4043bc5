"""What a layer is made from: its sizes and options, and the table of its parameters."""

import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxmoe import activation as activations
from jaxmoe import call as calls
from jaxmoe.activation import ActivationLike
from jaxmoe.array_layout import names_in
from jaxmoe.experts import Experts
from jaxmoe.flax.placement import mesh_to_enter, place_explicit
from jaxmoe.options import Arguments, CallOptions
from jaxmoe.routing import RouterConfig, route
from jaxmoe.routing.router import preset_with_selection_bias
from jaxmoe.sharding import axis_tuple, names_of_tokens
from jaxmoe.wording import a_type

EXPERT_ARRAYS = tuple(field.name for field in dataclasses.fields(Experts))
Initializer = Callable[..., Any]
AxisName = str | tuple[str, ...] | None
# What a layer says that is made with the router of such a model, and without its bias.
ADD_SELECTION_BIAS = (
    "Make it with selection_bias=True, and move the bias by update_selection_bias after each step; or, to balance by "
    "losses alone, write the router out: RouterConfig(top_k=..., score=...)."
)

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
    shared_activation: ActivationLike | None
    shared_gate: bool
    return_routing: bool
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
                f"MoE: router is {a_type(self.router)}; pass jaxmoe.RouterConfig(top_k=...) or one of its "
                "presets, such as jaxmoe.RouterConfig.mixtral()."
            )
        if self.router.top_k > self.num_experts:
            raise ValueError(
                f"MoE: router.top_k={self.router.top_k} exceeds num_experts={self.num_experts}. Choose top_k of at "
                "most num_experts."
            )
        for name in ("dtype", "param_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                raise TypeError(f"MoE: {name}={jnp.dtype(dtype)} must be a float dtype, such as bfloat16.")
        if self.shared_activation is not None and self.shared_intermediate is None:
            raise ValueError(
                f"MoE: shared_activation={self.shared_activation!r} is given, but there is no shared expert. Set "
                "shared_intermediate= to its width, or leave shared_activation out."
            )
        if self.shared_gate and self.shared_intermediate is None:
            raise ValueError(
                "MoE: shared_gate=True, but there is no shared expert for it to multiply. Set shared_intermediate= to "
                "its width, or leave shared_gate out."
            )
        if not self.gated and activations.resolve(self.shared_activation or self.activation).needs_up:
            raise ValueError(
                f"MoE: activation={self.activation!r}, shared_activation={self.shared_activation!r} with gated=False: "
                "it takes two projections, and there is one. Use gated=True, or an activation of one projection."
            )
        object.__setattr__(self, "axis_name", axis_tuple(self.axis_name, "axis_name") or None)
        if self.data_axes is not None and not isinstance(self.data_axes, PartitionSpec):
            object.__setattr__(self, "data_axes", axis_tuple(self.data_axes, "data_axes"))

    def check(self, quantized: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Raises what `route` and `moe_layer` would at the first call, before any parameter is made.

        Args:
          quantized: the matrices of experts that are, by name.
        """
        logits = jax.ShapeDtypeStruct((1, self.num_experts), jnp.float32)
        # With a bias, whether the layer has one or not: `warn` speaks of that.
        bias = jax.ShapeDtypeStruct((self.num_experts,), jnp.float32)
        routing = jax.eval_shape(lambda array, bias: route(array, self.router, selection_bias=bias), logits, bias)
        # Without a mesh, or inside shard_map, the number of ranks is that of a later call.
        mesh = mesh_to_enter(self.mesh)
        tokens = 1 if mesh is None else mesh.size
        # Of a call with x of the parameters' dtype, where none is asked for: GPUs do not take all.
        dtype = jax.dtypes.canonicalize_dtype(self.param_dtype if self.dtype is None else self.dtype)
        arrays = {name: jax.ShapeDtypeStruct(parameter.shape, dtype) for name, parameter in parameters(self).items()}
        arrays |= jax.eval_shape(lambda: dict(quantized))
        arguments = Arguments(
            jax.ShapeDtypeStruct((tokens, self.hidden), dtype),
            jax.ShapeDtypeStruct((tokens, self.router.top_k), routing.topk_ids.dtype),
            jax.ShapeDtypeStruct((tokens, self.router.top_k), routing.topk_weights.dtype),
            experts_of(arrays),
        )
        on_one_rank = CallOptions(
            activation=self.activation,
            axis_name=None,
            data_axes=(),
            implementation=self.implementation,
            plan=self.plan,
            residuals=self.residuals,
            precision=self.precision,
            accumulation=self.accumulation,
        )
        calls.check(arguments, on_one_rank if mesh is None else self)

    def warn(self, caller: str, remedy: str) -> None:
        """Warns where the router is that of a model with a selection bias, and the layer has none."""
        if not self.selection_bias and (preset := preset_with_selection_bias(self.router)):
            warnings.warn(
                f"{caller}: the router is RouterConfig.{preset}(), whose model chooses experts by a selection bias and "
                f"so keeps them evenly loaded; this layer has none. {remedy}",
                UserWarning,
                stacklevel=3,
            )

    @property
    def is_placed(self) -> bool:
        """Whether any parameter has a mesh axis, so that all of them carry sharding metadata."""
        return any(axis is not None for axis in (self.axis_name, self.hidden_axis, self.intermediate_axis))


# What Flax makes of the axes of an array's dimensions: mesh axes in the place of logical names.
LookUp = Callable[[tuple[AxisName, ...]], Iterable[Any]]


def on_mesh(config: LayerConfig, of_parameters: LookUp, of_tokens: LookUp) -> LayerConfig:
    """Returns the layer with mesh axes in the place of logical names, so that it computes where its parameters lie.

    Names that are not found stay as they are: `moe_layer` refuses those that the mesh does not have.

    Args:
      config: the layer.
      of_parameters: looks up the names of a whole matrix of experts together: which axes one of them gets may depend on
        the others.
      of_tokens: the same of `data_axes`.
    """

    def axes_of(found: Any) -> tuple[str, ...]:
        return () if found is PartitionSpec.UNCONSTRAINED else axis_tuple(found, "axis")

    experts, hidden, intermediate = map(axes_of, of_parameters(matrix_axes(config)))
    data_axes = config.data_axes
    if data_axes is not None:
        names = names_of_tokens(data_axes, "MoE")
        found = dict(zip(names, map(axes_of, of_tokens(names)), strict=True))
        if isinstance(data_axes, PartitionSpec):
            entries = (tuple(axis for name in names_in(entry) for axis in found[name]) for entry in data_axes)
            data_axes = PartitionSpec(*(entry or None for entry in entries))
        else:
            data_axes = tuple(axis for name in names for axis in found[name] if axis not in experts)
    return dataclasses.replace(
        config,
        axis_name=experts or None,
        hidden_axis=hidden or None,
        intermediate_axis=intermediate or None,
        data_axes=data_axes,
    )


def matrix_axes(config: LayerConfig) -> tuple[AxisName, ...]:
    """Returns the axes of `[experts, hidden, intermediate]`; one alone as a name, since Flax looks up no tuple."""

    def of(argument: str) -> AxisName:
        names = axis_tuple(getattr(config, argument), argument, "MoE")
        return names[0] if len(names) == 1 else names or None

    return of("axis_name"), of("hidden_axis"), of("intermediate_axis")


def experts_of(arrays: Mapping[str, Any]) -> Experts:
    return Experts(**{name: arrays.get(name) for name in EXPERT_ARRAYS})


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
    hidden = config.hidden
    expert_axis, hidden_axis, intermediate_axis = matrix_axes(config)
    table = {"router_kernel": Parameter((hidden, config.num_experts), (None, None), router_init)}
    if config.router_bias:
        table["router_bias"] = Parameter((config.num_experts,), (None,), _zeros)

    def feed_forward(prefix: str, width: int, stack: tuple[int, ...], stack_axis: tuple[AxisName, ...]) -> None:
        init = _each_expert(kernel_init, expert_axis, config.mesh) if stack else kernel_init
        into = Parameter((*stack, hidden, width), (*stack_axis, hidden_axis, intermediate_axis), init)
        back = Parameter((*stack, width, hidden), (*stack_axis, intermediate_axis, hidden_axis), init)
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
    if config.shared_gate:
        table["shared_gate_kernel"] = Parameter((hidden, 1), (None, None), kernel_init)
    return table


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.zeros(shape, dtype)


def _each_expert(init: Initializer, expert_axis: AxisName, mesh: Mesh | AbstractMesh | None) -> Initializer:
    def stacked(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # Explicit axes are taken at their word: from keys that every device has, every device would draw all experts.
        # With Auto axes the compiler sees that only a part is kept.
        keys = place_explicit(jax.random.split(key, shape[0]), PartitionSpec(expert_axis), mesh)
        return jax.vmap(lambda expert_key: init(expert_key, shape[1:], dtype))(keys)

    return stacked
