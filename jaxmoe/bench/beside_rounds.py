"""Rounds of a program inside one jit, one after the other: what it takes where no host stands between calls.

`beside.py` times a program this way where single calls took longer than the layer and the other work together. A short
program is as fast as hosts enqueue its pieces and, with several processes, as late as the latest of them in each
collective; in rounds what is left is the devices' own time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmoe.bench.windows import time_calls

ROUNDS = 16


def in_rounds(function: Callable[..., Any], first_result: Callable[[Any], jax.Array], mesh: Mesh) -> Callable[..., Any]:
    """Returns a function of `(x, *rest)` that calls `function(x, *rest)` `ROUNDS` times and returns the last results.

    Tokens of a round depend on the results of the one before, by a zero: so no round can be left out, nor what depends
    on tokens be moved out of the loop. It costs a kernel for one number. What depends on `rest` alone may be moved out:
    of other work alone a sum over the layer's answers, which then is told too short, and a program's ratio too large.

    Args:
      function: a program, or one of its parts.
      first_result: of what the function returns, an array that is split as tokens are; all its numbers are finite.
      mesh: over all of whose axes tokens are split.
    """
    split = P(mesh.axis_names)

    def behind(x: jax.Array, result: jax.Array) -> jax.Array:
        return x.at[0, 0].add(0 * result[0, 0].astype(x.dtype))

    on_ranks = jax.shard_map(behind, mesh=mesh, in_specs=(split, split), out_specs=split)

    def rounds(x: jax.Array, *rest: Any) -> Any:
        def one(_: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            x, _ = carry
            results = function(x, *rest)
            return on_ranks(x, first_result(results)), results

        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, x, *rest))
        return lax.fori_loop(0, ROUNDS, one, (x, blank))[1]

    return rounds


def time_rounds(compiled: Any, arguments: tuple[Any, ...], seconds: float) -> tuple[float, Any]:
    """Returns microseconds per round, the median over windows of calls, and the results of the last round.

    Args:
      compiled: `in_rounds` under `jax.jit`, compiled in all processes.
      arguments: its arguments.
      seconds: approximate time in all.
    """
    timed, last = time_calls(lambda _: compiled(*arguments), seconds)
    return timed.median / ROUNDS, last
