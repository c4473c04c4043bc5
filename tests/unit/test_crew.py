"""Who has to be done before a rank announces its answers (ffi/cuda/kernel/exchange/combine.cuh), as a model.

The model is the workers of one launch, some of which get a multiprocessor late, and the one thread that announces, run
in any order. What it shows is what the comment of wait_for_all_tasks() claims: when that returns, every task is done,
whoever starts when. It follows the code by hand.
"""

from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.unit.agents_order import Agent, StaleRead, Until, Words, orders, run, some_order_fails


class Launch(NamedTuple):
    """A worker is late by so many pauses, and needs so many for a task.

    Args:
      crew: workers that are there from the beginning.
      latecomers: how late each of the others is.
      tasks: how long each takes, by whichever worker.
    """

    crew: int
    latecomers: tuple[int, ...]
    tasks: tuple[int, ...]


class Counts:
    """The words of a launch, where a worker that is done counts as one."""

    def __init__(self, launch: Launch, counts_again: bool = True):
        self.launch, self.counts_again = launch, counts_again
        self.words = Words()
        self.started = launch.crew
        self.taken = self.done = 0

    def agents(self) -> dict[str, Agent]:
        lateness = [0] * self.launch.crew + list(self.launch.latecomers)
        workers = {f"worker {number}": self.worker(number, late) for number, late in enumerate(lateness)}
        return {**workers, "announcer": self.announcer()}

    def worker(self, number: int, late: int) -> Agent:
        for _ in range(late):
            yield None
        if number >= self.launch.crew:
            self.started += 1
        yield None
        while self.taken < len(self.launch.tasks):
            length = self.launch.tasks[self.taken]
            self.taken += 1
            for _ in range(length):
                yield None
            self.done += 1
        yield None
        self.words.add("tasks done", 1)

    def announcer(self) -> Agent:
        counted = self.launch.crew
        while True:
            yield Until("tasks done", counted, rank=0, agent=0)
            if counted == self.started or (not self.counts_again and counted > self.launch.crew):
                break
            counted = self.started
        if self.done < len(self.launch.tasks):
            raise StaleRead(f"answers are announced with {self.done} of {len(self.launch.tasks)} tasks done")


launches = st.builds(
    Launch,
    st.integers(1, 4),
    st.lists(st.integers(0, 30), max_size=4).map(tuple),
    st.lists(st.integers(0, 30), max_size=12).map(tuple),
)


@given(launch=launches, order=orders)
@settings(max_examples=500, deadline=None)
def test_answers_are_announced_when_every_task_is_done_whoever_starts_when(launch, order):
    counts = Counts(launch)
    run(counts.agents(), counts.words, order)


def test_the_model_finds_that_those_who_start_last_could_stand_for_others_that_are_not_done():
    """Where the workers that have started are counted once, as they were before."""
    launch = Launch(2, (5, 10, 20, 30), (0, 0, 40, 40))
    assert some_order_fails(lambda: Counts(launch, counts_again=False), restlessness=1.0)
    assert not some_order_fails(lambda: Counts(launch), restlessness=1.0)
