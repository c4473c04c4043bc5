"""Compiles C++ programs of the tests under ThreadSanitizer."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.host import programs


def build(program: Path, sources: Sequence[str], includes: Sequence[str] = ()) -> Path:
    """Returns the program; skips the test where this machine has no compiler for it.

    Args:
      program: where it goes.
      sources: files, from the project's root.
      includes: folders beside `ffi`.
    """
    built = programs.compiled(program, sources, ["-g", "-fsanitize=thread", *(f"-I{folder}" for folder in includes)])
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("needs the library of ThreadSanitizer (libtsan)")
    assert built.returncode == 0, built.stderr
    return program
