"""Where everything lies in a rank's arena (ffi/common/layout.h): no two writers share a byte, no byte is forgotten."""

import itertools
from collections import Counter
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tests.unit.schedule_model import Gemm, Problem, Signal, all_tasks, problems, schedules, steps, with_fields

ALIGNMENT = steps.region_alignment
EPOCHS = (6, 7)  # one of each parity
COUNTERS = [signal for signal in Signal.__members__.values() if not steps.is_from_peers(signal)]
FLAGS = [signal for signal in Signal.__members__.values() if steps.is_from_peers(signal)]
itemsizes = st.sampled_from([1, 2, 4, 8])


class Claim(NamedTuple):
    """Bytes that one writer has for itself."""

    start: int
    end: int
    region: str
    of: str


def grown(head, by: int):
    """A head that has seen larger launches."""
    return steps.HeadCapacity(head.ranks, head.local_experts + by, head.row_tiles + 2 * by, head.slots + 3 * by)


def regions_of(layout) -> dict[str, tuple[int, int]]:
    return layout.head | layout.body


def head_claims(layout, head) -> list[Claim]:
    """Every word, flag, row of counts and slot list of the head, in both banks."""
    claims = []

    def claim(start: int, size: int, region: str, of: str) -> None:
        claims.append(Claim(start, start + size, region, of))

    for signal in FLAGS:
        for source in range(head.ranks):
            start = steps.word_of(layout, head, EPOCHS[0], signal, source)
            assert start == steps.word_of(layout, head, EPOCHS[1], signal, source), "flags have one bank"
            claim(start, steps.flag_bytes, "flags", f"{signal.name}[{source}]")
    for epoch in EPOCHS:
        for signal in COUNTERS:
            for index in range(head.row_tiles if steps.is_per_tile(signal) else 1):
                start = steps.word_of(layout, head, epoch, signal, index)
                claim(start, 4, "counters", f"{signal.name}[{index}] of epoch {epoch}")
        for source in range(head.ranks):
            start = steps.rows_from_source(layout, head, epoch, source)
            claim(start, head.local_experts * 4, "rows_from", f"rows from {source} of epoch {epoch}")
    for source in range(head.ranks):
        start = steps.slots_from_source(layout, head, source)
        claim(start, head.slots * 4, "source_slots", f"slots of {source}")
    return claims


def body_claims(layout, problem: Problem, itemsize: int) -> list[Claim]:
    """Every row, tile and list of the body, as the roles of the kernel address them."""
    shape, schedule, _ = problem
    tile = schedule.tile
    starts = {name: offset for name, (offset, _) in layout.body.items()}
    claims = []

    def claim(region: str, first: int, count: int, size: int, of: str) -> None:
        start = starts[region] + first * size
        claims.append(Claim(start, start + count * size, region, of))

    if shape.ranks > 1:
        for token in range(shape.tokens):
            claim("tokens", token * shape.hidden, shape.hidden, itemsize, f"token {token}")
    for slot in range(shape.slots):
        for column in range(0, shape.hidden, tile.output_columns):
            columns = min(tile.output_columns, shape.hidden - column)
            claim("partials", slot * shape.hidden + column, columns, itemsize, f"output {column} of slot {slot}")
    for planner in range(steps.num_planners(shape, schedule)):
        claim("histograms", planner * shape.num_experts, shape.num_experts, 4, f"histogram of planner {planner}")
    if schedule.keep_tokens:
        for source, token in itertools.product(range(1, shape.ranks), range(shape.tokens)):
            index = steps.kept_index(shape, 0, source, token)
            claim("kept_tokens", index * shape.hidden, shape.hidden, itemsize, f"kept token {token} of {source}")
            claim("kept_states", index, 1, 4, f"state of token {token} of {source}")
    for ring_slot in range(schedule.ring_tiles):
        for row in range(ring_slot * tile.rows, (ring_slot + 1) * tile.rows):
            claim("row_targets", row, 1, 4, f"target of ring row {row}")
            claim("rows", row * shape.hidden, shape.hidden, itemsize, f"ring row {row}")
            for column in range(0, shape.intermediate, tile.hidden_columns):
                columns = min(tile.hidden_columns, shape.intermediate - column)
                claim("hidden", row * shape.intermediate + column, columns, itemsize, f"h {column} of ring row {row}")
    return claims


def assert_apart(claims: list[Claim]) -> None:
    ordered = sorted(claim for claim in claims if claim.start < claim.end)
    for one, other in itertools.pairwise(ordered):
        assert one.end <= other.start, f"{one} and {other} share bytes"


small_problems = problems(most=12, huge=30, workers=st.integers(1, 8), dispatchers=st.integers(1, 8))


@given(problem=small_problems, growth=st.integers(0, 5), itemsize=itemsizes)
@settings(max_examples=100)
def test_no_two_writers_share_a_byte_and_no_byte_is_without_a_writer(problem, growth, itemsize):
    head = grown(steps.needed_head(problem.shape, problem.schedule), growth)
    layout = steps.layout_of(problem.shape, problem.schedule, head, itemsize)
    regions = regions_of(layout)
    claims = head_claims(layout, head) + body_claims(layout, problem, itemsize)
    claimed = Counter(dict.fromkeys(regions, 0))
    for claim in claims:
        offset, size = regions[claim.region]
        assert offset <= claim.start <= claim.end <= offset + size, f"{claim} is not inside its region"
        claimed[claim.region] += claim.end - claim.start
    offset, size = regions["control"]
    assert_apart([*claims, Claim(offset, offset + size, "control", "control")])
    assert claimed | {"control": size} == {name: size for name, (_, size) in regions.items()}


@given(problem=small_problems, itemsize=itemsizes)
@settings(max_examples=60)
def test_tasks_that_may_run_at_the_same_time_write_apart(problem, itemsize):
    """Gate/up tasks of as many row tiles as the ring holds, and down tasks of all row tiles."""
    schedule, tile = problem.schedule, problem.schedule.tile
    tasks = all_tasks(problem)
    rows_of_tile = dict(sorted((task.row_tile, task.rows) for task in tasks))
    num_rows = sum(rows_of_tile.values())
    # A row's partial has the place of the slot that it comes from; each row has a slot of its own.
    first_slots = [0, *itertools.accumulate(rows_of_tile.values())]
    shape = with_fields(problem.shape, tokens=num_rows, top_k=1)
    layout = steps.layout_of(shape, schedule, steps.needed_head(shape, schedule), itemsize)

    def written(task) -> list[Claim]:
        region, first_row, width, columns = (
            ("hidden", task.ring_slot * tile.rows, shape.intermediate, tile.hidden_columns)
            if task.gemm == Gemm.gate_up
            else ("partials", first_slots[task.row_tile], shape.hidden, tile.output_columns)
        )
        first = task.column_tile * columns
        size = min(task.column_tiles * columns, width - first) * itemsize
        starts = [layout.body[region][0] + (first_row + row) * width * itemsize for row in range(task.rows)]
        return [
            Claim(start + first * itemsize, start + first * itemsize + size, region, repr(task)) for start in starts
        ]

    for window in range(0, len(rows_of_tile), schedule.ring_tiles):
        together = range(window, window + schedule.ring_tiles)
        gate_up = [task for task in tasks if task.gemm == Gemm.gate_up and task.row_tile in together]
        assert_apart([claim for task in gate_up for claim in written(task)])
    partials = [claim for task in tasks if task.gemm == Gemm.down for claim in written(task)]
    assert_apart(partials)
    assert sum(claim.end - claim.start for claim in partials) == layout.body["partials"][1]


@st.composite
def large_problems(draw):
    """Layers of the sizes in use and beyond, whose bytes do not fit 32 bits."""
    ranks = draw(st.integers(1, 64))
    top_k = draw(st.integers(1, 16))
    shape = steps.Shape(
        ranks=ranks,
        tokens=draw(st.integers(0, steps.max_slots // top_k)),
        hidden=draw(st.integers(1, 20000)),
        intermediate=draw(st.integers(1, 40000)),
        num_experts=ranks * draw(st.integers(1, 64)),
        top_k=top_k,
    )
    schedule = draw(schedules(shape, tile_rows=st.sampled_from([64, 128])))
    return Problem(shape, with_fields(schedule, ring_tiles=draw(st.integers(1, 4096))), [])


def bytes_of_regions(problem: Problem, head, itemsize: int, control_bytes: int) -> dict[str, int]:
    """The sizes once more, in integers without a limit."""
    shape, schedule, _ = problem
    ring_rows = schedule.ring_tiles * schedule.tile.rows
    kept = schedule.keep_tokens * (shape.ranks - 1) * shape.tokens
    return {
        "control": control_bytes,
        "flags": 2 * head.ranks * steps.flag_bytes,
        "counters": 2 * (3 + 3 * head.row_tiles) * 4,
        "rows_from": 2 * head.ranks * head.local_experts * 4,
        "source_slots": head.ranks * head.slots * 4,
        "tokens": shape.tokens * shape.hidden * itemsize if shape.ranks > 1 else 0,
        "partials": shape.slots * shape.hidden * itemsize,
        "histograms": steps.num_planners(shape, schedule) * shape.num_experts * 4,
        "kept_tokens": kept * shape.hidden * itemsize,
        "kept_states": kept * 4,
        "row_targets": ring_rows * 4,
        "rows": ring_rows * shape.hidden * itemsize,
        "hidden": ring_rows * shape.intermediate * itemsize,
    }


@given(problem=problems() | large_problems(), itemsize=itemsizes)
@settings(max_examples=200)
def test_regions_follow_each_other_aligned_and_their_sum_is_the_arena(problem, itemsize):
    head = steps.needed_head(problem.shape, problem.schedule)
    layout = steps.layout_of(problem.shape, problem.schedule, head, itemsize)
    _, control_bytes = layout.head["control"]
    assert control_bytes > 0
    end = 0
    for name, size in bytes_of_regions(problem, head, itemsize, control_bytes).items():
        if name == "tokens":
            assert layout.head_bytes == end
        assert regions_of(layout)[name] == (end, size)
        end += size + -size % ALIGNMENT
    assert layout.bytes == end


@given(ranks=st.integers(2, 8), tokens=st.integers(1, 40), data=st.data())
def test_every_token_of_every_peer_has_a_place_of_its_own_where_it_is_kept(ranks, tokens, data):
    shape = steps.Shape(ranks=ranks, tokens=tokens, hidden=1, intermediate=1, num_experts=ranks, top_k=1)
    rank = data.draw(st.integers(0, ranks - 1))
    peers = [source for source in range(ranks) if source != rank]
    places = [steps.kept_index(shape, rank, source, token) for source in peers for token in range(tokens)]
    assert sorted(places) == list(range((ranks - 1) * tokens))


@given(problem=large_problems())
@settings(max_examples=100)
def test_offsets_of_words_and_lists_stay_inside_their_regions_at_any_size(problem):
    head = steps.needed_head(problem.shape, problem.schedule)
    layout = steps.layout_of(problem.shape, problem.schedule, head, 2)
    last = head.ranks - 1
    last_word = steps.word_of(layout, head, EPOCHS[1], Signal.outputs_written, head.row_tiles - 1)
    assert last_word + 4 == sum(layout.head["counters"])
    last_flag = steps.word_of(layout, head, EPOCHS[1], Signal.partials_written, last)
    assert last_flag + steps.flag_bytes == sum(layout.head["flags"])
    last_counts = steps.rows_from_source(layout, head, EPOCHS[1], last)
    assert last_counts + head.local_experts * 4 == sum(layout.head["rows_from"])
    assert steps.slots_from_source(layout, head, last) + head.slots * 4 == sum(layout.head["source_slots"])


@given(data=st.data(), ranks=st.integers(1, 8), itemsize=itemsizes, other_itemsize=itemsizes)
@settings(max_examples=60)
def test_the_head_stays_in_place_whatever_the_launch_as_long_as_its_capacity_does(
    data, ranks, itemsize, other_itemsize
):
    some = data.draw(problems(ranks=st.just(ranks)))
    other = data.draw(problems(ranks=st.just(ranks)))
    needs = [steps.needed_head(problem.shape, problem.schedule) for problem in (some, other)]
    head = steps.HeadCapacity(
        ranks, *(max(getattr(need, field) for need in needs) for field in ("local_experts", "row_tiles", "slots"))
    )
    assert all(head.holds(need) for need in needs)
    layouts = [
        steps.layout_of(some.shape, some.schedule, head, itemsize),
        steps.layout_of(other.shape, other.schedule, head, other_itemsize),
    ]
    assert layouts[0].head == layouts[1].head
    assert layouts[0].head_bytes == layouts[1].head_bytes
    assert head_claims(layouts[0], head) == head_claims(layouts[1], head)
    for layout in layouts:
        assert min(offset for offset, _ in layout.body.values()) == layout.head_bytes


@given(problem=problems(), field=st.sampled_from(["ranks", "local_experts", "row_tiles", "slots"]))
def test_a_head_that_is_too_small_is_refused(problem, field):
    need = steps.needed_head(problem.shape, problem.schedule)
    sizes = {name: getattr(need, name) for name in ("ranks", "local_experts", "row_tiles", "slots")}
    assert need.holds(need)
    assert need.holds(steps.HeadCapacity(**sizes | {field: sizes[field] - 1})) == (field != "ranks")
    smaller = steps.HeadCapacity(**sizes | {field: max(0, sizes[field] - 1)})
    if smaller != need and smaller.ranks > 0:
        assert not smaller.holds(need)
        with pytest.raises(ValueError, match=r"schedule: the head is too small"):
            steps.layout_of(problem.shape, problem.schedule, smaller, 2)


@given(problem=problems() | large_problems())
@settings(max_examples=100)
def test_planners_are_as_many_as_have_about_a_thousand_slots_each_but_at_most_one_per_worker(problem):
    shape, schedule, _ = problem
    planners = steps.num_planners(shape, schedule)
    assert 1 <= planners <= schedule.workers
    assert planners == schedule.workers or planners * 1024 >= shape.slots
    assert planners == 1 or (planners - 1) * 1024 < shape.slots


@given(source=st.integers(0, steps.max_ranks - 1), slot=st.integers(0, steps.max_slots - 1))
@example(source=steps.max_ranks - 1, slot=steps.max_slots - 1)
@settings(max_examples=100)
def test_a_row_target_keeps_its_source_and_slot(source, slot):
    assert steps.unpack_row_target(steps.pack_row_target(source, slot)) == (source, slot)


def test_a_row_target_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"schedule: slot=16777216\. It needs to be 0 to 16777215"):
        steps.pack_row_target(0, steps.max_slots)
