"""A plan as compiled code follows it: sizes, schedule and formats of a call in the terms of `ffi/common/`.

Also how many row tiles a rank can have, which plans and limits ask for.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jaxmoe import native
from jaxmoe.formats import ALL, Format, Formats, bits
from jaxmoe.implementations.base import ROWS_OVER_BALANCED, Shape
from jaxmoe.implementations.megakernel.plan import KernelPlan

# Of a rank, and where weights are decoded ahead to 8 bits.
MOST_LOCAL_EXPERTS, MOST_LOCAL_EXPERTS_AHEAD = 512, 448
# The depth of all matrices is a multiple of it (kDepthInRegisters in ffi/common/formats.h).
DEPTH_IN_REGISTERS = 64


def tile_sizes(shape: Shape, platform: str) -> Any:
    """Returns into what tiles the work of a platform is cut, `TileSizes` of `ffi/common/shape.h`; not to be chosen.

    Raises:
      NotImplementedError: nothing is compiled.
    """
    return _tile_sizes("cpu" if platform == "cpu" else "gpu", shape.gated, _scaled(shape))


@functools.cache
def _tile_sizes(platform: str, gated: bool, scaled: bool) -> Any:
    try:
        return native.schedule().granularity(platform, gated, scaled).tile
    except ModuleNotFoundError as error:
        raise not_compiled(error) from error


def _scaled(shape: Shape) -> bool:
    return shape.formats.tokens.scale_rows > 0


def not_compiled(error: ModuleNotFoundError) -> NotImplementedError:
    """Returns what a call is told where there is no compiled code."""
    return NotImplementedError(
        f"moe_layer: implementation='megakernel' is compiled code. {error} Or pass implementation='xla'."
    )


def native_shape(shape: Shape) -> Any:
    """Returns a shape as compiled code has it."""
    return native.schedule().Shape(
        ranks=shape.ranks,
        tokens=shape.tokens,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        projections=shape.projections,
    )


def native_formats(formats: Formats) -> Any:
    """Returns formats as compiled code has them."""
    # Scales of weights come as float32, powers of two or not.
    weights = dataclasses.replace(formats.weights, scale_dtype=jnp.float32)

    def of(format_: Format) -> Any:
        of_blocks = format_.dtype.name, format_.scale_rows, format_.scale_columns, format_.scale_dtype.name
        if bits(format_.dtype) == 4:  # with scales of groups, and one for each matrix, which those without do have too
            of_groups = formats.weights.scale_columns, formats.weights.scale_dtype.name
            of_blocks = format_.dtype.name, ALL, ALL, jnp.dtype(jnp.float32).name
            return native.schedule().Format(*of_blocks, *of_groups)
        return native.schedule().Format(*of_blocks)

    return native.schedule().Formats(
        tokens=of(formats.tokens),
        h=of(formats.h),
        answers=of(formats.answers),
        weights=of(weights),
        sums=of(formats.sums),
    )


def schedule_of(shape: Shape, platform: str, plan: KernelPlan, saved_tiles: int = 0, *, frozen: bool = False) -> Any:
    """Returns the schedule of a plan; without workers on a GPU, which has as many as the device has room for.

    Args:
      shape: of the call.
      platform: it is compiled for.
      plan: of one pass.
      saved_tiles: row tiles whose gate and up are kept for the backward pass.
      frozen: a backward pass makes no gradients of experts.
    """
    return native.schedule().schedule_for(
        native_shape(shape),
        platform,
        plan,
        saved_tiles,
        _scaled(shape),
        weight_slots(shape, platform, plan, saved_tiles),
        frozen,
        roomy_row_tiles(shape, platform) if plan.sum_at_experts and shape.ranks > 1 else 0,
    )


def weight_slots(shape: Shape, platform: str, plan: KernelPlan, saved_tiles: int = 0) -> int:
    """Returns the experts whose decoded weights a rank holds at a time.

    0 where nothing is decoded, or weights are where they are multiplied. Arguments are those of `schedule_of`.
    """
    in_registers = not plan.segment_tiles and not saved_tiles and decodes_in_registers(shape, platform)
    if not shape.formats.decodes or (in_registers and not plan.weight_slots):
        return 0
    return min(plan.weight_slots or plan.fewest_weight_slots, shape.local_experts)


def decodes_ahead(shape: Shape, platform: str) -> bool:
    """Whether weights can be decoded ahead of the tasks that multiply them: beside rows in 8 bits not all can."""
    if not shape.formats.decodes:
        return False
    if not shape.formats.tokens.scale_rows:
        return True
    return shape.formats.weights.through_e4m3 and shape.local_experts <= most_experts_ahead(shape, platform)


def most_experts_ahead(shape: Shape, platform: str) -> int:
    """Returns how many experts a rank can have whose weights are decoded ahead (kRoomForExperts in storage.cuh)."""
    in_8_bits = platform != "cpu" and shape.formats.tokens.scale_rows
    return MOST_LOCAL_EXPERTS_AHEAD if in_8_bits else MOST_LOCAL_EXPERTS


def decodes_in_registers(shape: Shape, platform: str) -> bool:
    """Whether a forward pass that keeps nothing can do without slots for decoded weights."""
    if shape.formats.tokens.scale_rows and shape.formats.weights.array_scale_dtype is not None:
        return False  # NVFP4, whose products are rounded to 8 bits
    wide = platform == "cpu" or shape.formats.answers.dtype == jnp.bfloat16
    whole = shape.hidden % DEPTH_IN_REGISTERS == 0 and shape.intermediate % DEPTH_IN_REGISTERS == 0
    return bits(shape.formats.weights.dtype) == 4 and shape.formats.decodes and wide and whole


def roomy_row_tiles(shape: Shape, platform: str) -> int:
    """Returns the row tiles of a rank for which there is room where something is kept of all of its rows.

    That is gate and up of a forward pass that is kept for the backward pass, and answers that are added up at experts.
    Where tokens choose experts so that a rank gets more, the backward pass computes those of the others again, and
    answers travel each on its own.
    """
    wanted = -(-int(shape.balanced_rows * ROWS_OVER_BALANCED) // tile_sizes(shape, platform).rows)
    return min(wanted + shape.local_experts, most_row_tiles(shape, platform))


def most_row_tiles(shape: Shape, platform: str) -> int:
    """Returns the row tiles of a rank whose experts get every slot, each expert's last tile partly filled."""
    return shape.all_slots // tile_sizes(shape, platform).rows + shape.local_experts


def rows_per_expert(shape: Shape) -> int:
    """Returns the rows of an expert where all have equally many."""
    return -(-shape.balanced_rows // max(shape.local_experts, 1))


def tiles_per_expert(shape: Shape, platform: str) -> int:
    """Returns the row tiles of an expert where all have equally many rows."""
    return max(-(-rows_per_expert(shape) // tile_sizes(shape, platform).rows), 1)
