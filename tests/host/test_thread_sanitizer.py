"""The host executor under ThreadSanitizer: its signals order all that is shared, and a wait left out is found."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.host import thread_sanitizer

SOURCES = ("tests/host/executor_race.cc", "ffi/host/executor.cc", "ffi/host/group.cc", "ffi/host/signals.cc")
RACES_FOUND = 66  # ThreadSanitizer's exit code

# The waits of each pass; `plan` waits for nothing here, since one sorter sorts so few slots.
SHARED_SITES = ("publish", "walk", "dispatch", "gate_up", "announce", "combine")
SITES = {
    "forward": (*SHARED_SITES, "down"),
    "backward": (*SHARED_SITES, "h_gradient", "token_gradient", "weight_gradient"),
    "sums_at_experts": ("publish", "down", "announce", "combine"),
    "eight_bit": (*SHARED_SITES, "down"),
    "decoded": ("decode", "gate_up", "dispatch", "token_gradient"),
    "decoded_to_8_bits": ("decode", "gate_up", "dispatch", "down"),
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory) -> Path:
    return thread_sanitizer.build(tmp_path_factory.mktemp("race") / "executor_race", SOURCES)


def run(program: Path, *arguments: str, options: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TSAN_OPTIONS": options}
    command = [program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "passes", ["forward", "backward", "both", "sums_at_experts", "eight_bit", "decoded", "decoded_to_8_bits"]
)
def test_layers_and_gradients_back_to_back_have_no_data_race(executor, passes):
    result = run(executor, passes)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
    assert result.stderr == "", "no wait is given up"


@pytest.mark.parametrize(("passes", "site"), [(passes, site) for passes, sites in SITES.items() for site in sites])
def test_a_wait_that_one_rank_leaves_out_is_found(executor, passes, site):
    result = run(executor, passes, site, options="halt_on_error=1")  # at the first race; all of them take seconds
    assert result.returncode == RACES_FOUND
    assert "WARNING: ThreadSanitizer: data race" in result.stderr
