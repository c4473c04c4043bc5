"""What the CUDA part refuses of calls that do not come from jaxmoe, asked of its own code without a GPU."""

import subprocess

import jax
import pytest

from tests.host import thread_sanitizer

VERSION = """
namespace jaxmoe::build_config {
inline constexpr char kVersion[] = "of the test";
}
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, str]:
    """What is said of each call of the program; nothing of those that kernels can be given."""
    folder = tmp_path_factory.mktemp("call_checks")
    (folder / "common").mkdir()
    (folder / "common" / "build_config.h").write_text(VERSION)
    includes = [jax.ffi.include_dir(), str(folder)]
    program = thread_sanitizer.build(folder / "call_checks_test", ["tests/host/call_checks_test.cc"], includes)
    lines = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("call", ["bfloat16", "float16 not rounded", "dispatch"])
def test_a_call_that_has_a_kernel_passes(told, call):
    assert told[call] == ""


def test_tokens_in_float16_rounded_to_8_bits_beside_weights_in_4_are_refused_for_want_of_a_kernel(told):
    assert "weights in 4 bits and x in float16; beside rows in 8 bits it must be bfloat16" in told["float16"]
    assert "weight_slots=0, weights in 4 bits and x in float16" in told["float16 in registers"]


@pytest.mark.parametrize(("call", "given"), [("tokens", "0 tokens x 2 slots"), ("slots", "64 tokens x 0 slots")])
def test_a_dispatch_without_ids_to_sort_is_refused_which_would_run_as_one_with_known_routes(told, call, given):
    assert f"jaxmoe: {given}; a dispatch that sorts needs one at least." in told[f"dispatch of no {call}"]


@pytest.mark.parametrize("call", ["float place of a layer", "wide place of a dispatch"])
def test_a_place_of_another_type_is_refused_which_would_be_read_as_another_rank(told, call):
    assert "place" in told[call]
    assert "int32" in told[call]
