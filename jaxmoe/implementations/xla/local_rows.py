"""The rows that a rank's experts have to process, in the order in which they do.

`layer.py` gathers the routing of all ranks, sorts here the slots that name its experts, and moves values between
tokens and rows with the gathers below, one batch of `plan.batch_rows` rows at a time. There is no scatter-add: every
sum has a fixed order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.formats import at_least_float32, bits


class LocalRows(NamedTuple):
    """The slots of all ranks that name this rank's experts, sorted by expert: row r is slot `slot_of_row[r]`."""

    slot_of_row: Int[Array, "padded_rows"]  # slots beyond `num_rows` belong to other ranks
    row_of_slot: Int[Array, "all_tokens top_k"]  # -1 where the slot is another rank's, or unused
    first_row: Int[Array, "local_experts"]
    end_row: Int[Array, "local_experts"]

    @property
    def num_rows(self) -> Int[Array, ""]:
        return self.end_row[-1]

    def has_further_batches(self, batch_rows: int) -> bool:
        """Whether any routing needs more than one batch."""
        return self.slot_of_row.shape[0] > batch_rows


class Batch(NamedTuple):
    """The rows [start, start + batch_rows) of `LocalRows`."""

    start: Int[Array, ""]
    token_of_row: Int[Array, "rows"]
    slot_of_row: Int[Array, "rows"]
    is_row: Bool[Array, "rows 1"]  # False behind the last row
    rows_per_expert: Int[Array, "local_experts"]


def sort_slots(
    all_ids: Int[Array, "all_tokens top_k"], first_expert: Any, num_experts: int, batch_rows: int
) -> LocalRows:
    """Returns the rows of the experts [first_expert, first_expert + num_experts), padded to whole batches."""
    num_slots = all_ids.size
    local = all_ids.reshape(-1) - first_expert
    local = jnp.where((local >= 0) & (local < num_experts), local, num_experts)
    order = stable_argsort(local, num_experts + 1)
    borders = count_below(local[order], jnp.arange(num_experts + 1, dtype=jnp.int32))
    row_of_slot = (
        jnp.zeros_like(local)
        .at[order]
        .set(jnp.arange(num_slots, dtype=jnp.int32), unique_indices=True, mode="promise_in_bounds")
    )
    row_of_slot = jnp.where(local < num_experts, row_of_slot, -1)
    padding = -num_slots % batch_rows
    return LocalRows(jnp.pad(order, (0, padding)), row_of_slot.reshape(all_ids.shape), borders[:-1], borders[1:])


def stable_argsort(keys: Int[Array, "slots"], num_keys: int) -> Int[Array, "slots"]:
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


def count_below(sorted_ids: Int[Array, "slots"], values: Int[Array, "experts"]) -> Int[Array, "experts"]:
    """Returns how many ids are below each value: the border between the rows of two experts.

    A binary search, where a histogram would be atomics and a comparison with every value 1 GB of memory on a CPU.
    Unrolled, since each step of a loop is a kernel on a GPU. `jnp.searchsorted` fails in a partly manual `shard_map`
    (jax 0.12).
    """
    num_ids, count = sorted_ids.size, jnp.zeros_like(values)
    for bit in reversed(range(num_ids.bit_length())):
        ahead = count + (1 << bit)
        last = sorted_ids.at[jnp.minimum(ahead, num_ids) - 1].get(mode="promise_in_bounds")
        count = jnp.where((ahead <= num_ids) & (last < values), ahead, count)
    return count


def nth_batch(rows: LocalRows, index: Int[Array, ""], batch_rows: int) -> Batch:
    """Returns the batch with the rows from `index * batch_rows` on."""
    start = index * batch_rows
    slot = lax.dynamic_slice(rows.slot_of_row, (start,), (batch_rows,))
    is_row = jnp.arange(batch_rows, dtype=jnp.int32) + start < rows.num_rows
    inside = jnp.clip(jnp.stack([rows.first_row, rows.end_row]) - start, 0, batch_rows)
    return Batch(start, slot // rows.row_of_slot.shape[1], slot, is_row[:, None], inside[1] - inside[0])


def take_rows(array: Float[Array, "all_tokens hidden"], batch: Batch) -> Float[Array, "rows hidden"]:
    """Returns the tokens of the rows of a batch."""
    # Zero the rows behind the last one: they are other ranks' tokens, and a NaN there must not meet a masked product.
    return jnp.where(batch.is_row, array.at[batch.token_of_row].get(mode="promise_in_bounds"), 0)


def sum_slots(
    values: Float[Array, "rows width"], weights: Float[Array, "all_tokens top_k"] | None, rows: LocalRows, batch: Batch
) -> Float[Array, "all_tokens width"]:
    """Returns for every token the (weighted) sum of its rows in this batch, in the order of its slots."""
    return sum_by_slot(values, weights, rows.row_of_slot - batch.start)


def sum_by_slot(
    values: Float[Array, "rows width"],
    weights: Float[Array, "all_tokens top_k"] | None,
    row_of_slot: Int[Array, "all_tokens top_k"],
) -> Float[Array, "all_tokens width"]:
    """Returns for every token the (weighted) sum of the rows of its slots, those that are no rows of `values` left out.

    One gather per slot, all of which XLA fuses with the sum: nothing of size [all_tokens, top_k, width] exists.
    """
    total = 0
    for k in range(row_of_slot.shape[1]):
        row = row_of_slot[:, k]
        inside = (row >= 0) & (row < values.shape[0])
        value = values.at[jnp.clip(row, 0, values.shape[0] - 1)].get(mode="promise_in_bounds")
        value = value.astype(at_least_float32(values.dtype))
        value = value if weights is None else value * weights[:, k, None].astype(value.dtype)
        total = total + jnp.where(inside[:, None], value, 0)
    return jnp.asarray(total)


def row_to_slot(values: Float[Array, "rows 1"], rows: LocalRows, batch: Batch) -> Float[Array, "all_tokens top_k"]:
    """Returns the values at the slots of their rows, zero at the slots that have no row in this batch."""
    row = rows.row_of_slot - batch.start
    inside = (row >= 0) & (row < values.shape[0])
    return jnp.where(inside, values[jnp.clip(row, 0, values.shape[0] - 1), 0], 0)


def add_batches(first: Any, other: Callable[[Batch], Any], rows: LocalRows, batch_rows: int) -> Any:
    """Adds `other(batch)` to `first` for every batch after the first that has rows; most often there is none.

    The number of batches differs from rank to rank, so nothing in `other` may communicate.
    """
    if not rows.has_further_batches(batch_rows):
        return first
    batches = (rows.num_rows + batch_rows - 1) // batch_rows

    def plus(total: jax.Array, values: jax.Array) -> jax.Array:
        wide = max(total.dtype, values.dtype, key=bits)
        return (total.astype(wide) + values.astype(wide)).astype(total.dtype)

    def add(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        index, total = carry
        values = other(nth_batch(rows, index, batch_rows))
        return index + 1, jax.tree.map(plus, total, values)

    return lax.while_loop(lambda carry: carry[0] < batches, add, (jnp.ones_like(batches), first))[1]
