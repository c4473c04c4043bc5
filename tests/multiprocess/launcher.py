"""Starts the ranks of one JAX job as processes of this machine and ends all of them whatever happens.

    outputs = launch("tests.multiprocess.workers.layer", processes=2, devices_per_process=4, timeout_s=99, silence_s=60)

Tests call it; the other side is `rank.py`. A rank that fails, falls silent or takes too long ends the job with a
`LaunchError` that shows what every rank printed last. Ranks print a line per step: silence is the only sign of a
deadlock between processes that all still run.

Runs on Linux only, and imports no JAX.
"""

import collections
import dataclasses
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from tests.multiprocess.rank import VARIABLE, Rank

ROOT = Path(__file__).parents[2]
# Of each rank: more is forgotten, so that a rank which prints for ever does not fill the memory of the tests.
KEPT_LINES = 10_000
LINE_BYTES = 4096
SHOWN_LINES = 30
PIPE_BYTES = 1 << 16
POLL_S = 0.02
# For ranks that hang, to print their stacks before they are killed.
STACKS_S = 2.0


class LaunchError(Exception):
    """A job that did not end well.

    Attributes:
      ranks: the ranks to blame.
      reason: what they did.
      outputs: everything that each rank printed.
    """

    def __init__(self, ranks: Sequence[int], reason: str, outputs: Sequence[str], endings: Sequence[str]) -> None:
        self.ranks, self.reason, self.outputs = tuple(ranks), reason, tuple(outputs)
        shown = []
        for rank, (output, ending) in enumerate(zip(outputs, endings, strict=True)):
            lines = output.splitlines()
            shown.append(f"--- rank {rank}, {ending}; the last {min(len(lines), SHOWN_LINES)} of {len(lines)} lines:")
            shown += lines[-SHOWN_LINES:]
        super().__init__("\n".join([f"launch: {reason}", *shown]))


def launch(
    module_or_script: str,
    *,
    processes: int,
    devices_per_process: int,
    timeout_s: float,
    silence_s: float,
    arguments: Sequence[str] = (),
    platform: Literal["cpu", "gpu"] = "cpu",
    shared_gpus: int | None = None,
    environment: Callable[[int], Mapping[str, str]] | None = None,
    may_fail: Collection[int] = (),
) -> tuple[str, ...]:
    """Runs a program as all ranks of one job and returns what each of them printed, stderr included.

    Args:
      module_or_script: a module, as for `python -m`, or the path of a file that ends in `.py`.
      processes: number of ranks.
      devices_per_process: virtual CPU devices of each rank, or GPUs.
      timeout_s: seconds that the whole job may take.
      silence_s: seconds that a running rank may take until its next (or first) line.
      arguments: of the command line, the same for all ranks.
      platform: on `"gpu"` rank r takes the GPUs from `r * devices_per_process` on and sees the others, as peer access
        needs it.
      shared_gpus: so many GPUs are taken in turn by more ranks of one GPU each. The driver then lets one of a GPU's
        processes run after the other, a few milliseconds each, and NCCL, which wants a GPU for each rank of a host,
        takes processes for hosts: correct and slow.
      environment: further variables of a rank, such as `CUDA_VISIBLE_DEVICES`.
      may_fail: ranks whose status does not matter: the job goes on without them.

    Raises:
      LaunchError: a rank ended with another status than 0 or by a signal, was silent for too long, or the time is over.
        No process of the job is left then, nor is one after success or Ctrl-C.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    started = time.monotonic()
    with _free_port() as port, _Job() as job:
        for index in range(processes):
            first_gpu = index * devices_per_process if shared_gpus is None else index % shared_gpus
            gpus = tuple(range(first_gpu, first_gpu + devices_per_process)) if platform == "gpu" else None
            rank = Rank(index, processes, f"127.0.0.1:{port}", devices_per_process, gpus, os.getpid())
            variables = {VARIABLE: rank.to_json(), "JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu"}
            variables |= {} if shared_gpus is None else {"NCCL_HOSTID": f"rank{index}"}
            variables |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # ranks would read files that others still write
            variables |= environment(index) if environment else {}
            job.start([module_or_script, *arguments], variables)

        while True:
            # Before the pipes are read: what a rank printed before it ended is then seen.
            codes = [process.exit_code() for process in job.processes]
            job.read_available(POLL_S)
            running = [index for index, code in enumerate(codes) if code is None]
            if bad := [index for index, code in enumerate(codes) if code and index not in may_fail]:
                # A rank that dies takes its peers along within moments; whoever was found dead first is to blame.
                reason = " and ".join(f"rank {index} {_ending(codes[index])}" for index in bad)
                raise job.failed(bad, f"{reason} after {time.monotonic() - started:.1f} s")
            if not running:
                job.read_rest()
                return job.outputs()
            now = time.monotonic()
            silent = [index for index in running if now - job.processes[index].last_line_s > silence_s]
            if silent:
                raise job.failed(silent, f"{_ranks(silent)} printed no line for {silence_s:g} s", stacks=True)
            if now - started > timeout_s:
                raise job.failed(running, f"{_ranks(running)} did not end within {timeout_s:g} s", stacks=True)


@dataclasses.dataclass
class _Process:
    """A rank as its launcher sees it."""

    popen: subprocess.Popen[bytes]
    last_line_s: float
    lines: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=KEPT_LINES))
    unfinished_line: bytes = b""
    at_end: bool = False

    def exit_code(self) -> int | None:
        """None while it runs, minus the number of a signal. Leaves the zombie: its id is the process group's name."""
        ended = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def read(self) -> bool:
        """Takes what lies in the pipe, at most a pipe's worth; False where there is nothing (left)."""
        assert self.popen.stdout
        try:
            data = os.read(self.popen.stdout.fileno(), PIPE_BYTES)
        except BlockingIOError:
            return False
        *whole, rest = (self.unfinished_line + data).split(b"\n")
        if len(rest) > LINE_BYTES or (not data and rest):
            whole, rest = [*whole, rest], b""
        self.lines.extend(line[:LINE_BYTES].decode(errors="replace") for line in whole)
        self.unfinished_line = rest
        if whole:
            self.last_line_s = time.monotonic()
        self.at_end = not data
        return bool(data)


class _Job:
    """All processes of a job. Leaving the context kills and reaps them."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self.processes:
            process.popen.wait()
            assert process.popen.stdout
            process.popen.stdout.close()
        self.selector.close()

    def start(self, command: list[str], variables: Mapping[str, str]) -> None:
        python = [sys.executable, "-u", "-X", "faulthandler", "-W", "error", "-m", "tests.multiprocess.rank"]
        popen = subprocess.Popen(
            [*python, *command],
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert popen.stdout
        process = _Process(popen, time.monotonic())
        self.processes.append(process)
        os.set_blocking(popen.stdout.fileno(), False)
        self.selector.register(popen.stdout, selectors.EVENT_READ, process)

    def read_available(self, wait_s: float) -> None:
        for key, _ in self.selector.select(wait_s):
            key.data.read()
            if key.data.at_end:
                self.selector.unregister(key.fileobj)

    def read_rest(self) -> None:
        for process in self.processes:
            # Bounded: a process that left the group could still hold the pipe and print.
            for _ in range(16):
                if process.at_end or not process.read():
                    break

    def print_stacks(self) -> None:
        """Ends the processes by SIGABRT, on which Python prints the stacks of all its threads."""
        for process in self.processes:
            if process.exit_code() is None:
                process.popen.send_signal(signal.SIGABRT)
        deadline = time.monotonic() + STACKS_S
        while time.monotonic() < deadline and any(process.exit_code() is None for process in self.processes):
            self.read_available(POLL_S)

    def kill(self) -> None:
        """Kills the process groups, so also what a rank has started. Each group exists until its rank is reaped."""
        for process in self.processes:
            os.killpg(process.popen.pid, signal.SIGKILL)

    def failed(self, ranks: Sequence[int], reason: str, *, stacks: bool = False) -> LaunchError:
        endings = [_ending(process.exit_code()) for process in self.processes]
        if stacks:
            self.print_stacks()
        self.kill()
        self.read_rest()
        return LaunchError(ranks, f"{reason} ({len(self.processes)} ranks)", self.outputs(), endings)

    def outputs(self) -> tuple[str, ...]:
        return tuple("".join(f"{line}\n" for line in process.lines) for process in self.processes)


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _ending(code: int | None) -> str:
    if code is None:
        return "was running and was then ended by the launcher"
    if code >= 0:
        return f"exited with status {code}"
    return f"was ended by {signal.Signals(-code).name}"


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that no other program gets while the job runs, but a server that shares ports does: the one of JAX."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Below the ports that Linux gives to outgoing connections: one of those lay on JAX's, which listens at all
        # addresses. Too many that are taken end in port 0, where nothing can join.
        for port in random.sample(range(15_000, 32_000), 100):
            with suppress(OSError):
                reserved.bind(("", port))
                break
        yield reserved.getsockname()[1]
