"""What of the experts has gradients, and how they are added up where a pass is several launches.

Called by `layer.py` for chunks and by `send.py` for rounds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.experts import Experts
from jaxmoe.quantized_matrix import QuantizedMatrix


def summed_in_float32(experts: Any) -> Any:
    """Returns experts whose gradients, sums over launches, are added in float32 and rounded once.

    The implementations cast experts to the dtype of x. Such a cast there and back costs nothing in one computation.
    """
    return jax.tree.map(lambda array: array.astype(jnp.promote_types(array.dtype, jnp.float32)), experts)


def trained_of(experts: Experts) -> tuple[Callable[[dict[str, Any]], Experts], dict[str, Any]]:
    """Returns what makes experts of arrays that have gradients, and those by name: no matrices in 8 or 4 bits."""
    quantized = isinstance(experts.w_gate, QuantizedMatrix)
    names = [field.name for field in dataclasses.fields(experts) if not (quantized and field.name.startswith("w_"))]
    trained = {name: value for name in names if (value := getattr(experts, name)) is not None}
    return lambda arrays: dataclasses.replace(experts, **arrays), trained


def gradients_like(experts: Experts, of_trained: dict[str, Any]) -> Experts:
    """Returns gradients in the structure of experts, `None` for what has none."""
    names = [field.name for field in dataclasses.fields(experts)]
    return Experts(**{name: of_trained.get(name) for name in names})
