"""What tools/link_kernels.py makes of the commands of a build; they are written here, so nothing is compiled."""

from pathlib import Path

import pytest

from tests.tool_modules import load_tool

link_kernels = load_tool("link_kernels")

BEFORE, TREE = Path("/before/ffi"), Path("/after/ffi")


def compiles(source: str) -> str:
    target = f"CMakeFiles/_cuda.dir/{source}.o"
    return (
        "sh /before/tools/keep_output.sh nvcc -I/before/ffi -I/venv/build/generated -O3 "
        f"-MD -MT {target} -MF {target}.d -x cu -c /before/ffi/{source} -o {target}"
    )


SOURCES = (
    "bindings.cc",
    "cuda/host/launch.cu",
    "cuda/host/variants/forward_bf16.cu",
    "cuda/host/variants/forward_f16.cu",
)
LINK = (
    ": && g++ -shared -o _cuda.so " + " ".join(f"CMakeFiles/_cuda.dir/{source}.o" for source in SOURCES) + " -ldl && :"
)


@pytest.fixture
def commands():
    return link_kernels.Commands.of([*map(compiles, SOURCES), LINK])


def test_sources_are_named_as_in_the_folder_of_the_cuda_part(commands):
    assert commands.chosen(["variants/*", "launch.cu"]) == [SOURCES[2], SOURCES[3], SOURCES[1]]


def test_a_name_of_no_source_is_an_error_that_lists_them(commands):
    with pytest.raises(SystemExit, match=r"backward.*names none of .*forward_bf16"):
        commands.chosen(["variants/backward*"])


def test_a_source_is_compiled_in_the_other_checkout_with_its_headers_and_options(commands):
    command = commands.compile_from(SOURCES[2], BEFORE, TREE, Path("/tmp/0.o"), ["-DNAME=1"])
    assert command == (
        "sh /before/tools/keep_output.sh nvcc -I/after/ffi -I/venv/build/generated -O3 -x cu "
        "-c /after/ffi/cuda/host/variants/forward_bf16.cu -o /tmp/0.o -DNAME=1"
    )


def test_what_was_not_compiled_is_linked_as_it_was(commands):
    linked = commands.link_with({SOURCES[1]: Path("/tmp/0.o")}, Path("/tmp/_cuda.new.so"))
    kept = " ".join(f"CMakeFiles/_cuda.dir/{source}.o" for source in SOURCES[2:])
    assert (
        linked == f": && g++ -shared -o /tmp/_cuda.new.so CMakeFiles/_cuda.dir/bindings.cc.o /tmp/0.o {kept} -ldl && :"
    )


def test_an_environment_without_the_cuda_part_is_an_error_that_says_how_to_make_one():
    with pytest.raises(SystemExit, match="JAXMOE_CUDA=on make environment"):
        link_kernels.Commands.of([""])


def test_files_that_differ_or_that_one_of_both_lacks_are_named(tmp_path):
    for folder, files in ("a", {"same.h": "1", "other.h": "1", "old.h": "1"}), ("b", {"same.h": "1", "other.h": "2"}):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    assert list(link_kernels.differences(tmp_path / "a", tmp_path / "b")) == ["old.h", "other.h"]
