"""The machine code of the fused kernel: no spills, no serialised tensor-core products, and the ones it should have."""

import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import jaxmoe.machine as machine

ROOT = Path(__file__).parents[2]
VARIANTS = ROOT / "ffi/cuda/host/variants"
# Where tools/environment.sh has the extension built.
OBJECTS = Path(sys.prefix) / "build/CMakeFiles/_cuda.dir/cuda/host/variants"
TIMELINE = "-DJAXMOE_TIMELINE"
WITHOUT = "without a timeline"
# What that changes in BF16, and F16 has the same registers. Those that decode experts ahead record nothing: variant.cuh
# gives them no timeline, whatever the flag says. Fast sums in 8 bits take fewer registers than promoted ones.
RECORDING = (
    *("forward_bf16", "forward_e4m3_bf16", "forward_packed_bf16", "forward_repacked_bf16", "forward_packed_e4m3_bf16"),
    *("forward_sums_bf16", "backward_bf16", "backward_decoded_bf16"),
)
# It has no register to spare: looked at in every run of the tests, as are all without a timeline.
TIGHTEST = "forward_packed_e4m3_bf16"


class Code(NamedTuple):
    """Kernels in machine code."""

    files: list[Path]
    said: str  # by the compiler
    tool: str  # cuobjdump

    def dump(self, what: str) -> str:
        command = [self.tool, what]
        return "".join(
            subprocess.run([*command, each], capture_output=True, text=True, check=True).stdout for each in self.files
        )


def built_objects() -> list[Path]:
    """The objects of this environment's extension; none where it was built another way or the sources are newer."""
    objects = [OBJECTS / f"{source.name}.o" for source in VARIANTS.glob("*.cu")]
    needed = [*objects, *(said_of(each) for each in objects)]
    if not all(path.exists() for path in needed):
        return []
    newest = max(path.stat().st_mtime for path in (ROOT / "ffi").rglob("*") if path.is_file())
    return objects if min(path.stat().st_mtime for path in needed) >= newest else []


def said_of(built: Path) -> Path:
    """What the compiler said when it made that: tools/keep_output.sh."""
    return built.with_name(f"{built.name}.said")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=[pytest.mark.all_cases] if each in (WITHOUT, TIGHTEST) else [])
        for each in (WITHOUT, *RECORDING)
    ],
)
def recording(request) -> str | None:
    """The variant that is looked at with a timeline; `None`: all, without one. One takes up to a minute to compile."""
    return None if request.param == WITHOUT else request.param


@pytest.fixture(scope="module")
def code(tmp_path_factory, recording) -> Code:
    """The kernels of the extension that is installed, compiled again where they are not as they are asked for here."""
    has_timeline = recording is not None
    built = machine.build_info()
    if built.nvcc is None or built.nvcc_flags is None:
        pytest.skip(f"the CUDA part was not built: {built.cuda_missing}")
    tool = shutil.which("cuobjdump", path=str(Path(built.nvcc).parent)) or shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("needs cuobjdump (nvidia-cuda-cuobjdump, or a CUDA toolkit)")
    flags = shlex.split(built.nvcc_flags)
    if has_timeline == (TIMELINE in flags) and (objects := built_objects()):
        wanted = [each for each in objects if recording in (None, each.name.split(".")[0])]
        return Code(wanted, "".join(said_of(each).read_text() for each in wanted), tool)
    flags = [flag for flag in flags if flag != TIMELINE] + [TIMELINE] * has_timeline
    flags += ["-I", str(ROOT / "ffi"), "-isystem", jax.ffi.include_dir()]
    folder = tmp_path_factory.mktemp("kernels")
    sources = [source for source in VARIANTS.glob("*.cu") if recording in (None, source.stem)]
    assert sources, f"{VARIANTS} has no {recording}"
    cubins = {folder / f"{source.stem}.cubin": source for source in sources}

    def compile_one(cubin: Path) -> str:
        command = [str(built.nvcc), *flags, "-cubin", str(cubins[cubin]), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    with ThreadPoolExecutor(2) as compilers:
        return Code(list(cubins), "".join(compilers.map(compile_one, cubins)), tool)


@pytest.fixture(scope="module")
def resources(code) -> dict[str, dict[str, int]]:
    """Of every kernel by its name: registers, bytes of its stack frame and of local memory."""
    told = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", code.dump("-res-usage"))
    assert len(told) >= len(code.files)
    return {name: dict(zip(("registers", "stack", "local"), map(int, each), strict=True)) for name, *each in told}


def test_no_kernel_spills_registers_or_uses_local_memory(resources):
    """What is spilled lies in the stack frame. A build with spills fails by itself, as long as it has these flags."""
    assert all(kernel["stack"] == kernel["local"] == 0 for kernel in resources.values())
    assert "--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error" in str(machine.build_info().nvcc_flags)


def test_every_kernel_of_a_layer_has_the_registers_of_384_threads_and_no_other_has_more(resources):
    assert {kernel["registers"] for name, kernel in resources.items() if not exchanges(name)} == {168}
    assert max(kernel["registers"] for kernel in resources.values()) == 168


def test_the_assembler_serialises_no_tensor_core_products(code):
    """ptxas says so in a remark (C7515) that no flag turns into an error; tensor cores then idle between products."""
    assert "serialized" not in code.said
    assert "C7515" not in code.said
    assert "C7508" not in code.said  # setmaxnreg ignored


@pytest.fixture(scope="module")
def kernels(code) -> list[str]:
    """The machine code of every kernel."""
    return code.dump("-sass").split("Function : ")[1:]


def named(kernel: str) -> str:
    """The function whose code it is."""
    return kernel.splitlines()[0]


def in_8_bits(kernel: str) -> bool:
    return "E4M3" in named(kernel) and not (in_registers(kernel) or exchanges(kernel))


def has_fast_sums(kernel: str) -> bool:
    return "AccumulationE1" in named(kernel)


def decodes(kernel: str) -> bool:
    return "Decoded" in named(kernel)


def in_registers(kernel: str) -> bool:
    return re.search("Packed|Repacked", named(kernel)) is not None


def exchanges(kernel: str) -> bool:
    return "Exchange" in named(kernel)


def test_products_are_those_of_hopper_alone(kernels, recording):
    wide = [kernel for kernel in kernels if not (in_8_bits(kernel) or in_registers(kernel) or exchanges(kernel))]
    # Forward and backward, wide and decoded weights, sums at experts, and both halves of a layer; BF16 and F16.
    of_one = 0 if re.search("e4m3|packed", recording or "") else 1
    assert len(wide) == (14 if recording is None else of_one)
    for kernel in wide:
        products = re.findall(r"\bHGMMA\.(\w+)", kernel)
        # Four to a stage, for each way round that the kernel takes its factors.
        ways = 1 if "moe_backward" not in named(kernel) else 2 if decodes(kernel) else 3
        assert len(products) >= 4 * ways
        assert set(products) == {"64x256x16"}
        assert not re.search(r"\b(HMMA|QGMMA|LDL|STL)\b", kernel)


@pytest.mark.parametrize("recording", [WITHOUT], indirect=True)
def test_products_in_8_bits_are_halves_that_begin_at_zero_every_128_of_the_depth(kernels, recording):
    narrow = [kernel for kernel in kernels if in_8_bits(kernel) and not has_fast_sums(kernel)]
    # Forward, with 16-bit tokens and answers of both types; of BF16 also with sums at experts, and with weights that
    # are decoded ahead.
    assert [decodes(kernel) for kernel in sorted(narrow, key=decodes)] == [False, False, False, True]
    assert sum("ForwardWithSums" in named(kernel) for kernel in narrow) == 1
    for kernel in narrow:
        products = re.findall(r"\bQGMMA\.(64x\S+) (\w+), gdesc\[\w+\], (\w+)", kernel)
        assert {kind for kind, *_ in products} == {"64x128x32.F32.E4M3.E4M3"}
        # Of every four, which are 128 of the depth, the first adds to nothing, the others to what they write.
        from_zero = [added == "RZ" for _, _, added in products]
        assert from_zero == [True, False, False, False] * (len(products) // 4)
        assert all(written == added for _, written, added in products if added != "RZ")
        assert not re.search(r"\b(HMMA|HGMMA|LDL|STL)\b", kernel)


@pytest.mark.parametrize("recording", [WITHOUT], indirect=True)
def test_fast_products_in_8_bits_are_whole_and_add_to_their_sums_all_along_the_depth(kernels, recording):
    fast = [kernel for kernel in kernels if has_fast_sums(kernel)]
    assert len(fast) == 2
    for kernel in fast:
        products = re.findall(r"\bQGMMA\.(64x\S+) (\w+), gdesc\[\w+\], (\w+)", kernel)
        assert {kind for kind, *_ in products} == {"64x256x32.F32.E4M3.E4M3"}
        assert len(products) >= 4
        assert all(written == added for _, written, added in products)
        assert not re.search(r"\b(HMMA|HGMMA|LDL|STL)\b", kernel)


@pytest.mark.parametrize("recording", [WITHOUT], indirect=True)
def test_products_of_weights_decoded_in_registers_are_those_of_a_warp_or_of_a_warpgroup_from_registers(
    kernels, recording
):
    found = [kernel for kernel in kernels if in_registers(kernel) and "E4M3" not in named(kernel)]
    assert sorted("Repacked" in named(kernel) for kernel in found) == [False, True]
    for kernel in found:
        assert set(re.findall(r"\bHMMA\.(\S+)", kernel)) == {"16816.F32.BF16"}
        # Of more than 64 rows.
        products = re.findall(r"\bHGMMA\.(64x\S+) (R\d+), R\d+, gdesc\[\w+\], (\w+)", kernel)
        assert len(products) == len(re.findall(r"\bHGMMA\b", kernel)) > 0
        assert {kind for kind, *_ in products} == {"64x128x16.F32.BF16"}
        assert all(written == added for _, written, added in products)
        assert not re.search(r"\b(QGMMA|LDL|STL)\b", kernel)


@pytest.mark.parametrize("recording", [WITHOUT], indirect=True)
def test_beside_rows_in_8_bits_they_are_those_of_a_warpgroup_from_registers_a_group_or_a_step_at_a_time(
    kernels, recording
):
    (kernel,) = (kernel for kernel in kernels if in_registers(kernel) and "E4M3" in named(kernel))
    products = re.findall(r"\bQGMMA\.64x(\d+)x32\.F32\.E4M3\.E4M3 (R\d+), R\d+, gdesc\[\w+\], (\w+)", kernel)
    assert len(products) == len(re.findall(r"\bQGMMA\b", kernel))
    assert {int(rows) for rows, *_ in products} == {8, 16, 32, 40, 48, 64}
    assert {int(rows) for rows, _, added in products if added == "RZ"} == {8, 16, 32, 40, 48, 64}
    assert {int(rows) for rows, _, added in products if added != "RZ"} == {32, 40, 48, 64}
    assert all(written == added for _, written, added in products if added != "RZ")
    # Those of warps are for groups far smaller than others.
    assert not re.search(r"\b(HGMMA|LDL|STL)\b", kernel)


@pytest.mark.parametrize("recording", [WITHOUT], indirect=True)
def test_dispatch_and_combine_on_their_own_multiply_nothing(kernels, recording):
    own = [kernel for kernel in kernels if exchanges(kernel)]
    # Both for BF16 and F16, and a dispatch of each that rounds to 8 bits.
    assert [sum(name in named(kernel) for kernel in own) for name in ("moe_dispatch", "moe_combine")] == [4, 2]
    for kernel in own:
        assert not re.search(r"\b(HMMA|HGMMA|QGMMA|LDL|STL)\b", kernel)


def test_only_a_kernel_with_a_timeline_reads_the_clock(kernels, recording):
    """Without one nothing of it is left; the timer of the bounded waits is another register."""
    for kernel in kernels:
        assert bool(re.search(r"\bSR_CLOCK", kernel)) == (recording is not None)
        assert "SR_GLOBALTIMER" in kernel
