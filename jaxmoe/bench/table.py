"""One measured line of the benchmark: what is kept of it, and how it is printed."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.bench import traffic
from jaxmoe.bench.passes import Pass, flops
from jaxmoe.bench.peaks import Peaks
from jaxmoe.options import Precision


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured line. What was not measured or is not known is `None`.

    Args:
      shape: its name.
      hidden: width of a token.
      intermediate: width between the two GEMMs.
      num_experts: of all ranks.
      top_k: experts per token.
      tokens: per rank.
      ranks: over which the experts are spread.
      processes: of the run.
      dtype: of tokens and weights, as `--dtype` names it.
      routing: how tokens choose experts.
      implementation: that was measured.
      plan: of the megakernel: the fields of `jaxmoe.KernelPlan`; of a backward pass those of its `backward`, of both
        passes those of the forward pass and under `"backward"` the others.
      device: its kind.
      jax: its version.
      relative_error: of what was sampled of the results, the worst of the sets of inputs.
      allowed_error: of the same.
      same_bits: whether all outputs equal those of the default plan; `None` where that is not the question.
      checked: whether the check was passed; otherwise nothing was timed.
      hbm_complete: whether `hbm_bytes` are all there are; otherwise at least as many are moved.
      hbm_rank: the rank that reads from and writes to its memory most.
      hbm_bytes: its bytes by term, see `traffic.py`.
      nvlink_rank: the rank that receives most from its peers; as much leaves it.
      nvlink_bytes: its bytes by term.
      weight_copies: among which calls rotate, see `inputs.py`.
      arena_mib: memory per rank that peers reach and that is kept between calls, MiB; as much as this pass needs.
      temporary_mib: memory per rank that XLA takes for the call, MiB.
      dropped_rows: over all sets of inputs.
      microseconds: per call, median of the blocks of the slowest process, see `timing.py`.
      fastest: block of that process, microseconds per call.
      slowest: block of that process, microseconds per call.
      tflops: operations, as of `passes.flops`, over the time, TFLOP/s per rank.
      share_of_peak: `tflops` of a product of the operands' format, see `peaks.py`.
      hbm_gbs: `hbm_bytes` over the time, GB/s.
      share_of_copy: `hbm_gbs` of a copy, see `peaks.py`.
      nvlink_gbs: `nvlink_bytes` over the time, GB/s.
      times_faster: than other implementations measured before in this run with the same inputs, by name.
      pass_name: what was timed: forward, backward or both.
      worst_piece: what the errors are of: `y`, or a gradient.
      memory_mib: the most memory per rank beyond parameters, inputs and results: `arena_mib` and `temporary_mib`.
      scaling: time of the same on `scaling_ranks` ranks, measured before in this run with as many tokens per rank, over
        this time; only of default plans. From two ranks it is what FlashDMoE calls overlap efficiency, T(2) / T(N).
      scaling_ranks: the first number above 1 of those that the run was asked for.
      unrounded_error: of a layer in 8 bits, what `relative_error` is against the layer with the same weights before
        they had 8 bits, where nothing is rounded.
      over_one_level_time: of a plan between hosts, time over that of the same ranks without one, measured before.
      copies_gbs: what copies that ran meanwhile have brought from each device to the next one (`copies.py`), GB/s.
    """

    shape: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    tokens: int
    ranks: int
    processes: int
    dtype: str
    routing: str
    implementation: str
    plan: dict[str, Any] | None
    device: str
    jax: str
    relative_error: float
    allowed_error: float
    same_bits: bool | None
    checked: bool
    hbm_complete: bool | None
    hbm_rank: int | None
    hbm_bytes: dict[str, traffic.Bytes] | None
    nvlink_rank: int | None
    nvlink_bytes: dict[str, traffic.Bytes] | None
    weight_copies: int
    arena_mib: float | None
    temporary_mib: float | None
    dropped_rows: int
    microseconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    tflops: float | None = None
    share_of_peak: float | None = None
    hbm_gbs: float | None = None
    share_of_copy: float | None = None
    nvlink_gbs: float | None = None
    times_faster: dict[str, float] = dataclasses.field(default_factory=dict)
    pass_name: Pass = "forward"
    worst_piece: str = "y"
    memory_mib: float | None = None
    scaling: float | None = None
    scaling_ranks: int | None = None
    unrounded_error: float | None = None
    over_one_level_time: float | None = None
    copies_gbs: float | None = None

    def timed(self, blocks: Sequence[float], peak: Peaks | None, precision: Precision | None = None) -> "Result":
        """Returns the result with its times, and what follows from them.

        Args:
          blocks: seconds per call of each.
          peak: of the device, where it is known.
          precision: of the calls, whose products `tflops` is compared with.
        """
        seconds = statistics.median(blocks)
        operations = flops(
            self.pass_name,
            tokens=self.tokens,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
        )
        tflops = operations / seconds / 1e12
        hbm_gbs, nvlink_gbs = (
            None if sizes is None else sum(sizes.values()) / seconds / 1e9
            for sizes in (self.hbm_bytes, self.nvlink_bytes)
        )
        return dataclasses.replace(
            self,
            microseconds=seconds * 1e6,
            fastest=min(blocks) * 1e6,
            slowest=max(blocks) * 1e6,
            tflops=tflops,
            share_of_peak=tflops / peak.product(precision) if peak else None,
            hbm_gbs=hbm_gbs,
            share_of_copy=hbm_gbs / peak.copy_gbs if peak and hbm_gbs is not None else None,
            nvlink_gbs=nvlink_gbs,
        )

    def to_json(self) -> str:
        """Returns the result as one line of JSON, which has no NaN: an error that is none is null."""
        fields = dataclasses.asdict(self)
        for name in ("relative_error", "unrounded_error"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = None
        return json.dumps(fields, allow_nan=False)

    def compared(self, microseconds: Mapping[str, float]) -> "Result":
        """Returns the result with the multiples over other implementations, whose times are given by name."""
        if self.microseconds is None:
            return self
        others = {name: time for name, time in microseconds.items() if name != self.implementation}
        faster = {name: time / self.microseconds for name, time in others.items()}
        return dataclasses.replace(self, times_faster=faster)

    def over_one_level(self, microseconds: float | None) -> "Result":
        """Returns the result with its time over that of the same implementation on one level, where that was timed."""
        if self.microseconds is None or microseconds is None:
            return self
        return dataclasses.replace(self, over_one_level_time=self.microseconds / microseconds)

    def scaled(self, reference: "Result") -> "Result":
        """Returns the result with its scaling from another number of ranks.

        Args:
          reference: of the same shape, tokens per rank, pass and implementation there, both with their default plans.
        """
        if self.microseconds is None or reference.microseconds is None:
            return self
        scaling = reference.microseconds / self.microseconds
        return dataclasses.replace(self, scaling=scaling, scaling_ranks=reference.ranks)


# Name, width and whether the column is flush left.
_UNROUNDED = ("unrounded", 9, True)  # only of layers in 8 bits
_COLUMNS = (
    ("shape", 16, True),
    ("tokens", 6, False),
    ("EP", 3, False),
    ("pass", 8, True),
    ("implementation", 19, True),
    ("plan", 12, True),
    ("check", 9, True),
    _UNROUNDED,
    ("us", 8, False),
    ("fast-slow", 13, False),
    ("TFLOP/s", 7, False),
    ("of peak", 7, False),
    ("HBM GB/s", 8, False),
    ("of copy", 7, False),
    ("NVLink GB/s", 11, False),
    ("memory MiB", 10, False),
    ("dropped", 7, False),
    ("x xla", 6, False),
    ("scaling", 12, False),
)


def header(in_8_bits: bool = False) -> str:
    """Returns the names of the columns."""
    return _row([name for name, _, _ in _columns(in_8_bits)], in_8_bits)


def _columns(in_8_bits: bool) -> list[tuple[str, int, bool]]:
    return [column for column in _COLUMNS if in_8_bits or column != _UNROUNDED]


def line(result: Result) -> str:
    """Returns a result as a line of the table; without a passed check no time is printed."""
    r, in_8_bits = result, result.unrounded_error is not None
    left = _row(_case(r), in_8_bits)
    if r.same_bits is False:
        return f"{left} other bits than with the default plan: not timed"
    if not r.checked:
        return f"{left} above the allowed error of {r.allowed_error:.1e} in {r.worst_piece}: not timed"
    return _row(
        [
            *_case(r),
            _number(r.microseconds, ".1f"),
            f"{_number(r.fastest, '.0f')}-{_number(r.slowest, '.0f')}",
            _number(r.tflops, "#.3g" if r.tflops is not None and r.tflops < 100 else ".0f"),
            _number(r.share_of_peak, ".1%"),
            ("" if r.hbm_complete or r.hbm_gbs is None else ">") + _number(r.hbm_gbs, ".0f"),
            _number(r.share_of_copy, ".1%"),
            _number(r.nvlink_gbs, ".0f"),
            _number(r.memory_mib, ".0f"),
            str(r.dropped_rows),
            _number(r.times_faster.get("xla"), ".2f"),
            _beside_others(r),
        ],
        in_8_bits,
    )


def _beside_others(r: Result) -> str:
    if r.over_one_level_time is not None:
        return f"{r.over_one_level_time:.3f} x the time of one level"
    return "" if r.scaling is None else f"{r.scaling:.2f} of EP {r.scaling_ranks}"


def terms(result: Result) -> str:
    """Returns the bytes of a result term by term, a line for each."""
    lines = []
    parts = (
        ("HBM", result.hbm_rank, result.hbm_bytes, "" if result.hbm_complete else ", at least"),
        ("NVLink", result.nvlink_rank, result.nvlink_bytes, " received"),
    )
    for name, rank, sizes, note in parts:
        if sizes is None:
            of_pass = "" if result.pass_name == "forward" else f", pass {result.pass_name}"
            lines.append(f"    {name}: not counted for {result.implementation}{of_pass}")
            continue
        lines.append(f"    {sum(sizes.values()) / 1e6:12.3f} MB {name} of rank {rank}{note}")
        lines += [f"    {size / 1e6:12.3f} MB   {term.replace('_', ' ')}" for term, size in sizes.items()]
    return "\n".join(lines)


def failure(shape: str, tokens: int, ranks: int, pass_name: Pass, implementation: str, plan: str, text: str) -> str:
    """Returns the line of a case that could not be measured."""
    return f"{_row([shape, str(tokens), str(ranks), pass_name, implementation, plan])} {text}"


def plan_text(plan: dict[str, Any] | None) -> str:
    """Returns a plan as in the table.

    Unit tiles / lag units / ring tiles / rows of a chunk, k where tokens are kept, c where blocks share columns, + for
    sums at experts, in a backward pass / segment tiles, and behind an s the slots of decoded weights, where there are
    some.
    What times both passes takes the default plan of each; of that it says what is kept for the backward pass. Over
    several hosts: ranks per host, way, chunks / tokens of a round.

    >>> plan_text({"unit_tiles": 9, "lag_units": 3, "ring_tiles": 54, "chunk_rows": 4, "keep_tokens": True})
    '9/3/54/4k'
    """
    if plan is None:
        return "-"
    if "fused" in plan:
        return plan["fused"]
    if "network" in plan:
        network = plan["network"]
        return f"{network['ranks_per_host']} {network['way']} {network['chunks']}/{network['round_tokens'] or '-'}"
    if "backward" in plan:
        return plan["residuals"]
    numbers = [plan[name] for name in ("unit_tiles", "lag_units", "ring_tiles", "chunk_rows")]
    segment = f"/{plan['segment_tiles']}" if plan.get("segment_tiles") else ""
    flags = ("k" if plan["keep_tokens"] else "") + ("c" if plan.get("share_columns") else "")
    flags += "+" if plan.get("sum_at_experts") else ""
    slots = f"s{plan['weight_slots']}" if plan.get("weight_slots") else ""
    return "/".join(map(str, numbers)) + flags + segment + slots


def _case(r: Result) -> list[str]:
    check = "same bits" if r.same_bits else f"{r.relative_error:.1e}"
    unrounded = [] if r.unrounded_error is None else [f"{r.unrounded_error:.1e}"]
    return [r.shape, str(r.tokens), str(r.ranks), r.pass_name, r.implementation, plan_text(r.plan), check, *unrounded]


def _row(cells: list[str], in_8_bits: bool = False) -> str:
    columns = zip(cells, _columns(in_8_bits), strict=False)
    return " ".join(f"{cell:<{width}}" if left else f"{cell:>{width}}" for cell, (_, width, left) in columns).rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
