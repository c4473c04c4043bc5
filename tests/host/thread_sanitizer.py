"""Compiles C++ programs of the tests under ThreadSanitizer."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(program: Path, sources: Sequence[str], includes: Sequence[str] = ()) -> Path:
    """Returns the program; skips the test where this machine has no compiler for it.

    Args:
      program: where it goes.
      sources: files, from the project's root.
      includes: folders beside `ffi`.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, to compile a program under ThreadSanitizer")
    flags = ("-std=c++20", "-O1", "-g", "-fsanitize=thread", *(f"-I{folder}" for folder in (ROOT / "ffi", *includes)))
    command = [compiler, *flags, *(ROOT / source for source in sources), "-o", program]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("needs the library of ThreadSanitizer (libtsan)")
    assert built.returncode == 0, built.stderr
    return program
