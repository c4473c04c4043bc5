r"""The two ends of a launch, step by step: `python -m jaxmoe.profiling ends`.

What lies before the first product and behind the last one is much of a decode batch. Each row is a step that a thread
block goes through once (`STEPS`), with the time since the launch began at which the first block, the median one and the
last one were through: where the last is late, others wait for that block; where all are, the step takes long.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmoe.profiling.summary import PRODUCTS
from jaxmoe.profiling.timeline import Timeline, kind_number


class Step(NamedTuple):
    """A step of a block, over when the first or the last of its events of some kinds begins or ends."""

    name: str
    kinds: tuple[str, ...]
    first: bool
    begin: bool = False


STEPS: tuple[Step, ...] = (
    Step("inputs copied", ("copy_inputs",), first=True),
    Step("slots sorted", ("sort",), first=True),
    Step("peers told", ("publish",), first=True),
    Step("inputs of all ranks there", ("wait_inputs",), first=True),
    Step("first rows found", ("find_rows",), first=True),
    Step("first rows pulled", ("dispatch",), first=True),
    Step("first task taken", ("take_task",), first=True),
    Step("rows of a first tile there", ("wait_rows",), first=True),
    Step("first product begins", PRODUCTS, first=True, begin=True),
    Step("first epilogue over", ("epilogue",), first=True),
    Step("last product over", PRODUCTS, first=False),
    Step("last epilogue over", ("epilogue",), first=False),
    Step("last answers stored", ("answers",), first=False),
    Step("answers of all ranks there", ("wait_answers",), first=False),
    Step("answers added up", ("combine",), first=False),
)


def times_of(timeline: Timeline, step: Step) -> np.ndarray:
    """Returns when blocks were through a step, in microseconds, sorted; blocks without such an event have no time."""
    events = timeline.events[np.isin(timeline.events["kind"], [kind_number(kind) for kind in step.kinds])]
    field = "begin" if step.begin else "end"
    chosen = np.minimum if step.first else np.maximum
    blocks, place = np.unique(events["block"], return_inverse=True)
    times = np.full(len(blocks), np.inf if step.first else -np.inf)
    chosen.at(times, place, events[field])
    return np.sort(times) / 1e3


def table(timeline: Timeline) -> Iterator[str]:
    """Returns the lines of a rank, in Markdown; steps that no block has are left out."""
    yield f"rank {timeline.rank}: {timeline.pass_name} pass of {timeline.length / 1e3:.1f} us"
    yield ""
    yield "| step | blocks | first us | median | last |"
    yield f"|{'---|' * 5}"
    for step in STEPS:
        times = times_of(timeline, step)
        if len(times):
            yield f"| {step.name} | {len(times)} | {times[0]:.1f} | {np.median(times):.1f} | {times[-1]:.1f} |"
