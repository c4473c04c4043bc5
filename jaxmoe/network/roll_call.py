"""Who is missing where hosts wait for each other: a thread that names the processes a layer waits for.

`layer.py` starts it once for each process of several whose layers run on GPUs over several hosts. Tokens of another
host come by XLA's collectives, which wait without limit and say nothing. Every process tells the others, through the
service with which `jax.distributed.initialize` has connected them, how many launches of layers it has enqueued. Where
one of its own has not ended for longer than `JAXMOE_TIMEOUT_SECONDS`, those of the processes it shares experts with are
late that have not enqueued as many, or have told nothing.

Launches on a GPU are counted together, whatever ranks share their experts. Of processes that share some and run unequal
numbers of other layers, such as those of one host, the counts do not say who is late.

Nothing is stopped: the text is printed, and `jaxmoe.failures()` has it. A process that ends altogether is noticed by
JAX's service itself, which then ends the others and names it.
"""

import functools
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe import native

_KEY = "jaxmoe/launches/"
# Between two rounds of a thread that mostly sleeps; a quarter of the limit where that is less.
INTERVAL_SECONDS = 5.0

_told: list[str] = []
_beginning = threading.Lock()


def told() -> tuple[str, ...]:
    """Returns what was found in this process, one text for each launch that waited too long."""
    return tuple(_told)


def begin(limit_seconds: float, processes: Iterable[int]) -> None:
    """Starts a thread, where there is anybody to ask; later calls with the same limit tell it of more processes.

    Args:
      limit_seconds: how long a launch may wait.
      processes: those that have ranks in a group of this one, whose launches may wait for them.
    """
    with _beginning:  # layers may be traced by several threads
        if call := _begun(limit_seconds):
            call.processes |= {*processes}


def processes_of(groups: np.ndarray | None) -> set[int]:
    """Returns the processes that share experts with this one; all of the job where that is not known.

    Args:
      groups: `sharding.devices_of_groups`.
    """
    if groups is None:
        return {*range(jax.process_count())}
    shared = ({device.process_index for device in group} for group in groups)
    return set[int]().union(*(processes for processes in shared if jax.process_index() in processes))


@functools.cache
def _begun(limit_seconds: float) -> "RollCall | None":
    client = _client()
    module = native.extension("gpu")
    if client is None or module is None:
        return None
    call = RollCall(client, module.progress, jax.process_index(), limit_seconds, ())
    threading.Thread(target=call.run, name="jaxmoe roll call", daemon=True).start()
    return call


def _client() -> Any:
    """JAX's connection to the service of the job; `None` where there is none."""
    try:  # JAX has no public name for it
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return global_state.client


class RollCall:
    """What the thread does, one round after the other.

    Args:
      client: keeps texts by key for all processes.
      progress: returns how far the launches on each GPU of this process are (ffi/cuda/host/progress.h).
      process: number of this one.
      limit_seconds: how long a launch may wait.
      processes: those that its launches may wait for.
    """

    def __init__(
        self,
        client: Any,
        progress: Callable[[], Sequence[Any]],
        process: int,
        limit_seconds: float,
        processes: Iterable[int],
    ) -> None:
        self.client, self.progress, self.process, self.limit_seconds = client, progress, process, limit_seconds
        # Another set when there are more: the thread may be looking at this one.
        self.processes = frozenset(processes)
        # Devices and launches. Who is late is asked a second time, a round after: the others tell how far they are once
        # in a round, and one may just have come.
        self.suspected: set[tuple[int, int]] = set()
        self.reported: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Rounds without end; the thread ends with the process, or with the service."""
        while True:
            try:
                self.round()
            except jax.errors.JaxRuntimeError as error:
                print(f"jaxmoe: late hosts are not named from here on: {error}", file=sys.stderr)
                return
            time.sleep(min(INTERVAL_SECONDS, self.limit_seconds / 4))

    def round(self) -> None:
        """Tells the others how far this process is, and what is missing where a launch has waited too long."""
        found = self.progress()
        least = min((each.enqueued for each in found), default=0)
        self.client.key_value_set(f"{_KEY}{self.process}", f"{least} {platform.node()}", allow_overwrite=True)
        for each in found:
            if not each.waiting or each.waiting_seconds < self.limit_seconds:
                continue
            launch = each.device, each.waiting
            late = self.late(each.waiting)
            if late and launch in self.suspected - self.reported:
                self.reported.add(launch)
                self.report(each, late)
            self.suspected.add(launch)

    def late(self, launch: int) -> Mapping[int, str]:
        """Returns the processes that have not enqueued a launch, and where they are or how far, as they have told."""
        told = dict(self.client.key_value_dir_get(_KEY))
        late: dict[int, str] = {}
        for process in sorted(self.processes - {self.process}):
            count, _, host = told.get(f"{_KEY}{process}", "").partition(" ")
            if not count:
                late[process] = "(has told nothing: it may not have begun a layer)"
            elif int(count) < launch:
                late[process] = f"on {host} (has started {count})"
        return late

    def report(self, waiting: Any, late: Mapping[int, str]) -> None:
        """Prints and keeps what is missing."""
        names = ", ".join(f"process {process} {how_far}" for process, how_far in late.items())
        text = (
            f"jaxmoe: launch {waiting.waiting} of a layer on GPU {waiting.device} of process {self.process} has waited "
            f"{waiting.waiting_seconds:.0f} s and not ended. Late are {names}. The limit is JAXMOE_TIMEOUT_SECONDS; "
            "restart all processes if they do not come."
        )
        _told.append(text)
        print(text, file=sys.stderr, flush=True)
