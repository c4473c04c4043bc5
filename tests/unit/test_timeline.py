"""Timelines in Python: ticks to time, shares with known answers, files that open elsewhere."""

import dataclasses
import gzip
import importlib
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxmoe.machine as machine
import jaxmoe.native as native
from jaxmoe.profiling import recording, summary, timeline
from jaxmoe.profiling.timeline import EVENT, Timeline


def made(*events: tuple[Any, ...], length: float = 100.0, ranks: int = 2, blocks: int = 2) -> Timeline:
    """A timeline of events (block, role, nth, kind, begin, end) or (..., stalled)."""
    array = np.zeros(len(events), EVENT)
    array[["expert", "row_tile", "part"]] = (-1, -1, -1)
    for entry, (block, role, nth, kind, begin, end, *stalled) in zip(array, events, strict=True):
        entry["block"], entry["role"], entry["nth"] = block, timeline.role_number(role), nth
        entry["kind"], entry["begin"], entry["end"] = timeline.kind_number(kind), begin, end
        entry["stalled"] = stalled[0] if stalled else 0
    ones = np.ones(blocks)
    return Timeline(0, ranks, "gpu", "forward", array, length, np.arange(blocks, dtype=np.int32) * 7, ones, 0)


# Something is in flight from 0 to 40 and from 60 to 90.
EXAMPLE = made(
    (0, "dispatch", 0, "dispatch", 0, 30),
    (1, "dispatch", 2, "dispatch", 20, 40),
    (0, "math", 0, "gate_up", 10, 50),
    (0, "math", 1, "gate_up", 20, 60, 20),  # half of it waiting, while the other warpgroup multiplies or not
    (1, "math", 0, "wait_stages", 0, 30),
    (1, "math", 0, "down", 30, 70),
    (1, "answers", 0, "answers", 60, 80),
    (1, "math", 0, "wait_answers", 80, 90),
    (1, "math", 0, "combine", 90, 100),
)


def test_the_share_hidden_is_the_mean_over_sms_of_the_time_they_multiply_while_something_is_in_flight():
    numbers = summary.summarize(EXAMPLE)
    assert numbers.communication == pytest.approx(70e-3)
    # The first SM: 10 to 40. The second: 30 to 40 and 60 to 70.
    assert numbers.hidden == pytest.approx((30 + 20) / 2 / 70)
    # Transfers one by one: 0 to 30 sees the first SM for 20; 20 to 40 sees it for 20 and the second for 10; 60 to 80
    # sees the second for 10.
    assert numbers.hidden_transfers == pytest.approx((20 + 20 + 10 + 10) / 2 / 70)
    assert numbers.hidden_rows == pytest.approx((20 + 20 + 10) / 2 / 50)
    assert numbers.hidden_answers == pytest.approx((0 + 10) / 2 / 20)
    assert numbers.exposed == pytest.approx((10 + 20) * 1e-3)  # 0 to 10 and 70 to 90
    # The first SM: 10 to 50, then half of 50 to 60. The second: 30 to 70.
    assert numbers.multiplying == pytest.approx((45 + 40) / 2 / 100)
    assert (numbers.start_up, numbers.tail) == pytest.approx((10e-3, 30e-3))


def test_the_parts_of_a_role_are_shares_of_the_time_of_its_lanes():
    roles = summary.summarize(EXAMPLE).roles
    # Three lanes of math warpgroups.
    assert roles["math"] == pytest.approx(
        {
            "gate_up": 60 / 300,
            "down": 40 / 300,
            "wait_stages": 30 / 300,
            "wait_answers": 10 / 300,
            "combine": 10 / 300,
            "(waiting for stages)": 20 / 300,
        }
    )
    assert roles["dispatch"] == pytest.approx({"dispatch": 50 / 200})
    assert "producer" not in roles


@pytest.mark.parametrize("gemm", native.schedule().Gemm.__members__)
def test_the_products_of_every_gemm_are_events_of_its_name_that_hide_communication(gemm):
    assert gemm in summary.PRODUCTS
    numbers = summary.summarize(made((0, "dispatch", 0, "dispatch", 0, 10), (0, "math", 0, gemm, 0, 10), blocks=1))
    assert (numbers.hidden, numbers.exposed) == (1.0, 0.0)


def test_sums_of_dispatch_warps_beside_products_are_no_communication_and_no_lane_of_math():
    picture = importlib.import_module("jaxmoe.profiling.picture")
    sums = made((0, "dispatch", 2, "wait_answers", 40, 60), (0, "dispatch", 2, "combine", 60, 100))
    beside = dataclasses.replace(EXAMPLE, events=np.concatenate([EXAMPLE.events, sums.events]))
    alone, both = summary.summarize(EXAMPLE), summary.summarize(beside)
    assert (both.communication, both.hidden, both.exposed) == (alone.communication, alone.hidden, alone.exposed)
    assert picture._math_lanes(beside) == picture._math_lanes(EXAMPLE) == 2


def test_one_rank_has_no_communication_to_hide():
    numbers = summary.summarize(dataclasses.replace(EXAMPLE, ranks=1))
    assert (numbers.hidden, numbers.communication, numbers.exposed) == (None, 0.0, 0.0)
    assert "no communication" in str(numbers)


def test_missing_events_are_not_passed_over():
    assert "missing" not in str(summary.summarize(EXAMPLE))
    assert "3 events are missing" in str(summary.summarize(dataclasses.replace(EXAMPLE, dropped=3)))


def test_a_launch_without_products_has_numbers_too():
    numbers = summary.summarize(made((0, "dispatch", 0, "dispatch", 0, 10)))
    assert (numbers.hidden, numbers.multiplying, numbers.hidden_answers) == (0.0, 0.0, None)
    assert "rows 0.0 %, answers none" in str(numbers)


def raw_launch(**fields: Any) -> SimpleNamespace:
    clocks = np.zeros(
        2, [("sm", "i4"), ("dropped", "u4"), *((n, "u8") for n in ("begin_ticks", "begin_ns", "end_ticks", "end_ns"))]
    )
    # Two ticks a nanosecond, and one and a half; the second block begins 50 ns later.
    clocks[0] = (11, 0, 2**40, 10**18, 2**40 + 2000, 10**18 + 1000)
    clocks[1] = (12, 4, 5, 10**18 + 50, 5 + 1500, 10**18 + 1050)
    names = ("block", "role", "nth", "kind", "expert", "row_tile", "part", "stalled")
    events = np.zeros(2, [*((name, "i4") for name in names[:-1]), ("stalled", "u4"), ("begin", "u8"), ("end", "u8")])
    events[0] = (1, timeline.role_number("math"), 1, timeline.kind_number("down"), 3, 5, 2, 300, 5 + 150, 5 + 750)
    events[1] = (0, 0, 0, timeline.kind_number("copy_inputs"), -1, -1, -1, 0, 2**40, 2**40 + 100)
    numbers = {"device": 0, "ranks": 4, "rank": 2, "launch": 9, "backward": False}
    return SimpleNamespace(**numbers | fields, clocks=clocks, events=events)


def test_ticks_of_every_sm_become_time_on_the_line_between_its_two_readings():
    got = timeline.decode(raw_launch(), "gpu")
    assert (got.rank, got.ranks, got.dropped, got.length) == (2, 4, 4, 1050)
    np.testing.assert_array_equal(got.sms, [11, 12])
    np.testing.assert_allclose(got.clock_ghz, [2, 1.5])
    np.testing.assert_allclose(got.events["begin"], [0, 150])  # sorted by block
    np.testing.assert_allclose(got.events["end"], [50, 550])
    np.testing.assert_allclose(got.events["stalled"], [0, 200])
    assert got.events[["expert", "row_tile", "part"]].tolist() == [(-1, -1, -1), (3, 5, 2)]


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_launch_says_of_which_pass_it_is_also_without_events(tmp_path: Path, pass_name):
    raw = raw_launch(backward=pass_name == "backward")
    raw.events = raw.events[:0]  # as of a rank whose experts no token chose
    timeline.save([timeline.decode(raw, "gpu")], tmp_path / "recording.npz")
    timeline.write_perfetto([timeline.decode(raw, "gpu")], tmp_path / "trace.json")
    (got,) = timeline.load(tmp_path / "recording.npz")
    assert got.pass_name == pass_name
    assert f"rank 2: {pass_name} pass of 1.1 us" in str(summary.summarize(got))
    assert f"rank 2 of 4, {pass_name} pass" in (tmp_path / "trace.json").read_text()


def test_ranks_are_aligned_where_the_first_block_of_each_sees_all_inputs():
    early = made((0, "block", 0, "wait_inputs", 5, 30), (1, "block", 0, "wait_inputs", 5, 32))
    late = made((0, "block", 0, "wait_inputs", 5, 10), (1, "block", 0, "wait_inputs", 5, 9))
    aligned = timeline.align([early, late])
    assert [each.start for each in aligned] == [0, 21]
    assert [each.start + each.of("wait_inputs")["end"].min() for each in aligned] == [30, 30]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_a_process_per_rank_and_a_named_thread_per_lane(tmp_path: Path, name):
    example = dataclasses.replace(EXAMPLE, start=1000.0, events=EXAMPLE.events.copy())
    example.events["expert"][5], example.events["row_tile"][5], example.events["part"][5] = 3, 5, 2
    timeline.write_perfetto([example, dataclasses.replace(example, rank=1)], tmp_path / name)
    opened = gzip.open if name.endswith("gz") else open
    with opened(tmp_path / name, "rt") as file:
        entries = json.load(file)["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    processes = sorted({e["args"]["name"] for e in entries if e["name"] == "process_name"})
    assert processes == ["rank 0 of 2, forward pass", "rank 1 of 2, forward pass"]
    assert sorted(name for (pid, _), name in named.items() if pid == 0) == [
        "SM 000 dispatch 0",
        "SM 000 math 0",
        "SM 000 math 1",
        "SM 007 answers 0",
        "SM 007 dispatch 2",
        "SM 007 math 0",
    ]
    events = [e for e in entries if e["ph"] == "X" and e["pid"] == 0]
    assert len(events) == len(example.events)
    down = next(e for e in events if e["cat"] == "down")
    assert down["name"] == "down expert 3 tile 5.2"
    assert (down["ts"], down["dur"]) == (1.03, 0.04)
    assert named[0, down["tid"]] == "SM 007 math 0"
    assert next(e for e in events if e.get("args"))["args"] == {"waiting for stages (us)": 0.02}
    assert {e["cat"] for e in events if e["name"].startswith("wait")} == {"wait"}


def test_a_trace_can_be_limited_to_some_blocks(tmp_path: Path):
    timeline.write_perfetto([EXAMPLE], tmp_path / "trace.json", blocks=1)
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"][:6] for e in entries if e["name"] == "thread_name"} == {"SM 000"}


def test_a_recording_is_the_same_after_a_file(tmp_path: Path):
    timeline.save([EXAMPLE, dataclasses.replace(EXAMPLE, rank=1, start=2.5)], tmp_path / "recording.npz")
    first, second = timeline.load(tmp_path / "recording.npz")
    np.testing.assert_array_equal(first.events, EXAMPLE.events)
    assert (second.rank, second.start, second.platform) == (1, 2.5, "gpu")
    assert summary.summarize(first) == summary.summarize(EXAMPLE)


def test_a_recording_of_another_version_is_refused(tmp_path: Path, monkeypatch):
    timeline.save([EXAMPLE], tmp_path / "recording.npz")
    monkeypatch.setattr(timeline, "kinds", lambda: ("other",))
    with pytest.raises(ValueError, match="another version"):
        timeline.load(tmp_path / "recording.npz")


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path):
    path = tmp_path / "recording.npz"
    for content in (b"", b"text", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"recording\.npz is no recording"):
            timeline.load(path)
    np.savez(path, numbers=np.arange(3))
    with pytest.raises(ValueError, match=r"recording\.npz is no recording"):
        timeline.load(path)


def test_the_buffer_of_a_gpu_is_read_as_the_kernel_writes_it():
    """Headers of two blocks, then their lanes; a lane beyond its capacity says how many events it has lost."""
    compiled = importlib.import_module("jaxmoe._native")
    lanes, capacity = 9, 8192
    header = struct.Struct(f"<4Qi{lanes}I")
    events_at = -(-2 * header.size // 1024) * 1024
    buffer = bytearray(compiled.timeline_bytes(2))
    assert len(buffer) == events_at + 2 * lanes * capacity * 32
    header.pack_into(buffer, 0, 100, 1000, 300, 1100, 42, *([1] + [0] * 8))
    header.pack_into(buffer, header.size, 200, 1010, 400, 1110, 43, *([0] * 6 + [capacity + 5] + [0] * 2))
    math_1 = events_at + (lanes + 6) * capacity * 32
    stage, down = timeline.kind_number("copy_inputs"), timeline.kind_number("down")
    struct.pack_into("<QQhhiiI", buffer, events_at, 110, 150, stage, -1, -1, -1, 0)
    for i in range(capacity):
        struct.pack_into("<QQhhiiI", buffer, math_1 + 32 * i, 200 + i, 201 + i, down, 3, 700_000, 2, 1)
    launch = compiled.decode_timeline(bytes(buffer), 2)
    assert launch.clocks.tolist() == [(42, 0, 100, 1000, 300, 1100), (43, 5, 200, 1010, 400, 1110)]
    assert len(launch.events) == 1 + capacity
    assert launch.events[0].tolist() == (0, timeline.role_number("block"), 0, stage, -1, -1, -1, 0, 110, 150)
    last = 199 + capacity
    assert launch.events[-1].tolist() == (1, timeline.role_number("math"), 1, down, 3, 700_000, 2, 1, last, last + 1)
    with pytest.raises(ValueError, match="10 bytes are no buffer of 2 blocks"):
        compiled.decode_timeline(bytes(10), 2)


@pytest.mark.skipif(machine.build_info().timeline, reason="the kernels of this build record")
def test_a_build_without_a_timeline_says_how_to_get_one():
    for ask in (lambda: recording.launches("gpu"), lambda: recording.switch("gpu", True)):
        with pytest.raises(NotImplementedError, match="JAXMOE_TIMELINE=on"):
            ask()


def test_a_platform_without_a_compiled_part_is_refused():
    with pytest.raises(NotImplementedError, match="tpu"):
        recording.launches("tpu")


def test_a_function_that_runs_no_layer_is_refused():
    with pytest.raises(RuntimeError, match="implementation='megakernel'"):
        timeline.record(lambda: None, "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_of_a_launch_is_written(tmp_path: Path, ranks, ending):
    picture = importlib.import_module("jaxmoe.profiling.picture")
    picture.draw(dataclasses.replace(EXAMPLE, ranks=ranks), tmp_path / f"picture.{ending}", title="an example")
    assert (tmp_path / f"picture.{ending}").stat().st_size > 10_000


def test_every_kind_of_event_has_a_colour():
    picture = importlib.import_module("jaxmoe.profiling.picture")
    drawn = [kind for _, _, kinds in picture.GROUPS for kind in kinds]
    producer = {"take_task", "load_gate_up", "load_down", "load_gradient", "find_rows"}  # not drawn
    assert sorted(drawn) == sorted(set(timeline.kinds()) - producer)


def test_events_that_go_on_are_counted_over_time():
    picture = importlib.import_module("jaxmoe.profiling.picture")
    events = EXAMPLE.of("dispatch")
    counts = picture._mean_count(events, np.ones(2), np.array([0.0, 10, 20, 30, 50]))
    np.testing.assert_allclose(counts, [1, 1, 2, 0.5])
