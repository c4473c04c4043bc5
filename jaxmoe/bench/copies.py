"""Copies from every device to the next one while something is timed: what a layer does where others use the links too.

`layer.py` makes them where `--copies` asks for it.
"""

import collections
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import jax
import jax.numpy as jnp

COPIED_BYTES = 256 * 2**20
# Of a device: while one is waited for the next one is on its way.
IN_FLIGHT = 2


# jax.Device is an assignment in JAX's sources, which pyright does not take for a type.
def check_ring(devices: Sequence[jax.Device]) -> None:  # pyright: ignore[reportInvalidTypeForm]
    """Raises where arrays cannot be copied from each device to the next one.

    Raises:
      ValueError: one device, or some of another process.
    """
    if len(devices) < 2:
        raise ValueError("--copies: with one device there is no other one to copy to. Pass --ep=2 or more.")
    if any(device.process_index != jax.process_index() for device in devices):
        raise ValueError("--copies: all devices have to be those of one process. Start one, or leave it out.")


class CompetingCopies:
    """A context in which a thread for each device copies an array to the next device, again and again.

    Args:
      devices: of this process, in a ring; at least two.
      size: bytes of an array.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
        size: int = COPIED_BYTES,
    ) -> None:
        check_ring(devices)
        self._size = size
        self._stopped = threading.Event()
        self._copied = [0] * len(devices)
        targets = [*devices[1:], devices[0]]
        self._threads = [
            threading.Thread(target=self._copy, args=(number, *pair), daemon=True)
            for number, pair in enumerate(zip(devices, targets, strict=True))
        ]
        self._begin = self._seconds = 0.0

    def __enter__(self) -> "CompetingCopies":
        self._begin = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._seconds = time.perf_counter() - self._begin
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    @property
    def gbs(self) -> float:
        """What the slowest device has sent to the next one in the context that has ended, GB/s."""
        return min(self._copied) * self._size / self._seconds / 1e9

    def _copy(
        self,
        number: int,
        source: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
        target: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        array = jax.device_put(jnp.zeros(self._size, jnp.uint8), source)
        on_their_way: collections.deque[jax.Array] = collections.deque()
        while not self._stopped.is_set():
            on_their_way.append(jax.device_put(array, target))
            if len(on_their_way) == IN_FLIGHT:
                on_their_way.popleft().block_until_ready()
                self._copied[number] += 1
        jax.block_until_ready(list(on_their_way))
