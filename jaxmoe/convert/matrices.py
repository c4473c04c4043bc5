"""How a matrix of an expert lies in files that have one tensor, or several, for each: a table of formats.

A matrix has `out` rows and `in` columns there, as in PyTorch. Wide ones are transposed on their way into `Experts`;
what is in 8 or 4 bits stays as it lies, since that is the layout of `BlockScaled`, `MXFP4` and `NVFP4`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.block_scaled import BLOCK, BlockScaled
from jaxmoe.convert.placing import Dimension, Stack
from jaxmoe.convert.tensors import Block
from jaxmoe.four_bit import MXFP4, NVFP4

# Of each matrix of `Experts`, what its outputs and inputs are.
SIDES: dict[str, tuple[Dimension, Dimension]] = {
    "w_gate": ("intermediate", "hidden"),
    "w_up": ("intermediate", "hidden"),
    "w_down": ("hidden", "intermediate"),
}
WIDE_TYPES: dict[Any, Any] = {np.dtype(kind): np.dtype(kind) for kind in (jnp.bfloat16, jnp.float16, jnp.float32)}
E4M3, E8M0 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e8m0fnu)
F32, BF16, U8, I8 = np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.uint8), np.dtype(np.int8)
E8M0_ADVICE = (
    "These scales are powers of two, each a byte of the exponent + 127: pass float8_e8m0fnu, or the bytes as uint8. "
    "What has read such bytes as numbers has other scales: take them from the file. Where they are the powers of two "
    "themselves, scales.astype(jnp.float8_e8m0fnu) is exact."
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    Args:
      suffix: behind the name of the matrix.
      types: what it may be in a file, and what becomes of each: bytes are read as that type, numbers converted.
      shape: of a matrix `[out, in]`.
      words: the same in words.
      advice: where it is of another type.
      written: what `to_hf` makes of it; `None` leaves it.
    """

    suffix: str
    types: Mapping[Any, Any]
    shape: Callable[[int, int], tuple[int, ...]]
    words: str
    advice: str = ""
    written: Any = None


@dataclasses.dataclass(frozen=True)
class Format:
    """Matrices of one kind.

    Args:
      name: in words.
      type: in `Experts`; `None` for wide matrices.
      parts: the tensors in the order of the fields of `type`.
      unused: another one, that `to_hf` gives back: a scale of what the matrix is multiplied with.
    """

    name: str
    type: Any
    parts: tuple[Part, ...]
    unused: Part | None = None


def _whole(out: int, inner: int) -> tuple[int, ...]:
    return out, inner


def _packed(out: int, inner: int) -> tuple[int, ...]:
    return out, inner // 2


def _blocks(out: int, inner: int) -> tuple[int, ...]:
    return -(-out // BLOCK), -(-inner // BLOCK)


def _scalar(out: int, inner: int) -> tuple[int, ...]:
    del out, inner
    return ()


_IN_8_BITS = Part("weight", {E4M3: E4M3}, _whole, "[out, in]", "Bytes are read as such by view(jnp.float8_e4m3fn).")
_IN_BLOCKS = f"[ceil(out / {BLOCK}), ceil(in / {BLOCK})]"
_E8M0_TYPES = {E8M0: E8M0, U8: E8M0}

WIDE = Format("16 or 32 bits", None, (Part("weight", WIDE_TYPES, _whole, "[out, in]"),))
# Scales are what values are multiplied with, in spite of their name.
FP8 = Format(
    "FP8 in blocks",
    BlockScaled,
    (
        _IN_8_BITS,
        Part(
            "weight_scale_inv",
            {F32: F32, BF16: F32, E8M0: E8M0},
            _blocks,
            _IN_BLOCKS,
            "Bytes of E8M0 (the exponent + 127) are read as such by view(jnp.float8_e8m0fnu).",
            written=F32,
        ),
    ),
)
FP8_E8M0 = Format(
    "FP8 in blocks with powers of two",
    BlockScaled,
    (_IN_8_BITS, Part("scale", _E8M0_TYPES, _blocks, _IN_BLOCKS, E8M0_ADVICE)),
)
FP4_E8M0 = Format(
    "MXFP4",
    MXFP4,
    (
        Part("weight", {I8: U8, U8: U8}, _packed, "[out, in / 2], two values in a byte", written=I8),
        Part(
            "scale",
            _E8M0_TYPES,
            lambda out, inner: (out, inner // MXFP4.group),
            f"[out, in / {MXFP4.group}]",
            E8M0_ADVICE,
        ),
    ),
)
# As NVIDIA's ModelOpt writes it, in whichever family.
FP4_MODELOPT = Format(
    "NVFP4",
    NVFP4,
    (
        Part("weight", {U8: U8, I8: U8}, _packed, "[out, in / 2], two values in a byte"),
        Part(
            "weight_scale",
            {E4M3: E4M3},
            lambda out, inner: (out, inner // NVFP4.group),
            f"[out, in / {NVFP4.group}]",
            "Bytes are read as such by view(jnp.float8_e4m3fn).",
        ),
        Part("weight_scale_2", {F32: F32}, _scalar, "[], one number"),
    ),
    unused=Part("input_scale", {F32: F32}, _scalar, "[], one number"),
)
FLOAT_SCALES = (WIDE, FP8, FP4_MODELOPT)
E8M0_SCALES = (WIDE, FP8_E8M0, FP4_E8M0, FP4_MODELOPT)


def format_of(block: Block, name: str, formats: Sequence[Format]) -> Format:
    """Returns the format of a matrix, by the tensors that it has.

    Raises:
      TypeError: its `weight` is of a type that none of them has.
      ValueError: it has no `weight`.
    """
    dtype = block.dtype(f"{name}.weight", "[out, in]")
    complete = [
        kind for kind in formats if len(kind.parts) > 1 and all(f"{name}.{part.suffix}" in block for part in kind.parts)
    ]
    for kind in (*complete, *(() if complete else formats)):
        if dtype in kind.parts[0].types:
            return kind
    weights = {str(known) for kind in complete or formats for known in kind.parts[0].types}
    beside = "".join(f"; with {part.suffix}" for kind in complete[:1] for part in kind.parts[1:])
    advice = complete[0].parts[0].advice if complete else ""
    raise TypeError(
        f"from_hf: tensor {block.name(f'{name}.weight')!r} is {dtype}{beside} it must be "
        f"{' or '.join(sorted(weights))}. {advice}".rstrip()
    )


def stacked(
    block: Block, field: str, names: Sequence[str], kind: Format, sizes: Mapping[str, int], *, split: bool, dtype: Any
) -> tuple[Any, Stack | None]:
    """Returns a matrix of `Experts` as `Stack`s, and one of `kind.unused` where the files have it.

    Args:
      block: where the tensors are.
      field: such as `w_gate`.
      names: of the matrix of each expert.
      kind: of all of them.
      sizes: of the dimensions.
      split: whether the first dimension is that of the experts of `moe_layer`.
      dtype: of wide matrices; `None` is as found.

    Raises:
      TypeError, ValueError: a tensor is missing, or is not what it must be.
    """
    out, inner = SIDES[field]
    if out is None or inner is None:
        raise AssertionError("both sides of a matrix are split alike")

    def stack(part: Part) -> Stack:
        shape = part.shape(sizes[out], sizes[inner])
        found = block.same_dtype(names, part.suffix, part.types, part.words, part.advice)
        for name in names:
            block.check(f"{name}.{part.suffix}", shape, f"{part.words} with out={sizes[out]}, in={sizes[inner]}")
        becomes = part.types[found]
        read = found.itemsize == 1 and becomes != found

        def element(expert: int) -> np.ndarray:
            array = block.array(f"{names[expert]}.{part.suffix}").reshape(shape)
            array = array.view(becomes) if read else array
            return array.T if kind.type is None else array

        sides: tuple[Dimension, ...] = (out, inner)[: len(shape)]
        if kind.type is None:
            shape_of_element, sides = shape[::-1], sides[::-1]
            becomes = becomes if dtype is None else np.dtype(dtype)
        else:
            shape_of_element = shape
        dimensions: tuple[Dimension, ...] = ("experts" if split else None, *sides)
        name = f"{'experts' if split else 'shared'}.{field}"
        return Stack(name, (len(names), *shape_of_element), becomes, dimensions, element)

    stacks = [stack(part) for part in kind.parts]
    has_unused = kind.unused is not None and f"{names[0]}.{kind.unused.suffix}" in block
    unused = stack(kind.unused) if kind.unused is not None and has_unused else None
    return (stacks[0] if kind.type is None else kind.type(*stacks)), unused
