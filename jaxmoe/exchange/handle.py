"""What `dispatch` returns: rows, how many of each expert, and the handle with which `combine` finds the way back."""

import dataclasses

from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from jaxmoe import array_layout
from jaxmoe.exchange import base
from jaxmoe.exchange.base import ExchangeCall
from jaxmoe.pytrees import local_pytree


@local_pytree
class Handle:
    """Where rows came from and slots went to: made by `dispatch`, for `combine`. A pytree of arrays.

    Inside `shard_map` it is of one rank. What is returned from there, each array split on its first dimension, may go
    into another `shard_map` over the same axes.

    Args:
      row_sources: `[rows]` int32: source rank * 2^24 + slot (token * top_k + k, among the tokens of that rank); -1: the
        row is nobody's. Rows as they are in memory: of `[local_experts, capacity]`, those of an expert follow each
        other.
      slot_rows: `[*batch, top_k]` int32: the row of each slot, at the rank of its expert; -1: the slot is unused, or
        its row found no room.
      rows_per_expert: `[local_experts]` int32: rows that are here.
      topk_ids: `[*batch, top_k]` int32: the ids that were dispatched, -1 for every slot that is not used.
      call: the call of `dispatch`, checked.
    """

    row_sources: Int32[Array, "rows"]
    slot_rows: Int32[Array, "*batch top_k"]
    rows_per_expert: Int32[Array, "local_experts"]
    topk_ids: Int32[Array, "*batch top_k"]
    call: ExchangeCall = dataclasses.field(metadata={"static": True})

    @property
    def source_rank(self) -> Int32[Array, "rows"]:
        """The rank that each row came from, among those that share the experts; -1 where it is nobody's."""
        return base.source_rank(self.row_sources)

    @property
    def source_slot(self) -> Int32[Array, "rows"]:
        """The slot of each row, token * top_k + k among the tokens of its rank; -1 where it is nobody's."""
        return base.source_slot(self.row_sources)

    @property
    def source_token(self) -> Int32[Array, "rows"]:
        """The token of each row among those of its rank; -1 where it is nobody's."""
        return self.source_slot // self.call.shape.top_k


@local_pytree
class Dispatched:
    """Tokens at their experts. A pytree; outside of `shard_map` its arrays are those of all ranks behind each other.

    Of `dispatch_matmul` the rows are the products, as wide as its matrices.

    Args:
      rows: `[rows, hidden]`, or `[local_experts, capacity, hidden]` with `per_expert`: zero where a row is nobody's. In
        the dtype of x, or with a precision `float8_e4m3fn`: those refuse gradients, which `wide_rows` has.
      scales: with a precision `[..., ceil(hidden / 128)]` float32, the factors of each 128 columns of a row; else
        `None`.
      rows_per_expert: `[local_experts]` int32: rows that are here.
      dropped_rows: `[local_experts]` int32: rows that found no room, each at its expert.
      handle: for `combine`.
      decoded: with a precision, rows times scales in the dtype of x; else `None`. Under `jit` it takes no time unless
        it is used.
    """

    rows: Float[Array, "*places hidden"]
    scales: Float[Array, "*places groups"] | None
    rows_per_expert: Int32[Array, "local_experts"]
    dropped_rows: Int32[Array, "local_experts"]
    handle: Handle
    decoded: Float[Array, "*places hidden"] | None = None

    @property
    def wide_rows(self) -> Float[Array, "*places hidden"]:
        """The rows in the dtype of x: with a precision values times scales, whose gradient is that without rounding.

        A product of 8 bits with 8 bits that is to be differentiated takes them as another argument beside `rows` and
        `scales`, for which `jax.lax.stop_gradient` says that they are constants: its forward pass does not read them,
        and its backward pass returns their gradient.
        """
        return self.rows if self.decoded is None else self.decoded

    @property
    def group_sizes(self) -> Int32[Array, "local_experts"]:
        """Rows of each expert's block with the zero rows behind it: what `jax.lax.ragged_dot` takes.

        Outside of `shard_map` the last expert of every rank has all rows of that rank behind it, so that the next
        rank's first one begins where its rows do; inside, the rows behind the last expert belong to none.

        Raises:
          ValueError: the rows of an expert are an array of their own (`per_expert`).
        """
        call = self.handle.call
        if call.room.capacity_per_expert:
            raise ValueError(
                "Dispatched: group_sizes are of rows one behind the other, and these are [local_experts, capacity, "
                "hidden] (per_expert=True). Multiply them with jnp.einsum, or dispatch without per_expert."
            )
        counts = self.rows_per_expert + self.dropped_rows
        whole = array_layout.reshard_explicit(counts, PartitionSpec(), call.placement.mesh)
        of_ranks = whole.reshape(-1, call.shape.local_experts)
        sizes = base.block_sizes(call.room, of_ranks)
        if call.placement.mesh is not None:
            sizes = sizes.at[:, -1].add(call.room.rows - sizes.sum(-1))
        return array_layout.like(sizes.reshape(counts.shape), counts, call.placement.mesh)

    @property
    def row_valid(self) -> Bool[Array, "*places"]:
        """Which rows are somebody's: `[rows]`, or `[local_experts, capacity]`."""
        return base.is_row(self.handle.row_sources).reshape(self.rows.shape[:-1])
