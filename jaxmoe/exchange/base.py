"""What every implementation of dispatch and combine is given, what it returns, and the order of rows that they share.

Rows of a rank lie by local expert, those of one expert by source rank, and of one rank by slot. Where an expert's rows
start is in `block_starts`; everything that is nobody's row is zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.options import ImplementationName
from jaxmoe.sharding import ExpertGroup, Placement

ExchangePrecision = Literal["fp8", "fp8-e8m0"]
# A row's source is one int32: the rank in the high bits, in these the slot among that rank's (token * top_k + k).
SLOT_BITS = 24
MOST_RANKS = 2 ** (31 - SLOT_BITS)
MOST_SLOTS_OF_RANK = 2**SLOT_BITS


@dataclasses.dataclass(frozen=True)
class Room:
    """The rows that a rank has room for.

    Args:
      rows: in all.
      alignment: of the first row of every expert, where experts follow each other.
      capacity_per_expert: where each expert has as many rows of its own; 0 where they follow each other.
    """

    rows: int
    alignment: int = 1
    capacity_per_expert: int = 0


@dataclasses.dataclass(frozen=True)
class ExchangeShape:
    """Static sizes of one call, as one rank sees them.

    Args:
      tokens: of this rank.
      hidden: width of a token.
      num_experts: of the whole group.
      top_k: slots per token.
      ranks: of the group.
      dtype: of the tokens.
    """

    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    ranks: int
    dtype: Any

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ranks

    @property
    def slots(self) -> int:
        """Slots of one rank."""
        return self.tokens * self.top_k

    @property
    def all_slots(self) -> int:
        """Slots of all ranks: the rows of one rank if every slot names its experts."""
        return self.ranks * self.slots


@dataclasses.dataclass(frozen=True)
class ExchangeCall:
    """The static side of a dispatch and its combine, checked; equal calls compile to the same program.

    Args:
      implementation: the one that runs.
      implementation_reason: why.
      placement: ranks, mesh and axes.
      platform: what it is compiled for.
      shape: sizes as one rank sees them.
      room: for rows.
      precision: how tokens are rounded to 8 bits before they travel; `None` where they are not.
      multiprocessors: of a GPU that a kernel takes which is started beside other work; `None`: it is not.
      axis_sizes: names and sizes of all axes of the mesh, where it is called inside of a `shard_map`.
    """

    implementation: ImplementationName
    implementation_reason: str = dataclasses.field(compare=False)
    placement: Placement
    platform: str
    shape: ExchangeShape
    room: Room
    precision: ExchangePrecision | None = None
    multiprocessors: int | None = None
    axis_sizes: tuple[tuple[str, int], ...] = ()

    @property
    def group(self) -> ExpertGroup:
        """The ranks that hold the experts."""
        return self.placement.group


class Routes(NamedTuple):
    """Where rows came from and slots went to.

    `row_sources`: source rank * 2^24 + slot among that rank's, -1 for what is nobody's row.
    `slot_rows`: row of each slot of this rank's tokens at the rank of its expert, -1 where it has none.
    """

    row_sources: Int[Array, "rows"]
    slot_rows: Int[Array, "tokens top_k"]


class Arrived(NamedTuple):
    """What a rank has after a dispatch: `scales` where rows have 8 bits, `None` where they are in the dtype of x."""

    rows: Float[Array, "rows hidden"]
    scales: Float[Array, "rows groups"] | None
    rows_per_expert: Int[Array, "local_experts"]  # those that are here
    dropped_rows: Int[Array, "local_experts"]  # those that found no room
    routes: Routes


Kept = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to dispatch and combine, on one rank: flat arrays, ids int32, -1 for every unused slot, some token.

    Args:
      name: of the user's argument.
      send: `(call, x, topk_ids)`, sorts and dispatches; rounds to 8 bits where the call has a precision.
      add_up: `(call, outputs, weights or None for ones, routes)`, returns the (weighted) sum of each token's rows, in
        the dtype of `outputs`. Transposes `send` where weights are ones.
      pull: `(call, x, routes)`, dispatches again by known routes, in the dtype of `x`. Transposes `add_up` without
        weights. `None`: JAX differentiates `send` and `add_up`.
      pull_weighted: `(call, dy, weights, outputs, routes)`, transposes `add_up` with weights: returns the gradients of
        `outputs`, and of `weights` in their dtype. `None` as above.
      send_matmul: `(call, x, topk_ids, matrices)`, sends tokens and multiplies each with the matrix of its expert: the
        products, in the dtype of x. `None`, as of the next one: there is none, and a product follows `send` or
        comes before `add_up`.
      matmul_add_up: `(call, rows, matrices, weights or None, routes, rows_per_expert)`, multiplies the rows of each
        expert with its matrix, and adds up as `add_up`.
      start_send: `(call, x, topk_ids)`, starts to send, beside what follows in the program: returns what will have
        arrived, and arrays that have to be kept until then. `None`, as of the next two: nothing runs beside others.
      start_add_up: `(call, outputs, weights or None, routes)`, the same of `add_up`.
      finish: `(started, kept)`, returns what was started once it is there.
      check: `(call, caller)`, raises where it cannot run a call; before anything runs.
      check_rows: `(call, caller, name, array)`, raises where it cannot take the rows of an array, or of matrices, which
        has a shape and a dtype.
    """

    name: ImplementationName
    send: Callable[[ExchangeCall, jax.Array, jax.Array], Arrived]
    add_up: Callable[[ExchangeCall, jax.Array, jax.Array | None, Routes], jax.Array]
    pull: Callable[[ExchangeCall, jax.Array, Routes], jax.Array] | None = None
    pull_weighted: (
        Callable[[ExchangeCall, jax.Array, jax.Array, jax.Array, Routes], tuple[jax.Array, jax.Array]] | None
    ) = None
    send_matmul: Callable[[ExchangeCall, jax.Array, jax.Array, jax.Array], Arrived] | None = None
    matmul_add_up: (
        Callable[[ExchangeCall, jax.Array, jax.Array, jax.Array | None, Routes, jax.Array], jax.Array] | None
    ) = None
    start_send: Callable[[ExchangeCall, jax.Array, jax.Array], tuple[Arrived, Kept]] | None = None
    start_add_up: Callable[[ExchangeCall, jax.Array, jax.Array | None, Routes], tuple[jax.Array, Kept]] | None = None
    finish: Callable[[Any, Kept], Any] | None = None
    check: Callable[[ExchangeCall, str], None] = lambda call, caller: None
    check_rows: Callable[[ExchangeCall, str, str, Any], None] = lambda call, caller, name, array: None


def block_starts(room: Room, counts: Int[Array, "*ranks local_experts"]) -> Int[Array, "*ranks local_experts"]:
    """Returns the first row of every expert at its rank, which may lie behind the last row that there is room for.

    Args:
      room: of every rank.
      counts: rows of every expert, before any is dropped.

    >>> block_starts(Room(rows=32, alignment=8), jnp.array([3, 0, 9, 1])).tolist()
    [0, 8, 8, 24]
    """
    if room.capacity_per_expert:
        return jnp.broadcast_to(room.capacity_per_expert * jnp.arange(counts.shape[-1], dtype=jnp.int32), counts.shape)
    aligned = aligned_sizes(room, counts)
    return jnp.cumsum(aligned, -1, dtype=jnp.int32) - aligned


def aligned_sizes(room: Room, counts: Int[Array, "*ranks local_experts"]) -> Int[Array, "*ranks local_experts"]:
    """Returns the rows from an expert's first to the next one's first, where they follow each other."""
    return (counts + room.alignment - 1) // room.alignment * room.alignment


def block_sizes(room: Room, rows_per_expert: Int[Array, "*ranks local_experts"]) -> Int[Array, "*ranks local_experts"]:
    """Returns how many rows of the array are each expert's, with the zero rows behind: what a grouped product takes.

    Args:
      room: of every rank, where experts follow each other.
      rows_per_expert: rows of every expert, before any is dropped or after it.

    >>> block_sizes(Room(rows=20, alignment=8), jnp.array([3, 0, 9, 1])).tolist()
    [8, 0, 12, 0]
    """
    aligned = aligned_sizes(room, rows_per_expert)
    return jnp.clip(room.rows - block_starts(room, rows_per_expert), 0, aligned)


def rows_with_room(
    room: Room, starts: Int[Array, "*ranks local_experts"], counts: Int[Array, "*ranks local_experts"]
) -> Int[Array, "*ranks local_experts"]:
    """Returns how many of the rows of every expert find room.

    >>> rows_with_room(Room(rows=10), jnp.array([0, 8, 12]), jnp.array([8, 4, 1])).tolist()
    [8, 2, 0]
    """
    if room.capacity_per_expert:
        return jnp.minimum(counts, room.capacity_per_expert)
    return jnp.clip(room.rows - starts, 0, counts)


def source_rank(row_sources: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Returns the rank that each row came from, -1 for what is nobody's row."""
    return row_sources >> SLOT_BITS


def source_slot(row_sources: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Returns the slot of each row among those of its rank (token * top_k + k), -1 for what is nobody's row."""
    return jnp.where(row_sources >= 0, row_sources & (MOST_SLOTS_OF_RANK - 1), -1)


def is_row(row_sources: Int[Array, "*rows"]) -> Bool[Array, "*rows"]:
    """Returns which rows are somebody's."""
    return row_sources >= 0
