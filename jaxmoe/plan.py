"""How a layer of one shape is computed: everything that may be swept without changing the result beyond rounding.

`call.py` asks `default_plan` unless the user passes a plan; the implementations read it, `explain` prints it. There is
one kind of plan for each implementation that has choices: `Plan` for `"xla"`, `KernelPlan` for `"megakernel"`.
"""

import dataclasses
import importlib.util
import operator
from typing import Any, Literal, overload

import jax.numpy as jnp

GroupedGemm = Literal["ragged_dot", "tokamax"]
GROUPED_GEMMS: tuple[GroupedGemm, ...] = ("ragged_dot", "tokamax")

# Rows are gathered in multiples of this: the row tile of the grouped GEMMs on every GPU that has one.
ROW_TILE = 128
# Up to this many rows a rank with a GPU allocates the worst case: a few MB, and no loop that the host has to steer. On
# CPU there is no such loop to avoid, and a grouped GEMM takes time for every allocated row.
WORST_CASE_ROWS = 4096
# Rows of one pass over the balanced number. Beyond it comes another pass; below it rows are allocated and not used. The
# same of the rows that the megakernel saves for its backward pass.
ROWS_OVER_BALANCED = 1.25
# What a TMA copy of one row needs: 16 bytes of a 16-bit type.
TOKAMAX_MULTIPLE = 8

# Token rows of one unit of the megakernel: half of the 50 MB of L2 that an H100 or H200 has, so that the weights which
# the unit's tiles share stay there as well.
UNIT_BYTES = 24 * 2**20
FEWEST_UNIT_TILES = 4
UNIT_TILES_ON_CPU = 2
# Pairs of the 132 thread blocks of an H100 or H200, and how many rounds of them lie between the GEMMs of a unit: with
# fewer, down tasks wait for gate and up tasks that have just begun; with more, h has left the L2 cache by then.
WORKERS_OF_A_GPU = 66
LAG_WAVES = 1.5
MOST_LAG_UNITS = 16
# Rows that a warp pulls at a time. Few, where the start counts: 396 warps pull at once, and the first tile is there
# when all its chunks are. More, where a rank pulls more bytes than this.
CHUNK_ROWS, LARGE_CHUNK_ROWS = 4, 8
LARGE_CHUNK_BYTES = 512 * 2**20
CHUNK_ROWS_ON_CPU = 4
# A peer's tokens are kept where keeping them saves that share of the rows pulled from peers, and a rank has so many
# rows: those of a decode batch are pulled all at once, before any could be kept.
KEEP_SAVES = 1 / 3
KEEP_FROM_ROWS = 4096
# Units of ring beyond the lag: one that is being pulled, one that gate_up reads, one that down reads. Small units take
# more of them, so that pulls keep ahead.
RING_UNITS_BEYOND_LAG = 3
FEWEST_TILES_BEYOND_LAG = 16
# Of a backward pass: bytes that the rows of one segment take in the rings, at most. A segment is better as large as the
# expert: then no sums of weight gradients go through memory.
SEGMENT_BYTES = 1024 * 2**20
FEWEST_SEGMENT_TILES = 4
SEGMENT_TILES_ON_CPU = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one call, as one rank sees them.

    Args:
      tokens: tokens of this rank.
      hidden: width of a token.
      intermediate: width between the two GEMMs of an expert.
      num_experts: experts of the whole group.
      top_k: slots per token.
      ranks: size of the expert-parallel group.
      itemsize: bytes per element of tokens and weights.
      gated: whether the experts have an up projection.
    """

    tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    ranks: int = 1
    itemsize: int = 2
    gated: bool = True

    @property
    def all_slots(self) -> int:
        """Slots of all ranks: the rows of one rank if every slot names its experts."""
        return self.ranks * self.tokens * self.top_k

    @property
    def balanced_rows(self) -> int:
        """Rows of a rank when all ranks have equally many."""
        return self.tokens * self.top_k

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ranks


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choices of the `"xla"` implementation.

    Args:
      chunk_rows: rows that a rank's experts process in one pass. Memory grows with it; more rows than that (a rank
        whose experts are chosen more often than others) take further passes, so that none is dropped. With tokamax it
        is rounded up to a multiple of 128: its weight gradients fail for some other numbers (96, tokamax 0.0.17).
      grouped_gemm: `"ragged_dot"` is `jax.lax.ragged_dot`; `"tokamax"` is `tokamax.ragged_dot` with its Mosaic GPU
        kernel.
      reasons: why, one sentence per choice; not compared.

    >>> Plan(chunk_rows=256, grouped_gemm="ragged_dot").chunk_rows
    256
    """

    chunk_rows: int
    grouped_gemm: GroupedGemm = "ragged_dot"
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        rows = _integer(self.chunk_rows)
        if rows is None or rows < 1:
            raise ValueError(f"Plan: chunk_rows={self.chunk_rows!r} must be a positive integer, a number of rows.")
        if self.grouped_gemm not in GROUPED_GEMMS:
            raise ValueError(f"Plan: grouped_gemm={self.grouped_gemm!r} must be one of {GROUPED_GEMMS}.")
        object.__setattr__(self, "chunk_rows", _whole_tiles(rows) if self.grouped_gemm == "tokamax" else rows)


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """Choices of the `"megakernel"` implementation.

    Any legal values give the same bits, but for `segment_tiles`: the gradients of weights and biases are summed segment
    by segment, so another one rounds them otherwise.

    The rows of a rank's experts are cut into row tiles (256 rows on a GPU). Tiles of one expert form units, and with a
    lag of one unit the GEMMs come in the order `gate_up(u0) gate_up(u1) down(u0) gate_up(u2) down(u1) ...`. Rows and
    hidden values of a tile lie in rings until its down GEMM has read them.

    Args:
      unit_tiles: most row tiles of one expert that are worked on together, so that they share its weights; at least 1.
      lag_units: units by which the down GEMM of a unit comes later than its gate and up GEMM; at least 0. A lag keeps
        the pull of tokens apart from the push of results, which use the same links.
      ring_tiles: row tiles that the rings hold: memory grows with it. At least `(lag_units + 1) * unit_tiles`, or as
        many as a rank can have: with fewer, a pull would wait for a tile that waits for that pull. More than a rank can
        have are not allocated.
      chunk_rows: rows of a tile that one warp (on a CPU, one thread) pulls at a time, 1 to 32.
      keep_tokens: whether a rank keeps the tokens that it has pulled from peers. A token that several of its experts
        want then crosses the link once, or little more; it takes memory for all tokens of all peers.
      segment_tiles: 0 for a forward pass. Of a backward pass, most row tiles of one expert whose weight gradients are
        summed at once; what an expert with more of them has summed so far goes through memory in float32. The rows of
        a segment stay in the rings until then, so ring_tiles is at least `segment_tiles + 2 * lag_units * unit_tiles`.
      backward: plan of the backward pass, with segment_tiles; `None` for the default.
      reasons: why, one sentence per choice; not compared.

    >>> KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4).ring_tiles
    4
    """

    unit_tiles: int
    lag_units: int
    ring_tiles: int
    chunk_rows: int = 8
    keep_tokens: bool = False
    segment_tiles: int = 0
    backward: "KernelPlan | None" = None
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        # The product of the first two has to fit in int32; a lane of a warp for each row of a chunk.
        bounds = {
            "unit_tiles": (1, 2**15 - 1),
            "lag_units": (0, 2**15 - 1),
            "ring_tiles": (1, 2**31 - 1),
            "chunk_rows": (1, 32),
            "segment_tiles": (0, 2**15 - 1),
        }
        for name, (least, most) in bounds.items():
            value = _integer(given := getattr(self, name))
            if value is None or not least <= value <= most:
                raise ValueError(f"KernelPlan: {name}={given!r} must be an integer of {least} to {most}.")
            object.__setattr__(self, name, value)
        if not isinstance(self.keep_tokens, bool):
            raise ValueError(f"KernelPlan: keep_tokens={self.keep_tokens!r} must be True or False.")
        if self.backward is not None and not (isinstance(self.backward, KernelPlan) and self.backward.segment_tiles):
            raise ValueError(
                f"KernelPlan: backward={self.backward!r} must be a KernelPlan with segment_tiles, or None."
            )
        if self.backward is not None and self.segment_tiles:
            raise ValueError("KernelPlan: one with segment_tiles is for a backward pass and has no backward itself.")

    @property
    def fewest_ring_tiles(self) -> int:
        """Ring tiles without which the kernel would wait for ever, unless the ring holds all tiles of a rank."""
        if self.segment_tiles:
            return self.segment_tiles + 2 * self.lag_units * self.unit_tiles
        return (self.lag_units + 1) * self.unit_tiles


AnyPlan = Plan | KernelPlan


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Into what pieces the megakernel cuts its work on a platform, and among how many it deals them; not to be chosen.

    Args:
      tile_rows: rows of a row tile.
      hidden_columns: columns between the two GEMMs of one task.
      output_columns: output columns of one task.
      workers: pairs of thread blocks of a GPU, 0 for as many as it has room for; threads of a CPU, per rank.
      dispatchers_per_worker: warps of such a pair, or threads of a CPU, that pull rows.
    """

    tile_rows: int
    hidden_columns: int
    output_columns: int
    workers: int
    dispatchers_per_worker: int


def granularity(platform: str, gated: bool) -> Granularity:
    """Returns the pieces of a platform. Gate and up of a column share an accumulator: half the columns where gated."""
    if platform == "cpu":  # small, so that a test of a few rows has many tiles
        return Granularity(16, 32 if gated else 64, 64, workers=2, dispatchers_per_worker=1)
    # A worker is a pair of thread blocks, which share a tile of 2 x 128 rows and have 3 warps each for dispatch.
    return Granularity(256, 128 if gated else 256, 256, workers=0, dispatchers_per_worker=6)


def saved_row_tiles(shape: Shape, platform: str) -> int:
    """Returns the row tiles of a rank whose gate and up are kept from the forward to the backward pass.

    Where tokens choose experts so that a rank gets more, the backward pass computes those of the others again.
    """
    wanted = -(-int(shape.balanced_rows * ROWS_OVER_BALANCED) // granularity(platform, shape.gated).tile_rows)
    return min(wanted + shape.local_experts, most_row_tiles(shape, platform))


def most_row_tiles(shape: Shape, platform: str) -> int:
    """Returns the row tiles of a rank whose experts get every slot, each expert's last tile partly filled."""
    return shape.all_slots // granularity(platform, shape.gated).tile_rows + shape.local_experts


@overload
def default_plan(
    shape: Shape, platform: str, dtype: Any = ..., implementation: Literal["xla", "reference"] = ...
) -> Plan: ...
@overload
def default_plan(shape: Shape, platform: str, dtype: Any, implementation: Literal["megakernel"]) -> KernelPlan: ...
@overload
def default_plan(shape: Shape, platform: str, dtype: Any, implementation: str) -> AnyPlan: ...


def default_plan(shape: Shape, platform: str, dtype: Any = jnp.bfloat16, implementation: str = "xla") -> AnyPlan:
    """Returns the plan for a shape on a platform, with the reason of every choice.

    Args:
      shape: sizes of the call.
      platform: `"cpu"`, `"gpu"` (or `"cuda"`), ...
      dtype: of tokens and weights.
      implementation: that the plan is for: a `KernelPlan` for `"megakernel"`, a `Plan` for the others.

    >>> mixtral = Shape(tokens=8192, hidden=4096, intermediate=14336, num_experts=8, top_k=2, ranks=4)
    >>> default_plan(mixtral, "cpu").chunk_rows
    20480
    >>> default_plan(mixtral, "gpu", jnp.bfloat16, "megakernel").unit_tiles
    12
    """
    if implementation == "megakernel":
        return _kernel_plan(shape, platform)
    grouped_gemm, gemm_reason = _grouped_gemm(shape, platform, jnp.dtype(dtype))
    chunk_rows, rows_reason = _chunk_rows(shape, 0 if platform == "cpu" else WORST_CASE_ROWS, grouped_gemm)
    return Plan(chunk_rows, grouped_gemm, (rows_reason, gemm_reason))


def _integer(value: Any) -> int | None:
    """Returns an integer of any type as int; `None` for anything else, `True` included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _kernel_plan(shape: Shape, platform: str) -> KernelPlan:
    unit_tiles, unit_reason = _unit_tiles(shape, platform)
    lag_units, lag_reason = _lag_units(shape, platform, unit_tiles)
    beyond = max(RING_UNITS_BEYOND_LAG * unit_tiles, FEWEST_TILES_BEYOND_LAG)
    most, wanted = most_row_tiles(shape, platform), lag_units * unit_tiles + beyond
    ring_tiles = max(min(wanted, most), 1)
    ring_reason = f"ring_tiles={ring_tiles}: " + (
        "as many row tiles as a rank can have, so that none waits for room"
        if wanted >= most
        else f"the lag and {beyond} more, of {most} row tiles that a rank can have"
    )
    chunk_rows, chunk_reason = _chunk_of_a_pull(shape, platform)
    keep_tokens, keep_reason = _keep_tokens(shape, platform)
    reasons = (unit_reason, lag_reason, ring_reason, chunk_reason, keep_reason)
    backward = _backward_plan(shape, platform)
    return KernelPlan(unit_tiles, lag_units, ring_tiles, chunk_rows, keep_tokens, backward=backward, reasons=reasons)


def backward_plan(plan: KernelPlan, shape: Shape, platform: str) -> KernelPlan:
    """Returns the plan of the backward pass that goes with a plan of the forward pass."""
    return plan.backward or _backward_plan(shape, platform)


def _backward_plan(shape: Shape, platform: str) -> KernelPlan:
    segment_tiles, segment_reason = _segment_tiles(shape, platform)
    unit_tiles = min(_unit_tiles(shape, platform)[0], segment_tiles)
    lag_units, lag_reason = _lag_units(shape, platform, unit_tiles)
    beyond = max(2 * unit_tiles, 1 if platform == "cpu" else FEWEST_TILES_BEYOND_LAG)
    most, wanted = most_row_tiles(shape, platform), segment_tiles + 2 * lag_units * unit_tiles + beyond
    chunk_rows, chunk_reason = _chunk_of_a_pull(shape, platform)
    keep_tokens, keep_reason = _keep_tokens(shape, platform)
    ring_tiles = max(min(wanted, most), 1)
    return KernelPlan(
        unit_tiles,
        lag_units,
        ring_tiles,
        chunk_rows,
        keep_tokens,
        segment_tiles,
        reasons=(
            segment_reason,
            f"unit_tiles={unit_tiles}: as in the forward pass, within a segment",
            lag_reason,
            f"ring_tiles={ring_tiles}: a segment, two lags and {beyond} more, of {most} row tiles that a rank can have",
            chunk_reason,
            keep_reason,
        ),
    )


def _segment_tiles(shape: Shape, platform: str) -> tuple[int, str]:
    if platform == "cpu":
        return SEGMENT_TILES_ON_CPU, (
            f"segment_tiles={SEGMENT_TILES_ON_CPU}: few, so that tests have experts of several segments"
        )
    # Tokens and gradients of outputs; gate, up and h.
    columns = 2 * shape.hidden + (3 if shape.gated else 2) * shape.intermediate
    tile_bytes = granularity(platform, shape.gated).tile_rows * columns * shape.itemsize
    expected = _tiles_per_expert(shape, platform)
    whole_expert = expected + 1 if expected > 1 else 2
    room = max(SEGMENT_BYTES // tile_bytes, FEWEST_SEGMENT_TILES)
    if whole_expert <= room:
        return whole_expert, f"segment_tiles={whole_expert}: all rows of an expert, about {expected} tiles"
    return room, (
        f"segment_tiles={room}: tiles of {tile_bytes / 2**20:.3g} MiB, as many as take "
        f"{SEGMENT_BYTES // 2**20} MiB of the rings"
    )


def _chunk_of_a_pull(shape: Shape, platform: str) -> tuple[int, str]:
    if platform == "cpu":
        return CHUNK_ROWS_ON_CPU, f"chunk_rows={CHUNK_ROWS_ON_CPU}: a quarter of a row tile"
    pulled = shape.balanced_rows * shape.hidden * shape.itemsize
    if pulled <= LARGE_CHUNK_BYTES:
        return CHUNK_ROWS, f"chunk_rows={CHUNK_ROWS}: small pieces, so that the first tiles are there early"
    return LARGE_CHUNK_ROWS, (
        f"chunk_rows={LARGE_CHUNK_ROWS}: {pulled / 2**20:.0f} MiB of rows, next to which the start of a launch is short"
    )


def pulls_per_token(shape: Shape) -> tuple[float, float]:
    """Returns how often peers pull a token under uniform routing: once for each slot, and once for each rank.

    >>> pulls_per_token(Shape(tokens=1, hidden=1, intermediate=1, num_experts=128, top_k=8, ranks=4))
    (6.0, 2.7)
    """
    away = (shape.ranks - 1) / shape.ranks
    return shape.top_k * away, round((shape.ranks - 1) * (1 - away**shape.top_k), 3)


def _keep_tokens(shape: Shape, platform: str) -> tuple[bool, str]:
    if shape.ranks == 1:
        return False, "keep_tokens=False: one rank pulls nothing from peers"
    of_slots, of_ranks = pulls_per_token(shape)
    if of_ranks > (1 - KEEP_SAVES) * of_slots:
        return False, (
            f"keep_tokens=False: a token goes to peers for {of_slots:.3g} slots and to {of_ranks:.3g} of them; keeping "
            "it there would save little"
        )
    if platform != "cpu" and shape.balanced_rows < KEEP_FROM_ROWS:
        return False, f"keep_tokens=False: {shape.balanced_rows} rows, most of which are pulled at the same time"
    return True, f"keep_tokens=True: a token goes to peers for {of_slots:.3g} slots, but to {of_ranks:.3g} of them only"


def _tiles_per_expert(shape: Shape, platform: str) -> int:
    """Row tiles of an expert where all have equally many rows."""
    rows = -(-shape.balanced_rows // max(shape.local_experts, 1))
    return max(-(-rows // granularity(platform, shape.gated).tile_rows), 1)


def _unit_tiles(shape: Shape, platform: str) -> tuple[int, str]:
    if platform == "cpu":
        return UNIT_TILES_ON_CPU, (
            f"unit_tiles={UNIT_TILES_ON_CPU}: the fewest that share weights; on a CPU this implementation is for tests"
        )
    tile_bytes = granularity(platform, shape.gated).tile_rows * shape.hidden * shape.itemsize
    expected = _tiles_per_expert(shape, platform)
    whole_expert = expected + 1 if expected > 1 else 1  # one more than the average has
    in_cache = max(UNIT_BYTES // tile_bytes, FEWEST_UNIT_TILES)
    if whole_expert <= in_cache:
        return (
            whole_expert,
            f"unit_tiles={whole_expert}: all rows of an expert, about {expected} tiles, use its weights together",
        )
    return in_cache, (
        f"unit_tiles={in_cache}: tiles of {tile_bytes / 2**20:.2g} MiB of tokens, as many as fit in "
        f"{UNIT_BYTES // 2**20} MiB of L2 cache, {FEWEST_UNIT_TILES} at least"
    )


def _lag_units(shape: Shape, platform: str, unit_tiles: int) -> tuple[int, str]:
    """A down task that comes too early waits for gate and up tasks of its unit that other workers have just begun."""
    if platform == "cpu":
        return 1, "lag_units=1: the pull of rows stays a unit ahead of the push of results"
    pieces = granularity(platform, shape.gated)
    columns = -(-shape.intermediate // pieces.hidden_columns)
    rows = -(-shape.balanced_rows // max(shape.local_experts, 1))
    narrow = unit_tiles == 1 and rows <= pieces.tile_rows // 2
    tasks = -(-columns // 2) if narrow else min(unit_tiles, _tiles_per_expert(shape, platform)) * columns
    lag = min(max(-(-int(WORKERS_OF_A_GPU * LAG_WAVES) // tasks), 1), MOST_LAG_UNITS)
    return lag, (
        f"lag_units={lag}: units of about {tasks} gate and up tasks, so that the down tasks of a unit come "
        f"{LAG_WAVES} rounds of {WORKERS_OF_A_GPU} workers later, {MOST_LAG_UNITS} units at most"
    )


def has_tokamax() -> bool:
    """Whether tokamax can be imported, without importing it."""
    return importlib.util.find_spec("tokamax") is not None


def _whole_tiles(rows: int) -> int:
    return -(-rows // ROW_TILE) * ROW_TILE


def _chunk_rows(shape: Shape, worst_case_rows: int, grouped_gemm: GroupedGemm) -> tuple[int, str]:
    all_rows = max(shape.all_slots, 1)
    everything, of_tiles = all_rows, ""
    if grouped_gemm == "tokamax":
        everything, of_tiles = _whole_tiles(all_rows), f" in tiles of {ROW_TILE}"
    if shape.all_slots <= worst_case_rows:
        return everything, (
            f"chunk_rows={everything}: all slots of all ranks{of_tiles}, since they are at most {worst_case_rows}: "
            "always one pass"
        )
    rows = max(min(all_rows, _whole_tiles(int(shape.balanced_rows * ROWS_OVER_BALANCED))), 1)
    if rows >= all_rows:
        return everything, f"chunk_rows={everything}: all slots of all ranks{of_tiles}: always one pass"
    return rows, (
        f"chunk_rows={rows}: {ROWS_OVER_BALANCED} x the {shape.balanced_rows} rows of a balanced rank; "
        f"a busier rank takes up to {-(-all_rows // rows)} passes over the same memory"
    )


def _grouped_gemm(shape: Shape, platform: str, dtype: Any) -> tuple[GroupedGemm, str]:
    if platform not in ("gpu", "cuda"):
        return "ragged_dot", f"grouped_gemm='ragged_dot': jax.lax.ragged_dot runs on {platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return "ragged_dot", f"grouped_gemm='ragged_dot': tokamax's GPU kernel wants 16-bit inputs, these are {dtype}"
    if not has_tokamax():
        return "ragged_dot", (
            "grouped_gemm='ragged_dot': tokamax is not installed; XLA's GPU ragged_dot may multiply every row with "
            "every local expert, so `pip install jaxmoe[tokamax]` (Python >= 3.12) is many times faster"
        )
    if shape.hidden % TOKAMAX_MULTIPLE or shape.intermediate % TOKAMAX_MULTIPLE:
        return "ragged_dot", (
            f"grouped_gemm='ragged_dot': tokamax's GPU kernel wants widths that are multiples of {TOKAMAX_MULTIPLE}, "
            f"these are hidden {shape.hidden} and intermediate {shape.intermediate}"
        )
    return "tokamax", "grouped_gemm='tokamax': its GPU kernel skips the experts a row did not choose"
