"""The plan of the portable implementation: what may be chosen, and the default with the reason of every choice."""

import dataclasses
import importlib.util
from typing import Literal

import jax.numpy as jnp

from jaxmoe.e2m1 import ELEMENT
from jaxmoe.implementations.base import ROWS_OVER_BALANCED, Shape
from jaxmoe.integers import integer

GroupedGemm = Literal["ragged_dot", "tokamax"]
GROUPED_GEMMS: tuple[GroupedGemm, ...] = ("ragged_dot", "tokamax")

# Up to this many rows a rank with a GPU allocates the worst case: a few MB, and no loop that the host has to steer. On
# CPU there is no such loop to avoid, and a grouped GEMM takes time for every allocated row.
WORST_CASE_ROWS = 4096
# Of the rows of a batch: the row tile of the grouped GEMMs on every GPU that has one.
ROW_TILE = 128
# What a TMA copy of one row needs: 16 bytes of a 16-bit type.
TOKAMAX_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choices of the `"xla"` implementation.

    Args:
      batch_rows: rows that a rank's experts process in one batch. Memory grows with it; more rows than that (a rank
        whose experts are chosen more often than others) are computed in further batches, so that none is dropped.
      grouped_gemm: `"ragged_dot"` is `jax.lax.ragged_dot`; `"tokamax"` is `tokamax.ragged_dot` with its Mosaic GPU
        kernel. The gradients of the weights are sums of plain products either way (`outer_products.py`), and so are
        products with experts in 4 bits, which are decoded one at a time (`decoded_gemm.py`).
      reasons: why, one sentence per choice; not compared.

    >>> Plan(batch_rows=256, grouped_gemm="ragged_dot").batch_rows
    256
    """

    batch_rows: int
    grouped_gemm: GroupedGemm = "ragged_dot"
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        rows = integer(self.batch_rows)
        if rows is None or rows < 1:
            raise ValueError(f"Plan: batch_rows={self.batch_rows!r} must be a positive integer, a number of rows.")
        if self.grouped_gemm not in GROUPED_GEMMS:
            raise ValueError(f"Plan: grouped_gemm={self.grouped_gemm!r} must be one of {GROUPED_GEMMS}.")
        object.__setattr__(self, "batch_rows", rows)


def xla_plan(shape: Shape, platform: str) -> Plan:
    """Returns the plan for a shape on a platform."""
    grouped_gemm, gemm_reason = _grouped_gemm(shape, platform)
    batch_rows, rows_reason = _batch_rows(shape, 0 if platform == "cpu" else WORST_CASE_ROWS)
    return Plan(batch_rows, grouped_gemm, (rows_reason, gemm_reason))


def has_tokamax() -> bool:
    """Whether tokamax can be imported, without importing it."""
    return importlib.util.find_spec("tokamax") is not None


def _batch_rows(shape: Shape, worst_case_rows: int) -> tuple[int, str]:
    all_rows = max(shape.all_slots, 1)
    if shape.all_slots <= worst_case_rows:
        return all_rows, (
            f"batch_rows={all_rows}: all slots of all ranks, since they are at most {worst_case_rows}: always one batch"
        )
    roomy = int(shape.balanced_rows * ROWS_OVER_BALANCED)
    rows = max(min(all_rows, -(-roomy // ROW_TILE) * ROW_TILE), 1)
    if rows == all_rows:
        return all_rows, f"batch_rows={all_rows}: all slots of all ranks: always one batch"
    return rows, (
        f"batch_rows={rows}: {ROWS_OVER_BALANCED} x the {shape.balanced_rows} rows of a balanced rank; "
        f"a busier rank computes up to {-(-all_rows // rows)} batches over the same memory"
    )


def _grouped_gemm(shape: Shape, platform: str) -> tuple[GroupedGemm, str]:
    dtype = shape.formats.answers.dtype
    if shape.formats.weights.dtype == ELEMENT:
        return "ragged_dot", (
            "experts in 4 bits are decoded one at a time and multiplied by plain products with blocks of their rows, "
            "whatever grouped_gemm is"
        )
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
