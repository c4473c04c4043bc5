"""Matrices in 8 bits with a scale for each block of them, in the fields of `Experts`.

`quantization.py` makes them and makes wide matrices of them; `precision.py` says what `moe_layer` does with them.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxmoe import e8m0
from jaxmoe.formats import Format
from jaxmoe.pytrees import pytree
from jaxmoe.quantized_matrix import QuantizedMatrix

# Rows and columns of the blocks of DeepSeek-V3's checkpoints, and of those made after them.
BLOCK = 128
VALUES, SCALES = jnp.float8_e4m3fn, (jnp.float32, jnp.float8_e8m0fnu)
# What has one scale: a block of 128 x 128, all weights that make one output, a matrix.
BlockKind = Literal["128x128", "channel", "expert"]
BLOCK_KINDS: tuple[BlockKind, ...] = ("128x128", "channel", "expert")


def block_of(kind: str, out: int, inner: int) -> tuple[int, int]:
    """Returns the outputs and inputs of a matrix that share a scale.

    >>> block_of("channel", out=256, inner=384)
    (1, 384)
    """
    return {"128x128": (BLOCK, BLOCK), "channel": (1, inner), "expert": (out, inner)}[kind]


@pytree
class BlockScaled(QuantizedMatrix):
    """A matrix for each expert in 8 bits: each element is a value times the scale of its block.

    Args:
      values: `float8_e4m3fn [experts, out, in]`. That is how checkpoints lie, and the transpose of the matrices that
        `Experts` has in wide types: tensor cores take 8-bit factors along their last dimension only.
      scales: float32, or powers of two as `float8_e8m0fnu`: `[experts, ceil(out / 128), ceil(in / 128)]` for blocks of
        128 x 128, `[experts, out, 1]` for one scale per output channel, `[experts, 1, 1]` for one per expert. Below
        2^-126, no normal number, a float32 scale is zero on a CPU; the power of two there, byte 0, is not, but for
        `implementation="megakernel"`.
      input_scale: float32 `[experts]`, the scale of what the matrix is multiplied with, where that is not found from
        the numbers but was calibrated: `precision="fp8-static"` of `jaxmoe.moe_layer`. All experts of a layer are meant
        to have the same number: a rank takes the largest that its experts have, of gate and up together for tokens, of
        `w_down` for h. `None` where there is none; `jaxmoe.with_input_scales` sets it.

    `shape` is that of the wide matrices, so that `Experts` with these arrays has the same sizes.

    >>> import jax.numpy as jnp
    >>> w = BlockScaled(jnp.zeros((4, 256, 384), jnp.float8_e4m3fn), jnp.ones((4, 2, 3)))
    >>> w.shape, w.block
    ((4, 384, 256), (128, 128))
    """

    bits = 8

    values: Float[Array, "experts out in"]
    scales: Shaped[Array, "experts out_blocks in_blocks"]
    input_scale: Float[Array, " experts"] | None = None

    def check(self) -> None:
        """Raises where the arrays are not what the class says.

        Raises:
          TypeError: values or scales of another type than the class says.
          ValueError: shapes that make no blocks, or another number of input scales than of experts.
        """
        _ = self.kinds
        if self.input_scale is None:
            return
        needed, found = (self.values.shape[0],), tuple(self.input_scale.shape)
        if self.input_scale.dtype != jnp.float32 or found != needed:
            raise (TypeError if found == needed else ValueError)(
                f"BlockScaled: input_scale is {self.input_scale.dtype}{list(found)}; it must be float32{list(needed)}, "
                "the scale of what each expert is multiplied with. jaxmoe.with_input_scales(experts, tokens, h) makes "
                "such arrays."
            )

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale.

        Raises:
          TypeError: values or scales of another type than the class says.
          ValueError: shapes that make no blocks.
        """
        kind = self.kinds[0]
        return block_of(kind, *self.values.shape[1:])

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """What may share a scale, by the two shapes: one of `BLOCK_KINDS`, several for a matrix of one block.

        Raises:
          TypeError: values or scales of another type than the class says.
          ValueError: shapes that make no blocks.
        """
        values, scales = self.values, self.scales
        if values.dtype != VALUES or scales.dtype not in SCALES:
            raise TypeError(
                f"BlockScaled: values are {values.dtype} and scales {scales.dtype}; they must be float8_e4m3fn, and "
                "float32 or float8_e8m0fnu. Bytes of either are read as such by array.view(dtype)."
            )
        if len(values.shape) == len(scales.shape) == 3 and values.shape[0] == scales.shape[0]:
            experts, out, inner = values.shape
            blocks = (block_of(kind, out, inner) for kind in BLOCK_KINDS)
            fits = [scales.shape == (experts, -(-out // max(a, 1)), -(-inner // max(b, 1))) for a, b in blocks]
            if any(fits):
                return tuple(kind for kind, fit in zip(BLOCK_KINDS, fits, strict=True) if fit)
        raise ValueError(
            f"BlockScaled: values {tuple(values.shape)} and scales {tuple(scales.shape)} make no blocks. Values are "
            "[experts, out, in]; scales [experts, ceil(out / 128), ceil(in / 128)], [experts, out, 1] or "
            "[experts, 1, 1]. Values that lie as [experts, in, out] have to be transposed: "
            "values.swapaxes(1, 2)."
        )

    @property
    def format(self) -> Format:
        """The same in the terms of layouts: what an array of such weights takes."""
        rows, columns = self.block
        return Format(self.values.dtype, rows, columns, self.scales.dtype)

    def wide(self, dtype: DTypeLike) -> Float[Array, "experts in out"]:
        """Returns the matrices as `Experts` has them: products in float32, rounded once to `dtype`.

        What is below 2^-126, a product or a float32 scale, becomes zero where the backend flushes such numbers, as a
        CPU does.
        """
        products, scales = self.values.astype(jnp.float32), jnp.asarray(self.scales)  # checkpoints have NumPy's
        for factor in e8m0.factors(scales) if scales.dtype == jnp.float8_e8m0fnu else (scales,):
            each = factor
            for axis, size in zip((1, 2), self.block, strict=True):
                each = _repeated(each, axis, size, products.shape[axis])
            products = products * each
        return products.astype(dtype).swapaxes(1, 2)


def _repeated(scales: Float[Array, "experts _ _"], axis: int, size: int, length: int) -> Float[Array, "experts _ _"]:
    """Returns every number `size` times along an axis, and of those the first `length`.

    Where an axis of a mesh splits that one (Explicit axes), `jnp.repeat` would have to be told how.
    """
    before, blocks, behind = scales.shape[:axis], scales.shape[axis], scales.shape[axis + 1 :]
    each = jnp.broadcast_to(jnp.expand_dims(scales, axis + 1), (*before, blocks, size, *behind))
    joined = each.reshape(*before, blocks * size, *behind)
    return joined if blocks * size == length else jax.lax.slice_in_dim(joined, 0, length, axis=axis)
