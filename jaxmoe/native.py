"""The compiled parts of jaxmoe: how they were built, what this machine can run, and their FFI targets.

This is the only file that imports the extension modules `jaxmoe._native` (always built) and `jaxmoe._cuda` (built where
a CUDA compiler was found). They are loaded when something here is first called, so the Python parts of jaxmoe work
without them.
"""

import atexit
import functools
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "BACKWARD",
    "FORWARD",
    "BuildInfo",
    "CudaStatus",
    "DeviceInfo",
    "build_info",
    "cuda_status",
    "device_info",
    "extension",
    "failures",
    "peer_access",
    "report",
    "schedule",
    "targets",
    "visible_gpus",
]

# FFI targets: a layer, and its gradients.
FORWARD, BACKWARD = "jaxmoe_forward", "jaxmoe_backward"

_REBUILD = (
    "Run `make test` in the project's folder, which builds it into .venv, or `pip install .` to build it into "
    "the environment in use."
)
_PLATFORMS = {"_native": "cpu", "_cuda": "CUDA"}
_HOPPER = "9.0"


@dataclass(frozen=True)
class BuildInfo:
    """How the compiled parts were built.

    Attributes:
        compiler: C++ compiler and its version.
        cpp_standard: value of `__cplusplus`, "202002" for C++20.
        jaxlib: version of the jaxlib whose FFI headers were used.
        ffi_api: version of the XLA FFI in those headers, "major.minor".
        collectives_api: version of the FFI's collectives extension, through which a handler reaches the other
            devices of its group; None where jaxlib had no header for it.
        cuda_toolkit: version of the CUDA compiler; None where the CUDA part was not built.
        cuda_arch: GPU architecture of the CUDA part, "sm_90a"; None where it was not built.
        cuda_missing: why the CUDA part was not built; empty where it was.
        nvcc: path of the CUDA compiler during the build; None where the CUDA part was not built.
        nvcc_flags: flags of the CUDA compiler, without include folders; None where the CUDA part was not built.
        timeline: whether the kernels of the CUDA part record what they do when.
    """

    compiler: str
    cpp_standard: str
    jaxlib: str
    ffi_api: str
    collectives_api: str | None
    cuda_toolkit: str | None
    cuda_arch: str | None
    cuda_missing: str
    nvcc: str | None
    nvcc_flags: str | None
    timeline: bool


@dataclass(frozen=True)
class CudaStatus:
    """Whether the CUDA part can run here, and if not, what is missing and what to do about it.

    Attributes:
        available: True where every requirement that can be checked is met.
        reason: one or two sentences; empty when available.
    """

    available: bool
    reason: str


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says about itself, read by compiled code that ran on it.

    Attributes:
        compiled_arch: GPU architecture that the code was compiled for, 900 for sm_90a; 0 on a CPU.
        num_processors: streaming multiprocessors of a GPU, hardware threads of a CPU.
        block_shared_bytes: most shared memory one thread block may ask for, in bytes; 0 on a CPU.
        compute_capability: 90 for compute capability 9.0; 0 on a CPU.
    """

    compiled_arch: int
    num_processors: int
    block_shared_bytes: int
    compute_capability: int


@functools.cache
def _load(name: str) -> ModuleType:
    """Imports the extension module `jaxmoe.<name>` and registers its FFI targets with XLA, once.

    Raises:
        ModuleNotFoundError: the module was not built.
    """
    module = importlib.import_module(f"jaxmoe.{name}")
    if types := module.state_types():
        # Types have to be known before the handlers that use them. Where the backend is not up yet JAX keeps both for
        # later and then registers the handlers first (jax 0.12), so it is started here.
        _start_backend(_PLATFORMS[name].lower())
        for type_name, registration in types.items():
            jax.ffi.register_ffi_type(type_name, registration, platform=_PLATFORMS[name])
    for target, stages in module.registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform=_PLATFORMS[name], api_version=1)
    if name == "_cuda":
        module.know_devices([device.id for device in _cuda_devices(of_all_processes=False)], jax.process_count() > 1)
        atexit.register(_report_untold_failures)
    return module


def _start_backend(platform: str) -> None:
    try:
        jax.local_devices(backend=platform)
    except RuntimeError:  # JAX's way of saying that it has no such backend, and so nothing to register with
        return


def _load_native() -> ModuleType:
    try:
        return _load("_native")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "jaxmoe.native: the compiled module jaxmoe._native is missing: jaxmoe was imported from a source folder "
            f"that is not built for this Python. {_REBUILD}",
            name=error.name,
        ) from error


def _load_cuda() -> ModuleType | None:
    try:
        return _load("_cuda")
    except ModuleNotFoundError:
        return None


def targets(platform: str) -> frozenset[str]:
    """Registers the compiled handlers of a platform with XLA, if they are not yet.

    Args:
        platform: `"cpu"` or `"gpu"`.

    Returns:
        The names of the FFI targets that can be called there; none for a platform without a compiled part.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> "jaxmoe_device_info" in targets("cpu")
    True
    """
    module = extension(platform)
    return frozenset(module.registrations()) if module else frozenset()


def extension(platform: str) -> ModuleType | None:
    """Returns the extension module that serves a platform, its handlers registered; None where there is none.

    Args:
        platform: `"cpu"` or `"gpu"`.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> extension("cpu").__name__
    'jaxmoe._native'
    """
    module = _load_native()
    if platform == "cpu":
        return module
    return _load_cuda() if platform == "gpu" else None


@functools.cache
def build_info() -> BuildInfo:
    """Says how the compiled parts were built.

    Returns:
        A `BuildInfo`.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> build_info().cpp_standard
    '202002'
    """
    host = _load_native().build_info()
    cuda_module = _load_cuda()
    cuda = cuda_module.build_info() if cuda_module else {}
    return BuildInfo(
        compiler=host["compiler"],
        cpp_standard=host["cpp_standard"],
        jaxlib=host["jaxlib"],
        ffi_api=host["ffi_api"],
        collectives_api=host["collectives_api"] or None,
        cuda_toolkit=cuda.get("cuda_toolkit"),
        cuda_arch=cuda.get("cuda_arch"),
        cuda_missing=host["cuda_missing"],
        nvcc=cuda.get("nvcc"),
        nvcc_flags=cuda.get("nvcc_flags"),
        timeline=cuda.get("timeline") == "on",
    )


# jax.Device is an assignment in JAX's sources, which pyright does not take for a type.
def _cuda_devices(of_all_processes: bool = True) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    try:
        return jax.devices("cuda") if of_all_processes else jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX's way of saying that it has no such backend
        return []


def cuda_status() -> CudaStatus:
    """Says whether the CUDA part can run here; starts JAX's backends if nothing has yet.

    Returns:
        A `CudaStatus`; it names the first requirement that is not met. It does not raise where something is missing.

    >>> status = cuda_status()
    >>> status.available == (status.reason == "")
    True
    """
    reason = _cuda_obstacle()
    return CudaStatus(available=reason == "", reason=reason)


def _cuda_obstacle() -> str:
    """The first thing that keeps the CUDA part from running here; empty when there is none."""
    try:
        built = build_info()
    except ImportError as error:
        return str(error)
    if built.cuda_toolkit is None:
        return (
            f"The CUDA part was not built: {built.cuda_missing}. Build jaxmoe again where a CUDA compiler is installed "
            "(`pip install 'jaxmoe[nvcc]'`, or a CUDA toolkit of version 13.0 or newer) and not switched off."
        )
    if built.collectives_api is None:
        return (
            f"jaxlib {built.jaxlib}, which jaxmoe was built with, has no header xla/ffi/api/collectives_api.h, through "
            "which native code reaches the other GPUs. Install jax 0.11.2 or newer (it needs Python 3.12 or newer), "
            "then build jaxmoe again."
        )
    devices = _cuda_devices()
    if not devices:
        return (
            "JAX sees no CUDA device. On a machine with an NVIDIA driver of version 580 or newer install "
            "`jaxmoe[cuda13]`, and leave `cuda` in JAX_PLATFORMS where that variable is set."
        )
    for device in devices:
        if device.compute_capability != _HOPPER:
            return (
                f"{device} ({device.device_kind}) has compute capability {device.compute_capability}; the CUDA part is "
                f"compiled for {built.cuda_arch}, which only compute capability {_HOPPER} runs (H100, H200). "
                "Hide the device with CUDA_VISIBLE_DEVICES, or use an implementation without the CUDA part."
            )
    return ""


def device_info(device: jax.Device | None = None) -> DeviceInfo:  # pyright: ignore[reportInvalidTypeForm]
    """Runs a small piece of compiled code on a device and returns what it found there.

    Args:
        device: a CPU or CUDA device; None for the first of this process.

    Returns:
        A `DeviceInfo`.

    Raises:
        ModuleNotFoundError: nothing was built.
        NotImplementedError: the compiled parts do not cover this device's platform.

    >>> device_info(jax.devices("cpu")[0]).compiled_arch
    0
    """
    _load_native()
    chosen = jax.local_devices()[0] if device is None else device
    if chosen.platform == "gpu" and _load_cuda() is None:
        raise NotImplementedError(f"device_info: {chosen} cannot run it. {cuda_status().reason}")
    if chosen.platform not in ("cpu", "gpu"):
        raise NotImplementedError(
            f"device_info: {chosen} is of platform {chosen.platform!r}. The compiled parts cover 'cpu' and 'gpu': "
            "pass jax.devices('cpu')[0], for instance."
        )
    call = jax.ffi.ffi_call("jaxmoe_device_info", jax.ShapeDtypeStruct((4,), jnp.int32))
    words = jax.jit(call, out_shardings=jax.sharding.SingleDeviceSharding(chosen))()
    return DeviceInfo(*(int(word) for word in np.asarray(words)))


def visible_gpus() -> list[int]:
    """Returns the GPUs that this process sees and that the CUDA part is compiled for, JAX's own among them.

    Returns:
        Numbers of the CUDA runtime: `local_hardware_id` of those that are devices of JAX in this process.

    Raises:
        NotImplementedError: the CUDA part was not built.
        RuntimeError: CUDA fails.
    """
    return _built_cuda("visible_gpus").visible_gpus()


@functools.cache
def peer_access(gpu: int, peer: int) -> bool:
    """Says whether one GPU can reach the memory of another one of this process; `cudaDeviceCanAccessPeer`, asked once.

    Args:
        gpu: a number of the CUDA runtime.
        peer: another one.

    Raises:
        NotImplementedError: the CUDA part was not built.
        RuntimeError: CUDA fails.
    """
    return _built_cuda("peer_access").peer_access(gpu, peer)


def _built_cuda(caller: str) -> ModuleType:
    module = _load_cuda()
    if module is None:
        raise NotImplementedError(f"{caller}: no GPU can be asked. {cuda_status().reason}")
    return module


def executor() -> ModuleType:
    """Returns the host executor as tests call it: layers back to back without XLA, with delays and faults.

    Returns:
        The submodule `executor` of jaxmoe._native.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> executor().Disturbance(delay_seed=1, most_delay_us=20) is not None
    True
    """
    return _load_native().executor


def schedule() -> ModuleType:
    """Returns the integer code that decides what the native kernel does when and where.

    It is the C++ of ffi/common, the same that kernels and host threads run: the order of work (`units`, `tasks` of a
    worker, `chunks` of a dispatcher, `source_of_row`), the signals (`wait_before`, `release_after`, `describe`) and the
    memory of a rank (`layout_of`, `word_of`). Nothing in it touches a device.

    Returns:
        The submodule `schedule` of jaxmoe._native.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> steps = schedule()
    >>> shape = steps.Shape(ranks=1, tokens=8, hidden=64, intermediate=32, num_experts=2, top_k=1)
    >>> tile = steps.TileSizes(rows=4, h_columns=32, columns=64)
    >>> plan = steps.Schedule(
    ...     tile, unit_tiles=2, lag_units=1, ring_tiles=4, workers=1, chunk_rows=4, dispatchers=1, narrow_rows=2,
    ...     keep_tokens=0,
    ... )
    >>> [(task.gemm.name, task.row_tile, task.rows) for task in steps.tasks(shape, plan, [5, 3], worker=0)]
    [('gate_up', 0, 4), ('gate_up', 1, 1), ('gate_up', 2, 3), ('down', 0, 4), ('down', 1, 1), ('down', 2, 3)]
    """
    return _load_native().schedule


def failures() -> tuple[str, ...]:
    """Says what keeps the layers of this process from running again: waits that took too long, ranks that did not come.

    On GPUs alone; on a CPU the call that fails says so itself. Waits for nothing.

    Returns:
        One text for each failure.

    >>> failures()
    ()
    """
    module = sys.modules.get("jaxmoe._cuda")  # what was never loaded has not failed
    return () if module is None else tuple(module.failures())


def _report_untold_failures() -> None:
    for text in sys.modules["jaxmoe._cuda"].untold_failures():
        print(
            f"{text} That was the last that a layer of this process did: what came after it is not valid "
            "(jaxmoe.raise_if_failed says so before a checkpoint is written).",
            file=sys.stderr,
        )


def report() -> str:
    """Describes the compiled parts in a few lines, for people and for bug reports.

    Returns:
        Text of several lines.

    >>> print(report().splitlines()[0].split()[0])
    jaxmoe._native
    """
    try:
        built = build_info()
    except ImportError as error:
        return f"jaxmoe._native  missing: {error}"
    collectives = built.collectives_api or "none"
    timeline = ", with a timeline" if built.timeline else ""
    lines = [
        f"jaxmoe._native  {built.compiler}, C++ {built.cpp_standard}, FFI {built.ffi_api} "
        f"(collectives {collectives}) of jaxlib {built.jaxlib}",
        f"jaxmoe._cuda    nvcc {built.cuda_toolkit} for {built.cuda_arch}{timeline}"
        if built.cuda_toolkit
        else f"jaxmoe._cuda    not built: {built.cuda_missing}",
    ]
    status = cuda_status()
    lines.append("CUDA part       " + ("can run here" if status.available else f"cannot run here. {status.reason}"))
    return "\n".join(lines)
