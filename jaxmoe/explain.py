"""`explain`: what `moe_layer` would do with the same arguments, why, and what it costs. Runs nothing."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import AxisType

from jaxmoe import call as calls
from jaxmoe import native
from jaxmoe.call import Call, Implementation, Residuals
from jaxmoe.implementations.base import Shape
from jaxmoe.implementations.megakernel.plan_defaults import WORKERS_OF_A_GPU, backward_plan, pulls_per_token
from jaxmoe.implementations.megakernel.tiling import granularity, most_row_tiles, saved_row_tiles
from jaxmoe.plan import KernelPlan, Plan

_MEMORY_OF = {"megakernel": "memory that peers reach, kept between calls,"}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What one call of `moe_layer` does; `print` it.

    Args:
      call: the checked call: implementation, placement, shape, plan.
      reasons: why this implementation and this plan.
      memory_bytes: bytes per rank of each temporary array of the forward pass, by name; for `"megakernel"` the regions
        of the memory that peers reach, which is kept between calls.
      backward_memory_bytes: the same of the backward pass of `"megakernel"`, which uses the same memory after the
        forward pass, so that the larger of the two sums counts; empty for the others.
      residual_bytes: what each choice of `residuals` keeps for the backward pass beside the inputs; none of
        `"reference"`, which JAX differentiates.
      worst_case_bytes: what a buffer for the worst routing would take instead of `memory_bytes`.
      wire_bytes: bytes each rank receives from its peers in one forward pass.
      flops: floating-point operations per rank of a balanced forward pass.
    """

    call: Call
    reasons: tuple[str, ...]
    memory_bytes: dict[str, int]
    backward_memory_bytes: dict[str, int]
    residual_bytes: dict[str, int]
    worst_case_bytes: int
    wire_bytes: int
    flops: int

    @property
    def implementation(self) -> str:
        """Name of the implementation that runs."""
        return self.call.implementation

    def __str__(self) -> str:
        shape, group = self.call.shape, self.call.placement.group
        ranks = f"{group.size} ranks of {' x '.join(group.axis_names)}" if group.axis_names else "one rank"
        lines = [
            f"moe_layer runs implementation={self.implementation!r} on {self.call.platform}, {ranks}",
            f"  per rank: {shape.tokens} tokens x {shape.top_k} slots, hidden {shape.hidden}, intermediate "
            f"{shape.intermediate}, {shape.num_experts // shape.ranks} of {shape.num_experts} experts, "
            f"{self.call.dtype}",
            *(f"  {reason}" for reason in self.reasons),
            f"  {self.flops / 1e12:.3g} TFLOP and {self.wire_bytes / 2**20:.1f} MiB received per rank and forward pass",
            f"  {_MEMORY_OF.get(self.implementation, 'temporary memory of a forward pass')} per rank, whatever the "
            f"routing: {sum(self.memory_bytes.values()) / 2**20:.1f} MiB "
            f"(with buffers for the worst routing: {self.worst_case_bytes / 2**20:.1f} MiB)",
            *(f"    {size / 2**20:10.1f} MiB  {name}" for name, size in self.memory_bytes.items()),
        ]
        if self.residual_bytes:
            choices = (f"{size / 2**20:.1f} MiB with {name!r}" for name, size in self.residual_bytes.items())
            lines.append(f"  residuals={self.call.residuals!r}; kept beside the inputs: {', '.join(choices)}")
        if self.backward_memory_bytes:
            lines += [
                f"  in a backward pass: {sum(self.backward_memory_bytes.values()) / 2**20:.1f} MiB of the same memory",
                *(f"    {size / 2**20:10.1f} MiB  {name}" for name, size in self.backward_memory_bytes.items()),
            ]
        return "\n".join(lines)


def explain(
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    experts: Any,
    *,
    activation: Any = "silu",
    axis_name: str | Sequence[str] | None = "expert",
    data_axes: str | Sequence[str] = (),
    token_valid: Any = None,
    mesh: Any = None,
    implementation: Implementation | None = None,
    plan: Any = None,
    residuals: Residuals | None = None,
) -> Explanation:
    """Says what `moe_layer` does with these arguments: the implementation and plan it takes, why, and the bytes.

    Args:
      x: as for `moe_layer`, or a `jax.ShapeDtypeStruct`; so are the other arrays.
      topk_ids: as for `moe_layer`.
      topk_weights: as for `moe_layer`.
      experts: as for `moe_layer`.
      activation: as for `moe_layer`.
      axis_name: as for `moe_layer`.
      data_axes: as for `moe_layer`.
      token_valid: as for `moe_layer`.
      mesh: as for `moe_layer`.
      implementation: as for `moe_layer`.
      plan: as for `moe_layer`.
      residuals: as for `moe_layer`.

    Raises:
      ValueError: as `moe_layer` would.
      TypeError: as `moe_layer` would.
      NotImplementedError: as `moe_layer` would.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> experts = jax.eval_shape(lambda: jaxmoe.Experts.init(jax.random.key(0), 8, 4096, 14336, dtype=jnp.bfloat16))
    >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    >>> slots = jax.ShapeDtypeStruct((8192, 2), jnp.int32), jax.ShapeDtypeStruct((8192, 2), jnp.float32)
    >>> jaxmoe.explain(x, *slots, experts, axis_name=None).implementation
    'xla'
    """
    call = calls.check(
        x,
        topk_ids,
        topk_weights,
        experts,
        activation=activation,
        axis_name=axis_name,
        data_axes=data_axes,
        token_valid=token_valid,
        mesh=mesh,
        implementation=implementation,
        plan=plan,
        residuals=residuals,
    )
    if isinstance(call.plan, KernelPlan):
        return _megakernel(call, call.plan)
    if call.implementation == "reference":
        return _reference(call)
    memory, worst_case = _xla_memory(call, call.plan), _xla_memory(call, Plan(max(call.shape.all_slots, 1)))
    shape = call.shape
    token_bytes = shape.tokens * shape.hidden * shape.itemsize
    return Explanation(
        call=call,
        reasons=(call.implementation_reason, *call.plan.reasons, *_unsplit_axes(call)),
        memory_bytes=memory,
        backward_memory_bytes={},
        residual_bytes=_residual_bytes(shape, call.plan.chunk_rows),
        worst_case_bytes=sum(worst_case.values()),
        # Tokens in, sums of tokens out, and 8 bytes of id and weight for each slot.
        wire_bytes=(shape.ranks - 1) * (2 * token_bytes + 8 * shape.tokens * shape.top_k),
        flops=_flops(shape),
    )


def _unsplit_axes(call: Call) -> list[str]:
    """What a user may have forgotten, or pays for: mesh axes over which the layer does not split its work."""
    mesh = call.placement.mesh
    if mesh is None:
        return []
    notes = []
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if mesh.shape[name] == 1 or name in call.placement.token_axes:
            continue
        if kind == AxisType.Explicit:
            notes.append(f"all ranks of Explicit axis {name!r} compute the same tokens with whole experts")
        else:
            notes.append(f"axis {name!r} is left to the compiler: pass data_axes={name!r} if tokens are split over it")
    return notes


def _flops(shape: Shape) -> int:
    gemms = 3 if shape.gated else 2
    return 2 * gemms * shape.balanced_rows * shape.hidden * shape.intermediate


def _residual_bytes(shape: Shape, rows: int) -> dict[str, int]:
    projections = 2 if shape.gated else 1
    return {"recompute": 0, "save": rows * projections * shape.intermediate * shape.itemsize}


def _xla_memory(call: Call, plan: Plan) -> dict[str, int]:
    """Bytes of the temporary arrays of `xla_impl`, each counted once although the compiler lets some share memory."""
    shape, chunk_rows = call.shape, plan.chunk_rows
    all_tokens, token_bytes = shape.ranks * shape.tokens, shape.hidden * shape.itemsize
    projections = 2 if shape.gated else 1
    # XLA:CPU multiplies a copy of the rows for every local expert, zero but for the expert's own.
    copies = shape.num_experts // shape.ranks if plan.grouped_gemm == "ragged_dot" else 0
    return {
        "tokens of all ranks": all_tokens * token_bytes if shape.ranks > 1 else 0,
        "rows of one pass: tokens and outputs": 2 * chunk_rows * token_bytes,
        "rows of one pass: gate, up and h": (projections + 1) * chunk_rows * shape.intermediate * shape.itemsize,
        "masked copies of the rows, in jax.lax.ragged_dot": copies
        * chunk_rows
        * max(shape.hidden, shape.intermediate)
        * shape.itemsize,
        "sums of all tokens, sent and received": (2 if shape.ranks > 1 else 1) * all_tokens * token_bytes,
        "routing of all ranks, sorted": 5 * 4 * shape.all_slots,
    }


def _megakernel(call: Call, plan: KernelPlan) -> Explanation:
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
            *_unsplit_axes(call),
        ),
        memory_bytes=_arena(call, plan, min(plan.ring_tiles, most)),
        backward_memory_bytes=_arena(call, backward, min(backward.ring_tiles, most)),
        residual_bytes=_residual_bytes(shape, saved_row_tiles(shape, call.platform) * tile_rows),
        worst_case_bytes=sum(_arena(call, plan, most).values()),
        # Rows in, outputs of rows back, and a slot number of 4 bytes for each row. Kept tokens cross once at best.
        wire_bytes=(pulled_rows + remote_rows) * shape.hidden * shape.itemsize + 4 * remote_rows,
        flops=_flops(shape),
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
        projections=2 if shape.gated else 1,
    )
    schedule = layout.Schedule(
        tile=layout.TileSizes(pieces.tile_rows, pieces.hidden_columns, pieces.output_columns),
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


def _reference(call: Call) -> Explanation:
    shape = call.shape
    wide = max(4, shape.itemsize)
    matrices = (3 if shape.gated else 2) * shape.hidden * shape.intermediate
    memory = {
        "experts of all ranks, in float32": shape.num_experts * matrices * wide,
        "one expert on every token": shape.tokens * (3 * shape.intermediate + 2 * shape.hidden) * wide,
    }
    return Explanation(
        call=call,
        reasons=(call.implementation_reason, "every expert is applied to every token"),
        memory_bytes=memory,
        backward_memory_bytes={},
        residual_bytes={},
        worst_case_bytes=sum(memory.values()),
        wire_bytes=(shape.ranks - 1) * shape.num_experts // shape.ranks * matrices * shape.itemsize,
        flops=_flops(shape) // shape.top_k * shape.num_experts,
    )
