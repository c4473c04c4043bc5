"""What of the experts has gradients, and how they are added up where a pass is several launches.

Called by `layer.py` for chunks and by `send.py` for rounds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmoe.experts import AnyExperts, arrays_of, present
from jaxmoe.formats import at_least_float32
from jaxmoe.quantized_matrix import QuantizedMatrix


def summed_in_float32(experts: Any) -> Any:
    """Returns experts whose gradients, sums over launches, are added in float32 and rounded once.

    The implementations cast experts to the dtype of x. Such a cast there and back costs nothing in one computation.
    """
    return jax.tree.map(lambda array: array.astype(at_least_float32(array.dtype)), experts)


def trained_of(experts: AnyExperts) -> tuple[Callable[[dict[str, Any]], AnyExperts], dict[str, Any]]:
    """Returns what makes experts of arrays that have gradients, and those by name: no matrices in 8 or 4 bits."""
    quantized = isinstance(experts.matrix, QuantizedMatrix)
    trained = {name: array for name, array in present(experts).items() if not (quantized and name.startswith("w_"))}
    return lambda arrays: dataclasses.replace(experts, **arrays), trained


def gradients_like(experts: AnyExperts, of_trained: dict[str, Any]) -> AnyExperts:
    """Returns gradients in the structure of experts, `None` for what has none."""
    return dataclasses.replace(experts, **{name: of_trained.get(name) for name in arrays_of(experts)})
