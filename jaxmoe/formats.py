"""The number formats of a layer: what the elements of each of its arrays are, and how many bytes they take.

`call.py` chooses them, the implementations read them. Compiled code has the same in `ffi/common/formats.h`, and tests
compare the two.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

# Of a block: all rows, or columns, that an array has.
ALL = 2**31 - 1
# Of tokens, and of wide experts.
FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Format:
    """Of an array of rows and columns: its elements, and one scale for each block of them.

    Args:
      dtype: of an element.
      scale_rows: rows of a block that has one scale; 0 where elements have none.
      scale_columns: columns of such a block.
      scale_dtype: of a scale.
      array_scale_dtype: of one more scale, for all of the array; `None` where there is none.
      through_e4m3: whether, beside rows in 8 bits, elements in 4 may become E4M3 ahead of their products.
      repacked: whether elements in 4 lie in words as registers take them (`jaxmoe.repacked`).

    >>> Format(jnp.bfloat16).bytes(rows=2, columns=64)
    256
    >>> Format(jnp.float8_e4m3fn, scale_rows=1, scale_columns=128).bytes(rows=2, columns=256)
    528
    """

    dtype: Any
    scale_rows: int = 0
    scale_columns: int = 0
    scale_dtype: Any = jnp.float32
    array_scale_dtype: Any = None
    through_e4m3: bool = False
    repacked: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "scale_dtype", jnp.dtype(self.scale_dtype))
        if self.array_scale_dtype is not None:
            object.__setattr__(self, "array_scale_dtype", jnp.dtype(self.array_scale_dtype))

    def __str__(self) -> str:
        if not self.scale_rows:
            return self.dtype.name
        rows, columns = ("all" if size == ALL else size for size in (self.scale_rows, self.scale_columns))
        of_array = "" if self.array_scale_dtype is None else f", a {self.array_scale_dtype} one for the array"
        through, repacked = ", through E4M3" * self.through_e4m3, ", repacked" * self.repacked
        return f"{self.dtype} (a {self.scale_dtype} scale for {rows} x {columns}{of_array}){through}{repacked}"

    def row_bytes(self, columns: int) -> int:
        """Bytes of the elements of a row, which end at a whole byte."""
        return -(-columns * bits(self.dtype) // 8)

    def scale_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the scales of an array, which lie behind its elements."""
        if not self.scale_rows:
            return 0
        of_array = 0 if self.array_scale_dtype is None else bits(self.array_scale_dtype) // 8
        blocks = -(-rows // self.scale_rows) * -(-columns // self.scale_columns)
        return blocks * bits(self.scale_dtype) // 8 + of_array

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of an array, scales included."""
        return rows * self.row_bytes(columns) + self.scale_bytes(rows, columns)


def bits(dtype: Any) -> int:
    """Bits of an element, which are fewer than those of a byte for 4-bit types."""
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """Returns what is computed and added up in where arrays have a dtype: float64 stays, all else becomes float32.

    What `jnp.promote_types` returns, which raises where `jax_numpy_dtype_promotion` is "strict".

    >>> at_least_float32(jnp.bfloat16).name, at_least_float32("float64").name
    ('float32', 'float64')
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def check_wide_dtype(caller: str, what_is: str, dtype: DTypeLike) -> None:
    """Raises where wide experts cannot be in a dtype."""
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:  # names no dtype
        name = repr(dtype)
    if name not in FLOAT_DTYPES:
        raise TypeError(f"{caller}: {what_is} {name}; it must be one of {', '.join(FLOAT_DTYPES)}.")


@dataclasses.dataclass(frozen=True)
class Formats:
    """Of the arrays of a layer.

    Args:
      tokens: x, and the gradients of outputs beside it.
      h: between the two GEMMs of an expert; gate and up, and the gradients of all three.
      answers: what experts make of rows, and their sums: the output and the gradient of x.
      weights: of the experts.
      sums: routing weights, and sums that are not rounded in between.

    >>> Formats.of(jnp.bfloat16).sums.dtype.name
    'float32'
    """

    tokens: Format
    h: Format
    answers: Format
    weights: Format
    sums: Format

    @classmethod
    def of(cls, dtype: Any) -> "Formats":
        """Everything in one dtype but for the sums, which have at least 32 bits."""
        plain = Format(dtype)
        return cls(plain, plain, plain, plain, Format(at_least_float32(dtype)))

    @property
    def decodes(self) -> bool:
        """Whether weights have fewer bits than the rows that they are multiplied with."""
        return self.weights.dtype != self.tokens.dtype

    @property
    def decoded(self) -> "Formats":
        """The same weights, decoded before they are multiplied: everything else in the dtype of answers."""
        return dataclasses.replace(self.wide, weights=self.weights)

    @property
    def wide(self) -> "Formats":
        """The same without 8 bits: everything in the dtype of answers."""
        return Formats.of(self.answers.dtype)


BF16 = Formats.of(jnp.bfloat16)
