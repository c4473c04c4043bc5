"""The choices of the megakernel's default plans: forward, kept, and backward with its segments.

`layer.py` and the benchmark also ask for the backward plan that goes with a plan, and `layer.py` for the plan of a
forward pass that is kept.
"""

import dataclasses
import math
from typing import NamedTuple

from jaxmoe.implementations.base import Shape
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.megakernel.schedule import (
    decodes_ahead,
    decodes_in_registers,
    most_experts_ahead,
    most_row_tiles,
    rows_per_expert,
    tile_sizes,
    tiles_per_expert,
)

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
# The same of weights in 4 bits beside rows in 8, few to an expert: there a worker knows its next task at once, so that
# it has two in hand, and units are short (ffi/common/scheduler.h, take_of_narrow()). And how many rounds of all tasks
# the ring has room for beyond the lag. Measured for qwen3-30b-a3b alone (docs/performance.md).
MOST_LAG_UNITS_IN_HAND = 24
RING_WAVES_IN_HAND = 4.2
# Rows that a warp pulls at a time. Few, where the start counts: all warps pull at once, and the first tile is there
# when all its chunks are. Fewer still, where a decode batch has hardly more rows than there are warps; more, where a
# rank pulls more bytes than this. Where weights are decoded in registers one of a block's three warps releases signals
# instead (ffi/cuda/kernel/gemm/releaser.cuh).
PULLING_WARPS, PULLING_WARPS_BESIDE_A_RELEASER = 3 * 132, 2 * 132
CHUNK_ROWS, LARGE_CHUNK_ROWS = 4, 8
LARGE_CHUNK_BYTES = 512 * 2**20
CHUNK_ROWS_ON_CPU = 4
# A peer's tokens are kept where keeping them saves that share of the rows pulled from peers, and a rank has so many
# rows: those of a decode batch are pulled all at once, before any could be kept. The share lies between what is saved
# with 8 of 128 experts on 8 ranks (33 %), which are kept, and with 4 of 128 on 4 ranks (31 %), which are not.
KEEP_SAVES = 0.32
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
# Of decoded weights: experts beyond those that tasks may wait for, which are decoded meanwhile, and the bytes of all
# slots, at most, where a lag of one unit allows it. With one alone gpt-oss-120b took 13 % longer, and more gained
# nothing (docs/performance.md).
SLOTS_BEYOND_LAG = 2
# Weights in 4 bits are decoded where they are multiplied where experts have no more rows than this. Beside rows in 16
# bits that is the faster way with 512, with 1024 no longer; beside rows in 8 bits, whose products are added up outside
# of the tensor cores, with 256, with 512 no longer (docs/performance.md).
IN_REGISTERS_TO_ROWS = 512
IN_REGISTERS_TO_ROWS_IN_8_BITS = 256
DECODED_BYTES = 1024 * 2**20


class Lag(NamedTuple):
    """A lag, and why."""

    units: int
    reason: str


class Slots(NamedTuple):
    """How many of decoded weights, the lag that they allow, and why; no reasons where nothing is decoded."""

    number: int
    lag: Lag
    reasons: tuple[str, ...]


def kernel_plan(shape: Shape, platform: str) -> KernelPlan:
    """Returns the plan of the forward pass, and with it that of the backward pass."""
    unit_tiles, unit_reason = _unit_tiles(shape, platform)
    weight_slots, lag, slot_reasons = _forward_slots(shape, platform, _lag(shape, platform, unit_tiles))
    share_columns, share_reasons = _share_columns(shape, platform, unit_tiles, weight_slots)
    if platform != "cpu" and unit_tiles == 1 and not weight_slots:
        lag = _fill_last_round(shape, platform, lag.units, share_columns) or lag
    beyond = max(RING_UNITS_BEYOND_LAG * unit_tiles, FEWEST_TILES_BEYOND_LAG)
    if _has_two_in_hand(shape, platform, unit_tiles):
        beyond = max(beyond, math.ceil(RING_WAVES_IN_HAND * WORKERS_OF_A_GPU / _narrow_tasks(shape, platform)))
    wanted = lag.units * unit_tiles + beyond
    ring_tiles, ring_reason = _ring_tiles(shape, platform, wanted, f"the lag and {beyond} more")
    in_registers = shape.formats.decodes and not weight_slots
    chunk_rows, chunk_reason = _chunk_of_a_pull(
        shape, platform, PULLING_WARPS_BESIDE_A_RELEASER if in_registers else PULLING_WARPS
    )
    keep_tokens, keep_reason = _keep_tokens(shape, platform)
    reasons = (unit_reason, lag.reason, ring_reason, chunk_reason, keep_reason, *slot_reasons, *share_reasons)
    return KernelPlan(
        unit_tiles,
        lag.units,
        ring_tiles,
        chunk_rows,
        keep_tokens,
        weight_slots=weight_slots,
        share_columns=share_columns,
        reasons=reasons,
    )


def kept_plan(plan: KernelPlan, shape: Shape, platform: str) -> KernelPlan:
    """Returns the plan of a forward pass that is kept for its backward pass; its reasons are those of the difference.

    It cannot decode weights in registers. Where one that keeps nothing does, it has slots for them, and a lag that
    these allow.

    Args:
      plan: of a forward pass that keeps nothing.
      shape: of the forward pass.
      platform: it is compiled for.
    """
    if plan.weight_slots or not decodes_in_registers(shape, platform):
        return dataclasses.replace(plan, reasons=())
    weight_slots, lag, reasons = _weight_slots(shape, Lag(plan.lag_units, ""), lags=1)
    reasons = (lag.reason, *reasons) if lag.reason else reasons
    return dataclasses.replace(plan, lag_units=lag.units, weight_slots=weight_slots, reasons=reasons)


def backward_plan(plan: KernelPlan, shape: Shape, platform: str) -> KernelPlan:
    """Returns the plan of the backward pass that goes with a plan of the forward pass.

    Args:
      plan: of the forward pass.
      shape: of the backward pass, whose rows have no 8 bits.
      platform: it is compiled for.
    """
    return plan.backward or _backward_plan(shape, platform)


def _forward_slots(shape: Shape, platform: str, lag: Lag) -> Slots:
    rows = rows_per_expert(shape)
    if shape.formats.decodes and shape.formats.tokens.scale_rows and not decodes_ahead(shape, platform):
        return Slots(0, lag, (_why_in_registers(shape, platform),))
    most = IN_REGISTERS_TO_ROWS_IN_8_BITS if shape.formats.tokens.scale_rows else IN_REGISTERS_TO_ROWS
    if decodes_in_registers(shape, platform) and rows <= most:
        text = f"weight_slots=0: an expert has {rows} rows, so weights are decoded in the registers that multiply them"
        return Slots(0, lag, (text,))
    return _weight_slots(shape, lag, lags=1)


def _why_in_registers(shape: Shape, platform: str) -> str:
    """Of weights beside rows in 8 bits."""
    text = "weight_slots=0: beside rows in 8 bits weights are decoded in the registers that multiply"
    rows, most = rows_per_expert(shape), most_experts_ahead(shape, platform)
    if rows <= IN_REGISTERS_TO_ROWS_IN_8_BITS:
        return text
    if shape.formats.weights.through_e4m3:
        return f"{text}, since a GPU that decodes them ahead has room for {most} experts"
    return f"{text}; with {rows} rows of an expert it is faster to decode them ahead, which jaxmoe.through_e4m3 allows"


def _weight_slots(shape: Shape, lag: Lag, lags: int) -> Slots:
    """Returns the slots of decoded weights.

    Args:
      shape: of the pass.
      lag: wanted.
      lags: between the first GEMM of a unit and its last one.
    """
    if not shape.formats.decodes:
        return Slots(0, lag, ())
    of_each = shape.multiplied.expert_bytes
    room = max(DECODED_BYTES // of_each, lags + 1 + SLOTS_BEYOND_LAG)
    most = max((room - 1 - SLOTS_BEYOND_LAG) // lags, 1)
    if lag.units > most:
        lag = Lag(
            most,
            f"lag_units={most}: {lag.units} but for decoded weights, whose slots may take {DECODED_BYTES // 2**20} MiB "
            "or what a lag of one unit needs",
        )
    slots = min(lags * lag.units + 1 + SLOTS_BEYOND_LAG, shape.local_experts)
    text = f"weight_slots={slots}: decoded weights of {of_each / 2**20:.3g} MiB an expert, for the units between its "
    text += f"first GEMM and its last, and {SLOTS_BEYOND_LAG} to decode meanwhile"
    return Slots(slots, lag, (text,))


def _ring_tiles(shape: Shape, platform: str, wanted: int, what: str) -> tuple[int, str]:
    most = most_row_tiles(shape, platform)
    ring_tiles = max(min(wanted, most), 1)
    if wanted >= most:
        return ring_tiles, f"ring_tiles={ring_tiles}: as many row tiles as a rank can have, so that none waits for room"
    return ring_tiles, f"ring_tiles={ring_tiles}: {what}, of {most} row tiles that a rank can have"


def _backward_plan(shape: Shape, platform: str) -> KernelPlan:
    segment_tiles, segment_reason = _segment_tiles(shape, platform)
    unit_tiles = min(_unit_tiles(shape, platform)[0], segment_tiles)
    weight_slots, lag, slot_reasons = _weight_slots(shape, _lag(shape, platform, unit_tiles), lags=2)
    beyond = max(2 * unit_tiles, 1 if platform == "cpu" else FEWEST_TILES_BEYOND_LAG)
    wanted = segment_tiles + 2 * lag.units * unit_tiles + beyond
    ring_tiles, ring_reason = _ring_tiles(shape, platform, wanted, f"a segment, two lags and {beyond} more")
    chunk_rows, chunk_reason = _chunk_of_a_pull(shape, platform, PULLING_WARPS)
    keep_tokens, keep_reason = _keep_tokens(shape, platform)
    return KernelPlan(
        unit_tiles,
        lag.units,
        ring_tiles,
        chunk_rows,
        keep_tokens,
        segment_tiles,
        weight_slots,
        reasons=(
            segment_reason,
            f"unit_tiles={unit_tiles}: as in the forward pass, within a segment",
            lag.reason,
            ring_reason,
            chunk_reason,
            keep_reason,
            *slot_reasons,
        ),
    )


def _segment_tiles(shape: Shape, platform: str) -> tuple[int, str]:
    if platform == "cpu":
        return SEGMENT_TILES_ON_CPU, (
            f"segment_tiles={SEGMENT_TILES_ON_CPU}: few, so that tests have experts of several segments"
        )
    # Tokens and gradients of outputs; gate, up and h.
    row_bytes = 2 * shape.token_bytes + (shape.projections + 1) * shape.h_bytes
    tile_bytes = tile_sizes(shape, platform).rows * row_bytes
    expected = tiles_per_expert(shape, platform)
    whole_expert = expected + 1 if expected > 1 else 2
    room = max(SEGMENT_BYTES // tile_bytes, FEWEST_SEGMENT_TILES)
    if whole_expert <= room:
        return whole_expert, f"segment_tiles={whole_expert}: all rows of an expert, about {expected} tiles"
    return room, (
        f"segment_tiles={room}: tiles of {tile_bytes / 2**20:.3g} MiB, as many as take "
        f"{SEGMENT_BYTES // 2**20} MiB of the rings"
    )


def _chunk_of_a_pull(shape: Shape, platform: str, warps: int) -> tuple[int, str]:
    if platform == "cpu":
        return CHUNK_ROWS_ON_CPU, f"chunk_rows={CHUNK_ROWS_ON_CPU}: a quarter of a row tile"
    for rows in range(1, CHUNK_ROWS):
        if shape.balanced_rows <= rows * warps:
            of_rows = f"{shape.balanced_rows} rows"
            return rows, f"chunk_rows={rows}: {of_rows}, so that none of {warps} warps pulls twice"
    pulled = shape.balanced_rows * shape.token_bytes
    if pulled <= LARGE_CHUNK_BYTES:
        return CHUNK_ROWS, f"chunk_rows={CHUNK_ROWS}: small pieces, so that the first tiles are there early"
    return LARGE_CHUNK_ROWS, (
        f"chunk_rows={LARGE_CHUNK_ROWS}: {pulled / 2**20:.0f} MiB of rows, next to which the start of a launch is short"
    )


def pulls_per_token(shape: Shape) -> tuple[float, float]:
    """Returns how often peers pull a token under uniform routing: once for each slot, and once for each rank.

    All sets of `top_k` experts are as likely. Where only some slots name an expert of the group, it is taken for that
    share of all experts.

    >>> pulls_per_token(Shape(tokens=1, hidden=1, intermediate=1, num_experts=128, top_k=8, ranks=4))
    (6.0, 2.721758)
    """
    if not shape.used_slots:
        return 0.0, 0.0
    all_experts = shape.num_experts / shape.used_slots
    others = all_experts - shape.local_experts
    # Of one rank: each expert is drawn from those that are left.
    enough = others > shape.top_k - 1
    none = math.prod((others - n) / (all_experts - n) for n in range(shape.top_k)) if enough else 0.0
    peers = shape.ranks - 1
    return shape.top_k * shape.used_slots * peers / shape.ranks, round(peers * (1 - none), 6)


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


def _share_columns(shape: Shape, platform: str, unit_tiles: int, weight_slots: int) -> tuple[bool, tuple[str, ...]]:
    """Returns whether blocks share the columns of narrow down tasks, and why, where they do."""
    if platform == "cpu" or weight_slots or not _is_narrow(shape, platform, unit_tiles):
        return False, ()
    tasks = shape.local_experts * _narrow_down_tasks(shape, platform)
    if 2 * tasks > WORKERS_OF_A_GPU:
        return False, ()
    return True, (
        f"share_columns=True: {tasks} down tasks of two column tiles each would leave half of {WORKERS_OF_A_GPU} "
        "workers without one",
    )


def _fill_last_round(shape: Shape, platform: str, lag_units: int, share_columns: bool) -> Lag | None:
    """Returns a longer lag of units of one tile, and why; nothing where `lag_units` is long enough.

    The down tasks of the last experts, one more than the lag, come behind the last gate and up task, where workers that
    get none are done. So where down tasks are the longer ones these experts are as many as whole rounds of workers can
    take: up to 5 % of mixtral-8x7b on one GPU (docs/performance/forward.md). Larger units keep their lag: after a
    longer one h has left the L2 cache.

    Args:
      shape: of the pass.
      platform: a GPU.
      lag_units: with which down tasks do not wait for their h.
      share_columns: of the plan.
    """
    length = shape.intermediate  # of a down task; shape.hidden for a gate and up task of as many columns
    if share_columns or not _is_narrow(shape, platform, unit_tiles=1):
        tasks = -(-shape.hidden // tile_sizes(shape, platform).columns)  # of an expert
    else:
        tasks = _narrow_down_tasks(shape, platform)
    if share_columns:
        length /= 2
    last = min(lag_units + 1, shape.local_experts)
    rounds = -(-last * tasks // WORKERS_OF_A_GPU)
    filled = min(rounds * WORKERS_OF_A_GPU // tasks, shape.local_experts)
    if length <= shape.hidden or not last < filled <= MOST_LAG_UNITS:
        return None
    return Lag(
        filled - 1,
        f"lag_units={filled - 1}: {filled * tasks} down tasks of {filled} experts come last, as many as {rounds} x "
        f"{WORKERS_OF_A_GPU} workers can take at once",
    )


def _is_narrow(shape: Shape, platform: str, unit_tiles: int) -> bool:
    """Whether experts have so few rows, where all have equally many, that blocks take columns instead of rows."""
    return unit_tiles == 1 and rows_per_expert(shape) <= tile_sizes(shape, platform).rows // 2


def _has_two_in_hand(shape: Shape, platform: str, unit_tiles: int) -> bool:
    """Whether tasks follow from their numbers, as in the kernel for weights in 4 bits beside rows in 8."""
    if platform == "cpu" or not shape.formats.tokens.scale_rows:
        return False
    return decodes_in_registers(shape, platform) and _is_narrow(shape, platform, unit_tiles)


def _narrow_tasks(shape: Shape, platform: str) -> int:
    """Tasks of an expert with one narrow tile, two column tiles each."""
    tile = tile_sizes(shape, platform)
    return -(-shape.intermediate // (2 * tile.h_columns)) + _narrow_down_tasks(shape, platform)


def _narrow_down_tasks(shape: Shape, platform: str) -> int:
    """Those of the down GEMM, where blocks do not share columns."""
    return -(-shape.hidden // (2 * tile_sizes(shape, platform).columns))


def _unit_tiles(shape: Shape, platform: str) -> tuple[int, str]:
    if platform == "cpu":
        return UNIT_TILES_ON_CPU, (
            f"unit_tiles={UNIT_TILES_ON_CPU}: the fewest that share weights; on a CPU this implementation is for tests"
        )
    tile_bytes = tile_sizes(shape, platform).rows * shape.token_bytes
    expected = tiles_per_expert(shape, platform)
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


def _lag(shape: Shape, platform: str, unit_tiles: int) -> Lag:
    """A down task that comes too early waits for gate and up tasks of its unit that other workers have just begun."""
    if platform == "cpu":
        return Lag(1, "lag_units=1: the pull of rows stays a unit ahead of the push of results")
    tile = tile_sizes(shape, platform)
    columns = -(-shape.intermediate // tile.h_columns)
    narrow = _is_narrow(shape, platform, unit_tiles)
    tasks = -(-columns // 2) if narrow else min(unit_tiles, tiles_per_expert(shape, platform)) * columns
    most = MOST_LAG_UNITS_IN_HAND if _has_two_in_hand(shape, platform, unit_tiles) else MOST_LAG_UNITS
    units = min(max(-(-int(WORKERS_OF_A_GPU * LAG_WAVES) // tasks), 1), most)
    return Lag(
        units,
        f"lag_units={units}: units of about {tasks} gate and up tasks, so that the down tasks of a unit come "
        f"{LAG_WAVES} rounds of {WORKERS_OF_A_GPU} workers later, {most} units at most",
    )
