"""Several arrays from every rank of a place to every other, in one collective.

`send.py` exchanges tokens and answers so. XLA has one collective in flight at a time, so that of several only one could
run beside the layer's kernel; and a network likes one long message better than four.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxmoe.sharding import ExpertGroup


def exchange(across: ExpertGroup, tree: Any) -> Any:
    """Sends part i of every array, `[ranks, ...]`, to rank i; returns what the ranks sent here, in their order.

    Args:
      across: the ranks.
      tree: arrays of numbers of 8 bits or more; their bits arrive as they are.
    """
    return exchange_beside(across, tree, None)[0]


def exchange_beside(across: ExpertGroup, tree: Any, computed: Any) -> tuple[Any, Any]:
    """Returns what `exchange` does and arrays that are computed meanwhile.

    Whatever needs one of both waits for both. XLA's scheduler, which knows nothing of the length of a kernel, then has
    the collective in flight until the arrays are there: of what can come last it takes the end of a collective first,
    if nothing lies between. Where answers could go on alone, or parts of a message were cut out first, it ran some
    collectives behind the kernel; annotations of scheduling groups made all of them wait for it.
    """
    arrays, structure = jax.tree.flatten(tree)
    bits = 8 * min(array.dtype.itemsize for array in arrays)
    words = jnp.dtype(f"uint{bits}")
    sent = [_words(array, words) for array in arrays]
    ends = list(itertools.accumulate(part.shape[1] for part in sent))
    arrived = across.exchange(jnp.concatenate(sent, 1).reshape(-1))
    arrived, computed = jax.lax.optimization_barrier((arrived, computed))
    parts = jnp.split(arrived.reshape(across.size, -1), ends[:-1], 1)
    return structure.unflatten(_like(part, array) for part, array in zip(parts, arrays, strict=True)), computed


def _words(array: Shaped[Array, "ranks ..."], words: Any) -> Shaped[Array, "ranks words"]:
    return jax.lax.bitcast_convert_type(array, words).reshape(array.shape[0], -1)


def _like(words: Shaped[Array, "ranks words"], array: Shaped[Array, "ranks ..."]) -> Shaped[Array, "ranks ..."]:
    of_number = array.dtype.itemsize // words.dtype.itemsize
    shape = (*array.shape, of_number) if of_number > 1 else array.shape
    assert math.prod(shape) == words.size
    return jax.lax.bitcast_convert_type(words.reshape(shape), array.dtype)
