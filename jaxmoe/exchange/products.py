"""Products of rows with the matrix of their expert, in plain JAX: where no kernel has them, and of gradients.

Rows lie as `dispatch` leaves them, zero where they are nobody's.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.exchange.base import ExchangeCall, block_sizes
from jaxmoe.implementations.xla import grouped_gemm
from jaxmoe.implementations.xla.outer_products import sum_of_outer_products


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def times(
    call: ExchangeCall,
    rows: Float[Array, "rows inner"],
    matrices: Float[Array, "experts inner outer"],
    rows_per_expert: Int[Array, "experts"],
) -> Float[Array, "rows outer"]:
    """Returns each row times the matrix of its expert, zero where it is nobody's.

    The gradients of matrices are sums over the rows of each expert in float32 and in a fixed order, rounded once.
    Callers refuse forward mode, which it has not.
    """
    return _product(call, rows, matrices, rows_per_expert, transposed=False)


def _product(
    call: ExchangeCall, rows: jax.Array, matrices: jax.Array, rows_per_expert: jax.Array, *, transposed: bool
) -> jax.Array:
    if capacity := call.room.capacity_per_expert:
        blocks = rows.reshape(-1, capacity, rows.shape[-1])
        out = jnp.einsum("eco,eio->eci" if transposed else "eci,eio->eco", blocks, matrices)
        return out.reshape(rows.shape[0], out.shape[-1]).astype(rows.dtype)
    sizes = block_sizes(call.room, rows_per_expert)
    product = grouped_gemm.times_transposed if transposed else grouped_gemm.times
    out = product(rows, matrices, sizes, "ragged_dot")
    # What lies behind the last expert is not said to be zero.
    return jnp.where((jnp.arange(rows.shape[0], dtype=sizes.dtype) < sizes.sum(dtype=sizes.dtype))[:, None], out, 0)


def sums_over_rows(
    call: ExchangeCall,
    lhs: Float[Array, "rows inner"],
    rhs: Float[Array, "rows outer"],
    rows_per_expert: Int[Array, "experts"],
) -> Float[Array, "experts inner outer"]:
    """Returns for each expert the sum over its rows of `lhs[row]^T rhs[row]`, in float32 or wider."""
    if call.room.capacity_per_expert:
        sizes = jnp.full_like(rows_per_expert, call.room.capacity_per_expert)
    else:
        sizes = block_sizes(call.room, rows_per_expert)
    return sum_of_outer_products(lhs, rhs, sizes)


def _times_fwd(
    call: ExchangeCall, rows: jax.Array, matrices: jax.Array, rows_per_expert: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    # Not `times`, so that jax.jvp of jax.grad finds operations here that it can differentiate.
    product = _product(call, rows, matrices, rows_per_expert, transposed=False)
    return product, (rows, matrices, rows_per_expert)


def _times_bwd(
    call: ExchangeCall, saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, rows_per_expert = saved
    drows = _product(call, gradient, matrices, rows_per_expert, transposed=True)
    return drows, sums_over_rows(call, rows, gradient, rows_per_expert).astype(matrices.dtype), None


times.defvjp(_times_fwd, _times_bwd)
