"""When blocks are through the steps of a launch's two ends, by events that were made up."""

import numpy as np

from jaxmoe.profiling import ends
from jaxmoe.profiling.timeline import EVENT, Timeline, kind_number, role_number

# Block, role, kind, begin, end; in microseconds.
EVENTS = [
    (0, "block", "sort", 0, 6),
    (0, "producer", "wait_rows", 10, 20),
    (0, "producer", "wait_rows", 30, 90),
    (0, "math", "down", 40, 45),
    (0, "math", "gate_up", 25, 30),
    (0, "math", "epilogue", 30, 31),
    (1, "block", "sort", 0, 2),
    (1, "math", "gate_up", 27, 60),
    (2, "block", "sort", 0, 3),
]


def timeline() -> Timeline:
    rows = [
        (block, role_number(role), 0, kind_number(kind), -1, -1, -1, 1e3 * begin, 1e3 * end, 0)
        for block, role, kind, begin, end in EVENTS
    ]
    ones = np.ones(3)
    return Timeline(1, 2, "gpu", "forward", np.array(rows, EVENT), 95e3, ones.astype(int), ones, 0)


def times(name: str) -> list[float]:
    (step,) = [each for each in ends.STEPS if each.name == name]
    return ends.times_of(timeline(), step).tolist()


def test_a_block_is_through_a_step_of_the_start_with_its_first_event_and_of_the_end_with_its_last():
    assert times("slots sorted") == [2, 3, 6]
    assert times("rows of a first tile there") == [20]
    assert times("first product begins") == [25, 27]
    assert times("last product over") == [45, 60]


def test_the_table_has_the_first_the_median_and_the_last_block_and_leaves_out_steps_of_none():
    title, _, head, _, *rows = ends.table(timeline())
    assert title == "rank 1: forward pass of 95.0 us"
    assert rows == [
        "| slots sorted | 3 | 2.0 | 3.0 | 6.0 |",
        "| rows of a first tile there | 1 | 20.0 | 20.0 | 20.0 |",
        "| first product begins | 2 | 25.0 | 26.0 | 27.0 |",
        "| first epilogue over | 1 | 31.0 | 31.0 | 31.0 |",
        "| last product over | 2 | 45.0 | 52.5 | 60.0 |",
        "| last epilogue over | 1 | 31.0 | 31.0 | 31.0 |",
    ]
    assert {line.count("|") for line in (head, *rows)} == {6}
