"""Times of calls that are enqueued back to back, in windows short enough to show one that stands still.

`beside.py` asks `time_calls`; `timing.py` has the longer blocks of the other benchmarks.
"""

import gc
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmoe.bench.timing import WARM_UP_CALLS, over_processes

# The clock of the host is read once in so much time, so that a late wake-up of its thread (some 50 us, now and then a
# few hundred) is no slow call. A call that stands still for longer than this shows whole.
WINDOW_SECONDS, MOST_WINDOW_CALLS = 2e-3, 10
# A window that takes so many times the median is a pause.
PAUSE = 3
NEARLY = 0.9  # of the time asked for is enough: the last rounds of windows are short


class Timed(NamedTuple):
    """Microseconds per call, see `time_calls`."""

    median: float
    slowest: float


def time_calls(call: Callable[[int], Any], seconds: float) -> tuple[Timed, Any]:
    """Returns microseconds per call, and what the last call returned.

    Calls are enqueued without waiting, as a training loop does. Time is taken from the end of one window of calls to
    the end of the next, which is enqueued before that, so that devices never wait for the host to read the clock. The
    windows come in rounds, each at most twice as long as the one before, so that calls that have become slow do not
    take long. The median over the windows and the slowest of them are those of the process where they are largest.

    Args:
      call: enqueues the i-th call of a function that is compiled, and returns its arrays; all processes call it alike.
      seconds: approximate time in all.
    """
    start = time.perf_counter()
    for i in range(WARM_UP_CALLS):
        jax.block_until_ready(call(i))
    one_call = over_processes(np.array([time.perf_counter() - start]) / WARM_UP_CALLS).max()
    calls = int(np.clip(math.ceil(WINDOW_SECONDS / one_call), 1, MOST_WINDOW_CALLS))  # the same in all processes

    times: list[np.ndarray] = []  # of each round, [processes, windows]
    last, number, elapsed, windows = None, WARM_UP_CALLS, 0.0, 1
    gc.collect()
    gc.disable()  # a collection takes milliseconds, and no call is slow for it
    try:
        while not times or elapsed < NEARLY * seconds:
            ends, before = [], None
            # The first window begins, and the last one ends, with nothing else enqueued: neither is counted.
            for _ in range(windows + 2):
                for _ in range(calls):
                    last = call(number)
                    number += 1
                if before is not None:
                    jax.block_until_ready(before)
                    ends.append(time.perf_counter())
                before = last
            jax.block_until_ready(last)
            times.append(over_processes(np.diff(ends)))
            of_windows = times[-1].max(0)
            elapsed += float(of_windows.sum())
            left = (seconds - elapsed) / max(float(of_windows.mean()), 1e-9)
            # Powers of two: each length is compiled once where processes tell each other their times.
            windows = 2 ** int(math.log2(max(min(2 * windows, left), 1)))
    finally:
        gc.enable()
    of_all = np.concatenate(times, 1) / calls * 1e6
    return Timed(float(np.median(of_all, axis=1).max()), float(of_all.max())), last


def time_again_after_a_pause(call: Callable[[int], Any], seconds: float) -> tuple[Timed, float | None, Any]:
    """Returns what `time_calls` does, and between the two the pause, in microseconds per call, that a first run had.

    A pause that a program makes comes again in a second run; one in which the host did something else hardly does. So
    the run with the shorter pause counts, and the other one is told.

    Args:
      call: as of `time_calls`.
      seconds: the same, of each run.
    """
    timed, last = time_calls(call, seconds)
    if timed.slowest <= PAUSE * timed.median:
        return timed, None, last
    again, last = time_calls(call, seconds)
    steady, other = sorted((timed, again), key=lambda each: each.slowest / each.median)
    return steady, other.slowest, last
