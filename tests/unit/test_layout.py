"""Where everything lies in a rank's arena (ffi/common/layout.h): no two writers share a byte, no byte is forgotten."""

import itertools
import math
from collections import Counter
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tests.unit.schedule_model import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    Signal,
    all_tasks,
    problems,
    schedules,
    steps,
    weight_matrices,
    with_fields,
)

ALIGNMENT = steps.region_alignment
EPOCHS = (6, 7)  # one of each parity
COUNTERS = [signal for signal in Signal.__members__.values() if not steps.is_from_peers(signal)]
FLAGS = [signal for signal in Signal.__members__.values() if steps.is_from_peers(signal)]
itemsizes = st.sampled_from([1, 2, 4, 8])
both_passes = pytest.mark.parametrize("segment_tiles", [FORWARD, BACKWARD], ids=["forward", "backward"])


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


def number_bytes(itemsize: int) -> int:
    """Of a sum, or of a routing weight."""
    return max(itemsize, 4)


def pieces(size: int, of: int) -> list[tuple[int, int]]:
    """(first, size) of the pieces into which `size` is cut."""
    return [(first, min(of, size - first)) for first in range(0, size, of)]


def body_claims(layout, problem: Problem, itemsize: int) -> list[Claim]:
    """Every row, tile and list of the body, as the roles of the kernel address them."""
    shape, schedule, _ = problem
    tile = schedule.tile
    width = shape.hidden * (2 if schedule.backward else 1)  # a token, and the gradient of its output
    starts = {name: offset for name, (offset, _) in layout.body.items()}
    claims = []

    def claim(region: str, first: int, count: int, size: int, of: str) -> None:
        start = starts[region] + first * size
        claims.append(Claim(start, start + count * size, region, of))

    if shape.ranks > 1 or schedule.backward:
        for token in range(shape.tokens):
            claim("tokens", token * width, width, itemsize, f"token {token}")
    for slot in range(shape.slots):
        for column in range(0, shape.hidden, tile.output_columns):
            columns = min(tile.output_columns, shape.hidden - column)
            claim("partials", slot * shape.hidden + column, columns, itemsize, f"output {column} of slot {slot}")
    for planner in range(steps.most_planners(shape, schedule)):  # a rank with few workers has fewer
        claim("histograms", planner * shape.num_experts, shape.num_experts, 4, f"histogram of planner {planner}")
    if schedule.keep_tokens:
        for source, token in itertools.product(range(1, shape.ranks), range(shape.tokens)):
            index = steps.kept_index(shape, 0, source, token)
            claim("kept_tokens", index * width, width, itemsize, f"kept token {token} of {source}")
            claim("kept_states", index, 1, 4, f"state of token {token} of {source}")
    hidden_columns = tile.output_columns if schedule.backward else tile.hidden_columns  # of the task that writes h
    for row in range(schedule.ring_tiles * tile.rows):
        claim("row_targets", row, 1, 4, f"target of ring row {row}")
        claim("rows", row * width, width, itemsize, f"ring row {row}")
        for first, columns in pieces(shape.intermediate, hidden_columns):
            claim("hidden", row * shape.intermediate + first, columns, itemsize, f"h {first} of ring row {row}")
    if schedule.backward:
        claim_gradients(claim, layout, shape, schedule, itemsize)
    return claims


def claim_gradients(claim, layout, shape, schedule, itemsize: int) -> None:
    """What only a backward pass has."""
    tile, number = schedule.tile, number_bytes(itemsize)
    for slot in range(shape.slots):
        claim("weights", slot, 1, number, f"routing weight of slot {slot}")
        claim("weight_answers", slot, 1, number, f"gradient of the routing weight of slot {slot}")
    tiles = steps.gradient_tiles(shape, schedule)
    for row in range(schedule.ring_tiles * tile.rows):
        claim("row_weights", row, 1, number, f"weight of ring row {row}")
        for column_tile in range(tiles):
            claim("row_products", row * tiles + column_tile, 1, number, f"product {column_tile} of ring row {row}")
        for which, (first, columns) in itertools.product(
            range(shape.projections), pieces(shape.intermediate, tile.hidden_columns)
        ):
            start = (row * shape.projections + which) * shape.intermediate + first
            claim("projections", start, columns, itemsize, f"projection {which} column {first} of ring row {row}")
    if layout.body["weight_sums"][1]:
        for name, first, count in sums_of_weight_gradients(shape, tile):
            claim("weight_sums", first, count, number, name)


def sums_of_weight_gradients(shape, tile) -> list[tuple[str, int, int]]:
    """(name, first number, numbers) of each line of each tile of the weight gradients, then of the bias gradients."""
    lines, start = [], 0
    for gemm, (rows, columns) in weight_matrices(shape).items():
        for row, (first, count) in itertools.product(range(rows), pieces(columns, tile.output_columns)):
            lines.append((f"{gemm.name} row {row} column {first}", start + row * columns + first, count))
        start += rows * columns
    for gemm, (_, columns) in weight_matrices(shape).items():
        for first, count in pieces(columns, tile.output_columns):
            lines.append((f"bias of {gemm.name} column {first}", start + first, count))
        start += columns
    return lines


def assert_apart(claims: list[Claim]) -> None:
    ordered = sorted(claim for claim in claims if claim.start < claim.end)
    for one, other in itertools.pairwise(ordered):
        assert one.end <= other.start, f"{one} and {other} share bytes"


def small_problems(segment_tiles):
    few = st.integers(1, 8)
    return problems(most=12, huge=30, workers=few, dispatchers=few, segment_tiles=segment_tiles)


@both_passes
@given(data=st.data(), growth=st.integers(0, 5), itemsize=itemsizes)
@settings(max_examples=100)
def test_no_two_writers_share_a_byte_and_no_byte_is_without_a_writer(segment_tiles, data, growth, itemsize):
    problem = data.draw(small_problems(segment_tiles))
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


class Writers:
    """Where tasks write in the arena of a rank that gets all its rows from itself, a slot for each row."""

    def __init__(self, problem: Problem, itemsize: int):
        self.itemsize, self.schedule = itemsize, problem.schedule
        self.tasks = all_tasks(problem)
        rows_of_tile = dict(sorted((t.row_tile, t.rows) for t in self.tasks if t.gemm not in WEIGHT_GRADIENTS))
        self.row_tiles = len(rows_of_tile)
        # A row's partial has the place of the slot that it comes from.
        self.first_slots = [0, *itertools.accumulate(rows_of_tile.values())]
        self.shape = with_fields(problem.shape, tokens=sum(rows_of_tile.values()), top_k=1)
        head = steps.needed_head(self.shape, self.schedule)
        self.body = steps.layout_of(self.shape, self.schedule, head, itemsize).body

    def of(self, *gemms, row_tiles=None) -> list:
        """The tasks of some GEMMs, of some row tiles or segments where they are named."""
        return [t for t in self.tasks if t.gemm in gemms and (row_tiles is None or t.row_tile in row_tiles)]

    def written(self, task, region: str) -> list[Claim]:
        """Bytes of a region that a task writes, line by line."""
        tile, shape = self.schedule.tile, self.shape
        ring_row = task.ring_slot * tile.rows
        number = number_bytes(self.itemsize)
        tiles = steps.gradient_tiles(shape, self.schedule)
        # First row, parts of a row, numbers of a part, numbers of a column tile, bytes of a number.
        first_row, parts, width, columns, size = {
            "hidden": (ring_row, 1, shape.intermediate, self.hidden_columns(task), self.itemsize),
            "projections": (ring_row, shape.projections, shape.intermediate, self.hidden_columns(task), self.itemsize),
            "row_products": (ring_row, 1, tiles, 1, number),
            "partials": (self.first_slots[task.row_tile], 1, shape.hidden, tile.output_columns, self.itemsize),
            "weight_answers": (self.first_slots[task.row_tile], 1, 1, 1, number),
        }[region]
        first = task.column_tile * columns
        count = min(task.column_tiles * columns, width - first)
        starts = [
            self.body[region][0] + (((first_row + row) * parts + part) * width + first) * size
            for row in range(task.rows)
            for part in range(parts)
        ]
        return [Claim(start, start + count * size, region, repr(task)) for start in starts]

    def hidden_columns(self, task) -> int:
        """Columns between the GEMMs that a task of one column tile writes."""
        return self.schedule.tile.hidden_columns if task.gemm == Gemm.gate_up else self.schedule.tile.output_columns

    def sums(self, task) -> list[Claim]:
        """Numbers of the weight sums that a task writes, its bias gradient left out."""
        tile, matrices = self.schedule.tile, weight_matrices(self.shape)
        rows, columns = matrices[task.gemm]
        sizes = {gemm: height * width for gemm, (height, width) in matrices.items()}
        before = sum(list(sizes.values())[: list(sizes).index(task.gemm)])
        first = task.column_tile * tile.output_columns
        lines = range(rows)[task.weight_row_tile * tile.rows :][: tile.rows]
        starts = [before + line * columns + first for line in lines]
        end = min(tile.output_columns, columns - first)
        return [Claim(start, start + end, "weight_sums", repr(task)) for start in starts]


def total(claims: list[Claim]) -> int:
    return sum(claim.end - claim.start for claim in claims)


# What the tasks of a GEMM write that may run at the same time: those of as many row tiles as the ring holds, or of all.
WRITTEN_IN_RINGS = {
    Gemm.gate_up: {False: ["hidden"], True: ["projections"]},  # in a forward pass, in a backward pass
    Gemm.hidden_gradient: {True: ["projections", "hidden", "row_products"]},  # projections in place
}
WRITTEN_IN_SLOTS = {Gemm.down: {False: ["partials"]}, Gemm.token_gradient: {True: ["partials"]}}


@both_passes
@given(data=st.data(), itemsize=itemsizes)
@settings(max_examples=60)
def test_tasks_that_may_run_at_the_same_time_write_apart(segment_tiles, data, itemsize):
    """Those of a GEMM of as many row tiles as the ring holds, and down and token_gradient tasks of all row tiles."""
    problem = data.draw(small_problems(segment_tiles))
    backward, ring_tiles = problem.schedule.backward, problem.schedule.ring_tiles
    writers = Writers(problem, itemsize)
    for window in range(0, writers.row_tiles, ring_tiles):
        for gemm, regions in WRITTEN_IN_RINGS.items():
            together = writers.of(gemm, row_tiles=range(window, window + ring_tiles))
            for region in regions.get(backward, []):
                assert_apart([claim for task in together for claim in writers.written(task, region)])
    for gemm, regions in WRITTEN_IN_SLOTS.items():
        for region in regions.get(backward, []):
            claims = [claim for task in writers.of(gemm) for claim in writers.written(task, region)]
            assert_apart(claims)
            assert total(claims) == writers.body[region][1]


@given(problem=small_problems(BACKWARD), itemsize=itemsizes)
@settings(max_examples=60)
def test_every_slot_gets_one_gradient_of_its_routing_weight(problem, itemsize):
    """From the token_gradient task of its row that has the first columns."""
    writers = Writers(problem, itemsize)
    first = [task for task in writers.of(Gemm.token_gradient) if task.column_tile == 0]
    answers = [claim for task in first for claim in writers.written(task, "weight_answers")]
    assert_apart(answers)
    assert total(answers) == writers.body["weight_answers"][1]


@given(problem=small_problems(BACKWARD), itemsize=itemsizes)
@settings(max_examples=60)
def test_weight_gradients_of_a_segment_write_their_sums_apart_and_leave_none_out(problem, itemsize):
    writers = Writers(problem, itemsize)
    matrices = sum(rows * columns for rows, columns in weight_matrices(problem.shape).values())
    for segment in steps.segments(problem.schedule, problem.rows_per_expert):
        tasks = writers.of(*WEIGHT_GRADIENTS, row_tiles=[segment.first_tile])
        claims = [claim for task in tasks for claim in writers.sums(task)]
        assert_apart(claims)
        assert total(claims) == matrices


@given(problem=problems(segment_tiles=BACKWARD))
@settings(max_examples=150)
def test_there_is_room_for_sums_wherever_an_expert_has_two_segments(problem):
    shape, schedule, rows_per_expert = problem
    layout = steps.layout_of(shape, schedule, steps.needed_head(shape, schedule), 2)
    several = len(steps.segments(schedule, rows_per_expert)) > sum(rows > 0 for rows in rows_per_expert)
    assert layout.body["weight_sums"][1] > 0 or not several


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
        projections=draw(st.integers(1, 2)),
    )
    schedule = draw(schedules(shape, tile_rows=st.sampled_from([64, 128])))
    return Problem(shape, with_fields(schedule, ring_tiles=draw(st.integers(1, 4096))), [])


def bytes_of_regions(problem: Problem, head, itemsize: int, control_bytes: int) -> dict[str, int]:
    """The sizes once more, in integers without a limit."""
    shape, schedule, _ = problem
    ring_rows = schedule.ring_tiles * schedule.tile.rows
    kept = schedule.keep_tokens * (shape.ranks - 1) * shape.tokens
    backward = int(schedule.backward)
    token_bytes = (1 + backward) * shape.hidden * itemsize
    number = number_bytes(itemsize)
    hidden, intermediate, projections = shape.hidden, shape.intermediate, shape.projections
    gradient_tiles = math.ceil(intermediate / schedule.tile.output_columns)
    sums = (projections + 1) * hidden * intermediate + projections * intermediate + hidden
    several_segments = shape.ranks * shape.slots > schedule.segment_tiles * schedule.tile.rows
    return {
        "control": control_bytes,
        "flags": 2 * head.ranks * steps.flag_bytes,
        "counters": 2 * (3 + 5 * head.row_tiles) * 4,
        "rows_from": 2 * head.ranks * head.local_experts * 4,
        "source_slots": head.ranks * head.slots * 4,
        "tokens": shape.tokens * token_bytes if shape.ranks > 1 or backward else 0,
        "partials": shape.slots * shape.hidden * itemsize,
        "weights": backward * shape.slots * number,
        "weight_answers": backward * shape.slots * number,
        "histograms": min(max(math.ceil(shape.slots / 1024), 1), 128) * shape.num_experts * 4,
        "kept_tokens": kept * token_bytes,
        "kept_states": kept * 4,
        "row_targets": ring_rows * 4,
        "rows": ring_rows * token_bytes,
        "hidden": ring_rows * shape.intermediate * itemsize,
        "row_weights": backward * ring_rows * number,
        "row_products": backward * ring_rows * gradient_tiles * number,
        "projections": backward * ring_rows * projections * intermediate * itemsize,
        "weight_sums": backward * several_segments * sums * number,
    }


@given(problem=problems() | large_problems(), itemsize=itemsizes)
@settings(max_examples=300)
def test_regions_follow_each_other_aligned_and_their_sum_is_the_arena(problem, itemsize):
    head = steps.needed_head(problem.shape, problem.schedule)
    layout = steps.layout_of(problem.shape, problem.schedule, head, itemsize)
    _, control_bytes = layout.head["control"]
    assert control_bytes > 0
    end = 0
    assert list(regions_of(layout)) == list(bytes_of_regions(problem, head, itemsize, control_bytes))
    for name, size in bytes_of_regions(problem, head, itemsize, control_bytes).items():
        if name == "tokens":
            assert layout.head_bytes == end
        assert regions_of(layout)[name] == (end, size)
        end += size + -size % ALIGNMENT
    assert layout.bytes == end


PEERS_REACH = ["tokens", "partials", "weights", "weight_answers"]


def crews():
    """Workers and dispatchers: what a rank has for itself, as many as its GPU has room for."""
    return st.tuples(st.integers(1, 400), st.integers(1, 400))


@given(problem=problems() | large_problems(), growth=st.integers(0, 5), itemsize=itemsizes, one=crews(), other=crews())
@settings(max_examples=200)
def test_ranks_with_any_numbers_of_workers_have_the_same_layout_and_agree(problem, growth, itemsize, one, other):
    shape, schedule, _ = problem
    head = grown(steps.needed_head(shape, schedule), growth)
    crewed = [with_fields(schedule, workers=workers, dispatchers=dispatchers) for workers, dispatchers in (one, other)]
    layouts = [steps.layout_of(shape, each, head, itemsize) for each in crewed]
    assert layouts[0].head == layouts[1].head
    assert layouts[0].body == layouts[1].body
    assert layouts[0].bytes == layouts[1].bytes  # else one rank would make its arena larger and the other would not
    assert len({steps.agreement_of(shape, each, head, itemsize) for each in crewed}) == 1
    assert steps.needed_head(shape, crewed[0]) == steps.needed_head(shape, crewed[1])


@given(problem=problems() | large_problems(), itemsize=itemsizes)
def test_what_peers_reach_lies_before_what_a_rank_has_for_itself(problem, itemsize):
    shape, schedule, _ = problem
    body = steps.layout_of(shape, schedule, steps.needed_head(shape, schedule), itemsize).body
    ends = [sum(body[name]) for name in PEERS_REACH]
    assert max(ends) <= min(offset for name, (offset, _) in body.items() if name not in PEERS_REACH)


NUMBERS_OF_TILES = ("rows", "hidden_columns", "output_columns")
# What ranks have to have the same: another legal value of each number, `by` larger where any number will do.
OTHER_SHAPES = {
    "ranks": lambda shape, by: {"ranks": 2 * shape.ranks, "num_experts": 2 * shape.num_experts},
    "num_experts": lambda shape, by: {"num_experts": shape.num_experts + by * shape.ranks},
    "projections": lambda shape, by: {"projections": 3 - shape.projections},
} | {
    name: lambda shape, by, name=name: {name: getattr(shape, name) + by}
    for name in ("tokens", "hidden", "intermediate", "top_k")
}
OTHER_SCHEDULES = {
    "narrow_rows": lambda schedule, by: {"narrow_rows": abs(schedule.narrow_rows - 1)},
    "keep_tokens": lambda schedule, by: {"keep_tokens": 1 - schedule.keep_tokens},
    **{
        name: lambda schedule, by, name=name: {name: getattr(schedule, name) + by}
        for name in ("unit_tiles", "lag_units", "ring_tiles", "chunk_rows", "segment_tiles", "saved_tiles")
    },
    **{
        f"tile {name}": lambda schedule, by, name=name: {
            "tile": steps.TileSizes(*(getattr(schedule.tile, n) + by * (n == name) for n in NUMBERS_OF_TILES))
        }
        for name in NUMBERS_OF_TILES
    },
}
OTHER_HEADS = ("local_experts", "row_tiles", "slots")


@pytest.mark.parametrize("changed", [*OTHER_SHAPES, *OTHER_SCHEDULES, *OTHER_HEADS, "itemsize"])
@given(problem=problems(), by=st.integers(1, 9), itemsize=itemsizes)
def test_ranks_that_differ_in_anything_but_their_workers_do_not_agree(changed, problem, by, itemsize):
    shape, schedule, _ = problem
    need = steps.needed_head(shape, schedule)
    # Room for any of the changes, so that nothing else changes with them.
    room = {
        "local_experts": need.local_experts + 9,
        "row_tiles": 99 * need.row_tiles + 999,
        "slots": 99 * need.slots + 999,
    }

    def agreement(shape, schedule, itemsize=itemsize, **other_room: int) -> int:
        return steps.agreement_of(shape, schedule, steps.HeadCapacity(shape.ranks, **room | other_room), itemsize)

    if changed in OTHER_SHAPES:
        other = agreement(with_fields(shape, **OTHER_SHAPES[changed](shape, by)), schedule)
    elif changed in OTHER_SCHEDULES:
        other = agreement(shape, with_fields(schedule, **OTHER_SCHEDULES[changed](schedule, by)))
    elif changed == "itemsize":
        other = agreement(shape, schedule, itemsize + by)
    else:
        other = agreement(shape, schedule, **{changed: room[changed] + by})
    assert other != agreement(shape, schedule)


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
    last_word = steps.word_of(layout, head, EPOCHS[1], Signal.weight_gradients_written, head.row_tiles - 1)
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
def test_planners_are_as_many_as_have_about_a_thousand_slots_each_but_at_most_one_per_worker_and_128(problem):
    shape, schedule, _ = problem
    planners = steps.num_planners(shape, schedule)
    assert 1 <= planners <= min(schedule.workers, 128)
    assert planners == min(schedule.workers, 128) or planners * 1024 >= shape.slots
    assert planners == 1 or (planners - 1) * 1024 < shape.slots


@given(source=st.integers(0, steps.max_ranks - 1), slot=st.integers(0, steps.max_slots - 1))
@example(source=steps.max_ranks - 1, slot=steps.max_slots - 1)
@settings(max_examples=100)
def test_a_row_target_keeps_its_source_and_slot(source, slot):
    assert steps.unpack_row_target(steps.pack_row_target(source, slot)) == (source, slot)


def test_a_row_target_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"schedule: slot=16777216\. It needs to be 0 to 16777215"):
        steps.pack_row_target(0, steps.max_slots)
