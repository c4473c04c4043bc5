"""tools/compare_builds.py: what it says of times and outputs, and a build of the host executor beside its copy."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxmoe import native
from tests.tool_modules import TOOLS, load_tool

compare_builds = load_tool("compare_builds")

OUTPUT = np.array([3.0, 4.0], np.float32)


def measured(*microseconds: float, output: np.ndarray = OUTPUT, error: float | None = 1e-3):
    return compare_builds.Measured(microseconds, output, error, allowed=2e-3)


def test_a_build_has_the_median_of_its_rounds_their_range_and_the_ratio_to_the_first():
    rounds = [{"before": measured(99, 100, 900), "after": measured(80)} for _ in range(2)]
    rounds.append({"before": measured(110), "after": measured(50)})
    title, before, after = compare_builds.table("bf16:8,128,128,4,2", rounds)
    assert title == "bf16:8,128,128,4,2, 3 rounds"
    assert " ".join(before.split()) == "before 100.0 us (100.0 to 110.0) 1.000 x error 1.0e-03, same bits"
    assert " ".join(after.split()) == "after 80.0 us (50.0 to 80.0) 0.800 x error 1.0e-03, same bits"


@pytest.mark.parametrize(
    ("found", "text", "right"),
    [
        (measured(1), "error 1.0e-03, same bits", True),
        (measured(1, error=None), "not checked, same bits", True),
        (measured(1, output=np.array([3.0, 4.5], np.float32)), "error 1.0e-03, differs by 1.0e-01", True),
        (measured(1, error=3e-3), "error 3.0e-03, above 2.0e-03", False),
        (measured(1, error=np.nan), "error nan, above 2.0e-03", False),
        (measured(1, output=np.array([3.0, np.nan], np.float32)), "not all of it are numbers", False),
    ],
)
def test_an_output_is_right_or_the_line_says_what_is_wrong(found, text: str, right: bool):
    assert compare_builds.describe(found, measured(1)) == text
    assert found.right == right


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "compare_builds.py"), *arguments, "--case=bf16:8,128,128,4,2", "--ep=1"]
    options = ["--rounds=1", "--blocks=1", "--seconds=0.01"]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_copy_of_a_build_returns_its_bits_and_both_are_checked(tmp_path):
    file = native.always_built().__file__
    assert file is not None
    copy = shutil.copy(file, tmp_path / "_native.copy.so")
    ended = run_tool("installed", f"copy={copy}")
    assert ended.returncode == 0, ended.stderr
    of_processes, lines = ended.stdout.splitlines()[:2], ended.stdout.splitlines()[2:]
    assert [line.split()[:3] for line in of_processes] == [["round", "1", "installed"], ["round", "1", "copy"]]
    assert [line.split()[0] for line in lines[1:]] == ["installed", "copy"]
    assert all("error" in line and line.endswith("same bits") for line in lines[1:])


def test_a_file_that_is_no_build_has_no_figures(tmp_path):
    text = tmp_path / "_native.text.so"
    text.write_text("no module")
    ended = run_tool(f"text={text}")
    assert ended.returncode == 1
    assert ended.stdout.startswith("text failed: ImportError")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--case=bf61:8,128,128,4,2"], "--case=bf61:8,128,128,4,2: --dtype=bf61 is not one of bf16, f16, fp8-block,"),
        (["--case=8,128,128,4,2"], "--case=8,128,128,4,2 needs a --dtype, a colon and five numbers"),
        (["--case=bf16:128,128,4,2"], "--case=bf16:128,128,4,2 needs a --dtype, a colon and five numbers"),
        (["--case=bf16:8,128,128,4,5"], "top_k=5 is more than the 4 experts"),
        (["--case=bf16:8,128,128,4,2", "--rounds=0"], "--rounds=0: at least one is measured"),
        (["--case=bf16:8,128,128,4,2", "--blocks=0"], "--blocks=0: at least one is measured"),
    ],
)
def test_what_cannot_be_measured_is_said_before_any_round(wrong: list[str], said: str, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_builds.py", "installed", *wrong])
    monkeypatch.setattr(compare_builds, "run_apart", lambda *_: pytest.fail("a round has begun"))
    with pytest.raises(SystemExit, match="2"):
        compare_builds.main()
    assert said in " ".join(capsys.readouterr().err.split())
