"""Every token to every host: the ranks of one place gather their tokens, and each gets back a sum from every host.

Called by `layer.py` for one chunk of tokens. Each is the other's transpose, so a backward pass moves as many bytes: it
gathers the gradients of outputs, and sums those of tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxmoe.formats import at_least_float32
from jaxmoe.implementations.base import ARRIVED_NAME, Inputs
from jaxmoe.network.levels import Levels
from jaxmoe.sharding import ExpertGroup


def run(
    levels: Levels, num_experts: int, inputs: Inputs, on_host: Callable[[Inputs], jax.Array]
) -> Float[Array, "tokens hidden"]:
    """Returns the output for the tokens of this rank.

    Args:
      levels: of the call.
      num_experts: of the whole group.
      inputs: of this rank.
      on_host: the layer among the ranks of a host, with ids among its experts.
    """
    across = levels.across
    x, weights = (checkpoint_name(gather(across, array), ARRIVED_NAME) for array in (inputs.x, inputs.topk_weights))
    all_ids = checkpoint_name(across.all_gather(inputs.topk_ids), ARRIVED_NAME)
    ids = levels.ids_on_host(all_ids, across.index(), num_experts)
    return sum_over_hosts(across, on_host(Inputs(x, ids, jnp.where(ids >= 0, weights, 0), inputs.experts)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather(across: ExpertGroup, array: Float[Array, "rows columns"]) -> Float[Array, "all_rows columns"]:
    """Returns the rows of all hosts, in their order; its transpose is `sum_over_hosts`."""
    return across.all_gather(array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_over_hosts(across: ExpertGroup, parts: Float[Array, "all_rows columns"]) -> Float[Array, "rows columns"]:
    """Returns the sums of what all hosts have for the rows of this one; its transpose is `gather`.

    Every host sends its part as it is, and they are added here, in float32 and in the order of hosts. A reduce-scatter
    would move as many bytes, and round after each addition, in an order that is its own.
    """
    return _sum(across, parts)


def _sum(across: ExpertGroup, parts: Float[Array, "all_rows columns"]) -> Float[Array, "rows columns"]:
    arrived = across.exchange(parts)
    return arrived.astype(at_least_float32(arrived.dtype)).sum(0).astype(parts.dtype)


# Not the functions themselves, so that jax.jvp of jax.grad finds operations here that it can differentiate.
gather.defvjp(lambda across, array: (across.all_gather(array), None), lambda across, _, dy: (_sum(across, dy),))
sum_over_hosts.defvjp(lambda across, parts: (_sum(across, parts), None), lambda across, _, dy: (across.all_gather(dy),))
