"""What the devices of a process tell each other in a run, so that none waits for another that has failed."""

import subprocess

import jax

from tests.host import thread_sanitizer


def test_devices_of_a_process_share_errors_and_leave_initialize_together_without_a_data_race(tmp_path):
    program = thread_sanitizer.build(tmp_path / "runs_test", ["tests/host/runs_test.cc"], [jax.ffi.include_dir()])
    result = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    assert result.stderr == ""
