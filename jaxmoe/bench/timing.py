"""How long a call takes, as the user of all ranks sees it.

One process enqueues its calls on all of its devices and waits for all of them, so the slowest rank is what it sees.
With several processes each times its own devices, and the slowest process counts: the maximum over processes of the
median over blocks.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

MOST_CALLS, FEWEST_CALLS = 400, 4
WARM_UP_CALLS = 3


def time_blocks(call: Callable[[int], Any], blocks: int, seconds: float, rest: float = 0.0) -> list[float]:
    """Returns seconds per call of each block, of the process whose median is the largest.

    Calls of a block are enqueued without waiting in between, as a model does.

    Args:
      call: enqueues the i-th call, of a function that is compiled, and returns its arrays; all processes call it alike.
      blocks: how many.
      seconds: approximate length of a block.
      rest: seconds of idleness before each block, in which a chip that is limited by its power cools down.
    """
    start = time.perf_counter()
    for i in range(WARM_UP_CALLS):
        jax.block_until_ready(call(i))
    one_call = over_processes(np.array([time.perf_counter() - start]) / WARM_UP_CALLS).max()
    calls = int(np.clip(seconds / one_call, FEWEST_CALLS, MOST_CALLS))  # the same in all processes
    times = []
    for _ in range(blocks):
        time.sleep(rest)
        _meet()
        start = time.perf_counter()
        y = None
        for i in range(calls):
            y = call(i)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - start) / calls)
    of_all = over_processes(np.array(times))
    return of_all[np.median(of_all, axis=1).argmax()].tolist()


def over_processes(values: np.ndarray) -> np.ndarray:
    """Returns `[processes, ...]`: the values of all processes, in all of them."""
    if jax.process_count() == 1:
        return values[None]
    # JAX would round float64 without a word.
    return np.asarray(multihost_utils.process_allgather(values.astype(np.float32)), np.float64)


def _meet() -> None:
    """Processes begin a block together: who comes early would count the time until the others call, too."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxmoe.bench block")
