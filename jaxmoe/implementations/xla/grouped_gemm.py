"""Grouped GEMMs: each row with the matrix of the expert that owns it, through `jax.lax.ragged_dot` or tokamax.

Matrices in 4 bits go another way, whatever the kind: `decoded_gemm.py`.

`layer.py` and `jaxmoe/exchange/products.py` call it, which differentiate by hand: the product with the transposed
matrix is here by name, the gradients of the matrices are in `outer_products.py`.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmoe.four_bit import FourBit
from jaxmoe.implementations.xla.decoded_gemm import times_decoded
from jaxmoe.implementations.xla.local_rows import Batch
from jaxmoe.implementations.xla.outer_products import sum_of_outer_products
from jaxmoe.implementations.xla.plan import GroupedGemm
from jaxmoe.sharding import vary_alike

# [rows, inner] x [experts, inner, outer] -> [rows, outer]
_ROWS_TIMES_MATRIX = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
# [rows, outer] x [experts, inner, outer] -> [rows, inner]
_ROWS_TIMES_TRANSPOSE = lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])


def _grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    rows_per_expert: jax.Array,
    kind: GroupedGemm,
    dimensions: lax.RaggedDotDimensionNumbers,
) -> jax.Array:
    """Returns one of the three products above in the dtype of `lhs`; what is behind the last row is undefined."""
    if kind == "ragged_dot":
        return lax.ragged_dot_general(lhs, rhs, rows_per_expert, dimensions, preferred_element_type=lhs.dtype)
    tokamax = importlib.import_module("tokamax")  # optional, so that no type checker has to find it
    out = tokamax.ragged_dot_general(
        lhs, rhs, rows_per_expert, dimensions, preferred_element_type=lhs.dtype, implementation="mosaic"
    )
    # Its type says that the result is the same on all ranks (tokamax 0.0.17). The cast would be wrong to differentiate
    # through, since its transpose is a sum over the ranks, but no JAX transformation sees these products: layer.py has
    # its own VJP.
    return vary_alike((out, lhs, rhs))[0]


def times(
    rows: Float[Array, "rows inner"],
    weights: Float[Array, "experts inner outer"] | FourBit,
    rows_per_expert: Int[Array, "experts"],
    kind: GroupedGemm,
) -> Float[Array, "rows outer"]:
    """Returns each row times the matrix of its expert; what is behind the last row is undefined."""
    if isinstance(weights, FourBit):
        return times_decoded(rows, weights, rows_per_expert)
    return _grouped_gemm(rows, weights, rows_per_expert, kind, _ROWS_TIMES_MATRIX)


def times_transposed(
    rows: Float[Array, "rows outer"],
    weights: Float[Array, "experts inner outer"] | FourBit,
    rows_per_expert: Int[Array, "experts"],
    kind: GroupedGemm,
) -> Float[Array, "rows inner"]:
    """Returns each row times the transposed matrix of its expert; what is behind the last row is undefined."""
    if isinstance(weights, FourBit):
        return times_decoded(rows, weights, rows_per_expert, transposed=True)
    return _grouped_gemm(rows, weights, rows_per_expert, kind, _ROWS_TIMES_TRANSPOSE)


def _expert_of_row(batch: Batch, dtype: Any) -> Float[Array, "rows local_experts"]:
    """One-hot matrix of the expert that owns each row, zero behind the last row."""
    ends = jnp.cumsum(batch.rows_per_expert)[None, :]
    row = jnp.arange(batch.slot_of_row.shape[0], dtype=ends.dtype)[:, None]
    return ((row < ends) & (row >= ends - batch.rows_per_expert[None, :])).astype(dtype)


def bias_of_row(bias: jax.Array | None, batch: Batch, dtype: DTypeLike) -> jax.Array | float:
    """Returns the bias of the expert that owns each row, `[rows, width]` in `dtype`; 0.0 where there is no bias."""
    if bias is None:
        return 0.0
    # A product with a one-hot matrix is exact (not rounded to TF32 on GPUs), and its transpose sums rows per expert in
    # a fixed order, without atomics.
    return jnp.matmul(_expert_of_row(batch, bias.dtype), bias, precision="highest").astype(dtype)


def bias_vjp(drows: jax.Array, batch: Batch, bias: jax.Array | None) -> jax.Array | None:
    """Returns the sum of the rows of each expert, `[experts, width]`, exactly zero for an expert without rows."""
    if bias is None:
        return None
    # A sum of outer products with 1, and not a product with the one-hot matrix: there a NaN of one row would meet the
    # zeros of every expert.
    ones = jnp.ones_like(drows, shape=(drows.shape[0], 1))
    return sum_of_outer_products(ones, drows, batch.rows_per_expert, precision="highest")[:, 0].astype(bias.dtype)
