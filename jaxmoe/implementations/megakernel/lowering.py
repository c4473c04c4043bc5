"""Calls of compiled code that are told which devices run them, and are lowered for no platform but their own.

XLA gives the devices of a program numbers of its own, from 0 on, and a trace is made for any devices of a mesh of that
shape: only when it is lowered is it known which ones they are. Processes that run a program together need them, so that
each can look the memory of a group of GPUs up without asking the others (ffi/memory.md).

`launching.py` calls both functions.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

try:
    # JAX keeps what it has lowered and uses it again for other devices, except for the primitives in this set. Nothing
    # of JAX's public interface says the same.
    from jax._src.dispatch import prim_requires_devices_during_lowering as _lowered_for_each_devices
except ImportError:
    _lowered_for_each_devices = None

# What calls carry that know no devices.
NOT_KNOWN = np.array([-1])

_call = Primitive("jaxmoe_call")
_call.multiple_results = True
_call.def_abstract_eval(lambda *operands, results, **_: list(results))
_call.def_impl(lambda *operands, **options: jax.jit(functools.partial(_call.bind, **options))(*operands))
if _lowered_for_each_devices is not None:
    _lowered_for_each_devices.add(_call)


def can_name_devices() -> bool:
    """Whether `call` can be used here: not on a mesh without devices, for which JAX lowers no such call.

    An `AbstractMesh` that stands for devices has their kind (`abstract_device`); one that was written down has none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return _lowered_for_each_devices is not None and getattr(mesh, "abstract_device", None) is not None


def call(
    target: str, results: tuple[Any, ...], *operands: jax.Array, groups: np.ndarray, **attributes: Any
) -> list[jax.Array]:
    """Calls an FFI target as `jax.ffi.ffi_call` does, with the ids of the devices as attribute `devices`.

    Args:
      target: name of the FFI target.
      results: types of the results, `jax.typeof` of arrays like them.
      operands: arrays that vary over the same mesh axes.
      groups: devices of every group as XLA numbers those of a program, in the order of ranks.
      attributes: further attributes of the call, numbers and arrays of one dimension.

    Returns:
      The results. `devices` has the shape of `groups` and names the same devices as all processes do
      (`jax.Device.id`); it is `NOT_KNOWN` in a program that is lowered to be stored (`jax.export`), which may be run by
      other devices.
    """
    return _call.bind(
        *operands,
        target=target,
        results=results,
        groups=tuple(groups.reshape(-1).tolist()),
        attributes=tuple((name, _Numbers.of(value)) for name, value in sorted(attributes.items())),
    )


class _Numbers(NamedTuple):
    """An array as a parameter of an equation, which has to be hashable."""

    values: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Any:
        """The array as numbers; anything else as it is."""
        return cls(tuple(value.tolist()), value.dtype.name) if isinstance(value, np.ndarray) else value


def _lower(
    context: mlir.LoweringRuleContext,
    *operands: Any,
    target: str,
    results: tuple[Any, ...],
    groups: tuple[int, ...],
    attributes: tuple[tuple[str, Any], ...],
) -> Any:
    del results
    devices = _devices(context.module_context)
    ids = NOT_KNOWN if devices is None else np.array([devices[number].id for number in groups])
    named = {
        name: np.array(value.values, value.dtype) if isinstance(value, _Numbers) else value
        for name, value in attributes
    }
    return jax.ffi.ffi_lowering(target)(context, *operands, **named, groups=np.array(groups), devices=ids)


def _devices(context: Any) -> list[Any] | None:
    """The devices that a module is lowered for, in XLA's order; `None` where they are not known."""
    axes = context.axis_context
    if context.lowering_parameters.for_export:
        return None
    if isinstance(axes, mlir.SPMDAxisContext):
        return list(axes.mesh.devices.flat) if isinstance(axes.mesh, jax.sharding.Mesh) else None
    assigned = getattr(axes, "device_assignment", None)
    return None if assigned is None else list(assigned)


mlir.register_lowering(_call, _lower)


# The array as it is, in a program for one platform.
_lowered_for = Primitive("jaxmoe_lowered_for")
_lowered_for.def_impl(lambda array, **_: array)
_lowered_for.def_abstract_eval(lambda array, **_: array)

# Whose programs have which of JAX's platforms.
_PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "gpu")}


def only_for(platform: str, array: jax.Array) -> jax.Array:
    """Returns the array, which raises where it is lowered for another platform than this, `"cpu"` or `"gpu"`.

    The schedule that a call is told is that of one platform, and JAX also lowers for platforms that it has not
    (`lowering_platforms`, `jax.export`).
    """
    return _lowered_for.bind(array, platform=platform)


def _lower_for(context: mlir.LoweringRuleContext, operand: Any, *, platform: str) -> list[Any]:
    platforms = context.platforms or context.module_context.platforms
    if others := sorted(set(platforms) - set(_PLATFORMS[platform])):
        raise NotImplementedError(
            f"jaxmoe: a call with implementation='megakernel' was traced for {platform} and is lowered for "
            f"{', '.join(others)}, where its schedule would be another one. Trace and lower it in a process that has "
            "such devices, or pass implementation='xla', which is lowered for all platforms."
        )
    return [operand]


mlir.register_lowering(_lowered_for, _lower_for)
