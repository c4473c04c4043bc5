"""A model of ranks that run launches of the kernel, with one Python generator for each worker and dispatcher.

Order, waits, releases and offsets all come from the compiled code (`native.schedule()`), so a test that runs the model
tests that code. What the model adds is time: `run` resumes one agent at a time in an order that a test draws, and every
write lasts from one resumption to a later one. What is read carries the launch and the place it was written for; a
reader looks before and after a pause, so memory that is reused too early is found (`StaleRead`). Agents that wait for
each other in a circle are found too (`Stuck`).

Agents and their order are in `agents_order.py`. What they do is in `agents_rank.py`, `agents_forward.py` and
`agents_backward.py`, which follow ffi/host/rank.h and products.h role by role; here they are put
together.
"""

from collections.abc import Iterable
from typing import Any

from tests.unit.agents_backward import BackwardLaunch
from tests.unit.agents_forward import ForwardLaunch
from tests.unit.agents_order import Agent, Order, Words, run
from tests.unit.agents_rank import NO_FAULTS, Cell, Faults, Launch, RankLaunch
from tests.unit.schedule_model import Signal, steps


def head_for(launches: Iterable[Launch]) -> Any:
    """The least head that has room for all launches."""
    heads = [steps.needed_head(launch.shape, launch.schedule) for launch in launches]
    return steps.HeadCapacity(
        ranks=heads[0].ranks,
        local_experts=max(head.local_experts for head in heads),
        row_tiles=max(head.row_tiles for head in heads),
        slots=max(head.slots for head in heads),
    )


class Group:
    """Ranks that run the same launches one after the other, each at its own pace."""

    def __init__(self, launches: list[Launch], faults: Faults = NO_FAULTS):
        self.launches = launches
        self.faults = faults
        self.head = head_for(launches)
        self.ranks = self.head.ranks
        self.words = Words()
        self.memory: dict[Cell, tuple[Any, ...]] = {}
        self.begun = [0] * self.ranks  # launches
        before = (launches[0].launch_number - 1) % 2**32  # every flag holds the launch_number of the launch before
        first = launch_of(self, 0, 0)
        for rank in range(self.ranks):
            for source in range(self.ranks):
                for signal in (Signal.inputs_ready, Signal.answers_ready):
                    self.words.put(first.word(rank, signal, source), before)

    def agents(self) -> dict[str, Agent]:
        return {
            f"rank {rank} launch {number} {name}": agent
            for rank in range(self.ranks)
            for number in range(len(self.launches))
            for name, agent in launch_of(self, rank, number).agents().items()
        }

    def run(self, order: Order) -> None:
        run(self.agents(), self.words, order)


def launch_of(group: Group, rank: int, number: int) -> RankLaunch:
    kind = BackwardLaunch if group.launches[number].schedule.backward else ForwardLaunch
    return kind(group, rank, number)
