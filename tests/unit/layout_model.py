"""A rank's arena seen from its writers: which bytes each has for itself, and layers of every size.

Offsets and sizes come from the compiled code (`native.schedule()`), so a test that uses this tests that code.
"""

import itertools
from typing import NamedTuple

import hypothesis.strategies as st

from tests.unit.schedule_model import Problem, Signal, problems, schedules, steps, weight_matrices, with_fields

ALIGNMENT = steps.region_alignment
LAUNCH_NUMBERS = (6, 7)  # one of each parity
COUNTERS = [signal for signal in Signal.__members__.values() if not steps.is_from_peers(signal)]
FLAGS = [signal for signal in Signal.__members__.values() if steps.is_from_peers(signal)]
ELEMENTS = {2: "bfloat16", 4: "float32", 8: "float64"}  # one for each size
itemsizes = st.sampled_from(list(ELEMENTS))


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
            start = steps.word_of(layout, head, LAUNCH_NUMBERS[0], signal, source)
            assert start == steps.word_of(layout, head, LAUNCH_NUMBERS[1], signal, source), "flags have one bank"
            claim(start, steps.flag_bytes, "flags", f"{signal.name}[{source}]")
    for launch_number in LAUNCH_NUMBERS:
        for signal in COUNTERS:
            for index in range(head.row_tiles if steps.is_per_tile(signal) else 1):
                start = steps.word_of(layout, head, launch_number, signal, index)
                claim(start, 4, "counters", f"{signal.name}[{index}] of launch_number {launch_number}")
        for source in range(head.ranks):
            start = steps.rows_from_source(layout, head, launch_number, source)
            claim(start, head.local_experts * 4, "rows_from", f"rows from {source} of launch_number {launch_number}")
    for source in range(head.ranks):
        start = steps.slots_from_source(layout, head, source)
        claim(start, head.slots * 4, "source_slots", f"slots of {source}")
    return claims


def formats_of(itemsize: int):
    """Of a layer whose elements take so many bytes."""
    return steps.Formats.of(ELEMENTS[itemsize])


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
        for column in range(0, shape.hidden, tile.columns):
            columns = min(tile.columns, shape.hidden - column)
            claim("answers", slot * shape.hidden + column, columns, itemsize, f"output {column} of slot {slot}")
    if schedule.summed_tiles:
        claim_sums(claim, shape, schedule, itemsize)
    for sorter in range(steps.most_sorters(shape, schedule)):  # a rank with few workers has fewer
        claim("histograms", sorter * shape.num_experts, shape.num_experts, 4, f"histogram of sorter {sorter}")
    if schedule.keep_tokens:
        for source, token in itertools.product(range(1, shape.ranks), range(shape.tokens)):
            index = steps.kept_index(shape, 0, source, token)
            claim("kept_tokens", index * width, width, itemsize, f"kept token {token} of {source}")
            claim("kept_states", index, 1, 4, f"state of token {token} of {source}")
    h_columns = tile.columns if schedule.backward else tile.h_columns  # of the task that writes h
    for row in range(schedule.ring_tiles * tile.rows):
        claim("row_targets", row, 1, 4, f"target of ring row {row}")
        claim("rows", row * width, width, itemsize, f"ring row {row}")
        for first, columns in pieces(shape.intermediate, h_columns):
            claim("h", row * shape.intermediate + first, columns, itemsize, f"h {first} of ring row {row}")
    if schedule.backward:
        claim_gradients(claim, layout, shape, schedule, itemsize)
    return claims


def claim_sums(claim, shape, schedule, itemsize: int) -> None:
    """What only a forward pass has whose answers are added up at experts."""
    for tile, row in itertools.product(range(schedule.summed_tiles), range(schedule.tile.rows)):
        of = f"waiting answer {row} of tile {tile}"
        claim("answers", steps.waiting_answer(shape, schedule, tile, row) * shape.hidden, shape.hidden, itemsize, of)
    for rank, token in itertools.product(range(shape.ranks), range(shape.tokens)):
        of = f"sum of rank {rank} for token {token}"
        claim("answers", steps.sum_row(shape, schedule, rank, token) * shape.hidden, shape.hidden, itemsize, of)
        claim("summed_slots", rank * shape.tokens + token, 1, 4, of)
        claim("wanted_experts", rank * shape.tokens + token, 1, 4, of)
    for slot in range(shape.ranks * shape.slots):
        claim("answer_places", slot, 1, 4, f"place of slot {slot}")
        claim("answer_weights", slot, 1, number_bytes(itemsize), f"weight of slot {slot}")
    for slot in range(shape.slots):
        claim("routing_weights", slot, 1, number_bytes(itemsize), f"routing weight of slot {slot}")


def claim_gradients(claim, layout, shape, schedule, itemsize: int) -> None:
    """What only a backward pass has."""
    tile, number = schedule.tile, number_bytes(itemsize)
    for slot in range(shape.slots):
        claim("routing_weights", slot, 1, number, f"routing weight of slot {slot}")
        claim("routing_weight_gradients", slot, 1, number, f"gradient of the routing weight of slot {slot}")
    tiles = steps.gradient_tiles(shape, schedule)
    for row in range(schedule.ring_tiles * tile.rows):
        claim("row_routing_weights", row, 1, number, f"weight of ring row {row}")
        for column_tile in range(tiles):
            claim("row_products", row * tiles + column_tile, 1, number, f"product {column_tile} of ring row {row}")
        for which, (first, columns) in itertools.product(
            range(shape.projections), pieces(shape.intermediate, tile.h_columns)
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
        for row, (first, count) in itertools.product(range(rows), pieces(columns, tile.columns)):
            lines.append((f"{gemm.name} row {row} column {first}", start + row * columns + first, count))
        start += rows * columns
    for gemm, (_, columns) in weight_matrices(shape).items():
        for first, count in pieces(columns, tile.columns):
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
