"""How the functions of this package come from the user's arrays to those of a rank."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxmoe import array_layout
from jaxmoe.exchange.base import ExchangeCall
from jaxmoe.jitted import jitted


def entered(call: ExchangeCall, on_rank: Callable[..., Any], with_matrices: bool = False) -> Callable[..., Any]:
    """Returns the function of a rank, jitted; where the call is not inside `shard_map`, of the arrays of all ranks.

    Args:
      call: where it runs.
      on_rank: of a pytree of arrays that are split as tokens are.
      with_matrices: it has a second argument, arrays that are split as experts are.
    """
    placement = call.placement
    if placement.mesh is None:
        return jitted(on_rank)
    split = PartitionSpec(placement.token_axes or None)
    specs = (split, PartitionSpec(call.group.axis_names or None)) if with_matrices else (split,)
    sharded = jax.shard_map(
        on_rank,
        mesh=placement.mesh if isinstance(placement.mesh, Mesh) else None,
        in_specs=specs,
        out_specs=split,
        axis_names=set(placement.manual_axes),
    )
    return jitted(lambda *trees: sharded(*array_layout.reshard_explicit(trees, specs, placement.mesh)))
