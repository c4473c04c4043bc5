"""Gradients of the experts' matrices: the sum over each expert's rows of the outer products of two rows.

Called by `layer.py` and `grouped_gemm.py`. Plain JAX, since on GPUs neither grouped GEMM whose groups lie along the
contracted dimension will do: the results of tokamax's (0.0.17 with jax 0.11.2) differ from run to run and are off by
percents where experts have thousands of rows, and `jax.lax.ragged_dot_general` multiplies all rows for every expert.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.formats import at_least_float32
from jaxmoe.implementations.xla.row_blocks import LONGEST_BLOCK, RowBlocks
from jaxmoe.sharding import vary_alike

# Products of one step, so that small experts fill a GPU together.
STEP_BYTES = 1 << 26


def block_rows(rows: int, experts: int) -> int:
    """Returns the rows of a block: two or more blocks for an average expert, so that the last one wastes little.

    >>> block_rows(81920, 32), block_rows(100, 8)
    (1024, 4)
    """
    half = max(rows // (2 * experts), 1)
    return min(1 << (half.bit_length() - 1), LONGEST_BLOCK)


def sum_of_outer_products(
    lhs: Float[Array, "rows inner"],
    rhs: Float[Array, "rows outer"],
    rows_per_expert: Int[Array, "experts"],
    precision: lax.PrecisionLike = None,
) -> Float[Array, "experts inner outer"]:
    """Returns for each expert the sum over its rows of `lhs[row]^T rhs[row]`, in float32 or wider.

    The rows of the experts follow each other from the first row on; there may be others behind them.
    Exactly zero for an expert without rows. Rows of other experts, and those behind the last row, are never multiplied,
    so that a NaN stays with its expert. Blocks of rows of one expert are added up in a fixed order.
    """
    wide = at_least_float32(lhs.dtype)
    rows, experts = lhs.shape[0], rows_per_expert.shape[0]
    inner, outer = lhs.shape[1], rhs.shape[1]
    blocks = RowBlocks.of(rows_per_expert, rows, block_rows(rows, experts))
    product_bytes = max(inner * outer * jnp.dtype(wide).itemsize, 1)
    at_once = min(max(STEP_BYTES // product_bytes, 1), experts, blocks.most)

    def product(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the expert of a block and the block's product, zero behind the last block."""
        expert, start, inside = blocks.nth(number)
        a, b = (jnp.where(inside, lax.dynamic_slice_in_dim(array, start, blocks.size), 0) for array in (lhs, rhs))
        sum_over_rows = (((0,), (0,)), ((), ()))
        return expert, lax.dot_general(a, b, sum_over_rows, precision=precision, preferred_element_type=wide)

    def step(sums: jax.Array, first: jax.Array) -> tuple[jax.Array, None]:
        expert, products = jax.vmap(product)(first + jnp.arange(at_once, dtype=first.dtype))
        for number in range(at_once):
            total = lax.dynamic_index_in_dim(sums, expert[number]) + products[number][None]
            sums = lax.dynamic_update_slice_in_dim(sums, total, expert[number], 0)
        return sums, None

    sums, _, _ = vary_alike((jnp.zeros((experts, inner, outer), wide), lhs, rows_per_expert))
    return lax.scan(step, sums, jnp.arange(0, blocks.most, at_once, dtype=rows_per_expert.dtype))[0]
