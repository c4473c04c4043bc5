"""Which GPU kernels a call spends its time in, from JAX's own profiler."""

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(call: Callable[[], Any], calls: int = 5) -> list[tuple[str, float, float]]:
    """Returns name, microseconds and launches per call of every kernel on the first GPU, longest first.

    Args:
      call: runs the function to look at; it has been called before, so that nothing is compiled.
      calls: over which the times are averaged.
    """
    nanoseconds, launches = collections.Counter[str](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(calls)])
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if "GPU:0" not in plane.name:
                    continue
                for event in (event for line in plane.lines if "Stream" in line.name for event in line.events):
                    nanoseconds[event.name] += event.duration_ns
                    launches[event.name] += 1
    return [(name, time / calls / 1e3, launches[name] / calls) for name, time in nanoseconds.most_common()]
