"""What every role of the megakernel did when, as arrays, as a file of them and as a trace that opens in Perfetto.

    timelines = record(lambda: layer(x))           # one per rank of this process
    write_perfetto(timelines, "trace.json.gz")     # https://ui.perfetto.dev

A lane is a place where one thing happens at a time: a warp of dispatch, a math warpgroup. Its events follow each other;
`ffi/common/timeline.h` lists their kinds. On GPUs the kernels have to be built for it (`JAXMOE_TIMELINE=on`); on CPUs
the threads of the host executor are recorded, with the same kinds.
"""

import dataclasses
import functools
import gzip
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.profiling import recording

# Times in nanoseconds from the begin of the launch. `stalled`: of the event, spent waiting for stages of shared memory.
# `row_tile`: over all local experts; of a weight gradient the first one of its segment, alike for all rows of the
# matrix. `part`: of the row tile, the column tile of a GEMM or the first row of a chunk of dispatch. -1 where a number
# means nothing.
EVENT = np.dtype(
    [
        ("block", np.int32),
        ("role", np.int8),
        ("nth", np.int8),
        ("kind", np.int8),
        ("expert", np.int16),
        ("row_tile", np.int32),
        ("part", np.int32),
        ("begin", np.float64),
        ("end", np.float64),
        ("stalled", np.float32),
    ]
)
MOST_LANES_OF_ROLE = 64


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One launch of one rank.

    Args:
      rank: in its group.
      ranks: of the group.
      platform: `"gpu"` or `"cpu"`.
      pass_name: `"forward"` or `"backward"`.
      events: array of `EVENT`, sorted by lane and time; no two of a lane overlap.
      length: nanoseconds from the begin of the first thread block to the end of the last.
      sms: multiprocessor of each thread block; number of the worker on a CPU.
      clock_ghz: mean frequency of each multiprocessor's clock during the launch; 1 on a CPU.
      dropped: events for which there was no room, which are missing; 0 but for very long launches.
      start: when the launch began, on a clock that all ranks of the trace share, see `align`.
    """

    rank: int
    ranks: int
    platform: str
    pass_name: str
    events: np.ndarray
    length: float
    sms: np.ndarray
    clock_ghz: np.ndarray
    dropped: int
    start: float = 0.0

    def of(self, *kinds: str) -> np.ndarray:
        """Returns the events of these kinds."""
        return self.events[np.isin(self.events["kind"], [kind_number(kind) for kind in kinds])]


@functools.cache
def kinds() -> tuple[str, ...]:
    """Returns the names of event kinds by number.

    >>> "dispatch" in kinds()
    True
    """
    return tuple(name for name, _ in recording.event_kinds())


@functools.cache
def waits() -> frozenset[str]:
    """Returns the kinds of events that are waits for someone else.

    >>> "wait_rows" in waits()
    True
    """
    return frozenset(name for name, is_wait in recording.event_kinds() if is_wait)


@functools.cache
def kind_number(kind: str) -> int:
    """Returns the number of an event kind."""
    return kinds().index(kind)


@functools.cache
def role_number(role: str) -> int:
    """Returns the number of a role."""
    return recording.roles().index(role)


def record(call: Callable[[], Any], platform: str | None = None, pass_name: str | None = None) -> list[Timeline]:
    """Runs a function and returns the last launch of every rank of this process that it started.

    Args:
      call: calls a layer with `implementation="megakernel"`, at least once.
      platform: of the devices it runs on; `None` for JAX's default.
      pass_name: `"forward"` or `"backward"`, of which the last launches have to be; `None` where either will do.

    Returns:
      Timelines by rank, aligned.

    Raises:
      NotImplementedError: the kernels of this build record nothing.
      RuntimeError: nothing was recorded, it is of another pass, or a launch has failed.
    """
    platform = platform or jax.default_backend()
    recording.switch(platform, True)
    try:
        before = {_launch(raw) for raw in recording.launches(platform)}
        jax.block_until_ready(call())
        launches = [raw for raw in recording.launches(platform) if _launch(raw) not in before]
    finally:
        recording.switch(platform, False)
    if not launches:
        raise RuntimeError(
            "record: no layer ran with implementation='megakernel' in the function to record, or on a GPU one that "
            "decodes experts ahead of their rows; nothing else is recorded."
        )
    timelines = sorted((decode(raw, platform) for raw in launches), key=lambda timeline: timeline.rank)
    for timeline in timelines:
        if pass_name not in (None, timeline.pass_name):
            raise RuntimeError(
                f"record: the last launch of rank {timeline.rank} is a {timeline.pass_name} pass, and a {pass_name} "
                "pass is to be recorded. Let the function to record end with one: a forward pass is a call of a layer, "
                "a backward pass comes with its jax.grad or jax.vjp where the gradients are returned."
            )
    return align(timelines)


def _launch(raw: Any) -> tuple[int, int, int, int]:
    return raw.device, raw.ranks, raw.rank, raw.launch


def decode(raw: Any, platform: str) -> Timeline:
    """Returns a launch as compiled code hands it over, with clock ticks turned into nanoseconds.

    Every thread block has read its clock and the timer that all blocks share when it began and when it ended; its ticks
    lie on the line between. Where the clock's frequency changes during the launch, times in between are off by what the
    line misses, alike in all blocks, whose clocks change together.
    """
    clocks, rows = raw.clocks, raw.events
    origin = clocks["begin_ns"].min()
    begin_ns = (clocks["begin_ns"] - origin).astype(np.float64)
    end_ns = (clocks["end_ns"] - origin).astype(np.float64)
    ticks = (clocks["end_ticks"] - clocks["begin_ticks"]).astype(np.float64)
    ns_per_tick = (end_ns - begin_ns) / np.maximum(ticks, 1)
    block = rows["block"]

    def nanoseconds(name: str) -> np.ndarray:
        since = (rows[name] - clocks["begin_ticks"][block]).view(np.int64)
        return begin_ns[block] + since * ns_per_tick[block]

    events = np.empty(len(rows), EVENT)
    for name in ("block", "role", "nth", "kind", "expert", "row_tile", "part"):
        events[name] = rows[name]
    events["begin"], events["end"] = nanoseconds("begin"), nanoseconds("end")
    events["stalled"] = rows["stalled"] * ns_per_tick[block]
    events = events[np.lexsort((events["begin"], events["nth"], events["role"], events["block"]))]
    return Timeline(
        rank=raw.rank,
        ranks=raw.ranks,
        platform="cpu" if platform == "cpu" else "gpu",
        pass_name="backward" if raw.backward else "forward",
        events=events,
        length=float(end_ns.max()),
        sms=clocks["sm"].copy(),
        clock_ghz=1 / np.maximum(ns_per_tick, 1e-9),
        dropped=int(clocks["dropped"].sum()),
    )


def align(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Returns the timelines with `start` set so that they can be drawn on one axis.

    The timers of different GPUs differ. What all ranks see within a few microseconds of each other is that the inputs
    of all of them are ready: the first block of a rank that goes on is the common point. Times within one rank do not
    depend on this.
    """
    ready = []
    for timeline in timelines:
        waited = timeline.of("wait_inputs")
        ready.append(float(waited["end"].min()) if len(waited) else 0.0)
    latest = max(ready, default=0.0)
    return [dataclasses.replace(timeline, start=latest - own) for timeline, own in zip(timelines, ready, strict=True)]


def save(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Writes timelines to a compressed file that `load` reads, also where jaxmoe's compiled parts are others."""
    arrays: dict[str, Any] = {"kinds": np.array(kinds()), "count": len(timelines)}
    for i, timeline in enumerate(timelines):
        for field in dataclasses.fields(Timeline):
            arrays[f"{i}.{field.name}"] = np.asarray(getattr(timeline, field.name))
    np.savez_compressed(path, **arrays)


def load(path: str | Path) -> list[Timeline]:
    """Reads what `save` wrote.

    Raises:
      ValueError: the file is no such file, or has other kinds of events than this version of jaxmoe.
      OSError: it cannot be read.
    """
    with Path(path).open("rb") as stream:
        try:
            file: Any = np.load(stream)
        except (ValueError, EOFError, zipfile.BadZipFile):
            file = None
        if not {"kinds", "count"} <= {*getattr(file, "files", ())}:
            raise ValueError(f"load: {path} is no recording. Those are files that `save` writes, and --save.")
        if tuple(file["kinds"]) != kinds():
            raise ValueError(f"load: {path} was written by another version of jaxmoe, with other kinds of events.")
        return [
            Timeline(
                **{
                    field.name: array if field.name in ("events", "sms", "clock_ghz") else array.item()
                    for field in dataclasses.fields(Timeline)
                    for array in [file[f"{i}.{field.name}"]]
                }
            )
            for i in range(int(file["count"]))
        ]


def lane_name(timeline: Timeline, block: int, role: str, nth: int) -> str:
    """Returns what a lane is called: `"SM 012 math 1"`."""
    place = f"SM {timeline.sms[block]:03d}" if timeline.platform == "gpu" else f"worker {block}"
    return f"{place} {role} {nth}" if role in ("dispatch", "math", "answers") else f"{place} {role}"


def write_perfetto(timelines: Iterable[Timeline], path: str | Path, blocks: int | None = None) -> None:
    """Writes a trace for https://ui.perfetto.dev (or chrome://tracing): a process per rank, a thread per lane.

    Args:
      timelines: as `record` returns them.
      path: of the JSON file; compressed where it ends in `.gz`, which Perfetto opens too.
      blocks: write the first that many thread blocks of each rank; `None` for all.
    """
    with _opened(Path(path)) as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        separator = ""
        for timeline in timelines:
            for entry in _trace_events(timeline, blocks):
                file.write(separator + json.dumps(entry, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def _opened(path: Path) -> io.TextIOBase:
    return gzip.open(path, "wt", compresslevel=6) if path.suffix == ".gz" else path.open("w")


def _trace_events(timeline: Timeline, blocks: int | None) -> Iterator[dict[str, Any]]:
    names, roles = kinds(), recording.roles()
    pid = timeline.rank
    title = f"rank {pid} of {timeline.ranks}, {timeline.pass_name} pass"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    kept = timeline.events if blocks is None else timeline.events[timeline.events["block"] < blocks]
    lanes: set[int] = set()
    # Microseconds, to the nanosecond.
    microseconds = {
        "begin": ((timeline.start + kept["begin"]) / 1e3).round(3).tolist(),
        "length": ((kept["end"] - kept["begin"]) / 1e3).round(3).tolist(),
        "stalled": (kept["stalled"].astype(np.float64) / 1e3).round(3).tolist(),
    }
    numbers = (kept[name].tolist() for name in ("block", "role", "nth", "kind", "expert", "row_tile", "part"))
    for block, role, nth, kind, expert, row_tile, part, begin, length, stalled in zip(
        *numbers, *microseconds.values(), strict=True
    ):
        tid = 1 + (block * len(roles) + role) * MOST_LANES_OF_ROLE + nth
        if tid not in lanes:
            lanes.add(tid)
            name = lane_name(timeline, block, roles[role], nth)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        yield {
            "ph": "X",
            "name": event_name(names[kind], expert, row_tile, part),
            "cat": "wait" if names[kind] in waits() else names[kind],
            "pid": pid,
            "tid": tid,
            "ts": begin,
            "dur": length,
        } | ({"args": {"waiting for stages (us)": stalled}} if stalled else {})


def event_name(kind: str, expert: int, row_tile: int, part: int) -> str:
    """Returns what an event is called.

    >>> event_name("gate_up", 3, 5, 2)  # of a local expert, row tile and column tile
    'gate_up expert 3 tile 5.2'
    """
    of_expert = f" expert {expert}" if expert >= 0 else ""
    of_tile = f" tile {row_tile}" if row_tile >= 0 else ""
    return f"{kind}{of_expert}{of_tile}" + (f".{part}" if part >= 0 else "")
