"""Rows that lie sorted by expert, cut into blocks of one expert each, with sizes that are known when a program is made.

`outer_products.py` and `decoded_gemm.py` go through them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Rows multiplied at once: a shorter block reads, or makes, what belongs to its expert more often.
LONGEST_BLOCK = 4096


class RowBlock(NamedTuple):
    """Rows [start, start + size) of an array, of which those that are `inside` belong to the block."""

    expert: Int[Array, ""]
    start: Int[Array, ""]
    inside: Bool[Array, "size 1"]


class RowBlocks(NamedTuple):
    """Blocks of `size` rows; an expert without rows has none."""

    rows: int
    size: int
    end_row: Int[Array, "experts"]
    end_block: Int[Array, "experts"]
    row_of_block_0: Int[Array, "experts"]

    @classmethod
    def of(cls, rows_per_expert: Int[Array, "experts"], rows: int, size: int) -> "RowBlocks":
        """Returns the blocks of rows that follow each other from the first row on; there may be others behind them."""
        end_row = jnp.cumsum(rows_per_expert)
        blocks = (rows_per_expert + size - 1) // size
        end_block = jnp.cumsum(blocks)
        return cls(rows, size, end_row, end_block, end_row - rows_per_expert - (end_block - blocks) * size)

    @property
    def most(self) -> int:
        """As many blocks as there can be: each expert fills all its blocks but the last one."""
        return self.rows // self.size + self.end_row.shape[0]

    def nth(self, number: jax.Array) -> RowBlock:
        """Returns a block; behind the last one it has no rows inside."""
        expert = jnp.minimum(jnp.sum(number >= self.end_block, dtype=number.dtype), self.end_row.shape[0] - 1)
        first = self.row_of_block_0[expert] + number * self.size
        start = jnp.clip(first, 0, self.rows - self.size)  # a block may reach beyond the array
        row = start + jnp.arange(self.size, dtype=start.dtype)
        return RowBlock(expert, start, ((row >= first) & (row < self.end_row[expert]))[:, None])
