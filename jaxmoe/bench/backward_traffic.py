"""Bytes that a backward pass of `"megakernel"` moves, term by term; what counts is said in `traffic.py`.

The steps are the GEMMs of ffi/common/scheduler.h. Rows hold a token and behind it the gradient of its output. Nothing
has 8 bits there: sizes are those of `Shape.wide`, but for experts that came in fewer bits, which are decoded.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmoe import native
from jaxmoe.bench.traffic import (
    WORD,
    Bytes,
    MegakernelLinks,
    MegakernelMemory,
    Routing,
    Terms,
    Traffic,
    busiest,
)
from jaxmoe.plan import KernelPlan, Shape


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a forward pass keeps of gate and up on one rank, and what of them the backward pass computes again.

    Args:
      rows: of experts, in the row tiles that there is room for.
      empty_rows: that there is room for beside those.
      rows_again: of units of row tiles that are not kept whole.
      experts_again: that have such rows.
    """

    rows: int
    empty_rows: int
    rows_again: int
    experts_again: int

    @classmethod
    def of_rank(cls, routing: Routing, rank: int, plan: KernelPlan, tile: Any, kept_tiles: int) -> "Kept":
        """Counts rows and experts, for a plan of a backward pass and room for so many row tiles, 0 where none are."""
        steps = native.schedule()
        # Units depend on nothing else.
        segments = {"keep_tokens": 0, "segment_tiles": plan.segment_tiles}
        schedule = steps.Schedule(tile, plan.unit_tiles, plan.lag_units, plan.ring_tiles, 1, 1, 1, 0, **segments)
        rows, rows_again, experts_again = 0, 0, set()
        for unit in steps.units(schedule, routing.rows_of_experts(rank).tolist()):
            of_tiles = [unit.rows_of_tile(number, tile.rows) for number in range(unit.tiles)]
            rows += sum(of_tiles[: max(kept_tiles - unit.first_tile, 0)])
            if unit.first_tile + unit.tiles > kept_tiles:
                rows_again += sum(of_tiles)
                experts_again.add(unit.expert)
        return cls(rows, kept_tiles * tile.rows - rows, rows_again, len(experts_again))


@dataclasses.dataclass(frozen=True)
class KeptMemory(Terms):
    """Bytes that a forward pass writes beside its own, where it keeps gate and up for the backward pass.

    `rows` and `empty_rows` are those of `Kept`.

    Args:
      projections_written: `projections * rows * h_bytes`: gate and up, by the gate and up GEMM.
      zeros_written: `projections * empty_rows * h_bytes`.
    """

    projections_written: Bytes
    zeros_written: Bytes

    @classmethod
    def of(cls, kept: Kept, shape: Shape) -> "KeptMemory":
        """Counts the terms of one rank."""
        row = shape.projections * shape.wide.h_bytes
        return cls(projections_written=row * kept.rows, zeros_written=row * kept.empty_rows)


@dataclasses.dataclass(frozen=True)
class BackwardMemory(Terms):
    """Bytes that a backward pass reads from and writes to the memory of one rank.

    `projections` is 2, of experts without an up projection 1; `segments` are those of an expert, pieces of at most
    `segment_tiles` row tiles. Beside frozen experts there is no gate_gradient, up_gradient and down_gradient.
    `rows_again` and `experts_again` are those of `Kept`: of all rows and active experts where nothing is kept.

    Args:
      weights_decoded: of experts in 8 or 4 bits, `active_experts` times their bytes and those in the dtype of x: read
        and written by dispatch. What the GEMMs then read are decoded ones, much of that in L2.
      weights_of_gate_up: `experts_again * projections * matrix_bytes`: w_gate and w_up, from which
        gate and up are computed again. An expert without rows is not read.
      weights_of_h_gradient: `active_experts * matrix_bytes`: w_down.
      weights_of_token_gradient: `active_experts * projections * matrix_bytes`: w_gate and w_up.
      tokens_staged: `4 * tokens * token_bytes`: x and dy read, and their copies written side by side. So does one
        rank alone.
      weights_staged: `4 * (tokens * top_k + used_slots)`: routing weights written where peers reach them, and read by
        dispatch.
      tokens_pulled: twice the bytes of a forward pass: `2 * used_slots * token_bytes`, or, where the plan keeps
        tokens, by each peer once for all slots of a token.
      tokens_kept: `2 * remote_rows * token_bytes` where the plan keeps tokens.
      rows_written: `2 * rows * token_bytes`: by dispatch.
      rows_read: `(rows_again + (2 + projections) * rows) * token_bytes`: tokens by gate_up, gate_gradient and
        up_gradient, gradients of outputs by h_gradient and down_gradient.
      projections_written: `projections * (rows_again + rows) * h_bytes`: gate and up by gate_up, their gradients
        by h_gradient.
      projections_read: `3 * projections * rows * h_bytes`: gate and up by h_gradient, their
        gradients by token_gradient, and by gate_gradient and up_gradient.
      h_written: `rows * h_bytes`: h times the routing weight, by h_gradient.
      hidden_read: the same, by down_gradient.
      row_numbers_written: `4 * (1 + gradient_tiles) * rows`: routing weights of rows by dispatch, and by
        h_gradient h times its gradient, summed over each of its column tiles.
      row_numbers_read: the same, by h_gradient and by token_gradient.
      weight_gradients_written: `local_experts * matrices * matrix_bytes`; zeros of an expert
        without rows.
      weight_sums: `2 * (segments - 1) * matrices * hidden * intermediate * 4` of every expert that has more than one:
        float32 sums written for the next segment and read by it.
      answers_written: `used_slots * (token_bytes + 4)`: gradients of this rank's tokens and routing weights, by
        the token_gradient of all ranks.
      answers_read: the same, by combine.
      gradients_written: `tokens * (token_bytes + 4 * top_k)`: of x and of topk_weights.
      routing_read: `4 * 4 * tokens * top_k`: ids by the two passes of the sort and by combine, weights by publish.
      lists_written: `2 * 4 * rows`: slot lists by their sources, targets of rows by dispatch.
      lists_read: the same, by dispatch and by token_gradient.
    """

    weights_decoded: Bytes
    weights_of_gate_up: Bytes
    weights_of_h_gradient: Bytes
    weights_of_token_gradient: Bytes
    tokens_staged: Bytes
    weights_staged: Bytes
    tokens_pulled: Bytes
    tokens_kept: Bytes
    rows_written: Bytes
    rows_read: Bytes
    projections_written: Bytes
    projections_read: Bytes
    h_written: Bytes
    hidden_read: Bytes
    row_numbers_written: Bytes
    row_numbers_read: Bytes
    weight_gradients_written: Bytes
    weight_sums: Bytes
    answers_written: Bytes
    answers_read: Bytes
    gradients_written: Bytes
    routing_read: Bytes
    lists_written: Bytes
    lists_read: Bytes

    @classmethod
    def of_rank(
        cls,
        routing: Routing,
        shape: Shape,
        rank: int,
        plan: KernelPlan,
        tile: Any,
        frozen: bool = False,
        kept_tiles: int = 0,
    ) -> "BackwardMemory":
        """Counts the terms of one rank, for a plan of a backward pass; beside frozen experts or not.

        `kept_tiles` are the row tiles for whose gate and up there is room, 0 where they are not kept.
        """
        kept = Kept.of_rank(routing, rank, plan, tile, kept_tiles)
        rows, slots, active = routing.rows(rank), routing.used_slots(rank), routing.active_experts(rank)
        to_peers = routing.wanted_tokens(rank) if plan.keep_tokens else routing.remote_slots(rank)
        packed, shape = shape.expert_bytes, shape.wide
        token, h = shape.token_bytes, shape.h_bytes
        projections, matrix = shape.projections, shape.matrix_bytes
        gradient_tiles = -(-shape.intermediate // tile.columns)
        segments = -(-routing.rows_of_experts(rank) // (plan.segment_tiles * tile.rows))
        further_segments = int((segments - 1).clip(min=0).sum())
        trained = 0 if frozen else 1
        sums = (projections + 1) * shape.hidden * shape.intermediate * WORD
        return cls(
            weights_decoded=active * (packed + shape.expert_bytes) if packed < shape.expert_bytes else 0,
            weights_of_gate_up=kept.experts_again * projections * matrix,
            weights_of_h_gradient=active * matrix,
            weights_of_token_gradient=active * projections * matrix,
            tokens_staged=4 * shape.tokens * token,
            weights_staged=WORD * (shape.tokens * shape.top_k + slots),
            tokens_pulled=2 * (slots - routing.remote_slots(rank) + to_peers) * token,
            tokens_kept=2 * routing.remote_rows(rank) * token if plan.keep_tokens else 0,
            rows_written=2 * rows * token,
            rows_read=(kept.rows_again + (1 + trained * (1 + projections)) * rows) * token,
            projections_written=projections * (kept.rows_again + rows) * h,
            projections_read=(2 + trained) * projections * rows * h,
            h_written=trained * rows * h,
            hidden_read=trained * rows * h,
            row_numbers_written=WORD * (1 + gradient_tiles) * rows,
            row_numbers_read=WORD * (1 + gradient_tiles) * rows,
            weight_gradients_written=trained * shape.local_experts * (projections + 1) * matrix,
            weight_sums=trained * 2 * further_segments * sums,
            answers_written=slots * (token + WORD),
            answers_read=slots * (token + WORD),
            gradients_written=shape.tokens * (token + WORD * shape.top_k),
            routing_read=4 * WORD * shape.tokens * shape.top_k,
            lists_written=2 * WORD * rows,
            lists_read=2 * WORD * rows,
        )


@dataclasses.dataclass(frozen=True)
class BackwardLinks(Terms):
    """Bytes that one rank receives from its peers in a backward pass; it sends as many, but for lists and weights.

    Args:
      rows_received: `2 * remote_rows * token_bytes`: tokens of other ranks and the gradients of their outputs.
        Where the plan keeps tokens `2 * remote_tokens * token_bytes`, the least.
      weights_received: `4 * remote_rows`: routing weights.
      answers_received: `remote_slots * (token_bytes + 4)`: gradients of this rank's tokens and routing weights.
      lists_received: `4 * remote_rows`: slot lists.
    """

    rows_received: Bytes
    weights_received: Bytes
    answers_received: Bytes
    lists_received: Bytes

    @classmethod
    def of_rank(cls, routing: Routing, shape: Shape, rank: int, keep_tokens: bool) -> "BackwardLinks":
        """Counts the terms of one rank."""
        token = shape.wide.token_bytes
        rows = routing.remote_rows(rank)
        received = routing.remote_tokens(rank) if keep_tokens else rows
        return cls(
            rows_received=2 * received * token,
            weights_received=WORD * rows,
            answers_received=routing.remote_slots(rank) * (token + WORD),
            lists_received=WORD * rows,
        )


def of_backward(
    routings: Sequence[Routing], shape: Shape, plan: KernelPlan, tile: Any, frozen: bool = False
) -> Traffic:
    """Returns what a backward pass of `"megakernel"` moves for these routings with a plan of a backward pass.

    Args:
      routings: of the sets of inputs.
      shape: of the layer.
      plan: of the pass.
      tile: `TileSizes` of the platform.
      frozen: whether it makes no gradients of experts.
    """

    def memory(routing: Routing, rank: int) -> dict[str, Bytes]:
        return BackwardMemory.of_rank(routing, shape, rank, plan, tile, frozen).items()

    def links(routing: Routing, rank: int) -> dict[str, Bytes]:
        return BackwardLinks.of_rank(routing, shape, rank, plan.keep_tokens).items()

    return Traffic(busiest(memory, routings), busiest(links, routings), complete=True)


def of_both(
    routings: Sequence[Routing], shape: Shape, plan: KernelPlan, backward: KernelPlan, tile: Any, kept_tiles: int = 0
) -> Traffic:
    """Returns what a forward pass with a plan and a backward pass with another one move together.

    Args:
      routings: of the sets of inputs.
      shape: of the layer.
      plan: of the forward pass.
      backward: of the backward pass.
      tile: `TileSizes` of the platform.
      kept_tiles: row tiles for whose gate and up there is room, 0 where the forward pass keeps none.
    """

    def memory(routing: Routing, rank: int) -> dict[str, Bytes]:
        kept = KeptMemory.of(Kept.of_rank(routing, rank, backward, tile, kept_tiles), shape)
        return _named(
            forward=MegakernelMemory.of_rank(
                routing, shape, rank, plan.keep_tokens, sum_at_experts=plan.sum_at_experts
            ),
            kept=kept,
            backward=BackwardMemory.of_rank(routing, shape, rank, backward, tile, kept_tiles=kept_tiles),
        )

    def links(routing: Routing, rank: int) -> dict[str, Bytes]:
        return _named(
            forward=MegakernelLinks.of_rank(routing, shape, rank, plan.keep_tokens, plan.sum_at_experts),
            backward=BackwardLinks.of_rank(routing, shape, rank, backward.keep_tokens),
        )

    return Traffic(busiest(memory, routings), busiest(links, routings), complete=True)


def _named(**passes: Terms) -> dict[str, Bytes]:
    return {f"{name}_{term}": size for name, terms in passes.items() for term, size in terms.items().items()}
