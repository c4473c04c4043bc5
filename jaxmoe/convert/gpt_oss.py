"""The experts of gpt-oss, which lie in one tensor for all of them, with biases; rows of gate and up take turns.

As published they are MXFP4, and as `BF16` releases and training have them wide, transposed already.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.convert.matrices import E8M0, E8M0_ADVICE, I8, SIDES, U8, WIDE_TYPES
from jaxmoe.convert.placing import Dimension, Stack
from jaxmoe.convert.tensors import Block
from jaxmoe.experts import Experts
from jaxmoe.four_bit import MXFP4
from jaxmoe.gpt_oss import BLOCK_BYTES

INTO, BACK = "gate_up_proj", "down_proj"
# Of each field of `Experts`: the tensor, and which of its rows.
ROWS = {
    "gate": (INTO, slice(0, None, 2)),
    "up": (INTO, slice(1, None, 2)),
    "down": (BACK, slice(None)),
}


def stacked(block: Block, num_experts: int, hidden: int, dtype: Any) -> Experts:
    """Returns the experts as `Stack`s.

    Args:
      block: where the tensors are.
      num_experts: of the router.
      hidden: width of a token.
      dtype: of what is not packed; `None` is as found.

    Raises:
      TypeError, ValueError: a tensor is missing, or is not what it must be.
    """
    packed = f"experts.{INTO}" not in block
    of_router = f" with experts={num_experts} and hidden={hidden}, those of the router, [experts, hidden]"
    if packed:
        types, words = (U8, I8), "[experts, 2 * intermediate, hidden / 32, 16]"
        shape = (num_experts, None, hidden // MXFP4.group, BLOCK_BYTES)
        twice = block.shape(f"experts.{INTO}_blocks", types, shape, words + of_router)[1]
    else:
        shape, words = (num_experts, hidden, None), "[experts, hidden, 2 * intermediate]"
        twice = block.shape(f"experts.{INTO}", WIDE_TYPES, shape, words + of_router)[2]
    if twice % 2:
        raise ValueError(
            f"from_hf: tensor {block.name(f'experts.{INTO}')!r} has {twice} rows for gate and up, which must be even."
        )
    sizes = {"hidden": hidden, "intermediate": twice // 2}
    if packed and (uneven := [f"{name}={size}" for name, size in sizes.items() if size % MXFP4.group]):
        raise ValueError(
            f"from_hf: tensor {block.name(f'experts.{INTO}_blocks')!r} and the router have {' and '.join(uneven)}; "
            f"both hidden and intermediate must be multiples of {MXFP4.group}, which share a scale."
        )
    fields: dict[str, Any] = {}
    for name, (tensor, rows) in ROWS.items():
        out, inner = SIDES[f"w_{name}"]
        lies = _Rows(block, f"experts.{tensor}", rows, num_experts, sizes[out], sizes[inner])
        fields[f"w_{name}"] = lies.packed(name, out, inner) if packed else lies.wide(name, out, inner, dtype)
        fields[f"b_{name}"] = lies.bias(name, out, dtype)
    return Experts(**fields)


class _Rows:
    """Some of the outputs of a tensor that has those of all experts."""

    def __init__(self, block: Block, tensor: str, rows: slice, num_experts: int, out: int, inner: int) -> None:
        self.block, self.tensor, self.rows = block, tensor, rows
        self.sizes = num_experts, out, inner
        self.rows_of_tensor = out * (rows.step or 1)

    def packed(self, name: str, *sides: Dimension) -> MXFP4:
        experts, out, inner = self.sizes
        groups = inner // MXFP4.group
        shape = (experts, self.rows_of_tensor, groups)
        blocks = self.block.checked(
            f"{self.tensor}_blocks", (U8, I8), (*shape, BLOCK_BYTES), f"{[*shape, BLOCK_BYTES]}"
        )
        scales = self.block.checked(f"{self.tensor}_scales", (U8, E8M0), shape, f"{list(shape)}", E8M0_ADVICE)
        stacks: Any = (
            Stack(
                f"experts.w_{name}",
                (experts, out, inner // 2),
                U8,
                ("experts", *sides),
                lambda expert: blocks[expert][self.rows].reshape(out, inner // 2).view(U8),
            ),
            Stack(
                f"experts.w_{name}",
                (experts, out, groups),
                E8M0,
                ("experts", *sides),
                lambda expert: scales[expert][self.rows].view(E8M0),
                may_stay_whole=True,
            ),
        )
        return MXFP4(*stacks)

    def wide(self, name: str, out_side: Dimension, in_side: Dimension, dtype: Any) -> Stack:
        experts, out, inner = self.sizes
        shape = (experts, inner, self.rows_of_tensor)
        array = self.block.checked(self.tensor, WIDE_TYPES, shape, f"{list(shape)}")
        return Stack(
            f"experts.w_{name}",
            (experts, inner, out),
            np.dtype(array.dtype if dtype is None else dtype),
            ("experts", in_side, out_side),
            lambda expert: array[expert][:, self.rows],
        )

    def bias(self, name: str, side: Dimension, dtype: Any) -> Stack:
        experts, out, _ = self.sizes
        shape = (experts, self.rows_of_tensor)
        array = self.block.checked(f"{self.tensor}_bias", WIDE_TYPES, shape, f"{list(shape)}")
        return Stack(
            f"experts.b_{name}",
            (experts, out),
            np.dtype(array.dtype if dtype is None else dtype),
            ("experts", side),
            lambda expert: array[expert][self.rows],
        )


def tensors(experts: Experts) -> Mapping[str, np.ndarray]:
    """Returns the tensors of experts, as NumPy arrays, by their names below the block.

    Raises:
      TypeError: the experts are neither `MXFP4` nor wide.
      ValueError: they lack an up projection or biases.
    """
    written: dict[str, np.ndarray] = {}
    arrays = {name: getattr(experts, name) for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")}
    if absent := [name for name, array in arrays.items() if array is None]:
        raise ValueError(f"to_hf: experts.{', experts.'.join(absent)} is None; gpt_oss has all of them.")
    kinds = {type(array).__name__ for name, array in arrays.items() if name.startswith("w_")}
    packed = kinds == {"MXFP4"}
    if not packed and any(hasattr(arrays[name], "scales") for name in ("w_gate", "w_up", "w_down")):
        raise TypeError(
            f"to_hf: experts are {' and '.join(sorted(kinds))}; gpt_oss is MXFP4, or wide. Pass "
            "jaxmoe.dequantize(experts, dtype)."
        )
    written[f"{INTO}_bias"] = _taking_turns(arrays["b_gate"], arrays["b_up"], axis=1)
    written[f"{BACK}_bias"] = np.asarray(arrays["b_down"])
    if not packed:
        written[INTO] = _taking_turns(arrays["w_gate"], arrays["w_up"], axis=2)
        written[BACK] = np.asarray(arrays["w_down"])
    else:
        gate, up, down = (arrays[name] for name in ("w_gate", "w_up", "w_down"))
        blocks = {INTO: _taking_turns(gate.packed, up.packed, axis=1), BACK: np.asarray(down.packed)}
        scales = {INTO: _taking_turns(gate.scales, up.scales, axis=1), BACK: np.asarray(down.scales)}
        for name, array in blocks.items():
            written[f"{name}_blocks"] = array.reshape(*array.shape[:2], -1, BLOCK_BYTES)
            written[f"{name}_scales"] = scales[name].view(U8)
    return {f"experts.{name}": array for name, array in written.items()}


def _taking_turns(gate: Any, up: Any, axis: int) -> np.ndarray:
    both = np.stack([np.asarray(gate), np.asarray(up)], axis + 1)
    shape = list(both.shape)
    shape[axis : axis + 2] = [shape[axis] * 2]
    return both.reshape(shape)
