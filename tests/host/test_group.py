"""How the ranks of a call find each other on a CPU, whatever other runs there are."""

import subprocess

from tests.host import thread_sanitizer


def test_a_run_under_way_is_not_forgotten(tmp_path):
    program = thread_sanitizer.build(tmp_path / "group_test", ["tests/host/group_test.cc", "ffi/host/group.cc"])
    result = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    assert result.stderr == ""
