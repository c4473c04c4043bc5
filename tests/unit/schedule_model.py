"""Layers and legal schedules as hypothesis draws them, and the stream of one rank, put together from its walks.

Order, waits and releases all come from the compiled code (`native.schedule()`), so a test that uses this tests that
code. `agents_model.py` lets workers and dispatchers run through the stream.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest

from jaxmoe import native

steps = native.schedule()
Signal = steps.Signal
Site = steps.Site
Gemm = steps.Gemm
WEIGHT_GRADIENTS = (Gemm.gate_gradient, Gemm.up_gradient, Gemm.down_gradient)
FIRST_PART, LAST_PART = 1, 2  # of the parts that the segments of an expert contribute to its weight gradients


# --- sizes, as hypothesis draws them ----------------------------------------------------------------------------------


WORKERS = st.integers(1, 132)
RANKS = st.integers(1, 8)
TILE_ROWS = st.sampled_from([1, 2, 3, 8, 16])
FORWARD = st.just(0)  # segment_tiles
BACKWARD = st.integers(1, 6)
NOT_DECODED = st.just(0)  # weight_slots
TRAINED = st.just(0)  # frozen
TRAINED_OR_FROZEN = st.integers(0, 1)
both_passes = pytest.mark.parametrize("segment_tiles", [FORWARD, BACKWARD], ids=["forward", "backward"])


class Problem(NamedTuple):
    """A layer, a legal schedule for it, and the rows that one rank receives, filled up as its pass wants them."""

    shape: Any
    schedule: Any
    rows_per_expert: list[int]


def least_ring(shape, schedule) -> int:
    """The fewest ring tiles that are legal."""
    return min(schedule.min_ring_tiles, steps.max_row_tiles(shape, schedule))


def with_fields(struct, **changes):
    """A copy of a Shape or Schedule with some fields changed."""
    names = ["ranks", "tokens", "hidden", "intermediate", "num_experts", "top_k", "projections"]
    if isinstance(struct, steps.Schedule):
        names = ["tile", "unit_tiles", "lag_units", "ring_tiles", "workers", "chunk_rows", "dispatchers"]
        names += ["narrow_rows", "keep_tokens", "segment_tiles", "saved_tiles", "weight_slots", "frozen"]
        names += ["share_columns", "summed_tiles"]
    return type(struct)(**{name: getattr(struct, name) for name in names} | changes)


def filled_up(schedule, rows_per_expert: list[int]) -> list[int]:
    """The rows of each expert with the rows of zeros that a backward pass puts behind them."""
    return [math.ceil(rows / schedule.row_multiple) * schedule.row_multiple for rows in rows_per_expert]


@st.composite
def schedules(
    draw,
    shape,
    *,
    workers=WORKERS,
    dispatchers=WORKERS,
    tile_rows=TILE_ROWS,
    segment_tiles=FORWARD | BACKWARD,
    weight_slots=NOT_DECODED,
    frozen=TRAINED,
):
    """Any legal schedule for a shape; as many ring tiles as are needed, or a few more. Slots of weights as drawn."""
    rows = draw(tile_rows)
    segment = draw(segment_tiles)
    schedule = steps.Schedule(
        tile=steps.TileSizes(rows, draw(st.integers(4, 24)), draw(st.integers(4, 24))),
        unit_tiles=draw(st.integers(1, 5)),
        lag_units=draw(st.integers(0, 3)),
        ring_tiles=1,
        workers=draw(workers),
        chunk_rows=draw(st.integers(1, rows + 1)),
        dispatchers=draw(dispatchers),
        narrow_rows=draw(st.just(0) | st.integers(0, rows)),
        keep_tokens=draw(st.integers(0, 1)),
        segment_tiles=segment,
        weight_slots=draw(weight_slots),
        frozen=draw(frozen),
        share_columns=draw(st.integers(0, 1)),
        summed_tiles=0 if segment else draw(st.integers(0, 6)),
    )
    return with_fields(schedule, ring_tiles=least_ring(shape, schedule) + draw(st.integers(0, 3)))


@st.composite
def rows_of_experts(draw, num_experts, most=40, huge=150):
    """Rows of each local expert: often none, sometimes one expert with far more than the others."""
    counts = st.integers(1, most) | st.integers(0, most)
    rows = draw(st.lists(counts, min_size=num_experts, max_size=num_experts))
    if draw(st.booleans()):
        rows[draw(st.integers(0, num_experts - 1))] = draw(st.integers(most, huge))
    return rows


@st.composite
def problems(draw, *, ranks=RANKS, most=40, huge=150, segment_tiles=FORWARD | BACKWARD, **schedule_options):
    """A layer whose slots suffice for the rows drawn, so that `max_row_tiles` has to bound them.

    That of a backward pass is smaller: its weight gradients have tiles in two directions, for every segment.
    """
    num_ranks = draw(ranks)
    segment = draw(segment_tiles)
    widths = st.integers(1, 12 if segment else 48)
    local_experts = draw(st.integers(1, 6))
    part = 2 if segment else 1
    rows = draw(rows_of_experts(local_experts, most // part, huge // part))
    top_k = draw(st.integers(1, 8))
    shape = steps.Shape(
        ranks=num_ranks,
        tokens=math.ceil(sum(rows) / (num_ranks * top_k)),
        hidden=draw(widths),
        intermediate=draw(widths),
        num_experts=local_experts * num_ranks,
        top_k=top_k,
        projections=draw(st.integers(1, 2)),
    )
    schedule = draw(schedules(shape, segment_tiles=st.just(segment), **schedule_options))
    return Problem(shape, schedule, filled_up(schedule, rows))


# --- tiles of a rank, worked out from the sizes alone -----------------------------------------------------------------


def rows_of_tiles(problem: Problem) -> list[tuple[int, int]]:
    """(expert, rows) of each row tile, worked out from the counts alone."""
    tile_rows = problem.schedule.tile.rows
    return [
        (expert, min(tile_rows, rows - first))
        for expert, rows in enumerate(problem.rows_per_expert)
        for first in range(0, rows, tile_rows)
    ]


def column_tiles(problem: Problem) -> dict:
    """Column tiles of the GEMMs of a row tile, in the order in which they follow each other."""
    shape, schedule, _ = problem
    gate_up = {Gemm.gate_up: math.ceil(shape.intermediate / schedule.tile.h_columns)}
    outputs = math.ceil(shape.hidden / schedule.tile.columns)
    if not schedule.backward:
        return gate_up | {Gemm.down: outputs}
    gradients = math.ceil(shape.intermediate / schedule.tile.columns)
    return gate_up | {Gemm.h_gradient: gradients, Gemm.token_gradient: outputs}


def weight_matrices(shape) -> dict[Any, tuple[int, int]]:
    """Rows and columns of the weight gradients of an expert, in the order in which they are computed."""
    gate = (shape.hidden, shape.intermediate)
    up = {Gemm.up_gradient: gate} if shape.projections > 1 else {}
    return {Gemm.gate_gradient: gate} | up | {Gemm.down_gradient: (shape.intermediate, shape.hidden)}


def weight_tiles(shape, schedule) -> dict[Any, int]:
    """Tasks of each weight gradient of a segment, worked out from the sizes alone."""
    tile = schedule.tile
    return {
        gemm: math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns)
        for gemm, (rows, columns) in weight_matrices(shape).items()
    }


# --- the stream of one rank, put together from its walks --------------------------------------------------------------


def columns_of(task) -> range:
    """The column tiles that a task computes."""
    return range(task.column_tile, task.column_tile + task.column_tiles)


def all_tasks(problem: Problem) -> list[Any]:
    """The tasks of a rank in stream order: `steps.tasks` deals them to the workers in turn."""
    walks = [steps.tasks(*problem, worker) for worker in range(problem.schedule.workers)]
    return [walk[turn] for turn in range(len(walks[0])) for walk in walks if turn < len(walk)]


def all_chunks(problem: Problem) -> list[Any]:
    """The chunks of all dispatchers in stream order."""
    walks = [steps.chunks(*problem, dispatcher) for dispatcher in range(problem.schedule.dispatchers)]
    return sorted((chunk for walk in walks for chunk in walk), key=lambda chunk: (chunk.row_tile, chunk.tile_row))


def stream(problem: Problem) -> list[Any]:
    """All chunks and tasks of a rank: the pulls of a unit stand right before its gate/up tasks."""
    chunks = defaultdict(list)
    for chunk in all_chunks(problem):
        chunks[chunk.row_tile].append(chunk)
    first_tiles = {unit.first_tile: unit for unit in steps.units(problem.schedule, problem.rows_per_expert)}
    items = []
    for task in all_tasks(problem):
        unit = first_tiles.get(task.row_tile)
        if unit and task.gemm == Gemm.gate_up and task.column_tile == 0:
            for row_tile in range(unit.first_tile, unit.first_tile + unit.tiles):
                items += chunks.pop(row_tile)
        items.append(task)
    assert not chunks, "every tile that is pulled is computed"
    return items


def waits_of(problem: Problem) -> Callable[[Any], list[Any]]:
    """Returns the waits before an item of the stream, in the order in which they come."""
    shape, schedule, rows_per_expert = problem
    segment_of = [s for s in steps.segments(schedule, rows_per_expert) for _ in range(s.tiles)]  # of each row tile

    def waits_before(item: Any) -> list[Any]:
        if not isinstance(item, steps.Chunk):
            return steps.waits_before(shape, schedule, item)
        wait = steps.wait_before(shape, schedule, item)
        if wait is None or not schedule.has_weight_gradients:
            return [] if wait is None else [wait]
        return [wait, steps.wait_for_weight_gradients(shape, schedule, segment_of[wait.index])]

    return waits_before


def waits_that_point_forward(problem: Problem) -> list[Any]:
    """The waits of the stream whose target is not reached, to the last release, by what stands before them."""
    waits_before = waits_of(problem)
    released = Counter()
    forward = []
    for item in stream(problem):
        forward += [wait for wait in waits_before(item) if released[wait.signal, wait.index] != wait.target]
        release = steps.release_after(item)
        released[release.signal, release.index] += release.amount
    return forward
