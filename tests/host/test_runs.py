"""What the devices of a process tell each other in a run, so that none waits for another that has failed."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]


def test_devices_of_a_process_share_errors_and_leave_initialize_together_without_a_data_race(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    program = tmp_path / "runs_test"
    flags = ("-std=c++20", "-O1", "-g", "-fsanitize=thread", f"-I{ROOT / 'ffi'}", f"-I{jax.ffi.include_dir()}")
    built = subprocess.run(
        [compiler, *flags, ROOT / "tests/host/runs_test.cc", "-o", program], capture_output=True, text=True, check=False
    )
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("needs the library of ThreadSanitizer (libtsan)")
    assert built.returncode == 0, built.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    assert result.stderr == ""
