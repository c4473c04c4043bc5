"""The order of one rank's work (ffi/common/scheduler.h, chunks.h): what is computed, by whom, in which order."""

import itertools
import math
from collections import Counter, defaultdict
from operator import attrgetter

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given, settings

from tests.unit.schedule_model import (
    BACKWARD,
    FIRST_PART,
    FORWARD,
    LAST_PART,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    Signal,
    all_chunks,
    all_tasks,
    columns_of,
    problems,
    steps,
    stream,
    waits_of,
    waits_that_point_forward,
    weight_matrices,
    weight_tiles,
    with_fields,
)

both_passes = pytest.mark.parametrize("segment_tiles", [FORWARD, BACKWARD], ids=["forward", "backward"])


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
    gate_up = {Gemm.gate_up: math.ceil(shape.intermediate / schedule.tile.hidden_columns)}
    outputs = math.ceil(shape.hidden / schedule.tile.output_columns)
    if not schedule.backward:
        return gate_up | {Gemm.down: outputs}
    gradients = math.ceil(shape.intermediate / schedule.tile.output_columns)
    return gate_up | {Gemm.hidden_gradient: gradients, Gemm.token_gradient: outputs}


about = attrgetter(
    "gemm", "expert", "row_tile", "ring_slot", "rows", "weight_row_tile", "part", "sums_tile"
)  # a task, but for its columns


def of_row_tiles(tasks) -> list:
    return [task for task in tasks if task.gemm not in WEIGHT_GRADIENTS]


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_every_tile_of_every_gemm_is_visited_exactly_once_with_its_rows_and_ring_slot(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
    schedule = problem.schedule
    expected = Counter(
        (gemm, expert, row_tile, row_tile % schedule.ring_tiles, rows, -1, 0, -1, column_tile)
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
            (gemm, *segment, row // tile.rows, s.part, s.sums_tile, column // tile.output_columns, 1)
            for gemm, (rows, columns) in weight_matrices(shape).items()
            for column in range(0, columns, tile.output_columns)
            for row in range(0, rows, tile.rows)
        ]
    found = [
        (*about(task), task.column_tile, task.column_tiles)
        for task in all_tasks(problem)
        if task.gemm in WEIGHT_GRADIENTS
    ]
    assert found == expected, "in this order, where rows vary fastest"


@given(problem=problems())
@settings(max_examples=100)
def test_a_forward_pass_has_no_weight_gradients_and_a_backward_pass_no_down(problem):
    gemms = {task.gemm for task in all_tasks(problem)}
    assert gemms.isdisjoint([Gemm.down] if problem.schedule.backward else [*WEIGHT_GRADIENTS, Gemm.hidden_gradient])
    assert problem.shape.projections == 2 or Gemm.up_gradient not in gemms


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
            wide = [tile for tile in tiles if tile not in narrow]
            for pair in (range(columns)[first : first + 2] for first in range(0, columns, 2)):
                expected += [(gemm, tile, [column]) for column in pair for tile in wide]
                expected += [(gemm, tile, list(pair)) for tile in tiles if tile in narrow]
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


few = st.integers(1, 8)


@both_passes
@given(data=st.data())
@settings(max_examples=150)
def test_every_wait_points_backwards_in_the_stream(segment_tiles, data):
    problem = data.draw(problems(workers=few, dispatchers=few, segment_tiles=segment_tiles))
    assert waits_that_point_forward(problem) == []


def targets_of(problem: Problem) -> dict:
    """What the words of row tiles and segments reach, worked out from the sizes alone."""
    releasing = {
        Gemm.gate_up: Signal.hidden_written,
        Gemm.down: Signal.outputs_written,
        Gemm.hidden_gradient: Signal.hidden_gradients_written,
        Gemm.token_gradient: Signal.outputs_written,
    }
    targets = {}
    for row_tile, (_, rows) in enumerate(rows_of_tiles(problem)):
        targets[Signal.rows_arrived, row_tile] = rows
        targets |= {(releasing[gemm], row_tile): columns for gemm, columns in column_tiles(problem).items()}
    if problem.schedule.backward:
        tasks = sum(weight_tiles(problem.shape, problem.schedule).values())
        for segment in steps.segments(problem.schedule, problem.rows_per_expert):
            targets[Signal.weight_gradients_written, segment.first_tile] = tasks
    return targets


@both_passes
@given(data=st.data())
@settings(max_examples=100)
def test_the_releases_of_a_row_tile_and_of_a_segment_add_up_to_what_is_waited_for(segment_tiles, data):
    problem = data.draw(problems(segment_tiles=segment_tiles))
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
            (Signal.hidden_gradients_written, tile)
            for tile in range(segment.first_tile, segment.first_tile + segment.tiles)
        ]
        if segment.part != FIRST_PART | LAST_PART and segment.sums_tile >= 0:
            expected.append((Signal.weight_gradients_written, segment.sums_tile))
        assert [(wait.signal, wait.index) for wait in steps.waits_before(shape, schedule, task)] == expected


@given(problem=problems(segment_tiles=BACKWARD))
@settings(max_examples=100)
def test_the_tiles_of_weight_gradients_are_counted_as_they_are_visited(problem):
    shape, schedule, _ = problem
    assert steps.weight_tasks(shape, schedule) == sum(weight_tiles(shape, schedule).values())
    assert steps.gradient_tiles(shape, schedule) == column_tiles(problem)[Gemm.hidden_gradient]


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


@given(tile_rows=st.sampled_from([1, 2, 3, 4, 8, 12, 16, 64, 256]))
def test_rows_are_filled_up_to_a_quarter_of_a_tile_in_backward_passes_alone(tile_rows):
    forward = with_fields(SCHEDULE, tile=steps.TileSizes(tile_rows, 8, 8), narrow_rows=0)
    backward = with_fields(forward, segment_tiles=2)
    assert forward.row_multiple == 1
    assert backward.row_multiple == max(tile_rows // 4, 1)
    assert tile_rows % backward.row_multiple == 0, "so that no tile begins with rows of zeros"


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


def test_a_mark_says_how_many_experts_behind_have_no_rows_either():
    assert steps.mark_experts_without_rows([0, 0, 3, 0, 7, 0, 0, 0]) == [-1, 0, 3, 0, 7, -2, -1, 0]
    assert steps.mark_experts_without_rows([1, 2]) == [1, 2]
    assert steps.mark_experts_without_rows([]) == []


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
        (lambda: steps.num_planners(with_fields(SHAPE, ranks=3), SCHEDULE), "num_experts=4 cannot be spread over"),
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


def test_structs_compare_by_value_and_say_what_they_hold():
    again = with_fields(SHAPE)
    assert again == SHAPE
    assert len({again, SHAPE}) == 1
    assert with_fields(SHAPE, top_k=2) != SHAPE
    assert SHAPE != SCHEDULE
    assert repr(SHAPE) == "Shape(ranks=2, tokens=8, hidden=64, intermediate=32, num_experts=4, top_k=1, projections=2)"
    assert with_fields(SCHEDULE, segment_tiles=3).segment_tiles == 3
    assert with_fields(SCHEDULE, segment_tiles=3) != SCHEDULE


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
        is_read = task.gemm == Gemm.hidden_gradient and task.row_tile in saved
        waits = steps.waits_before(shape, saving.schedule, task)
        if is_read:
            assert waits == [steps.Wait(Signal.rows_arrived, task.row_tile, task.rows)]
        else:
            assert waits == steps.waits_before(shape, schedule, before)
