"""Integers of users' arguments, which may be of any type that is one."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Integer


def integer(value: Any) -> int | None:
    """Returns an integer of any type as int; `None` for anything else, `True` included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def saturated(array: Integer[Any, "*shape"], dtype: DTypeLike) -> Integer[Any, "*shape"]:
    """Returns an array of integers in another integer type: what that cannot hold becomes the nearest that it can.

    An array of NumPy stays one. To be called before JAX sees it: where x64 is off JAX takes the lower 32 bits of a
    number of 64, and makes 0 of 2^32.

    >>> saturated(np.array([2**32, -1, 7]), np.int32).tolist()
    [2147483647, -1, 7]
    """
    known, wanted = jnp.iinfo(array.dtype), jnp.iinfo(dtype)
    if known.min >= wanted.min and known.max <= wanted.max:
        return array.astype(dtype)
    library: Any = np if isinstance(array, np.ndarray | np.generic) else jnp
    with jax.enable_x64(True):  # an array of JAX that was made with it has 64 bits also where it is off
        return library.clip(array, max(known.min, wanted.min), min(known.max, wanted.max)).astype(dtype)
