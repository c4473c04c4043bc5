"""What holds of every timeline, from a CPU or a GPU: against the schedule, the same work, each item recorded once."""

from collections import Counter

import numpy as np

import jaxmoe.native as native
from jaxmoe.implementations.megakernel.plan_defaults import CHUNK_ROWS, CHUNK_ROWS_ON_CPU
from jaxmoe.profiling.timeline import Timeline, role_number

# Of every GEMM, the wait in front of its products, which themselves have its name.
WAITS = {
    "gate_up": "wait_rows",
    "down": "wait_h",
    "h_gradient": "wait_h",
    "token_gradient": "wait_gradients",
    "gate_gradient": "wait_gradients",
    "up_gradient": "wait_gradients",
    "down_gradient": "wait_gradients",
}


def rows_per_expert(ids: np.ndarray, num_experts: int, ranks: int, rank: int) -> list[int]:
    """Rows of each expert of a rank, for the ids of all ranks."""
    counts = np.bincount(ids[ids >= 0], minlength=num_experts)
    return counts.reshape(ranks, -1)[rank].tolist()


def schedule_of(platform: str, workers: int, segment_tiles: int = 0):
    """A schedule with the tiles of a platform and the chunks of a small layer, or of its gradients.

    What it contains does not depend on units, rings or workers.
    """
    steps = native.schedule()
    pieces = steps.granularity(platform, True)
    dispatchers = workers * pieces.dispatchers_per_worker
    chunk_rows = CHUNK_ROWS_ON_CPU if platform == "cpu" else CHUNK_ROWS
    narrow_rows = pieces.tile.rows // 2
    return steps.Schedule(
        pieces.tile, 1, 0, 1, workers, chunk_rows, dispatchers, narrow_rows, keep_tokens=0, segment_tiles=segment_tiles
    )


def filled_up(schedule, rows: list[int]) -> list[int]:
    """Rows of each expert with those of zeros that a backward pass adds."""
    return [-(-count // schedule.row_multiple) * schedule.row_multiple for count in rows]


def all_tasks(shape, schedule, rows: list[int]) -> list:
    return [t for worker in range(schedule.workers) for t in native.schedule().tasks(shape, schedule, rows, worker)]


def all_chunks(shape, schedule, rows: list[int]) -> list:
    steps = native.schedule()
    return [c for d in range(schedule.dispatchers) for c in steps.chunks(shape, schedule, rows, dispatcher=d)]


def subjects(timeline: Timeline, *kinds: str) -> Counter:
    return Counter(map(tuple, timeline.of(*kinds)[["expert", "row_tile", "part"]].tolist()))


def check_times(timeline: Timeline) -> None:
    """Events end after they begin, within the launch, and those of a lane follow each other."""
    events, slack = timeline.events, 2.0  # nanoseconds
    assert timeline.dropped == 0
    assert len(events) > 0
    assert (events["begin"] <= events["end"]).all()
    assert events["begin"].min() >= -slack
    assert events["end"].max() <= timeline.length + slack
    assert (events["stalled"] <= events["end"] - events["begin"] + slack).all()
    lanes = np.stack([events[name].astype(np.int64) for name in ("block", "role", "nth")], axis=-1)
    same_lane = (lanes[1:] == lanes[:-1]).all(axis=-1)
    assert (events["begin"][1:] >= events["end"][:-1] - slack)[same_lane].all()


def check_dispatch(timeline: Timeline, shape, schedule, rows: list[int]) -> None:
    chunks = all_chunks(shape, schedule, rows)
    assert subjects(timeline, "dispatch") == Counter((c.expert, c.row_tile, c.tile_row) for c in chunks)


def check_ends(timeline: Timeline, blocks: int, combining_lanes: int, early_sums: bool = False) -> None:
    """Every block goes through the begin and the end of a launch once; with early sums it adds up as answers come, and
    what is left when all is answered is that of math warps."""
    for kind in ("copy_inputs", "sort", "publish"):
        assert sorted(timeline.of(kind)["block"].tolist()) == list(range(blocks)), kind
    combine, waits = (
        Counter(map(tuple, timeline.of(kind)[["block", "role", "nth"]].tolist()))
        for kind in ("combine", "wait_answers")
    )
    of_math = {lane: count for lane, count in combine.items() if lane[1] == role_number("math")}
    assert len(of_math) == blocks * combining_lanes
    assert waits == combine
    if not early_sums:
        assert combine == of_math
        assert set(of_math.values()) == {1}
    assert len(timeline.of("wait_tasks")) == 1  # the thread that announces the end of the rank
    assert timeline.of("combine")["begin"].min() >= timeline.of("wait_inputs")["end"].min()
