"""The queue of a block's tasks and who releases them (ffi/cuda/kernel/gemm/), run as a model in any order.

The model is the producer, the math warps and, where there is one, the releaser of one block; where there is none, the
last warp to store its part of a task releases it. What it shows is what the comments of releaser::tell() and
TaskQueue::is_last_to_store() claim: a place of the queue is read before it is written again, no phase of an mbarrier is
missed, no two tasks are counted together, and nobody waits for ever. It follows the code by hand; only the sizes come
from it.
"""

import re
from collections.abc import Hashable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.unit.agents_order import Agent, Order, StaleRead, Until, Words, orders, run, some_order_fails

KERNEL = Path(__file__).parents[2] / "ffi" / "cuda" / "kernel"
WARPS = 8
END = "no more tasks"


def size_of(name: str, file: str) -> int:
    return int(re.findall(rf"\bint(?:32_t)? {name} = (\d+);", (KERNEL / file).read_text())[0])


PLACES, STAGES = size_of("kQueuedTasks", "storage.cuh"), size_of("stages", "config.cuh")


class Block:
    """One block, with so many stages for each of its tasks.

    Args:
      stages_of_tasks: of each task, one at least.
      places: of the queue.
      waits: whether math warps wait for older releases before they tell of a task.
      releaser: whether there is one.
    """

    def __init__(self, stages_of_tasks: list[int], places: int = PLACES, waits: bool = True, releaser: bool = True):
        self.stages_of_tasks, self.places, self.waits, self.has_releaser = stages_of_tasks, places, waits, releaser
        self.words = Words()
        self.queue: dict[int, int | str] = {}
        self.arrived: dict[int, list[int]] = {}  # at the mbarrier of each place, in this phase: of which task
        self.released: list[int] = []

    def agents(self) -> dict[str, Agent]:
        warps = {f"math warp {warp}": self.math_warp(warp) for warp in range(WARPS)}
        return {"producer": self.producer(), **({"releaser": self.releaser()} if self.has_releaser else {}), **warps}

    def until(self, word: Hashable, target: int) -> Until:
        return Until(word, target, rank=0, agent=0)

    def has(self, word: Hashable, target: int) -> bool:
        return self.words.values[word] >= target

    def acquire(self, stage: int) -> Agent:
        for warp in range(WARPS):
            yield self.until(("empty", warp), max(0, stage - STAGES + 1))

    def producer(self) -> Agent:
        stage = 0
        for task, stages in enumerate(self.stages_of_tasks):
            self.queue[task % self.places] = task
            yield None
            for _ in range(stages):
                yield from self.acquire(stage)
                self.words.add("full", 1)
                stage += 1
                yield None
        yield from self.acquire(stage)
        self.queue[len(self.stages_of_tasks) % self.places] = END
        self.words.add("full", 1)

    def tell(self, task: int) -> Agent:
        if self.waits and self.has_releaser:
            yield self.until("released", max(0, task - 1))
        place = task % self.places
        arrived = self.arrived.setdefault(place, [])
        arrived.append(task)
        if len(set(arrived)) > 1:
            raise StaleRead(f"one phase has arrivals of tasks {sorted(set(arrived))}")
        if len(arrived) == WARPS:
            arrived.clear()
            if self.has_releaser:
                self.words.add(("stored", place), 1)
            elif task < len(self.stages_of_tasks):
                self.check(task, "the last math warp")
                self.released.append(task)
        yield None

    def math_warp(self, warp: int) -> Agent:
        stage, told = 0, -1
        for task, stages in enumerate(self.stages_of_tasks):
            if told < task - 1 and not self.has("full", stage + 1):
                yield from self.tell(told := task - 1)
            yield self.until("full", stage + 1)
            self.check(task, f"math warp {warp}")
            for nth in range(stages):
                yield self.until("full", stage + 1)
                if told < task - 1 and nth == min(1, stages - 1):
                    yield from self.tell(told := task - 1)
                self.words.add(("empty", warp), 1)
                stage += 1
                yield None
        last = len(self.stages_of_tasks)
        if not self.has("full", stage + 1):
            yield from self.tell(told := last - 1)
        yield self.until("full", stage + 1)
        self.check(last, f"math warp {warp}")
        if told < last - 1:
            yield from self.tell(last - 1)
        self.words.add(("empty", warp), 1)
        if self.has_releaser:
            yield from self.tell(last)

    def releaser(self) -> Agent:
        for task in range(len(self.stages_of_tasks) + 1):
            place, phases = task % self.places, task // self.places + 1
            yield self.until(("stored", place), phases)
            if self.words.values["stored", place] != phases:  # it looks at the parity alone
                raise StaleRead(f"the phase of task {task} was missed")
            yield None
            self.check(task, "the releaser")
            if self.queue[place] == END:
                return
            yield None
            self.check(task, "the releaser")
            self.released.append(task)
            self.words.add("released", 1)

    def check(self, task: int, reader: str) -> None:
        found = self.queue[task % self.places]
        if found != (END if task == len(self.stages_of_tasks) else task):
            raise StaleRead(f"{reader} looks for task {task} and finds {found}")


blocks = st.lists(st.integers(1, 2 * STAGES), min_size=1, max_size=4 * PLACES)
short_tasks = [1] * (6 * PLACES)


@pytest.mark.parametrize("releaser", [True, False], ids=["releaser", "last warp"])
@given(stages_of_tasks=blocks, order=orders)
@settings(max_examples=300, deadline=None)
def test_tasks_are_released_once_in_order_and_no_place_is_written_too_early(stages_of_tasks, order, releaser):
    block = Block(stages_of_tasks, releaser=releaser)
    run(block.agents(), block.words, order)
    assert block.released == list(range(len(stages_of_tasks)))


@pytest.mark.parametrize("releaser", [True, False], ids=["releaser", "last warp"])
def test_tasks_of_one_stage_each_bring_the_producer_no_nearer_to_places_in_use(releaser):
    for seed in range(200):
        block = Block(short_tasks, releaser=releaser)
        run(block.agents(), block.words, Order(seed, 0.02))
        assert block.released == list(range(len(short_tasks)))


@pytest.mark.parametrize(
    "changes",
    [{"waits": False}, {"places": STAGES + 3}, {"places": STAGES + 1, "releaser": False}],
    ids=["no wait", "a place fewer", "three places fewer and no releaser"],
)
def test_the_model_finds_a_queue_that_is_not_safe(changes):
    assert some_order_fails(lambda: Block(short_tasks, **changes), restlessness=0.02)
