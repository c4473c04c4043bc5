"""The launcher: whatever a rank does, the test ends in time, says which rank it was, and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launcher import KEPT_LINES, LINE_BYTES, ROOT, LaunchError, launch

pytestmark = pytest.mark.multiprocess

WORKERS = "tests.multiprocess.workers"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a grandchild's zombie is for init to reap


def assert_gone(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + 10
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.01)


def pids_in(outputs: Sequence[str], what: str = "pid|child") -> list[int]:
    return [int(pid) for pid in re.findall(rf"^(?:{what}) (\d+)$", "".join(outputs), re.M)]


def assert_nothing_is_left(outputs: Sequence[str]) -> None:
    assert_gone(pids_in(outputs))
    for rank in pids_in(outputs, "pid"):
        with pytest.raises(ChildProcessError):  # no zombie either
            os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def launch_misbehaving(
    *arguments: str, processes: int = 2, timeout_s: float = 60, silence_s: float = 30
) -> tuple[str, ...]:
    return launch(
        f"{WORKERS}.misbehave",
        processes=processes,
        devices_per_process=1,
        timeout_s=timeout_s,
        silence_s=silence_s,
        arguments=arguments,
    )


def failure_of(*arguments: str, **options: Any) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        launch_misbehaving(*arguments, **options)
    assert_nothing_is_left(caught.value.outputs)
    return caught.value


# --- success --------------------------------------------------------------------------------------------------------


def test_success_returns_what_every_rank_printed_and_leaves_nothing():
    outputs = launch_misbehaving("succeed", "two words", processes=3)
    assert len(outputs) == len(pids_in(outputs)) == 3
    coordinators = set()
    for rank, output in enumerate(outputs):
        found = re.search(rf"^rank {rank} of 3 at (127\.0\.0\.1:\d+), \['two words'\], gpus None$", output, re.M)
        assert found
        coordinators.add(found[1])
        assert output.endswith("stderr too\n")
    assert len(coordinators) == 1
    assert_nothing_is_left(outputs)


def test_a_script_is_run_like_a_module(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    options: dict[str, Any] = dict(devices_per_process=1, timeout_s=60, silence_s=30)
    assert launch(str(script), processes=1, arguments=["--flag"], **options) == ("__main__ ['--flag']\n",)


def test_ranks_on_gpus_take_different_ones_and_get_the_variables_of_their_rank(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os; from tests.multiprocess.rank import this_rank\n"
        "print(this_rank().gpus, os.environ['JAX_PLATFORMS'], os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    outputs = launch(
        str(script),
        processes=2,
        devices_per_process=2,
        timeout_s=60,
        silence_s=30,
        platform="gpu",
        environment=lambda rank: {"CUDA_VISIBLE_DEVICES": f"{rank},7"},
    )
    assert outputs == ("(0, 1) cuda,cpu 0,7\n", "(2, 3) cuda,cpu 1,7\n")


def test_processes_that_a_rank_has_started_end_with_the_job():
    outputs = launch_misbehaving("leave a child")
    assert len(pids_in(outputs, "child")) == 2
    assert_nothing_is_left(outputs)


# --- failure --------------------------------------------------------------------------------------------------------


def test_a_rank_that_exits_with_a_status_fails_the_launch_by_name_and_ends_the_others():
    error = failure_of("exit", "3")
    assert error.ranks == (1,)
    assert re.match(r"rank 1 exited with status 3 after \d+\.\d s \(2 ranks\)", error.reason)
    assert "--- rank 0, was running and was then ended by the launcher; the last" in str(error)
    assert "--- rank 1, exited with status 3; the last 2 of 2 lines:\npid " in str(error)
    assert len(pids_in(error.outputs, "child")) == 1


def test_a_job_goes_on_without_a_rank_that_may_fail(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, time; from tests.multiprocess.rank import this_rank\n"
        "if this_rank().index == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1); print('went on', flush=True)"
    )
    options: dict[str, Any] = dict(devices_per_process=1, timeout_s=60, silence_s=30)
    assert launch(str(script), processes=2, may_fail=[1], **options) == ("went on\n", "")


def test_a_rank_that_raises_fails_the_launch_with_its_traceback():
    error = failure_of("raise")
    assert error.ranks == (1,)
    assert "rank 1 exited with status 1" in error.reason
    assert str(error).endswith("ValueError: expected 8 devices")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_rank_that_is_killed_by_a_signal_fails_the_launch_with_the_name_of_the_signal(name):
    error = failure_of("signal", name)
    assert error.ranks == (1,)
    assert f"rank 1 was ended by {name}" in error.reason


@pytest.mark.slow
def test_a_silent_rank_fails_the_launch_by_name_and_shows_where_it_hangs():
    started = time.monotonic()
    error = failure_of("sleep", silence_s=1.5)
    assert time.monotonic() - started < 20  # long before the other limit
    assert error.ranks == (1,)
    assert "rank 1 printed no line for 1.5 s" in error.reason
    assert re.search(r'misbehave\.py", line \d+ in sleep_for_ever', error.outputs[1])
    assert re.search(r'misbehave\.py", line \d+ in print_until_killed', error.outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stop", "ignore signals"])
def test_a_silent_rank_that_does_not_react_to_signals_is_killed_all_the_same(what, monkeypatch):
    monkeypatch.setattr("tests.multiprocess.launcher.STACKS_S", 0.1)
    assert failure_of(what, silence_s=1.5).ranks == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["flood", "flood without lines"])
def test_a_rank_that_prints_for_ever_fails_at_the_time_limit_and_does_not_fill_the_memory(what):
    started = time.monotonic()
    error = failure_of(what, timeout_s=1)
    assert time.monotonic() - started < 20
    assert error.ranks == (0, 1)
    assert "rank 0 and rank 1 did not end within 1 s" in error.reason
    lines = error.outputs[1].splitlines()
    assert len(lines) <= KEPT_LINES
    assert max(map(len, lines), default=0) <= LINE_BYTES


def test_ctrl_c_ends_all_ranks(tmp_path):
    launcher = start_launcher(tmp_path)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) != 0
    assert_gone(ranks_in(tmp_path))


def test_ranks_end_even_when_their_launcher_is_killed(tmp_path):
    launcher = start_launcher(tmp_path)
    launcher.kill()
    launcher.wait()
    assert_gone(ranks_in(tmp_path))


def ranks_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def start_launcher(folder: Path) -> "subprocess.Popen[bytes]":
    """A process with a job of two ranks that run for ever, once both are there."""
    program = (
        # What a shell starts in the background has Ctrl-C ignored.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.multiprocess.launcher import launch\n"
        f"launch('{WORKERS}.misbehave', processes=2, devices_per_process=1, timeout_s=60, silence_s=60,"
        " arguments=['all', sys.argv[1]])"
    )
    command = [sys.executable, "-c", program, str(folder)]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(ranks_in(folder)) < 2:
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        time.sleep(0.01)
    assert all(map(is_running, ranks_in(folder)))
    return launcher


# --- with JAX -------------------------------------------------------------------------------------------------------


ENDS = {
    "killed": "was ended by SIGKILL",
    # Left alone, JAX waits for all ranks when a process exits: the launcher would see silence, not the reason.
    "raises": "exited with status 1",
    "exits": "exited with status 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_while_others_wait_for_it_in_a_collective_ends_the_job(how):
    with pytest.raises(LaunchError) as caught:
        launch(f"{WORKERS}.vanish", processes=2, devices_per_process=2, timeout_s=120, silence_s=60, arguments=[how])
    error = caught.value
    assert 1 in error.ranks
    assert f"rank 1 {ENDS[how]}" in error.reason
    # Rank 0 took part in the same sum, but may be ended before it gets to print it.
    assert "sum 6" in error.outputs[1]
    assert ("wrong result" in error.outputs[1]) == (how != "killed")
    assert "the sum over a dead rank" not in error.outputs[0]
    assert_nothing_is_left(error.outputs)
