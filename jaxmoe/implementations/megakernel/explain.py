"""What a call of the megakernel costs."""

import dataclasses

from jaxmoe import native
from jaxmoe.implementations.base import Call, Shape
from jaxmoe.implementations.explanation import Explanation, precision_reasons, residual_bytes, split_reasons
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.megakernel.plan_defaults import backward_plan, kept_plan, pulls_per_token
from jaxmoe.implementations.megakernel.schedule import (
    most_row_tiles,
    native_formats,
    native_shape,
    roomy_row_tiles,
    schedule_of,
    tile_sizes,
)

# What compiled code does not differentiate.
_WITH_BIASES = (
    "where biases of experts in 8 or 4 bits are differentiated too, implementation='xla' does it; "
    "jax.lax.stop_gradient(experts) leaves them out"
)


def explain(call: Call) -> Explanation:
    """Returns the regions of the memory that peers reach, and the bytes that uniform routing sends.

    The forward pass is that of a training step: with `residuals="save"` one that is kept.
    """
    plan: KernelPlan = call.plan
    shape, most = call.shape, most_row_tiles(call.shape, call.platform)
    differentiated = call.decoded if call.freezes else call.wide
    forward, saved_tiles, kept_reasons = plan, 0, ()
    if call.residuals == "save":
        forward, saved_tiles = kept_plan(plan, shape, call.platform), roomy_row_tiles(shape, call.platform)
        kept_reasons = forward.reasons
    backward = backward_plan(plan, differentiated.shape, call.platform)
    with_biases = (_WITH_BIASES,) if call.freezes and call.biases else ()
    tile_rows = tile_sizes(shape, call.platform).rows
    return Explanation(
        call=call,
        reasons=(
            call.implementation_reason,
            *precision_reasons(call),
            *plan.reasons,
            *(f"forward pass that is kept: {reason}" for reason in kept_reasons),
            *(f"backward pass: {reason}" for reason in (*backward.reasons, *with_biases)),
            *split_reasons(call),
        ),
        memory_bytes=_arena(call, forward, saved_tiles),
        backward_memory_bytes=_arena(differentiated, backward, saved_tiles),
        residual_bytes=residual_bytes(call, roomy_row_tiles(shape, call.platform) * tile_rows),
        worst_case_bytes=sum(_arena(call, dataclasses.replace(forward, ring_tiles=most), saved_tiles).values()),
        wire_bytes=wire_bytes(shape, plan),
        flops=shape.flops,
        memory_name="memory that peers reach, kept between calls,",
    )


def wire_bytes(shape: Shape, plan: KernelPlan) -> int:
    """Returns what a rank receives from its peers in a forward pass under uniform routing.

    Every rank then holds an equal share of the experts that a token chooses.
    """
    of_slots, of_ranks = pulls_per_token(shape)
    remote_rows = int(shape.tokens * of_slots)
    once_a_rank = int(shape.tokens * of_ranks)
    pulled_rows = once_a_rank if plan.keep_tokens else remote_rows
    returned_rows = once_a_rank if plan.sum_at_experts else remote_rows
    words = 2 * remote_rows + returned_rows if plan.sum_at_experts else remote_rows
    # Rows in, answers back, and a slot number of 4 bytes for each row. Kept tokens cross once at best. With sums at
    # experts a routing weight for each row as well, and the slots that are in a sum.
    return pulled_rows * shape.token_bytes + returned_rows * shape.answer_bytes + 4 * words


def _arena(call: Call, plan: KernelPlan, saved_tiles: int) -> dict[str, int]:
    """Bytes of the regions of a rank's arena, from the code that lays it out: no size depends on the workers."""
    layout, shape = native.schedule(), native_shape(call.shape)
    schedule = schedule_of(call.shape, call.platform, plan, saved_tiles)
    head = layout.needed_head(shape, schedule)
    arena = layout.layout_of(shape, schedule, native_formats(call.shape.formats), head)
    # Without what only the other pass has.
    return {f"arena: {name}": size for name, (_, size) in {**arena.head, **arena.body}.items() if size}
