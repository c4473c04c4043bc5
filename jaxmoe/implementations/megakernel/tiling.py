"""The pieces of the megakernel's work on each platform, and how many row tiles of them a rank can have."""

import dataclasses

from jaxmoe.implementations.base import ROWS_OVER_BALANCED, Shape


@dataclasses.dataclass(frozen=True)
class Granularity:
    """Into what pieces the megakernel cuts its work on a platform, and among how many it deals them; not to be chosen.

    Args:
      tile_rows: rows of a row tile.
      h_columns: columns between the two GEMMs of one task.
      columns: output columns of one task.
      workers: pairs of thread blocks of a GPU, 0 for as many as it has room for; threads of a CPU, per rank.
      dispatchers_per_worker: warps of such a pair, or threads of a CPU, that pull rows.
    """

    tile_rows: int
    h_columns: int
    columns: int
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


def rows_per_expert(shape: Shape) -> int:
    """Returns the rows of an expert where all have equally many."""
    return -(-shape.balanced_rows // max(shape.local_experts, 1))


def tiles_per_expert(shape: Shape, platform: str) -> int:
    """Returns the row tiles of an expert where all have equally many rows."""
    return max(-(-rows_per_expert(shape) // granularity(platform, shape.gated).tile_rows), 1)
