"""The truth: every expert applied to every token, in float32 or float64, differentiated by JAX itself.

Nothing here is clever, so that it can be checked by reading. Every test compares with it.

With a `precision` it multiplies in float32 what others multiply in 8 or 4 bits: matrices, tokens and h are decoded,
values times scales. JAX differentiates the same without rounding (`precision.py`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmoe.activation import Activation, check_differentiable
from jaxmoe.experts import AnyExperts, Experts, split
from jaxmoe.formats import at_least_float32
from jaxmoe.guard import not_mapped, reverse_mode_only
from jaxmoe.implementations.base import Call, Inputs
from jaxmoe.implementations.explanation import Explanation, precision_reasons
from jaxmoe.options import Precision
from jaxmoe.precision import as_multiplied_rows, experts_in_8_bits, row_scales, wide_as_multiplied
from jaxmoe.quantization import dequantize
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.sharding import ExpertGroup, vary_alike


class _Static(NamedTuple):
    """The arguments that are no arrays, hashable."""

    activation: Activation
    group: ExpertGroup
    dtype: Any
    precision: Precision | None


def reference(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    topk_weights: Float[Array, "tokens top_k"],
    experts: AnyExperts,
    *,
    activation: Activation,
    group: ExpertGroup,
    compute_dtype: DTypeLike | None = None,
    precision: Precision | None = None,
) -> Float[Array, "tokens hidden"]:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)`, computed densely.

    Args:
      x: tokens of this rank.
      topk_ids: expert of each slot among all experts of the group, -1 for an unused slot.
      topk_weights: routing weight of each slot.
      experts: experts of this rank; the others are gathered from the group.
      activation: between the GEMMs.
      group: the ranks that hold the experts.
      compute_dtype: of every intermediate result; `None` is float32, or float64 for float64 tokens. A low precision
        here gives "the same maths in low precision", the yardstick of the tests' tolerances.
      precision: what is rounded to 8 bits before it is multiplied: tokens, h and matrices, or matrices alone. Not what
        the gradients are those of, which is the same without any rounding to 8 bits (quantised matrices decoded).
    """
    dtype = at_least_float32(x.dtype) if compute_dtype is None else jnp.dtype(compute_dtype)
    x, topk_ids, topk_weights, experts = vary_alike((x, topk_ids, topk_weights, split(experts)))
    static = _Static(activation, group, dtype, precision)
    if precision is None:
        return _dense(static, x, topk_ids, topk_weights, experts)
    return _rounded(static, *reverse_mode_only((x, topk_ids, topk_weights, experts)))


def _dense(static: _Static, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, experts: Experts) -> jax.Array:
    activation, group, dtype, precision = static
    if precision is not None:
        experts = experts_in_8_bits(experts, precision)
    everyone = wide_as_multiplied(jax.tree.map(group.all_gather, experts), precision, dtype)
    scales = row_scales(experts, precision)
    tokens = as_multiplied_rows(x, precision, dtype, scales.tokens)

    def add_expert(total: jax.Array, expert: tuple[jax.Array, Experts]) -> tuple[jax.Array, None]:
        expert_id, e = expert
        chosen = topk_ids == expert_id
        weight = jnp.where(chosen, topk_weights, 0).sum(-1, keepdims=True)
        visits = chosen.any(-1, keepdims=True)
        # Select, both here and behind the expert: 0 * NaN would carry a NaN of one token, or of the cotangent of its
        # output, into the gradients of experts it never visited.
        rows = jnp.where(visits, tokens, 0)
        gate = _affine(rows, e.w_gate, e.b_gate)
        up = None if e.w_up is None else _affine(rows, e.w_up, e.b_up)
        h = as_multiplied_rows(activation.value(gate, up), precision, dtype, scales.h)
        out = _affine(h, e.w_down, e.b_down)
        return total + jnp.where(visits, weight * jnp.where(visits, out, 0), 0), None

    total_dtype = at_least_float32(dtype)
    start = jnp.zeros_like(x, total_dtype)
    total, _ = jax.lax.scan(add_expert, start, (jnp.arange(everyone.num_experts, dtype=topk_ids.dtype), everyone))
    return total.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(
    static: _Static, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, experts: Experts
) -> jax.Array:
    return _dense(static, x, topk_ids, topk_weights, experts)


def _rounded_fwd(static: _Static, *arrays: Any) -> tuple[jax.Array, Any]:
    check_differentiable(static.activation)
    return _dense(static, *arrays), arrays


def _rounded_bwd(static: _Static, arrays: Any, dy: jax.Array) -> Any:
    x, topk_ids, topk_weights, experts = arrays
    wide = dequantize(experts, static.dtype) if isinstance(experts.w_gate, QuantizedMatrix) else experts

    def without_rounding(x: jax.Array, topk_weights: jax.Array, experts: Experts) -> jax.Array:
        return _dense(static._replace(precision=None), x, topk_ids, topk_weights, experts)

    dx, dweights, dexperts = jax.vjp(without_rounding, x, topk_weights, wide)[1](not_mapped(dy))
    if isinstance(experts.w_gate, QuantizedMatrix):
        biases = {name: getattr(dexperts, name) for name in ("b_gate", "b_up", "b_down")}
        given = {name: getattr(experts, name) for name in biases}
        biases = jax.tree.map(lambda gradient, bias: gradient.astype(bias.dtype), biases, given)
        nothing: Any = None
        dexperts = dataclasses.replace(dexperts, w_gate=nothing, w_up=None, w_down=nothing, **biases)
    return dx, np.zeros(topk_ids.shape, jax.dtypes.float0), dweights, dexperts


_rounded.defvjp(_rounded_fwd, _rounded_bwd)


def _affine(rows: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
    # Highest precision: by default a float32 product on a GPU rounds its inputs to TF32.
    out = jnp.matmul(rows, weights, precision="highest")
    return out if bias is None else out + bias[None, :]


def run(call: Call, inputs: Inputs) -> jax.Array:
    """Returns the output of a call for the tokens of this rank."""
    x, topk_ids, topk_weights, experts = inputs.in_dtype_of_tokens() if call.precision is None else inputs
    return reference(
        x,
        topk_ids,
        topk_weights,
        experts,
        activation=call.activation,
        group=call.group,
        precision=call.precision,
    )


def explain(call: Call) -> Explanation:
    """Returns what a dense computation takes: all experts on every rank, each of them applied to every token."""
    shape = call.shape
    wide = shape.formats.sums.row_bytes(1)
    matrices = shape.projections + 1
    memory = {
        "experts of all ranks, in float32": shape.num_experts * matrices * shape.hidden * shape.intermediate * wide,
        "one expert on every token": shape.tokens * (3 * shape.intermediate + 2 * shape.hidden) * wide,
    }
    return Explanation(
        call=call,
        reasons=(call.implementation_reason, *precision_reasons(call), "every expert is applied to every token"),
        memory_bytes=memory,
        worst_case_bytes=sum(memory.values()),
        wire_bytes=(shape.ranks - 1) * shape.num_experts // shape.ranks * shape.expert_bytes,
        flops=shape.flops // shape.top_k * shape.num_experts,
    )
