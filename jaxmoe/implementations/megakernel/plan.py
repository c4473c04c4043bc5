"""The plan of the megakernel: what may be chosen. `plan_defaults.py` chooses where the user does not."""

import dataclasses

from jaxmoe.integers import integer


@dataclasses.dataclass(frozen=True)
class KernelPlan:
    """Choices of the `"megakernel"` implementation.

    Any legal values give the same bits, but for three: `segment_tiles`, since the gradients of weights and biases are
    summed segment by segment, so another one rounds them otherwise; `weight_slots` being 0 or not, since weights
    that are decoded in registers are multiplied in another order; and `sum_at_experts`, where a token's answers are
    added up rank by rank, each sum rounded to the dtype of x.

    The rows of a rank's experts are cut into row tiles (256 rows on a GPU). Tiles of one expert form units, and with a
    lag of one unit the GEMMs come in the order `gate_up(u0) gate_up(u1) down(u0) gate_up(u2) down(u1) ...`. Rows and
    hidden values of a tile lie in rings until its down GEMM has read them.

    Args:
      unit_tiles: most row tiles of one expert that are worked on together, so that they share its weights; at least 1.
      lag_units: units by which the down GEMM of a unit comes later than its gate and up GEMM; at least 0. A lag keeps
        the pull of tokens apart from the push of results, which use the same links; and the down tasks of so many units
        and one more come last, when workers without one have nothing else to do.
      ring_tiles: row tiles that the rings hold: memory grows with it. At least `(lag_units + 1) * unit_tiles`, or as
        many as a rank can have: with fewer, a pull would wait for a tile that waits for that pull. More than a rank can
        have are not allocated.
      chunk_rows: rows of a tile that one warp (on a CPU, one thread) pulls at a time, 1 to 32.
      keep_tokens: whether a rank keeps the tokens that it has pulled from peers. A token that several of its experts
        want then crosses the link once, or little more; it takes memory for all tokens of all peers.
      segment_tiles: 0 for a forward pass. Of a backward pass, most row tiles of one expert whose weight gradients are
        summed at once; what an expert with more of them has summed so far goes through memory in float32. The rows of
        a segment stay in the rings until then, so ring_tiles is at least `segment_tiles + 2 * lag_units * unit_tiles`.
      weight_slots: experts whose weights a rank holds decoded at a time, where they have fewer bits than they are
        multiplied in (`precision="w8a16"` and `"w4a16"`, the backward pass beside experts in 8 or 4 bits, and beside
        tokens in 8 bits experts of `jaxmoe.through_e4m3`); unused elsewhere. At least `lag_units + 1`, in a backward
        pass `2 * lag_units + 1`, or as many as a rank has. 0: none. Weights in 4 bits are then decoded by the warps
        that multiply them, in registers, which is faster where experts have few rows; what cannot do that (other
        formats, a backward pass, NVFP4 beside tokens in 8 bits, on GPUs float16) takes the fewest. Nor can a forward
        pass that is kept for its backward pass: it takes as many as a default plan would, and a shorter lag where they
        would take more than 1 GiB.
      share_columns: whether, in a forward pass, the two thread blocks that work together share the columns of an answer
        where an expert has at most half a row tile, instead of taking two column tiles: twice as many down tasks, for
        when half of the pairs would have none. Nothing changes beside weights that are decoded, nor on a CPU.
      sum_at_experts: whether, in a forward pass, a rank adds up the answers of its own experts to a token and sends the
        token's owner that sum, instead of an answer for each expert: fewer bytes cross the links where a token has
        several experts on a rank, 2.7 rows instead of 6 with 8 experts of 4 ranks. It takes memory for 1.25 x the rows
        of a balanced rank and for a row of each token of each rank; answers beyond travel each on its own. Without
        peers nothing changes. It is meant for slow links: between two GPUs with NVLink it was slower
        (`docs/performance.md`). On GPUs for layers in 16 bits, and for tokens in 8 bits with x in bfloat16 and promoted
        sums; `ranks + top_k` is 32 at most.
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
    weight_slots: int = 0
    share_columns: bool = False
    sum_at_experts: bool = False
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
            "weight_slots": (0, 2**15 - 1),
        }
        for name, (least, most) in bounds.items():
            value = integer(given := getattr(self, name))
            if value is None or not least <= value <= most:
                raise ValueError(f"KernelPlan: {name}={given!r} must be an integer of {least} to {most}.")
            object.__setattr__(self, name, value)
        for name in ("keep_tokens", "share_columns", "sum_at_experts"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"KernelPlan: {name}={value!r} must be True or False.")
        if self.backward is not None and not (isinstance(self.backward, KernelPlan) and self.backward.segment_tiles):
            raise ValueError(
                f"KernelPlan: backward={self.backward!r} must be a KernelPlan with segment_tiles, or None."
            )
        if self.backward is not None and self.segment_tiles:
            raise ValueError("KernelPlan: one with segment_tiles is for a backward pass and has no backward itself.")
        for name, effect in (("share_columns", "shares none"), ("sum_at_experts", "makes no such sums")):
            if getattr(self, name) and self.segment_tiles:
                raise ValueError(
                    f"KernelPlan: {name}=True is for a forward pass; one with segment_tiles is for a backward pass "
                    f"and {effect}. Leave it out."
                )

    @property
    def fewest_weight_slots(self) -> int:
        """Slots of decoded weights without which the kernel would wait for ever, unless each expert has one."""
        return (2 if self.segment_tiles else 1) * self.lag_units + 1

    @property
    def fewest_ring_tiles(self) -> int:
        """Ring tiles without which the kernel would wait for ever, unless the ring holds all tiles of a rank."""
        if self.segment_tiles:
            return self.segment_tiles + 2 * self.lag_units * self.unit_tiles
        return (self.lag_units + 1) * self.unit_tiles
