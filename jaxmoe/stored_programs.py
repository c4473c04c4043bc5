"""What programs that are stored (`jax.export`) need where they are made and where they run.

A program with implementation="megakernel" calls compiled code by name. JAX keeps none of it in the program.
"""

import jax.export

from jaxmoe import native

__all__ = ["export_checks", "load_kernels"]


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns the checks to leave out where a program with layers or exchanges is exported.

    Of a call of code that it does not know JAX cannot tell whether another version still has it the same, and refuses
    to store it. Calls of jaxmoe carry its version, and another one raises where they run: keep what a program is made
    from beside it. It runs on devices of the kind that it was made on. Programs with other implementations than
    `"megakernel"` need none of this.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=2, hidden=8, intermediate=16)
    >>> arguments = jnp.ones((4, 8)), jnp.array([[0], [1], [1], [0]]), jnp.ones((4, 1)), experts
    >>> layer = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None, implementation="megakernel"))
    >>> stored = jax.export.export(layer, disabled_checks=jaxmoe.export_checks())(*arguments)
    >>> stored.call(*arguments).shape
    (4, 8)
    """
    targets = (native.FORWARD, native.BACKWARD, native.DISPATCH, native.COMBINE, native.FINISH)
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]


def load_kernels() -> None:
    """Tells XLA where the compiled code is that stored programs call.

    A layer that is traced does that by itself: a process that only runs what another one has stored calls this first,
    once, and after `jax.distributed.initialize` where there are several processes.

    Raises:
      ModuleNotFoundError: nothing was built.

    >>> import jaxmoe
    >>> jaxmoe.load_kernels()
    """
    for platform in ("cpu", "gpu"):
        native.targets(platform)
