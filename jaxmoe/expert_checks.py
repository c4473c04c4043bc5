"""What must hold of the experts of a call, said before anything runs. `call.py` calls `check`.

`arrays_given` is its part that holds of experts wherever they are passed.
"""

from typing import Any

import jax.numpy as jnp

from jaxmoe.arrays import check_array
from jaxmoe.block_scaled import BlockScaled
from jaxmoe.experts import AnyExperts, Experts, FusedExperts, arrays_of, present
from jaxmoe.four_bit import FourBit
from jaxmoe.quantized_matrix import QuantizedMatrix, leaves_of
from jaxmoe.wording import a_type


def takes_experts(dtype: Any, token_dtype: Any) -> bool:
    """Whether `moe_layer` takes experts of a dtype beside tokens of another.

    >>> takes_experts(jnp.float32, jnp.bfloat16), takes_experts(jnp.bfloat16, jnp.float32)
    (True, False)
    """
    narrow_tokens = jnp.dtype(token_dtype).itemsize == 2
    return jnp.dtype(dtype) == jnp.dtype(token_dtype) or (narrow_tokens and jnp.dtype(dtype) == jnp.float32)


def check(experts: Any, *, hidden: int, dtype: Any, hidden_ranks: int = 1) -> AnyExperts:
    """Raises a `TypeError` or `ValueError` that names the array, what it is and what it must be.

    Args:
      experts: what the user passed.
      hidden: width of the tokens.
      hidden_ranks: ranks over which the experts are split along it, where they are shards.
      dtype: of the tokens; every array of the experts must have it, or be float32 where it has 16 bits.
    """
    arrays = arrays_given("moe_layer", experts)
    fused = isinstance(experts, FusedExperts)
    into = "w_gate_up" if fused else "w_gate"
    said, hidden = f"x has hidden={hidden}", hidden // hidden_ranks
    if hidden_ranks > 1:
        said += f", so a shard over the {hidden_ranks} ranks of hidden_axis must have {hidden}"
    if any(isinstance(array, QuantizedMatrix) for array in arrays.values()):
        if fused:
            raise TypeError(
                "moe_layer: experts with gate and up in one array must be wide. Those in 8 or 4 bits have them apart: "
                "pass jaxmoe.Experts(w_gate, w_up, w_down, ...), or jaxmoe.quantize(experts) of wide ones."
            )
        _check_quantized(experts, arrays, hidden, said)
    shape = tuple(experts.matrix.shape)
    columns = "2 * intermediate" if fused else "intermediate"
    check_dimensions("moe_layer", into, experts.matrix)
    if shape[1] != hidden:
        names = "w_gate_up is" if fused else "w_gate and w_up are"
        raise ValueError(
            f"moe_layer: experts.{into} has shape {shape}, so hidden={shape[1]}; {said}. "
            f"{names} [experts, hidden, {columns}] and w_down is [experts, intermediate, hidden]: "
            "weights stored as torch does, [experts, out, in], have to be transposed."
        )
    if 0 in shape:
        raise ValueError(f"moe_layer: experts.{into} has shape {shape}; no dimension may be zero.")
    if fused and shape[2] % 2:
        raise ValueError(f"moe_layer: experts.w_gate_up has shape {shape}; it must have an even number of columns.")
    check_shapes("moe_layer: experts", experts)
    quantized = [name for name, array in arrays.items() if isinstance(array, QuantizedMatrix)]
    wide = {name: array for name, array in arrays.items() if array is not None and name not in quantized}
    for name, array in arrays.items():
        if array is None or name in quantized:
            continue
        if jnp.dtype(array.dtype).itemsize == 1:
            four_bit = array.dtype in (jnp.float4_e2m1fn, jnp.uint8)
            types = "MXFP4(values, scales) or jaxmoe.NVFP4(values, scales, global_scales)"
            raise TypeError(
                f"moe_layer: experts.{name} is {array.dtype}, which needs scales. Pass jaxmoe."
                f"{types if four_bit else 'BlockScaled(values, scales)'}, values as [experts, out, in]."
            )
        if not takes_experts(array.dtype, dtype):
            raise TypeError(
                f"moe_layer: experts.{name} is {array.dtype}, x is {dtype}; they must be equal, or the experts float32 "
                "and x bfloat16 or float16. Cast one of them, e.g. experts.astype(x.dtype)."
            )
        first = next(iter(wide))
        if array.dtype != wide[first].dtype:
            raise TypeError(
                f"moe_layer: experts.{name} is {array.dtype}, experts.{first} is {wide[first].dtype}; they must be "
                f"equal. Cast one of them, or all, as experts.astype(jnp.{wide[first].dtype}) does."
            )
    if isinstance(experts, Experts) and experts.b_up is not None and experts.w_up is None:
        raise ValueError("moe_layer: experts.b_up is given but experts.w_up is None; a plain FFN has no up projection.")
    return experts


def arrays_given(caller: str, experts: Any) -> dict[str, Any]:
    """Returns the arrays by name, as `arrays_of`; raises a `TypeError` where they are none, or `experts` no experts."""
    if not isinstance(experts, Experts | FusedExperts):
        raise TypeError(
            f"{caller}: experts is {a_type(experts)}; pass jaxmoe.Experts(w_gate, w_up, w_down, ...), "
            "or jaxmoe.Experts.from_fused(w_gate_up, w_down, layout=...)."
        )
    arrays = arrays_of(experts)
    for name in ("w_gate_up" if isinstance(experts, FusedExperts) else "w_gate", "w_down"):
        if arrays[name] is None:
            raise TypeError(f"{caller}: experts.{name} is None; only w_up and the biases may be None.")
    for name, array in arrays.items():
        if hasattr(array, "qvalue") and hasattr(array, "scale"):
            raise TypeError(_values_and_scales_of_another_library(caller, name, array))
        for leaf in leaves_of(array):
            if leaf is not None:
                check_array(caller, f"experts.{name}", leaf)
    return arrays


# Of the matrices, what their dimensions are.
DIMENSIONS = {
    "w_gate": "[experts, hidden, intermediate]",
    "w_up": "[experts, hidden, intermediate]",
    "w_gate_up": "[experts, hidden, 2 * intermediate]",
    "w_down": "[experts, intermediate, hidden]",
}


def check_dimensions(caller: str, name: str, matrix: Any) -> None:
    """Raises a `ValueError` where a matrix of experts has not three dimensions."""
    shape = tuple(matrix.shape)
    if len(shape) != 3:
        raise ValueError(f"{caller}: experts.{name} has shape {shape}; it must be {DIMENSIONS[name]}.")


def check_shapes(where: str, experts: AnyExperts) -> None:
    """Raises a `ValueError` where arrays do not go with the first matrix, which has three dimensions.

    Args:
      where: what the experts are, for messages: `"moe_layer: experts"`.
      experts: whose dtypes are not looked at.
    """
    into, needed = "w_gate_up" if isinstance(experts, FusedExperts) else "w_gate", _needed_shapes(experts)
    for name, array in present(experts).items():
        if tuple(array.shape) != needed[name]:
            raise ValueError(
                f"{where}.{name} has shape {tuple(array.shape)}; it must be {needed[name]} to go with {into} of shape "
                f"{tuple(experts.matrix.shape)}."
            )


def _needed_shapes(experts: AnyExperts) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all arrays, by that of the first matrix."""
    num_experts, hidden, intermediate = experts.num_experts, experts.hidden, experts.intermediate
    return {
        "w_gate": (num_experts, hidden, intermediate),
        "w_up": (num_experts, hidden, intermediate),
        "w_gate_up": (num_experts, hidden, 2 * intermediate),
        "w_down": (num_experts, intermediate, hidden),
        "b_gate": (num_experts, intermediate),
        "b_up": (num_experts, intermediate),
        "b_gate_up": (num_experts, 2 * intermediate),
        "b_down": (num_experts, hidden),
    }


def _values_and_scales_of_another_library(caller: str, name: str, array: Any) -> str:
    """Returns the error of an array such as qwix' `QArray`: integers or 8-bit floats as `qvalue`, and their `scale`."""
    values, scales = (f"{each.dtype}{list(each.shape)}" for each in (array.qvalue, array.scale))
    if name.startswith("b_"):
        advice = "Biases are wide: pass qvalue * scale as one array."
    elif array.qvalue.dtype == jnp.float8_e4m3fn:
        advice = (
            "Pass jaxmoe.BlockScaled(values, scales), values as [experts, out, in]: where qvalue lies as "
            f"[experts, in, out], experts.{name} = jaxmoe.BlockScaled(q.qvalue.swapaxes(1, 2), q.scale.swapaxes(1, 2))."
        )
    else:
        advice = (
            "jaxmoe.BlockScaled(values, scales), values as [experts, out, in], has float8_e4m3fn alone: decode this "
            "one to a wide array, and pass jaxmoe.quantize(experts) for 8 bits."
        )
    return f"{caller}: experts.{name} is {a_type(array)} with qvalue {values} and scale {scales}. {advice}"


def _check_quantized(experts: Experts, arrays: dict[str, Any], hidden: int, said: str) -> None:
    """Raises where some matrices are quantised and do not go together."""
    matrices = {name: array for name, array in arrays.items() if name.startswith("w_") and array is not None}
    kind = next(type(array) for array in arrays.values() if isinstance(array, QuantizedMatrix))
    for name, array in arrays.items():
        if isinstance(array, kind) != (name in matrices) and array is not None:
            other = type(array).__name__ if isinstance(array, QuantizedMatrix) else f"{array.dtype}"
            needed = f"all matrices of experts must be {kind.__name__}, or none, and biases wide"
            raise TypeError(
                f"moe_layer: experts.{name} is {other}; {needed}. Pass jaxmoe.quantize(experts), or "
                "jaxmoe.dequantize(experts, x.dtype)."
            )
    for name, matrix in matrices.items():
        try:
            matrix.check()
        except (TypeError, ValueError) as error:
            raise type(error)(f"moe_layer: experts.{name}: {error}") from error
        _, inner, out = matrix.shape
        into, back = ("intermediate", "hidden") if name != "w_down" else ("hidden", "intermediate")
        lies = out if name == "w_down" else inner
        if lies != hidden:
            divided = matrix.divisor if isinstance(matrix, FourBit) else ""
            raise ValueError(
                f"moe_layer: experts.{name} has values of shape {tuple(matrix.values.shape)}, {matrix.values.dtype}, "
                f"which must be [experts, {into}, {back}{divided}]; {said}. {matrix.transposition}"
            )
    if kind is BlockScaled:
        _check_blocks(experts, matrices)
    elif len({matrix.repacked for matrix in matrices.values()}) > 1:
        listed = " and ".join(f"experts.{name}" for name, matrix in matrices.items() if matrix.repacked)
        raise ValueError(
            f"moe_layer: of the matrices of experts {listed} {'is' if listed.count('.') == 1 else 'are'} repacked. All "
            "must be, or none: pass jaxmoe.repacked(experts)."
        )


def _check_blocks(experts: Experts, matrices: dict[str, Any]) -> None:
    """Raises where the scales of `BlockScaled` matrices are not of one kind."""
    formats = {name: f"{' or '.join(matrix.kinds)} of {matrix.scales.dtype}" for name, matrix in matrices.items()}
    if not experts.common_kinds or len({matrix.scales.dtype for matrix in matrices.values()}) > 1:
        listed = ", ".join(f"{name} {format_}" for name, format_ in formats.items())
        raise ValueError(
            f"moe_layer: the matrices of experts have scales of different kinds: {listed}. They must have the same: "
            "jaxmoe.quantize(jaxmoe.dequantize(experts, jnp.float32), block)."
        )
