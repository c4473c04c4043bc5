"""What this machine can run: how the compiled parts were built, which GPUs it has, and what is missing.

All of it is asked of compiled code, which jaxmoe/native.py loads. Nothing here changes what a layer does.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import native

__all__ = [
    "BuildInfo",
    "CudaStatus",
    "DeviceInfo",
    "build_info",
    "cuda_status",
    "device_info",
    "peer_access",
    "report",
    "visible_gpus",
]

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
def build_info() -> BuildInfo:
    """Says how the compiled parts were built.

    Returns:
        A `BuildInfo`.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> build_info().cpp_standard
    '202002'
    """
    host = native.always_built().build_info()
    cuda_module = native.extension("gpu")
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
def _cuda_devices() -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    try:
        return jax.devices("cuda")
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
    native.always_built()
    chosen = jax.local_devices()[0] if device is None else device
    if chosen.platform == "gpu" and native.extension("gpu") is None:
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
    try:
        module = native.extension("gpu")
    except ModuleNotFoundError:  # nothing was built, which cuda_status() says
        module = None
    if module is None:
        raise NotImplementedError(f"{caller}: no GPU can be asked. {cuda_status().reason}")
    return module


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
