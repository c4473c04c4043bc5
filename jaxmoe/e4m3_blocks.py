"""Weights in 4 bits as E4M3 with a power of two for each block of 128 x 128: the rule of what is decoded ahead.

Compiled code has the same (`decoded_block_exponent` in `ffi/common/formats.h`). `e4m3_fit.py` asks whether MXFP4 is
exact so; `four_bit.py` rounds NVFP4.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxmoe.block_scaled import BLOCK, VALUES

# Exponents of scales of E4M3, and how far below the largest of them that of a block is: 6 times less than twice the
# largest stays below 448.
SMALLEST_EXPONENT, EXPONENT_BELOW = -6, 5


def of_blocks(of_groups: Shaped[Array, "experts out groups"], group: int, padding: Any) -> Shaped[Array, "..."]:
    """Returns what groups have as `[experts, blocks, 128, blocks, groups of a block]`."""
    columns = BLOCK // group
    experts, out, groups = of_groups.shape
    padded = jnp.pad(of_groups, ((0, 0), (0, -out % BLOCK), (0, -groups % columns)), constant_values=padding)
    # One dimension at a time: JAX knows how experts of Explicit axes are split after each step.
    rows = padded.reshape(experts, padded.shape[1] // BLOCK, BLOCK, padded.shape[2])
    return rows.reshape(*rows.shape[:3], rows.shape[3] // columns, columns)


def rounded(
    products: Float[Array, "experts in out"], scales: Float[Array, "experts out groups"], group: int
) -> Float[Array, "experts in out"]:
    """Returns E2M1 values times E4M3 scales, in float32, rounded to E4M3 times a power of two for each block.

    Args:
      products: of values and scales, exact.
      scales: of groups of the inputs.
      group: inputs that share a scale.
    """
    _, inner, out = products.shape
    magnitudes = jnp.where(jnp.isnan(scales), 0, jnp.abs(scales.astype(jnp.float32)))
    largest = of_blocks(magnitudes, group, 0).max((2, 4))
    exponents = jnp.maximum(jnp.frexp(largest)[1] - 1, SMALLEST_EXPONENT) - EXPONENT_BELOW
    powers = jax.lax.bitcast_convert_type((exponents.astype(jnp.int32) + 127) << 23, jnp.float32)
    powers = jnp.repeat(jnp.repeat(powers, BLOCK, 1)[:, :out], BLOCK, 2)[:, :, :inner].swapaxes(1, 2)
    # XLA would leave out both conversions, but for the barrier (quantization.py).
    return jax.lax.optimization_barrier((products / powers).astype(VALUES)).astype(jnp.float32) * powers
