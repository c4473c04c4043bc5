"""The portable dispatch and combine: collectives, a sort and gathers.

    send      all-gather of the ids and the tokens; every rank sorts all slots, and takes the rows of its experts
    add_up    sums over the slots of every token of what is here, all-to-all to the token's owner, sum over the ranks

Every rank sorts the same ids, so it knows where at other ranks its own tokens lie, and nobody has to say so. Sums run
in float32 in a fixed order (slots of a token that are on one rank, then ranks) and are rounded once. No scatter-add:
the result has the same bits in every run. Memory is that of the tokens of all ranks, and of float32 sums for them,
beside the rows themselves.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.exchange.base import (
    SLOT_BITS,
    Arrived,
    ExchangeCall,
    Routes,
    block_starts,
    is_row,
    rows_with_room,
    source_rank,
    source_slot,
)
from jaxmoe.formats import at_least_float32
from jaxmoe.implementations.xla.local_rows import LocalRows, count_below, sort_slots, sum_by_slot
from jaxmoe.precision import powers_of_two
from jaxmoe.quantization import quantize_rows
from jaxmoe.sharding import vary_alike


def send(call: ExchangeCall, x: Float[Array, "tokens hidden"], topk_ids: Int[Array, "tokens top_k"]) -> Arrived:
    """Returns the rows of this rank's experts, and where they and this rank's tokens are."""
    shape, room, group = call.shape, call.room, call.group
    sorted_slots = sort_slots(group.all_gather(topk_ids), 0, shape.num_experts, batch_rows=1)
    counts = sorted_slots.end_row - sorted_slots.first_row
    of_ranks = counts.reshape(shape.ranks, shape.local_experts)
    starts = block_starts(room, of_ranks)
    here = rows_with_room(room, starts, of_ranks)
    blocks = _Blocks(sorted_slots.first_row, starts.reshape(-1), here.reshape(-1))
    routes = Routes(_row_sources(call, sorted_slots, blocks), _slot_rows(call, topk_ids, sorted_slots, blocks))
    mine = group.index()
    found = lax.dynamic_index_in_dim(here, mine, keepdims=False)
    dropped = lax.dynamic_index_in_dim(of_ranks, mine, keepdims=False) - found
    if call.precision is None:
        return Arrived(pull(call, x, routes), None, found, dropped, routes)
    values, scales = quantize_rows(x, powers_of_two(call.precision))
    return Arrived(pull(call, values, routes), pull(call, scales, routes), found, dropped, routes)


class _Blocks(NamedTuple):
    """Of every expert of the group: its first slot in sorted order, its first row at its rank, its rows with room."""

    first_sorted: Int[Array, "num_experts"]
    start: Int[Array, "num_experts"]
    rows: Int[Array, "num_experts"]

    def of_rank(self, call: ExchangeCall) -> "_Blocks":
        """Returns the blocks of this rank's experts."""
        experts = call.shape.local_experts
        first = call.group.index() * experts
        return _Blocks(*(lax.dynamic_slice_in_dim(array, first, experts) for array in self))


def _row_sources(call: ExchangeCall, sorted_slots: LocalRows, blocks: _Blocks) -> Int[Array, "rows"]:
    mine, room = blocks.of_rank(call), call.room
    row = jnp.arange(room.rows, dtype=jnp.int32)
    # The last expert that starts at the row or before it. Of experts that start together all but the last are empty.
    expert = row // room.capacity_per_expert if room.capacity_per_expert else count_below(mine.start, row + 1) - 1
    first_sorted, start, rows = (array.at[expert].get(mode="promise_in_bounds") for array in mine)
    number = row - start
    last = max(call.shape.all_slots - 1, 0)
    slot = sorted_slots.slot_of_row.at[jnp.clip(first_sorted + number, 0, last)].get(mode="promise_in_bounds")
    source = ((slot // call.shape.slots) << SLOT_BITS) + slot % call.shape.slots
    return jnp.where(number < rows, source, -1)


def _slot_rows(
    call: ExchangeCall, topk_ids: Int[Array, "tokens top_k"], sorted_slots: LocalRows, blocks: _Blocks
) -> Int[Array, "tokens top_k"]:
    tokens = call.shape.tokens
    place = lax.dynamic_slice_in_dim(sorted_slots.row_of_slot, call.group.index() * tokens, tokens)
    expert = jnp.maximum(topk_ids, 0)
    first_sorted, start, rows = (array.at[expert].get(mode="promise_in_bounds") for array in blocks)
    number = place - first_sorted
    return jnp.where((topk_ids >= 0) & (number < rows), start + number, -1)


def pull(call: ExchangeCall, x: Float[Array, "tokens width"], routes: Routes) -> Float[Array, "rows width"]:
    """Returns the tokens of the rows that this rank has, zero where a row is nobody's."""
    return _at_rows(call.group.all_gather(x), _all_slot(call, routes) // call.shape.top_k, routes)


def pull_weighted(
    call: ExchangeCall,
    dy: Float[Array, "tokens width"],
    weights: Float[Array, "tokens top_k"],
    outputs: Float[Array, "rows width"],
    routes: Routes,
) -> tuple[Float[Array, "rows width"], Float[Array, "tokens top_k"]]:
    """Returns the gradients of `outputs` and of `weights`, given that of the sums."""
    wide = at_least_float32(outputs.dtype)
    dy_of_row = pull(call, dy, routes).astype(wide)
    dweights = sums_of_slots(call, (dy_of_row * outputs.astype(wide)).sum(-1), routes)
    weighted = dy_of_row * weights_of_rows(call, weights, routes).astype(wide)
    return weighted.astype(outputs.dtype), dweights.astype(weights.dtype)


def weights_of_rows(
    call: ExchangeCall, weights: Float[Array, "tokens top_k"], routes: Routes
) -> Float[Array, "rows 1"]:
    """Returns the weight of the slot of each row, zero where it is nobody's."""
    return _at_rows(call.group.all_gather(weights).reshape(-1, 1), _all_slot(call, routes), routes)


def sums_of_slots(call: ExchangeCall, of_row: Float[Array, "rows"], routes: Routes) -> Float[Array, "tokens top_k"]:
    """Returns at the owner of each slot the number that its row has, zero where it has none."""
    row_of_slot = _row_of_slot(call, routes)
    of_slot = of_row.at[jnp.maximum(row_of_slot, 0)].get(mode="promise_in_bounds")
    return call.group.exchange(jnp.where(row_of_slot >= 0, of_slot, 0)).sum(0)


def add_up(
    call: ExchangeCall,
    outputs: Float[Array, "rows width"],
    weights: Float[Array, "tokens top_k"] | None,
    routes: Routes,
) -> Float[Array, "tokens width"]:
    """Returns the (weighted) sum of the rows of each of this rank's tokens."""
    weights = None if weights is None else call.group.all_gather(weights)
    here = sum_by_slot(outputs, weights, _row_of_slot(call, routes))
    return call.group.exchange(here).sum(0).astype(outputs.dtype)


def _at_rows(
    array: Float[Array, "entries width"], entry: Int[Array, "rows"], routes: Routes
) -> Float[Array, "rows width"]:
    # A select, so that a NaN of a token that was not sent meets nothing.
    here: Bool[Array, "rows 1"] = is_row(routes.row_sources)[:, None]
    return jnp.where(here, array.at[entry].get(mode="promise_in_bounds"), 0)


def _all_slot(call: ExchangeCall, routes: Routes) -> Int[Array, "rows"]:
    """The slot of each row among those of all ranks, 0 for what is nobody's row."""
    sources = routes.row_sources
    return jnp.where(is_row(sources), source_rank(sources) * call.shape.slots + source_slot(sources), 0)


def _row_of_slot(call: ExchangeCall, routes: Routes) -> Int[Array, "all_tokens top_k"]:
    """The row at this rank of every slot of all ranks, -1 where it has none."""
    shape, rows = call.shape, call.room.rows
    if shape.ranks == 1:
        return routes.slot_rows
    row = jnp.arange(rows, dtype=jnp.int32)
    # Every index is another one, also of those behind the last slot, which are dropped.
    slot = jnp.where(is_row(routes.row_sources), _all_slot(call, routes), shape.all_slots + row)
    nowhere, slot = vary_alike((jnp.full(shape.all_slots, -1, jnp.int32), slot))
    return nowhere.at[slot].set(row, mode="drop", unique_indices=True).reshape(-1, shape.top_k)
