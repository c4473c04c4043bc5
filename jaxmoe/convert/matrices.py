"""How a matrix of an expert lies in files that have one tensor, or several, for each: a table of formats.

A matrix has `out` rows and `in` columns there, as in PyTorch. Wide ones are transposed on their way into `Experts`;
what is in 8 or 4 bits stays as it lies, since that is the layout of `BlockScaled`, `MXFP4` and `NVFP4`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxmoe.block_scaled import BLOCK, BlockScaled
from jaxmoe.convert.placing import Dimension, Stack
from jaxmoe.convert.tensors import Block
from jaxmoe.four_bit import MXFP4, NVFP4

# Of each matrix of `Experts`, what its outputs and inputs are.
SIDES: dict[str, tuple[Literal["hidden", "intermediate"], Literal["hidden", "intermediate"]]] = {
    "w_gate": ("intermediate", "hidden"),
    "w_up": ("intermediate", "hidden"),
    "w_down": ("hidden", "intermediate"),
}
# Those that are multiplied with the same: tokens, and what lies between.
TOGETHER = (("w_gate", "w_up"), ("w_down",))
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
      block: outputs and inputs of the matrix that share an element, `None` for all of a side; `None` alone where it is
        one number that is no matrix in `Experts` either.
      advice: where it is of another type; that of a weight, of another one of one byte.
      written: what `to_hf` makes of it; `None` leaves it.
      single: the shape that `to_hf` gives to one number.
      inverse: whether files have what is divided by, not what is multiplied with.
    """

    suffix: str
    types: Mapping[Any, Any]
    block: tuple[int | None, int | None] | None
    advice: str = ""
    written: Any = None
    single: tuple[int, ...] = ()
    inverse: bool = False

    def shape(self, out: int, inner: int) -> tuple[int, ...]:
        """Returns the shape that it has for a matrix `[out, in]`."""
        each = zip((out, inner), self.block or (), strict=False)
        return tuple(1 if shared is None else -(-size // shared) for size, shared in each)

    @property
    def is_number(self) -> bool:
        """Whether it is one number, however large the matrix is."""
        return self.block in (None, (None, None))

    @property
    def words(self) -> str:
        """The same in words."""
        if self.is_number:
            return "[] or [1], one number"
        sides = [
            side if size == 1 else "1" if size is None else f"ceil({side} / {size})"
            for side, size in zip(("out", "in"), self.block or (), strict=True)
        ]
        return f"[{', '.join(sides)}]"


@dataclasses.dataclass(frozen=True)
class Format:
    """Matrices of one kind.

    Args:
      name: in words.
      type: in `Experts`; `None` for wide matrices.
      parts: the tensors in the order of the fields of `type`.
      input_scale: another one, that `to_hf` gives back: a scale of what the matrix is multiplied with.
    """

    name: str
    type: Any
    parts: tuple[Part, ...]
    input_scale: Part | None = None


_E8M0_TYPES = {E8M0: E8M0, U8: E8M0}
_E4M3_ADVICE = "Bytes are read as such by view(jnp.float8_e4m3fn)."
_IN_8_BITS = Part("weight", {E4M3: E4M3}, (1, 1), _E4M3_ADVICE)

WIDE = Format("16 or 32 bits", None, (Part("weight", WIDE_TYPES, (1, 1)),))
# Scales are what values are multiplied with, in spite of their name.
FP8 = Format(
    "FP8 in blocks",
    BlockScaled,
    (
        _IN_8_BITS,
        Part(
            "weight_scale_inv",
            {F32: F32, BF16: F32, E8M0: E8M0},
            (BLOCK, BLOCK),
            "Bytes of E8M0 (the exponent + 127) are read as such by view(jnp.float8_e8m0fnu).",
            written=F32,
        ),
    ),
)


def _compressed(name: str, block: tuple[int | None, int | None], input_scale: Part | None = None) -> Format:
    """As compressed-tensors and ModelOpt write FP8, in whichever family."""
    scales = Part("weight_scale", {F32: F32, BF16: F32}, block, written=F32, single=(1,))
    return Format(name, BlockScaled, (_IN_8_BITS, scales), input_scale)


FP8_COMPRESSED = (
    _compressed("FP8 with a scale for each output", (1, None)),
    _compressed(
        "FP8 with a scale for each matrix",
        (None, None),
        Part("input_scale", {F32: F32, BF16: BF16}, None, single=(1,)),
    ),
    _compressed("FP8 in blocks, of compressed-tensors", (BLOCK, BLOCK)),
)
FP8_E8M0 = Format(
    "FP8 in blocks with powers of two",
    BlockScaled,
    (_IN_8_BITS, Part("scale", _E8M0_TYPES, (BLOCK, BLOCK), E8M0_ADVICE)),
)
# Two values in a byte.
FP4_E8M0 = Format(
    "MXFP4",
    MXFP4,
    (
        Part("weight", {I8: U8, U8: U8}, (1, 2), written=I8),
        Part("scale", _E8M0_TYPES, (1, MXFP4.group), E8M0_ADVICE),
    ),
)
# As NVIDIA's ModelOpt writes it, in whichever family.
FP4_MODELOPT = Format(
    "NVFP4",
    NVFP4,
    (
        Part("weight", {U8: U8, I8: U8}, (1, 2)),
        Part("weight_scale", {E4M3: E4M3}, (1, NVFP4.group), _E4M3_ADVICE),
        Part("weight_scale_2", {F32: F32}, None),
    ),
    input_scale=Part("input_scale", {F32: F32}, None),
)
# As compressed-tensors writes both, in whichever family. It divides by the scale of a matrix.
_PACKED = Part("weight_packed", {U8: U8}, (1, 2))
FP4_COMPRESSED = (
    Format(
        "NVFP4, of compressed-tensors",
        NVFP4,
        (
            _PACKED,
            Part("weight_scale", {E4M3: E4M3}, (1, NVFP4.group), _E4M3_ADVICE),
            Part("weight_global_scale", {F32: F32}, None, inverse=True),
        ),
        input_scale=Part("input_global_scale", {F32: F32}, None, inverse=True),
    ),
    Format("MXFP4", MXFP4, (_PACKED, Part("weight_scale", _E8M0_TYPES, (1, MXFP4.group), E8M0_ADVICE, written=U8))),
)
FLOAT_SCALES = (WIDE, FP8, *FP8_COMPRESSED, FP4_MODELOPT, *FP4_COMPRESSED)
E8M0_SCALES = (WIDE, FP8_E8M0, FP4_E8M0, FP4_MODELOPT)


def format_of(block: Block, name: str, formats: Sequence[Format]) -> Format:
    """Returns the format of a matrix, by the tensors that it has, and where that leaves several by their shapes.

    Raises:
      TypeError: its `weight` is of a type that none of them has.
      ValueError: it has no `weight`, or scales of a shape that none of them has.
    """
    complete = [
        kind for kind in formats if len(kind.parts) > 1 and all(f"{name}.{part.suffix}" in block for part in kind.parts)
    ]
    weight = f"{name}.{complete[0].parts[0].suffix if complete else 'weight'}"
    dtype = block.dtype(weight, "[out, in]")
    fitting = [kind for kind in complete or formats if dtype in kind.parts[0].types]
    # What has more tensors has all of them.
    fitting = [kind for kind in fitting if not complete or len(kind.parts) == max(len(each.parts) for each in fitting)]
    if complete and len(fitting) > 1:
        return _by_shapes(block, name, fitting)
    if fitting:
        return fitting[0]
    weights = {str(known) for kind in complete or formats for known in kind.parts[0].types}
    beside = " and ".join(part.suffix for kind in complete[:1] for part in kind.parts[1:])
    # What a weight of one byte may be read as.
    advice = complete[0].parts[0].advice if complete and dtype.itemsize == 1 else ""
    raise TypeError(
        f"from_hf: tensor {block.name(weight)!r} is {dtype}; {f'with {beside} ' if beside else ''}it must be "
        f"{' or '.join(sorted(weights))}. {advice}".rstrip()
    )


def _by_shapes(block: Block, name: str, kinds: Sequence[Format]) -> Format:
    of_weight = kinds[0].parts[0]
    out, inner = block.shape(f"{name}.weight", of_weight.types, (None, None), of_weight.words)
    scales = f"{name}.{kinds[0].parts[1].suffix}"
    block.dtype(scales, kinds[0].parts[1].words)
    for kind in kinds:
        if block.fits(scales, kind.parts[1].shape(out, inner)):
            return kind
    known = "; ".join(f"{kind.parts[1].words}: {kind.name}" for kind in kinds)
    raise ValueError(
        f"from_hf: tensor {block.name(scales)!r} has shape {list(block.found_shape(scales))} beside a weight "
        f"{[out, inner]}; it must be one of {known}."
    )


def stacked(
    block: Block, field: str, names: Sequence[str], kind: Format, sizes: Mapping[str, int], *, split: bool, dtype: Any
) -> tuple[Any, Stack | None]:
    """Returns a matrix of `Experts` as `Stack`s, and one of `kind.input_scale` where the files have it.

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
    size = sizes[out], sizes[inner]

    def stack(part: Part) -> Stack:
        shape = part.shape(*size)
        found = block.same_dtype(names, part.suffix, part.types, part.words, part.advice)
        for name in names:
            block.check(f"{name}.{part.suffix}", shape, f"{part.words} with out={size[0]}, in={size[1]}")
        becomes = part.types[found]
        read = found.itemsize == 1 and becomes != found

        def element(expert: int) -> np.ndarray:
            array = block.array(f"{names[expert]}.{part.suffix}").reshape(shape)
            array = array.view(becomes) if read else array
            array = np.asarray(1 / array, array.dtype) if part.inverse else array
            return array.T if kind.type is None else array

        # Scales of blocks that a split would cut stay whole.
        sides: list[Dimension] = []
        if part.block is not None:
            each = zip((out, inner), size, part.block, strict=True)
            sides = [side if shared is not None and count % shared == 0 else None for side, count, shared in each]
        order = slice(None, None, -1 if kind.type is None else 1)
        return Stack(
            f"{'experts' if split else 'shared'}.{field}",
            (len(names), *shape[order]),
            becomes if kind.type is not None or dtype is None else np.dtype(dtype),
            ("experts" if split else None, *sides[order]),
            element,
            may_stay_whole=part is not kind.parts[0],
        )

    stacks = [stack(part) for part in kind.parts]
    of_input = kind.input_scale
    has_input_scale = of_input is not None and f"{names[0]}.{of_input.suffix}" in block
    input_scale = stack(of_input) if of_input is not None and has_input_scale else None
    return (stacks[0] if kind.type is None else kind.type(*stacks)), input_scale


def with_largest_input_scales(matrices: Mapping[str, Any], scales: Mapping[str, Stack | None]) -> dict[str, Any]:
    """Returns the matrices of `Experts` by name, those in FP8 with an `input_scale` where the files have one for each.

    Every expert gets the largest of all of them, of gate and up together: a token is rounded once for all its experts.
    Those of all experts are read on every process, when the first is placed; they are numbers.
    """
    made = dict(matrices)
    for names in TOGETHER:
        stacks = [stack for name in names if (stack := scales[name]) is not None]
        if len(stacks) < len(names) or not all(isinstance(matrices[name], BlockScaled) for name in names):
            continue
        largest = functools.cache(functools.partial(_largest, tuple(stacks)))
        for name, stack in zip(names, stacks, strict=True):
            of_all = dataclasses.replace(stack, dtype=F32, element=lambda _, largest=largest: largest())
            made[name] = dataclasses.replace(matrices[name], input_scale=of_all)
    return made


def _largest(stacks: Sequence[Stack]) -> np.ndarray:
    """Returns the largest number of arrays `[experts]`; NaN where one is that."""
    numbers = [stack.element(expert) for stack in stacks for expert in range(stack.shape[0])]
    return np.asarray(np.max([np.asarray(number, F32) for number in numbers]))
