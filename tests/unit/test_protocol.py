"""The signals between workers, dispatchers and ranks (ffi/common/protocol.h), run as a model in any order."""

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import assume, example, given, settings

from tests.unit.schedule_model import (
    NO_FAULTS,
    Faults,
    Gemm,
    Group,
    Launch,
    Order,
    Problem,
    Signal,
    Site,
    StaleRead,
    Stuck,
    orders,
    problems,
    schedules,
    steps,
    stream,
    with_fields,
)

# --- one launch of one rank: the ring ---------------------------------------------------------------------------------

few = st.integers(1, 8)
crowds = few | st.sampled_from([20, 132])


def one_launch(problem: Problem, faults: Faults = NO_FAULTS) -> Group:
    """A rank of its own whose slots name each expert as often as the problem has rows for it."""
    experts = [expert for expert, rows in enumerate(problem.rows_per_expert) for _ in range(rows)]
    experts += [-1] * (problem.shape.slots - len(experts))
    Random(len(experts)).shuffle(experts)
    return Group([Launch(1, problem.shape, problem.schedule, [experts])], faults)


def small_problems(**options):
    return problems(ranks=st.just(1), most=20, huge=50, **options)


@given(problem=small_problems(workers=crowds, dispatchers=crowds), order=orders)
@settings(max_examples=200)
def test_a_launch_ends_in_any_order_and_reads_only_what_is_right_with_any_legal_ring(problem, order):
    one_launch(problem).run(order)  # raises Stuck or StaleRead


def a_full_pipeline(**changes) -> Problem:
    """One expert of eight full tiles in four units, twice as much as the ring holds."""
    schedule = steps.Schedule(
        steps.TileSizes(rows=4, hidden_columns=8, output_columns=8),
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


@given(order=orders, lag=st.integers(0, 2), unit_tiles=few)
@settings(max_examples=50)
def test_one_ring_tile_fewer_than_the_least_is_stuck_at_the_pull_that_waits_forward(order, lag, unit_tiles):
    ring = (lag + 1) * unit_tiles - 1
    assume(ring > 0)
    problem = a_full_pipeline(lag_units=lag, unit_tiles=unit_tiles, ring_tiles=ring, chunk_rows=4)
    rows = 4 * (ring + 1)  # all units are full, and one tile finds no slot
    problem = Problem(with_fields(problem.shape, tokens=rows), problem.schedule, [rows])
    with pytest.raises(Stuck) as stuck:
        one_launch(problem).run(order)
    assert (steps.Wait(Signal.outputs_written, 0, 2), 0) in stuck.value.waits


@given(problem=small_problems(workers=few, dispatchers=few), order=orders, choice=st.integers(0, 2**31))
@settings(max_examples=80)
def test_a_release_that_is_dropped_is_reported_by_the_wait_that_misses_it(problem, order, choice):
    shape, schedule, rows_per_expert = problem
    assume(sum(rows_per_expert) > 0)
    items = stream(problem)
    item = items[choice % len(items)]
    release = steps.release_after(item)
    waits = [steps.wait_before(shape, schedule, other) for other in items]
    missed = [wait for wait in waits if wait and (wait.signal, wait.index) == (release.signal, release.index)]
    group = one_launch(problem, Faults(dropped=item))
    if not missed:  # the last tiles give their ring slots to nobody
        assert item.gemm == Gemm.down
        group.run(order)
        return
    with pytest.raises(Stuck) as stuck:
        group.run(order)
    assert (missed[0], missed[0].target - release.amount) in stuck.value.waits
    assert f"for {release.signal.name}[{release.index}]: seen" in str(stuck.value)


@pytest.mark.parametrize("site", ["dispatch", "gate_up", "down"])
def test_a_role_that_skips_its_wait_reads_or_overwrites_what_it_must_not(site):
    problem = a_full_pipeline(workers=3, dispatchers=2)
    groups = [one_launch(problem, Faults(skipped_sites=frozenset({site}))) for _ in range(12)]
    assert faults_found(groups, StaleRead) > 0


# --- launches one after the other: banks and flags --------------------------------------------------------------------


@st.composite
def several_launches(draw):
    """Two to four launches of up to four ranks, of several shapes; some ranks get or send no rows at all."""
    ranks = draw(st.integers(1, 4))
    local_experts = draw(st.integers(1, 3))
    num_experts = ranks * local_experts
    first_epoch = draw(st.sampled_from([1, 2, 2**31 - 1, 2**32 - 2, 2**32 - 1]))
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
        )
        schedule = draw(schedules(shape, workers=few, dispatchers=few, tile_rows=st.sampled_from([1, 2, 4])))
        liked = [expert for expert in range(num_experts) if random.random() < 0.6] or [-1]
        silent = {rank for rank in range(ranks) if random.random() < 0.2}
        experts = [
            [-1 if rank in silent or random.random() < 0.1 else random.choice(liked) for _ in range(shape.slots)]
            for rank in range(ranks)
        ]
        launches.append(Launch((first_epoch + number) % 2**32, shape, schedule, experts))
    return launches


@given(launches=several_launches(), order=orders)
@settings(max_examples=250)
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

    for seed in range(20):
        group = busy_launches(NO_FAULTS)
        group.begun = Watched(group.begun)
        group.run(Order(seed, 0.02))
    assert Watched.widest == 1, "else the tests here would prove nothing about it"


def busy_launches(faults: Faults, ranks: int = 3, launches: int = 4) -> Group:
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
    return Group([Launch(1 + i, shape, schedule, experts[i % 2]) for i in range(launches)], faults)


BROKEN_RULES = {
    "plan does not wait for the other planners": Faults(skipped_sites=frozenset({"plan"})),
    "inputs are published before they are staged": Faults(skipped_sites=frozenset({"publish"})),
    "walks begin before inputs_ready": Faults(skipped_sites=frozenset({"walk"})),
    "partials are announced before all tasks are done": Faults(skipped_sites=frozenset({"announce"})),
    "combine does not wait for partials_written": Faults(skipped_sites=frozenset({"combine"})),
    "one bank of row counts": Faults(one_bank=frozenset({"rows_from"})),
    "one bank of counters": Faults(one_bank=frozenset({"counters"})),
}


@pytest.mark.parametrize("faults", BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
def test_a_rule_between_launches_that_is_broken_is_found(faults):
    groups = [busy_launches(faults) for _ in range(30)]
    if "plan" in faults.skipped_sites:
        groups = [many_planners(faults) for _ in range(5)]
    assert faults_found(groups, AssertionError) > 0  # stale, stuck, unclear or too far ahead


def many_planners(faults: Faults) -> Group:
    """One rank with more slots than one planner sorts."""
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
    )
    assert steps.num_planners(shape, schedule) == 2
    return Group([Launch(1, shape, schedule, [[0] * 1100])], faults)


@given(order=orders)
@settings(max_examples=5)
def test_several_planners_sort_the_slots_of_a_rank(order):
    many_planners(NO_FAULTS).run(order)


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
            Site.combine, Signal.partials_written, 5, 9, 8, 0.5,
            "jaxmoe: rank 3 sm 41 combine waited 0.5 s for partials_written[5]: seen 8 of 9 (from rank 5).",
        ),
        (
            Site.publish, Signal.inputs_staged, 0, 132, 2**32 - 1, 120.0,
            "jaxmoe: rank 3 sm 41 publish waited 120 s for inputs_staged[0]: seen 4294967295 of 132.",
        ),
    ],
)  # fmt: skip
def test_a_wait_that_is_given_up_says_who_waited_where_for_what(site, signal, index, target, seen, seconds, text):
    failure = steps.WaitFailure(rank=3, worker=41, site=site, wait=steps.Wait(signal, index, target), seen=seen)
    assert steps.describe(failure, seconds, "sm") == text


def test_every_signal_is_a_counter_of_the_rank_a_counter_per_tile_or_a_flag_from_peers():
    names = [signal.name for signal in map(Signal, range(8))]
    assert names[:3] == ["histograms_written", "inputs_staged", "tasks_done"]
    assert [name for name in names if steps.is_per_tile(Signal.__members__[name])] == names[3:6]
    assert [name for name in names if steps.is_from_peers(Signal.__members__[name])] == names[6:]
