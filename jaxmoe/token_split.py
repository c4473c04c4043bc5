"""Which mesh axes split which leading dimension of the tokens, and what is done with axes that no dimension divides by.

`call.py` chooses, `api.py` enters `shard_map` accordingly. Tokens of `[batch, seq, hidden]` that lie over `data` and
`seq` stay where they are. A decode batch of one token on eight ranks is on all of them, and each takes its part of the
token and of seven more that have no expert: they cost the room that they take.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Shaped

from jaxmoe.array_layout import AxesOfDims
from jaxmoe.sharding import vary_alike, with_wide_sums


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """How `moe_layer` splits the tokens where it enters `shard_map`.

    Args:
      dims: mesh axes over which each leading dimension of x is split on entry.
      inside: further axes, which divide no dimension: their ranks have the same tokens on entry, and take equal parts
        of them, flattened and filled up.
      inside_ranks: how many those are.
      entered: tokens that a rank has on entry.
    """

    dims: AxesOfDims = ()
    inside: tuple[str, ...] = ()
    inside_ranks: int = 1
    entered: int = 0

    @property
    def spec(self) -> PartitionSpec:
        """Of the tokens on entry."""
        return PartitionSpec(*(axes or None for axes in self.dims))

    @property
    def entered_axes(self) -> tuple[str, ...]:
        """Over which tokens differ on entry."""
        return tuple(name for axes in self.dims for name in axes)

    @property
    def rows(self) -> int:
        """Tokens of a rank, those that fill up included."""
        return -(-self.entered // self.inside_ranks)

    @property
    def filling(self) -> int:
        """Tokens without an expert among those of the ranks that share what they have on entry."""
        return self.rows * self.inside_ranks - self.entered

    def part(self, tokens: Any, unused: Any) -> Any:
        """Returns the tokens of this rank.

        Args:
          tokens: arrays `[entered, ...]`, the same on all ranks of `inside`.
          unused: what fills each of them up.
        """
        if not self.inside:
            return tokens
        start = jax.lax.axis_index(self.inside) * self.rows

        def of(array: jax.Array, fill: Any) -> jax.Array:
            missing = ((0, self.filling), *((0, 0) for _ in array.shape[1:]))
            filled, begin = vary_alike((jnp.pad(array, missing, constant_values=fill), start))
            return jax.lax.dynamic_slice_in_dim(filled, begin, self.rows)

        return jax.tree.map(of, tokens, unused)

    def whole(self, rows: Shaped[Array, "rows hidden"]) -> Shaped[Array, "entered hidden"]:
        """Returns the rows of all tokens that this rank had on entry: all ranks of `inside` get the same."""
        if not self.inside:
            return rows
        start = jax.lax.axis_index(self.inside) * self.rows
        empty = jnp.zeros((self.rows * self.inside_ranks, *rows.shape[1:]), rows.dtype)
        empty, rows, start = vary_alike((empty, rows, start))
        # A sum with zeros, not an all-gather: JAX then knows that all ranks have the same.
        placed = jax.lax.dynamic_update_slice_in_dim(empty, rows, start, 0)
        return with_wide_sums(lambda parts: jax.lax.psum(parts, self.inside), placed)[: self.entered]


def choose(
    batch: Sequence[int], known: AxesOfDims, axes: Sequence[str], mesh: Mesh | AbstractMesh | None
) -> TokenSplit:
    """Returns how tokens are split over mesh axes: where they are split already, so; else where a dimension divides.

    All other axes together go to the first dimension that they divide; where there is none, each to the first that it
    divides, and what is left is for `TokenSplit.inside`.

    Args:
      batch: the leading dimensions of x.
      known: axes by which they are split already, as far as is known.
      axes: over all of which the tokens are to be split.
      mesh: `None` where nothing is entered.

    >>> mesh = AbstractMesh((2, 2, 4), ("data", "seq", "expert"))
    >>> choose((4, 64), (("data",), ("seq",)), ("data", "seq", "expert"), mesh).dims
    (('data',), ('seq', 'expert'))
    >>> one = choose((1, 3), (), ("data", "expert"), mesh)
    >>> one.dims, one.inside, one.rows
    (((), ()), ('data', 'expert'), 1)
    """
    if mesh is None:
        return TokenSplit(entered=math.prod(batch))
    dims = [tuple(name for name in names if name in axes) for names in (*known, *([()] * len(batch)))][: len(batch)]
    sizes = dict(mesh.shape)

    def divides(dim: int, names: Sequence[str]) -> bool:
        return batch[dim] % math.prod(sizes[name] for name in (*dims[dim], *names)) == 0

    # What is said of an array without elements, or of a size that the mesh does not divide, is not taken.
    dims = [names if divides(dim, ()) else () for dim, names in enumerate(dims)]
    left = [name for name in axes if not any(name in names for names in dims)]
    fitting = [dim for dim in range(len(batch)) if divides(dim, left)]
    if fitting:
        dims[fitting[0]] += tuple(left)
        left = []
    for name in tuple(left):
        fitting = [dim for dim in range(len(batch)) if divides(dim, (name,))]
        if fitting:
            dims[fitting[0]] += (name,)
            left.remove(name)
    entered = math.prod(batch) // math.prod(sizes[name] for names in dims for name in names)
    return TokenSplit(tuple(dims), tuple(left), math.prod(sizes[name] for name in left), entered)
