"""Tokens whose first dimension is no multiple of the ranks that it would be split over: flattened, and filled up.

Called by `api.py` around the `shard_map` that it enters. A decode batch of one token on eight ranks gets seven tokens
more that have no expert: they cost the room that they take.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Shaped

from jaxmoe.options import Arguments
from jaxmoe.routing.stats import MoEStats, int32_ids
from jaxmoe.sharding import reshard_explicit


def flatten(arguments: Arguments, rows: int, mesh: Mesh | AbstractMesh | None) -> Arguments:
    """Returns the arrays of tokens with one dimension of tokens, filled up with tokens without slots.

    Args:
      arguments: of a call.
      rows: of the flat arrays, at least as many as there are tokens.
      mesh: over whose Explicit axes nothing is split any more.
    """
    batch = arguments.x.shape[:-1]

    def flat(array: jax.Array, fill: int) -> jax.Array:
        array = reshard_explicit(array, PartitionSpec(), mesh)
        array = array.reshape(-1, *array.shape[len(batch) :])
        missing = ((0, rows - array.shape[0]), *((0, 0) for _ in array.shape[1:]))
        return jnp.pad(array, missing, constant_values=fill)

    x, topk_ids, topk_weights, experts, token_valid = arguments
    valid = None if token_valid is None else flat(token_valid, 0)
    return Arguments(flat(x, 0), flat(int32_ids(topk_ids), -1), flat(topk_weights, 0), experts, valid)


def restore(
    y: Shaped[Array, "rows hidden"], batch: tuple[int, ...], mesh: Mesh | AbstractMesh | None
) -> Shaped[Array, "*batch hidden"]:
    """Returns the output of the tokens that were given, with their dimensions."""
    y = reshard_explicit(y, PartitionSpec(), mesh)
    return y[: math.prod(batch)].reshape(*batch, y.shape[-1])


def without_filling(stats: MoEStats, tokens: int, top_k: int) -> MoEStats:
    """Returns statistics in which so many tokens without slots are not counted."""
    filling = np.zeros(stats.counts.shape[-1:], np.int32)
    filling[-1] = tokens * top_k  # unused
    return MoEStats(stats.counts - filling)
