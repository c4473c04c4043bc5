"""How matrices are split over devices, and a split in which no mesh axis cuts a block that has one scale.

`quantization.py` finds the scales of blocks and multiplies with them, and `four_bit.py` makes words of eight weights:
where an axis cuts these JAX would gather the matrices, or refuse to reshape them. They use both before and after.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmoe.array_layout import AxesOfDims, axes_of_type, known_axes


@dataclasses.dataclass(frozen=True)
class MatrixSplit:
    """How an array lies, as far as JAX says: of Auto axes that is outside of `jax.jit` only.

    Args:
      sharding: over devices, or over axes of a type; `None` where nothing is split.
      axes: for each dimension, those that split it.
    """

    sharding: NamedSharding | None
    axes: AxesOfDims

    @classmethod
    def of(cls, array: Any) -> "MatrixSplit":
        """Returns how an array of three dimensions lies."""
        sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not any(axes := known_axes(array, sharding.mesh)):
            return cls(None, ((),) * 3)
        return cls(sharding, axes)

    @property
    def transposed(self) -> "MatrixSplit":
        """Of matrices `[experts, out, in]` where this is of `[experts, in, out]`, and back."""
        experts, inner, out = self.axes
        return MatrixSplit(self.sharding, (experts, out, inner))

    def ranks(self, dimension: int) -> int:
        """Returns over how many ranks a dimension is split."""
        return math.prod(self.sharding.mesh.shape[name] for name in self.axes[dimension]) if self.sharding else 1

    def without_cuts(self, shape: tuple[int, ...], sizes: tuple[int, int]) -> "MatrixSplit":
        """Returns a split of matrices `[experts, in, out]` in which no axis cuts a block of such sizes.

        An axis that did splits the other dimension, or experts, and where these do not divide nothing.
        """
        split = self

        def cuts(dimension: int) -> bool:
            size = (1, *sizes)[dimension]
            # Blocks that are filled up with zeros are cut as well, since JAX would have to move columns.
            return split.ranks(dimension) > 1 and shape[dimension] % (split.ranks(dimension) * size) != 0

        for dimension in (1, 2):
            if not cuts(dimension):
                continue
            moved, before = self.axes[dimension], split.axes
            for other in (3 - dimension, 0, None):
                split = MatrixSplit(
                    self.sharding,
                    tuple(
                        () if at == dimension else names + (moved if at == other else ())
                        for at, names in enumerate(before)
                    ),
                )
                if other is None or not cuts(other):
                    break
        return split

    def place(self, array: jax.Array) -> jax.Array:
        """Returns the array split so, but for dimensions that do not divide."""
        if self.sharding is None:
            return array
        axes = (
            names if size % self.ranks(dimension) == 0 else None
            for dimension, (names, size) in enumerate(zip(self.axes, array.shape, strict=False))
        )
        wanted = NamedSharding(self.sharding.mesh, PartitionSpec(*axes))
        if axes_of_type(AxisType.Explicit, self.sharding.mesh):
            return jax.sharding.reshard(array, wanted)
        return jax.lax.with_sharding_constraint(array, wanted)
