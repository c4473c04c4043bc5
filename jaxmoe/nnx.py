"""`MoE` for Flax NNX: router, experts and an optional shared expert in one module; the maths is in `flax/layers.py`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmoe.activation import ActivationLike
from jaxmoe.convert.weights import MoEWeights
from jaxmoe.explain import Explanation
from jaxmoe.flax import layers
from jaxmoe.flax.config import (
    ADD_SELECTION_BIAS,
    AxisName,
    Initializer,
    LayerConfig,
    default_init,
    on_mesh,
    parameters,
)
from jaxmoe.flax.placement import put
from jaxmoe.flax.weights import arguments_of, arrays_of
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import Accumulation, ImplementationName, Precision, Residuals
from jaxmoe.plan import AnyPlan
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.routing import MoEAux, MoEStats, RouterConfig

try:
    from flax import nnx
    from flax.core import spmd

    from jaxmoe import flax_state
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "jaxmoe.nnx needs Flax, which is not installed. Run: pip install 'jaxmoe[flax]'"
    ) from error

__all__ = ["MoE", "MoEAux", "QuantizedWeight", "SelectionBias"]

flax_state.register()


class SelectionBias(nnx.Variable[jax.Array]):
    """`[experts]` float32, added to the router's scores for the selection only.

    It is no `nnx.Param`: `nnx.value_and_grad` and `nnx.Optimizer(..., wrt=nnx.Param)` leave it alone, and
    `MoE.update_selection_bias` moves it.
    """


class QuantizedWeight(nnx.Variable[Any]):
    """A matrix of all experts in 8 or 4 bits: a `jaxmoe.BlockScaled`, `jaxmoe.MXFP4` or `jaxmoe.NVFP4`.

    It is no `nnx.Param`, since it has no gradient: `nnx.value_and_grad` and `nnx.Optimizer(..., wrt=nnx.Param)` leave
    it alone.
    """

    def set_value(self, value: Any, **options: Any) -> None:
        """Sets it. Where a mesh is set `nnx.eval_shape` passes one struct for all arrays of a matrix."""
        known = self.get_value()
        if isinstance(value, jax.ShapeDtypeStruct) and isinstance(known, QuantizedMatrix):
            lies = value.sharding
            value = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=lies), known)
        super().set_value(value, **options)


class MoE(nnx.Module):
    """A Mixture-of-Experts layer: `y, aux = moe(x)` routes every token to its experts and returns their weighted sum.

    The router computes in float32 whatever `dtype` is. No token is dropped. `aux` holds the auxiliary losses and the
    load, over all tokens of all ranks.

    Outside `shard_map`, under `nnx.jit` or not, with Auto or Explicit mesh axes, the layer works on whole arrays and
    enters `shard_map` itself, with tokens split over `data_axes` and `axis_name` (any number of them). Inside a
    `shard_map` that has `axis_name` manual, merge a module whose state has been split by
    `in_specs=nnx.get_partition_spec(state)`; `data_axes` then names the other manual axes over which `aux` is summed.
    `nnx.value_and_grad`, `nnx.remat` and `nnx.scan` over layers apply; create the layers of a scan with `nnx.vmap`, and
    give both `transform_metadata={nnx.PARTITION_NAME: None}`. `nnx.vmap` over a call raises.

    Where a mesh is set (`jax.set_mesh`) or passed, parameters are placed as their `out_sharding` says when they are
    made; without one they only carry it. Create large layers under `nnx.jit`, so that no device ever holds all experts.
    `MoE.from_weights` makes a layer of a checkpoint's weights.

    Args:
      hidden: width of a token.
      intermediate: width of an expert between its two GEMMs.
      num_experts: number of experts, a multiple of the number of ranks of `axis_name`.
      router: how experts are chosen and weighted, e.g. `jaxmoe.RouterConfig.mixtral()`.
      activation: of the experts: `"silu"`, `"gelu"`, `"gelu_tanh"`, `"relu"`, a `jaxmoe.SwiGLU` or a function, see
        `jaxmoe.moe_layer`.
      gated: with an up projection; `False` makes plain two-matrix experts.
      biases: with biases on all projections of the experts, the shared one included.
      router_bias: with a trained bias on the router's logits, as in gpt-oss.
      selection_bias: with a `SelectionBias` for balance without an auxiliary loss, as in DeepSeek-V3.
      shared_intermediate: width of an expert that every token visits besides; `None` for none.
      shared_activation: of the shared expert; `None` is `activation`, so that a clamp applies to it too (DeepSeek-V4).
      shared_gate: multiply what the shared expert answers by `sigmoid(x @ shared_gate_kernel)`, as in Qwen2-MoE and
        Qwen3-Next.
      return_routing: with `aux.routing` and `aux.logits`, `[..., tokens, experts]`, for losses of your own. A scan over
        layers stores them for every layer.
      axis_name: mesh axis, or axes, over which the experts are spread; `None` for no expert parallelism.
      data_axes: the other mesh axes over which tokens are split, see `jaxmoe.moe_layer`.
      hidden_axis: mesh axis, axes or logical name for the hidden dimension of experts and shared expert.
      intermediate_axis: the same for their intermediate dimension. The router is replicated.
      mesh: where none is set by `jax.set_mesh`. With Explicit axes take gradients under `nnx.jit` or `jax.set_mesh`:
        JAX refuses others.
      implementation: `"xla"`, `"megakernel"`, `"reference"` or `None` to choose, see `jaxmoe.moe_layer`.
      plan: how to compute it; `None` is `jaxmoe.default_plan`.
      residuals: what the backward pass keeps, see `jaxmoe.moe_layer`.
      precision: `"fp8"` or `"fp8-e8m0"` rounds tokens and experts to 8 bits in every forward pass, see
        `jaxmoe.moe_layer`; `None` does not.
      network: where the experts are spread over several hosts, see `jaxmoe.moe_layer`.
      dtype: to compute in and of the output; `None` is the promotion of `x` and the parameters.
      param_dtype: of the parameters.
      kernel_init: initialiser of one matrix `[in, out]` of an expert; every expert draws its own. LeCun normal.
      router_init: initialiser of the router's kernel `[hidden, experts]`. LeCun normal.
      rngs: the stream `params` is used.

    Attributes:
      router_kernel: `[hidden, experts]`.
      router_bias: `[experts]`.
      w_gate: `[experts, hidden, intermediate]`, and so `w_up`. All three are `QuantizedWeight` where `from_weights` was
        given experts in few bits.
      w_down: `[experts, intermediate, hidden]`.
      b_gate: `[experts, intermediate]`, and so `b_up`.
      b_down: `[experts, hidden]`.
      shared_w_gate: `[hidden, shared_intermediate]`, and so `shared_w_up`, `shared_w_down` and biases `shared_b_...`.
      shared_gate_kernel: `[hidden, 1]`.
      selection_bias: a `SelectionBias`, `[experts]`. What was not asked for is `None`.

    Raises:
      ValueError: sizes, axes or activations that do not go together.
      TypeError: an argument of the wrong type.

    Warns:
      UserWarning: the router is that of a model with a selection bias (DeepSeek, Kimi), and `selection_bias` is False.

    >>> import jax.numpy as jnp, jaxmoe
    >>> from flax import nnx
    >>> from jaxmoe.nnx import MoE
    >>> moe = MoE(8, 16, num_experts=4, router=jaxmoe.RouterConfig.mixtral(), axis_name=None, rngs=nnx.Rngs(0))
    >>> y, aux = moe(jnp.ones((2, 3, 8)))
    >>> y.shape, int(aux.stats.rows_per_expert.sum())
    ((2, 3, 8), 12)
    """

    router_kernel: nnx.Param[jax.Array]
    router_bias: nnx.Param[jax.Array] | None = None
    w_gate: nnx.Param[jax.Array] | QuantizedWeight
    w_up: nnx.Param[jax.Array] | QuantizedWeight | None = None
    w_down: nnx.Param[jax.Array] | QuantizedWeight
    b_gate: nnx.Param[jax.Array] | None = None
    b_up: nnx.Param[jax.Array] | None = None
    b_down: nnx.Param[jax.Array] | None = None
    shared_w_gate: nnx.Param[jax.Array] | None = None
    shared_w_up: nnx.Param[jax.Array] | None = None
    shared_w_down: nnx.Param[jax.Array] | None = None
    shared_b_gate: nnx.Param[jax.Array] | None = None
    shared_b_up: nnx.Param[jax.Array] | None = None
    shared_b_down: nnx.Param[jax.Array] | None = None
    shared_gate_kernel: nnx.Param[jax.Array] | None = None
    selection_bias: SelectionBias | None = None

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        router: RouterConfig,
        *,
        activation: ActivationLike = "silu",
        gated: bool = True,
        biases: bool = False,
        router_bias: bool = False,
        selection_bias: bool = False,
        shared_intermediate: int | None = None,
        shared_activation: ActivationLike | None = None,
        shared_gate: bool = False,
        return_routing: bool = False,
        axis_name: str | Sequence[str] | None = "expert",
        data_axes: str | Sequence[str] | PartitionSpec | None = None,
        hidden_axis: AxisName = None,
        intermediate_axis: AxisName = None,
        mesh: Mesh | AbstractMesh | None = None,
        implementation: ImplementationName | None = None,
        plan: AnyPlan | None = None,
        residuals: Residuals | None = None,
        precision: Precision | None = None,
        network: NetworkPlan | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = default_init,
        router_init: Initializer = default_init,
        rngs: nnx.Rngs,
    ) -> None:
        named = LayerConfig(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            router=router,
            activation=activation,
            gated=gated,
            biases=biases,
            router_bias=router_bias,
            selection_bias=selection_bias,
            shared_intermediate=shared_intermediate,
            shared_activation=shared_activation,
            shared_gate=shared_gate,
            return_routing=return_routing,
            axis_name=axis_name,
            data_axes=data_axes,
            hidden_axis=hidden_axis,
            intermediate_axis=intermediate_axis,
            mesh=mesh,
            implementation=implementation,
            plan=plan,
            residuals=residuals,
            precision=precision,
            network=network,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.config = on_mesh(named, spmd.get_pspec, spmd.get_pspec)
        self.config.check()
        self.config.warn("MoE", ADD_SELECTION_BIAS)
        table = parameters(named, kernel_init=kernel_init, router_init=router_init)
        for name, parameter in table.items():
            value = parameter.init(rngs.params(), parameter.shape, param_dtype)
            setattr(self, name, nnx.Param(value, **self._sharding(parameter.axes)))
        if selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros(num_experts, jnp.float32), **self._sharding((None,)))

    @classmethod
    def from_weights(
        cls,
        weights: MoEWeights,
        router: RouterConfig,
        *,
        activation: ActivationLike = "silu",
        shared_activation: ActivationLike | None = None,
        return_routing: bool = False,
        axis_name: str | Sequence[str] | None = "expert",
        data_axes: str | Sequence[str] | PartitionSpec | None = None,
        hidden_axis: AxisName = None,
        intermediate_axis: AxisName = None,
        mesh: Mesh | AbstractMesh | None = None,
        implementation: ImplementationName | None = None,
        plan: AnyPlan | None = None,
        residuals: Residuals | None = None,
        precision: Precision | None = None,
        accumulation: Accumulation = "promoted",
        network: NetworkPlan | None = None,
        dtype: DTypeLike | None = None,
    ) -> "MoE":
        """Returns the layer of a checkpoint, or of any weights in a `jaxmoe.convert.MoEWeights`.

        Sizes, biases, the shared expert and its gate are those of the weights, which stay in the bits that they have:
        experts in 8 or 4 bits are `QuantizedWeight`s, everything else is a `Param`. A shared expert in few bits is
        decoded, to `dtype` or bfloat16.

        Args:
          weights: as `jaxmoe.convert.from_hf` returns them, or after `jaxmoe.quantize` of their experts. Arrays that
            lie where the layer needs them, as `from_hf` puts them on the same mesh, are not copied.
          router: how experts are chosen, which no checkpoint's tensors say, e.g. `jaxmoe.RouterConfig.qwen3_moe()`.
          activation: of the experts, e.g. `jaxmoe.SwiGLU.gpt_oss()`.
          shared_activation: this and all below as for `MoE`.
          return_routing: with `aux.routing` and `aux.logits`.
          axis_name: mesh axes of the experts; pass `from_hf` the same.
          data_axes: the other mesh axes of the tokens.
          hidden_axis: of wide experts. Quantised ones stay split as `from_hf` has split them.
          intermediate_axis: the same.
          mesh: where none is set.
          implementation: or `None` to choose.
          plan: or `None` for the default.
          residuals: what the backward pass keeps.
          precision: by default that of the experts.
          accumulation: how products of 8 bits become sums, see `jaxmoe.moe_layer`.
          network: or `None` for the default.
          dtype: to compute in; `None` is the promotion of `x` and the wide weights.

        Raises:
          ValueError, TypeError: as for `MoE`; weights that do not go together.
          NotImplementedError: weights with a `token_table`, which the layer does not have.

        >>> import jax, jax.numpy as jnp, jaxmoe
        >>> from jaxmoe.nnx import MoE
        >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=32, intermediate=64)
        >>> weights = jaxmoe.convert.MoEWeights(jaxmoe.quantize(experts, "mxfp4"), router_kernel=jnp.ones((32, 4)))
        >>> moe = MoE.from_weights(weights, jaxmoe.RouterConfig.mixtral(), axis_name=None)
        >>> y, aux = moe(jnp.ones((2, 3, 32)))
        >>> y.shape, type(moe.w_gate).__name__, type(moe.router_kernel).__name__
        ((2, 3, 32), 'QuantizedWeight', 'Param')
        """
        config = LayerConfig(
            **arguments_of(weights),
            router=router,
            activation=activation,
            shared_activation=shared_activation,
            return_routing=return_routing,
            axis_name=axis_name,
            data_axes=data_axes,
            hidden_axis=hidden_axis,
            intermediate_axis=intermediate_axis,
            mesh=mesh,
            implementation=implementation,
            plan=plan,
            residuals=residuals,
            precision=precision,
            accumulation=accumulation,
            network=network,
            dtype=dtype,
            param_dtype=jnp.float32,
        )
        config = on_mesh(config, spmd.get_pspec, spmd.get_pspec)
        table = parameters(config)
        arrays = arrays_of(weights, table, dtype)
        quantized = {name: array for name, array in arrays.items() if isinstance(array, QuantizedMatrix)}
        wide = [array.dtype for name, array in arrays.items() if name not in quantized]
        config = dataclasses.replace(config, param_dtype=jnp.result_type(*wide))
        config.check(quantized)
        config.warn(
            "MoE.from_weights", "Pass weights whose selection_bias is the checkpoint's e_score_correction_bias."
        )
        # Flax has no way to make a module but its __init__, which draws parameters: here without computing them.
        one = RouterConfig(top_k=1)
        moe = nnx.eval_shape(lambda: cls(1, 1, 1, one, gated=config.gated, axis_name=None, rngs=nnx.Rngs(0)))
        moe.config = config
        for name, parameter in table.items():
            kind = QuantizedWeight if name in quantized else nnx.Param
            setattr(moe, name, moe._variable(kind, arrays[name], parameter.axes))
        if weights.selection_bias is not None:
            bias = jnp.asarray(weights.selection_bias, jnp.float32)
            moe.selection_bias = moe._variable(SelectionBias, bias, (None,))
        return moe

    def _variable(self, kind: Any, value: Any, axes: tuple[AxisName, ...]) -> Any:
        """Returns a variable of arrays that may lie anywhere."""
        value = jax.tree.map(jnp.asarray, value)
        if not self.config.is_placed:
            return kind(value)
        # Flax moves what is on the mesh, and only that.
        value = put(value, axes[0], self.config.mesh)
        if kind is not QuantizedWeight:
            return kind(value, **self._sharding(axes))
        # Values and scales alike, [experts, out, ...]. Along other dimensions they stay split as they are.
        stay = {"eager_sharding": False} if any(axes[1:]) else {}
        return kind(value, **self._sharding(axes[:1]) | stay)

    def _sharding(self, axes: tuple[AxisName, ...]) -> dict[str, Any]:
        """Returns the metadata of a variable."""
        if not self.config.is_placed:
            return {}
        mesh = self.config.mesh
        if mesh is not None:
            return {"out_sharding": axes, "mesh": mesh}
        # Flax refuses to place a variable where no mesh is set. A layer made there keeps the names and is placed by its
        # user, e.g. by jax.device_put with the shardings of nnx.get_named_sharding.
        return {"out_sharding": axes, **({"eager_sharding": False} if jax.sharding.get_abstract_mesh().empty else {})}

    def __call__(
        self, x: Float[Array, "*batch hidden"], token_valid: Bool[Array, "*batch"] | None = None
    ) -> tuple[Float[Array, "*batch hidden"], MoEAux]:
        """Returns the output and what belongs to the loss and to the log.

        Args:
          x: tokens, `[..., tokens, hidden]`.
          token_valid: `False` for padding: such a token takes no part (whatever it holds, NaN included), counts in no
            loss and no statistic, and its output is zero.

        Returns:
          `(y, aux)`: `y` of the shape and sharding of `x`, in the compute dtype; `aux` a `MoEAux`: losses and load
          of all tokens, and the routing of the tokens where `return_routing` asks for it.

        Raises:
          ValueError: `x` or `token_valid` does not fit the layer; the mesh does not fit, see `jaxmoe.moe_layer`.
          TypeError: `x` or `token_valid` is of the wrong dtype.
        """
        return layers.forward(
            self.config,
            self._arrays(),
            x,
            selection_bias=None if self.selection_bias is None else self.selection_bias[...],
            token_valid=token_valid,
        )

    def explain(self, x: Any) -> Explanation:
        """Says what a call with tokens like `x` does: `jaxmoe.explain` of the `jaxmoe.moe_layer` in it. Runs nothing.

        It knows the routed experts only: the router and a shared expert come besides.

        Args:
          x: tokens, `[..., tokens, hidden]`, or a `jax.ShapeDtypeStruct` of them. The layer may be abstract too
            (`nnx.eval_shape`).

        Returns:
          An `Explanation`; `print` it.

        Raises:
          ValueError, TypeError, NotImplementedError: as a call would.

        >>> import jax, jax.numpy as jnp, jaxmoe
        >>> from flax import nnx
        >>> from jaxmoe.nnx import MoE
        >>> router = jaxmoe.RouterConfig.mixtral()
        >>> moe = nnx.eval_shape(lambda: MoE(4096, 14336, 8, router, axis_name=None, rngs=nnx.Rngs(0)))
        >>> moe.explain(jax.ShapeDtypeStruct((4, 2048, 4096), jnp.float32)).implementation
        'xla'
        """
        return layers.explain(self.config, self._arrays(), x)

    def _arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name).get_value() for name in parameters(self.config)}

    def update_selection_bias(self, stats: MoEStats, rate: float | Float[Array, ""] = 1e-3) -> None:
        """Moves the selection bias one step towards an even load; call it once per step, after the gradient step.

        Works on stacked layers too, given the stacked statistics of a scan.

        Args:
          stats: `aux.stats` of the step. Of several micro-batches: their sum.
          rate: size of the step, see `jaxmoe.update_selection_bias`.

        Raises:
          TypeError: `stats` are none.
          ValueError: the layer has no selection bias.

        >>> import jax, jaxmoe
        >>> from flax import nnx
        >>> from jaxmoe.nnx import MoE
        >>> router = jaxmoe.RouterConfig(top_k=1, score="sigmoid")
        >>> moe = MoE(8, 16, 2, router, selection_bias=True, axis_name=None, rngs=nnx.Rngs(0))
        >>> _, aux = moe(jax.random.normal(jax.random.key(0), (9, 8)))
        >>> moe.update_selection_bias(aux.stats)
        >>> moe.selection_bias[...].sum()  # of 9 tokens, one expert got more than the other
        Array(0., dtype=float32)
        """
        if self.selection_bias is None:
            raise ValueError(
                "MoE.update_selection_bias: the layer has no selection bias. Make it with selection_bias=True."
            )
        self.selection_bias[...] = layers.updated_bias(self.selection_bias[...], stats, rate)
