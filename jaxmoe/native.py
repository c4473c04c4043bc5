"""The compiled parts of jaxmoe: how they are loaded, and their FFI targets.

This is the only file that imports the extension modules `jaxmoe._native` (always built) and `jaxmoe._cuda` (built where
a CUDA compiler was found). They are loaded when something here is first called, so the Python parts of jaxmoe work
without them. jaxmoe/machine.py asks them how they were built and what they can run on.
"""

import atexit
import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

__all__ = [
    "BACKWARD",
    "COMBINE",
    "DISPATCH",
    "FINISH",
    "FORWARD",
    "always_built",
    "executor",
    "extension",
    "failures",
    "schedule",
    "targets",
    "version",
]

# FFI targets: a layer, and its gradients; tokens to experts of the user's own, and their answers back.
FORWARD, BACKWARD = "jaxmoe_forward", "jaxmoe_backward"
DISPATCH, COMBINE = "jaxmoe_dispatch", "jaxmoe_combine"
# On GPUs: the wait for one of the two that runs beside the program.
FINISH = "jaxmoe_finish"

_REBUILD = (
    "Run `make test` in the project's folder, which builds it into .venv, or `pip install .` to build it into "
    "the environment in use."
)
_PLATFORMS = {"_native": "cpu", "_cuda": "CUDA"}


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
        _local_devices(_PLATFORMS[name].lower())
        for type_name, registration in types.items():
            jax.ffi.register_ffi_type(type_name, registration, platform=_PLATFORMS[name])
    for target, stages in module.registrations().items():
        jax.ffi.register_ffi_target(target, stages, platform=_PLATFORMS[name], api_version=1)
    if name == "_cuda":
        atexit.register(_report_untold_failures)
    return module


# jax.Device is an assignment in JAX's sources, which pyright does not take for a type.
def _local_devices(platform: str) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices of this process; starts the backend if it is not up yet."""
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX's way of saying that it has no such backend
        return []


def always_built() -> ModuleType:
    """Returns the extension module that serves CPUs and knows the schedules of all platforms, its handlers registered.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> always_built().__name__
    'jaxmoe._native'
    """
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
        module = _load("_cuda")
    except ModuleNotFoundError:
        return None
    _tell_devices(module)
    return module


# XLA's client of the GPUs that compiled code was told of last. Not held: it has the memory of the GPUs.
_told_of: Callable[[], Any] = lambda: None  # noqa: E731


def _tell_devices(module: ModuleType) -> None:
    """Tells compiled code which devices and processes there are, again where JAX has begun anew.

    That is so after `jax.extend.backend.clear_backends`, perhaps with `jax.distributed.initialize` behind it.
    """
    global _told_of
    devices = _local_devices("cuda")
    if devices and devices[0].client is not _told_of():
        module.know_devices([device.id for device in devices], jax.process_count() > 1)
        _told_of = weakref.ref(devices[0].client)


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
    module = always_built()
    if platform == "cpu":
        return module
    return _load_cuda() if platform == "gpu" else None


def version() -> str:
    """Returns the version of jaxmoe that the compiled parts are of. Calls carry it: no other version runs them.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> import jaxmoe
    >>> version() == jaxmoe.__version__
    True
    """
    return always_built().build_info()["version"]


def executor() -> ModuleType:
    """Returns the host executor as tests call it: layers back to back without XLA, with delays and faults.

    Returns:
        The submodule `executor` of jaxmoe._native.

    Raises:
        ModuleNotFoundError: nothing was built.

    >>> executor().Disturbance(delay_seed=1, most_delay_us=20) is not None
    True
    """
    return always_built().executor


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
    return always_built().schedule


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
