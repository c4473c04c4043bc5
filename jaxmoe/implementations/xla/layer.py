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
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxmoe.experts import Experts
from jaxmoe.guard import not_mapped
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
from jaxmoe.sharding import ExpertGroup, vary_alike


def run(call: Call, inputs: Inputs) -> jax.Array:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)` for the tokens of this rank."""
    # JAX casts the gradients back where the user's experts are wider.
    inputs = inputs._replace(experts=inputs.experts.astype(inputs.x.dtype))

    def layer(inputs: Inputs) -> jax.Array:
        return _layer(call, vary_alike(inputs))

    if call.residuals == "recompute":
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    return layer(inputs)


class GateUp(NamedTuple):
    """The two inputs of the activation, as the GEMMs wrote them (without biases)."""

    gate: Float[Array, "rows intermediate"]
    up: Float[Array, "rows intermediate"] | None


def _gate_up(tokens: jax.Array, experts: Experts, batch: Batch, kind: GroupedGemm) -> GateUp:
    gate = times(tokens, experts.w_gate, batch, kind)
    up = None if experts.w_up is None else times(tokens, experts.w_up, batch, kind)
    return GateUp(gate, up)


def _with_biases(gate_up: GateUp, experts: Experts, batch: Batch) -> GateUp:
    """Returns the inputs of the activation in float32, zero behind the last row."""

    def wide(projection: jax.Array, bias: jax.Array | None) -> jax.Array:
        dtype = jnp.promote_types(projection.dtype, jnp.float32)
        return jnp.where(batch.is_row, projection.astype(dtype) + bias_of_row(bias, batch), 0)

    return GateUp(wide(gate_up.gate, experts.b_gate), None if gate_up.up is None else wide(gate_up.up, experts.b_up))


def _down(gate_up: GateUp, experts: Experts, batch: Batch, call: Call) -> Float[Array, "rows hidden"]:
    gate, up = _with_biases(gate_up, experts, batch)
    h = call.activation.value(gate, up).astype(gate_up.gate.dtype)
    out = times(h, experts.w_down, batch, call.plan.grouped_gemm)
    return out if experts.b_down is None else (out + bias_of_row(experts.b_down, batch)).astype(out.dtype)


class RowCotangents(NamedTuple):
    """Cotangents of one batch: of the rows' tokens, of the rows' routing weights, of the experts."""

    dtokens: Float[Array, "rows hidden"]
    dweight: Float[Array, "rows 1"]
    dexperts: Experts


def _batch_vjp(
    tokens: jax.Array, dout: jax.Array, weight: jax.Array, gate_up: GateUp, experts: Experts, batch: Batch, call: Call
) -> RowCotangents:
    """Differentiates `weight * (h(tokens) @ w_down + b_down)` for the cotangent `dout` of the output's tokens.

    The weight's cotangent <dout, h @ w_down> is taken as <dout @ w_down^T, h>, so that the down GEMM is not repeated.
    """
    kind = call.plan.grouped_gemm
    gate, up = _with_biases(gate_up, experts, batch)
    h = call.activation.value(gate, up)
    dtype = tokens.dtype

    weighted_h = (weight * h).astype(dtype)
    dh = jnp.where(batch.is_row, times_transposed(dout, experts.w_down, batch, kind).astype(h.dtype), 0)
    dweight = jnp.sum(dh * h, -1, keepdims=True)
    if experts.b_down is not None:
        dweight += jnp.sum(dout * bias_of_row(experts.b_down, batch).astype(h.dtype), -1, keepdims=True)  # pyright: ignore

    dgate, dup = call.activation.vjp(gate, up, weight * dh)
    dgate = dgate.astype(dtype)
    dtokens = times_transposed(dgate, experts.w_gate, batch, kind)
    dw_up = None
    if experts.w_up is not None and dup is not None:
        dup = dup.astype(dtype)
        dw_up = sum_of_outer_products(tokens, dup, batch.rows_per_expert)
        dtokens = dtokens.astype(jnp.promote_types(dtype, jnp.float32))
        dtokens += times_transposed(dup, experts.w_up, batch, kind)
    dexperts = Experts(
        w_gate=sum_of_outer_products(tokens, dgate, batch.rows_per_expert),
        w_up=dw_up,
        w_down=sum_of_outer_products(weighted_h, dout, batch.rows_per_expert),
        b_gate=bias_vjp(dgate, batch, experts.b_gate),
        b_up=None if dup is None else bias_vjp(dup, batch, experts.b_up),
        b_down=bias_vjp((weight * dout).astype(dtype), batch, experts.b_down),
    )
    return RowCotangents(dtokens.astype(dtype), dweight, dexperts)


class SavedRows(NamedTuple):
    """What the backward pass gets: the inputs, their sorted routing, gate and up of the first batch."""

    inputs: Inputs
    rows: LocalRows
    gate_up: GateUp


def _combine(totals: jax.Array, group: ExpertGroup) -> jax.Array:
    """Sends each owner the sums over its tokens' slots and adds those of all ranks, in the order of the ranks."""
    parts = group.exchange(totals)
    return parts.astype(jnp.promote_types(parts.dtype, jnp.float32)).sum(0).astype(totals.dtype)


def _forward(call: Call, inputs: Inputs) -> tuple[jax.Array, LocalRows, GateUp]:
    group, plan, experts = call.group, call.plan, inputs.experts
    tokens, weights = group.all_gather(inputs.x), group.all_gather(inputs.topk_weights)
    all_ids = group.all_gather(inputs.topk_ids)
    rows = sort_slots(all_ids, group.index() * experts.num_experts, experts.num_experts, plan.batch_rows)

    def gate_up_of(batch: Batch) -> GateUp:
        return _gate_up(take_rows(tokens, batch), experts, batch, plan.grouped_gemm)

    def token_sums(batch: Batch, gate_up: GateUp) -> jax.Array:
        return sum_slots(_down(gate_up, experts, batch, call), weights, rows, batch)

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
    y, rows, gate_up = _forward(call, inputs)
    return y, SavedRows(inputs, rows, gate_up)


def _layer_bwd(call: Call, saved: SavedRows, dy: jax.Array) -> tuple[Inputs]:
    inputs, rows, gate_up = saved
    dy = not_mapped(dy)  # jax.jacrev maps the backward pass alone
    group, plan, experts = call.group, call.plan, inputs.experts
    tokens, douts, weights = (group.all_gather(array) for array in (inputs.x, dy, inputs.topk_weights))

    def cotangents(batch: Batch, gate_up: GateUp | None) -> tuple[jax.Array, jax.Array, Experts]:
        token_rows = take_rows(tokens, batch)
        weight = jnp.where(batch.is_row, weights.reshape(-1, 1)[batch.slot_of_row], 0)
        gate_up = _gate_up(token_rows, experts, batch, plan.grouped_gemm) if gate_up is None else gate_up
        of_rows = _batch_vjp(token_rows, take_rows(douts, batch), weight, gate_up, experts, batch, call)
        dx = sum_slots(of_rows.dtokens, None, rows, batch).astype(inputs.x.dtype)
        return dx, row_to_slot(of_rows.dweight, rows, batch), of_rows.dexperts

    dx, dweights, dexperts = cotangents(nth_batch(rows, jnp.int32(0), plan.batch_rows), gate_up)
    if rows.has_further_batches(plan.batch_rows):
        # An expert's rows may lie in many batches: its gradient is rounded once, at the end.
        dexperts = jax.tree.map(lambda array: array.astype(jnp.promote_types(array.dtype, jnp.float32)), dexperts)
    dx, dweights, dexperts = add_batches(
        (dx, dweights, dexperts), lambda batch: cotangents(batch, None), rows, plan.batch_rows
    )
    dexperts = jax.tree.map(lambda array, like: array.astype(like.dtype), dexperts, experts)
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    dweights = _combine(dweights, group).astype(inputs.topk_weights.dtype)
    return (Inputs(_combine(dx, group), no_ids, dweights, dexperts),)  # pyright: ignore[reportArgumentType]


_layer.defvjp(_layer_fwd, _layer_bwd)
