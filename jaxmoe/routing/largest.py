"""The positions of the largest of some values, which is how a router chooses: `top_k` where XLA computes it right.

Called by `router.py`. Positions have no gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Integer

# On GPUs the largest of so many scores are taken one by one, where so few are wanted; else scores are sorted. Kernels
# for the largest 8 of each token on an H200: 1024 x 128 scores 7 us by sorting and 8 one by one, 8192 x 128: 33 and 13,
# 8192 x 512: 168 and 38. What that makes of layers is in docs/performance.md.
_MANY_SCORES = 2**19
_FEW_PLACES = 10


def largest(values: Float[Array, "*batch n"], count: int) -> Int32[Array, "*batch count"]:
    """Returns the positions of the largest values, largest first, ties by lowest position; NaN before all others.

    XLA (jaxlib 0.11.2) compiles the positions of `jax.lax.top_k` alone, of values that are split over GPUs, to zeros:
    all tokens would go to expert 0. Where values are used as well it sorts, twice where they are split. On a CPU
    `top_k` takes a fifteenth of the time of a sort.
    """

    def by_top_k(values: jax.Array) -> jax.Array:
        return jax.lax.top_k(_without_signs(values), count)[1].astype(jnp.int32)

    is_large = isinstance(values.size, int) and values.size >= _MANY_SCORES and count <= _FEW_PLACES
    on_gpus = functools.partial(_take_largest if is_large else _sort_positions, count=count)
    return jax.lax.platform_dependent(values, cuda=on_gpus, rocm=on_gpus, default=by_top_k)


def lowered(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns finite numbers in the order of the values, lower than a quarter of the lowest finite number.

    Of float32 those that differ by less than one part in 2^14 may become ties.
    """
    dtype, ordered = jnp.finfo(values.dtype), _in_order(values)
    quarter = 2.0 ** (dtype.maxexp - 2)
    return ordered.astype(values.dtype) * (quarter / 2.0 ** (dtype.bits - 1)) - 2 * quarter


def positions_of(values: Float[Array, "*batch n"]) -> Int32[Array, "*ones n"]:
    """Returns the position of each value along the last dimension, in as many dimensions as values have."""
    return jnp.expand_dims(jnp.arange(values.shape[-1], dtype=jnp.int32), range(values.ndim - 1))


def _sort_positions(values: jax.Array, count: int) -> jax.Array:
    positions = jnp.zeros_like(values, jnp.int32) + positions_of(values)
    # Ascending, and stable: equal ones stay in the order of their positions.
    return jax.lax.sort((~_in_order(values), positions), num_keys=1, is_stable=True)[1][..., :count]


def _take_largest(values: jax.Array, count: int) -> jax.Array:
    """Takes the largest of what is left, again and again: each a reading of all values, where a sort has many."""
    left, positions = _in_order(values), positions_of(values)
    lowest, taken = jnp.iinfo(left.dtype).min, []
    left = jnp.maximum(left, lowest + 1)
    for _ in range(count):
        taken.append(jnp.argmax(left, axis=-1).astype(jnp.int32))
        left = jnp.where(positions == taken[-1][..., None], lowest, left)
    return jnp.stack(taken, axis=-1)


def _in_order(values: Float[Array, "*shape"]) -> Integer[Array, "*shape"]:
    """Returns integers in the order of floats, which XLA compares sooner: of these it first looks for NaN and -0.0."""
    integer = jnp.dtype(f"int{8 * values.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(_without_signs(values), integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def _without_signs(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns values whose bits have their order: without -0.0, which is a tie with 0.0, and without a NaN below all.

    Which sign a NaN has is a matter of how it came about: on x86 infinity minus itself is a negative one.
    """
    return jnp.where(jnp.isnan(values), jnp.nan, jnp.where(values == 0, 0, values))
