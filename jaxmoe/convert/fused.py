"""Wide experts in two tensors for all of them, gate and up in one: as Qwen3.5 has them, and transformers 5 in memory.

`experts.gate_up_proj` is `[experts, 2 * intermediate, hidden]`, gate's rows before up's, `experts.down_proj`
`[experts, hidden, intermediate]`. `loading.py` reads them in any family that has a tensor for each matrix elsewhere.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.convert.matrices import SIDES, WIDE_TYPES
from jaxmoe.convert.placing import Stack
from jaxmoe.convert.tensors import Block
from jaxmoe.experts import Experts
from jaxmoe.quantized_matrix import QuantizedMatrix

INTO, BACK = "experts.gate_up_proj", "experts.down_proj"


def stacked(block: Block, num_experts: int, hidden: int, dtype: Any) -> Experts:
    """Returns the experts as `Stack`s.

    Args:
      block: where the tensors are.
      num_experts: of the router.
      hidden: width of a token.
      dtype: of the arrays; `None` is as found.

    Raises:
      TypeError, ValueError: a tensor is missing, or is not what it must be.
    """
    of_router = f"experts={num_experts} and hidden={hidden}, those of the router, [experts, hidden]"
    words = f"[experts, 2 * intermediate, hidden] with {of_router}"
    gate_up = block.checked(INTO, WIDE_TYPES, (num_experts, None, hidden), words)
    if gate_up.shape[1] % 2:
        raise ValueError(
            f"from_hf: tensor {block.name(INTO)!r} has {gate_up.shape[1]} rows for gate and up, which must be even."
        )
    sizes = {"hidden": hidden, "intermediate": gate_up.shape[1] // 2}
    shape = num_experts, hidden, sizes["intermediate"]
    down = block.checked(BACK, WIDE_TYPES, shape, "[experts, hidden, intermediate]")

    def stack(field: str, array: np.ndarray, first: int) -> Stack:
        out, inner = SIDES[field]
        return Stack(
            f"experts.{field}",
            (num_experts, sizes[inner], sizes[out]),
            np.dtype(array.dtype if dtype is None else dtype),
            ("experts", inner, out),
            lambda expert: array[expert][first : first + sizes[out]].T,
        )

    stacks: Any = (
        stack("w_gate", gate_up, 0),
        stack("w_up", gate_up, sizes["intermediate"]),
        stack("w_down", down, 0),
    )
    return Experts(*stacks)


def fits(experts: Experts) -> bool:
    """Whether experts can lie so: wide, with gate and up, and without biases."""
    matrices = experts.w_gate, experts.w_up, experts.w_down
    biases = experts.b_gate, experts.b_up, experts.b_down
    wide = not any(matrix is None or isinstance(matrix, QuantizedMatrix) for matrix in matrices)
    return wide and all(bias is None for bias in biases)


def tensors(experts: Experts) -> Mapping[str, np.ndarray]:
    """Returns the tensors of experts that can lie so, by their names below the block."""
    gate, up, down = (np.asarray(array).swapaxes(1, 2) for array in (experts.w_gate, experts.w_up, experts.w_down))
    return {INTO: np.concatenate([gate, up], axis=1), BACK: down}
