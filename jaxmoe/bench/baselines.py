"""What a hand-tuned JAX layer looks like today, to measure against: fixed capacity, fused gate and up weights.

Not an implementation of `moe_layer`: it drops the rows of a rank beyond 1.25 x the balanced number, keeps gate and up
in one matrix, adds a token's rows by scatter-add in the tokens' dtype (no fixed order) and reduces over ranks in that
dtype.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

CAPACITY_FACTOR = 1.25

GroupedDot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def capacity_rows(tokens: int, top_k: int, ranks: int) -> int:
    """Returns how many rows a rank takes, of all slots of the ranks.

    Args:
      tokens: per rank.
      top_k: slots per token.
      ranks: of the group.

    >>> capacity_rows(8192, 8, ranks=4)
    81920
    """
    return min(int(tokens * top_k * CAPACITY_FACTOR), ranks * tokens * top_k)


def all_gather_with_capacity(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    topk_weights: Float[Array, "tokens top_k"],
    w_gate_up: Float[Array, "local_experts hidden two_intermediate"],
    w_down: Float[Array, "local_experts intermediate hidden"],
    *,
    grouped_dot: GroupedDot,
    axis_name: str,
) -> Float[Array, "tokens hidden"]:
    """Returns the layer's output for this rank's tokens, inside `shard_map`; rows beyond the capacity are dropped."""
    num_local, top_k = w_down.shape[0], topk_ids.shape[1]
    tokens, ids, weights = (lax.all_gather(array, axis_name, tiled=True) for array in (x, topk_ids, topk_weights))

    capacity = capacity_rows(x.shape[0], top_k, ids.shape[0] // x.shape[0])
    expert = ids.reshape(-1) - lax.axis_index(axis_name) * num_local
    expert = jnp.where((expert >= 0) & (expert < num_local), expert, num_local)
    slot = jnp.argsort(expert, stable=True)[:capacity]
    sizes = jnp.bincount(expert, length=num_local + 1)[:num_local]
    kept = jnp.arange(capacity) < sizes.sum()

    gate, up = jnp.split(grouped_dot(tokens[slot // top_k], w_gate_up, sizes), 2, axis=-1)
    h = (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
    rows = grouped_dot(h, w_down, sizes) * weights.reshape(-1)[slot][:, None].astype(x.dtype)
    sums = jnp.zeros_like(tokens).at[slot // top_k].add(jnp.where(kept[:, None], rows, 0))
    return lax.psum_scatter(sums, axis_name, scatter_dimension=0, tiled=True)
