"""What an implementation says of a call: why it runs so, and what it costs."""

import dataclasses

from jax.sharding import AxisType

from jaxmoe.formats import bits
from jaxmoe.implementations.base import Call
from jaxmoe.precision import rounds_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What one call of `moe_layer` does; `print` it.

    It can be compared, be a key of a dict, and be pickled, but for one of a call over a mesh: JAX pickles no devices.

    Args:
      call: the checked call: implementation, placement, shape, plan.
      reasons: why this implementation and this plan.
      memory_bytes: bytes per rank of each temporary array of the forward pass, by name; for `"megakernel"` the regions
        of the memory that peers reach, which is kept between calls.
      backward_memory_bytes: the same of the backward pass of `"megakernel"`, which uses the same memory after the
        forward pass, so that the larger of the two sums counts; empty for the others.
      residual_bytes: what each choice of `residuals` keeps for the backward pass beside the inputs; none of
        `"reference"`, which JAX differentiates.
      network_memory_bytes: bytes per rank of each temporary array of what crosses the network in a forward pass, beside
        `memory_bytes`; empty where experts are on one host.
      worst_case_bytes: what a buffer for the worst routing would take instead of `memory_bytes`.
      wire_bytes: bytes each rank receives from its peers in one forward pass, where experts are on several hosts from
        those of its own.
      network_bytes: bytes each rank receives from other hosts in one forward pass, under uniform routing.
      flops: floating-point operations per rank of a balanced forward pass.
      memory_name: what kind of memory `memory_bytes` is.
    """

    call: Call
    reasons: tuple[str, ...]
    memory_bytes: dict[str, int] = dataclasses.field(hash=False)
    backward_memory_bytes: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    residual_bytes: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    worst_case_bytes: int
    wire_bytes: int
    flops: int
    network_bytes: int = 0
    network_memory_bytes: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
    memory_name: str = "temporary memory of a forward pass"

    @property
    def implementation(self) -> str:
        """Name of the implementation that runs."""
        return self.call.implementation

    def __str__(self) -> str:
        shape, group = self.call.shape, self.call.group
        ranks = f"{group.size} ranks of {' x '.join(group.axis_names)}" if group.axis_names else "one rank"
        if (levels := self.call.levels) is not None:
            ranks += f", {levels.hosts} hosts with {levels.on_host.size} rank(s) each"
        lines = [
            f"moe_layer runs implementation={self.implementation!r} on {self.call.platform}, {ranks}",
            f"  per rank: {shape.tokens} tokens x {shape.top_k} slots, hidden {shape.hidden}, intermediate "
            f"{shape.intermediate}, {shape.local_experts} of {shape.num_experts} experts, "
            f"{_formats(self.call)}",
            *(f"  {reason}" for reason in self.reasons),
            *self._network(),
            f"  {self.flops / 1e12:.3g} TFLOP and {self.wire_bytes / 2**20:.1f} MiB received per rank and forward pass",
            f"  {self.memory_name} per rank, whatever the routing: "
            f"{sum(self.memory_bytes.values()) / 2**20:.1f} MiB (with buffers for the worst routing: "
            f"{self.worst_case_bytes / 2**20:.1f} MiB)",
            *(f"    {size / 2**20:10.1f} MiB  {name}" for name, size in self.memory_bytes.items()),
        ]
        if self.network_memory_bytes:
            lines += [
                "  temporary memory beside it, of what crosses the network, per rank, whatever the routing: "
                f"{sum(self.network_memory_bytes.values()) / 2**20:.1f} MiB",
                *(f"    {size / 2**20:10.1f} MiB  {name}" for name, size in self.network_memory_bytes.items()),
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

    def _network(self) -> list[str]:
        if self.call.levels is None:
            return []
        return [f"  {self.network_bytes / 2**20:.1f} MiB received from other hosts per rank and forward pass"]


def _formats(call: Call) -> str:
    """What the arrays are: the dtype alone where there is but one."""
    formats = call.shape.formats
    if call.precision is None:
        return f"{call.dtype}"
    arrays = {"tokens": formats.tokens, "h": formats.h, "weights": formats.weights, "answers": formats.answers}
    return ", ".join(f"{name} {format_}" for name, format_ in arrays.items())


def precision_reasons(call: Call) -> list[str]:
    """What a user should know of the 8 or 4 bits of a call; nothing where there are none."""
    if call.precision is None:
        return []
    shape = call.shape
    experts = shape.local_experts * shape.expert_bytes / 2**20
    width = bits(shape.formats.weights.dtype)
    rounded = (
        f"experts are rounded to 8 bits in every call, {experts:.1f} MiB per rank, and gradients are those of the "
        "experts as they came"
        if call.quantizes
        else f"experts in {width} bits take {experts:.1f} MiB per rank and have no gradients"
    )
    weights = shape.formats.weights
    if rounds_rows(call.precision) and weights.through_e4m3 and weights.array_scale_dtype is not None:
        rounded += ", and are multiplied rounded to E4M3, as jaxmoe.through_e4m3 asked for"
    of_rows = {"fp8-e8m0": "powers of two", "fp8-static": "given, one for all of either: input_scale of the experts"}
    scales = f", scales of tokens and h are {of_rows[call.precision]}" if call.precision in of_rows else ""
    again = "; a backward pass computes gate and up again, without rounding, whatever residuals="
    kept = again if rounds_rows(call.precision) else ""
    sums = ", sums are those of the tensor cores, scaled once" if call.accumulation == "fast" else ""
    return [f"precision={call.precision!r}: {rounded}{scales}{sums}{kept}"]


def split_reasons(call: Call) -> list[str]:
    """What a user may have forgotten, or pays for: how the work is split over the mesh."""
    mesh, tokens, experts = call.placement.mesh, call.token_split, call.expert_split
    notes = []
    if experts.parts:
        notes.append(
            f"{experts.ranks} ranks of {_listed(experts.parts)} compute parts of the intermediate dimension of the "
            "same experts; their outputs are added up in float32"
        )
    if gathered := (*experts.hidden, *experts.gathered):
        whole = call.shape.local_experts * call.shape.expert_bytes / 2**20
        notes.append(f"experts are gathered over {_listed(gathered)} in every call, {whole:.1f} MiB per rank")
    if tokens.inside:
        notes.append(
            f"no leading dimension of x divides by mesh axis {_listed(tokens.inside)}: its ranks take parts of "
            f"{tokens.entered} tokens, of which {tokens.filling} more are added"
        )
    kinds = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in call.repeated_axes:
        if name in experts.undivided:
            notes.append(
                f"all ranks of axis {name!r}, over which experts.w_gate_up lies split, compute the same tokens with "
                "whole experts: no part of layout='halves' has gate and up; those of experts.split() do"
            )
        elif kinds[name] == AxisType.Explicit:
            notes.append(f"all ranks of Explicit axis {name!r} compute the same tokens with whole experts")
        else:
            notes.append(f"axis {name!r} is left to the compiler: pass data_axes={name!r} if tokens are split over it")
    return notes


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


def residual_bytes(call: Call, rows: int) -> dict[str, int]:
    """Bytes of the inputs of the activation, by choice of `residuals`, where those of so many rows are kept."""
    if rounds_rows(call.precision):
        return {"recompute": 0}
    return {"recompute": 0, "save": rows * call.shape.projections * call.shape.h_bytes}
