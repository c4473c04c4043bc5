"""Where the time of a launch goes: every state of a block by events that were made up, and that states add up."""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxmoe.profiling import budget
from jaxmoe.profiling.timeline import EVENT, Timeline, kind_number, role_number

# Role, which of its lanes, kind, begin, end, stalled; in microseconds.
ONE_BLOCK = [
    ("block", 0, "sort", 0, 10, 0),
    ("producer", 0, "wait_rows", 10, 20, 0),
    ("producer", 0, "load_gate_up", 20, 40, 0),
    ("producer", 0, "wait_h", 40, 52, 0),
    ("math", 0, "wait_stages", 10, 22, 0),
    ("math", 0, "gate_up", 22, 32, 4),  # 6 of 10 us multiply
    ("math", 0, "epilogue", 32, 36, 0),
    ("math", 1, "wait_stages", 10, 30, 0),
    ("math", 1, "gate_up", 30, 34, 0),  # beside the first one's, and beside its epilogue
    ("math", 1, "epilogue", 34, 38, 0),
    ("math", 0, "down", 55, 60, 0),
    ("math", 0, "wait_answers", 60, 66, 0),
    ("math", 1, "combine", 66, 69, 0),
]


def timeline(blocks: Sequence[Sequence[tuple[str, int, str, float, float, float]]], length: float) -> Timeline:
    rows = [
        (block, role_number(role), nth, kind_number(kind), -1, -1, -1, 1e3 * begin, 1e3 * end, 1e3 * stalled)
        for block, events in enumerate(blocks)
        for role, nth, kind, begin, end, stalled in events
    ]
    ones = np.ones(len(blocks))
    return Timeline(0, 2, "gpu", "forward", np.array(rows, EVENT), 1e3 * length, ones.astype(int), ones, 0)


def test_a_block_is_in_one_state_at_a_time():
    found = budget.budget(timeline([ONE_BLOCK], 75))
    # From 22 to 30 a lane multiplies 0.6 of the time, from 30 to 34 the other one all of it.
    assert found.states == pytest.approx(
        {
            "start": 22,
            "products": 8 * 0.6 + 4 + 5,
            "stages": 8 * 0.4,
            "epilogue": 4,
            "rows": 0,
            "h": 52 - 40,
            "gradients": 0,
            "loads": 2 + 3,  # 38 to 40, and 52 to 55
            "answers": 6,
            "combine": 3,
            "end": 6,
        }
    )
    assert sum(found.states.values()) == pytest.approx(found.length)


def test_a_block_without_a_producer_has_the_waits_of_its_math():
    waits = [("wait_rows", 0, 20), ("gate_up", 20, 32), ("wait_rows", 32, 37), ("gate_up", 37, 40), ("wait_h", 40, 52)]
    work = [("down", 52, 55), ("wait_gradients", 55, 58), ("token_gradient", 58, 60), ("wait_answers", 60, 66)]
    block = [("math", 0, kind, begin, end, 0.0) for kind, begin, end in waits + work]
    states = budget.budget(timeline([block], 70)).states
    expected = {"start": 20, "products": 12 + 3 + 3 + 2, "rows": 5, "h": 12, "gradients": 3, "answers": 6, "end": 4}
    assert {state: time for state, time in states.items() if time} == pytest.approx(expected)


def test_a_row_is_the_mean_over_blocks_and_the_plain_product_takes_its_part_of_the_products():
    idle = [("block", 0, "sort", 0.0, 10.0, 0.0)]
    found = budget.budget(timeline([ONE_BLOCK, idle], 75), flops=2e9, plain_tflops=500.0)
    assert found.plain == pytest.approx(4.0)
    assert found.states["start"] == pytest.approx(22 / 2)
    assert sum(found.states.values()) == pytest.approx(75)
    text = budget.line("small", 8, [found])
    assert text.count("|") == budget.header().splitlines()[0].count("|")
    assert text.startswith("| small | 8 | 0 | 75 | 11 | 4 | 3 |")
