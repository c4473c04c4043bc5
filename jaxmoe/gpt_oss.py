"""The experts of gpt-oss as its checkpoints have them, as `Experts` in MXFP4: other names of the same bytes."""

from typing import Any

import jax.numpy as jnp

from jaxmoe.arrays import check_array
from jaxmoe.experts import Experts
from jaxmoe.four_bit import MXFP4

BLOCK_BYTES = MXFP4.group // 2


def experts_from_gpt_oss(
    gate_up_proj_blocks: Any,
    gate_up_proj_scales: Any,
    gate_up_proj_bias: Any,
    down_proj_blocks: Any,
    down_proj_scales: Any,
    down_proj_bias: Any,
) -> Experts:
    """Returns a layer's experts from the arrays `mlp.experts.*` of a checkpoint of gpt-oss.

    Values stay packed: nothing but reshapes, and slices that tell the rows of gate and up apart, which take turns.
    NumPy arrays stay NumPy arrays (views of what is passed), so that experts can be put on their devices afterwards,
    by `jax.device_put` with a sharding. The activation of gpt-oss is
    `jaxmoe.SwiGLU.gpt_oss()`, and `moe_layer` decodes such experts exactly by default.

    Args:
      gate_up_proj_blocks: uint8 `[experts, 2 * intermediate, hidden / 32, 16]`, two values in a byte.
      gate_up_proj_scales: uint8 `[experts, 2 * intermediate, hidden / 32]`, exponents + 127.
      gate_up_proj_bias: `[experts, 2 * intermediate]`, of the dtype of `x`, or float32.
      down_proj_blocks: uint8 `[experts, hidden, intermediate / 32, 16]`.
      down_proj_scales: uint8 `[experts, hidden, intermediate / 32]`.
      down_proj_bias: `[experts, hidden]`.

    Raises:
      TypeError: what is no array; blocks or scales that are no bytes.
      ValueError: shapes that do not go together.

    >>> import numpy as np
    >>> sizes = {"gate_up_proj": (4, 2 * 96, 2), "down_proj": (4, 64, 3)}
    >>> blocks = {f"{name}_blocks": np.zeros((*size, 16), np.uint8) for name, size in sizes.items()}
    >>> scales = {f"{name}_scales": np.full(size, 127, np.uint8) for name, size in sizes.items()}
    >>> biases = {f"{name}_bias": np.zeros(size[:2], np.float32) for name, size in sizes.items()}
    >>> experts = experts_from_gpt_oss(**blocks, **scales, **biases)
    >>> experts.w_gate.shape, experts.w_down.shape, experts.b_up.shape
    ((4, 64, 96), (4, 96, 64), (4, 96))
    """
    gate_up = _matrices("gate_up_proj", gate_up_proj_blocks, gate_up_proj_scales, gate_up_proj_bias)
    down = _matrices("down_proj", down_proj_blocks, down_proj_scales, down_proj_bias)
    experts, into, hidden = gate_up[0].shape[0], gate_up[0].shape[1], 2 * gate_up[0].shape[2]
    if into % 2 or down[0].shape != (experts, hidden, into // 4):
        raise ValueError(
            f"experts_from_gpt_oss: gate_up_proj_blocks {tuple(gate_up_proj_blocks.shape)} and down_proj_blocks "
            f"{tuple(down_proj_blocks.shape)} do not go together. They must be [experts, 2 * intermediate, "
            "hidden / 32, 16] and [experts, hidden, intermediate / 32, 16]."
        )
    gate, up = ([array[:, first::2] for array in gate_up] for first in (0, 1))
    fields: dict[str, Any] = {
        "w_gate": MXFP4(*gate[:2]),
        "w_up": MXFP4(*up[:2]),
        "w_down": MXFP4(*down[:2]),
        "b_gate": gate[2],
        "b_up": up[2],
        "b_down": down[2],
    }
    return Experts(**fields)


def _matrices(name: str, blocks: Any, scales: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Returns values `[experts, out, in / 2]`, scales `[experts, out, in / 32]` and biases `[experts, out]`."""
    for part, array in (("blocks", blocks), ("scales", scales), ("bias", bias)):
        check_array("experts_from_gpt_oss", f"{name}_{part}", array)
    if blocks.dtype != jnp.uint8 or scales.dtype != jnp.uint8:
        raise TypeError(
            f"experts_from_gpt_oss: {name}_blocks are {blocks.dtype} and {name}_scales {scales.dtype}; both must be "
            "uint8, as in the checkpoint."
        )
    shapes = tuple(tuple(array.shape) for array in (blocks, scales, bias))
    if len(shapes[0]) != 4 or shapes[0][3] != BLOCK_BYTES or shapes[1:] != (shapes[0][:3], shapes[0][:2]):
        raise ValueError(
            f"experts_from_gpt_oss: {name}_blocks, {name}_scales and {name}_bias have shapes {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}; they must be [experts, out, in / 32, 16], [experts, out, in / 32] and [experts, out]."
        )
    experts, out, groups, _ = shapes[0]
    return blocks.reshape(experts, out, groups * BLOCK_BYTES), scales.view(MXFP4.scale_dtype), bias
