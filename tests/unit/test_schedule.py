"""The order of one rank's work (ffi/common/scheduler.h, chunks.h): what is computed, by whom, in which order."""

import itertools
from collections import Counter, defaultdict
from operator import attrgetter

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.unit.schedule_model import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    Signal,
    all_chunks,
    all_tasks,
    both_passes,
    column_tiles,
    columns_of,
    filled_up,
    problems,
    rows_of_tiles,
    steps,
    weight_matrices,
    weight_tiles,
    with_fields,
)

about = attrgetter(
    "gemm", "expert", "row_tile", "ring_slot", "rows", "weight_row_tile", "part", "sums_tile"
)  # a task, but for its columns

task_of = attrgetter(
    "gemm", "expert", "row_tile", "ring_slot", "rows", "column_tile", "column_tiles", "part"
)  # all that one without a weight gradient has


def of_row_tiles(tasks) -> list:
    return [task for task in tasks if task.gemm not in WEIGHT_GRADIENTS]


def has_row_halves(problem: Problem, rows: int, column_tile: int, num_columns: int) -> bool:
    """Whether it is a task of a pair of columns, and its tile has a few rows more than a narrow one."""
    narrow_rows = problem.schedule.narrow_rows
    in_a_pair = column_tile < num_columns // 2 * 2
    return in_a_pair and narrow_rows < rows <= narrow_rows + narrow_rows // 2


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_every_tile_of_every_gemm_is_visited_exactly_once_with_its_rows_and_ring_slot(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
    schedule = problem.schedule
    expected = Counter(
        (
            *(gemm, expert, row_tile, row_tile % schedule.ring_tiles, rows, -1),
            steps.ROW_HALVES if has_row_halves(problem, rows, column_tile, num_columns) else 0,
            *(-1, column_tile),
        )
        for row_tile, (expert, rows) in enumerate(rows_of_tiles(problem))
        for gemm, num_columns in column_tiles(problem).items()
        for column_tile in range(num_columns)
    )
    walks = [steps.tasks(*problem, worker) for worker in range(schedule.workers)]
    assert expected == Counter(
        (*about(task), column_tile)
        for task in of_row_tiles(itertools.chain(*walks))
        for column_tile in columns_of(task)
    )
    assert len(walks[0]) - len(walks[-1]) <= 1, "tasks are dealt evenly"


@given(problem=problems(segment_tiles=BACKWARD))
@settings(max_examples=150)
def test_every_tile_of_every_weight_gradient_is_visited_once_per_segment_with_its_rows_ring_slot_and_sums(problem):
    shape, schedule, _ = problem
    tile = schedule.tile
    rows_of = [rows for _, rows in rows_of_tiles(problem)]
    expected = []
    for s in steps.segments(schedule, problem.rows_per_expert):
        segment = s.expert, s.first_tile, s.first_tile % schedule.ring_tiles, sum(rows_of[s.first_tile :][: s.tiles])
        expected += [
            (gemm, *segment, row // tile.rows, s.part, s.sums_tile, column // tile.columns, 1)
            for gemm, (rows, columns) in weight_matrices(shape).items()
            for column in range(0, columns, tile.columns)
            for row in range(0, rows, tile.rows)
        ]
    found = [
        (*about(task), task.column_tile, task.column_tiles)
        for task in all_tasks(problem)
        if task.gemm in WEIGHT_GRADIENTS
    ]
    assert found == expected, "in this order, where rows vary fastest"


@given(problem=problems(segment_tiles=BACKWARD))
@settings(max_examples=100)
def test_the_tiles_of_weight_gradients_are_counted_as_they_are_visited(problem):
    shape, schedule, _ = problem
    assert steps.weight_tasks(shape, schedule) == sum(weight_tiles(shape, schedule).values())
    assert steps.gradient_tiles(shape, schedule) == column_tiles(problem)[Gemm.h_gradient]


@given(problem=problems(segment_tiles=BACKWARD))
@settings(max_examples=100)
def test_beside_frozen_experts_a_backward_pass_has_the_same_tasks_but_for_those_of_weight_gradients(problem):
    frozen = problem._replace(schedule=with_fields(problem.schedule, frozen=1))
    assert [task_of(task) for task in all_tasks(frozen)] == [task_of(task) for task in of_row_tiles(all_tasks(problem))]
    assert problem.schedule.has_weight_gradients
    assert not frozen.schedule.has_weight_gradients


@given(problem=problems())
@settings(max_examples=100)
def test_a_forward_pass_has_no_weight_gradients_and_a_backward_pass_no_down(problem):
    gemms = {task.gemm for task in all_tasks(problem)}
    assert gemms.isdisjoint([Gemm.down] if problem.schedule.backward else [*WEIGHT_GRADIENTS, Gemm.h_gradient])
    assert problem.shape.projections == 2 or Gemm.up_gradient not in gemms


def in_pairs(problem: Problem, gemm) -> bool:
    """Whether narrow tiles have two column tiles at a time, one for each of the blocks that share a task."""
    return gemm != Gemm.down or not problem.schedule.share_columns


def narrow_tiles(problem: Problem) -> list[int]:
    """The row tiles that are narrow, worked out from the counts alone: the last one of an expert, if of few rows."""
    tiles = rows_of_tiles(problem)
    last_tiles = {expert: row_tile for row_tile, (expert, _) in enumerate(tiles)}
    return [row_tile for row_tile in last_tiles.values() if tiles[row_tile][1] <= problem.schedule.narrow_rows]


@given(problem=problems())
@settings(max_examples=200)
def test_two_column_tiles_at_a_time_are_computed_of_narrow_tiles_and_of_no_others(problem):
    columns = column_tiles(problem)
    sizes = defaultdict(list)
    for task in all_tasks(problem):
        sizes[task.gemm, task.row_tile].append(task.column_tiles)
    assert {size for (gemm, _), tiles in sizes.items() if gemm in WEIGHT_GRADIENTS for size in tiles} <= {1}
    for row_tile in range(len(rows_of_tiles(problem))):
        for gemm, num_columns in columns.items():
            is_paired = row_tile in narrow_tiles(problem) and in_pairs(problem, gemm)
            pairs = [2] * (num_columns // 2) + [1] * (num_columns % 2)
            assert sizes[gemm, row_tile] == (pairs if is_paired else [1] * num_columns)


@given(problem=problems())
@settings(max_examples=150)
def test_no_expert_has_two_narrow_tiles_nor_one_before_its_last(problem):
    tiles = rows_of_tiles(problem)
    narrow = {task.row_tile for task in all_tasks(problem) if task.column_tiles == 2}
    for row_tile in narrow:
        expert, rows = tiles[row_tile]
        assert rows <= problem.schedule.narrow_rows
        assert expert not in [later for later, _ in tiles[row_tile + 1 :]]


@given(problem=problems())
@settings(max_examples=150)
def test_every_row_is_pulled_exactly_once_into_its_place(problem):
    schedule = problem.schedule
    expected = Counter(
        (expert, first_row + row, row_tile, row_tile % schedule.ring_tiles, row)
        for row_tile, (expert, first_row, rows) in enumerate(
            (expert, first, min(schedule.tile.rows, num_rows - first))
            for expert, num_rows in enumerate(problem.rows_per_expert)
            for first in range(0, num_rows, schedule.tile.rows)
        )
        for row in range(rows)
    )
    chunks = [chunk for d in range(schedule.dispatchers) for chunk in steps.chunks(*problem, d)]
    assert all(1 <= chunk.rows <= schedule.chunk_rows for chunk in chunks)
    assert expected == Counter(
        (chunk.expert, chunk.first_row + row, chunk.row_tile, chunk.ring_slot, chunk.tile_row + row)
        for chunk in chunks
        for row in range(chunk.rows)
    )


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_in_pairs_of_columns_the_row_tile_varies_fastest_and_every_gemm_comes_lag_units_later(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
    _, schedule, rows_per_expert = problem
    units = steps.units(schedule, rows_per_expert)
    narrow = narrow_tiles(problem)
    segment_at = {s.first_tile + s.tiles: s.first_tile for s in steps.segments(schedule, rows_per_expert)}  # by its end
    gemms = list(column_tiles(problem).items())
    expected = []
    for step in range(len(units) + (len(gemms) - 1) * schedule.lag_units):
        for stage, (gemm, columns) in enumerate(gemms):
            number = step - stage * schedule.lag_units
            if not 0 <= number < len(units):
                continue
            first = units[number].first_tile
            tiles = range(first, first + units[number].tiles)
            alone = narrow if in_pairs(problem, gemm) else []
            wide = [tile for tile in tiles if tile not in alone]
            for pair in (range(columns)[first : first + 2] for first in range(0, columns, 2)):
                expected += [(gemm, tile, [column]) for column in pair for tile in wide]
                expected += [(gemm, tile, list(pair)) for tile in tiles if tile in alone]
            if gemm == Gemm.token_gradient and tiles.stop in segment_at:
                expected.append(("weight gradients", segment_at[tiles.stop]))
    found = []
    for weights, tasks in itertools.groupby(all_tasks(problem), key=lambda task: task.gemm in WEIGHT_GRADIENTS):
        if weights:
            found += [("weight gradients", first) for first in dict.fromkeys(task.row_tile for task in tasks)]
        else:
            found += [(task.gemm, task.row_tile, list(columns_of(task))) for task in tasks]
    assert found == expected


@given(problem=problems())
@settings(max_examples=60)
def test_every_worker_and_dispatcher_takes_its_items_in_stream_order(problem):
    place = {task: i for i, task in enumerate(all_tasks(problem))}
    place |= {chunk: i for i, chunk in enumerate(all_chunks(problem))}
    walks = [steps.tasks(*problem, worker) for worker in range(problem.schedule.workers)]
    walks += [steps.chunks(*problem, dispatcher) for dispatcher in range(problem.schedule.dispatchers)]
    for walk in walks:
        places = [place[item] for item in walk]
        assert places == sorted(places)


@given(problem=problems(), data=st.data())
@settings(max_examples=200)
def test_walks_pass_marked_experts_without_rows_and_nothing_else_changes(problem, data):
    shape, schedule, rows_per_expert = problem
    spread = data.draw(st.lists(st.integers(0, 40), min_size=len(rows_per_expert), max_size=len(rows_per_expert)))
    rows = [number for empty, own in zip(spread, rows_per_expert, strict=True) for number in (*[0] * empty, own)]
    shape = with_fields(shape, num_experts=shape.ranks * len(rows))
    whole = steps.mark_experts_without_rows(rows)
    # What a GPU marks ends with every 32nd expert.
    parts = [rows[first : first + 32] for first in range(0, len(rows), 32)]
    in_parts = [mark for part in parts for mark in steps.mark_experts_without_rows(part)]
    partly = [mark if mark > 0 else data.draw(st.integers(mark, 0)) for mark in whole]
    assert [max(mark, 0) for mark in whole] == rows
    worker, dispatcher = schedule.workers - 1, schedule.dispatchers - 1
    for marked in (whole, in_parts, partly):
        assert steps.segments(schedule, marked) == steps.segments(schedule, rows)
        assert steps.units(schedule, marked) == steps.units(schedule, rows)
        assert steps.tasks(shape, schedule, marked, worker) == steps.tasks(shape, schedule, rows, worker)
        assert steps.chunks(shape, schedule, marked, dispatcher) == steps.chunks(shape, schedule, rows, dispatcher)


@given(problem=problems())
@settings(max_examples=150)
def test_experts_that_are_taken_off_the_way_to_the_first_chunk_change_no_chunk(problem):
    shape, schedule, rows_per_expert = problem
    for rows in (rows_per_expert, steps.mark_experts_without_rows(rows_per_expert)):
        for dispatcher in range(schedule.dispatchers):
            passed = steps.chunks(shape, schedule, rows, dispatcher, passes=True)
            assert passed == steps.chunks(shape, schedule, rows, dispatcher)


@both_passes
@given(data=st.data())
@settings(max_examples=200)
def test_a_worker_that_passes_many_experts_of_one_unit_finds_the_tasks_of_one_that_passes_none(segment_tiles, data):
    shape, schedule, _ = data.draw(problems(ranks=st.just(1), segment_tiles=segment_tiles))
    most_rows = (schedule.unit_tiles + 1) * schedule.tile.rows
    sizes = st.lists(st.integers(0, most_rows), min_size=1, max_size=15 if schedule.backward else 60)
    rows = filled_up(schedule, data.draw(sizes))
    shape = with_fields(shape, num_experts=len(rows), tokens=sum(rows))
    if schedule.backward:
        saved_tiles, frozen = data.draw(st.integers(0, 3 * len(rows))), data.draw(st.integers(0, 1))
        schedule = with_fields(schedule, saved_tiles=saved_tiles, frozen=frozen)
    # One that takes every task has a next section at most one task away.
    every = steps.tasks(shape, with_fields(schedule, workers=1), rows, 0, walks=True)
    workers = data.draw(st.integers(1, 300))
    for marked in (rows, steps.mark_experts_without_rows(rows)):
        for worker in {0, workers // 2, workers - 1}:
            schedule = with_fields(schedule, workers=workers)
            assert steps.tasks(shape, schedule, marked, worker, walks=True) == every[worker::workers]


def test_a_mark_says_how_many_experts_behind_have_no_rows_either():
    assert steps.mark_experts_without_rows([0, 0, 3, 0, 7, 0, 0, 0]) == [-1, 0, 3, 0, 7, -2, -1, 0]
    assert steps.mark_experts_without_rows([1, 2]) == [1, 2]
    assert steps.mark_experts_without_rows([]) == []


@given(problem=problems())
@settings(max_examples=150)
def test_no_launch_has_more_row_tiles_than_the_shape_allows_for(problem):
    # Its tokens are the fewest that can name so many experts.
    assert len(rows_of_tiles(problem)) <= steps.max_row_tiles(problem.shape, problem.schedule)


# --- what the forward pass has saved ----------------------------------------------------------------------------------


@given(problem=problems(segment_tiles=BACKWARD), saved_tiles=st.integers(0, 40))
@settings(max_examples=100)
def test_saved_units_have_no_gate_up_their_hidden_gradients_wait_for_rows_and_nothing_else_changes(
    problem, saved_tiles
):
    shape, schedule, rows_per_expert = problem
    saving = Problem(shape, with_fields(schedule, saved_tiles=saved_tiles), rows_per_expert)
    saved = {
        tile
        for unit in steps.units(schedule, rows_per_expert)
        if unit.first_tile + unit.tiles <= saved_tiles
        for tile in range(unit.first_tile, unit.first_tile + unit.tiles)
    }
    without, of_saved = all_tasks(problem), all_tasks(saving)
    left = [task for task in without if task.gemm != Gemm.gate_up or task.row_tile not in saved]
    assert [(about(task)[:6], columns_of(task)) for task in of_saved] == [
        (about(task)[:6], columns_of(task)) for task in left
    ]
    for task, before in zip(of_saved, left, strict=True):
        is_read = task.gemm == Gemm.h_gradient and task.row_tile in saved
        waits = steps.waits_before(shape, saving.schedule, task)
        if is_read:
            assert waits == [steps.Wait(Signal.rows_arrived, task.row_tile, task.rows)]
        else:
            assert waits == steps.waits_before(shape, schedule, before)


@given(problem=problems(ranks=st.just(1), segment_tiles=FORWARD), data=st.data())
@settings(max_examples=300)
def test_tasks_of_experts_with_one_narrow_tile_follow_from_their_numbers(problem, data):
    shape, schedule, _ = problem
    narrow_rows = data.draw(st.integers(1, schedule.tile.rows))
    lag = data.draw(st.integers(0, 40))
    ring_tiles = (lag + 1) * schedule.unit_tiles
    schedule = with_fields(schedule, lag_units=lag, ring_tiles=ring_tiles, narrow_rows=narrow_rows)
    schedule = with_fields(schedule, share_columns=data.draw(st.integers(0, 1)))
    rows = data.draw(st.lists(st.integers(0, narrow_rows), min_size=1, max_size=100))
    shape = with_fields(shape, num_experts=len(rows), tokens=sum(rows))
    for marked in (rows, steps.mark_experts_without_rows(rows)):
        for worker in range(schedule.workers):
            walked = steps.tasks(shape, schedule, marked, worker, walks=True)
            assert steps.tasks(shape, schedule, marked, worker) == walked
