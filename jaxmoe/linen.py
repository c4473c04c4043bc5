"""`MoE` for Flax Linen: router, experts, optional shared expert in one module; the maths is in `flax/layers.py`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmoe.activation import ActivationLike
from jaxmoe.explain import Explanation
from jaxmoe.flax import layers
from jaxmoe.flax.config import (
    ADD_SELECTION_BIAS,
    AxisName,
    Initializer,
    LayerConfig,
    Parameter,
    default_init,
    on_mesh,
    parameters,
)
from jaxmoe.flax.placement import place
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import ImplementationName, Precision, Residuals
from jaxmoe.plan import AnyPlan
from jaxmoe.routing import MoEAux, MoEStats, RouterConfig

try:
    import flax.linen as nn
    from flax.core.spmd import get_logical_axis_rules
    from flax.linen import spmd

    from jaxmoe import flax_state
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jaxmoe.linen needs Flax, which is not installed. Run: pip install 'jaxmoe[flax]'"
    ) from error

__all__ = ["MoE", "MoEAux", "update_selection_bias"]

flax_state.register()


class MoE(nn.Module):
    """A Mixture-of-Experts layer: `y = moe.apply(variables, x)` sends every token through its experts.

    Fields and parameters are the arguments and attributes of `jaxmoe.nnx.MoE`; the two layers compute the same. What
    else a layer has to say is sown, and is there for those who make the collection mutable:

    - `"losses"`: `load_balancing_loss` and `router_z_loss`, float32 scalars over the tokens of all ranks;
    - `"intermediates"`: `moe_stats`, a `jaxmoe.MoEStats`; with `return_routing=True` also `moe_routing`, a
      `jaxmoe.Routing`, and `moe_logits`, `[..., tokens, experts]`;

    and the selection bias is the variable `selection_bias` of the collection `"moe_state"`, which no gradient reaches;
    `update_selection_bias` moves it.

    Parameters carry the names of their mesh axes as `nn.Partitioned`, and are placed by them when they are made under a
    mesh (`jax.set_mesh`, or `mesh=`), with Auto or Explicit axes. `jax.jit`, `nn.remat` and `nn.scan` apply; a scan
    over layers needs `metadata_params={nn.PARTITION_NAME: None}` and `variable_axes` for the collections above. Not
    supported: `nn.vmap` over a call, and calls inside a `shard_map` over `axis_name`, since Linen checks parameters
    against their whole shape.

    Args:
      hidden: all fields up to `router_init` as for `jaxmoe.nnx.MoE`.
      partitioning: `nn.with_partitioning` (names are mesh axes), or `nn.with_logical_partitioning` (names are looked up
        in the rules of `nn.logical_axis_rules`; `axis_name` must then have a rule, usually to itself).

    Raises:
      ValueError: at the first call, sizes, axes or activations that do not go together.
      TypeError: at the first call, a field of the wrong type.

    Warns:
      UserWarning: in `init`, the router is that of a model with a selection bias (DeepSeek, Kimi), and `selection_bias`
        is False.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> from jaxmoe.linen import MoE
    >>> moe = MoE(8, 16, num_experts=4, router=jaxmoe.RouterConfig.mixtral(), axis_name=None)
    >>> x = jnp.ones((2, 3, 8))
    >>> variables = moe.init(jax.random.key(0), x)
    >>> y, sown = moe.apply(variables, x, mutable=["losses", "intermediates"])
    >>> y.shape, int(sown["intermediates"]["moe_stats"][0].rows_per_expert.sum())
    ((2, 3, 8), 12)
    """

    hidden: int
    intermediate: int
    num_experts: int
    router: RouterConfig
    _: dataclasses.KW_ONLY
    activation: ActivationLike = "silu"
    gated: bool = True
    biases: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    shared_intermediate: int | None = None
    shared_activation: ActivationLike | None = None
    shared_gate: bool = False
    return_routing: bool = False
    axis_name: str | Sequence[str] | None = "expert"
    data_axes: str | Sequence[str] | PartitionSpec | None = None
    hidden_axis: AxisName = None
    intermediate_axis: AxisName = None
    mesh: Mesh | AbstractMesh | None = None
    implementation: ImplementationName | None = None
    plan: AnyPlan | None = None
    residuals: Residuals | None = None
    precision: Precision | None = None
    network: NetworkPlan | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = default_init
    router_init: Initializer = default_init
    partitioning: Callable[..., Any] = nn.with_partitioning

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch hidden"], token_valid: Bool[Array, "*batch"] | None = None
    ) -> Float[Array, "*batch hidden"]:
        """Returns the output, and sows the auxiliary losses and statistics.

        Args:
          x: tokens, `[..., tokens, hidden]`.
          token_valid: `False` for padding: such a token takes no part (whatever it holds, NaN included), counts in no
            loss and no statistic, and its output is zero.

        Returns:
          `y`, of the shape and sharding of `x`, in the compute dtype.

        Raises:
          ValueError: `x` or `token_valid` does not fit the layer; the mesh does not fit, see `jaxmoe.moe_layer`.
          TypeError: `x` or `token_valid` is of the wrong dtype.
          NotImplementedError: inside a `shard_map` over `axis_name`.
        """
        named = self._config()
        config = self._on_mesh(named)
        config.check()
        if self.is_initializing():
            config.warn("MoE", ADD_SELECTION_BIAS)
        if manual := set(config.axis_name or ()) & set(jax.sharding.get_abstract_mesh().manual_axes):
            raise NotImplementedError(
                f"MoE: jaxmoe.linen.MoE is called inside a shard_map over {sorted(manual)}, where its parameters would "
                "be this rank's shards; Linen accepts whole parameters only. Call it outside (it enters shard_map "
                "itself), or use jaxmoe.nnx.MoE or jaxmoe.moe_layer."
            )
        table = parameters(named, kernel_init=self.kernel_init, router_init=self.router_init)
        arrays = {
            name: self.param(name, self._partitioned(named, parameter), parameter.shape, self.param_dtype)
            for name, parameter in table.items()
        }
        bias = None
        if self.selection_bias:
            bias = self.variable("moe_state", "selection_bias", jnp.zeros, (self.num_experts,), jnp.float32).value
        y, aux = layers.forward(config, arrays, x, selection_bias=bias, token_valid=token_valid)
        # What `init` sowed would be found again in its result, and counted at every later call.
        if not self.is_initializing():
            self.sow("losses", "load_balancing_loss", aux.load_balancing_loss)
            self.sow("losses", "router_z_loss", aux.router_z_loss)
            self.sow("intermediates", "moe_stats", aux.stats)
            if self.return_routing:
                self.sow("intermediates", "moe_routing", aux.routing)
                self.sow("intermediates", "moe_logits", aux.logits)
        return y

    @nn.nowrap
    def explain(self, x: Any) -> Explanation:
        """Says what a call with tokens like `x` does: `jaxmoe.explain` of the `jaxmoe.moe_layer` in it. Runs nothing.

        It knows the routed experts only: the router and a shared expert come besides.

        Args:
          x: tokens, `[..., tokens, hidden]`, or a `jax.ShapeDtypeStruct` of them. Parameters are taken to have
            `param_dtype`.

        Returns:
          An `Explanation`; `print` it.

        Raises:
          ValueError, TypeError, NotImplementedError: as a call would.

        >>> import jax, jax.numpy as jnp, jaxmoe
        >>> from jaxmoe.linen import MoE
        >>> moe = MoE(4096, 14336, num_experts=8, router=jaxmoe.RouterConfig.mixtral(), axis_name=None)
        >>> moe.explain(jax.ShapeDtypeStruct((4, 2048, 4096), jnp.float32)).implementation
        'xla'
        """
        config = self._on_mesh(self._config())
        config.check()
        arrays = {
            name: jax.ShapeDtypeStruct(parameter.shape, self.param_dtype)
            for name, parameter in parameters(config).items()
        }
        return layers.explain(config, arrays, x)

    @nn.nowrap
    def _config(self) -> LayerConfig:
        # Wide experts, which are all that it has, leave no choice of how sums are made.
        chosen = {field.name for field in dataclasses.fields(LayerConfig)} - {"accumulation"}
        return LayerConfig(**{name: getattr(self, name) for name in chosen})

    @nn.nowrap
    def _on_mesh(self, named: LayerConfig) -> LayerConfig:
        """Returns the layer with the mesh axes that its parameters get by their metadata."""

        def of_parameters(names: tuple[AxisName, ...]) -> tuple[Any, ...]:
            if not named.is_placed:
                return names
            # Called as for a parameter: it may be a function of the user's.
            init = self.partitioning(jax.nn.initializers.zeros, names)
            shape = (self.num_experts, self.hidden, self.intermediate)
            box = jax.eval_shape(lambda: init(jax.random.key(0), shape, self.param_dtype))
            return _looked_up(names, box.rules) if isinstance(box, nn.LogicallyPartitioned) else names

        return on_mesh(named, of_parameters, _looked_up)

    @nn.nowrap
    def _partitioned(self, config: LayerConfig, parameter: Parameter) -> Initializer:
        """Returns the initialiser of a parameter with its axis names as metadata, and with its value placed by them."""
        if not config.is_placed:
            return parameter.init
        boxed_init = self.partitioning(parameter.init, parameter.axes)

        def init(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
            boxed = boxed_init(key, shape, dtype)
            spec = boxed.get_partition_spec()
            if isinstance(boxed, nn.LogicallyPartitioned):
                spec = spmd.logical_to_mesh_axes(spec, boxed.rules) or PartitionSpec()
            return boxed.replace_boxed(place(boxed.value, spec, self.mesh))

        return init


def _looked_up(names: tuple[AxisName, ...], rules: Any = None) -> tuple[Any, ...]:
    """Returns mesh axes as Linen finds them, by the rules of the context where none are given.

    It goes through the rules in their order: each gives a name that has nothing yet its axes, if they are free. Names
    without a rule stay as they are.
    """
    rules = get_logical_axis_rules() if rules is None else rules
    known = {name for name, _ in rules}
    without = {name for name in names if isinstance(name, str)} - known
    # A tuple has mesh axes, which Linen leaves as they are.
    looked_up: Any = tuple(None if name in without else name for name in names)
    found = spmd.logical_to_mesh_axes(looked_up, rules) or ()
    return tuple(name if name in without else axes for name, axes in zip(names, found, strict=True))


def update_selection_bias(
    moe_state: Mapping[str, Any], intermediates: Mapping[str, Any], rate: float | Float[Array, ""] = 1e-3
) -> dict[str, Any]:
    """Returns `moe_state` with the selection bias of every layer moved one step towards an even load.

    Call it once per step, after the gradient step. Formula: `jaxmoe.update_selection_bias`.

    Args:
      moe_state: the collection `"moe_state"` of a model, however deep its `MoE` layers lie.
      intermediates: the collection `"intermediates"` of the step. A layer that was called several times gets the sum,
        layers stacked by `nn.scan` are updated each by its own load.
      rate: size of the step.

    Raises:
      ValueError: the statistics of a layer are missing.

    >>> import jax, jaxmoe
    >>> from jaxmoe import linen
    >>> router = jaxmoe.RouterConfig(top_k=1, score="sigmoid")
    >>> moe = linen.MoE(8, 16, num_experts=2, router=router, selection_bias=True, axis_name=None)
    >>> x = jax.random.normal(jax.random.key(0), (9, 8))
    >>> variables = moe.init(jax.random.key(1), x)
    >>> y, sown = moe.apply(variables, x, mutable=["intermediates"])
    >>> state = linen.update_selection_bias(variables["moe_state"], sown["intermediates"])
    >>> state["selection_bias"].sum()  # of 9 tokens, one expert got more than the other
    Array(0., dtype=float32)
    """
    updated: dict[str, Any] = {}
    for name, entry in moe_state.items():
        if isinstance(entry, Mapping):
            updated[name] = update_selection_bias(entry, intermediates.get(name, {}), rate)
        elif name != "selection_bias":
            updated[name] = entry
        elif "moe_stats" not in intermediates:
            raise ValueError(
                "update_selection_bias: a layer has a selection bias, but no moe_stats lie beside it in intermediates, "
                f"only {sorted(intermediates)}. Call apply(..., mutable=['intermediates']), with variable_axes for "
                "'intermediates' in every nn.scan."
            )
        else:
            stats: MoEStats = jax.tree.map(lambda *counts: sum(counts), *intermediates["moe_stats"])
            updated[name] = layers.updated_bias(entry, stats, rate)
    return updated
