"""E8M0, the powers of two that `block_scaled.py` and `four_bit.py` have as scales: a byte is the exponent + 127.

Byte 255 is NaN, and there is no zero. Byte 0, 2^-127, is no normal number of float32, and XLA on a CPU takes such
numbers for zero, in products too. So what is scaled is multiplied twice, with normal numbers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def factors(scales: Shaped[Array, "*places"]) -> tuple[Float[Array, "*places"], Float[Array, "*places"]]:
    """Returns two float32 numbers for each scale, both normal or NaN, whose product it is.

    >>> scales = jnp.asarray([0, 127, 130], jnp.uint8).view(jnp.float8_e8m0fnu)
    >>> [factor.tolist() for factor in factors(scales)] == [[2.0**-64, 1.0, 2.0], [2.0**-63, 1.0, 4.0]]
    True
    """
    byte = jax.lax.bitcast_convert_type(jnp.asarray(scales), jnp.uint8).astype(jnp.int32)
    lower = (byte - 127) // 2
    exponents = lower, byte - 127 - lower
    first, second = (jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32) for exponent in exponents)
    return first, jnp.where(byte == 255, jnp.nan, second)
