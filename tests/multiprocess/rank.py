"""What a rank knows and does that `launcher.launch` has started: `python -m tests.multiprocess.rank <program> ...`.

Programs call `join()` before their first array and `step()` whenever they get somewhere.
"""

import ctypes
import dataclasses
import json
import os
import resource
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

VARIABLE = "JAXMOE_TEST_RANK"
# A text that Linux draws when a host starts. Its readers, XLA, NCCL and jaxmoe, tell hosts apart by it.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Rank:
    """Place of this process in its job.

    Args:
      index: of this rank.
      processes: number of ranks.
      coordinator: address at which rank 0 waits for the others.
      devices: of this rank.
      gpus: of this machine that this rank takes; `None` on CPU.
      launcher: process id.
    """

    index: int
    processes: int
    coordinator: str
    devices: int
    gpus: tuple[int, ...] | None
    launcher: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Rank":
        fields = json.loads(text)
        return cls(**fields | {"gpus": None if fields["gpus"] is None else tuple(fields["gpus"])})


def this_rank() -> Rank:
    """Returns the place that the launcher gave this process."""
    return Rank.from_json(os.environ[VARIABLE])


def step(text: str) -> None:
    """Prints a line, which tells the launcher that this rank is alive."""
    print(text, flush=True)


def join() -> Rank:
    """Makes this process a rank of the JAX job, with its devices; call it before the first use of JAX."""
    import jax

    from jaxmoe.testing import use_virtual_devices

    rank = this_rank()
    if rank.gpus is None:
        use_virtual_devices(rank.devices)
    jax.distributed.initialize(
        rank.coordinator, rank.processes, rank.index, local_device_ids=None if rank.gpus is None else list(rank.gpus)
    )
    assert (jax.process_index(), jax.local_device_count()) == (rank.index, rank.devices)
    step(f"pid {os.getpid()}")
    step(f"joined with {rank.devices} of {jax.device_count()} {jax.default_backend()} devices")
    return rank


def look_like_host(number: int) -> str:
    """Makes this process one of another host for whoever reads `BOOT_ID`; call it before `join`.

    Returns what keeps it from that, empty where nothing does: a container may allow no namespaces.
    """
    new_mounts, new_users, bind, private_below = 0x20000, 0x10000000, 0x1000, 0x44000  # of <sched.h> and <sys/mount.h>
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.NamedTemporaryFile("w") as other:
        other.write(f"{number:08x}-0000-4000-8000-000000000000\n")
        other.flush()
        for call, arguments in (
            (libc.unshare, (new_mounts if os.geteuid() == 0 else new_mounts | new_users,)),
            (libc.mount, (b"none", b"/", None, private_below, None)),
            (libc.mount, (other.name.encode(), os.fsencode(BOOT_ID), None, bind, None)),
        ):
            if call(*arguments):
                return f"{call.__name__}: {os.strerror(ctypes.get_errno())}"
    return ""


def die_with(launcher: int) -> None:
    """Asks Linux to kill this process when the launcher is gone, even if that was killed itself."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != launcher:  # it went before we asked
        sys.exit("the launcher has gone")


def main() -> None:
    die_with(this_rank().launcher)
    # A hanging rank is aborted for its stacks; nobody wants its memory on disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    del sys.argv[0]
    program = sys.argv[0]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if not stop.code:
            raise
        status = stop.code if isinstance(stop.code, int) else 1
        _leave(status, "" if stop.code is status else f"{stop.code}\n")
    except BaseException:
        _leave(1, traceback.format_exc())


def _leave(status: int, message: str) -> NoReturn:
    """Exits without JAX's goodbye, which would wait for ranks that wait for this one in a collective."""
    sys.stderr.write(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
