"""Whether any layer has failed: to be asked before something is kept that it may have spoiled.

On GPUs a launch that waits for its peers for too long ends, with results that are not valid, after the call that
started it has returned. The next call reports it. Where there is none, as before a checkpoint, these functions do.
"""

from jaxmoe import native
from jaxmoe.network import roll_call

__all__ = ["LayerFailedError", "failures", "raise_if_failed"]


class LayerFailedError(RuntimeError):
    """A layer has failed in this process; what was computed since is not valid."""


def failures() -> tuple[str, ...]:
    """Returns what has failed in the layers of this process, one text for each failure.

    What is still being computed has not failed: call `jax.block_until_ready` on it first. A failure is known in the
    processes whose ranks have noticed it, and stays: processes have to be restarted. A host that is late by more than
    `JAXMOE_TIMEOUT_SECONDS` counts, although what waits for it goes on if it comes. On a CPU, where the call itself
    raises, there are none.

    >>> import jaxmoe
    >>> jaxmoe.failures()
    ()
    """
    return (*native.failures(), *roll_call.told())


def raise_if_failed() -> None:
    """Raises where a layer has failed in this process; call it before a checkpoint is written.

    Raises:
      LayerFailedError: `failures()` is not empty. It says what failed, and that the processes have to be restarted.

    >>> import jax, jaxmoe
    >>> parameters = jax.block_until_ready({"w": jax.numpy.ones(3)})  # what a step of training returned
    >>> jaxmoe.raise_if_failed()
    """
    if texts := failures():
        advice = "What this process has computed since is not valid. Restart all processes from the last checkpoint."
        raise LayerFailedError("\n".join([*texts, advice]))
