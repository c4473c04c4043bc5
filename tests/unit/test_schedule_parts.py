"""What blocks of a GPU's worker compute of a task (ffi/common/block_part.h): all of it, and nothing twice."""

from itertools import accumulate
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.unit.schedule_model import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    all_tasks,
    both_passes,
    column_tiles,
    filled_up,
    least_ring,
    rows_of_tiles,
    steps,
    with_fields,
)

TILE_ROWS = steps.granularity("gpu", True).tile.rows
BLOCK_ROWS = TILE_ROWS // steps.BLOCKS
FEW_ROWS_MORE = st.integers(1, BLOCK_ROWS // 2)  # than a narrow tile has
LAST_ROWS = st.sampled_from([0, 1, 127, 128, 129, 191, 192, 193, 255]) | st.integers(0, TILE_ROWS - 1)
WIDTHS = st.sampled_from([128, 129, 256, 384, 385, 512, 641, 768, 1280]) | st.integers(1, 1280)
TASK_FIELDS = ("gemm", "expert", "row_tile", "ring_slot", "rows", "column_tile", "column_tiles")
TASK_FIELDS += ("weight_row_tile", "part", "sums_tile")


@st.composite
def problems_of_gpu(draw, last_rows=LAST_ROWS, segment_tiles=FORWARD | BACKWARD):
    """A layer of one rank with the tiles of a GPU. `last_rows`: of an expert, beside up to two whole tiles."""
    whole_tiles = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    rows = [whole * TILE_ROWS + draw(last_rows) for whole in draw(whole_tiles)]
    shape = steps.Shape(
        ranks=1,
        tokens=sum(rows),
        hidden=draw(WIDTHS),
        intermediate=draw(WIDTHS),
        num_experts=len(rows),
        top_k=1,
        projections=draw(st.integers(1, 2)),
    )
    schedule = steps.Schedule(
        tile=steps.granularity("gpu", shape.projections == 2).tile,
        unit_tiles=draw(st.integers(1, 4)),
        lag_units=draw(st.integers(0, 2)),
        ring_tiles=1,
        workers=draw(st.integers(1, 3)),
        chunk_rows=8,
        dispatchers=1,
        narrow_rows=BLOCK_ROWS,
        keep_tokens=0,
        segment_tiles=draw(segment_tiles),
        share_columns=draw(st.integers(0, 1)),
    )
    schedule = with_fields(schedule, ring_tiles=least_ring(shape, schedule) + draw(st.integers(0, 2)))
    return Problem(shape, schedule, filled_up(schedule, rows))


@st.composite
def launches(draw, segment_tiles=FORWARD | BACKWARD):
    """A problem, and what the kernel has code for and wants of it: in a backward pass neither."""
    problem = draw(problems_of_gpu(segment_tiles=segment_tiles))
    names = ("shares_columns", "exchanges")
    return problem, {name: not problem.schedule.backward and draw(st.booleans()) for name in names}


def tasks_of_rows(problem: Problem) -> list[Any]:
    return [task for task in all_tasks(problem) if task.gemm not in WEIGHT_GRADIENTS]


def changed(task, **fields):
    return steps.Task(**{name: getattr(task, name) for name in TASK_FIELDS} | fields)


def parts_of(problem: Problem, task, **kernel) -> list[Any]:
    """The parts of the blocks of a cluster, by their rank."""
    shape, schedule, _ = problem
    return [steps.part_of_block(schedule, shape.hidden, task, rank, **kernel) for rank in range(steps.BLOCKS)]


def width_of(problem: Problem, gemm) -> int:
    """Columns of the result."""
    return problem.shape.intermediate if gemm in (Gemm.gate_up, Gemm.h_gradient) else problem.shape.hidden


def columns_of_part(problem: Problem, part, rank: int) -> slice:
    tile = problem.schedule.tile
    columns = tile.h_columns if part.gemm == Gemm.gate_up else tile.columns
    first = part.column_tile * columns
    if part.part & steps.SHARED_COLUMNS:
        columns //= steps.BLOCKS
        first += rank * columns
    width = width_of(problem, part.gemm)
    assert part.rows == 0 or first < width, "a block that has rows has columns"
    return slice(first, min(first + columns, width))


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_the_parts_of_all_blocks_are_every_number_of_every_product_exactly_once(segment_tiles, data):
    problem, kernel = data.draw(launches(segment_tiles))
    rows_of = np.array([rows for _, rows in rows_of_tiles(problem)], int)
    times = {
        gemm: np.zeros((len(rows_of), TILE_ROWS, width_of(problem, gemm)), np.uint8) for gemm in column_tiles(problem)
    }
    for task in tasks_of_rows(problem):
        for rank, part in enumerate(parts_of(problem, task, **kernel)):
            slot, half = divmod(part.ring_slot, steps.BLOCKS)
            place = part.gemm, part.expert, part.row_tile, slot
            assert place == (task.gemm, task.expert, task.row_tile, task.ring_slot)
            first = half * BLOCK_ROWS
            times[part.gemm][part.row_tile, first : first + part.rows, columns_of_part(problem, part, rank)] += 1
    has_row = np.arange(TILE_ROWS) < rows_of[:, None]  # of each tile
    for gemm, of_gemm in times.items():
        assert (of_gemm == has_row[:, :, None]).all(), gemm


@given(problem=problems_of_gpu(segment_tiles=FORWARD), exchanges=st.booleans())
@settings(max_examples=100)
def test_of_rows_in_an_array_the_parts_are_every_number_of_the_product_exactly_once(problem, exchanges):
    shape, schedule, rows_per_expert = problem
    second_half = Problem(shape, steps.half_of(schedule, steps.SECOND_HALF), rows_per_expert)
    first_rows = list(accumulate((rows for _, rows in rows_of_tiles(problem)), initial=0))
    times = np.zeros((sum(rows_per_expert), shape.hidden), np.uint8)
    for task in tasks_of_rows(second_half):
        in_array = changed(task, ring_slot=first_rows[task.row_tile])
        for rank, part in enumerate(parts_of(second_half, in_array, exchanges=exchanges, ring=False)):
            rows = slice(part.ring_slot, part.ring_slot + part.rows)
            times[rows, columns_of_part(second_half, part, rank)] += 1
    assert (times == 1).all()


@given(launch=launches())
@settings(max_examples=100)
def test_a_part_has_no_more_rows_than_a_block_has_room_for(launch):
    problem, kernel = launch
    for task in tasks_of_rows(problem):
        assert all(0 <= part.rows <= BLOCK_ROWS for part in parts_of(problem, task, **kernel))


@given(launch=launches())
@settings(max_examples=100)
def test_either_all_blocks_of_a_cluster_have_columns_of_their_own_or_all_have_the_same(launch):
    problem, kernel = launch
    for task in tasks_of_rows(problem):
        parts = parts_of(problem, task, **kernel)
        owns = {part.part & steps.OWN_COLUMNS for part in parts}
        assert len(owns) == 1
        assert owns == {steps.OWN_COLUMNS} or len({part.column_tile for part in parts}) == 1


@given(launch=launches(), saved_tiles=st.integers(0, 12))
@settings(max_examples=100)
def test_without_exchange_a_wide_task_is_cut_into_rows_alone_be_it_one_of_row_halves_or_not(launch, saved_tiles):
    (shape, schedule, rows_per_expert), kernel = launch
    if schedule.backward:
        schedule = with_fields(schedule, saved_tiles=saved_tiles)
    problem = Problem(shape, schedule, rows_per_expert)
    for task in tasks_of_rows(problem):
        if task.rows <= schedule.narrow_rows:
            continue
        assert parts_of(problem, task, **kernel | {"exchanges": False}) == [
            changed(
                task,
                ring_slot=task.ring_slot * steps.BLOCKS + rank,
                rows=min(max(task.rows - rank * BLOCK_ROWS, 0), BLOCK_ROWS),
            )
            for rank in range(steps.BLOCKS)
        ]


@given(problem=problems_of_gpu(segment_tiles=FORWARD), shares_columns=st.booleans())
@settings(max_examples=100)
def test_exchange_changes_no_part_of_other_tasks_than_those_of_row_halves(problem, shares_columns):
    for task in tasks_of_rows(problem):
        if not task.part & steps.ROW_HALVES:
            beside = parts_of(problem, task, shares_columns=shares_columns, exchanges=True)
            assert beside == parts_of(problem, task, shares_columns=shares_columns)


@given(problem=problems_of_gpu(FEW_ROWS_MORE.map(BLOCK_ROWS.__add__), FORWARD), shares_columns=st.booleans())
@settings(max_examples=150)
def test_beside_exchange_blocks_have_equally_many_rows_of_a_last_tile_with_a_few_more_than_a_narrow_one(
    problem, shares_columns
):
    columns = column_tiles(problem)
    for task in tasks_of_rows(problem):
        if task.rows == TILE_ROWS:
            continue
        rows = [part.rows for part in parts_of(problem, task, shares_columns=shares_columns, exchanges=True)]
        few = task.rows - BLOCK_ROWS
        if task.column_tile == columns[task.gemm] - 1 and task.column_tile % 2 == 0:
            assert rows == [BLOCK_ROWS, few], "a column tile without a second one to exchange"
        else:
            assert rows == [[BLOCK_ROWS] * 2, [few] * 2][task.column_tile % 2]


GATE_UP = steps.Task(Gemm.gate_up, 0, 0, 0, rows=130, column_tile=0, column_tiles=1)
SCHEDULE = with_fields(steps.exchange_schedule("gpu", 8), ring_tiles=1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((SCHEDULE, 256, GATE_UP, -1), "rank=-1. It needs to be 0 to 1."),
        ((SCHEDULE, 256, GATE_UP, 2), "rank=2. It needs to be 0 to 1."),
        ((SCHEDULE, 0, GATE_UP, 0), "hidden=0. It needs to be at least 1."),
        (
            (with_fields(SCHEDULE, tile=steps.TileSizes(16, 32, 64)), 256, GATE_UP, 0),
            "tile.rows=16. It needs to be 256, the rows of a GPU's tiles.",
        ),
        (
            (SCHEDULE, 256, changed(GATE_UP, gemm=Gemm.up_gradient), 0),
            "gemm=up_gradient. It needs to be one whose tiles have rows of an expert.",
        ),
    ],
)
def test_a_part_that_no_block_has_is_refused(arguments, complaint):
    with pytest.raises(ValueError, match=f"^schedule: {complaint}$"):
        steps.part_of_block(*arguments)
