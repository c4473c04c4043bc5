"""Programs that stay compiled where users write `jax.disable_jit`, which is for what stands around them."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def jitted(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Returns `jax.jit(function)`, which is compiled whatever `jax.disable_jit` says.

    Without jit JAX has no symbolic zeros in a `shard_map`, and takes half a minute for one.
    """
    compiled = jax.jit(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with jax.disable_jit(False):
            return compiled(*args, **kwargs)

    return call
