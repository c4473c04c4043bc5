"""`to_hf`: the arrays of a layer under the names, and in the layouts, of a checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmoe.arrays import is_array
from jaxmoe.block_scaled import BlockScaled
from jaxmoe.convert import checks, fused, gpt_oss
from jaxmoe.convert.families import Family, checked_prefix, family_named, layer_number
from jaxmoe.convert.matrices import BF16, E8M0, F32, SIDES, TOGETHER, WIDE_TYPES, Format
from jaxmoe.convert.placing import copy
from jaxmoe.convert.weights import MoEWeights
from jaxmoe.experts import Experts, present
from jaxmoe.four_bit import NVFP4, FourBit
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.wording import a_type

_WIDE = " or ".join(map(str, WIDE_TYPES))


def to_hf(
    weights: MoEWeights,
    family: str,
    layer: int,
    *,
    prefix: str | None = None,
    scale_dtype: DTypeLike = jnp.float32,
) -> dict[str, np.ndarray]:
    """Returns the tensors of a layer by the names of Hugging Face: what `from_hf` read, with the same bits.

    All of them are on the host at the same time, contiguous, as `safetensors.numpy.save_file` wants them. Nothing is
    rounded. Where a checkpoint may say the same in two ways, the published one is written: scales in E8M0 as such,
    packed bytes as the family has them; blocks in FP8 under DeepSeek's names, NVFP4 under ModelOpt's. Static scales of
    what FP8 matrices are multiplied with are those that the layer uses, or `weights.input_scales` while these are what
    it has the largest of.

    Args:
      weights: of the layer. Experts in 8 or 4 bits have to be in a format that the family has.
      family: as of `from_hf`.
      layer: its number in the names, from 0.
      prefix: of names, before `layers.`; `None` is the one of the family's published checkpoints.
      scale_dtype: of `weight_scale_inv`, and of `weight_scale` in FP8: bfloat16 for the FP8 checkpoints of Qwen3,
        float32 for others. Powers of two in `weight_scale_inv` may also be `float8_e8m0fnu`.

    Raises:
      ValueError: a family that is not known; a layer that is no number from 0; a prefix without its dot;
        weights that the family has no name for, that lack what it has, or whose arrays do not fit the experts; both a
        selection bias and a table of tokens; several shared experts; scales that `scale_dtype` would round; static
        scales that the layer does not use, or that the format of the experts has no name for; arrays of which this
        process has a part only.
      TypeError: a prefix that is no str; no experts, or experts in a format that the family does not have, or in
        several; arrays in a dtype that `from_hf` does not read; another `scale_dtype`.
    """
    table = family_named("to_hf", family)
    number = layer_number("to_hf", layer)
    in_scales = _scale_dtype(scale_dtype)
    _check(weights, table, family)
    weights = dataclasses.replace(
        weights, experts=checks.routed("to_hf", weights), shared=checks.shared("to_hf", weights)
    )
    _check_shapes(weights)
    for field, experts in (("experts", weights.experts), ("shared", weights.shared)):
        _check_wide(field, experts)
    stem = f"{table.prefix if prefix is None else checked_prefix('to_hf', prefix)}layers.{number}.{table.block}."
    tensors: dict[str, np.ndarray] = {}
    for name, array in _tensors(weights, table, family, in_scales):
        tensors[f"{stem}{name}"] = np.empty(array.shape, array.dtype)
        copy(tensors[f"{stem}{name}"], array)
    return tensors


def _scale_dtype(given: Any) -> np.dtype:
    """Returns the dtype of scales, or raises a `TypeError` where no checkpoint has them in it."""
    try:
        dtype = None if given is None else np.dtype(given)
    except TypeError:  # names no dtype
        dtype = None
    if dtype is None or dtype not in (F32, BF16, E8M0):
        name = repr(given) if dtype is None else dtype.name
        raise TypeError(
            f"to_hf: scale_dtype is {name}; it must be float32 or bfloat16, or float8_e8m0fnu where weight_scale_inv "
            "are powers of two."
        )
    return dtype


def _check(weights: Any, table: Family, family: str) -> None:
    if not isinstance(weights, MoEWeights):
        raise TypeError(f"to_hf: weights is {a_type(weights)}; pass the MoEWeights that from_hf returns.")
    for leaf in jax.tree.leaves(weights):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"to_hf: an array {list(leaf.shape)} is spread over several processes, of which this one has a part. "
                "Gather it first: jax.experimental.multihost_utils.process_allgather(weights, tiled=True)."
            )
    has = {
        "router_bias": table.router_bias,
        "selection_bias": table.selection_bias,
        "token_table": table.token_table,
        "shared": table.shared,
        "shared_gate": table.shared_gate,
    }
    for field, name in has.items():
        if name is None and getattr(weights, field) is not None:
            raise ValueError(f"to_hf: weights.{field} is given, and family={family!r} has no name for it.")
    if weights.shared_gate is not None and weights.shared is None:
        raise ValueError(
            "to_hf: weights.shared_gate is given and weights.shared is None, whose answer it multiplies. Pass both, or "
            "dataclasses.replace(weights, shared_gate=None)."
        )
    if weights.selection_bias is not None and weights.token_table is not None:
        raise ValueError(
            "to_hf: weights.selection_bias and weights.token_table are given, and a layer chooses experts by one of "
            "them: from_hf reads no layer with both. Pass dataclasses.replace(weights, selection_bias=None), or "
            "token_table=None."
        )
    needed = [] if table.router_bias is None else ["router_bias"]
    needed += [] if table.selection_bias is None or weights.token_table is not None else ["selection_bias"]
    needed += [] if table.shared_gate is None or weights.shared is None else ["shared_gate"]
    if absent := [field for field in needed if getattr(weights, field) is None]:
        raise ValueError(f"to_hf: weights.{absent[0]} is None; family={family!r} has {has[absent[0]]!r}.")


def _check_shapes(weights: MoEWeights) -> None:
    """Raises where an array beside the experts does not go with them."""
    num_experts, hidden = weights.experts.num_experts, weights.experts.hidden
    transpose = "Transpose it where it lies as in checkpoints."
    needed = {
        "router_kernel": ((hidden, num_experts), "[hidden, experts]", transpose),
        "router_bias": ((num_experts,), "[experts]", ""),
        "selection_bias": ((num_experts,), "[experts]", ""),
        "shared_gate": ((hidden, 1), "[hidden, 1]", transpose),
    }
    for field, (shape, words, advice) in needed.items():
        array = getattr(weights, field)
        if array is None and field != "router_kernel":
            continue
        if _dtype_or_type(array) not in WIDE_TYPES:
            raise TypeError(
                f"to_hf: weights.{field} is {_dtype_or_type(array)}; it must be an array {words} in {_WIDE}, "
                "which from_hf reads."
            )
        if np.shape(array) != shape:
            raise ValueError(
                f"to_hf: weights.{field} has shape {list(np.shape(array))}; it must be {list(shape)}, {words}, to go "
                f"with weights.experts. {advice}".rstrip()
            )
    _check_token_table(weights.token_table, num_experts)
    names = [f"{field}.{name}" for field in ("experts", "shared") for name in SIDES]
    if not isinstance(weights.input_scales, Mapping | None):
        raise TypeError(
            f"to_hf: weights.input_scales is {a_type(weights.input_scales)}; it must be None, or a mapping from names, "
            "such as 'experts.w_gate', to arrays [experts]."
        )
    for name, scales in (weights.input_scales or {}).items():
        if name not in names:
            raise ValueError(f"to_hf: weights.input_scales has {name!r}; names are {', '.join(map(repr, names))}.")
        experts = weights.shared if name.startswith("shared.") else weights.experts
        if experts is not None and np.shape(scales) != (experts.num_experts,):
            raise ValueError(
                f"to_hf: weights.input_scales[{name!r}] has shape {list(np.shape(scales))}; it must be "
                f"{[experts.num_experts]}, a number for each expert."
            )


def _check_wide(field: str, experts: Experts | None) -> None:
    """Raises where a matrix or bias that is not quantised is of a dtype that `from_hf` does not read."""
    for name, array in ({} if experts is None else present(experts)).items():
        if not isinstance(array, QuantizedMatrix) and array.dtype not in WIDE_TYPES:
            raise TypeError(
                f"to_hf: weights.{field}.{name} is {array.dtype}; it must be in {_WIDE}, which from_hf reads. Pass "
                "jaxmoe.dequantize(experts, dtype) with one of them, or quantise them (jaxmoe.quantize)."
            )


def _dtype_or_type(array: Any) -> Any:
    """Returns the dtype of an array, and of what is none its type in words."""
    return np.dtype(array.dtype) if is_array(array) else a_type(array)


def _check_token_table(table: Any, num_experts: int) -> None:
    """Raises where the experts of each token are not numbers of experts: they are written as int64."""
    if table is None:
        return
    if not is_array(table) or not jnp.issubdtype(table.dtype, jnp.integer):
        raise TypeError(
            f"to_hf: weights.token_table is {_dtype_or_type(table)}; it must be integers [vocabulary, top_k]."
        )
    if len(np.shape(table)) != 2:
        raise ValueError(
            f"to_hf: weights.token_table has shape {list(np.shape(table))}; it must be [vocabulary, top_k], the "
            f"experts of each token, of {num_experts}."
        )


def _tensors(
    weights: MoEWeights, table: Family, family: str, scale_dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    experts = weights.experts
    yield table.router, np.asarray(weights.router_kernel).T
    for name, array in ((table.router_bias, weights.router_bias), (table.selection_bias, weights.selection_bias)):
        if name is not None and array is not None:
            yield name, np.asarray(array)
    if table.token_table is not None and weights.token_table is not None:
        yield table.token_table, np.asarray(weights.token_table).astype(np.int64)
    if table.shared_gate is not None and weights.shared_gate is not None:
        yield table.shared_gate, np.asarray(weights.shared_gate).T
    if table.stacked:
        yield from gpt_oss.tensors(experts).items()
        return
    scales = weights.input_scales or {}
    if table.fused and fused.fits(experts):
        yield from fused.tensors(experts).items()
    else:
        names = [f"experts.{expert}" for expert in range(experts.num_experts)]
        yield from _experts("experts", experts, names, table, family, scales, scale_dtype)
    if table.shared is not None and weights.shared is not None:
        yield from _experts("shared", weights.shared, [table.shared], table, family, scales, scale_dtype)


def _experts(
    field: str,
    experts: Experts,
    names: list[str],
    table: Family,
    family: str,
    input_scales: Mapping[str, Any],
    scale_dtype: np.dtype,
) -> Iterator[tuple[str, np.ndarray]]:
    if any(bias is not None for bias in (experts.b_gate, experts.b_up, experts.b_down)):
        raise ValueError(f"to_hf: {field} have biases, and family={family!r} has no names for them.")
    if absent := [name for name in SIDES if getattr(experts, name) is None]:
        raise ValueError(f"to_hf: {field}.{absent[0]} is None; family={family!r} has gate and up.")
    kind = _common_format(field, experts, table, family)
    for name, of_matrix in zip(SIDES, table.matrices, strict=True):
        written = list(zip(kind.parts, _parts(getattr(experts, name), kind, scale_dtype), strict=True))
        if kind.input_scale is not None and (scales := _input_scales(field, name, experts, input_scales)) is not None:
            written.append((kind.input_scale, np.asarray(scales)))
        for part, array in written:
            for expert, of_expert in enumerate(names):
                shape = part.single if part.is_number else array.shape[1:]
                yield f"{of_expert}.{of_matrix}.{part.suffix}", array[expert, ...].reshape(shape)


def _input_scales(field: str, name: str, experts: Experts, kept: Mapping[str, Any]) -> Any:
    """Returns the scales `[experts]` of what a matrix is multiplied with, `None` where it has none.

    Those of a checkpoint differ between experts, and `from_hf` gives the layer the largest. While that is what the
    layer has they are returned as they were kept, and after that what it has.

    Raises:
      ValueError: some were kept, and the layer uses none.
    """
    own, of_matrix = kept.get(f"{field}.{name}"), getattr(experts, name)
    if not isinstance(of_matrix, BlockScaled):
        return own
    together = next(names for names in TOGETHER if name in names)
    found = [kept.get(f"{field}.{each}") for each in together]
    used = [getattr(getattr(experts, each), "input_scale", None) for each in together]
    if _are_largest(used, found):
        return own
    if of_matrix.input_scale is None and own is not None:
        raise ValueError(
            f"to_hf: weights.input_scales has '{field}.{name}', and the layer does not use it: {field}.{name} has no "
            "input_scale, as after another quantisation than that of the checkpoint. Pass experts of "
            "jaxmoe.with_input_scales(experts, tokens, h), or dataclasses.replace(weights, input_scales=None)."
        )
    return of_matrix.input_scale


def _are_largest(used: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether a layer uses what `with_largest_input_scales` makes of the scales of a checkpoint."""
    if any(scales is None for scales in found):
        return all(scales is None for scales in used)
    largest = np.full(np.shape(found[0]), np.max([np.asarray(scales, F32) for scales in found]))
    return all(scales is not None and np.array_equal(scales, largest, equal_nan=True) for scales in used)


def _common_format(field: str, experts: Experts, table: Family, family: str) -> Format:
    """Returns the first format of the family that all matrices are in: one of one block is in several.

    Raises:
      TypeError: there is none.
      ValueError: none has a name for the `input_scale` that a matrix has.
    """
    common: list[Format] = []
    for name in SIDES:
        found = _formats_of(getattr(experts, name), f"{field}.{name}", table, family)
        before, common = common or found, [kind for kind in found if kind in (common or found)]
        if not common:
            raise TypeError(
                f"to_hf: {field}.{name} is in the format {found[0].name}, and {field}.w_gate in {before[0].name}; they "
                "must be alike. Pass jaxmoe.dequantize(experts, dtype), or quantise them again."
            )
    return common[0]


def _formats_of(matrix: Any, name: str, table: Family, family: str) -> list[Format]:
    """Returns the formats of the family that a matrix is in.

    Raises:
      TypeError: there is none.
      ValueError: none of them has a name for the `input_scale` that the matrix has.
    """
    fitting: list[Format] = []
    nameless: list[str] = []
    quantized = isinstance(matrix, QuantizedMatrix)
    for kind in table.formats:
        if (type(matrix) if quantized else None) is not kind.type:
            continue
        if kind.type is BlockScaled:
            _, scales = kind.parts
            shape = scales.shape(*matrix.values.shape[1:])
            if matrix.scales.shape[1:] != shape or np.dtype(matrix.scales.dtype) not in scales.types.values():
                continue
            if matrix.input_scale is not None and kind.input_scale is None:
                nameless.append(kind.name)
                continue
        fitting.append(kind)
    if fitting:
        return fitting
    if nameless:
        other = any(kind.type is BlockScaled and kind.input_scale is not None for kind in table.formats)
        advice = "Quantise wide experts with jaxmoe.quantize(experts, 'expert'), or take" if other else "Take"
        raise ValueError(
            f"to_hf: {name} has an input_scale, and {nameless[0]} has no name for it in family={family!r}. {advice} it "
            "away from each matrix: dataclasses.replace(matrix, input_scale=None)."
        )
    what = type(matrix).__name__
    if isinstance(matrix, BlockScaled):
        what += f" with a {matrix.scales.dtype} scale for {' or '.join(matrix.kinds)}"
    known = ", ".join(kind.name for kind in table.formats)
    raise TypeError(
        f"to_hf: {name} is {what}; family={family!r} has {known}. Pass jaxmoe.dequantize(experts, dtype), or quantise "
        "them again."
    )


def _parts(matrix: Any, kind: Format, scale_dtype: np.dtype) -> list[np.ndarray]:
    """Returns the arrays of a matrix `[experts, ...]` as files have them."""
    if kind.type is None:
        return [np.asarray(matrix).swapaxes(1, 2)]
    arrays = [matrix.packed if isinstance(matrix, FourBit) else matrix.values, matrix.scales]
    if isinstance(matrix, NVFP4):
        arrays.append(matrix.global_scales)
    written = []
    for part, array in zip(kind.parts, map(np.asarray, arrays), strict=True):
        dtype = scale_dtype if part.written == F32 else part.written
        if dtype is None:
            written.append(array)
        elif dtype not in part.types:
            known = " or ".join(each.name for each in part.types)
            raise TypeError(f"to_hf: scale_dtype is {dtype}, and {part.suffix} is {known} in files.")
        elif dtype.itemsize == array.dtype.itemsize == 1:
            written.append(array.view(dtype))
        else:
            converted = array.astype(dtype)
            if not np.array_equal(converted.astype(F32), array.astype(F32), equal_nan=True):
                raise ValueError(f"to_hf: {part.suffix} cannot be {dtype} without rounding; scale_dtype={F32} can.")
            written.append(converted)
    return written
