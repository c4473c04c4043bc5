"""Timelines of the host executor, and the whole path from a layer to a trace: as a GPU's, but for lanes it lacks."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmoe
import jaxmoe.native as native
from jaxmoe.profiling import recording, summary, timeline
from jaxmoe.testing import make_inputs
from tests import timeline_checks as checks
from tests.host.test_executor import GRADIENT_SCHEDULES, SCHEDULES, SHAPE, arguments, gradients, run
from tests.layer_suite import gradients_of, layer

RANKS = 8
SIZES: dict[str, Any] = {"tokens": 8 * 40, "hidden": 48, "intermediate": 72, "num_experts": 16, "top_k": 3}


# The kinds of events of a GEMM's products and of the wait in front of them.
EVENTS = {
    "gate_up": ("gate_up", "wait_rows"),
    "down": ("down", "wait_hidden"),
    "hidden_gradient": ("hidden_gradient", "wait_hidden"),
    "token_gradient": ("token_gradient", "wait_gradients"),
    "gate_gradient": ("weight_gradient", "wait_gradients"),
    "up_gradient": ("weight_gradient", "wait_gradients"),
    "down_gradient": ("weight_gradient", "wait_gradients"),
}


def check_tasks(recorded: timeline.Timeline, shape, schedule, rows: list[int]) -> None:
    """Every task of every GEMM once, behind a wait of its own."""
    products, waits = defaultdict(Counter), defaultdict(Counter)
    for task in checks.all_tasks(shape, schedule, rows):
        product, wait = EVENTS[task.gemm.name]
        products[product][task.expert, task.row_tile, task.column_tile] += 1
        waits[wait][task.expert, task.row_tile, task.column_tile] += 1
    for kind in {kind for kinds in EVENTS.values() for kind in kinds}:
        assert checks.subjects(recorded, kind) == (products | waits)[kind], kind


def check_launch(recorded: timeline.Timeline, shape, schedule, rows: list[int]) -> None:
    rows = checks.filled_up(schedule, rows)
    checks.check_times(recorded)
    check_tasks(recorded, shape, schedule, rows)
    checks.check_dispatch(recorded, shape, schedule, rows)
    checks.check_ends(recorded, schedule.workers, combining_lanes=1)


PLANS = {f"forward: {name}": (run, plan) for name, plan in SCHEDULES.items()}
PLANS |= {f"backward: {name}": (gradients, plan) for name, plan in GRADIENT_SCHEDULES.items()}


@pytest.mark.parametrize("plan", PLANS)
def test_every_task_and_chunk_of_the_schedule_is_recorded_once(plan):
    run_with, schedule = PLANS[plan]
    recording.switch("cpu", True)
    try:
        run_with(schedule)
        launches = recording.launches("cpu")
    finally:
        recording.switch("cpu", False)
    assert [(launch.rank, launch.ranks) for launch in launches] == [(rank, 4) for rank in range(4)]
    for launch in launches:
        rows = checks.rows_per_expert(arguments()["ids"][-1], SHAPE.num_experts, 4, launch.rank)
        check_launch(timeline.decode(launch, "cpu"), SHAPE, schedule, rows)


def test_nothing_is_recorded_unless_asked_for():
    recording.switch("cpu", True)
    recording.switch("cpu", False)
    run()
    assert recording.launches("cpu") == []


def test_the_last_of_several_layers_on_eight_devices_is_recorded():
    inputs = make_inputs(3, **SIZES, routing="unused-slots")
    call = layer("all devices", implementation="megakernel")
    recorded = timeline.record(lambda: [call(inputs) for _ in range(3)])
    shape = native.schedule().Shape(RANKS, 40, 48, 72, 16, 3)
    assert [each.rank for each in recorded] == list(range(RANKS))
    for each in recorded:
        schedule = checks.schedule_of("cpu", workers=len(each.sms))
        rows = checks.rows_per_expert(np.asarray(inputs.topk_ids), 16, RANKS, each.rank)
        check_launch(each, shape, schedule, rows)
        numbers = summary.summarize(each)
        assert numbers.hidden is not None
        assert 0 <= numbers.hidden <= 1
        assert 0 < numbers.communication <= numbers.length
        assert numbers.start_up + numbers.tail < numbers.length
        for shares in numbers.roles.values():
            assert 0 < sum(shares.values()) <= 1 + 1e-6


def test_the_backward_pass_of_a_layer_is_recorded_with_the_segments_of_its_plan():
    inputs = make_inputs(3, **SIZES, routing="unused-slots")
    plan = jaxmoe.KernelPlan(2, 1, 8, backward=jaxmoe.KernelPlan(1, 1, 4, chunk_rows=4, segment_tiles=2))
    gradients = gradients_of(layer("all devices", implementation="megakernel", plan=plan))
    recorded = timeline.record(lambda: gradients(inputs))
    shape = native.schedule().Shape(RANKS, 40, 48, 72, 16, 3)
    assert [each.rank for each in recorded] == list(range(RANKS))
    for each in recorded:
        schedule = checks.schedule_of("cpu", workers=len(each.sms), segment_tiles=2)
        rows = checks.rows_per_expert(np.asarray(inputs.topk_ids), 16, RANKS, each.rank)
        check_launch(each, shape, schedule, rows)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: flags belong to the process, and other tests define those of the benchmark."""
    program = [sys.executable, "-m", "jaxmoe.profiling", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=240)


def test_the_command_records_saves_and_reads_again(tmp_path: Path):
    trace, recording, picture = tmp_path / "trace.json", tmp_path / "recording.npz", tmp_path / "picture.png"
    small = ["--shape=48,72,8,2", "--tokens=24", "--ep=4", "--runs=2"]
    recorded = command("timeline", *small, f"--save={recording}", f"--perfetto={trace}")
    assert recorded.returncode == 0, recorded.stderr
    told = recorded.stdout.splitlines()
    assert "relative error" in told[0]
    assert len([line for line in told if "hidden behind products" in line]) == 4
    entries = json.loads(trace.read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {0, 1, 2, 3}

    read = command("timeline", f"--read={recording}", f"--picture={picture}", "--rank=3")
    assert read.returncode == 0, read.stderr
    assert read.stdout.splitlines()[1:] == told[1:]
    assert picture.stat().st_size > 10_000


def test_the_command_without_a_name_says_what_it_can_show():
    told = command()
    assert told.returncode != 0
    assert "name what to show" in told.stdout + told.stderr
