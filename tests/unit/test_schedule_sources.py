"""The rows of an expert (ffi/common/chunks.h): which source each comes from, and in which order."""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from tests.unit.schedule_model import steps

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
