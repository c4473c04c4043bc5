"""Waits and releases of tasks and chunks (ffi/common/scheduler.h, chunks.h): what each waits for stands before it."""

import math
from collections import Counter

import hypothesis.strategies as st
from hypothesis import assume, given, settings

from tests.unit.schedule_model import (
    BACKWARD,
    FIRST_PART,
    LAST_PART,
    TRAINED_OR_FROZEN,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    Signal,
    all_tasks,
    both_passes,
    column_tiles,
    problems,
    rows_of_tiles,
    steps,
    stream,
    waits_of,
    waits_that_point_forward,
    weight_tiles,
    with_fields,
)

few = st.integers(1, 8)


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_every_wait_points_backwards_in_the_stream(segment_tiles, data):
    problem = data.draw(problems(workers=few, dispatchers=few, segment_tiles=segment_tiles, frozen=TRAINED_OR_FROZEN))
    assert waits_that_point_forward(problem) == []


def targets_of(problem: Problem) -> dict:
    """What the words of row tiles and segments reach, worked out from the sizes alone."""
    releasing = {
        Gemm.gate_up: Signal.h_written,
        Gemm.down: Signal.answers_written,
        Gemm.h_gradient: Signal.h_gradients_written,
        Gemm.token_gradient: Signal.answers_written,
    }
    targets = {}
    for row_tile, (_, rows) in enumerate(rows_of_tiles(problem)):
        targets[Signal.rows_arrived, row_tile] = rows
        targets |= {(releasing[gemm], row_tile): columns for gemm, columns in column_tiles(problem).items()}
    if problem.schedule.backward and not problem.schedule.frozen:
        tasks = sum(weight_tiles(problem.shape, problem.schedule).values())
        for segment in steps.segments(problem.schedule, problem.rows_per_expert):
            targets[Signal.weight_gradients_written, segment.first_tile] = tasks
    return targets


@both_passes
@given(data=st.data())
@settings(max_examples=100)
def test_the_releases_of_a_row_tile_and_of_a_segment_add_up_to_what_is_waited_for(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles, frozen=TRAINED_OR_FROZEN))
    expected = targets_of(problem)
    waits_before = waits_of(problem)
    released = Counter()
    for item in stream(problem):
        release = steps.release_after(item)
        released[release.signal, release.index] += release.amount
        for wait in waits_before(item):
            assert wait.target == expected[wait.signal, wait.index]
    assert released == expected


@given(problem=problems(segment_tiles=BACKWARD, workers=few, dispatchers=few))
@settings(max_examples=100)
def test_weight_gradients_wait_for_every_row_tile_of_their_segment_and_for_the_sums_before(problem):
    shape, schedule, rows_per_expert = problem
    segments = {segment.first_tile: segment for segment in steps.segments(schedule, rows_per_expert)}
    for task in all_tasks(problem):
        if task.gemm not in WEIGHT_GRADIENTS:
            continue
        segment = segments[task.row_tile]
        expected = [
            (Signal.h_gradients_written, tile) for tile in range(segment.first_tile, segment.first_tile + segment.tiles)
        ]
        if segment.part != FIRST_PART | LAST_PART and segment.sums_tile >= 0:
            expected.append((Signal.weight_gradients_written, segment.sums_tile))
        assert [(wait.signal, wait.index) for wait in steps.waits_before(shape, schedule, task)] == expected


def full_units(problem: Problem) -> Problem:
    """The same schedule for one expert whose units and segments are all full, one more than a least ring holds."""
    schedule = problem.schedule
    if schedule.backward:  # segments of whole units
        schedule = with_fields(schedule, segment_tiles=schedule.segment_tiles * schedule.unit_tiles)
    full = schedule.segment_tiles or schedule.unit_tiles
    rows = (math.ceil(schedule.min_ring_tiles / full) + 1) * full * schedule.tile.rows
    shape = with_fields(problem.shape, ranks=1, tokens=rows, top_k=1, num_experts=1)
    return Problem(shape, with_fields(schedule, ring_tiles=schedule.min_ring_tiles), [rows])


@both_passes
@given(data=st.data())
@settings(max_examples=60)
def test_with_one_ring_tile_fewer_than_the_least_some_wait_points_forward(segment_tiles, data):
    least = full_units(data.draw(problems(workers=few, dispatchers=few, segment_tiles=segment_tiles)))
    assume(least.schedule.min_ring_tiles > 1)
    assert waits_that_point_forward(least) == []
    fewer = with_fields(least.schedule, ring_tiles=least.schedule.min_ring_tiles - 1)
    assert waits_that_point_forward(least._replace(schedule=fewer)) != []
