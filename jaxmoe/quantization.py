"""Experts in 8 bits: `quantize` makes `BlockScaled` matrices of wide ones, `dequantize` wide ones of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmoe.block_scaled import BLOCK, SCALES, VALUES, BlockScaled
from jaxmoe.experts import Experts

# What has one scale: a block of 128 x 128, all weights that make one output, a matrix.
BLOCKS = ("128x128", "channel", "expert")
MATRICES = ("w_gate", "w_up", "w_down")
# Weights whose largest has less than this are scaled as if it had this: their scale would not be a normal number.
SMALLEST = 2.0**-100
LARGEST = float(jnp.finfo(VALUES).max)


def quantize(experts: Experts, block: str = "128x128", *, scale_dtype: DTypeLike = jnp.float32) -> Experts:
    """Returns the experts with their matrices in 8 bits; biases stay as they are.

    A scale is the largest magnitude of its block over 448, the largest value of `float8_e4m3fn`; with
    `float8_e8m0fnu` the next power of two above that. Values are rounded to the nearest. A block of zeros has values
    of zero; a NaN or an infinity makes all of its block NaN. Works under `jax.jit`, and leaves experts where they are.

    Args:
      experts: in float32, bfloat16 or float16.
      block: what shares a scale: `"128x128"` as in DeepSeek-V3's checkpoints, `"channel"` one per output, `"expert"`
        one per matrix.
      scale_dtype: float32, or `float8_e8m0fnu` for powers of two.

    Raises:
      TypeError: the experts are quantised already, or `scale_dtype` is another one.
      ValueError: `block` is another one.

    >>> import jax
    >>> experts = Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> quantize(experts).w_down.scales.shape
    (4, 2, 3)
    """
    if block not in BLOCKS:
        raise ValueError(f"quantize: block={block!r} must be one of {', '.join(map(repr, BLOCKS))}.")
    if jnp.dtype(scale_dtype) not in SCALES:
        raise TypeError(f"quantize: scale_dtype={scale_dtype} must be float32 or float8_e8m0fnu.")

    def quantized(name: str) -> BlockScaled | None:
        matrix = getattr(experts, name)
        if isinstance(matrix, BlockScaled):
            raise TypeError(f"quantize: experts.{name} is BlockScaled already. Pass dequantize(experts, ...) instead.")
        return None if matrix is None else _quantized(matrix, block, scale_dtype)

    return dataclasses.replace(experts, **{name: quantized(name) for name in MATRICES})


def dequantize(experts: Experts, dtype: DTypeLike = jnp.bfloat16) -> Experts:
    """Returns the experts with every matrix in `dtype`, biases too.

    Args:
      experts: with matrices that are `BlockScaled`, or wide.
      dtype: of every array.

    Raises:
      TypeError: values or scales of types that `BlockScaled` does not have.
      ValueError: shapes that make no blocks.

    >>> import jax
    >>> experts = Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> dequantize(quantize(experts)).w_down.shape
    (4, 384, 256)
    """

    def wide(array: Any) -> Any:
        return array.wide(dtype) if isinstance(array, BlockScaled) else array.astype(dtype)

    return jax.tree.map(wide, experts, is_leaf=lambda leaf: isinstance(leaf, BlockScaled))


def _quantized(matrices: Float[Array, "experts in out"], block: str, scale_dtype: DTypeLike) -> BlockScaled:
    experts, inner, out = matrices.shape
    rows, columns = {"128x128": (BLOCK, BLOCK), "channel": (1, inner), "expert": (out, inner)}[block]
    values = matrices.swapaxes(1, 2).astype(jnp.float32)
    padded = jnp.pad(values, ((0, 0), (0, -out % rows), (0, -inner % columns)))
    row_blocks, column_blocks = padded.shape[1] // rows, padded.shape[2] // columns
    # One dimension at a time: JAX knows how experts of Explicit axes are split after each step.
    blocks = padded.reshape(experts, row_blocks, rows, padded.shape[2])
    blocks = blocks.reshape(experts, row_blocks, rows, column_blocks, columns)
    largest = jnp.maximum(jnp.abs(blocks).max((2, 4)), SMALLEST)
    if jnp.dtype(scale_dtype) == jnp.float8_e8m0fnu:
        # The least power of two with which the largest weight is at most LARGEST = 0.875 * 2^9, from its bits.
        mantissa, exponent = jnp.frexp(largest)
        scales = jnp.ldexp(jnp.float32(1), exponent - jnp.where(mantissa <= LARGEST / 512, 9, 8))
    else:
        scales = largest / LARGEST
    # Asked of the weights: on a CPU XLA's maximum of a NaN and a number may be the number.
    scales = jnp.where(jnp.isfinite(blocks).all((2, 4)), scales, jnp.nan)
    scaled = (blocks / scales[:, :, None, :, None]).reshape(experts, row_blocks, rows, padded.shape[2])
    scaled = scaled.reshape(padded.shape)[:, :out, :inner]
    return BlockScaled(scaled.astype(VALUES), scales.astype(scale_dtype))
