"""Whether a program beside which the layer ran returned what its two parts return alone.

`beside.py` asks before it times a program, and once more of the last call that it has timed.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.bench.beside_layer import Outcome
from jaxmoe.bench.passes import Results

# Relative errors between a program and its parts. The same maths is compiled twice and added up in two orders; what is
# in float32 may come from products of 16-bit rows. 16-bit results pass several roundings, each of half an eps at most:
# gradients of dense layers differed by half an eps on four CPU devices. What is wrong differs by far more.
ALLOWED_ERROR, ALLOWED_EPS = 1e-3, 2
# Where an order of sums differs, a token close to a tie takes another expert. Whether the layer did right with it is
# judged by the ids that it was given.
ALLOWED_SHARE_OF_IDS = 0.02


def compare_with_layer(outcome: Outcome, answers: Sequence[Results], implementation: str, mesh: Mesh) -> str:
    """Returns which result of the layer is not that of the layer alone."""
    for number, (call, answer) in enumerate(zip(outcome.calls, answers, strict=True)):
        got: dict[str, Any] = {"y": call.y, "gradient": call.dexperts}
        want: dict[str, Any] = {"y": answer.y, "gradient": answer.gradients and answer.gradients.experts}
        for name, a, b in _pairs(got, want):
            share, error = _difference(a, b, mesh)
            allowed = 0.0 if implementation == "megakernel" else float(jnp.finfo(a.dtype).eps)
            if not (share == 0 or error <= allowed):
                return (
                    f"{name} of call {number} of the layer is not that of the layer alone: {share:.1e} of the "
                    f"numbers differ, relative error {error:.1e}"
                )
    return ""


def compare_with_work(outcome: Outcome, work: Outcome, mesh: Mesh) -> tuple[float, str]:
    """Returns the worst relative error of the other work's results, and which of them is wrong."""
    worst = 0.0
    for name, a, b in _pairs(outcome.of_work, work):
        share, error = _difference(a, b, mesh)
        if name.endswith("topk_ids"):
            is_right = share <= ALLOWED_SHARE_OF_IDS
        else:
            eps = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.inexact) else 0.0
            is_right = error <= max(ALLOWED_ERROR, ALLOWED_EPS * eps)
            worst = max(worst, error)
        if not is_right:
            return worst, (
                f"{name} is not that of the other work alone: {share:.1e} of the numbers differ, relative error "
                f"{error:.1e}"
            )
    return worst, ""


def _difference(got: jax.Array, want: jax.Array, mesh: Mesh) -> tuple[float, float]:
    """Returns the share of numbers that are not equal, and the relative error; NaN equals nothing."""
    share, difference, size = np.asarray(_differences(mesh)(got, want), np.float64)
    return float(share), float(difference / size if size else difference)


def _pairs(got: Any, want: Any) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Name and both arrays of every leaf of two trees that are alike."""
    wanted = jax.tree.leaves(want)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(got), wanted, strict=True):
        yield jax.tree_util.keystr(path, simple=True, separator=" "), leaf, other


@functools.lru_cache(maxsize=8)
def _differences(mesh: Mesh) -> Any:
    """A function to the share of numbers that differ, the norm of the difference, and that of the second array."""

    def differences(got: jax.Array, want: jax.Array) -> jax.Array:
        a, b = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.stack([jnp.mean(got != want, dtype=jnp.float32), jnp.linalg.norm(a - b), jnp.linalg.norm(b)])

    return jax.jit(differences, out_shardings=NamedSharding(mesh, P()))
