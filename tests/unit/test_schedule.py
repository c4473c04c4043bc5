"""The order of one rank's work (ffi/common/scheduler.h): what is computed, by whom, in which order."""

import itertools
import math
from collections import Counter, defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given, settings

from tests.unit.schedule_model import (
    Gemm,
    Problem,
    Signal,
    all_chunks,
    all_tasks,
    columns_of,
    problems,
    steps,
    stream,
    waits_that_point_forward,
    with_fields,
)


def rows_of_tiles(problem: Problem) -> list[tuple[int, int]]:
    """(expert, rows) of each row tile, worked out from the counts alone."""
    tile_rows = problem.schedule.tile.rows
    return [
        (expert, min(tile_rows, rows - first))
        for expert, rows in enumerate(problem.rows_per_expert)
        for first in range(0, rows, tile_rows)
    ]


@given(problem=problems())
@settings(max_examples=150)
def test_every_tile_of_both_gemms_is_visited_exactly_once_with_its_rows_and_ring_slot(problem):
    shape, schedule, _ = problem
    columns = {Gemm.gate_up: steps.hidden_tiles(shape, schedule), Gemm.down: steps.output_tiles(shape, schedule)}
    expected = Counter(
        (gemm, expert, row_tile, row_tile % schedule.ring_tiles, rows, column_tile)
        for row_tile, (expert, rows) in enumerate(rows_of_tiles(problem))
        for gemm, num_columns in columns.items()
        for column_tile in range(num_columns)
    )
    walks = [steps.tasks(*problem, worker) for worker in range(schedule.workers)]
    assert expected == Counter(
        (task.gemm, task.expert, task.row_tile, task.ring_slot, task.rows, column_tile)
        for task in itertools.chain(*walks)
        for column_tile in columns_of(task)
    )
    assert len(walks[0]) - len(walks[-1]) <= 1, "tasks are dealt evenly"


def narrow_tiles(problem: Problem) -> list[int]:
    """The row tiles that are narrow, worked out from the counts alone: the last one of an expert, if of few rows."""
    tiles = rows_of_tiles(problem)
    last_tiles = {expert: row_tile for row_tile, (expert, _) in enumerate(tiles)}
    return [row_tile for row_tile in last_tiles.values() if tiles[row_tile][1] <= problem.schedule.narrow_rows]


@given(problem=problems())
@settings(max_examples=150)
def test_two_column_tiles_at_a_time_are_computed_of_narrow_tiles_and_of_no_others(problem):
    shape, schedule, _ = problem
    columns = {Gemm.gate_up: steps.hidden_tiles(shape, schedule), Gemm.down: steps.output_tiles(shape, schedule)}
    sizes = defaultdict(list)
    for task in all_tasks(problem):
        sizes[task.gemm, task.row_tile].append(task.column_tiles)
    for row_tile in range(len(rows_of_tiles(problem))):
        for gemm, num_columns in columns.items():
            in_pairs = [2] * (num_columns // 2) + [1] * (num_columns % 2)
            assert sizes[gemm, row_tile] == (in_pairs if row_tile in narrow_tiles(problem) else [1] * num_columns)


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


@given(problem=problems())
@settings(max_examples=150)
def test_units_of_an_expert_are_as_few_as_hold_its_tiles_balanced_and_contiguous(problem):
    schedule = problem.schedule
    units = steps.units(schedule, problem.rows_per_expert)
    tiles = rows_of_tiles(problem)
    covered = [(unit.expert, unit.rows_of_tile(i, schedule.tile.rows)) for unit in units for i in range(unit.tiles)]
    assert covered == tiles, "each tile once, in order, with its rows"
    assert [unit.first_tile for unit in units] == [0, *itertools.accumulate(unit.tiles for unit in units)][:-1]
    for expert, group in itertools.groupby(units, key=lambda unit: unit.expert):
        of_expert = list(group)
        sizes = [unit.tiles for unit in of_expert]
        assert len(sizes) == math.ceil(sum(sizes) / schedule.unit_tiles)
        assert max(sizes) <= schedule.unit_tiles
        assert max(sizes) - min(sizes) <= 1
        assert [unit.tile_of_expert for unit in of_expert] == [0, *itertools.accumulate(sizes)][:-1]
        assert {unit.rows_of_expert for unit in of_expert} == {problem.rows_per_expert[expert]}


@given(problem=problems())
@settings(max_examples=150)
def test_in_pairs_of_columns_the_row_tile_varies_fastest_and_down_comes_lag_units_after_gate_up(problem):
    shape, schedule, rows_per_expert = problem
    units = steps.units(schedule, rows_per_expert)
    narrow = narrow_tiles(problem)
    expected = []
    for step in range(len(units) + schedule.lag_units):
        for gemm, number, columns in (
            (Gemm.gate_up, step, steps.hidden_tiles(shape, schedule)),
            (Gemm.down, step - schedule.lag_units, steps.output_tiles(shape, schedule)),
        ):
            if 0 <= number < len(units):
                first = units[number].first_tile
                tiles = range(first, first + units[number].tiles)
                wide = [tile for tile in tiles if tile not in narrow]
                for pair in (range(columns)[first : first + 2] for first in range(0, columns, 2)):
                    expected += [(gemm, tile, [column]) for column in pair for tile in wide]
                    expected += [(gemm, tile, list(pair)) for tile in tiles if tile in narrow]
    assert [(task.gemm, task.row_tile, list(columns_of(task))) for task in all_tasks(problem)] == expected


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


@given(problem=problems(workers=st.integers(1, 8), dispatchers=st.integers(1, 8)))
@settings(max_examples=150)
def test_every_wait_points_backwards_in_the_stream(problem):
    assert waits_that_point_forward(problem) == []


@given(problem=problems())
@settings(max_examples=100)
def test_the_releases_of_a_row_tile_add_up_to_what_is_waited_for(problem):
    shape, schedule, _ = problem
    expected = {}
    for row_tile, (_, rows) in enumerate(rows_of_tiles(problem)):
        expected[Signal.rows_arrived, row_tile] = rows
        expected[Signal.hidden_written, row_tile] = steps.hidden_tiles(shape, schedule)
        expected[Signal.outputs_written, row_tile] = steps.output_tiles(shape, schedule)
    released = Counter()
    for item in stream(problem):
        release = steps.release_after(item)
        released[release.signal, release.index] += release.amount
        wait = steps.wait_before(shape, schedule, item)
        assert wait is None or wait.target == expected[wait.signal, wait.index]
    assert released == expected


def full_units(problem: Problem) -> Problem:
    """The same schedule for one expert whose units are all full: one more than what a ring of the least size holds."""
    schedule = problem.schedule
    rows = (schedule.min_ring_tiles + schedule.unit_tiles) * schedule.tile.rows
    shape = with_fields(problem.shape, ranks=1, tokens=rows, top_k=1, num_experts=1)
    return Problem(shape, with_fields(schedule, ring_tiles=schedule.min_ring_tiles), [rows])


@given(problem=problems(workers=st.integers(1, 8), dispatchers=st.integers(1, 8)))
@settings(max_examples=60)
def test_with_one_ring_tile_fewer_than_the_least_some_wait_points_forward(problem):
    least = full_units(problem)
    assume(least.schedule.min_ring_tiles > 1)
    assert waits_that_point_forward(least) == []
    fewer = with_fields(least.schedule, ring_tiles=least.schedule.min_ring_tiles - 1)
    assert waits_that_point_forward(least._replace(schedule=fewer)) != []


@given(problem=problems())
@settings(max_examples=150)
def test_no_launch_has_more_row_tiles_than_the_shape_allows_for(problem):
    # Its tokens are the fewest that can name so many experts.
    assert len(rows_of_tiles(problem)) <= steps.max_row_tiles(problem.shape, problem.schedule)


counts_of_sources = st.lists(st.integers(0, 30) | st.just(0), min_size=1, max_size=8)


@given(counts=counts_of_sources, first=st.integers(0, 7))
@example(counts=[0, 0, 0], first=1)
@example(counts=[1000, 1, 0, 7], first=3)
@settings(max_examples=200)
def test_rows_take_one_slot_of_each_source_in_turn_while_the_sources_last(counts, first):
    ranks = len(counts)
    turns = [(first + i) % ranks for i in range(ranks)]
    expected = [(s, position) for position in range(max(counts)) for s in turns if position < counts[s]]
    found = [steps.source_of_row(counts, row, first % ranks) for row in range(sum(counts))]
    assert [(at.source, at.position) for at in found] == expected
    assert steps.source_of_row(counts, sum(counts), first % ranks) is None, "no row behind the last"


@given(counts=counts_of_sources, first=st.integers(0, 7))
@settings(max_examples=200)
def test_rows_and_slots_of_sources_correspond_one_to_one_and_slots_come_in_order(counts, first):
    found = [steps.source_of_row(counts, row, first % len(counts)) for row in range(sum(counts))]
    for source, count in enumerate(counts):
        assert [at.position for at in found if at.source == source] == list(range(count))


@given(counts=counts_of_sources, first=st.integers(0, 7))
@settings(max_examples=200)
def test_neighbouring_rows_spread_over_all_sources_that_last(counts, first):
    found = [steps.source_of_row(counts, row, first % len(counts)) for row in range(sum(counts))]
    for row, at in enumerate(found):
        active = {source for source, count in enumerate(counts) if count > at.position}
        window = found[row : row + len(active)]
        lasting = all(counts[source] > window[-1].position for source in active)  # none of them ends in the window
        if lasting and len(window) == len(active):
            assert {near.source for near in window} == active


@given(table=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=8), expert=st.integers(0, 2))
def test_the_counts_of_an_expert_may_be_a_column_of_a_table(table, expert):
    column = [row[expert] for row in table]
    flat = [count for row in table for count in row]
    for row in range(sum(column) + 1):
        assert steps.source_of_row(flat[expert:], row, stride=3) == steps.source_of_row(column, row)


SHAPE = steps.Shape(ranks=2, tokens=8, hidden=64, intermediate=32, num_experts=4, top_k=1)
SCHEDULE = steps.Schedule(
    steps.TileSizes(4, 32, 64),
    2,
    1,
    ring_tiles=4,
    workers=3,
    chunk_rows=4,
    dispatchers=5,
    narrow_rows=2,
    keep_tokens=0,
)


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda: steps.tasks(SHAPE, SCHEDULE, [1], 0), "rows_per_expert has 1 numbers. It needs one for each of the 2"),
        (lambda: steps.tasks(SHAPE, SCHEDULE, [1, -1], 0), "rows_per_expert=-1. It needs to be at least 0."),
        (lambda: steps.tasks(SHAPE, SCHEDULE, [1, 1], 3), "worker=3. It needs to be 0 to 2."),
        (lambda: steps.chunks(SHAPE, SCHEDULE, [1, 1], 5), "dispatcher=5. It needs to be 0 to 4."),
        (lambda: steps.units(with_fields(SCHEDULE, unit_tiles=0), [1]), "unit_tiles=0. It needs to be at least 1."),
        (lambda: steps.units(with_fields(SCHEDULE, narrow_rows=-1), [1]), "narrow_rows=-1. It needs to be 0 to 4."),
        (lambda: steps.units(with_fields(SCHEDULE, narrow_rows=5), [1]), "narrow_rows=5. It needs to be 0 to 4."),
        (lambda: steps.num_planners(with_fields(SHAPE, ranks=3), SCHEDULE), "num_experts=4 cannot be spread over"),
        (lambda: steps.needed_head(with_fields(SHAPE, tokens=2**24 + 1), SCHEDULE), "tokens * top_k=16777217."),
    ],
    ids=["experts", "rows", "worker", "dispatcher", "unit", "below", "above", "ranks", "slots"],
)
def test_what_common_would_divide_by_or_run_over_is_refused_with_its_value(ask, complaint):
    with pytest.raises(ValueError, match="schedule: ") as caught:
        ask()
    assert complaint in str(caught.value)


def test_structs_compare_by_value_and_say_what_they_hold():
    again = with_fields(SHAPE)
    assert again == SHAPE
    assert len({again, SHAPE}) == 1
    assert with_fields(SHAPE, top_k=2) != SHAPE
    assert SHAPE != SCHEDULE
    assert repr(SHAPE) == "Shape(ranks=2, tokens=8, hidden=64, intermediate=32, num_experts=4, top_k=1)"
