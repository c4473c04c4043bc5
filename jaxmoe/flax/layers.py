"""The forward pass of the layer that `nnx.py` and `linen.py` wrap, on plain arrays.

    logits = x @ router_kernel + router_bias                      in float32
    routing = route(logits, router, selection_bias)
    y = moe_layer(x, routing, experts) + shared_expert(x) * sigmoid(x @ shared_gate_kernel)

The shared expert is there on request, and so is its gate, in float32 as well.

Each library makes the arrays of `config.parameters` in its own way and passes them to `forward`; nothing here imports
Flax.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from jaxmoe import activation as activations
from jaxmoe import expert_split as expert_splits
from jaxmoe.api import run
from jaxmoe.arrays import is_array
from jaxmoe.expert_checks import takes_experts
from jaxmoe.expert_split import ExpertSplit
from jaxmoe.experts import Experts
from jaxmoe.explain import Explanation
from jaxmoe.explain import explain as explain_call
from jaxmoe.flax.config import EXPERT_ARRAYS, LayerConfig, experts_of
from jaxmoe.flax.placement import split_as, split_of, whole
from jaxmoe.formats import at_least_float32
from jaxmoe.options import Arguments, CallOptions
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.routing import MoEAux, MoEStats, router_aux, update_selection_bias
from jaxmoe.routing.router import choose
from jaxmoe.routing.stats import check_token_valid
from jaxmoe.sharding import names_of_tokens
from jaxmoe.wording import a_type


def forward(
    config: LayerConfig,
    arrays: Mapping[str, Any],
    x: Float[Array, "*batch hidden"],
    *,
    selection_bias: Float[Array, " experts"] | None,
    token_valid: Bool[Array, "*batch"] | None,
) -> tuple[Float[Array, "*batch hidden"], MoEAux]:
    """Returns the output of the layer, in its compute dtype, and what it says about its routing.

    Args:
      config: the layer.
      arrays: the `parameters`, of whatever dtype; matrices of experts may be quantised.
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
    tokens = whole(x, mesh, but_first=x.ndim - 1)
    arrays = {name: array if name in EXPERT_ARRAYS else whole(array, mesh) for name, array in arrays.items()}
    if token_valid is not None:
        # Before any arithmetic: a masked NaN times a zero cotangent would be a NaN in the gradient of every weight.
        token_valid = split_as(token_valid, split_of(tokens)[:-1], mesh)
        tokens = jnp.where(token_valid[..., None], tokens, 0)

    logits = _router_logits(arrays, tokens, dtype)
    bias = None if selection_bias is None else jax.lax.stop_gradient(selection_bias)
    # The layer has warned of a missing bias when it was made.
    routing = choose(logits, config.router, bias, token_valid)
    tokens = tokens.astype(dtype)
    experts = _experts_for(dtype, arrays)
    y, _ = run(Arguments(tokens, routing.topk_ids, routing.topk_weights, experts, token_valid), config)
    if config.shared_intermediate is not None:
        shared = _shared_expert(config, arrays, tokens)
        if token_valid is not None:
            shared = jnp.where(token_valid[..., None], shared, 0)
        y = (y.astype(shared.dtype) + shared).astype(dtype)
    aux = router_aux(routing, logits, token_valid=token_valid, axis_name=_manual_token_axes(config))
    if config.return_routing:
        aux = dataclasses.replace(aux, routing=routing, logits=logits)
    return split_as(y, split_of(x), mesh), aux


def explain(config: LayerConfig, arrays: Mapping[str, Any], x: Any) -> Explanation:
    """Returns what `jaxmoe.explain` says of the call that `forward` makes. Computes nothing.

    Args:
      config: the layer.
      arrays: the `parameters`, or a `jax.ShapeDtypeStruct` of each.
      x: tokens, or a `jax.ShapeDtypeStruct`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `forward` would.
    """
    _check(config, x, None)
    dtype, slots = _compute_dtype(config, x, arrays), (*x.shape[:-1], config.router.top_k)
    # Where the tokens are says for which platform, and how they are split.
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
    on_device = contextlib.nullcontext()
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        on_device = jax.default_device(next(iter(x.devices())))
    arguments = (
        jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
        jax.ShapeDtypeStruct(slots, jnp.int32),
        jax.ShapeDtypeStruct(slots, at_least_float32(dtype)),
        jax.eval_shape(functools.partial(_experts_for, dtype), dict(arrays)),
    )
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(CallOptions)}
    with on_device:
        return explain_call(*arguments, **options)


def _experts_for(dtype: Any, arrays: Mapping[str, Any]) -> Experts:
    """Returns the experts to compute in `dtype`, quantised ones as they are.

    In float32 they stay for 16-bit tokens: so do their gradients.
    """

    def of(array: Any) -> Any:
        return array if isinstance(array, QuantizedMatrix) or takes_experts(array.dtype, dtype) else array.astype(dtype)

    return experts_of({name: of(arrays[name]) for name in EXPERT_ARRAYS if name in arrays})


def _check(config: LayerConfig, x: Any, token_valid: Any) -> None:
    if not is_array(x):
        raise TypeError(f"MoE: x is {a_type(x)}; it must be an array [..., tokens, hidden].")
    if len(x.shape) < 2 or x.shape[-1] != config.hidden:
        raise ValueError(
            f"MoE: x has shape {x.shape}; it must be [..., tokens, hidden] with hidden={config.hidden}, the width this "
            "layer was made for."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"MoE: x is {x.dtype}; it must be a float array.")
    check_token_valid("MoE", token_valid, x.shape[:-1], "x")


def _compute_dtype(config: LayerConfig, x: Any, arrays: Mapping[str, Any]) -> Any:
    """The dtype that was asked for; without one, as in Flax's own layers, the promotion of input and parameters."""
    wide = (array for array in arrays.values() if not isinstance(array, QuantizedMatrix))
    return jnp.dtype(config.dtype) if config.dtype is not None else jnp.result_type(x, *wide)


def _router_logits(arrays: Mapping[str, Array], tokens: jax.Array, dtype: Any) -> jax.Array:
    """Logits in float32 (float64 for float64), whatever the layer computes in.

    Logits in bfloat16 change which experts are chosen, and with them the whole output: Fedus et al. 2021
    (arXiv:2101.03961, section 2.4, selective precision). HIGHEST keeps GPUs and TPUs from rounding the operands to TF32
    or bfloat16.
    """
    logits = _wide_product(tokens, arrays["router_kernel"], dtype)
    return _plus(logits, arrays["router_bias"]) if "router_bias" in arrays else logits


def _plus(rows: jax.Array, bias: jax.Array) -> jax.Array:
    return rows + jnp.expand_dims(bias.astype(rows.dtype), range(rows.ndim - 1))


def _wide_product(tokens: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    wide = at_least_float32(dtype)
    return jnp.dot(tokens.astype(wide), kernel.astype(wide), precision=jax.lax.Precision.HIGHEST)


def _shared_expert(config: LayerConfig, arrays: Mapping[str, Array], tokens: jax.Array) -> jax.Array:
    """The expert that every token visits: GEMMs in the layer's dtype, the rest in float32, as in the routed experts."""
    activation = activations.resolve(
        config.activation if config.shared_activation is None else config.shared_activation
    )
    wide = at_least_float32(tokens.dtype)
    split, arrays = _gathered_shared(config, arrays, tokens)

    def project(rows: jax.Array, name: str) -> jax.Array | None:
        if f"shared_w_{name}" not in arrays:
            return None
        out = jnp.dot(rows, arrays[f"shared_w_{name}"].astype(rows.dtype)).astype(wide)
        return _plus(out, arrays[f"shared_b_{name}"]) if f"shared_b_{name}" in arrays else out

    gate = project(tokens, "gate")
    assert gate is not None
    out = project(activation.value(gate, project(tokens, "up")).astype(tokens.dtype), "down")
    assert out is not None
    out = split.add_up(out)
    if "shared_gate_kernel" not in arrays:
        return out
    return out * jax.nn.sigmoid(_wide_product(tokens, arrays["shared_gate_kernel"], tokens.dtype))


def _gathered_shared(
    config: LayerConfig, arrays: Mapping[str, Array], tokens: jax.Array
) -> tuple[ExpertSplit, Mapping[str, Array]]:
    """Returns how the shared expert is split inside of `shard_map`, as the others are, and the arrays of this rank.

    Outside of it the compiler knows, or types do.
    """
    mesh, prefix = jax.sharding.get_abstract_mesh(), "shared_"
    if not mesh.manual_axes:
        return ExpertSplit(), arrays
    names = [name for name in EXPERT_ARRAYS if prefix + name in arrays]
    shards = experts_of({name: arrays[prefix + name][None] for name in names})
    split = expert_splits.choose(
        shards,
        config.hidden_axis,
        config.intermediate_axis,
        mesh=mesh,
        entering=False,
        expert_axes=(),
        token_axes=names_of_tokens(config.data_axes, "MoE"),
    )
    gathered = split.gather(shards, tokens, rounds=False)
    return split, {**arrays, **{prefix + name: getattr(gathered, name)[0] for name in names}}


def _manual_token_axes(config: LayerConfig) -> tuple[str, ...]:
    """Returns the axes over which `MoEAux` is summed: inside `shard_map` those of the tokens, outside none."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = (*names_of_tokens(config.data_axes, "MoE"), *(config.axis_name or ()))
    return tuple(dict.fromkeys(name for name in names if name in manual))


def updated_bias(
    selection_bias: Float[Array, "*stack experts"], stats: MoEStats, rate: float | Float[Array, ""]
) -> Float[Array, "*stack experts"]:
    """Returns `jaxmoe.update_selection_bias` of one layer, or of layers stacked along leading dimensions."""
    if not isinstance(stats, MoEStats):
        raise TypeError(f"update_selection_bias: stats is {a_type(stats)}; it must be jaxmoe.MoEStats, e.g. aux.stats.")

    def update(bias: jax.Array, rows: jax.Array) -> jax.Array:
        return update_selection_bias(bias, rows, rate)

    for _ in selection_bias.shape[:-1]:
        update = jax.vmap(update)
    return update(selection_bias, stats.rows_per_expert)
