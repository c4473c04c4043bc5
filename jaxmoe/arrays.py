"""Whether users' arguments are arrays. Callers: everything that checks arguments."""

from typing import Any

import jax.numpy as jnp

from jaxmoe.wording import a_type


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy or JAX, or says a shape and a dtype as they do. Tensors of torch do not.

    >>> is_array(jnp.ones(3)), is_array([1.0])
    (True, False)
    """
    try:
        # What NumPy makes of None is float64.
        return hasattr(value, "shape") and value.dtype is not None and jnp.dtype(value.dtype) is not None
    except (AttributeError, TypeError):
        return False


def check_array(caller: str, name: str, value: Any) -> None:
    """Raises a `TypeError` where an argument is no array."""
    if not is_array(value):
        raise TypeError(f"{caller}: {name} is {a_type(value)}; it must be an array of NumPy or JAX.")
