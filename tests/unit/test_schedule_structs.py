"""Shapes and schedules as Python sees them: what they derive, how they compare, which values are refused."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from tests.unit.schedule_model import steps, with_fields

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


@given(tile_rows=st.sampled_from([1, 2, 3, 4, 8, 12, 16, 64, 256]))
def test_rows_are_filled_up_to_a_quarter_of_a_tile_in_backward_passes_alone(tile_rows):
    forward = with_fields(SCHEDULE, tile=steps.TileSizes(tile_rows, 8, 8), narrow_rows=0)
    backward = with_fields(forward, segment_tiles=2)
    assert forward.row_multiple == 1
    assert backward.row_multiple == max(tile_rows // 4, 1)
    assert tile_rows % backward.row_multiple == 0, "so that no tile begins with rows of zeros"


def test_structs_compare_by_value_and_say_what_they_hold():
    again = with_fields(SHAPE)
    assert again == SHAPE
    assert len({again, SHAPE}) == 1
    assert with_fields(SHAPE, top_k=2) != SHAPE
    assert SHAPE != SCHEDULE
    assert repr(SHAPE) == "Shape(ranks=2, tokens=8, hidden=64, intermediate=32, num_experts=4, top_k=1, projections=2)"
    assert with_fields(SCHEDULE, segment_tiles=3).segment_tiles == 3
    assert with_fields(SCHEDULE, segment_tiles=3) != SCHEDULE


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (lambda: steps.tasks(SHAPE, SCHEDULE, [1], 0), "rows_per_expert has 1 numbers. It needs one for each of the 2"),
        (lambda: steps.tasks(SHAPE, SCHEDULE, [1, -1], 0), "rows_per_expert=-1. It needs to be at least 0."),
        (lambda: steps.tasks(SHAPE, SCHEDULE, [-1, 1], 0), "rows_per_expert=-1. It needs to be at least 0."),
        (lambda: steps.tasks(SHAPE, SCHEDULE, [1, 1], 3), "worker=3. It needs to be 0 to 2."),
        (lambda: steps.chunks(SHAPE, SCHEDULE, [1, 1], 5), "dispatcher=5. It needs to be 0 to 4."),
        (lambda: steps.units(with_fields(SCHEDULE, unit_tiles=0), [1]), "unit_tiles=0. It needs to be at least 1."),
        (lambda: steps.units(with_fields(SCHEDULE, narrow_rows=-1), [1]), "narrow_rows=-1. It needs to be 0 to 4."),
        (lambda: steps.units(with_fields(SCHEDULE, narrow_rows=5), [1]), "narrow_rows=5. It needs to be 0 to 4."),
        (
            lambda: steps.segments(with_fields(SCHEDULE, segment_tiles=-1), [1]),
            "segment_tiles=-1. It needs to be at least",
        ),
        (lambda: steps.segments(SCHEDULE, [-1]), "rows_per_expert=-1. It needs to be at least 0."),
        (
            lambda: steps.weight_tasks(with_fields(SHAPE, projections=3), SCHEDULE),
            "projections=3. It needs to be 1 to 2.",
        ),
        (lambda: steps.num_sorters(with_fields(SHAPE, ranks=3), SCHEDULE), "num_experts=4 cannot be spread over"),
        (lambda: steps.needed_head(with_fields(SHAPE, tokens=2**24 + 1), SCHEDULE), "tokens * top_k=16777217."),
    ],
    ids=[
        *(
            "experts",
            "rows",
            "rows of the next",
            "worker",
            "dispatcher",
            "unit",
            "below",
            "above",
            "segment",
            "rows of segments",
        ),
        *("projections", "ranks", "slots"),
    ],
)
def test_what_common_would_divide_by_or_run_over_is_refused_with_its_value(ask, complaint):
    with pytest.raises(ValueError, match="schedule: ") as caught:
        ask()
    assert complaint in str(caught.value)


numbers = st.integers(0, 2**31 - 1)


@given(number=numbers, divisor=st.integers(1, 2**16) | st.integers(1, 2**31 - 1), multiple=numbers)
@example(number=2**31 - 1, divisor=1, multiple=0)
@example(number=2**31 - 1, divisor=2**31 - 1, multiple=1)
def test_quotients_that_are_found_without_a_division_are_those_of_one(number, divisor, multiple):
    at_limit = min(multiple * divisor, (2**31 - 1) // divisor * divisor)
    for dividend in (number, at_limit, max(at_limit - 1, 0)):
        assert steps.quotient(dividend, divisor) == dividend // divisor
