"""The machine code of the fused kernel: no spills, no serialised tensor-core products, and the ones it should have."""

import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

import jaxmoe.machine as machine

ROOT = Path(__file__).parents[2]
VARIANTS = ROOT / "ffi/cuda/host/variants"


TIMELINE = "-DJAXMOE_TIMELINE"


@pytest.fixture(scope="module", params=["without a timeline", "with a timeline"])
def has_timeline(request) -> bool:
    return request.param == "with a timeline"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, has_timeline) -> tuple[str, list[Path]]:
    """What ptxas says about the kernels, and their code, a file each."""
    built = machine.build_info()
    if built.nvcc is None or built.nvcc_flags is None:
        pytest.skip(f"the CUDA part was not built: {built.cuda_missing}")
    flags = [flag for flag in shlex.split(built.nvcc_flags) if flag != TIMELINE] + [TIMELINE] * has_timeline
    flags += ["-Xptxas=-v", "-I", str(ROOT / "ffi"), "-isystem", jax.ffi.include_dir()]
    folder = tmp_path_factory.mktemp("kernels")
    cubins = {folder / f"{source.stem}.cubin": source for source in VARIANTS.glob("*.cu")}
    if has_timeline:  # which has the same registers in F16
        cubins = {cubin: source for cubin, source in cubins.items() if "bf16" in source.stem}

    def compile_one(cubin: Path) -> str:
        command = [str(built.nvcc), *flags, "-cubin", str(cubins[cubin]), "-o", str(cubin)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    with ThreadPoolExecutor(2) as compilers:
        return "".join(compilers.map(compile_one, cubins)), list(cubins)


def test_no_kernel_spills_registers_or_uses_local_memory(compiled):
    said, _ = compiled
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert frames
    assert all(numbers == ("0", "0", "0") for numbers in frames)


def test_every_kernel_has_the_registers_of_384_threads(compiled):
    said, _ = compiled
    assert set(re.findall(r"Used (\d+) registers", said)) == {"168"}


def test_the_assembler_serialises_no_tensor_core_products(compiled):
    """ptxas says so in a remark (C7515) that no flag turns into an error; tensor cores then idle between products."""
    said, _ = compiled
    assert "serialized" not in said
    assert "C7515" not in said
    assert "C7508" not in said  # setmaxnreg ignored


@pytest.fixture(scope="module")
def kernels(compiled) -> list[str]:
    """The machine code of every kernel."""
    _, cubins = compiled
    nvcc = Path(machine.build_info().nvcc or "")
    disassembler = shutil.which("cuobjdump", path=str(nvcc.parent)) or shutil.which("cuobjdump")
    if disassembler is None:
        pytest.skip("needs cuobjdump (nvidia-cuda-cuobjdump, or a CUDA toolkit)")
    told = (
        subprocess.run([disassembler, "-sass", each], capture_output=True, text=True, check=True) for each in cubins
    )
    return [kernel for each in told for kernel in each.stdout.split("Function : ")[1:]]


def named(kernel: str) -> str:
    """The function whose code it is."""
    return kernel.splitlines()[0]


def in_8_bits(kernel: str) -> bool:
    return "EightBit" in named(kernel)


def decodes(kernel: str) -> bool:
    return "Decoded" in named(kernel)


def in_registers(kernel: str) -> bool:
    return "Packed" in named(kernel)


def test_products_are_those_of_hopper_alone(kernels, has_timeline):
    wide = [kernel for kernel in kernels if not in_8_bits(kernel) and not in_registers(kernel)]
    # Forward and backward, wide and decoded weights, BF16 and F16.
    assert len(wide) == (4 if has_timeline else 8)
    for kernel in wide:
        products = re.findall(r"\bHGMMA\.(\w+)", kernel)
        # Four to a stage, for each way round that the kernel takes its factors.
        ways = 1 if "moe_forward" in named(kernel) else 2 if decodes(kernel) else 3
        assert len(products) >= 4 * ways
        assert set(products) == {"64x256x16"}
        assert not re.search(r"\b(HMMA|QGMMA|LDL|STL)\b", kernel)


def test_products_in_8_bits_are_halves_that_begin_at_zero_every_128_of_the_depth(kernels, has_timeline):
    narrow = [kernel for kernel in kernels if in_8_bits(kernel)]
    assert len(narrow) == (1 if has_timeline else 2)  # forward, with 16-bit tokens and answers of both types
    for kernel in narrow:
        products = re.findall(r"\bQGMMA\.(64x\S+) (\w+), gdesc\[\w+\], (\w+)", kernel)
        assert {kind for kind, *_ in products} == {"64x128x32.F32.E4M3.E4M3"}
        # Of every four, which are 128 of the depth, the first adds to nothing, the others to what they write.
        from_zero = [added == "RZ" for _, _, added in products]
        assert from_zero == [True, False, False, False] * (len(products) // 4)
        assert all(written == added for _, written, added in products if added != "RZ")
        assert not re.search(r"\b(HMMA|HGMMA|LDL|STL)\b", kernel)


def test_products_of_weights_decoded_in_registers_are_those_of_a_warp(kernels):
    (kernel,) = filter(in_registers, kernels)
    assert set(re.findall(r"\bHMMA\.(\S+)", kernel)) == {"16816.F32.BF16"}
    assert not re.search(r"\b(HGMMA|QGMMA|LDL|STL)\b", kernel)


def test_only_a_kernel_with_a_timeline_reads_the_clock(kernels, has_timeline):
    """Without one nothing of it is left; the timer of the bounded waits is another register."""
    for kernel in kernels:
        # Forward kernels with 8 bits, and those that decode, have no registers for it.
        has_none = in_8_bits(kernel) or in_registers(kernel) or (decodes(kernel) and "moe_forward" in named(kernel))
        assert bool(re.search(r"\bSR_CLOCK", kernel)) == (has_timeline and not has_none)
        assert "SR_GLOBALTIMER" in kernel
