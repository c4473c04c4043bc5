"""Who writes where in a rank's arena (ffi/common/layout.h): no two writers share a byte, no byte is forgotten."""

import itertools
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.unit.layout_model import (
    Claim,
    assert_apart,
    body_claims,
    formats_of,
    grown,
    head_claims,
    itemsizes,
    number_bytes,
    regions_of,
    small_problems,
)
from tests.unit.schedule_model import (
    BACKWARD,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    all_tasks,
    both_passes,
    problems,
    steps,
    weight_matrices,
    with_fields,
)


@both_passes
@given(data=st.data(), growth=st.integers(0, 5), itemsize=itemsizes)
@settings(max_examples=100)
def test_no_two_writers_share_a_byte_and_no_byte_is_without_a_writer(segment_tiles, data, growth, itemsize):
    problem = data.draw(small_problems(segment_tiles))
    head = grown(steps.needed_head(problem.shape, problem.schedule), growth)
    layout = steps.layout_of(problem.shape, problem.schedule, formats_of(itemsize), head)
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
        self.body = steps.layout_of(self.shape, self.schedule, formats_of(itemsize), head).body

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
            "h": (ring_row, 1, shape.intermediate, self.h_columns(task), self.itemsize),
            "projections": (ring_row, shape.projections, shape.intermediate, self.h_columns(task), self.itemsize),
            "row_products": (ring_row, 1, tiles, 1, number),
            "answers": (self.first_slots[task.row_tile], 1, shape.hidden, tile.columns, self.itemsize),
            "routing_weight_gradients": (self.first_slots[task.row_tile], 1, 1, 1, number),
        }[region]
        first = task.column_tile * columns
        count = min(task.column_tiles * columns, width - first)
        starts = [
            self.body[region][0] + (((first_row + row) * parts + part) * width + first) * size
            for row in range(task.rows)
            for part in range(parts)
        ]
        return [Claim(start, start + count * size, region, repr(task)) for start in starts]

    def h_columns(self, task) -> int:
        """Columns between the GEMMs that a task of one column tile writes."""
        return self.schedule.tile.h_columns if task.gemm == Gemm.gate_up else self.schedule.tile.columns

    def sums(self, task) -> list[Claim]:
        """Numbers of the weight sums that a task writes, its bias gradient left out."""
        tile, matrices = self.schedule.tile, weight_matrices(self.shape)
        rows, columns = matrices[task.gemm]
        sizes = {gemm: height * width for gemm, (height, width) in matrices.items()}
        before = sum(list(sizes.values())[: list(sizes).index(task.gemm)])
        first = task.column_tile * tile.columns
        lines = range(rows)[task.weight_row_tile * tile.rows :][: tile.rows]
        starts = [before + line * columns + first for line in lines]
        end = min(tile.columns, columns - first)
        return [Claim(start, start + end, "weight_sums", repr(task)) for start in starts]


def total(claims: list[Claim]) -> int:
    return sum(claim.end - claim.start for claim in claims)


# What the tasks of a GEMM write that may run at the same time: those of as many row tiles as the ring holds, or of all.
WRITTEN_IN_RINGS = {
    Gemm.gate_up: {False: ["h"], True: ["projections"]},  # in a forward pass, in a backward pass
    Gemm.h_gradient: {True: ["projections", "h", "row_products"]},  # projections in place
}
WRITTEN_IN_SLOTS = {Gemm.down: {False: ["answers"]}, Gemm.token_gradient: {True: ["answers"]}}


@both_passes
@given(data=st.data(), itemsize=itemsizes)
@settings(max_examples=60)
def test_tasks_that_may_run_at_the_same_time_write_apart(segment_tiles, data, itemsize):
    """Those of a GEMM of as many row tiles as the ring holds, and down and token_gradient tasks of all row tiles.

    Answers go to slots, as without sums at experts.
    """
    problem = data.draw(small_problems(segment_tiles))
    problem = problem._replace(schedule=with_fields(problem.schedule, summed_tiles=0))
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
    answers = [claim for task in first for claim in writers.written(task, "routing_weight_gradients")]
    assert_apart(answers)
    assert total(answers) == writers.body["routing_weight_gradients"][1]


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
    layout = steps.layout_of(shape, schedule, formats_of(2), steps.needed_head(shape, schedule))
    several = len(steps.segments(schedule, rows_per_expert)) > sum(rows > 0 for rows in rows_per_expert)
    assert layout.body["weight_sums"][1] > 0 or not several
