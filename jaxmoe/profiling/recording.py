"""What compiled code recorded of its launches, as it hands it over: `timeline.py` makes times and traces of it.

On GPUs the kernels are compiled with or without a recorder (`JAXMOE_TIMELINE=on`); on CPUs recording is a switch.
"""

from types import ModuleType
from typing import Any

from jaxmoe import machine, native


def event_kinds() -> tuple[tuple[str, bool], ...]:
    """Returns the kinds of events by number: their names, and whether they are waits for someone else.

    >>> ("gate_up", False) in event_kinds()
    True
    """
    return native.always_built().timeline_kinds


def roles() -> tuple[str, ...]:
    """Returns the roles whose lanes a timeline has, by number.

    >>> roles()
    ('block', 'producer', 'dispatch', 'math', 'answers')
    """
    return native.always_built().timeline_roles


def switch(platform: str, on: bool) -> None:
    """Switches the recording of what layers do when on or off, for all that run from now on.

    On a GPU that is decided when the CUDA part is built, and this only checks that it was.

    Args:
      platform: `"cpu"` or `"gpu"`.
      on: whether to record.

    Raises:
      ModuleNotFoundError: nothing was built.
      NotImplementedError: the kernels are compiled without a timeline, or the platform has no compiled part.
    """
    if platform == "cpu":
        native.executor().record_timelines(on)
    elif on:
        _module(platform)


def launches(platform: str) -> list[Any]:
    """Returns what the last launch of every rank of this process recorded; waits for launches that are under way.

    Args:
      platform: `"cpu"` or `"gpu"`.

    Returns:
      Objects with the numbers `device`, `ranks`, `rank` and `launch`, `backward`, which is true of a backward pass, and
      the structured arrays `clocks`, one entry per thread block, and `events` (ffi/common/timeline.h).
      `timeline.decode` turns ticks into time.

    Raises:
      ModuleNotFoundError: nothing was built.
      NotImplementedError: the kernels are compiled without a timeline, or the platform has no compiled part.
      RuntimeError: a launch has failed.
    """
    return _module(platform).timelines()


def _module(platform: str) -> ModuleType:
    if platform not in ("cpu", "gpu"):
        raise NotImplementedError(
            f"timeline: no compiled part for platform {platform!r}; there is one for cpu and gpu."
        )
    module = native.extension(platform)
    if module is None or (platform == "gpu" and not machine.build_info().timeline):
        raise NotImplementedError(
            "timeline: the kernels of this build record nothing. Build jaxmoe with JAXMOE_TIMELINE=on in the "
            "environment: `JAXMOE_TIMELINE=on pip install --no-build-isolation --no-deps .`, or `make test` with it. "
            f"{'' if module else machine.cuda_status().reason}".rstrip()
        )
    return module
