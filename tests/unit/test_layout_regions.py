"""The regions of a rank's arena (ffi/common/layout.h): their sizes, order and offsets at any size of a layer."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from tests.unit.layout_model import (
    ALIGNMENT,
    LAUNCH_NUMBERS,
    formats_of,
    head_claims,
    itemsizes,
    large_problems,
    number_bytes,
    regions_of,
)
from tests.unit.schedule_model import TRAINED_OR_FROZEN, Problem, Signal, problems, steps


def bytes_of_regions(problem: Problem, head, itemsize: int, control_bytes: int) -> dict[str, int]:
    """The sizes once more, in integers without a limit."""
    shape, schedule, _ = problem
    ring_rows = schedule.ring_tiles * schedule.tile.rows
    kept = schedule.keep_tokens * (shape.ranks - 1) * shape.tokens
    backward = int(schedule.backward)
    exchange = int(schedule.ring_tiles == 0)
    token_bytes = (1 + backward) * shape.hidden * itemsize
    number = number_bytes(itemsize)
    hidden, intermediate, projections = shape.hidden, shape.intermediate, shape.projections
    gradient_tiles = math.ceil(intermediate / schedule.tile.columns)
    sums = (projections + 1) * hidden * intermediate + projections * intermediate + hidden
    decoded = schedule.weight_slots > 0
    summed = int(schedule.summed_tiles > 0)
    waiting, all_tokens = schedule.summed_tiles * schedule.tile.rows, summed * shape.ranks * shape.tokens
    several_segments = shape.ranks * shape.slots > schedule.segment_tiles * schedule.tile.rows
    return {
        "control": control_bytes,
        "flags": 3 * head.ranks * steps.flag_bytes,
        "counters": 2 * (5 + 6 * head.row_tiles) * 4,
        "rows_from": 2 * head.ranks * head.local_experts * 4,
        "source_slots": head.ranks * head.slots * 4,
        "tokens": shape.tokens * token_bytes if shape.ranks > 1 or backward else 0,
        "answers": (shape.slots + waiting + all_tokens) * shape.hidden * itemsize,
        "summed_slots": all_tokens * 4,
        "routing_weights": (backward + exchange + summed) * shape.slots * number,
        "routing_weight_gradients": (backward + exchange) * shape.slots * number,
        "slot_rows": exchange * shape.slots * 4,
        "histograms": min(max(math.ceil(shape.slots / 1024), 1), 128) * shape.num_experts * 4,
        "kept_tokens": kept * token_bytes,
        "kept_states": kept * 4,
        "answer_places": summed * shape.ranks * shape.slots * 4,
        "answer_weights": summed * shape.ranks * shape.slots * number,
        "wanted_experts": all_tokens * 4,
        "row_targets": ring_rows * 4,
        "rows": ring_rows * token_bytes,
        "h": ring_rows * shape.intermediate * itemsize * (not (backward and (decoded or schedule.frozen))),
        "row_routing_weights": backward * ring_rows * number,
        "row_products": backward * ring_rows * gradient_tiles * number,
        "projections": backward * ring_rows * projections * intermediate * itemsize,
        "weight_sums": backward * (not decoded) * (not schedule.frozen) * several_segments * sums * number,
        "decoded_weights": (projections + 1) * schedule.weight_slots * hidden * intermediate * itemsize,
        "decoded_scales": 0,  # of 8 bits
    }


def exchange_of(problem: Problem) -> Problem:
    """A dispatch or a combine on its own of the tokens of a layer."""
    return problem._replace(schedule=steps.exchange_schedule("cpu"))


any_problem = (
    problems(weight_slots=st.integers(0, 3), frozen=TRAINED_OR_FROZEN) | large_problems() | problems().map(exchange_of)
)


@given(problem=any_problem, itemsize=itemsizes)
@settings(max_examples=300)
def test_regions_follow_each_other_aligned_and_their_sum_is_the_arena(problem, itemsize):
    head = steps.needed_head(problem.shape, problem.schedule)
    layout = steps.layout_of(problem.shape, problem.schedule, formats_of(itemsize), head)
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


@given(problem=problems(weight_slots=st.integers(0, 3)), backward=st.just(False))
@settings(max_examples=60)
def test_weights_decoded_to_8_bits_have_a_scale_for_each_block_of_every_expert(problem, backward):
    shape, schedule, _ = problem
    if schedule.backward is not backward:
        return
    rows = steps.Format("float8_e4m3fn", 1, 128)
    packed = steps.Format("float4_e2m1fn", 2**31 - 1, 2**31 - 1, "float32", 32, "float8_e8m0fnu")
    wide, sums = steps.Format("bfloat16"), steps.Format("float32")
    formats = steps.Formats(tokens=rows, h=rows, answers=wide, weights=packed, sums=sums)
    body = steps.layout_of(shape, schedule, formats, steps.needed_head(shape, schedule)).body
    matrices, blocks = shape.projections + 1, -(-shape.hidden // 128) * -(-shape.intermediate // 128)
    assert body["decoded_weights"][1] == matrices * schedule.weight_slots * shape.hidden * shape.intermediate
    ahead = schedule.weight_slots > 0
    assert body["decoded_scales"][1] == ahead * matrices * shape.num_experts // shape.ranks * blocks * 4


PEERS_REACH = ["tokens", "answers", "summed_slots", "routing_weights", "routing_weight_gradients", "slot_rows"]


@given(problem=problems() | large_problems(), itemsize=itemsizes)
def test_what_peers_reach_lies_before_what_a_rank_has_for_itself(problem, itemsize):
    shape, schedule, _ = problem
    body = steps.layout_of(shape, schedule, formats_of(itemsize), steps.needed_head(shape, schedule)).body
    ends = [sum(body[name]) for name in PEERS_REACH]
    assert max(ends) <= min(offset for name, (offset, _) in body.items() if name not in PEERS_REACH)


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
    layout = steps.layout_of(problem.shape, problem.schedule, formats_of(2), head)
    last = head.ranks - 1
    last_word = steps.word_of(layout, head, LAUNCH_NUMBERS[1], Signal.weights_decoded, head.row_tiles - 1)
    assert last_word + 4 == sum(layout.head["counters"])
    last_flag = steps.word_of(layout, head, LAUNCH_NUMBERS[1], Signal.answers_ready, last)
    assert last_flag + steps.flag_bytes == sum(layout.head["flags"])
    last_counts = steps.rows_from_source(layout, head, LAUNCH_NUMBERS[1], last)
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
        steps.layout_of(some.shape, some.schedule, formats_of(itemsize), head),
        steps.layout_of(other.shape, other.schedule, formats_of(other_itemsize), head),
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
            steps.layout_of(problem.shape, problem.schedule, formats_of(2), smaller)


@given(problem=problems() | large_problems())
@settings(max_examples=100)
def test_sorters_are_as_many_as_have_about_a_thousand_slots_each_but_at_most_one_per_worker_and_128(problem):
    shape, schedule, _ = problem
    sorters = steps.num_sorters(shape, schedule)
    assert 1 <= sorters <= min(schedule.workers, 128)
    assert sorters == min(schedule.workers, 128) or sorters * 1024 >= shape.slots
    assert sorters == 1 or (sorters - 1) * 1024 < shape.slots


@given(source=st.integers(0, steps.max_ranks - 1), slot=st.integers(0, steps.max_slots - 1))
@example(source=steps.max_ranks - 1, slot=steps.max_slots - 1)
@settings(max_examples=100)
def test_a_row_target_keeps_its_source_and_slot(source, slot):
    assert steps.unpack_row_target(steps.pack_row_target(source, slot)) == (source, slot)


def test_a_row_target_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"schedule: slot=16777216\. It needs to be 0 to 16777215"):
        steps.pack_row_target(0, steps.max_slots)
