"""The portable implementation: collectives, a sort and grouped GEMMs, on any backend and any number of ranks.

    dispatch   all-gather of the tokens; every rank sorts the slots that name its experts by expert
    experts    batches of `plan.batch_rows` rows: gather, gate and up GEMM, activation, down GEMM
    combine    weighted sum over the slots of a token, all-to-all to the token's owner, sum over the ranks

Nothing is dropped and memory does not depend on the routing: a rank that gets more rows than one batch takes computes
further batches over the same buffers (`local_rows.py`). `ragged_all_to_all` would move fewer bytes, but XLA has none on
CPU and the one on GPU reaches a few percent of NVLink.

Sums run in float32 in a fixed order (slots of a token, then ranks), gathers only, no scatter-add: the result has the
same bits in every run. The backward pass is written out below in the same terms: dispatch the output's cotangent as the
tokens were dispatched, combine the cotangent of the rows as the rows were combined.

With a `precision` tokens are rounded before the all-gather, so that 8 bits and scales travel, and h before the down
GEMM. The grouped GEMMs multiply none of it: rows and matrices are decoded for them, values times scales, to the dtype
of x, and this rounds once more. Experts in 8 bits are decoded to whole copies, made in every pass; those in 4 bits one
at a time (`decoded_gemm.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxmoe.activation import check_differentiable
from jaxmoe.experts import AnyExperts, Experts, FusedExperts
from jaxmoe.formats import at_least_float32
from jaxmoe.four_bit import marked
from jaxmoe.guard import not_mapped, reverse_mode_only
from jaxmoe.implementations.base import CHECKPOINT_NAMES, Call, Inputs
from jaxmoe.implementations.xla.grouped_gemm import bias_of_row, bias_vjp, times, times_transposed
from jaxmoe.implementations.xla.local_rows import (
    Batch,
    LocalRows,
    add_batches,
    nth_batch,
    row_to_slot,
    sort_slots,
    sum_slots,
    take_rows,
)
from jaxmoe.implementations.xla.outer_products import sum_of_outer_products
from jaxmoe.implementations.xla.plan import GroupedGemm
from jaxmoe.precision import RowScales, as_multiplied, as_multiplied_rows, powers_of_two, rounds_rows, row_scales
from jaxmoe.quantization import decode_8_bits, dequantize_rows, quantize_rows
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.sharding import ExpertGroup, vary_alike


def run(call: Call, inputs: Inputs) -> jax.Array:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)` for the tokens of this rank."""
    if call.precision is None:
        inputs = inputs.in_dtype_of_tokens()

    def layer(inputs: Inputs) -> jax.Array:
        return _layer(call, vary_alike(reverse_mode_only(inputs)))

    if call.residuals == "recompute":
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    return layer(inputs)


class GateUp(NamedTuple):
    """The two inputs of the activation, as the GEMMs wrote them (without biases)."""

    gate: Float[Array, "rows intermediate"]
    up: Float[Array, "rows intermediate"] | None


def _gate_up(tokens: jax.Array, experts: AnyExperts, batch: Batch, kind: GroupedGemm) -> GateUp:
    if isinstance(experts, FusedExperts):
        return GateUp(*experts.columns_of(times(tokens, experts.w_gate_up, batch.rows_per_expert, kind)))
    gate = times(tokens, experts.w_gate, batch.rows_per_expert, kind)
    up = None if experts.w_up is None else times(tokens, experts.w_up, batch.rows_per_expert, kind)
    return GateUp(gate, up)


def _with_biases(gate_up: GateUp, experts: AnyExperts, batch: Batch) -> GateUp:
    """Returns the inputs of the activation in float32, zero behind the last row."""

    def wide(projection: jax.Array, bias: jax.Array | None) -> jax.Array:
        dtype = at_least_float32(projection.dtype)
        return jnp.where(batch.is_row, projection.astype(dtype) + bias_of_row(bias, batch, dtype), 0)

    b_gate, b_up = _biases_of_projections(experts)
    return GateUp(wide(gate_up.gate, b_gate), None if gate_up.up is None else wide(gate_up.up, b_up))


def _biases_of_projections(experts: AnyExperts) -> tuple[jax.Array | None, jax.Array | None]:
    if not isinstance(experts, FusedExperts):
        return experts.b_gate, experts.b_up
    return (None, None) if experts.b_gate_up is None else experts.columns_of(experts.b_gate_up)


def _down(
    gate_up: GateUp, experts: AnyExperts, batch: Batch, call: Call, scales: RowScales
) -> Float[Array, "rows hidden"]:
    gate, up = _with_biases(gate_up, experts, batch)
    h = as_multiplied_rows(call.activation.value(gate, up), call.precision, gate_up.gate.dtype, scales.h)
    out = times(h, experts.w_down, batch.rows_per_expert, call.plan.grouped_gemm)
    return out if experts.b_down is None else out + bias_of_row(experts.b_down, batch, out.dtype)


class RowCotangents(NamedTuple):
    """Cotangents of one batch: of the rows' tokens, of the rows' routing weights, of the experts."""

    dtokens: Float[Array, "rows hidden"]
    dweight: Float[Array, "rows 1"]
    dexperts: AnyExperts


def _batch_vjp(
    tokens: jax.Array,
    dout: jax.Array,
    weight: jax.Array,
    gate_up: GateUp,
    experts: AnyExperts,
    batch: Batch,
    call: Call,
) -> RowCotangents:
    """Differentiates `weight * (h(tokens) @ w_down + b_down)` for the cotangent `dout` of the output's tokens.

    The weight's cotangent <dout, h @ w_down> is taken as <dout @ w_down^T, h>, so that the down GEMM is not repeated.
    """
    kind = call.plan.grouped_gemm
    gate, up = _with_biases(gate_up, experts, batch)
    h = call.activation.value(gate, up)
    dtype, wide_dout = tokens.dtype, dout.astype(h.dtype)

    weighted_h = (weight * h).astype(dtype)
    dh = jnp.where(batch.is_row, times_transposed(dout, experts.w_down, batch.rows_per_expert, kind).astype(h.dtype), 0)
    dweight = jnp.sum(dh * h, -1, keepdims=True)
    if experts.b_down is not None:
        dweight += jnp.sum(wide_dout * bias_of_row(experts.b_down, batch, h.dtype), -1, keepdims=True)

    w_down = sum_of_outer_products(weighted_h, dout, batch.rows_per_expert)
    b_down = bias_vjp((weight * wide_dout).astype(dtype), batch, experts.b_down)
    dgate, dup = call.activation.vjp(gate, up, weight * dh)
    dgate = dgate.astype(dtype)
    if isinstance(experts, FusedExperts):
        assert dup is not None
        both = experts.join(dgate, dup.astype(dtype))
        dexperts: AnyExperts = dataclasses.replace(
            experts,
            w_gate_up=sum_of_outer_products(tokens, both, batch.rows_per_expert),
            w_down=w_down,
            b_gate_up=bias_vjp(both, batch, experts.b_gate_up),
            b_down=b_down,
        )
        dtokens = times_transposed(both, experts.w_gate_up, batch.rows_per_expert, kind)
        return RowCotangents(dtokens.astype(dtype), dweight, dexperts)
    dtokens = times_transposed(dgate, experts.w_gate, batch.rows_per_expert, kind)
    dw_up = None
    if experts.w_up is not None and dup is not None:
        dup = dup.astype(dtype)
        dw_up = sum_of_outer_products(tokens, dup, batch.rows_per_expert)
        dtokens = dtokens.astype(at_least_float32(dtype))
        dtokens += times_transposed(dup, experts.w_up, batch.rows_per_expert, kind).astype(dtokens.dtype)
    dexperts = Experts(
        w_gate=sum_of_outer_products(tokens, dgate, batch.rows_per_expert),
        w_up=dw_up,
        w_down=w_down,
        b_gate=bias_vjp(dgate, batch, experts.b_gate),
        b_up=None if dup is None else bias_vjp(dup, batch, experts.b_up),
        b_down=b_down,
    )
    return RowCotangents(dtokens.astype(dtype), dweight, dexperts)


class SavedRows(NamedTuple):
    """What the backward pass gets: the inputs, their sorted routing, and gate and up of the first batch, or not."""

    inputs: Inputs
    rows: LocalRows
    gate_up: GateUp | None


def _combine(totals: jax.Array, group: ExpertGroup) -> jax.Array:
    """Sends each owner the sums over its tokens' slots and adds those of all ranks, in the order of the ranks."""
    parts = group.exchange(totals)
    return parts.astype(at_least_float32(parts.dtype)).sum(0).astype(totals.dtype)


def _tokens_of_batches(call: Call, x: jax.Array, scales: RowScales) -> Callable[[Batch], jax.Array]:
    """Gathers the tokens of all ranks, as they are or in 8 bits, and returns what takes the rows of a batch of them."""
    if not rounds_rows(call.precision):
        tokens = call.group.all_gather(x)
        return lambda batch: take_rows(tokens, batch)
    quantized = quantize_rows(x, powers_of_two(call.precision), scales.tokens)
    values, factors = (call.group.all_gather(array) for array in quantized)
    return lambda batch: dequantize_rows(take_rows(values, batch), take_rows(factors, batch), x.dtype)


def _sorted_rows(call: Call, inputs: Inputs) -> LocalRows:
    all_ids, num_experts = call.group.all_gather(inputs.topk_ids), inputs.experts.num_experts
    return sort_slots(all_ids, call.group.index() * num_experts, num_experts, call.plan.batch_rows)


def _forward(call: Call, inputs: Inputs) -> tuple[jax.Array, LocalRows, GateUp]:
    group, plan = call.group, call.plan
    experts = as_multiplied(inputs.experts, call.precision, inputs.x.dtype)
    scales = row_scales(inputs.experts, call.precision)
    tokens_of, weights = _tokens_of_batches(call, inputs.x, scales), group.all_gather(inputs.topk_weights)
    rows = _sorted_rows(call, inputs)

    def gate_up_of(batch: Batch) -> GateUp:
        return _gate_up(tokens_of(batch), experts, batch, plan.grouped_gemm)

    def token_sums(batch: Batch, gate_up: GateUp) -> jax.Array:
        return sum_slots(_down(gate_up, experts, batch, call, scales), weights, rows, batch)

    first = nth_batch(rows, jnp.int32(0), plan.batch_rows)
    gate_up = _named(gate_up_of(first))
    # Kept in the dtype that goes over the wire. Float32 would spare tokens with rows in several batches one rounding,
    # and took 0.46 ms of 24.2 ms and 450 MiB more (DeepSeek-V3, 8192 tokens per rank, 4 x H200).
    totals = token_sums(first, gate_up).astype(inputs.x.dtype)
    totals = add_batches(totals, lambda batch: token_sums(batch, gate_up_of(batch)), rows, plan.batch_rows)
    return _combine(totals, group), rows, gate_up


def _named(gate_up: GateUp) -> GateUp:
    gate, up, _ = CHECKPOINT_NAMES
    return GateUp(checkpoint_name(gate_up.gate, gate), None if gate_up.up is None else checkpoint_name(gate_up.up, up))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(call: Call, inputs: Inputs) -> jax.Array:
    return _forward(call, inputs)[0]


def _layer_fwd(call: Call, inputs: Inputs) -> tuple[jax.Array, SavedRows]:
    check_differentiable(call.activation)
    y, rows, gate_up = _forward(call, inputs)
    # Of rounded tokens and experts they are not those that the backward pass differentiates.
    return y, SavedRows(inputs, rows, None if rounds_rows(call.precision) else gate_up)


def _layer_bwd(call: Call, saved: SavedRows, dy: jax.Array) -> tuple[Inputs]:
    dx, dweights, dexperts = backward(call, saved.inputs, not_mapped(dy), saved.rows, saved.gate_up)
    no_ids = np.zeros(saved.inputs.topk_ids.shape, jax.dtypes.float0)
    return (Inputs(dx, no_ids, dweights, dexperts),)  # pyright: ignore[reportArgumentType]


_layer.defvjp(_layer_fwd, _layer_bwd)


def backward(
    call: Call, inputs: Inputs, dy: jax.Array, rows: LocalRows | None = None, gate_up: GateUp | None = None
) -> tuple[jax.Array, jax.Array, AnyExperts]:
    """Returns the gradients of x, of `topk_weights` and of the experts, `None` for matrices that came quantised.

    Args:
      call: of the forward pass.
      inputs: of the forward pass.
      dy: the gradient of the output.
      rows: their sorted routing; `None` to sort again.
      gate_up: of the first batch; `None` to compute them again.
    """
    rows = _sorted_rows(call, inputs) if rows is None else rows
    group, plan, call = call.group, call.plan, call.wide
    frozen = isinstance(inputs.experts.matrix, QuantizedMatrix)
    experts = decode_8_bits(marked(inputs.experts, through_e4m3=False), inputs.x.dtype)
    tokens, douts, weights = (group.all_gather(array) for array in (inputs.x, dy, inputs.topk_weights))

    def cotangents(batch: Batch, gate_up: GateUp | None) -> tuple[jax.Array, jax.Array, AnyExperts]:
        token_rows = take_rows(tokens, batch)
        weight = jnp.where(batch.is_row, weights.reshape(-1, 1)[batch.slot_of_row], 0)
        gate_up = _gate_up(token_rows, experts, batch, plan.grouped_gemm) if gate_up is None else gate_up
        of_rows = _batch_vjp(token_rows, take_rows(douts, batch), weight, gate_up, experts, batch, call)
        dx = sum_slots(of_rows.dtokens, None, rows, batch).astype(inputs.x.dtype)
        dexperts = _biases_of(of_rows.dexperts) if frozen else of_rows.dexperts
        return dx, row_to_slot(of_rows.dweight, rows, batch), dexperts

    dx, dweights, dexperts = cotangents(nth_batch(rows, jnp.int32(0), plan.batch_rows), gate_up)
    if rows.has_further_batches(plan.batch_rows):
        # An expert's rows may lie in many batches: its gradient is rounded once, at the end.
        dexperts = jax.tree.map(lambda array: array.astype(at_least_float32(array.dtype)), dexperts)
    dx, dweights, dexperts = add_batches(
        (dx, dweights, dexperts), lambda batch: cotangents(batch, None), rows, plan.batch_rows
    )
    like = _biases_of(inputs.experts) if frozen else inputs.experts
    dexperts = jax.tree.map(lambda array, like: array.astype(like.dtype), dexperts, like)
    return _combine(dx, group), _combine(dweights, group).astype(inputs.topk_weights.dtype), dexperts


def _biases_of(experts: AnyExperts) -> AnyExperts:
    """Returns experts without matrices: what of them has gradients where those came quantised."""
    nothing: Any = None
    return dataclasses.replace(experts, w_gate=nothing, w_up=None, w_down=nothing)
