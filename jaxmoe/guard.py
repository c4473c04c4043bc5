"""An identity that refuses `jax.vmap`, so that a mapped `moe_layer` ends in a sentence and not in a wrong result.

A batching rule cannot be written for a layer that talks to its peers once per call: the mapped layer would either
repeat the exchange for every element or treat the mapped axis as tokens, and only the user knows which of the two is
meant.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped

_identity = Primitive("jaxmoe_not_mapped")
_identity.def_impl(lambda array: array)
_identity.def_abstract_eval(lambda array: array)
ad.deflinear2(_identity, lambda cotangent, _: [_identity.bind(cotangent)])
mlir.register_lowering(_identity, lambda context, operand: [operand])


def _refuse(args: Any, dims: Any) -> Any:
    raise NotImplementedError(
        "moe_layer: jax.vmap over moe_layer is not supported (and jax.jacrev and jax.jacfwd map too). A batch of token "
        "arrays is one call: moe_layer takes x of shape [..., hidden], so pass the batch dimension along. To map over "
        "different experts (several layers), use jax.lax.map or jax.lax.scan."
    )


batching.primitive_batchers[_identity] = _refuse


def not_mapped(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns the array; raises `NotImplementedError` under `jax.vmap`."""
    return jax.tree.map(_identity.bind, array)
