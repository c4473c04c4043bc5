r"""How much of the communication of a launch hides behind its GEMMs, and where the time of every role goes.

**The share hidden.** Let $C$ be the time during which traffic between this rank and others is in flight: the union,
over all lanes, of the events

- `dispatch`: a warp copies rows from their owners, from its first load until its stores are released;
- `answers`: stores of an expert's outputs to the owners of the tokens, from the begin of the epilogue that issues them
  until what announces them has been released;
- `wait_answers`: an SM has nothing left to do and waits for answers that this or another rank has not sent yet.

Let $g_s(t)$ say how much SM $s$ of $S$ multiplies at time $t$: 0 outside of the products of a tile (`PRODUCTS`);
inside, the share of that event in which the warpgroup was not waiting for its operands, and of an SM's two warpgroups
the larger. Then

$$ hidden = \frac{1}{|C|} \int_C \frac{1}{S} \sum_s g_s(t)\,dt $$

It is 1 only where every SM multiplies for as long as anything is in flight. Whatever else keeps an SM from multiplying
while something is in flight counts against it: epilogues, tiles that do not divide evenly among SMs, weights that
arrive late, ranks with more rows than others. So it understates what is hidden, and the rest of $C$ overstates what
communication costs.

A trickle of traffic counts as much there as a flood. So a second number weighs every transfer, an event of `dispatch`
or `answers`, by its length: the mean of $g$ over SMs and over the time of all transfers, overlapping as they are. A
burst that nothing hides, such as the first rows, weighs more in it. It is also given for rows and for answers alone.

A group of one rank has no communication, and no such numbers.

All of this holds of a backward pass as it does of a forward pass. With its rows come the gradients of their outputs,
and its answers are the gradients of the tokens.

Copying tokens to where peers reach them and sorting slots, before the first tile, are counted as start-up, and so are a
backward pass's zeros for experts without rows.
"""

import dataclasses

import numpy as np

from jaxmoe.profiling import recording
from jaxmoe.profiling.timeline import Timeline, kinds, role_number, waits

ROWS, ANSWERS, WAITING_FOR_ANSWERS = "dispatch", "answers", "wait_answers"
WEIGHT_GRADIENTS = ("gate_gradient", "up_gradient", "down_gradient")
PRODUCTS = ("gate_up", "down", "h_gradient", "token_gradient", *WEIGHT_GRADIENTS)
STALLED = "(waiting for stages)"

Intervals = np.ndarray  # [n, 2], begin and end in nanoseconds; those of a union are disjoint and in order


@dataclasses.dataclass(frozen=True)
class Summary:
    """Numbers of one launch of one rank; times in microseconds.

    Args:
      rank: in its group.
      pass_name: `"forward"` or `"backward"`.
      length: of the launch.
      start_up: from its begin to the first product.
      tail: from the last product to its end.
      communication: time during which traffic with other ranks was in flight.
      hidden: share of that time hidden behind products, see above; `None` for a group of one rank.
      hidden_transfers: the same share, of the time of all transfers added up; `None` where there are none.
      hidden_rows: of those that bring rows to their experts.
      hidden_answers: of those that bring answers back.
      exposed: part of `communication` in which no SM multiplied at all.
      multiplying: share of the whole launch in which an SM multiplies, averaged over SMs.
      roles: for each role the share of the time of its lanes that each kind of event took; what is missing from 1 went
        unrecorded, before the role began or after it ended. Time inside an event that was spent waiting for stages is
        counted apart.
      dropped: events that are missing.
    """

    rank: int
    pass_name: str
    length: float
    start_up: float
    tail: float
    communication: float
    hidden: float | None
    hidden_transfers: float | None
    hidden_rows: float | None
    hidden_answers: float | None
    exposed: float
    multiplying: float
    roles: dict[str, dict[str, float]]
    dropped: int

    def __str__(self) -> str:
        """Returns a few lines for people."""
        lines = [
            f"rank {self.rank}: {self.pass_name} pass of {self.length:.1f} us; {self.start_up:.1f} us to the first "
            f"product, {self.tail:.1f} us after the last one; SMs multiply {100 * self.multiplying:.1f} % of the time"
        ]
        if self.hidden is None:
            lines.append("  one rank: no communication")
        else:
            lines.append(
                f"  communication: {self.communication:.1f} us, {100 * self.hidden:.1f} % hidden behind products; "
                f"of the time of its transfers {_percent(self.hidden_transfers)} (rows {_percent(self.hidden_rows)}, "
                f"answers {_percent(self.hidden_answers)}); {self.exposed:.1f} us with no SM multiplying"
            )
        for role, shares in self.roles.items():
            waiting = sum(share for kind, share in shares.items() if kind in waits() or kind == STALLED)
            working = sum(shares.values()) - waiting
            parts = ", ".join(f"{kind} {100 * share:.1f}" for kind, share in sorted(shares.items(), key=_by_share))
            lines.append(f"  {role:9s} working {100 * working:5.1f} %, waiting {100 * waiting:5.1f} %: {parts}")
        if self.dropped:
            lines.append(f"  {self.dropped} events are missing: their lanes had no more room, the numbers are wrong")
        return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


def _by_share(item: tuple[str, float]) -> float:
    return -item[1]


def summarize(timeline: Timeline) -> Summary:
    """Returns the numbers of a launch."""
    products = timeline.of(*PRODUCTS)
    begin, end = (float(products["begin"].min()), float(products["end"].max())) if len(products) else (0.0, 0.0)
    multiplied = _Multiplied(timeline)
    waits = timeline.of(WAITING_FOR_ANSWERS)
    # A dispatch warp that waits for answers has a multiprocessor whose math warps may well have work.
    of_math = waits[waits["role"] == role_number("math")]
    everything = union(np.concatenate([timeline.of(ROWS, ANSWERS), of_math]))
    alone = timeline.ranks == 1
    return Summary(
        rank=timeline.rank,
        pass_name=timeline.pass_name,
        length=timeline.length / 1e3,
        start_up=begin / 1e3,
        tail=(timeline.length - end) / 1e3 if len(products) else 0.0,
        communication=0.0 if alone else total(everything) / 1e3,
        hidden=None if alone else multiplied.share_of(everything),
        hidden_transfers=None if alone else multiplied.share_of(intervals_of(timeline.of(ROWS, ANSWERS))),
        hidden_rows=None if alone else multiplied.share_of(intervals_of(timeline.of(ROWS))),
        hidden_answers=None if alone else multiplied.share_of(intervals_of(timeline.of(ANSWERS))),
        exposed=0.0 if alone else total(without(everything, union(products))) / 1e3,
        multiplying=multiplied.share_of(np.array([[0.0, timeline.length]])) or 0.0,
        roles=_roles(timeline),
        dropped=timeline.dropped,
    )


def _roles(timeline: Timeline) -> dict[str, dict[str, float]]:
    names, roles = kinds(), {}
    for role in recording.roles():
        events = timeline.events[timeline.events["role"] == role_number(role)]
        lanes = len(np.unique(events[["block", "nth"]]))
        if lanes == 0:
            continue
        whole = lanes * timeline.length
        length = events["end"] - events["begin"]
        spent = np.bincount(events["kind"], weights=length - events["stalled"], minlength=len(names)) / whole
        roles[role] = {names[kind]: float(spent[kind]) for kind in np.unique(events["kind"])}
        if events["stalled"].any():
            roles[role][STALLED] = float(events["stalled"].sum(dtype=np.float64)) / whole
    return roles


def intervals_of(events: np.ndarray) -> Intervals:
    """Returns begin and end of each event."""
    return np.stack([events["begin"], events["end"]], axis=1)


def union(events: np.ndarray) -> Intervals:
    """Returns the time in which at least one of the events goes on, as disjoint intervals in order.

    >>> union(np.array([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0)], [("begin", float), ("end", float)])).tolist()
    [[0.0, 3.0], [5.0, 6.0]]
    """
    order = np.argsort(events["begin"], kind="stable")
    begin, end = events["begin"][order], np.maximum.accumulate(events["end"][order])
    if len(begin) == 0:
        return np.zeros((0, 2))
    opens = np.concatenate([[True], begin[1:] > end[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([begin[opens], end[closes]], axis=1)


def total(intervals: Intervals) -> float:
    """Returns how long intervals last, added up."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """Returns the parts of disjoint intervals that no other interval covers.

    >>> without(np.array([[0.0, 10.0]]), np.array([[2.0, 3.0], [8.0, 12.0]])).tolist()
    [[0.0, 2.0], [3.0, 8.0]]
    """
    left = []
    for begin, end in intervals.tolist():
        for first, last in others[(others[:, 1] > begin) & (others[:, 0] < end)].tolist():
            if first > begin:
                left.append([begin, first])
            begin = max(begin, last)
        if begin < end:
            left.append([begin, end])
    return np.array(left).reshape(-1, 2)


class _Multiplied:
    """How much the SMs of a launch had multiplied up to any moment: the integral of g_s for each of them."""

    def __init__(self, timeline: Timeline) -> None:
        self._blocks = len(timeline.sms)
        self._of_block = []
        products = timeline.of(*PRODUCTS)
        for block in range(self._blocks):
            mine = products[products["block"] == block]
            if len(mine):
                self._of_block.append(_integral([mine[mine["nth"] == nth] for nth in np.unique(mine["nth"])]))

    def share_of(self, intervals: Intervals) -> float | None:
        """Returns the mean of g over SMs and intervals; `None` where the intervals are empty."""
        if total(intervals) == 0:
            return None
        done = 0.0
        for moments, integral in self._of_block:
            at = np.interp(intervals, moments, integral)
            done += float((at[:, 1] - at[:, 0]).sum())
        return done / self._blocks / total(intervals)


def _integral(lanes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integral of the larger of the lanes' rates, at every moment where it may bend."""
    moments = np.unique(np.concatenate([np.concatenate([lane["begin"], lane["end"]]) for lane in lanes]))
    rate = np.zeros(len(moments) - 1)
    middle = (moments[1:] + moments[:-1]) / 2
    for lane in lanes:
        i = np.searchsorted(lane["begin"], middle, side="right") - 1
        event = lane[np.maximum(i, 0)]
        length = np.maximum(event["end"] - event["begin"], 1e-9)
        share = np.clip(1 - event["stalled"] / length, 0, 1)
        rate = np.maximum(rate, np.where((i >= 0) & (event["end"] > middle), share, 0))
    return moments, np.concatenate([[0.0], np.cumsum(rate * np.diff(moments))])
