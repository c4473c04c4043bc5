"""Grouped GEMMs with matrices in 4 bits: an expert is decoded for a block of its rows, and there is no copy of all.

`grouped_gemm.py` calls it. Rows meet the matrix of their own expert alone, and experts without rows are not decoded.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.formats import at_least_float32
from jaxmoe.four_bit import FourBit
from jaxmoe.implementations.xla.row_blocks import LONGEST_BLOCK, RowBlocks
from jaxmoe.sharding import vary_alike


def block_rows(rows: int, experts: int) -> int:
    """Returns the rows of a block: an average expert has one block, so that it is decoded once.

    >>> block_rows(81920, 32), block_rows(100, 8), block_rows(3, 8)
    (4096, 16, 1)
    """
    average = max(rows // experts, 1)
    return min(1 << (average - 1).bit_length(), LONGEST_BLOCK, rows)


def times_decoded(
    rows: Float[Array, "rows width"],
    matrices: FourBit,
    rows_per_expert: Int[Array, "experts"],
    *,
    transposed: bool = False,
) -> Float[Array, "rows other_width"]:
    """Returns each row times the matrix of its expert, in the dtype of `rows`; zero behind the last row.

    Values times the scales of their groups are exact in that dtype (but for MXFP4's largest and smallest in float16),
    sums have float32, and what is one factor of a whole matrix is multiplied with those: results are rounded once.

    Args:
      rows: sorted by expert.
      matrices: of the experts, `[experts, in, out]` when decoded.
      rows_per_expert: they follow each other from the first row on.
      transposed: whether rows have `out` columns, and are multiplied with the transposed matrix.
    """
    _, inner, out = matrices.shape
    experts, width = matrices.shape[0], inner if transposed else out
    blocks = RowBlocks.of(rows_per_expert, rows.shape[0], block_rows(rows.shape[0], experts))
    wide = at_least_float32(rows.dtype)
    columns = (((1,), (1 if transposed else 0,)), ((), ()))
    matrices = dataclasses.replace(matrices, values=matrices.packed)  # pyright: ignore[reportArgumentType]

    def step(number: Any, products: jax.Array) -> jax.Array:
        expert, start, inside = blocks.nth(number)
        one = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, expert, 1), matrices)
        block = lax.dynamic_slice_in_dim(rows, start, blocks.size)
        product = lax.dot_general(block, one.multiplied(rows.dtype)[0], columns, preferred_element_type=wide)
        product = product if one.factors is None else product * one.factors[:, None]
        before = lax.dynamic_slice_in_dim(products, start, blocks.size)
        after = jnp.where(inside, product.astype(rows.dtype), before)
        return lax.dynamic_update_slice_in_dim(products, after, start, 0)

    # Varies over the mesh as all operands do.
    products, number, *_ = vary_alike(
        (jnp.zeros((rows.shape[0], width), rows.dtype), blocks.end_block[-1] * 0, rows, matrices)
    )
    return lax.while_loop(
        lambda carry: carry[0] < blocks.end_block[-1],
        lambda carry: (carry[0] + 1, step(*carry)),
        (number, products),
    )[1]
