"""Compiles C++ programs of the tests."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compiled(program: Path, sources: Sequence[str], options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Compiles a program; skips the test where this machine has no compiler for it.

    Args:
      program: where it goes.
      sources: files, from the project's root.
      options: of the compiler, beside the folder `ffi` of includes.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, to compile a program")
    command = [compiler, "-std=c++20", "-O1", *options, f"-I{ROOT / 'ffi'}", *(ROOT / source for source in sources)]
    return subprocess.run([*command, "-o", program], capture_output=True, text=True, check=False)


def build(program: Path, sources: Sequence[str], options: Sequence[str] = ()) -> Path:
    """Returns the program."""
    built = compiled(program, sources, options)
    assert built.returncode == 0, built.stderr
    return program
