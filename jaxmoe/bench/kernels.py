"""Which GPU kernels a call spends its time in, from JAX's own profiler, and what runs beside the layer's."""

import bisect
import collections
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

# In the names of the kernels of ffi/cuda/kernel/kernel.cuh.
OF_LAYER = ("moe_forward", "moe_backward")


class KernelTime(NamedTuple):
    """All launches of a kernel in one call.

    Args:
      name: as the profiler has it.
      microseconds: per call.
      launches: per call.
      beside_layer: microseconds per call in which a kernel of the layer was running as well.
    """

    name: str
    microseconds: float
    launches: float
    beside_layer: float


def kernel_times(call: Callable[[], Any], calls: int = 5) -> list[KernelTime]:
    """Returns the kernels of a call on the first GPU, longest first.

    Args:
      call: runs the function to look at; it has been called before, so that nothing is compiled.
      calls: over which the times are averaged.
    """
    events = launches_of(call, calls)
    of_layer = sorted(time for name, times in events.items() if _is_of_layer(name) for time in times)
    found = [
        KernelTime(
            name,
            sum(end - start for start, end in times) / calls / 1e3,
            len(times) / calls,
            0.0 if _is_of_layer(name) else sum(shared(time, of_layer) for time in times) / calls / 1e3,
        )
        for name, times in events.items()
    ]
    return sorted(found, key=lambda kernel: kernel.microseconds, reverse=True)


def beside_others(call: Callable[[], Any], names: Sequence[str], calls: int = 5) -> tuple[float, float]:
    """Returns the microseconds of some kernels, and those of them in which others were running as well.

    Args:
      call: as of `kernel_times`; both are per call.
      names: parts of the names of the kernels.
      calls: the same.
    """
    own, others = [], []
    for name, times in launches_of(call, calls).items():
        (own if any(each in name for each in names) else others).extend(times)
    merged: list[tuple[float, float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    times = sum(end - start for start, end in own), sum(shared(time, merged) for time in own)
    return times[0] / calls / 1e3, times[1] / calls / 1e3


def launches_of(call: Callable[[], Any], calls: int) -> dict[str, list[tuple[float, float]]]:
    """Returns when the kernels of some calls ran on the first GPU, from start to end in nanoseconds, by their names."""
    events: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(calls)])
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if "GPU:0" not in plane.name:
                    continue
                for event in (event for line in plane.lines if "Stream" in line.name for event in line.events):
                    events[event.name].append((event.start_ns, event.start_ns + event.duration_ns))
    return events


def _is_of_layer(name: str) -> bool:
    return any(each in name for each in OF_LAYER)


def shared(time: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Returns how much of a stretch of time lies in others, which are sorted and do not overlap.

    >>> shared((2.0, 7.0), [(0.0, 3.0), (4.0, 5.0), (6.0, 9.0)])
    3.0
    """
    start, end = time
    first = max(bisect.bisect_right(others, (start,)) - 1, 0)
    return sum((max(min(end, last) - max(start, begin), 0.0) for begin, last in others[first:] if begin < end), 0.0)
