"""What tools/leave_out.py changes of the kernel: nothing is compiled here."""

import shutil

import pytest

from tests.tool_modules import load_tool

leave_out = load_tool("leave_out")


@pytest.mark.parametrize("name", leave_out.BUILT)
def test_every_place_that_is_changed_is_there_and_once(name, tmp_path):
    shutil.copytree(leave_out.ROOT / "ffi", tmp_path / "ffi")
    changes = [change for part in name.split("+") for change in leave_out.LEFT_OUT[part]]
    for change in changes:
        change.apply(tmp_path / "ffi")
    changed = {change.file for change in changes}
    for file in changed:
        after = (tmp_path / "ffi/cuda/kernel" / file).read_text()
        assert after != (leave_out.ROOT / "ffi/cuda/kernel" / file).read_text()
        assert "{later}" not in after


def test_a_place_that_is_gone_is_an_error_that_names_the_file(tmp_path):
    change = leave_out.LEFT_OUT["sums"][0]
    file = tmp_path / "ffi/cuda/kernel" / change.file
    file.parent.mkdir(parents=True)
    file.write_text("other code")
    with pytest.raises(SystemExit, match=r"token_sum\.cuh has no longer one place with"):
        change.apply(tmp_path / "ffi")
