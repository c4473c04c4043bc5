"""Numbers in 8 and 4 bits: `quantize` makes experts in few bits of wide ones, `dequantize` wide ones of them.

The same in 8 bits of the rows that meet them, tokens and h: `quantize_rows` and `dequantize_rows`. Every implementation
has that rule, compiled code in its own words.
"""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxmoe.block_scaled import BLOCK, BLOCK_KINDS, SCALES, VALUES, BlockScaled, block_of
from jaxmoe.expert_checks import arrays_given, check_dimensions
from jaxmoe.experts import AnyExperts, Experts, split
from jaxmoe.formats import check_wide_dtype
from jaxmoe.four_bit import FourBit
from jaxmoe.four_bit_quantization import FOUR_BIT_KINDS, mxfp4, nvfp4
from jaxmoe.guard import not_differentiated
from jaxmoe.matrix_split import MatrixSplit
from jaxmoe.quantized_matrix import SMALLEST, QuantizedMatrix
from jaxmoe.wording import a_type

SomeExperts = TypeVar("SomeExperts", bound=AnyExperts)
MATRICES = ("w_gate", "w_up", "w_down")
LARGEST = float(jnp.finfo(VALUES).max)
# Of scales that rows are given: no number that 8 bits tell from zero is subnormal beside the least, nor is the inverse
# of the largest.
GIVEN_SCALES = (2.0**-100, 2.0**100)


def quantize(experts: AnyExperts, block: str = "128x128", *, scale_dtype: DTypeLike | None = None) -> Experts:
    """Returns the experts with their matrices in 8 or 4 bits; biases stay as they are.

    In 8 bits a scale is the largest magnitude of its block over 448, the largest value of `float8_e4m3fn`; with
    `float8_e8m0fnu` the next power of two above that. Values are weights times the reciprocal of their scale, in
    float32, rounded to the nearest: a division rounds a few that are nearly ties to the other side. A block of zeros
    has values of zero; a NaN or an infinity makes all of its block NaN. `"mxfp4"` and `"nvfp4"` have the scales that
    `jaxmoe.four_bit_quantization` states with their sources, and the same rules. Works under `jax.jit`. Experts of
    several layers that are one array are `jax.vmap(jaxmoe.quantize)(experts)`.

    Experts stay where they are: values are split as weights were, and scales too where their number divides. Where a
    mesh axis cuts blocks, columns are moved to find the scales, and values moved back. Of Auto axes JAX says nothing
    under `jax.jit`, where it may then leave values whole on every rank: quantise such experts outside of it, or give
    `out_shardings`.

    Matrices in few bits are constants: asking for gradients with respect to wide ones that are rounded here is an
    error, while biases keep theirs. What is not to be differentiated goes through `jax.lax.stop_gradient` before it
    comes here. `moe_layer` with wide experts and `precision="fp8"` rounds them itself, and has their gradients; a
    straight-through estimator of another format is `w + jax.lax.stop_gradient(rounded - w)` for each matrix `w`, with
    `rounded` of `dequantize(quantize(jax.lax.stop_gradient(experts), block))`.

    Args:
      experts: in float32, bfloat16 or float16, or in float64, which becomes float32 first. Gate and up that are one
        array come back apart.
      block: what shares a scale: `"128x128"` as in DeepSeek-V3's checkpoints, `"channel"` one per output, `"expert"`
        one per matrix. Or a format of 4 bits: `"mxfp4"` makes `jaxmoe.MXFP4`, `"nvfp4"` makes `jaxmoe.NVFP4`, both
        packed.
      scale_dtype: in 8 bits float32, which `None` is, or `float8_e8m0fnu` for powers of two.

    Raises:
      TypeError: the experts are no `Experts`, quantised already or no float arrays, or `scale_dtype` is another one;
        gradients of matrices.
      ValueError: `block` is another one; a matrix has not three dimensions; in 4 bits, inputs of a matrix that are no
        multiple of 32 (`"mxfp4"`) or 16.

    >>> import jax
    >>> experts = Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> quantize(experts).w_down.scales.shape, quantize(experts, "mxfp4").w_down.scales.shape
    ((4, 2, 3), (4, 256, 12))
    """
    kinds = (*BLOCK_KINDS, *FOUR_BIT_KINDS)
    if block not in kinds:
        raise ValueError(f"quantize: block={block!r} must be one of {', '.join(map(repr, kinds))}.")
    if block in FOUR_BIT_KINDS and scale_dtype is not None:
        of_block = jnp.dtype(FOUR_BIT_KINDS[block].scale_dtype)
        raise TypeError(f"quantize: {block!r} has scales in {of_block}; leave scale_dtype={scale_dtype} out.")
    of_scales: DTypeLike = jnp.float32 if scale_dtype is None else scale_dtype
    try:
        known = jnp.dtype(of_scales) in SCALES
    except TypeError:  # names no dtype
        known = False
    if not known:
        raise TypeError(f"quantize: scale_dtype={of_scales} must be float32 or float8_e8m0fnu.")

    for name, array in arrays_given("quantize", experts).items():
        if not name.startswith("w_") or array is None:
            continue
        if isinstance(array, QuantizedMatrix):
            kind = type(array).__name__
            raise TypeError(f"quantize: experts.{name} is {kind} already. Pass dequantize(experts, ...) instead.")
        check_dimensions("quantize", name, array)
    wide = split(experts)

    def quantized(name: str) -> QuantizedMatrix | None:
        matrix = getattr(wide, name)
        if matrix is None:
            return None
        check_wide_dtype("quantize", f"experts.{name} is", matrix.dtype)
        if block in FOUR_BIT_KINDS:
            _check_groups(name, matrix.shape[1], block)
            make, sizes = mxfp4 if block == "mxfp4" else nvfp4, (FOUR_BIT_KINDS[block].group, 1)
        else:
            make = functools.partial(_quantized, block=block, scale_dtype=of_scales)
            # What all columns or all rows share is the largest of what each rank finds.
            sizes = (BLOCK, BLOCK) if block == "128x128" else (1, 1)
        lies = MatrixSplit.of(matrix)
        matrix = not_differentiated(matrix, FOUR_BIT_KINDS.get(block, BlockScaled), "quantize")
        whole = lies.without_cuts(matrix.shape, sizes)
        if whole == lies:
            return make(matrix)
        return jax.tree.map(lies.transposed.place, make(whole.place(matrix)))

    return dataclasses.replace(wide, **{name: quantized(name) for name in MATRICES})


def quantized_by_layer(experts: Experts, scale_dtype: DTypeLike) -> Experts:
    """Returns wide experts with matrices in blocks of 128 x 128, for a layer that makes their gradients itself."""
    matrices = {name: getattr(experts, name) for name in MATRICES}
    made = {name: _quantized(wide, "128x128", scale_dtype) for name, wide in matrices.items() if wide is not None}
    return dataclasses.replace(experts, **made)


def _check_groups(name: str, inner: int, block: str) -> None:
    group = FOUR_BIT_KINDS[block].group
    if inner % group:
        raise ValueError(
            f"quantize: experts.{name} has {inner} inputs, and {block!r} has a scale for each {group} of them. Pad "
            f"hidden and intermediate to multiples of {group}, with zeros, or pass one of "
            f"{', '.join(map(repr, BLOCK_KINDS))}."
        )


def with_input_scales(experts: Experts, tokens: Any, h: Any) -> Experts:
    """Returns experts in 8 bits with scales of what they are multiplied with: one for all tokens, one for all h.

    `precision="fp8-static"` of `jaxmoe.moe_layer`, the default with such experts, rounds tokens and h with them. Such a
    scale is found by calibration: the largest magnitude that was seen, over 448. What is larger later becomes the
    largest number that the scale has. One that is not between 2^-100 and 2^100 makes outputs NaN.

    Args:
      experts: whose matrices are `BlockScaled`.
      tokens: the scale of tokens, a number, or float32 `[experts]`. It goes to gate and up.
      h: the same of h, for `w_down`.

    Raises:
      TypeError: the experts are no `Experts`, or a matrix is not `BlockScaled`; scales that are no real numbers.
      ValueError: scales of another shape.

    >>> import jax
    >>> experts = quantize(Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384))
    >>> with_input_scales(experts, tokens=8 / 448, h=2 / 448).w_down.input_scale.shape
    (4,)
    """
    given = {"w_gate": ("tokens", tokens), "w_up": ("tokens", tokens), "w_down": ("h", h)}
    arrays_given("with_input_scales", experts)
    made, apart = {}, split(experts)
    for field, (name, scale) in given.items():
        matrix: Any = getattr(apart, field)
        if matrix is None:
            continue
        if not isinstance(matrix, BlockScaled):
            kind = type(matrix).__name__ if isinstance(matrix, QuantizedMatrix) else f"{matrix.dtype}"
            raise TypeError(
                f"with_input_scales: experts.{field} is {kind}; it must be BlockScaled. Pass jaxmoe.quantize(experts) "
                "of wide experts."
            )
        _check_real(name, scale)
        shape = jnp.shape(scale)
        if shape not in ((), matrix.values.shape[:1]):
            raise ValueError(
                f"with_input_scales: {name} has shape {shape}; it must be a number, or have one for each of the "
                f"{matrix.values.shape[0]} experts."
            )
        made[field] = dataclasses.replace(matrix, input_scale=_of_each_expert(scale, matrix.scales))
    return dataclasses.replace(experts, **made)


def _check_real(name: str, scale: Any) -> None:
    try:
        # Of any size: JAX's integers have 32 bits.
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        dtype = jnp.dtype(float) if is_number else jnp.asarray(scale).dtype
    except (TypeError, ValueError, OverflowError):  # no array, and nothing that becomes one
        raise TypeError(
            f"with_input_scales: {name} is {a_type(scale)}; it must be a number, or one for each expert."
        ) from None
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"with_input_scales: {name} is {dtype}; it must be a real number, or one for each expert.")


def _of_each_expert(number: Any, scales: Any) -> Float[Array, " experts"]:
    """Returns a number for each expert, split over devices as the scales are, as far as that is known."""
    if isinstance(number, int) and abs(number) >= 2**128:
        number = math.inf if number > 0 else -math.inf  # as float32 has it; of a larger integer Python makes no float
    number = jnp.asarray(number, jnp.float32)
    sharding = None if isinstance(scales, Tracer) else getattr(scales, "sharding", None)
    if isinstance(sharding, NamedSharding):
        of_experts = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        return jax.device_put(jnp.broadcast_to(number, scales.shape[:1]), of_experts)
    # Of Explicit axes the type says it, and what is made of the array has it.
    return jnp.zeros_like(scales, jnp.float32).sum((1, 2)) + number


def dequantize(experts: SomeExperts, dtype: DTypeLike = jnp.bfloat16) -> SomeExperts:
    """Returns the experts with every matrix in `dtype`, biases too.

    Args:
      experts: with matrices that are `BlockScaled`, `MXFP4` or `NVFP4`, or wide.
      dtype: of every array: bfloat16, float16, float32 or float64.

    Raises:
      TypeError: the experts are no `Experts`; values or scales of types that those do not have; a `dtype` that is not
        wide.
      ValueError: shapes that do not go together.

    >>> import jax
    >>> experts = Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> dequantize(quantize(experts)).w_down.shape
    (4, 384, 256)
    """
    check_wide_dtype("dequantize", "dtype is", dtype)
    for name, array in arrays_given("dequantize", experts).items():
        if isinstance(array, QuantizedMatrix):
            check_dimensions("dequantize", name, array)
    return _decoded(experts, dtype, QuantizedMatrix)


def decode_8_bits(experts: SomeExperts, dtype: DTypeLike) -> SomeExperts:
    """Returns the experts in `dtype`, but for matrices in 4 bits: those are decoded where they are multiplied."""
    return _decoded(experts, dtype, BlockScaled)


def _decoded(experts: SomeExperts, dtype: DTypeLike, kind: type[QuantizedMatrix]) -> SomeExperts:
    def of(array: Any) -> Any:
        if isinstance(array, FourBit) and isinstance(array, kind):
            lies = MatrixSplit.of(array.values).transposed
            whole = lies.without_cuts(array.shape, (array.group, 1))
            if whole != lies:
                return lies.place(jax.tree.map(whole.transposed.place, array).wide(dtype))
        if isinstance(array, kind):
            return array.wide(dtype)
        return array if isinstance(array, QuantizedMatrix) else array.astype(dtype)

    return jax.tree.map(of, experts, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))


def _quantized(matrices: Float[Array, "experts in out"], block: str, scale_dtype: DTypeLike) -> BlockScaled:
    experts, inner, out = matrices.shape
    rows, columns = block_of(block, out, inner)
    values = matrices.swapaxes(1, 2).astype(jnp.float32)
    padded = jnp.pad(values, ((0, 0), (0, -out % rows), (0, -inner % columns)))
    row_blocks, column_blocks = padded.shape[1] // rows, padded.shape[2] // columns
    # One dimension at a time: JAX knows how experts of Explicit axes are split after each step.
    blocks = padded.reshape(experts, row_blocks, rows, padded.shape[2])
    blocks = blocks.reshape(experts, row_blocks, rows, column_blocks, columns)
    largest = jnp.abs(blocks).max((2, 4))
    finite = jnp.isfinite(blocks).all((2, 4))
    scales = _scales_of(largest, finite, power_of_two=jnp.dtype(scale_dtype) == jnp.float8_e8m0fnu)
    # XLA divides by what many numbers share with its reciprocal: so does this, on every backend.
    scaled = (blocks * (1 / scales)[:, :, None, :, None]).reshape(experts, row_blocks, rows, padded.shape[2])
    # Not by an index, which JAX without jit makes a gather of, that Explicit axes refuse.
    scaled = jax.lax.slice(scaled.reshape(padded.shape), (0, 0, 0), values.shape)
    return BlockScaled(in_8_bits(scaled), scales.astype(scale_dtype))


def in_8_bits(values: jax.Array) -> jax.Array:
    """Returns values rounded to 8 bits, also where the caller makes them wide again.

    XLA would leave out both conversions (on a GPU, jax 0.11.2: `xla_allow_excess_precision`), but for the barrier.
    """
    return jax.lax.optimization_barrier(values.astype(VALUES))


def _scales_of(largest: Float[Array, "*blocks"], finite: Bool[Array, "*blocks"], power_of_two: bool) -> jax.Array:
    """Returns the scales of blocks with such a largest magnitude, in float32; NaN where a block is not all finite.

    Whether it is, is asked of the elements: on a CPU XLA's maximum of a NaN and a number may be the number.
    """
    largest = jnp.maximum(largest, SMALLEST)
    if power_of_two:
        # The least with which the largest is at most LARGEST = 0.875 * 2^9, from the bits.
        mantissa, exponent = jnp.frexp(largest)
        scales = jnp.ldexp(jnp.float32(1), exponent - jnp.where(mantissa <= LARGEST / 512, 9, 8))
    else:
        # Left to itself XLA multiplies by the reciprocal of a constant, and makes `448 / largest` of the reciprocal of
        # such a scale: other bits than those of a division. It does neither with what is chosen by a condition.
        scales = largest / jnp.where(finite, LARGEST, jnp.nan)
    return jnp.where(finite, scales, jnp.nan)


def quantize_rows(
    rows: Float[Array, "rows columns"], power_of_two: bool = False, scale: Float[Array, ""] | None = None
) -> tuple[Float[Array, "rows columns"], Float[Array, "rows groups"]]:
    """Returns rows as `float8_e4m3fn` values and float32 scales, one for each group of 128 columns of a row.

    The last group may have fewer columns. In float32: `scale = max(largest magnitude, 2^-100) / 448`, or the least
    power of two with which the largest is at most 448; `value = x * (1 / scale)`, rounded to the nearest, ties to even.
    A NaN or an infinity makes its group NaN. These are the bits of compiled code: each step is one IEEE operation.

    Where a scale is given it is that of all groups whose numbers are finite, and what is above 448 of it becomes 448.
    One that is not in `GIVEN_SCALES` (zero, negative, NaN) makes everything NaN.

    Args:
      rows: in float32, bfloat16 or float16.
      power_of_two: as DeepSeek-V3.1 has the scales.
      scale: float32, in the place of those that are found; `None` finds them.

    >>> values, scales = quantize_rows(jnp.full((2, 200), 896.0))
    >>> values.dtype.name, scales.tolist()
    ('float8_e4m3fn', [[2.0, 2.0], [2.0, 2.0]])
    """
    groups = _groups(rows.astype(jnp.float32))
    finite = jnp.isfinite(groups).all(-1)
    if scale is None:
        scales = _scales_of(jnp.abs(groups).max(-1), finite, power_of_two)
    else:
        finite &= (scale >= GIVEN_SCALES[0]) & (scale <= GIVEN_SCALES[1])
        scales = jnp.where(finite, scale, jnp.nan)
    inverses = jnp.where(finite, 1 / scales, jnp.nan)
    values = _rows(groups * inverses[..., None])[:, : rows.shape[1]]
    if scale is not None:
        # JAX makes NaN of what is too large. Chosen, not clipped: that keeps NaN.
        values = jnp.where(jnp.abs(values) > LARGEST, jnp.copysign(LARGEST, values), values)
    return in_8_bits(values), scales


def dequantize_rows(
    values: Float[Array, "rows columns"], scales: Float[Array, "rows groups"], dtype: DTypeLike
) -> Float[Array, "rows columns"]:
    """Returns values times the scales of their groups: products in float32, rounded once to `dtype`.

    >>> dequantize_rows(*quantize_rows(jnp.full((1, 3), 3.0)), jnp.bfloat16).tolist()
    [[3.0, 3.0, 3.0]]
    """
    wide = _groups(values.astype(jnp.float32)) * scales[..., None]
    return _rows(wide)[:, : values.shape[1]].astype(dtype)


def _groups(rows: Float[Array, "rows columns"]) -> Float[Array, "rows groups group"]:
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BLOCK)))
    return padded.reshape(rows.shape[0], padded.shape[1] // BLOCK, BLOCK)


def _rows(groups: Float[Array, "rows groups group"]) -> Float[Array, "rows columns"]:
    return groups.reshape(groups.shape[0], groups.shape[1] * BLOCK)
