"""The compiled parts: what was built, what is said where something is missing, and a call into each of them."""

import dataclasses
import importlib
import importlib.metadata
import os
import shlex
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import pytest

import jaxmoe.machine as machine
import jaxmoe.native as native

SPILLING_KERNEL = """
__global__ void __launch_bounds__(1024, 2) kernel(const float* x, float* y) {
  float a[64];  // 64 live values, 32 registers
  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i * 7 + 3) % 64] + a[(i + round) % 64];
    __syncthreads();
  }
  for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = a[i];
}
"""
LOCAL_ARRAY_KERNEL = """
__global__ void kernel(const int* x, int* y, int n) {
  int a[32];  // indexed by a value that only the run knows
  for (int i = 0; i < 32; ++i) a[i] = 0;
  for (int i = 0; i < n; ++i) a[x[i] & 31] += i;
  for (int i = 0; i < 32; ++i) y[i] = a[i];
}
"""
CLEAN_KERNEL = """
__global__ void kernel(const float* x, float* y) { y[threadIdx.x] = 2.0f * x[threadIdx.x]; }
"""


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter on the CPU and returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def compile_kernel(source: str, flags: str, folder: Path) -> subprocess.CompletedProcess[str]:
    nvcc = machine.build_info().nvcc
    if nvcc is None or not Path(nvcc).exists():
        pytest.skip(f"no CUDA compiler to try: {machine.build_info().cuda_missing or f'{nvcc} is gone'}")
    (folder / "kernel.cu").write_text(source)
    return subprocess.run(
        [nvcc, *shlex.split(flags), "-c", "kernel.cu", "-o", "kernel.o"], cwd=folder, capture_output=True, text=True
    )


def test_the_host_part_is_built_as_cpp20_against_the_jaxlib_in_use():
    built = machine.build_info()
    assert built.cpp_standard == "202002"
    assert built.jaxlib == importlib.metadata.version("jaxlib")
    assert built.ffi_api.startswith("0.")


def test_the_collectives_api_is_reported_exactly_where_jaxlib_has_its_header():
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/collectives_c_api.h"
    assert (machine.build_info().collectives_api is not None) == header.exists()


def test_either_the_cuda_part_is_built_or_the_reason_is_known():
    built = machine.build_info()
    if built.cuda_toolkit is None:
        assert built.cuda_missing
        assert built.cuda_arch is None
    else:
        assert built.cuda_missing == ""
        assert built.cuda_arch == "sm_90a"
        assert int(built.cuda_toolkit.split(".")[0]) >= 13


def test_device_info_of_a_cpu_comes_from_compiled_code():
    info = machine.device_info(jax.devices("cpu")[0])
    assert info.num_processors >= 1
    assert (info.compiled_arch, info.block_shared_bytes, info.compute_capability) == (0, 0, 0)


def test_device_info_runs_on_the_device_it_is_given():
    # The words are the same on each virtual device, so what is checked is that none of them is refused.
    assert len({machine.device_info(device) for device in jax.devices("cpu")}) == 1


def test_the_words_of_device_info_have_one_order_in_cpp_and_python():
    names = tuple(field.name for field in dataclasses.fields(machine.DeviceInfo))
    assert importlib.import_module("jaxmoe._native").device_info_fields() == names


def test_a_result_of_the_wrong_size_is_refused_with_both_sizes():
    machine.build_info()  # registers the target
    call = jax.ffi.ffi_call("jaxmoe_device_info", jax.ShapeDtypeStruct((5,), "int32"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"the result has 5 words\. It needs int32\[4\]"):
        jax.block_until_ready(jax.jit(call)())


def test_cuda_status_says_what_is_missing_on_a_machine_without_a_gpu():
    output = run_python("""
        import jaxmoe.machine as machine
        status = machine.cuda_status()
        print(status.available)
        print(status.reason)
    """).splitlines()
    built = machine.build_info()
    assert output[0] == "False"
    if built.cuda_toolkit is None:
        assert built.cuda_missing in output[1]
        assert "jaxmoe[nvcc]" in output[1]
    elif built.collectives_api is None:
        assert "collectives_api.h" in output[1]
        assert "jax 0.11.2 or newer" in output[1]
    else:
        assert "sees no CUDA device" in output[1]
        assert "jaxmoe[cuda13]" in output[1]


def test_without_the_cuda_part_no_gpu_can_be_asked_and_the_error_says_why(monkeypatch):
    monkeypatch.setattr(native, "_load_cuda", lambda: None)
    reason = machine.CudaStatus(available=False, reason="The CUDA part was not built: it was switched off.")
    monkeypatch.setattr(machine, "cuda_status", lambda: reason)
    for name, arguments in (("visible_gpus", ()), ("peer_access", (0, 1))):
        with pytest.raises(NotImplementedError, match=rf"^{name}: no GPU can be asked\. The CUDA part was not built"):
            getattr(machine, name)(*arguments)


def test_compiled_code_is_told_of_devices_and_processes_once_and_again_where_jax_has_begun_anew(monkeypatch):
    class Client:
        pass

    told: list[tuple[list[int], bool]] = []
    module, devices, processes = types.ModuleType("_cuda"), [], [1]
    monkeypatch.setattr(module, "know_devices", lambda *known: told.append(known), raising=False)
    monkeypatch.setattr(native, "_load", lambda name: module)
    monkeypatch.setattr(native, "_local_devices", lambda platform: devices)
    monkeypatch.setattr(native, "_told_of", lambda: None, raising=False)
    monkeypatch.setattr(jax, "process_count", lambda: processes[0])
    native.extension("gpu")
    assert told == [], "there are none"
    for ids, processes[0] in (((0, 1), 1), ((2, 3), 2)):
        client = Client()
        devices[:] = [types.SimpleNamespace(id=number, client=client) for number in ids]
        for _ in range(3):
            native.extension("gpu")
    assert told == [([0, 1], False), ([2, 3], True)]
    del client, devices[:]
    assert native._told_of() is None, "the client is not held, nor the memory that it has"


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_cuda_status_names_a_gpu_that_is_not_hopper(monkeypatch, capability):
    class OtherGpu:
        compute_capability = capability
        device_kind = "NVIDIA Example"

        def __str__(self):
            return "cuda:0"

    complete = dataclasses.replace(
        machine.build_info(), cuda_toolkit="13.0.88", cuda_arch="sm_90a", cuda_missing="", collectives_api="0.2"
    )
    monkeypatch.setattr(machine, "build_info", lambda: complete)
    monkeypatch.setattr(machine, "_cuda_devices", lambda: [OtherGpu()])
    status = machine.cuda_status()
    assert not status.available
    assert f"cuda:0 (NVIDIA Example) has compute capability {capability}" in status.reason


@pytest.mark.slow
def test_jaxmoe_imports_without_its_compiled_parts_and_says_how_to_build_them():
    output = run_python("""
        import sys
        sys.modules["jaxmoe._native"] = None  # the import system's way of saying that a module cannot be found
        sys.modules["jaxmoe._cuda"] = None
        import jaxmoe
        import jaxmoe.machine as machine
        import jaxmoe.native as native
        for ask in machine.build_info, machine.device_info, native.schedule:
            try:
                ask()
            except ModuleNotFoundError as error:
                print(error)
        try:
            machine.visible_gpus()
        except NotImplementedError as error:
            print(error)
        print(machine.cuda_status())
        print(machine.report())
    """).splitlines()
    assert len(output) == 6
    for line in output:
        assert "jaxmoe._native is missing" in line
        assert "pip install ." in line


@pytest.mark.slow
def test_jaxmoe_works_without_its_cuda_part_and_says_so():
    output = run_python("""
        import sys
        sys.modules["jaxmoe._cuda"] = None
        import jax
        import jaxmoe.machine as machine
        print(machine.device_info(jax.devices("cpu")[0]).compiled_arch)
        print(machine.cuda_status().available)
        print(machine.build_info().cuda_toolkit)
    """).split()
    assert output == ["0", "False", "None"]


@pytest.mark.slow
def test_the_compiled_parts_are_loaded_only_when_something_asks_for_them():
    output = run_python("""
        import sys
        import jaxmoe
        import jaxmoe.machine
        import jaxmoe.native
        print([name for name in sys.modules if name in ("jaxmoe._native", "jaxmoe._cuda")])
    """)
    assert output.strip() == "[]"


def test_the_report_names_both_parts():
    lines = machine.report().splitlines()
    assert [line.split()[0] for line in lines] == ["jaxmoe._native", "jaxmoe._cuda", "CUDA"]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (SPILLING_KERNEL, "Registers are spilled to local memory"),
        (LOCAL_ARRAY_KERNEL, "Local memory used for function"),
    ],
    ids=["spill", "local_array"],
)
def test_a_kernel_that_spills_or_uses_local_memory_does_not_compile_with_the_flags_of_the_build(
    tmp_path, source, complaint
):
    flags = machine.build_info().nvcc_flags or ""
    result = compile_kernel(source, flags, tmp_path)
    assert result.returncode != 0
    assert complaint in result.stderr
    without_check = " ".join(flag for flag in shlex.split(flags) if not flag.startswith("-Xptxas"))
    assert compile_kernel(source, without_check, tmp_path).returncode == 0, "only the check may be what stops it"


def test_a_clean_kernel_compiles_with_the_flags_of_the_build(tmp_path):
    result = compile_kernel(CLEAN_KERNEL, machine.build_info().nvcc_flags or "", tmp_path)
    assert result.returncode == 0, result.stderr
