"""Wide matrices in 4 bits: the scales that `MXFP4` and `NVFP4` get, and values rounded to them.

`quantization.quantize` calls it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe import e2m1
from jaxmoe.four_bit import MXFP4, NVFP4, FourBit
from jaxmoe.quantized_matrix import SMALLEST

# The exponent of E2M1's largest power of two, and the largest of E4M3.
EMAX = 2
LARGEST_SCALE = float(jnp.finfo(NVFP4.scale_dtype).max)
SMALLEST_SCALE = float(jnp.finfo(NVFP4.scale_dtype).smallest_subnormal)
FOUR_BIT_KINDS: dict[str, type[FourBit]] = {"mxfp4": MXFP4, "nvfp4": NVFP4}


def mxfp4(matrices: Float[Array, "experts in out"]) -> MXFP4:
    """Returns matrices as MXFP4, with the scales of section 6.3 of the OCP Microscaling formats, version 1.0.

    A scale is 2^(floor(log2(largest)) - 2), at least 2^-127, so that the largest weight of a group lies in [4, 8) of
    it; values are rounded to the nearest, ties to even, and to 6 above that. A group of zeros has values of zero; a NaN
    or an infinity makes the scale of its group NaN.

    Args:
      matrices: in float32, bfloat16 or float16; `in` a multiple of 32.

    >>> mxfp4(jnp.full((1, 32, 1), 3.0)).scales.tolist()
    [[[0.5]]]
    """
    groups, largest, finite = _groups(matrices, MXFP4.group)
    # From the bits: exact, and a number below 2^-126 counts as that.
    exponent = jnp.maximum((jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127 - EMAX, -127)
    values = groups * _power_of_two(-exponent)[..., None]
    byte = jnp.where(finite, exponent + 127, 255).astype(jnp.uint8)
    return MXFP4(_packed(values), jax.lax.bitcast_convert_type(byte, MXFP4.scale_dtype))


def nvfp4(matrices: Float[Array, "experts in out"]) -> NVFP4:
    """Returns matrices as NVFP4, with the scales of NVIDIA's ModelOpt.

    The scale of a matrix is its largest finite magnitude (at least 2^-100) over 448 x 6, so that scales of groups use
    all of E4M3; that of a group is its largest magnitude over 6, times the reciprocal of the scale of the matrix,
    rounded to E4M3, and at least 2^-9, its smallest. Values are weights times the reciprocal of the product of both, in
    float32, rounded to the nearest, ties to even, and to 6 above that. A group of zeros has values of zero; a NaN or an
    infinity makes the scale of its group NaN.

    Args:
      matrices: in float32, bfloat16 or float16; `in` a multiple of 16.

    >>> nvfp4(jnp.full((1, 16, 1), 2688.0)).scales.tolist()
    [[[448.0]]]
    """
    groups, largest, finite = _groups(matrices, NVFP4.group)
    of_matrix = jnp.where(finite, largest, 0).max((1, 2))
    # XLA would multiply by the reciprocal of a constant: other bits than those of a division.
    whole = jnp.where(jnp.isfinite(of_matrix), LARGEST_SCALE * e2m1.LARGEST, jnp.nan)
    # Else XLA would make one division of this and the next: other scales under jax.jit than without it, now and then.
    global_scales = jax.lax.optimization_barrier(jnp.maximum(of_matrix, SMALLEST) / whole)
    sixths = largest / jnp.where(finite, e2m1.LARGEST, jnp.nan)
    wanted = jnp.clip(sixths / global_scales[:, None, None], SMALLEST_SCALE, LARGEST_SCALE)
    scales = jax.lax.optimization_barrier(jnp.where(finite, wanted, jnp.nan).astype(NVFP4.scale_dtype))
    # XLA divides by what many numbers share with its reciprocal, as `sixths` above: so does this, on every backend.
    inverses = jnp.where(finite, 1 / (scales.astype(jnp.float32) * global_scales[:, None, None]), jnp.nan)
    values = groups * inverses[..., None]
    return NVFP4(_packed(values), scales, global_scales)


def _groups(matrices: Float[Array, "experts in out"], group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the groups in float32, `[experts, out, groups, group]`, their largest magnitudes, and which are finite.

    The largest magnitude of a group that is not finite is undefined: on a CPU XLA's maximum of a NaN and a number may
    be the number.
    """
    values = matrices.swapaxes(1, 2).astype(jnp.float32)
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // group, group)
    return groups, jnp.abs(groups).max(-1), jnp.isfinite(groups).all(-1)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _packed(groups: Float[Array, "experts out groups group"]) -> jax.Array:
    return e2m1.encode(groups.reshape(*groups.shape[:-2], groups.shape[-2] * groups.shape[-1]))
