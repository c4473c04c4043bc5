"""The signals between workers, dispatchers and ranks (ffi/common/protocol.h), run as a model in any order."""

import math
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given, settings

from tests.unit.agents_model import Group
from tests.unit.agents_order import Order, StaleRead, Stuck, orders
from tests.unit.agents_rank import NO_FAULTS, Faults, Launch
from tests.unit.schedule_model import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    Gemm,
    Problem,
    Signal,
    Site,
    problems,
    schedules,
    steps,
    stream,
    waits_of,
    with_fields,
)

PASSES = {"forward": FORWARD, "backward": BACKWARD}
either_pass = pytest.mark.parametrize("segment_tiles", PASSES.values(), ids=PASSES.keys())

# --- one launch of one rank: the ring ---------------------------------------------------------------------------------

few = st.integers(1, 8)
crowds = few | st.sampled_from([20, 132])


def one_launch(problem: Problem, faults: Faults = NO_FAULTS) -> Group:
    """A rank of its own whose slots name each expert as often as the problem has rows for it.

    In a backward pass, the least number of times that is filled up to so many rows.
    """
    zeros = problem.schedule.row_multiple - 1
    experts = [expert for expert, rows in enumerate(problem.rows_per_expert) for _ in range(rows - zeros)]
    experts += [-1] * (problem.shape.slots - len(experts))
    Random(len(experts)).shuffle(experts)
    return Group([Launch(1, problem.shape, problem.schedule, [experts])], faults)


def small_problems(**options):
    return problems(ranks=st.just(1), most=20, huge=50, **options)


@either_pass
@given(data=st.data(), order=orders)
@settings(max_examples=200)
def test_a_launch_ends_in_any_order_and_reads_only_what_is_right_with_any_legal_ring(segment_tiles, data, order):
    problem = data.draw(small_problems(workers=crowds, dispatchers=crowds, segment_tiles=segment_tiles))
    one_launch(problem).run(order)  # raises Stuck or StaleRead


def a_full_pipeline(**changes) -> Problem:
    """One expert of eight full tiles in four units, twice as much as the ring holds."""
    schedule = steps.Schedule(
        steps.TileSizes(rows=4, h_columns=8, columns=8),
        unit_tiles=2,
        lag_units=1,
        ring_tiles=4,
        workers=1,
        chunk_rows=2,
        dispatchers=1,
        narrow_rows=2,
        keep_tokens=0,
    )
    shape = steps.Shape(ranks=1, tokens=32, hidden=16, intermediate=16, num_experts=1, top_k=1)
    return Problem(shape, with_fields(schedule, **changes), [32])


def faults_found(groups, kinds: type[AssertionError] | tuple[type[AssertionError], ...]) -> int:
    """How many of the groups, each run in an order of its own, fail in one of the given ways; other ways are errors."""
    found = 0
    for seed, group in enumerate(groups):
        try:
            group.run(Order(seed, restlessness=[0.0, 0.02, 0.2][seed % 3]))
        except kinds:
            found += 1
    return found


def stuck_with(order: Order, tiles: int, **changes) -> list:
    """The waits that are not met with an expert of so many full tiles."""
    problem = a_full_pipeline(chunk_rows=4, **changes)
    problem = Problem(with_fields(problem.shape, tokens=4 * tiles), problem.schedule, [4 * tiles])
    with pytest.raises(Stuck) as stuck:
        one_launch(problem).run(order)
    return stuck.value.waits


@given(order=orders, lag=st.integers(0, 2), unit_tiles=few)
@settings(max_examples=50)
def test_one_ring_tile_fewer_than_the_least_is_stuck_at_the_pull_that_waits_forward(order, lag, unit_tiles):
    ring = (lag + 1) * unit_tiles - 1
    assume(ring > 0)
    # All units are full, and one tile finds no slot.
    waits = stuck_with(order, ring + 1, lag_units=lag, unit_tiles=unit_tiles, ring_tiles=ring)
    assert (steps.Wait(Signal.answers_written, 0, 2), 0) in waits


@given(order=orders, lag=st.integers(0, 2), unit_tiles=st.integers(1, 4), units=st.integers(1, 3))
@settings(max_examples=50)
def test_one_ring_tile_fewer_than_a_backward_pass_needs_is_stuck_at_the_same_pull(order, lag, unit_tiles, units):
    segment_tiles = units * unit_tiles
    ring = segment_tiles + 2 * lag * unit_tiles - 1
    assume(ring > 0)
    tiles = math.ceil((ring + 1) / segment_tiles) * segment_tiles  # all units and segments are full
    changes = {"lag_units": lag, "unit_tiles": unit_tiles, "ring_tiles": ring, "segment_tiles": segment_tiles}
    waits = stuck_with(order, tiles, **changes)
    # In a segment of one unit the first tile still waits for token_gradient, otherwise for the weight gradients.
    signal, target = (Signal.answers_written, 2) if units == 1 else (Signal.weight_gradients_written, 24)
    assert (steps.Wait(signal, 0, target), 0) in waits


@either_pass
@given(data=st.data(), order=orders, choice=st.integers(0, 2**31))
@settings(max_examples=80)
def test_a_release_that_is_dropped_is_reported_by_the_wait_that_misses_it(segment_tiles, data, order, choice):
    problem = data.draw(small_problems(workers=few, dispatchers=few, segment_tiles=segment_tiles))
    assume(sum(problem.rows_per_expert) > 0)
    items = stream(problem)
    item = items[choice % len(items)]
    release = steps.release_after(item)
    waits_before = waits_of(problem)
    waits = [wait for other in items for wait in waits_before(other)]
    missed = [wait for wait in waits if (wait.signal, wait.index) == (release.signal, release.index)]
    group = one_launch(problem, Faults(dropped=item))
    if not missed:  # the last tiles give their ring slots to nobody, the last segments their sums
        assert item.gemm in (Gemm.down, Gemm.token_gradient, *WEIGHT_GRADIENTS)
        group.run(order)
        return
    with pytest.raises(Stuck) as stuck:
        group.run(order)
    assert (missed[0], missed[0].target - release.amount) in stuck.value.waits
    assert f"for {release.signal.name}[{release.index}]: seen" in str(stuck.value)


@pytest.mark.parametrize("site", ["dispatch", "gate_up", "down"])
def test_a_role_that_skips_its_wait_reads_or_overwrites_what_it_must_not(site):
    problem = a_full_pipeline(workers=3, dispatchers=2)
    groups = [one_launch(problem, Faults(skipped_waits=frozenset({site}))) for _ in range(12)]
    assert faults_found(groups, StaleRead) > 0


@pytest.mark.parametrize("wait", ["combine tasks_done", "announce sums_written"])
def test_sums_at_experts_that_are_made_or_told_of_too_early_are_found(wait):
    full = a_full_pipeline(workers=3, dispatchers=2, summed_tiles=3)
    # Two ranks, of whose tokens every second one names either expert; a fourth tile of each has no room.
    shape = with_fields(full.shape, ranks=2, tokens=16, num_experts=2)
    launch = Launch(1, shape, full.schedule, [[slot % 2 for slot in range(16)]] * 2)
    Group([launch]).run(Order(0, restlessness=0.2))
    groups = [Group([launch], Faults(skipped_waits=frozenset({wait}))) for _ in range(12)]
    assert faults_found(groups, StaleRead) > 0


@pytest.mark.parametrize(
    "wait",
    [
        "gate_up",
        "h_gradient",
        "token_gradient",
        "weight_gradient h_gradients_written",
        "weight_gradient weight_gradients_written",  # sums are taken up before they are there, or overwritten
        "dispatch answers_written",
        "dispatch weight_gradients_written",
    ],
)
def test_a_role_of_a_backward_pass_that_skips_one_of_its_waits_is_found(wait):
    problem = two_experts_of_two_segments()
    groups = [one_launch(problem, Faults(skipped_waits=frozenset({wait}))) for _ in range(12)]
    assert faults_found(groups, StaleRead) > 0


def two_experts_of_two_segments(**changes) -> Problem:
    """As the full pipeline, but of a backward pass: experts of four full tiles and segments of two, units of one."""
    full = a_full_pipeline(workers=8, dispatchers=2, unit_tiles=1, lag_units=0, segment_tiles=2)
    shape = with_fields(full.shape, num_experts=2, hidden=8, intermediate=8)
    return Problem(shape, with_fields(full.schedule, **changes), [16, 16])


def test_sums_that_the_next_expert_overwrites_before_they_are_taken_up_are_found():
    problem = two_experts_of_two_segments(ring_tiles=8)
    _, of_first, of_second, _ = steps.segments(problem.schedule, problem.rows_per_expert)
    assert (of_first.first_tile, of_second.expert, of_second.sums_tile) == (2, 1, 2)
    # Left out before the first segment of the second expert, and nowhere else.
    skipped = frozenset({"weight_gradient weight_gradients_written[2]"})
    assert faults_found([one_launch(problem, Faults(skipped)) for _ in range(60)], StaleRead) > 0


# --- launches one after the other: banks and flags --------------------------------------------------------------------


@st.composite
def several_launches(draw):
    """Two to four launches of up to four ranks, of several shapes, forward and backward passes in any order; some ranks
    get or send no rows at all, and ranks may have different numbers of workers.
    """
    ranks = draw(st.integers(1, 4))
    local_experts = draw(st.integers(1, 3))
    num_experts = ranks * local_experts
    first_launch = draw(st.sampled_from([1, 2, 2**31 - 1, 2**32 - 2, 2**32 - 1]))
    random = Random(draw(st.integers(0, 2**32 - 1)))
    launches = []
    for number in range(draw(st.integers(2, 4))):
        shape = steps.Shape(
            ranks,
            tokens=draw(st.integers(0, 6)),
            hidden=8,
            intermediate=8,
            num_experts=num_experts,
            top_k=draw(st.integers(1, 2)),
            projections=draw(st.integers(1, 2)),
        )
        schedule = draw(schedules(shape, workers=few, dispatchers=few, tile_rows=st.sampled_from([1, 2, 4, 8])))
        liked = [expert for expert in range(num_experts) if random.random() < 0.6] or [-1]
        silent = {rank for rank in range(ranks) if random.random() < 0.2}
        experts = [
            [-1 if rank in silent or random.random() < 0.1 else random.choice(liked) for _ in range(shape.slots)]
            for rank in range(ranks)
        ]
        crews = draw(st.just([]) | st.lists(st.tuples(few, few), min_size=ranks, max_size=ranks))
        launches.append(Launch((first_launch + number) % 2**32, shape, schedule, experts, crews))
    return launches


@given(launches=several_launches(), order=orders)
@settings(max_examples=400)
def test_launches_follow_each_other_without_a_barrier_at_the_end(launches, order):
    # Raises where something stale is read, a launch finds counters that are not clear, a rank is two launches ahead, or
    # nobody can go on. The answer of every slot is checked by combine().
    group = Group(launches)
    group.run(order)
    assert group.begun == [len(launches)] * group.ranks


def test_a_rank_may_be_one_launch_ahead_of_its_peers():
    class Watched(list):
        widest = 0

        def __setitem__(self, rank, value):
            super().__setitem__(rank, value)
            Watched.widest = max(Watched.widest, max(self) - min(self))

    for seed in range(30):
        group = busy_launches(NO_FAULTS, list(ALTERNATIONS.values())[seed % 3])
        group.begun = Watched(group.begun)
        group.run(Order(seed, 0.02))
    assert Watched.widest == 1, "else the tests here would prove nothing about it"


# segment_tiles of launches that follow each other
ALTERNATIONS = {"forward": (0,), "backward": (1,), "forward and backward": (0, 1)}


def busy_launches(faults: Faults, passes: tuple[int, ...], ranks: int = 3, launches: int = 4) -> Group:
    """Launches of few rows for many workers and dispatchers, so that some have nothing to do and may be very late."""
    shape = steps.Shape(ranks, tokens=2, hidden=8, intermediate=8, num_experts=ranks, top_k=1)
    schedule = steps.Schedule(
        steps.TileSizes(2, 8, 8),
        1,
        0,
        ring_tiles=1,
        workers=3,
        chunk_rows=2,
        dispatchers=3,
        narrow_rows=1,
        keep_tokens=0,
    )
    # All rows go to the first rank in one launch and to the last in the next: the others have none.
    experts = [[[0, 0]] * ranks, [[ranks - 1, ranks - 1]] * ranks]
    schedules = [with_fields(schedule, segment_tiles=segment_tiles) for segment_tiles in passes]
    return Group([Launch(1 + i, shape, schedules[i % len(schedules)], experts[i % 2]) for i in range(launches)], faults)


BROKEN_RULES = {
    "sort does not wait for the other sorters": Faults(skipped_waits=frozenset({"sort"})),
    "inputs are published before they are staged": Faults(skipped_waits=frozenset({"publish"})),
    "walks begin before inputs_ready": Faults(skipped_waits=frozenset({"walk"})),
    "answers are announced before all tasks are done": Faults(skipped_waits=frozenset({"announce"})),
    "combine does not wait for answers_ready": Faults(skipped_waits=frozenset({"combine"})),
    "one bank of row counts": Faults(one_bank=frozenset({"rows_from"})),
    "one bank of counters": Faults(one_bank=frozenset({"counters"})),
}


@pytest.mark.parametrize("passes", ALTERNATIONS.values(), ids=ALTERNATIONS.keys())
@pytest.mark.parametrize("faults", BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
def test_a_rule_between_launches_that_is_broken_is_found(faults, passes):
    groups = [busy_launches(faults, passes) for _ in range(30)]
    if "sort" in faults.skipped_waits:
        groups = [many_sorters(faults, passes[0]) for _ in range(5)]
    assert faults_found(groups, AssertionError) > 0  # stale, stuck, unclear or too far ahead


def many_sorters(faults: Faults, segment_tiles: int = 0) -> Group:
    """One rank with more slots than one sorter sorts."""
    shape = steps.Shape(1, tokens=1100, hidden=1, intermediate=1, num_experts=1, top_k=1)
    schedule = steps.Schedule(
        steps.TileSizes(256, 1, 1),
        1,
        0,
        ring_tiles=2,
        workers=2,
        chunk_rows=256,
        dispatchers=1,
        narrow_rows=128,
        keep_tokens=0,
        segment_tiles=segment_tiles,
    )
    assert steps.num_sorters(shape, schedule) == 2
    return Group([Launch(1, shape, schedule, [[0] * 1100])], faults)


@given(order=orders, segment_tiles=st.integers(0, 2))
@settings(max_examples=8)
def test_several_sorters_sort_the_slots_of_a_rank(order, segment_tiles):
    many_sorters(NO_FAULTS, segment_tiles).run(order)


# --- words and messages -----------------------------------------------------------------------------------------------


@given(target=st.integers(0, 2**32 - 1), ahead=st.integers(0, 2**31 - 1))
@example(target=2**32 - 1, ahead=1)
@settings(max_examples=200)
def test_counters_survive_wrap_around(target, ahead):
    assert steps.has_reached((target + ahead) % 2**32, target)
    assert not steps.has_reached((target - ahead - 1) % 2**32, target)


@pytest.mark.parametrize(
    ("site", "signal", "index", "target", "seen", "seconds", "text"),
    [
        (
            Site.gate_up, Signal.rows_arrived, 17, 128, 96, 10.0,
            "jaxmoe: rank 3 sm 41 gate_up waited 10 s for rows_arrived[17]: seen 96 of 128.",
        ),
        (
            Site.combine, Signal.answers_ready, 5, 9, 8, 0.5,
            "jaxmoe: rank 3 sm 41 combine waited 0.5 s for answers_ready[5]: seen 8 of 9 (from rank 5).",
        ),
        (
            Site.publish, Signal.inputs_published, 0, 132, 2**32 - 1, 120.0,
            "jaxmoe: rank 3 sm 41 publish waited 120 s for inputs_published[0]: seen 4294967295 of 132.",
        ),
    ],
)  # fmt: skip
def test_a_wait_that_is_given_up_says_who_waited_where_for_what(site, signal, index, target, seen, seconds, text):
    failure = steps.WaitFailure(rank=3, worker=41, site=site, wait=steps.Wait(signal, index, target), seen=seen)
    assert steps.describe(failure, seconds, "sm") == text


def test_every_signal_is_a_counter_of_the_rank_a_counter_per_tile_or_a_flag_from_peers():
    names = [signal.name for signal in map(Signal, range(len(Signal.__members__)))]
    of_rank = ["histograms_written", "inputs_published", "tasks_done", "experts_wanted", "sums_written"]
    assert names[: len(of_rank)] == of_rank
    assert [name for name in names if steps.is_per_tile(Signal.__members__[name])] == names[len(of_rank) : -3]
    assert [name for name in names if steps.is_from_peers(Signal.__members__[name])] == names[-3:]
    assert names[-3:] == ["inputs_ready", "experts_answered", "answers_ready"]


@given(problem=small_problems(workers=few, dispatchers=few))
@settings(max_examples=50)
def test_tasks_wait_for_the_gemm_whose_results_they_read(problem):
    results_of = {
        Gemm.gate_up: {Signal.rows_arrived},
        Gemm.down: {Signal.h_written},
        Gemm.h_gradient: {Signal.h_written},
        Gemm.token_gradient: {Signal.h_gradients_written},
    } | {gemm: {Signal.h_gradients_written, Signal.weight_gradients_written} for gemm in WEIGHT_GRADIENTS}
    waits_before = waits_of(problem)
    for item in stream(problem):
        waits = {wait.signal for wait in waits_before(item)}
        assert isinstance(item, steps.Chunk) or waits <= results_of[item.gemm]
