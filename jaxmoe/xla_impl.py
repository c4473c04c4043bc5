"""The portable implementation: collectives, a sort and grouped GEMMs, on any backend and any number of ranks.

`api.py` calls `xla` for `implementation="xla"`, with ids outside the experts already -1 and masked tokens already zero.

    dispatch   all-gather of the tokens; every rank sorts the slots that name its experts by expert
    expert FFN passes of `plan.chunk_rows` rows: gather, gate and up GEMM, activation, down GEMM
    combine    weighted sum over the slots of a token, all-to-all to the token's owner, sum over the ranks

Nothing is dropped and memory does not depend on the routing: a rank that gets more rows than one pass takes makes
further passes over the same buffers. `ragged_all_to_all` would move fewer bytes, but XLA has none on CPU and the one
on GPU reaches a few percent of NVLink.

Sums run in float32 in a fixed order (slots of a token, then ranks), gathers only, no scatter-add: the result has the
same bits in every run. The backward pass is written out below in the same terms: dispatch the output's cotangent as the
tokens were dispatched, combine the cotangent of the rows as the rows were combined.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.activation import Activation
from jaxmoe.experts import Experts
from jaxmoe.plan import GroupedGemm, Plan
from jaxmoe.sharding import ExpertGroup, vary_alike

# Names of the values that a jax.checkpoint policy may keep for the backward pass: the inputs of the activation, of the
# rows of the first pass. Without them the backward pass repeats the gate and up GEMMs; it never repeats the down GEMM.
CHECKPOINT_NAMES = ("jaxmoe_gate", "jaxmoe_up")


class Static(NamedTuple):
    """What is known when the layer is traced."""

    activation: Activation
    group: ExpertGroup
    plan: Plan


class Inputs(NamedTuple):
    """The differentiable arguments and the routing of this rank."""

    x: Float[Array, "tokens hidden"]
    topk_ids: Int[Array, "tokens top_k"]
    topk_weights: Float[Array, "tokens top_k"]
    experts: Experts


def xla(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    topk_weights: Float[Array, "tokens top_k"],
    experts: Experts,
    *,
    activation: Activation,
    group: ExpertGroup,
    plan: Plan,
) -> Float[Array, "tokens hidden"]:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)` for the tokens of this rank.

    Args:
      x: tokens of this rank.
      topk_ids: expert of each slot among all experts of the group, -1 for an unused slot.
      topk_weights: routing weight of each slot.
      experts: experts of this rank.
      activation: between the GEMMs.
      group: the ranks that hold the experts.
      plan: rows per pass and kind of grouped GEMM.
    """
    inputs = vary_alike(Inputs(x, topk_ids, topk_weights, experts))
    return _layer(Static(activation, group, plan), inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Routing of all ranks, as this rank's experts need it
# ---------------------------------------------------------------------------------------------------------------------


class LocalRows(NamedTuple):
    """The slots of all ranks that name this rank's experts, sorted by expert: row r is slot `slot_of_row[r]`."""

    slot_of_row: Int[Array, "padded_rows"]  # slots beyond `num_rows` belong to other ranks
    row_of_slot: Int[Array, "all_tokens top_k"]  # -1 where the slot is another rank's, or unused
    first_row: Int[Array, "local_experts"]
    end_row: Int[Array, "local_experts"]

    @property
    def num_rows(self) -> Int[Array, ""]:
        return self.end_row[-1]


class Pass(NamedTuple):
    """The rows [start, start + chunk_rows) of `LocalRows`."""

    start: Int[Array, ""]
    token_of_row: Int[Array, "rows"]
    slot_of_row: Int[Array, "rows"]
    is_row: Bool[Array, "rows 1"]  # False behind the last row
    rows_per_expert: Int[Array, "local_experts"]


def _sort_slots(all_ids: Int[Array, "all_tokens top_k"], first_expert: Any, num_experts: int, plan: Plan) -> LocalRows:
    num_slots = all_ids.size
    local = all_ids.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < num_experts), local, num_experts)
    order = _stable_argsort(local, num_experts + 1)
    # Rows of an expert lie between two counts of smaller ids: compares and sums, where a histogram would be atomics.
    borders = (local < jnp.arange(num_experts + 1)[:, None]).sum(-1, dtype=jnp.int32)
    row_of_slot = (
        jnp.zeros_like(local)
        .at[order]
        .set(jnp.arange(num_slots, dtype=jnp.int32), unique_indices=True, mode="promise_in_bounds")
    )
    row_of_slot = jnp.where(local < num_experts, row_of_slot, -1)
    padding = -num_slots % plan.chunk_rows
    return LocalRows(jnp.pad(order, (0, padding)), row_of_slot.reshape(all_ids.shape), borders[:-1], borders[1:])


def _stable_argsort(keys: Int[Array, "slots"], num_keys: int) -> Int[Array, "slots"]:
    """Sorts small non-negative keys; equal keys keep their order.

    Key and position share one word where they fit, which is always but for huge batches: half the bytes of a sort of
    pairs.
    """
    position_bits = max(1, (keys.size - 1).bit_length())
    if position_bits + (num_keys - 1).bit_length() > 32:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    position = jnp.arange(keys.size, dtype=jnp.uint32)
    words = lax.sort((keys.astype(jnp.uint32) << position_bits) | position)
    return (words & np.uint32((1 << position_bits) - 1)).astype(jnp.int32)


def _pass(rows: LocalRows, index: Int[Array, ""], chunk_rows: int, top_k: int) -> Pass:
    start = index * chunk_rows
    slot = lax.dynamic_slice(rows.slot_of_row, (start,), (chunk_rows,))
    is_row = jnp.arange(chunk_rows, dtype=jnp.int32) + start < rows.num_rows
    inside = jnp.clip(jnp.stack([rows.first_row, rows.end_row]) - start, 0, chunk_rows)
    return Pass(start, slot // top_k, slot, is_row[:, None], inside[1] - inside[0])


def _take_rows(array: Float[Array, "all_tokens hidden"], p: Pass) -> Float[Array, "rows hidden"]:
    # Zero the rows behind the last one: they are other ranks' tokens, and a NaN there must not meet a masked product.
    return jnp.where(p.is_row, array.at[p.token_of_row].get(mode="promise_in_bounds"), 0)


def _sum_slots(
    values: Float[Array, "rows width"], weights: Float[Array, "all_tokens top_k"] | None, rows: LocalRows, p: Pass
) -> Float[Array, "all_tokens width"]:
    """Returns for every token the (weighted) sum of its rows in this pass, in the order of its slots.

    One gather per slot, all of which XLA fuses with the sum: nothing of size [all_tokens, top_k, width] exists.
    """
    total = 0
    for k in range(rows.row_of_slot.shape[1]):
        row = rows.row_of_slot[:, k] - p.start
        inside = (row >= 0) & (row < values.shape[0])
        value = values.at[jnp.clip(row, 0, values.shape[0] - 1)].get(mode="promise_in_bounds")
        value = value.astype(jnp.promote_types(values.dtype, jnp.float32))
        value = value if weights is None else value * weights[:, k, None]
        total = total + jnp.where(inside[:, None], value, 0)
    return jnp.asarray(total)


# ---------------------------------------------------------------------------------------------------------------------
# Grouped GEMMs: row r with the matrix of the expert that owns row r
# ---------------------------------------------------------------------------------------------------------------------

# [rows, inner] x [experts, inner, outer] -> [rows, outer]
_ROWS_TIMES_MATRIX = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
# [rows, outer] x [experts, inner, outer] -> [rows, inner]
_ROWS_TIMES_TRANSPOSE = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
# [rows, inner] x [rows, outer] -> [experts, inner, outer]
_SUM_OF_OUTER_PRODUCTS = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


def _grouped_gemm(
    lhs: jax.Array, rhs: jax.Array, p: Pass, kind: GroupedGemm, dimensions: lax.RaggedDotDimensionNumbers
) -> jax.Array:
    """Returns one of the three products above in the dtype of `lhs`; what is behind the last row is undefined."""
    if kind == "ragged_dot":
        return lax.ragged_dot_general(lhs, rhs, p.rows_per_expert, dimensions, preferred_element_type=lhs.dtype)
    import tokamax

    out = tokamax.ragged_dot_general(
        lhs, rhs, p.rows_per_expert, dimensions, preferred_element_type=lhs.dtype, implementation="mosaic"
    )
    # Its type says that the result is the same on all ranks (tokamax 0.0.17). The cast would be wrong to differentiate
    # through, since its transpose is a sum over the ranks, but no JAX transformation sees these products: see _layer.
    return vary_alike((out, lhs, rhs))[0]


def _times(rows: jax.Array, weights: jax.Array, p: Pass, kind: GroupedGemm) -> jax.Array:
    return _grouped_gemm(rows, weights, p, kind, _ROWS_TIMES_MATRIX)


def _times_vjp(
    rows: jax.Array, weights: jax.Array, p: Pass, kind: GroupedGemm, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of the rows and of the weights; those of an expert without rows are exactly zero."""
    drows = _grouped_gemm(dout, weights, p, kind, _ROWS_TIMES_TRANSPOSE)
    dweights = _grouped_gemm(rows, dout, p, kind, _SUM_OF_OUTER_PRODUCTS)
    # Kernels that skip empty experts leave their memory as it was.
    return drows, jnp.where((p.rows_per_expert > 0)[:, None, None], dweights, 0)


def _expert_of_row(p: Pass, dtype: Any) -> Float[Array, "rows local_experts"]:
    """One-hot matrix of the expert that owns each row, zero behind the last row."""
    ends = jnp.cumsum(p.rows_per_expert)
    row = jnp.arange(p.slot_of_row.shape[0])[:, None]
    return ((row < ends) & (row >= ends - p.rows_per_expert)).astype(dtype)


def _bias_of_row(bias: jax.Array | None, p: Pass) -> jax.Array | float:
    if bias is None:
        return 0.0
    # A product with a one-hot matrix is exact, and its transpose sums rows per expert in a fixed order, without
    # atomics.
    return _expert_of_row(p, bias.dtype) @ bias


def _dbias(drows: jax.Array, p: Pass, bias: jax.Array | None) -> jax.Array | None:
    if bias is None:
        return None
    one_hot = _expert_of_row(p, drows.dtype)
    wide = jnp.promote_types(bias.dtype, jnp.float32)
    return jnp.einsum("re,rw->ew", one_hot, drows, preferred_element_type=wide).astype(bias.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# One pass of the experts, forward and backward
# ---------------------------------------------------------------------------------------------------------------------


class Hidden(NamedTuple):
    """The two inputs of the activation, as the GEMMs wrote them (without biases)."""

    gate: Float[Array, "rows intermediate"]
    up: Float[Array, "rows intermediate"] | None


def _gate_up(tokens: jax.Array, experts: Experts, p: Pass, kind: GroupedGemm) -> Hidden:
    gate = _times(tokens, experts.w_gate, p, kind)
    up = None if experts.w_up is None else _times(tokens, experts.w_up, p, kind)
    return Hidden(gate, up)


def _with_biases(hidden: Hidden, experts: Experts, p: Pass) -> Hidden:
    """Returns the inputs of the activation in float32, zero behind the last row."""

    def wide(projection: jax.Array, bias: jax.Array | None) -> jax.Array:
        dtype = jnp.promote_types(projection.dtype, jnp.float32)
        return jnp.where(p.is_row, projection.astype(dtype) + _bias_of_row(bias, p), 0)

    return Hidden(wide(hidden.gate, experts.b_gate), None if hidden.up is None else wide(hidden.up, experts.b_up))


def _down(hidden: Hidden, experts: Experts, p: Pass, static: Static) -> Float[Array, "rows hidden"]:
    gate, up = _with_biases(hidden, experts, p)
    h = static.activation.value(gate, up).astype(hidden.gate.dtype)
    out = _times(h, experts.w_down, p, static.plan.grouped_gemm)
    return out if experts.b_down is None else (out + _bias_of_row(experts.b_down, p)).astype(out.dtype)


class RowCotangents(NamedTuple):
    """Cotangents of one pass: of the rows' tokens, of the rows' routing weights, of the experts."""

    dtokens: Float[Array, "rows hidden"]
    dweight: Float[Array, "rows 1"]
    dexperts: Experts


def _pass_vjp(
    tokens: jax.Array, dout: jax.Array, weight: jax.Array, hidden: Hidden, experts: Experts, p: Pass, static: Static
) -> RowCotangents:
    """Differentiates `weight * (h(tokens) @ w_down + b_down)` for the cotangent `dout` of the output's tokens.

    The weight's cotangent <dout, h @ w_down> is taken as <dout @ w_down^T, h>, so that the down GEMM is not repeated.
    """
    kind = static.plan.grouped_gemm
    gate, up = _with_biases(hidden, experts, p)
    h = static.activation.value(gate, up)
    dtype = tokens.dtype

    weighted_h = (weight * h).astype(dtype)
    dh, dw_down = _times_vjp(weighted_h, experts.w_down, p, kind, dout)
    dh = jnp.where(p.is_row, dh.astype(h.dtype), 0)
    dweight = jnp.sum(dh * h, -1, keepdims=True)
    if experts.b_down is not None:
        dweight += jnp.sum(dout * _bias_of_row(experts.b_down, p).astype(h.dtype), -1, keepdims=True)  # pyright: ignore

    dgate, dup = static.activation.vjp(gate, up, weight * dh)
    dgate = dgate.astype(dtype)
    dtokens, dw_gate = _times_vjp(tokens, experts.w_gate, p, kind, dgate)
    dw_up = None
    if experts.w_up is not None and dup is not None:
        dup = dup.astype(dtype)
        dtokens_up, dw_up = _times_vjp(tokens, experts.w_up, p, kind, dup)
        dtokens = dtokens.astype(jnp.promote_types(dtype, jnp.float32)) + dtokens_up
    dexperts = Experts(
        w_gate=dw_gate,
        w_up=dw_up,
        w_down=dw_down,
        b_gate=_dbias(dgate, p, experts.b_gate),
        b_up=None if dup is None else _dbias(dup, p, experts.b_up),
        b_down=_dbias((weight * dout).astype(dtype), p, experts.b_down),
    )
    return RowCotangents(dtokens.astype(dtype), dweight, dexperts)


# ---------------------------------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------------------------------


class Residuals(NamedTuple):
    """What the backward pass keeps: the inputs, their sorted routing, and the hidden rows of the first pass."""

    inputs: Inputs
    rows: LocalRows
    hidden: Hidden


def _combine(totals: jax.Array, group: ExpertGroup) -> jax.Array:
    """Sends each owner the sums over its tokens' slots and adds those of all ranks, in the order of the ranks."""
    parts = group.exchange(totals)
    return parts.astype(jnp.promote_types(parts.dtype, jnp.float32)).sum(0).astype(totals.dtype)


def _add_passes(first: Any, other: Callable[[Pass], Any], rows: LocalRows, static: Static, top_k: int) -> Any:
    """Adds `other(pass)` to `first` for every pass after the first that has rows; most often there is none.

    The number of passes differs from rank to rank, so nothing in `other` may communicate.
    """
    chunk_rows = static.plan.chunk_rows
    if rows.slot_of_row.shape[0] <= chunk_rows:
        return first
    passes = (rows.num_rows + chunk_rows - 1) // chunk_rows

    def add(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        index, total = carry
        values = other(_pass(rows, index, chunk_rows, top_k))
        return index + 1, jax.tree.map(lambda a, b: (a + b).astype(a.dtype), total, values)

    return lax.while_loop(lambda carry: carry[0] < passes, add, (jnp.ones_like(passes), first))[1]


def _forward(static: Static, inputs: Inputs) -> tuple[jax.Array, LocalRows, Hidden]:
    group, plan, experts, top_k = static.group, static.plan, inputs.experts, inputs.topk_ids.shape[1]
    tokens, weights = group.all_gather(inputs.x), group.all_gather(inputs.topk_weights)
    all_ids = group.all_gather(inputs.topk_ids)
    rows = _sort_slots(all_ids, group.index() * experts.num_experts, experts.num_experts, plan)

    def hidden_rows(p: Pass) -> Hidden:
        return _gate_up(_take_rows(tokens, p), experts, p, plan.grouped_gemm)

    def token_sums(p: Pass, hidden: Hidden) -> jax.Array:
        return _sum_slots(_down(hidden, experts, p, static), weights, rows, p)

    first = _pass(rows, jnp.int32(0), plan.chunk_rows, top_k)
    hidden = _named(hidden_rows(first))
    # Kept in the dtype that goes over the wire. Float32 would spare tokens with rows in several passes one rounding and
    # took 0.46 ms of 24.2 ms and 450 MiB more (DeepSeek-V3, 8192 tokens per rank, 4 x H200).
    totals = token_sums(first, hidden).astype(inputs.x.dtype)
    totals = _add_passes(totals, lambda p: token_sums(p, hidden_rows(p)), rows, static, top_k)
    return _combine(totals, group), rows, hidden


def _named(hidden: Hidden) -> Hidden:
    gate, up = CHECKPOINT_NAMES
    return Hidden(checkpoint_name(hidden.gate, gate), None if hidden.up is None else checkpoint_name(hidden.up, up))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(static: Static, inputs: Inputs) -> jax.Array:
    return _forward(static, inputs)[0]


def _layer_fwd(static: Static, inputs: Inputs) -> tuple[jax.Array, Residuals]:
    y, rows, hidden = _forward(static, inputs)
    return y, Residuals(inputs, rows, hidden)


def _layer_bwd(static: Static, residuals: Residuals, dy: jax.Array) -> tuple[Inputs]:
    inputs, rows, hidden = residuals
    group, plan, experts, top_k = static.group, static.plan, inputs.experts, inputs.topk_ids.shape[1]
    tokens, douts, weights = (group.all_gather(array) for array in (inputs.x, dy, inputs.topk_weights))

    def cotangents(p: Pass, hidden: Hidden | None) -> tuple[jax.Array, jax.Array, Experts]:
        token_rows = _take_rows(tokens, p)
        weight = jnp.where(p.is_row, weights.reshape(-1, 1)[p.slot_of_row], 0)
        hidden = _gate_up(token_rows, experts, p, plan.grouped_gemm) if hidden is None else hidden
        of_rows = _pass_vjp(token_rows, _take_rows(douts, p), weight, hidden, experts, p, static)
        dx = _sum_slots(of_rows.dtokens, None, rows, p).astype(inputs.x.dtype)
        return dx, _row_to_slot(of_rows.dweight, rows, p), of_rows.dexperts

    first = _pass(rows, jnp.int32(0), plan.chunk_rows, top_k)
    dx, dweights, dexperts = _add_passes(cotangents(first, hidden), lambda p: cotangents(p, None), rows, static, top_k)
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    dweights = _combine(dweights, group).astype(inputs.topk_weights.dtype)
    return (Inputs(_combine(dx, group), no_ids, dweights, dexperts),)  # pyright: ignore[reportArgumentType]


def _row_to_slot(values: Float[Array, "rows 1"], rows: LocalRows, p: Pass) -> Float[Array, "all_tokens top_k"]:
    row = rows.row_of_slot - p.start
    inside = (row >= 0) & (row < values.shape[0])
    return jnp.where(inside, values[jnp.clip(row, 0, values.shape[0] - 1), 0], 0)


_layer.defvjp(_layer_fwd, _layer_bwd)
