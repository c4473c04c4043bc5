r"""Where the time of a launch goes, as microseconds that add up to its length: `python -m jaxmoe.profiling budget`.

Each multiprocessor is in one state at a time, and a row of the table is the mean over those of a rank:

- `start`: before its first product.
- `products`: a math warpgroup multiplies. `plain` of it is what the rank's operations take at the rate of a plain
  product, `slower` the rest: tiles that are not full, instructions around the products, a clock that is lower.
- `stages`: a warpgroup is inside of its products and waits for operands, as a layer that reads its weights does.
- `epilogue`: none multiplies, and one is in an epilogue.
- `rows`, `h`, `gradients`: none has work, and the block's producer waits for rows to arrive, for an h, for gradients.
  CPUs have no producer, and math waits for them itself.
- `loads`: none has work yet, and the producer is loading the first stages of a task or takes one; next to nothing on
  CPUs.
- `answers`: behind its last tile it waits for answers of other blocks and ranks.
- `combine`: it adds answers up.
- `end`: behind all of its work, until the last multiprocessor of the rank ends; all of the time where it has none.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxmoe.profiling.summary import PRODUCTS
from jaxmoe.profiling.timeline import Timeline, kind_number, role_number

STATES: tuple[str, ...] = (
    "start",
    "products",
    "stages",
    "epilogue",
    "rows",
    "h",
    "gradients",
    "loads",
    "answers",
    "combine",
    "end",
)
# Waits of the producer, or on CPUs of math, while no warpgroup of the block has work.
_WAITS = {"wait_rows": "rows", "wait_h": "h", "wait_gradients": "gradients"}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Of one rank, microseconds.

    Args:
      rank: in its group.
      length: of the launch.
      states: mean time that a multiprocessor spends in each of `STATES`; they add up to `length`.
      plain: what the rank's operations take at the rate of a plain product on all multiprocessors, `None` where that
        rate is not known.
    """

    rank: int
    length: float
    states: dict[str, float]
    plain: float | None


def budget(timeline: Timeline, flops: float = 0.0, plain_tflops: float | None = None) -> Budget:
    """Returns where the time of a launch went.

    Args:
      timeline: of the launch.
      flops: of the rank's rows.
      plain_tflops: of a plain product on the same chip.
    """
    blocks = len(timeline.sms)
    sums = dict.fromkeys(STATES, 0.0)
    for block in range(blocks):
        for state, time in _of_block(timeline, block).items():
            sums[state] += time / blocks / 1e3
    plain = flops / plain_tflops / 1e6 if plain_tflops else None
    return Budget(timeline.rank, timeline.length / 1e3, sums, plain)


def _of_block(timeline: Timeline, block: int) -> dict[str, float]:
    """Returns nanoseconds of each state of one block."""
    events = timeline.events[timeline.events["block"] == block]
    products = np.isin(events["kind"], [kind_number(name) for name in PRODUCTS])
    math, producer = (events["role"] == role_number(role) for role in ("math", "producer"))
    epilogue, combine = (events["kind"] == kind_number(name) for name in ("epilogue", "combine"))
    moments = np.unique(np.concatenate([[0.0, timeline.length], events["begin"], events["end"]]))
    moments = moments[(moments >= 0) & (moments <= timeline.length)]
    middle, length = (moments[1:] + moments[:-1]) / 2, np.diff(moments)

    # Of the lanes that multiply, the one that waits least for operands: the others wait beside it.
    rate = np.zeros(len(middle))
    inside = np.zeros(len(middle), bool)
    for nth in np.unique(events["nth"][products]):
        lane = events[products & (events["nth"] == nth)]
        at, found = _at(lane, middle)
        share = 1 - lane["stalled"] / np.maximum(lane["end"] - lane["begin"], 1e-9)
        rate = np.where(found, np.maximum(rate, np.clip(share[at], 0, 1)), rate)
        inside |= found

    state = np.full(len(middle), STATES.index("loads"))
    for name, waited_for in _WAITS.items():
        waits = events[(producer | math) & (events["kind"] == kind_number(name))]
        state[_in_any(waits, middle)] = STATES.index(waited_for)
    state[_in_any(events[math & epilogue], middle)] = STATES.index("epilogue")
    work = events[math & (products | epilogue)]
    first = work["begin"].min() if len(work) else timeline.length
    last = work["end"].max() if len(work) else 0.0
    state[middle < first] = STATES.index("start")
    ending = events[combine | (events["kind"] == kind_number("wait_answers"))]
    done = max(float(ending["end"].max()), last) if len(ending) else last
    behind = middle > last
    state[behind & (middle >= first)] = STATES.index("answers")
    state[behind & _in_any(events[combine], middle)] = STATES.index("combine")
    state[behind & (middle > done)] = STATES.index("end")

    found = dict.fromkeys(STATES, 0.0)
    for number, name in enumerate(STATES):
        found[name] = float(length[(state == number) & ~inside].sum())
    found["products"] = float((length * rate)[inside].sum())
    found["stages"] = float((length * (1 - rate))[inside].sum())
    return found


def _at(events: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which event of a lane goes on at each time, and whether any does."""
    if len(events) == 0:
        return np.zeros(len(times), int), np.zeros(len(times), bool)
    events = np.sort(events, order="begin")
    at = np.maximum(np.searchsorted(events["begin"], times, side="right") - 1, 0)
    return at, (events["begin"][at] <= times) & (times < events["end"][at])


def _in_any(events: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns at which times an event of any lane goes on."""
    found = np.zeros(len(times), bool)
    for nth in np.unique(events["nth"]):
        for role in np.unique(events["role"]):
            found |= _at(events[(events["nth"] == nth) & (events["role"] == role)], times)[1]
    return found


def header() -> str:
    """Returns the head of the table, in Markdown."""
    rest = (name for name in STATES if name not in ("start", "products"))
    columns = ("shape", "tokens", "rank", "length us", "start", "plain", "slower", *rest)
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def line(shape: str, tokens: int, budgets: Sequence[Budget]) -> str:
    """Returns the row of the rank whose launch took longest."""
    longest = max(budgets, key=lambda each: each.length)
    states = longest.states
    plain = "-" if longest.plain is None else f"{longest.plain:.0f}"
    slower = f"{states['products'] - (longest.plain or 0.0):.0f}"
    rest = [f"{states[name]:.0f}" for name in STATES if name not in ("start", "products")]
    cells = [shape, str(tokens), str(longest.rank), f"{longest.length:.0f}", f"{states['start']:.0f}", plain, slower]
    return f"| {' | '.join([*cells, *rest])} |"
