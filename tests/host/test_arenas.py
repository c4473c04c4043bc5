"""The arenas of a process and what they share of a GPU, beside made-up GPUs: no real one is needed, nor a kernel."""

import re
import subprocess
from pathlib import Path

import jax
import pytest

from jaxmoe import machine
from tests.host import programs, thread_sanitizer

SOURCE = "tests/host/arenas_test.cc"
SCENARIOS = re.findall(r"^ +SCENARIO\((\w+)\)", (programs.ROOT / SOURCE).read_text(), re.M)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    built = machine.build_info()
    if built.nvcc is None:
        pytest.skip(f"needs CUDA's headers: {built.cuda_missing}")
    headers = Path(built.nvcc).parents[1] / "include"
    if not (headers / "cuda_runtime.h").exists():
        pytest.skip(f"needs CUDA's headers: {headers} has none")
    where = tmp_path_factory.mktemp("arenas") / "arenas_test"
    return thread_sanitizer.build(where, [SOURCE], [jax.ffi.include_dir(), str(headers)])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_arenas_of_made_up_gpus(program, scenario):
    result = subprocess.run([program, scenario], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    assert result.stderr == ""
