"""Decoded weights (ffi/common/scheduler.h): a slot for each expert while its tasks run, without a circle of waits."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.unit.schedule_model import (
    WEIGHT_GRADIENTS,
    Problem,
    all_tasks,
    both_passes,
    problems,
    rows_of_tiles,
    steps,
    stream,
    waits_of,
    with_fields,
)

few = st.integers(1, 4)


def with_least_slots(problem: Problem, more: int = 0) -> Problem:
    schedule = with_fields(problem.schedule, weight_slots=1)
    slots = schedule.min_weight_slots + more
    assert slots > 0
    return problem._replace(schedule=with_fields(schedule, weight_slots=slots))


def waits_that_point_forward(problem: Problem) -> list[Any]:
    """As that of `schedule_model`, with each expert decoded right before its first chunk."""
    shape, schedule, rows_per_expert = problem
    experts = {weights.first_tile: weights for weights in steps.decoded_experts(schedule, rows_per_expert)}
    by_number = sorted(experts.values(), key=lambda weights: weights.nth)
    expert_of_tile = [weights for weights in by_number for _ in range(weights.tiles)]
    waits_before = waits_of(problem)
    released, forward = Counter(), []

    def wait_for(wait: Any) -> None:
        if released[wait.signal, wait.index] != wait.target:
            forward.append(wait)

    def decode(weights: Any) -> None:
        if weights.nth >= schedule.weight_slots:
            had = by_number[weights.nth - schedule.weight_slots]
            assert had.weight_slot(schedule) == weights.weight_slot(schedule)
            for row_tile in range(had.first_tile, had.first_tile + had.tiles):
                wait_for(steps.wait_for_answers(shape, schedule, row_tile))
        release = steps.release_after(weights)
        released[release.signal, release.index] += release.amount * schedule.dispatchers

    for item in stream(problem):
        if isinstance(item, steps.Chunk):
            if item.row_tile in experts:
                decode(experts.pop(item.row_tile))
        else:
            wait_for(steps.wait_before(expert_of_tile[item.row_tile], schedule.dispatchers))
        for wait in waits_before(item):
            wait_for(wait)
        release = steps.release_after(item)
        released[release.signal, release.index] += release.amount
    assert not experts, "every expert with rows is decoded"
    return forward


@both_passes
@given(data=st.data(), more=st.integers(0, 2))
@settings(max_examples=100)
def test_decoding_and_whoever_waits_for_it_stand_in_the_stream_behind_what_they_wait_for(segment_tiles, data, more):
    problem = data.draw(problems(workers=few, dispatchers=few, segment_tiles=segment_tiles))
    assert waits_that_point_forward(with_least_slots(problem, more)) == []


@pytest.mark.parametrize("segment_tiles", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("lag_units", [1, 2, 3])
def test_with_one_slot_fewer_than_the_least_some_wait_points_forward(segment_tiles, lag_units):
    shape = steps.Shape(ranks=1, tokens=40, hidden=4, intermediate=4, num_experts=10, top_k=1)
    schedule = steps.Schedule(steps.TileSizes(4, 4, 4), 1, lag_units, 99, 2, 4, 2, 0, 0, segment_tiles)
    least = with_least_slots(Problem(shape, schedule, [4] * 10))
    assert waits_that_point_forward(least) == []
    fewer = with_fields(least.schedule, weight_slots=least.schedule.weight_slots - 1)
    assert waits_that_point_forward(least._replace(schedule=fewer)) != []


@given(problem=problems())
@settings(max_examples=60)
def test_experts_that_have_rows_are_decoded_in_order_and_no_others(problem):
    experts = steps.decoded_experts(problem.schedule, problem.rows_per_expert)
    assert [weights.nth for weights in experts] == list(range(len(experts)))
    tiles = [weights.expert for weights in experts for _ in range(weights.tiles)]
    assert tiles == [expert for expert, _ in rows_of_tiles(problem)]
    assert [weights.first_tile for weights in experts] == [tiles.index(weights.expert) for weights in experts]


@both_passes
@given(data=st.data())
@settings(max_examples=40)
def test_a_pass_that_decodes_weights_makes_no_gradients_of_them_and_is_else_the_same(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
    wide = [task for task in all_tasks(problem) if task.gemm not in WEIGHT_GRADIENTS]
    assert all_tasks(with_least_slots(problem)) == wide
