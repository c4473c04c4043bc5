"""Units and segments (ffi/common/units.h): how the row tiles of an expert are cut into them."""

import itertools
import math

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.unit.schedule_model import BACKWARD, FIRST_PART, LAST_PART, both_passes, problems, rows_of_tiles, steps


def assert_few_balanced_and_contiguous(pieces: list, most: int) -> None:
    """Pieces of tiles that lie in each other's place; as few as hold their tiles, and of about equal size."""
    sizes = [piece.tiles for piece in pieces]
    assert len(sizes) == math.ceil(sum(sizes) / most)
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    ends = list(itertools.accumulate(sizes))
    assert [piece.first_tile - pieces[0].first_tile for piece in pieces] == [0, *ends][:-1]
    assert [piece.tile_of_expert - pieces[0].tile_of_expert for piece in pieces] == [0, *ends][:-1]


def experts_of(pieces: list) -> dict[int, list]:
    """Units or segments of each expert that has rows, in order."""
    return {expert: list(group) for expert, group in itertools.groupby(pieces, key=lambda piece: piece.expert)}


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_segments_of_an_expert_are_as_few_as_hold_its_tiles_balanced_and_contiguous(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
    schedule, tiles = problem.schedule, rows_of_tiles(problem)
    segments = steps.segments(schedule, problem.rows_per_expert)
    assert [segment.expert for segment in segments for _ in range(segment.tiles)] == [expert for expert, _ in tiles]
    assert [s.first_tile for s in segments] == [0, *itertools.accumulate(s.tiles for s in segments)][:-1]
    for expert, of_expert in experts_of(segments).items():
        assert of_expert[0].tile_of_expert == 0
        assert {segment.rows_of_expert for segment in of_expert} == {problem.rows_per_expert[expert]}
        # In a forward pass there is one segment.
        assert_few_balanced_and_contiguous(of_expert, schedule.segment_tiles or len(tiles))


@given(problem=problems(segment_tiles=BACKWARD))
@settings(max_examples=150)
def test_segments_hand_their_sums_on_from_one_to_the_next(problem):
    sums_tile = -1  # of the segment that used the memory of the sums last
    for of_expert in experts_of(steps.segments(problem.schedule, problem.rows_per_expert)).values():
        firsts = [bool(segment.part & FIRST_PART) for segment in of_expert]
        lasts = [bool(segment.part & LAST_PART) for segment in of_expert]
        assert firsts == [True] + [False] * (len(of_expert) - 1)
        assert lasts == [False] * (len(of_expert) - 1) + [True]
        for segment in of_expert:
            assert segment.sums_tile == sums_tile
            sums_tile = segment.first_tile if len(of_expert) > 1 else sums_tile


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_units_of_a_segment_are_as_few_as_hold_its_tiles_balanced_and_contiguous(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
    schedule = problem.schedule
    units = steps.units(schedule, problem.rows_per_expert)
    covered = [(unit.expert, unit.rows_of_tile(i, schedule.tile.rows)) for unit in units for i in range(unit.tiles)]
    assert covered == rows_of_tiles(problem), "each tile once, in order, with its rows"
    assert [unit.first_tile for unit in units] == [0, *itertools.accumulate(unit.tiles for unit in units)][:-1]
    for expert, of_expert in experts_of(units).items():
        assert of_expert[0].tile_of_expert == 0
        assert {unit.rows_of_expert for unit in of_expert} == {problem.rows_per_expert[expert]}
    for segment in steps.segments(schedule, problem.rows_per_expert):
        tiles = range(segment.first_tile, segment.first_tile + segment.tiles)
        of_segment = [unit for unit in units if unit.first_tile in tiles]
        assert of_segment[0].tile_of_expert == segment.tile_of_expert
        assert sum(unit.tiles for unit in of_segment) == segment.tiles
        assert_few_balanced_and_contiguous(of_segment, schedule.unit_tiles)
