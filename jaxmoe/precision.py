"""What `precision` of a layer means: which of its arrays have 8 or 4 bits, and how experts and rows come to have them.

`call.py` resolves it, the implementations compute with it.

    precision     tokens and h                                    weights
    None          dtype of x                                      dtype of x
    "fp8"         8 bits, a float32 scale for 1 x 128             8 bits, or MXFP4, or NVFP4 through E4M3
    "fp8-e8m0"    the same, each scale a power of two             the same
    "fp8-static"  8 bits, one given scale for all of either       8 bits, with an `input_scale`
    "w8a16"       dtype of x                                      8 bits, decoded to the dtype of x
    "w4a16"       dtype of x                                      4 bits, decoded to the dtype of x

Beside weights in 4 bits only rows are rounded, never the weights: an E2M1 value times a power of two is exact in the
dtype of x, and products of E2M1 values with rows in 8 bits take the scales of groups in float32. The product with an
E4M3 scale (NVFP4) is exact in the dtype of x, but has more bits than E4M3: beside rows in 8 bits it is rounded to that
where `through_e4m3` asked for it.

Only a forward pass rounds. A backward pass is that of the layer in the dtype of x: of the same tokens, and of the
experts that were rounded, or the decoded ones where they came in 8 or 4 bits (a straight-through estimate).
"""

import dataclasses
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmoe.block_scaled import BLOCK, SCALES, VALUES, BlockScaled, block_of
from jaxmoe.experts import AnyExperts, Experts, present, split
from jaxmoe.formats import ALL, Format, Formats
from jaxmoe.four_bit import NVFP4, FourBit, map_four_bit, marked
from jaxmoe.options import Accumulation, Precision
from jaxmoe.quantization import (
    MATRICES,
    decode_8_bits,
    dequantize,
    dequantize_rows,
    quantize_rows,
    quantized_by_layer,
)
from jaxmoe.quantized_matrix import QuantizedMatrix

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ACCUMULATIONS: tuple[Accumulation, ...] = get_args(Accumulation)
# Of tokens and h: as compiled code has them too, scales are float32 whether or not they are powers of two.
ROWS = Format(VALUES, 1, BLOCK, jnp.float32)


def resolve(precision: Any, experts: AnyExperts, dtype: Any) -> Precision | None:
    """Returns the precision of a call, by default that of its experts.

    Args:
      precision: what the user passed.
      experts: checked.
      dtype: of x.

    Raises:
      ValueError: it is not known, or goes with experts of other types.
      TypeError: it goes with tokens of other dtypes.
    """
    kind = type(experts.matrix)
    if precision is None:
        precision = "w4a16" if issubclass(kind, FourBit) else None
        if kind is BlockScaled:
            precision = "fp8" if _without_input_scale(experts) else "fp8-static"
    elif precision not in PRECISIONS:
        raise ValueError(
            f"moe_layer: precision={precision!r} is not known. Use one of {', '.join(map(repr, PRECISIONS))}, or None "
            "for the dtype of x with wide experts, 'w4a16' with MXFP4 and NVFP4, and 'fp8' with BlockScaled ones, or "
            "'fp8-static' where all of their matrices have an input_scale."
        )
    if precision is not None and dtype == jnp.float64:
        raise TypeError(
            f"moe_layer: x is float64, and precision={precision!r} is for bfloat16, float16 and float32: scales and "
            "sums are float32. Cast x, or pass wide experts without a precision."
        )
    _check_kind(precision, experts)
    return precision


def _check_kind(precision: Precision | None, experts: AnyExperts) -> None:
    """Raises where a precision does not go with the type of the matrices."""
    matrix = experts.matrix
    if has_given_scales(precision):
        _check_given_scales(experts)
    given = type(matrix).__name__ if isinstance(matrix, QuantizedMatrix) else f"{matrix.dtype}"
    for asked, bits, kind, block in (("w8a16", 8, BlockScaled, ""), ("w4a16", 4, FourBit, ", 'mxfp4'")):
        if precision != asked or isinstance(matrix, kind):
            continue
        instead = (
            "Leave precision out for these."
            if isinstance(matrix, QuantizedMatrix)
            else f"Pass jaxmoe.quantize(experts{block}), or leave precision out for wide experts."
        )
        raise ValueError(
            f"moe_layer: precision={asked!r} decodes experts in {bits} bits, and experts.w_gate is {given}. {instead}"
        )
    if rounds_rows(precision) and isinstance(matrix, FourBit) and matrix.repacked:
        raise ValueError(
            f"moe_layer: precision={precision!r} rounds tokens to 8 bits, and the experts are those of "
            "jaxmoe.repacked, which are for tokens in 16. Leave precision out, or pass the experts as they were before."
        )
    if rounds_rows(precision) and isinstance(matrix, NVFP4) and not _all_through_e4m3(experts):
        raise ValueError(
            f"moe_layer: precision={precision!r} multiplies 8 bits with 8 bits, and experts.w_gate is NVFP4: the "
            "product of an E2M1 value and an E4M3 scale does not fit in E4M3 (rounding it is an error of 1.7 % RMS of "
            "a weight). Pass precision='w4a16', which decodes it exactly and leaves tokens in the dtype of x, or None; "
            "or ask for the rounding with jaxmoe.through_e4m3(experts)."
        )


def _all_through_e4m3(experts: AnyExperts) -> bool:
    return all(matrix.through_e4m3 for matrix in present(experts).values() if isinstance(matrix, FourBit))


def _check_given_scales(experts: AnyExperts) -> None:
    """Raises where experts lack scales of what they are multiplied with."""
    matrix, asked = experts.matrix, "moe_layer: precision='fp8-static' rounds tokens and h with the scales that experts"
    if isinstance(matrix, FourBit):
        raise ValueError(
            f"{asked} in 8 bits have as input_scale, and experts.w_gate is {type(matrix).__name__}, which has none. "
            "Leave precision out for these."
        )
    if not isinstance(matrix, BlockScaled):
        raise ValueError(
            f"{asked} in 8 bits have as input_scale, and experts.w_gate is {matrix.dtype}. Pass "
            "jaxmoe.with_input_scales(jaxmoe.quantize(experts), tokens, h), or precision='fp8', which finds a scale "
            "for each 128 columns."
        )
    if missing := _without_input_scale(experts):
        names = " and ".join(f"experts.{name}" for name in missing)
        raise ValueError(
            f"{asked} have as input_scale, and {names} {'has' if len(missing) == 1 else 'have'} none. All matrices "
            "need one: pass jaxmoe.with_input_scales(experts, tokens, h), or precision='fp8', which finds a scale for "
            "each 128 columns."
        )


def _without_input_scale(experts: AnyExperts) -> list[str]:
    """Returns the names of the matrices, all `BlockScaled`, that lack a scale of what they are multiplied with."""
    matrices = {name: matrix for name in MATRICES if (matrix := getattr(experts, name, None)) is not None}
    return [name for name, matrix in matrices.items() if matrix.input_scale is None]


def check_accumulation(accumulation: Any, precision: Precision | None, experts: AnyExperts) -> None:
    """Raises where sums cannot be made as asked for.

    Args:
      accumulation: what the user passed.
      precision: of the call, resolved.
      experts: checked, and going with the precision.

    Raises:
      ValueError: it is not known, or there are scales that change within a sum.
    """
    if accumulation not in ACCUMULATIONS:
        raise ValueError(
            f"moe_layer: accumulation={accumulation!r} is not known. Use one of {', '.join(map(repr, ACCUMULATIONS))}."
        )
    if accumulation == "promoted":
        return
    asked = "moe_layer: accumulation='fast' scales the sum of all products of a row and a column once"
    if not has_given_scales(precision):
        raise ValueError(
            f"{asked}, and precision={precision!r} does not give all tokens one scale. Pass precision='fp8-static' "
            "with experts that have an input_scale (jaxmoe.with_input_scales), or accumulation='promoted'."
        )
    assert isinstance(experts, Experts), "given scales go with BlockScaled matrices, which have no fused layout"
    if not set(experts.common_kinds) - {"128x128"} and max(experts.hidden, experts.intermediate) > BLOCK:
        raise ValueError(
            f"{asked}, and the scales of these experts are those of blocks of 128 x 128. Quantise them with "
            "jaxmoe.quantize(experts, 'channel') or 'expert', or pass accumulation='promoted'."
        )


def rounds_rows(precision: Precision | None) -> bool:
    """Whether tokens and h are rounded to 8 bits."""
    return precision in ("fp8", "fp8-e8m0", "fp8-static")


def has_given_scales(precision: Precision | None) -> bool:
    """Whether tokens and h are rounded with scales that the experts have."""
    return precision == "fp8-static"


def powers_of_two(precision: Precision | None) -> bool:
    """Whether the scales that a call makes are powers of two."""
    return precision == "fp8-e8m0"


def formats_of(precision: Precision | None, experts: AnyExperts, dtype: Any) -> Formats:
    """Returns the formats of a call."""
    wide = Formats.of(dtype)
    if precision is None:
        return wide
    rows = ROWS if rounds_rows(precision) else wide.tokens
    if isinstance(experts.matrix, FourBit):
        weights = dataclasses.replace(experts.matrix.format, through_e4m3=_all_through_e4m3(experts))
        return Formats(rows, rows, wide.answers, weights, wide.sums)
    if isinstance(experts, Experts) and isinstance(experts.matrix, BlockScaled):
        kind, scale_dtype = experts.common_kinds[0], experts.matrix.scales.dtype
    else:
        kind, scale_dtype = "128x128", SCALES[powers_of_two(precision)]
    # One format for the matrices there and back, whose rows and columns are not equally many.
    weights = Format(VALUES, *block_of(kind, ALL, ALL), scale_dtype)
    return Formats(rows, rows, wide.answers, weights, wide.sums)


def experts_in_8_bits(experts: Experts, precision: Precision) -> Experts:
    """Returns experts whose matrices are in 8 or 4 bits; those that came wide have blocks of 128 x 128."""
    if isinstance(experts.w_gate, QuantizedMatrix):
        return experts
    return quantized_by_layer(experts, SCALES[powers_of_two(precision)])


def as_multiplied(experts: AnyExperts, precision: Precision | None, dtype: DTypeLike) -> AnyExperts:
    """Returns experts in `dtype` with the numbers that a forward pass multiplies; matrices in 4 bits stay in those."""
    if not rounds_rows(precision):
        experts = marked(experts, through_e4m3=False)
    return decode_8_bits(experts if precision is None else experts_in_8_bits(split(experts), precision), dtype)


def wide_as_multiplied(experts: Experts, precision: Precision | None, dtype: DTypeLike) -> Experts:
    """Returns experts whose matrices are all in `dtype`, with the same numbers."""
    if not rounds_rows(precision):
        return dequantize(experts, dtype)
    return dequantize(map_four_bit(lambda matrix: matrix.wide_multiplied(dtype), experts), dtype)


class RowScales(NamedTuple):
    """The scales with which all tokens and all h are rounded; `None` where each 128 columns have one of their own."""

    tokens: Float[Array, ""] | None = None
    h: Float[Array, ""] | None = None


def row_scales(experts: AnyExperts, precision: Precision | None) -> RowScales:
    """Returns the scales that a call is given: the largest that the experts of this rank have.

    Where one of them is not finite, so is what comes back: a maximum could leave it out.
    """
    if not has_given_scales(precision):
        return RowScales()

    def largest(*matrices: Any) -> jax.Array:
        scales = jnp.stack([matrix.input_scale for matrix in matrices if matrix is not None])
        return jnp.where(jnp.isfinite(scales).all(), scales.max(), jnp.nan)

    experts = split(experts)
    return RowScales(largest(experts.w_gate, experts.w_up), largest(experts.w_down))


def as_multiplied_rows(
    rows: jax.Array, precision: Precision | None, dtype: DTypeLike, scale: Float[Array, ""] | None = None
) -> jax.Array:
    """Returns rows in `dtype` with the numbers that a forward pass multiplies, of tokens or of h in float32.

    Args:
      rows: tokens or h.
      precision: of the call.
      dtype: of what is returned.
      scale: that of these rows in `row_scales`.
    """
    if not rounds_rows(precision):
        return rows.astype(dtype)
    return dequantize_rows(*quantize_rows(rows, powers_of_two(precision), scale), dtype)
