"""What a call of the megakernel costs."""

from jaxmoe import native
from jaxmoe.implementations.base import Call
from jaxmoe.implementations.explanation import Explanation, residual_bytes, unsplit_axes
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.megakernel.plan_defaults import WORKERS_OF_A_GPU, backward_plan, pulls_per_token
from jaxmoe.implementations.megakernel.tiling import granularity, most_row_tiles, saved_row_tiles


def explain(call: Call) -> Explanation:
    """Returns the regions of the memory that peers reach, and the bytes that uniform routing sends."""
    plan: KernelPlan = call.plan
    shape, most = call.shape, most_row_tiles(call.shape, call.platform)
    backward = backward_plan(plan, shape, call.platform)
    tile_rows = granularity(call.platform, shape.gated).tile_rows
    # Under uniform routing every rank holds an equal share of the experts that a token chooses.
    of_slots, of_ranks = pulls_per_token(shape)
    remote_rows = int(shape.tokens * of_slots)
    pulled_rows = int(shape.tokens * of_ranks) if plan.keep_tokens else remote_rows
    return Explanation(
        call=call,
        reasons=(
            call.implementation_reason,
            *plan.reasons,
            *(f"backward pass: {reason}" for reason in backward.reasons),
            *unsplit_axes(call),
        ),
        memory_bytes=_arena(call, plan, min(plan.ring_tiles, most)),
        backward_memory_bytes=_arena(call, backward, min(backward.ring_tiles, most)),
        residual_bytes=residual_bytes(shape, saved_row_tiles(shape, call.platform) * tile_rows),
        worst_case_bytes=sum(_arena(call, plan, most).values()),
        # Rows in, outputs of rows back, and a slot number of 4 bytes for each row. Kept tokens cross once at best.
        wire_bytes=(pulled_rows + remote_rows) * shape.hidden * shape.itemsize + 4 * remote_rows,
        flops=shape.flops,
        memory_name="memory that peers reach, kept between calls,",
    )


def _arena(call: Call, plan: KernelPlan, ring_tiles: int) -> dict[str, int]:
    """Bytes of the regions of a rank's arena, from the code that lays it out."""
    layout, shape, pieces = native.schedule(), call.shape, granularity(call.platform, call.shape.gated)
    workers = pieces.workers or WORKERS_OF_A_GPU
    sizes = layout.Shape(
        shape.ranks,
        shape.tokens,
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.top_k,
        projections=shape.projections,
    )
    schedule = layout.Schedule(
        tile=layout.TileSizes(pieces.tile_rows, pieces.h_columns, pieces.columns),
        unit_tiles=plan.unit_tiles,
        lag_units=plan.lag_units,
        ring_tiles=ring_tiles,
        workers=workers,
        chunk_rows=plan.chunk_rows,
        dispatchers=workers * pieces.dispatchers_per_worker,
        narrow_rows=pieces.tile_rows // 2,
        keep_tokens=int(plan.keep_tokens),
        segment_tiles=plan.segment_tiles,
    )
    arena = layout.layout_of(sizes, schedule, layout.needed_head(sizes, schedule), shape.itemsize)
    # Without what only the other pass has.
    return {f"arena: {name}": size for name, (_, size) in {**arena.head, **arena.body}.items() if size}
