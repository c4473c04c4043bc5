"""What `python -m jaxmoe.bench layer` and `beside` are asked for; `command_line.py` has their flags."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmoe.bench import shapes
from jaxmoe.bench.beside_programs import PROGRAMS
from jaxmoe.bench.passes import BACKWARD_ALONE, UNTRAINED, Pass
from jaxmoe.experts import LAYOUTS
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import Accumulation, Precision
from jaxmoe.plan import KernelPlan
from jaxmoe.precision import PRECISIONS, has_given_scales, rounds_rows
from jaxmoe.testing import RoutingKind

BASELINE = "baseline-drops-rows"
MEASURED = (*IMPLEMENTATIONS, BASELINE)
# Those whose errors can be judged by a truth in float32.
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


class Narrow(NamedTuple):
    """BF16 tokens beside experts in 8 or 4 bits; or, with neither block nor precision, wide ones.

    Args:
      block: what the experts are quantised to, as of `inputs.quantized`.
      precision: as of `moe_layer`.
      accumulation: as of `moe_layer`.
      through_e4m3: whether the experts, in 4 bits, are those of `jaxmoe.through_e4m3`.
    """

    block: str | None = None
    precision: Precision | None = None
    accumulation: Accumulation = "promoted"
    through_e4m3: bool = False


# A forward pass is measured in these, and the gradients beside frozen experts.
NARROW = {
    "fp8-block": Narrow("128x128", "fp8"),
    "fp8-channel": Narrow("channel", "fp8"),
    "fp8-static": Narrow("static", "fp8-static"),
    "fp8-static-fast": Narrow("static", "fp8-static", "fast"),
    "w8a16": Narrow("128x128", "w8a16"),
    "mxfp4-a16": Narrow("mxfp4", "w4a16"),
    "mxfp4-a16-repacked": Narrow("mxfp4-repacked", "w4a16"),
    "mxfp4-a8": Narrow("mxfp4", "fp8", through_e4m3=True),
    "mxfp4-a8-registers": Narrow("mxfp4", "fp8"),
    "nvfp4-a8": Narrow("nvfp4", "fp8", through_e4m3=True),
    "nvfp4-a16": Narrow("nvfp4", "w4a16"),
    "nvfp4-a16-repacked": Narrow("nvfp4-repacked", "w4a16"),
}


def narrow_of(dtype: str) -> Narrow:
    """Returns what a `--dtype` rounds, and to what: of a key of `DTYPES` nothing."""
    return NARROW.get(dtype, Narrow())


def wide_dtype_of(dtype: str) -> Any:
    """Returns the type of tokens of a `--dtype`, which is that of experts before they are rounded."""
    return DTYPES.get(dtype, jnp.bfloat16)


# Of wide experts, which are rounded in the call.
ROUNDED = tuple(name for name in PRECISIONS if rounds_rows(name) and not has_given_scales(name))
ROUTINGS: tuple[RoutingKind, ...] = ("uniform", "even", "zipf", "one-hot")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Values of a `jaxmoe.KernelPlan` to try in all combinations; of an empty field the default plan's value.

    For a backward pass they are values of `KernelPlan.backward`.

    Args:
      unit_tiles: row tiles of one expert that are worked on together.
      lag_units: units by which the down GEMM comes later.
      ring_tiles: row tiles that the rings hold. Where empty, the default plan's or the fewest that a plan needs.
      chunk_rows: rows that a warp pulls at a time.
      keep_tokens: whether tokens of peers are kept.
      share_columns: of a forward pass alone, whether blocks share the columns of narrow down tasks.
      sum_at_experts: of a forward pass alone, whether answers are added up at experts.
      segment_tiles: of a backward pass alone, row tiles of one expert whose weight gradients are summed at once.
      weight_slots: experts whose weights lie decoded at a time. Where empty, the default plan's or, where it has some,
        the fewest that a plan needs.
    """

    unit_tiles: tuple[int, ...] = ()
    lag_units: tuple[int, ...] = ()
    ring_tiles: tuple[int, ...] = ()
    chunk_rows: tuple[int, ...] = ()
    keep_tokens: tuple[bool, ...] = ()
    share_columns: tuple[bool, ...] = ()
    sum_at_experts: tuple[bool, ...] = ()
    segment_tiles: tuple[int, ...] = ()
    weight_slots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A plan checks its numbers. Whether they go together depends on the shape and is said in the line of the plan.
        for unit_tiles in self.unit_tiles:
            KernelPlan(unit_tiles, 0, 1)
        for lag_units in self.lag_units:
            KernelPlan(1, lag_units, 1)
        for ring_tiles in self.ring_tiles:
            KernelPlan(1, 0, ring_tiles)
        for chunk_rows in self.chunk_rows:
            KernelPlan(1, 0, 1, chunk_rows)
        for segment_tiles in self.segment_tiles:
            if segment_tiles < 1:
                raise ValueError(f"--segment-tiles={segment_tiles}: a segment has at least one row tile.")
            KernelPlan(1, 0, 1, segment_tiles=segment_tiles)
        for weight_slots in self.weight_slots:
            KernelPlan(1, 0, 1, weight_slots=weight_slots)

    def plans(self, default: KernelPlan) -> list[KernelPlan]:
        """Returns the plans to measure, the default one first, which is that of a forward or of a backward pass."""
        plans = [default]
        is_backward = default.segment_tiles > 0
        of_the_other = ("share_columns", "sum_at_experts") if is_backward else ("segment_tiles",)
        choices = dataclasses.replace(self, **dict.fromkeys(of_the_other, ()))
        if not any(dataclasses.astuple(choices)):
            return plans
        values = (
            self.unit_tiles or (default.unit_tiles,),
            self.lag_units or (default.lag_units,),
            self.chunk_rows or (default.chunk_rows,),
            self.keep_tokens or (default.keep_tokens,),
            choices.share_columns or (default.share_columns,),
            choices.sum_at_experts or (default.sum_at_experts,),
            choices.segment_tiles or (default.segment_tiles,),
        )
        for chosen in itertools.product(*values):
            unit_tiles, lag_units, chunk_rows, keep_tokens, share_columns, sum_at_experts, segment_tiles = chosen
            fewest = KernelPlan(unit_tiles, lag_units, 1, segment_tiles=segment_tiles)
            needed = max(default.weight_slots, fewest.fewest_weight_slots) if default.weight_slots else 0
            rings = self.ring_tiles or (max(default.ring_tiles, fewest.fewest_ring_tiles),)
            plans += [
                KernelPlan(
                    unit_tiles,
                    lag_units,
                    ring,
                    chunk_rows,
                    keep_tokens,
                    segment_tiles,
                    slots,
                    share_columns=share_columns,
                    sum_at_experts=sum_at_experts,
                )
                for ring, slots in itertools.product(rings, self.weight_slots or (needed,))
            ]
        return plans


@dataclasses.dataclass(frozen=True)
class Options:
    """One run of the benchmark.

    Args:
      cases: shapes.
      tokens: per rank, for the cases that do not bring their own.
      ranks: numbers of ranks over which the experts are spread; 0 for all devices. One that comes twice counts once.
      dtype: a key of `DTYPES`, of tokens and weights, or one of `NARROW`.
      implementations: members of `MEASURED`.
      passes: members of `PASSES`, what is timed.
      residuals: as of `moe_layer`, of `"both"`.
      routing: as of `jaxmoe.testing.make_inputs`.
      sweep: plans of `"megakernel"` beside its default one.
      blocks: timed blocks, of which the median counts.
      seconds: approximate length of a block.
      rest: seconds of idleness before each block.
      copies: arrays are copied from each device to the next one meanwhile.
      terms: also print the bytes term by term.
      kernels: also print that many of the longest GPU kernels.
      networks: plans between hosts to measure beside the call of one level, as if the ranks were on several.
      fused: layouts of gate and up in one array to measure beside experts that have them apart.
      json: file to which the results are added, one JSON object a line.
    """

    cases: tuple[shapes.Case, ...]
    tokens: tuple[int, ...]
    ranks: tuple[int, ...] = (0,)
    dtype: str = "bf16"
    implementations: tuple[str, ...] = ("xla",)
    passes: tuple[Pass, ...] = ("forward",)
    residuals: str | None = None
    routing: RoutingKind = "uniform"
    sweep: Sweep = Sweep()
    blocks: int = 7
    seconds: float = 0.3
    rest: float = 0.0
    copies: bool = False
    terms: bool = False
    kernels: int = 0
    networks: tuple[NetworkPlan, ...] = ()
    fused: tuple[str, ...] = ()
    json: Path | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype, (*DTYPES, *NARROW))
        for layout in self.fused:
            if layout not in LAYOUTS:
                raise ValueError(f"--fused={layout} is not one of {', '.join(LAYOUTS)}.")
        if self.fused and (self.dtype in NARROW or BASELINE in self.implementations):
            raise ValueError(
                f"--fused is of wide experts of moe_layer, and this is --dtype={self.dtype}, --implementation="
                f"{','.join(self.implementations)}. Leave it out, or measure {' or '.join(DTYPES)} without {BASELINE}."
            )
        if self.dtype in NARROW and {*self.passes} - UNTRAINED:
            raise ValueError(
                f"--dtype={self.dtype} is of experts that are not trained, and --pass={','.join(self.passes)} asks for "
                "their gradients. Measure --pass=forward, --pass=frozen, or all gradients with --dtype=bf16."
            )
        for name in self.implementations:
            if name not in MEASURED:
                raise ValueError(f"--implementation={name} is not one of {', '.join(MEASURED)}.")
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"--tokens={','.join(map(str, self.tokens))}: a rank needs at least one token.")
        if not self.ranks or min(self.ranks) < 0:
            raise ValueError(
                f"--ep={','.join(map(str, self.ranks))}: a number of ranks is at least 1, or 0 for all devices. Name "
                "one, several with commas between, or leave --ep out."
            )
        swept = any(dataclasses.astuple(self.sweep))
        if swept and "megakernel" not in self.implementations:
            raise ValueError(
                "--unit-tiles, --lag-units and --ring-tiles are of the megakernel's plan, and --implementation="
                f"{','.join(self.implementations)} does not measure it. Add megakernel, or leave them out."
            )
        if swept and {*self.passes} == {"both"}:
            raise ValueError(
                "--pass=both takes the default plans of both passes. Sweep --pass=forward, backward or frozen."
            )
        if self.residuals and "both" not in self.passes:
            raise ValueError(
                f"--residuals={self.residuals} is for --pass=both, and --pass={','.join(self.passes)} keeps nothing."
            )
        if self.sweep.segment_tiles and not {*BACKWARD_ALONE} & {*self.passes}:
            raise ValueError(
                f"--segment-tiles is of the plan of a backward pass, and --pass={','.join(self.passes)} does not sweep "
                "one. Add backward or frozen, or leave it out."
            )
        for name in ("share_columns", "sum_at_experts"):
            if getattr(self.sweep, name) and "forward" not in self.passes:
                raise ValueError(
                    f"--{name.replace('_', '-')} is of the plan of a forward pass, and --pass={','.join(self.passes)} "
                    "does not sweep one. Add forward, or leave it out."
                )


@dataclasses.dataclass(frozen=True)
class BesideOptions:
    """One run of `python -m jaxmoe.bench beside`.

    Args:
      programs: members of `beside_programs.PROGRAMS`; empty for all that there can be.
      tokens: per rank.
      ranks: of the programs; 0 for all devices.
      shape: of the layer; `None` for the widths of qwen3-30b-a3b and 32 experts per rank.
      dtype: a key of `DTYPES`, of tokens and weights, or of `NARROW`, of experts.
      precision: of `moe_layer`, where experts are wide.
      implementation: of `moe_layer`; `None` lets it choose.
      network: the plan between hosts, as if the ranks were on several; `None` for one host.
      seconds: for which a program is timed.
      rounds: whether every program is timed in rounds inside one jit too, not only those that take longer than their
        parts.
      json: file to which the results are added, one JSON object a line.
    """

    programs: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (64, 1024, 8192)
    ranks: int = 0
    shape: shapes.LayerShape | None = None
    dtype: str = "bf16"
    precision: Precision | None = None
    implementation: str | None = None
    network: NetworkPlan | None = None
    seconds: float = 0.3
    rounds: bool = False
    json: Path | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype, (*DTYPES, *NARROW))
        if self.precision not in (None, *ROUNDED):
            raise ValueError(
                f"--precision={self.precision} is not one of {', '.join(ROUNDED)}, which take wide experts."
            )
        if self.precision is not None and self.dtype in NARROW:
            raise ValueError(f"--precision={self.precision} and --dtype={self.dtype}, which has one. Leave one out.")
        possible = [name for name, program in PROGRAMS.items() if self.dtype not in NARROW or not program.trains]
        if not self.programs:
            object.__setattr__(self, "programs", tuple(possible))
        for name in self.programs:
            if name not in PROGRAMS:
                raise ValueError(f"--programs={name} is not one of {', '.join(PROGRAMS)}.")
            if name not in possible:
                raise ValueError(f"--programs={name} differentiates experts, which --dtype={self.dtype} cannot be.")
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"--tokens={','.join(map(str, self.tokens))}: a rank needs at least one token.")
        if self.ranks < 0:
            raise ValueError(f"--ep={self.ranks}: a number of ranks is at least 1, or 0 for all devices.")
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"--implementation={self.implementation} is not one of {', '.join(IMPLEMENTATIONS)}.")

    @property
    def wide(self) -> Any:
        """The dtype of tokens, and of dense weights."""
        return wide_dtype_of(self.dtype)

    @property
    def block(self) -> str | None:
        """What experts are quantised to, as of `jaxmoe.quantize`."""
        return self.narrow.block

    @property
    def narrow(self) -> Narrow:
        """What has fewer bits, and how."""
        return NARROW.get(self.dtype, Narrow(precision=self.precision))

    @property
    def of_layer(self) -> dict[str, Any]:
        """What `moe_layer` is called with beside its implementation."""
        narrow = self.narrow
        return {"precision": narrow.precision, "accumulation": narrow.accumulation, "network": self.network}


def check_dtype(dtype: str, known: Sequence[str]) -> None:
    """Raises `ValueError` where a `--dtype` is not one of those."""
    if dtype not in known:
        raise ValueError(f"--dtype={dtype} is not one of {', '.join(known)}, which can be measured here.")
