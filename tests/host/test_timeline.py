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
from tests.layer_calls import gradients_of, layer

RANKS = 8
SIZES: dict[str, Any] = {"tokens": 8 * 40, "hidden": 48, "intermediate": 72, "num_experts": 16, "top_k": 3}


def check_tasks(recorded: timeline.Timeline, shape, schedule, rows: list[int]) -> None:
    """Every task of every GEMM once, behind a wait of its own."""
    expected = defaultdict(Counter)
    for task in checks.all_tasks(shape, schedule, rows):
        for kind in (task.gemm.name, checks.WAITS[task.gemm.name]):
            expected[kind][task.expert, task.row_tile, task.column_tile] += 1
    for kind in {*checks.WAITS, *checks.WAITS.values()}:
        assert checks.subjects(recorded, kind) == expected[kind], kind


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
        rows = checks.rows_per_expert(arguments()["topk_ids"][-1], SHAPE.num_experts, 4, launch.rank)
        recorded = timeline.decode(launch, "cpu")
        assert recorded.pass_name == plan.split(":")[0]
        check_launch(recorded, SHAPE, schedule, rows)


def test_nothing_is_recorded_unless_asked_for():
    recording.switch("cpu", True)
    recording.switch("cpu", False)
    run()
    assert recording.launches("cpu") == []


def check_layer(recorded: list[timeline.Timeline], ids: np.ndarray, segment_tiles: int) -> None:
    """A launch on every device, each with numbers that can be."""
    shape = native.schedule().Shape(RANKS, 40, 48, 72, 16, 3)
    assert [each.rank for each in recorded] == list(range(RANKS))
    for each in recorded:
        schedule = checks.schedule_of("cpu", workers=len(each.sms), segment_tiles=segment_tiles)
        check_launch(each, shape, schedule, checks.rows_per_expert(ids, 16, RANKS, each.rank))
        numbers = summary.summarize(each)
        assert numbers.hidden is not None
        assert 0 <= numbers.hidden <= 1
        assert 0 < numbers.communication <= numbers.length
        assert numbers.start_up + numbers.tail < numbers.length
        for shares in numbers.roles.values():
            assert 0 < sum(shares.values()) <= 1 + 1e-6


def test_the_last_of_several_layers_on_eight_devices_is_recorded():
    inputs = make_inputs(3, **SIZES, routing="unused-slots")
    call = layer("all devices", implementation="megakernel")
    recorded = timeline.record(lambda: [call(inputs) for _ in range(3)], pass_name="forward")
    check_layer(recorded, np.asarray(inputs.topk_ids), segment_tiles=0)


def test_the_backward_pass_of_a_layer_is_recorded_with_the_segments_of_its_plan():
    inputs = make_inputs(3, **SIZES, routing="unused-slots")
    plan = jaxmoe.KernelPlan(2, 1, 8, backward=jaxmoe.KernelPlan(1, 1, 4, chunk_rows=4, segment_tiles=2))
    gradients = gradients_of(layer("all devices", implementation="megakernel", plan=plan))
    recorded = timeline.record(lambda: gradients(inputs), pass_name="backward")
    check_layer(recorded, np.asarray(inputs.topk_ids), segment_tiles=2)


def test_products_of_what_the_forward_pass_has_saved_wait_for_rows():
    inputs = make_inputs(3, **SIZES)
    gradients = gradients_of(layer("all devices", implementation="megakernel", residuals="save"))
    for each in timeline.record(lambda: gradients(inputs), pass_name="backward"):
        products = checks.subjects(each, "h_gradient")
        assert products
        assert checks.subjects(each, "wait_rows") == products
        assert not checks.subjects(each, "gate_up", "wait_h")


def test_a_function_that_ends_with_a_launch_of_the_other_pass_is_refused():
    inputs = make_inputs(3, **SIZES)
    call = layer("all devices", implementation="megakernel")
    gradients = gradients_of(call)
    with pytest.raises(RuntimeError, match=r"the last launch of rank 0 is a forward pass, and a backward pass is to"):
        timeline.record(lambda: [gradients(inputs), call(inputs)], pass_name="backward")
    with pytest.raises(RuntimeError, match=r"the last launch of rank 0 is a backward pass, and a forward pass is to"):
        timeline.record(lambda: gradients(inputs), pass_name="forward")


SMALL = ("--shape=48,72,8,2", "--tokens=24", "--ep=4", "--runs=2")


def command(*arguments: str, program: tuple[str, ...] = ("-m", "jaxmoe.profiling")) -> subprocess.CompletedProcess[str]:
    """In a process of its own: flags belong to the process, and other tests define those of the benchmark."""
    return subprocess.run([sys.executable, *program, *arguments], capture_output=True, text=True, timeout=240)


PRODUCTS = {"forward": {"gate_up", "down"}, "backward": {*checks.WAITS} - {"down"}}


@pytest.mark.slow
@pytest.mark.parametrize("pass_name", PRODUCTS)
def test_the_command_records_saves_and_reads_again(tmp_path: Path, pass_name):
    trace, recording, picture = tmp_path / "trace.json", tmp_path / "recording.npz", tmp_path / "picture.svg"
    recorded = command("timeline", *SMALL, f"--pass={pass_name}", f"--save={recording}", f"--perfetto={trace}")
    assert recorded.returncode == 0, recorded.stderr
    told = recorded.stdout.splitlines()
    assert f"{pass_name} pass" in told[0]
    assert "relative error" in told[0]
    assert len([line for line in told if f": {pass_name} pass of" in line]) == 4
    assert len([line for line in told if "hidden behind products" in line]) == 4
    entries = json.loads(trace.read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {0, 1, 2, 3}
    assert {entry["cat"] for entry in entries if "cat" in entry} & {*checks.WAITS} == PRODUCTS[pass_name]

    read = command("timeline", f"--read={recording}", f"--picture={picture}", "--rank=3")
    assert read.returncode == 0, read.stderr
    assert f"{pass_name} pass" in read.stdout.splitlines()[0]
    assert read.stdout.splitlines()[1:] == told[1:]
    drawn = picture.read_text()
    assert f"{pass_name} pass" in drawn
    assert ("weight gradients" in drawn) == ("data gradients" in drawn) == (pass_name == "backward")

    ends = command("ends", f"--read={recording}")
    assert ends.returncode == 0, ends.stderr
    steps = [line.split("|")[1].strip() for line in ends.stdout.splitlines() if line.startswith("| ")]
    assert steps.count("first product begins") == steps.count("answers added up") == 4


@pytest.mark.slow
def test_a_budget_has_a_line_for_each_shape_and_number_of_tokens():
    told = command("budget", "--shape=48,72,8,2", "--shape=16,32,48,4,1", "--tokens=8,24", "--ep=1", "--runs=2")
    assert told.returncode == 0, told.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:3]] for line in told.stdout.splitlines()[2:]]
    assert lines == [["48,72,8,2", "8"], ["48,72,8,2", "24"], ["32,48,4,1", "16"]]


@pytest.mark.slow
def test_the_command_records_a_layer_in_8_bits():
    recorded = command("timeline", "--shape=256,384,8,2", "--tokens=24", "--ep=2", "--runs=2", "--dtype=fp8-block")
    assert recorded.returncode == 0, recorded.stderr
    told = recorded.stdout.splitlines()
    assert "fp8-block" in told[0]
    assert len([line for line in told if ": forward pass of" in line]) == 2


# Gradients of other outputs than those whose truth is known.
WRONG_GRADIENTS = """
import dataclasses
from absl import app
from jaxmoe.profiling import __main__ as program

def make(*arguments, right=program.make_gradient_inputs):
    made = right(*arguments)
    return dataclasses.replace(made, cotangents=tuple(-dy for dy in made.cotangents))

program.make_gradient_inputs = make
app.run(program.main)
"""


@pytest.mark.slow
def test_the_command_shows_nothing_of_a_backward_pass_whose_gradients_are_wrong():
    told = command("timeline", *SMALL, "--pass=backward", program=("-c", WRONG_GRADIENTS))
    assert told.returncode != 0
    assert "more than the allowed" in told.stderr
    assert told.stdout == ""


def test_the_command_without_a_name_says_what_it_can_show():
    told = command()
    assert told.returncode != 0
    assert "name what to show" in told.stdout + told.stderr


# Several runs of the command as a user starts it, in one interpreter: starting one takes seconds.
RUNS = """
import json, sys
from absl import app, flags
from jaxmoe.profiling import __main__ as program

given = ("shape", "tokens", "ep", "dtype", "read", "save", "perfetto", "picture", "rank", "plain")
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        app.run(program.main)
    except SystemExit as end:
        print(f"ended with {end.code}", flush=True)
    flags.FLAGS.unparse_flags()
    for name in given:
        flags.FLAGS[name].unparse()
"""


@pytest.mark.slow
def test_the_command_says_in_a_line_what_is_wrong_with_its_flags(tmp_path: Path):
    text = tmp_path / "text.npz"
    text.write_text("no recording")
    wrong = (
        (["timeline", "--shape=nonsense"], "--shape=nonsense is neither names, any of"),
        (["timeline", "--shape=8,32,48,4,2", "--ep=3"], "4 experts cannot be spread over 3 ranks"),
        (["timeline", "--shape=8,32,48,4,2", "--ep=3", "--dtype=fp8-block"], "4 experts cannot be spread over 3 ranks"),
        (["timeline", "--shape=8,48,72,6,2", "--ep=3", "--dtype=mxfp4-a16"], "quantize: experts.w_gate has 48 inputs"),
        (["timeline", "--tokens=0"], "--tokens=0: a rank needs at least one token"),
        (["budget", "--tokens=64,-5"], "--tokens=64,-5: a rank needs at least one token"),
        (["ends", "--tokens=a"], "--tokens=a must be whole numbers"),
        (["ends", f"--read={tmp_path / 'none.npz'}"], "[Errno 2] No such file or directory"),
        (["timeline", f"--read={text}"], f"load: {text} is no recording"),
        (["timeline", f"--save={tmp_path / 'none' / 'x.npz'}"], f"--save={tmp_path}/none/x.npz: there is no folder"),
    )
    refused = ("--read=x", "--save=x", "--perfetto=x", "--picture=x", "--rank=0")
    runs = [arguments for arguments, _ in wrong] + [["budget", flag] for flag in refused] + [["ends", "--plain=600"]]
    told = command(json.dumps(runs), program=("-c", RUNS))
    assert told.returncode == 0, told.stderr
    ends = [line for line in told.stdout.splitlines() if line.startswith("ended with")]
    assert len(ends) == len(runs)
    for line, (_, message) in zip(ends, wrong, strict=False):
        assert line.startswith(f"ended with jaxmoe profiling: {message}")
    # What absl says of a wrong use, with the flags.
    assert ends[len(wrong) :] == ["ended with 1"] * (len(refused) + 1)
    for flag in refused:
        assert (
            f"{flag.split('=')[0]} is of timeline and ends, and budget makes nothing of it" in told.stdout + told.stderr
        )
    assert "--plain is of budget, and ends makes nothing of it" in told.stdout + told.stderr
