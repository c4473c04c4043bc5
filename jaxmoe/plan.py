"""How a layer of one shape is computed: everything that may be swept without changing the result beyond rounding.

There is one kind of plan for each implementation that has choices: `Plan` for `"xla"`, `KernelPlan` for `"megakernel"`.
`plan_defaults.py` chooses where the user passes none; the implementations read it, `explain` prints it.
"""

import dataclasses
import operator
from typing import Any, Literal

GroupedGemm = Literal["ragged_dot", "tokamax"]
GROUPED_GEMMS: tuple[GroupedGemm, ...] = ("ragged_dot", "tokamax")

# Rows of one pass over the balanced number. Beyond it comes another pass; below it rows are allocated and not used. The
# same of the rows that the megakernel saves for its backward pass.
ROWS_OVER_BALANCED = 1.25


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
        whose experts are chosen more often than others) take further passes, so that none is dropped.
      grouped_gemm: `"ragged_dot"` is `jax.lax.ragged_dot`; `"tokamax"` is `tokamax.ragged_dot` with its Mosaic GPU
        kernel. The gradients of the weights are sums of plain products either way (`outer_products.py`).
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
        object.__setattr__(self, "chunk_rows", rows)


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


def _integer(value: Any) -> int | None:
    """Returns an integer of any type as int; `None` for anything else, `True` included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
