"""One picture of one rank: what its SMs do over time, all of them together and some of them lane by lane."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxmoe import plot_style
from jaxmoe.profiling.summary import PRODUCTS, WEIGHT_GRADIENTS, Summary, summarize
from jaxmoe.profiling.timeline import Timeline, role_number

STYLE: Any = plot_style.STYLE | {"font.size": 9, "svg.fonttype": "none"}
WAIT_COLOR = "#e5e7eb"
# Label, colour, kinds: in the order of the legend and of the stacks.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("gate and up products", "#1d4ed8", ("gate_up",)),
    ("down products", "#0891b2", ("down",)),
    ("data gradients", "#0d9488", ("h_gradient", "token_gradient")),
    ("weight gradients", "#16a34a", WEIGHT_GRADIENTS),
    ("epilogue", "#a5b4fc", ("epilogue",)),
    ("combine", "#7c3aed", ("combine",)),
    ("rows pulled", "#ea580c", ("dispatch",)),
    ("answers in flight", "#facc15", ("answers",)),
    ("copy inputs, sort, publish", "#6b7280", ("copy_inputs", "sort", "publish")),
    (
        "waiting",
        WAIT_COLOR,
        (
            "wait_inputs",
            "wait_rows",
            "wait_h",
            "wait_gradients",
            "wait_slot",
            "wait_tasks",
            "wait_stages",
            "wait_answers",
            "no_rows",
        ),
    ),
)
LANES_DRAWN = ("math", "dispatch", "answers")
MOMENTS = 1200  # of the strips above


def draw(timeline: Timeline, path: str | Path, title: str = "", sms: int = 12) -> None:
    """Draws a launch of one rank.

    Above, over time, the number of SMs at each activity of the math warps, and the number of dispatch warps and of
    warpgroups with answers in flight. Below, lanes of some SMs, grouped by role. What a tile's products wait for their
    operands counts as waiting above, evenly over the tile, and is not drawn below.

    Args:
      timeline: of the rank.
      path: of the file; its ending says which format, `.png` or `.svg` for instance.
      title: what was run.
      sms: how many SMs are drawn lane by lane, spread over the GPU.
    """
    blocks = np.unique(np.linspace(0, len(timeline.sms) - 1, min(sms, len(timeline.sms))).astype(int))
    roles = [role for role in LANES_DRAWN if (timeline.events["role"] == role_number(role)).any()]
    lanes = {role: _lanes(timeline, role, blocks) for role in roles}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 8.5), dpi=plot_style.DOTS_PER_INCH, layout="constrained")
        heights = [20, 12, *(max(0.5 * len(lanes[role]), 4) for role in roles)]
        panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        _strip(panels[0], timeline, [group for group in GROUPS if group[2][0] not in ("dispatch", "answers")], "math")
        panels[0].set_ylabel(f"SMs, of {len(timeline.sms)}" if timeline.platform == "gpu" else "workers")
        _strip(panels[1], timeline, [group for group in GROUPS if group[2][0] in ("dispatch", "answers")], None)
        panels[1].set_ylabel("warps and\nwarpgroups")
        for panel, role in zip(panels[2:], roles, strict=True):
            _rows(panel, timeline, lanes[role], role)
            panel.set_ylabel(f"{role}\n{len(blocks)} {'SMs' if timeline.platform == 'gpu' else 'workers'}")
        panels[-1].set_xlabel("microseconds from the begin of the launch")
        panels[-1].set_xlim(0, timeline.length / 1e3)
        drawn = [group for group in GROUPS if timeline.of(*group[2]).size]
        handles = [Patch(color=color, label=label) for label, color, _ in drawn]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(drawn), frameon=False)
        figure.suptitle(_title(title, summarize(timeline)), x=0.01, ha="left", fontsize=11, weight="bold")
        figure.savefig(path)


def _title(title: str, numbers: Summary) -> str:
    if numbers.hidden is None:
        told = f"one rank, no communication; SMs multiply {100 * numbers.multiplying:.0f} % of the time"
    else:
        told = (
            f"{100 * numbers.hidden:.0f} % of {numbers.communication:.0f} us of communication hidden behind products; "
            f"{numbers.exposed:.0f} us with no SM multiplying"
        )
    return f"{title}\n{told}" if title else told


def _strip(panel: Any, timeline: Timeline, groups: list[tuple[str, str, tuple[str, ...]]], role: str | None) -> None:
    """Stacks, over time, how many lanes are at each group of kinds; `role` "math" counts SMs, by their two lanes."""
    edges = np.linspace(0, timeline.length, MOMENTS + 1)
    counts, stalls = [], np.zeros(MOMENTS)
    for _, _, kinds in groups:
        events = timeline.of(*kinds)
        if role is not None:  # the whole block works before the roles part
            events = events[np.isin(events["role"], [role_number(role), role_number("block")])]
        weight = np.where(events["role"] == role_number("math"), 1 / _math_lanes(timeline), 1.0)
        stalled = np.clip(events["stalled"] / np.maximum(events["end"] - events["begin"], 1e-9), 0, 1)
        counts.append(_mean_count(events, weight * (1 - stalled), edges))
        stalls += _mean_count(events, weight * stalled, edges)
    if role is not None:
        counts[-1] += stalls  # the last group is waiting
    middle = (edges[1:] + edges[:-1]) / 2e3
    panel.stackplot(middle, counts, colors=[color for _, color, _ in groups], linewidth=0)
    panel.set_ylim(0, None)


def _math_lanes(timeline: Timeline) -> int:
    events = timeline.of(*PRODUCTS, "combine")
    return int(events["nth"][events["role"] == role_number("math")].max(initial=0)) + 1


def _mean_count(events: np.ndarray, weight: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns, for each stretch between two edges, the mean number of events that go on."""
    # The integral of the number of events that have begun, minus that of those that have ended.
    begun = _ramp(events["begin"], weight, edges)
    ended = _ramp(events["end"], weight, edges)
    return np.diff(begun - ended) / np.diff(edges)


def _ramp(moments: np.ndarray, weight: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns sum_i weight_i * max(at - moments_i, 0) for each `at`."""
    order = np.argsort(moments)
    moments, weight = moments[order], weight[order]
    weights = np.concatenate([[0.0], np.cumsum(weight)])
    firsts = np.concatenate([[0.0], np.cumsum(weight * moments)])
    i = np.searchsorted(moments, at, side="right")
    return weights[i] * at - firsts[i]


def _lanes(timeline: Timeline, role: str, blocks: np.ndarray) -> list[tuple[int, int]]:
    events = timeline.events[timeline.events["role"] == role_number(role)]
    return [(int(block), int(nth)) for block in blocks for nth in np.unique(events["nth"][events["block"] == block])]


def _rows(panel: Any, timeline: Timeline, lanes: list[tuple[int, int]], role: str) -> None:
    for _, color, kinds in GROUPS:
        events = timeline.of(*kinds)
        events = events[events["role"] == role_number(role)]
        boxes = []
        for row, (block, nth) in enumerate(lanes):
            mine = events[(events["block"] == block) & (events["nth"] == nth)]
            begin, end = mine["begin"] / 1e3, mine["end"] / 1e3
            low, high = np.full(len(mine), row + 0.08), np.full(len(mine), row + 0.92)
            corners = [(begin, low), (end, low), (end, high), (begin, high)]
            boxes.append(np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1))
        if boxes:
            panel.add_collection(PolyCollection(list(np.concatenate(boxes)), facecolors=color, linewidths=0))
    panel.set_ylim(len(lanes), 0)
    per_block = max(1, len(lanes) // max(1, len({block for block, _ in lanes})))
    panel.set_yticks(np.arange(0, len(lanes), per_block) + per_block / 2)
    panel.set_yticklabels([str(timeline.sms[block]) for block, _ in lanes[::per_block]], fontsize=6)
    panel.tick_params(axis="y", length=0)
