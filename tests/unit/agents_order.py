"""Agents as Python generators that wait for words, resumed one at a time in an order that a test draws."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping
from random import Random
from typing import Any, NamedTuple

import hypothesis.strategies as st

from tests.unit.schedule_model import steps


class Until(NamedTuple):
    """What an agent yields to wait for a word. Everything but `word` and `target` is for the message."""

    word: Hashable
    target: int
    rank: int
    agent: int
    site: Any = None
    wait: Any = None


Agent = Generator[Until | None, None, None]  # None is a pause


class StaleRead(AssertionError):
    """Something was read that is not, or no longer, what its reader needs."""


class Stuck(AssertionError):
    """No agent can go on. `waits` are those that are not met, with the value seen."""

    def __init__(self, blocked: list[tuple[Until, int]]):
        self.waits = [(until.wait, seen) for until, seen in blocked if until.wait]
        failures = [(steps.WaitFailure(u.rank, u.agent, u.site, u.wait, seen), 10.0) for u, seen in blocked if u.wait]
        super().__init__("\n".join(steps.describe(failure, seconds, "worker") for failure, seconds in failures))


class Words:
    """Words of 32 bits that agents wait for; zero at first."""

    def __init__(self):
        self.values = defaultdict(int)
        self.changed = []

    def add(self, word: Hashable, amount: int) -> None:
        self.put(word, (self.values[word] + amount) % 2**32)

    def put(self, word: Hashable, value: int) -> None:
        self.values[word] = value
        self.changed.append(word)


class Order(NamedTuple):
    """An interleaving: the ready agent of the highest priority goes on, and after each step its priority may change.

    Few changes make some agents very late and others very early, which is what finds faults.
    """

    seed: int
    restlessness: float


orders = st.builds(Order, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.2, 1.0]))


def run(agents: Mapping[str, Agent], words: Words, order: Order) -> None:
    """Runs all agents to their ends. Raises `Stuck` where none can go on, and whatever an agent raises."""
    random = Random(order.seed)
    ready = [(random.random(), name) for name in agents]
    heapq.heapify(ready)
    wanted: dict[str, Until | None] = dict.fromkeys(agents)
    blocked: dict[Hashable, list[tuple[float, str]]] = defaultdict(list)
    while ready:
        priority, name = heapq.heappop(ready)
        until = wanted[name]
        if until and not steps.has_reached(words.values[until.word], until.target):
            blocked[until.word].append((priority, name))
            continue
        try:
            wanted[name] = next(agents[name])
        except StopIteration:
            pass
        else:
            if random.random() < order.restlessness:
                priority = random.random()
            heapq.heappush(ready, (priority, name))
        for word in words.changed:
            for entry in blocked.pop(word, ()):
                heapq.heappush(ready, entry)  # its wait is looked at again when its turn comes
        words.changed.clear()
    late = [wanted[name] for entries in blocked.values() for _, name in entries]
    if late:
        raise Stuck([(until, words.values[until.word]) for until in late if until])


def some_order_fails(model: Callable[[], Any], restlessness: float) -> bool:
    """Whether an agent of a model reads what is stale in one of 400 interleavings. It has `agents()` and `words`."""
    for seed in range(400):
        made = model()
        try:
            run(made.agents(), made.words, Order(seed, restlessness))
        except StaleRead:
            return True
    return False
