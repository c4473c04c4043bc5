"""Ranks without JAX. Rank 1 does what the first argument names; mostly the others print until they are killed."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.multiprocess.rank import step, this_rank


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def print_until_killed() -> None:
    while True:
        step("still here")
        time.sleep(0.05)


def start_child() -> None:
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    step(f"child {child}")


def main() -> None:
    rank, (what, *arguments) = this_rank(), sys.argv[1:]
    step(f"pid {os.getpid()}")
    match what:
        case "succeed":
            step(f"rank {rank.index} of {rank.processes} at {rank.coordinator}, {arguments}, gpus {rank.gpus}")
            print("stderr too", file=sys.stderr, end="")
            return
        case "leave a child":
            return start_child()
        case "all":  # a file each, then silence
            Path(arguments[0], f"{os.getpid()}").touch()
            return sleep_for_ever()
        case _ if rank.index != 1:
            return print_until_killed()
        case "exit":
            start_child()
            sys.exit(int(arguments[0]))
        case "raise":
            raise ValueError("expected 8 devices")
        case "signal":
            os.kill(os.getpid(), signal.Signals[arguments[0]])
        case "sleep":
            sleep_for_ever()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "ignore signals":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT):
                signal.signal(number, signal.SIG_IGN)
            sleep_for_ever()
        case "flood":
            while True:
                print("x" * 1000)
        case "flood without lines":
            while True:
                print("x" * 1000, end="")
        case _:
            raise ValueError(f"misbehave: {what!r} is none of the cases")


if __name__ == "__main__":
    main()
