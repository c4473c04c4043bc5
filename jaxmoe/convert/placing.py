"""Arrays of a layer from their experts onto a mesh, one device's shard of one array at a time.

`loading.py` says of each array what its elements are, in a `Stack`; `Placing` makes a `jax.Array` of it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jaxmoe.wording import a_type

# What a dimension of an array counts, and so over which mesh axes it is split.
Dimension = Literal["experts", "hidden", "intermediate"] | None
# Rows of a matrix that are written to columns together. On a CPU this halves the time of the transposition, to 1.6 ns
# for an element of 2 bytes ([2048, 7168], NumPy 2.5).
BAND = 32


@dataclasses.dataclass(frozen=True)
class Stack:
    """An array `[experts, ...]` that is not made yet.

    Args:
      name: for errors, such as `experts.w_gate`.
      shape: of the array.
      dtype: of the array.
      dimensions: what each dimension counts.
      element: returns expert e of it, of shape `shape[1:]`: a view of a file where that is possible. Its numbers are
        converted where its dtype is another one.
      may_stay_whole: along dimensions that a mesh axis does not divide, as scales may; else that is an error.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    dimensions: tuple[Dimension, ...]
    element: Callable[[int], np.ndarray]
    may_stay_whole: bool = False


@dataclasses.dataclass(frozen=True)
class Placing:
    """Where arrays go.

    Args:
      mesh: `None` for JAX's default device.
      axes: the mesh axes over which dimensions of a kind are split.
    """

    mesh: Mesh | None
    axes: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, mesh: Mesh | None, axes: Mapping[str, str | Sequence[str] | None]) -> "Placing":
        """Returns the placing on a mesh, or on the one that is set by `jax.set_mesh`.

        Raises:
          TypeError: the mesh is none, or has no devices.
          ValueError: an axis is not in the mesh, or is to split two dimensions.
        """
        if mesh is None and not (of_context := jax.sharding.get_mesh()).empty:
            mesh = of_context
        if mesh is not None and not isinstance(mesh, Mesh):
            raise TypeError(f"from_hf: mesh is {a_type(mesh)}; it must be a jax.sharding.Mesh or None.")
        for kind, names in axes.items():
            if not isinstance(names, str | Sequence | None):
                raise TypeError(
                    f"from_hf: the mesh axis for {kind} is {a_type(names)}; it must be a name, several, or None, which "
                    "does not split."
                )
        named = {kind: (names,) if isinstance(names, str) else tuple(names or ()) for kind, names in axes.items()}
        for kind, names in named.items():
            for name in names:
                if mesh is not None and name not in mesh.axis_names:
                    raise ValueError(
                        f"from_hf: axis {name!r}, for {kind}, is not in the mesh, whose axes are {dict(mesh.shape)}. "
                        "Pass axis_name= (experts), hidden_axis= and intermediate_axis= with names of that mesh; None "
                        "does not split."
                    )
        every = [name for names in named.values() for name in names]
        if len(set(every)) < len(every):
            raise ValueError(f"from_hf: a mesh axis can split one dimension, and {named} have one in common.")
        return cls(mesh, named)

    def sharding(self, stack: Stack) -> NamedSharding | None:
        """Returns how an array is split; `None` where it lies whole on the default device.

        Raises:
          ValueError: a dimension does not divide.
        """
        if self.mesh is None:
            return None
        spec: list[tuple[str, ...] | None] = []
        for size, dimension in zip(stack.shape, stack.dimensions, strict=True):
            over = self.axes.get(dimension or "", ())
            ranks = math.prod(self.mesh.shape[name] for name in over)
            divides = size % ranks == 0
            if not divides and not (stack.may_stay_whole and dimension != "experts"):
                raise ValueError(
                    f"from_hf: {stack.name}, {list(stack.shape)}, cannot be split over {ranks} ranks of mesh axis "
                    f"{', '.join(map(repr, over))} along {dimension} ({size} % {ranks} = {size % ranks}). Choose an "
                    f"axis whose size divides {size}."
                )
            spec.append(over if over and divides else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def shards(self, stack: Stack) -> list[tuple[tuple[slice, ...], list[Any]]]:
        """Returns the different parts of an array that this process holds, and the devices of each."""
        sharding = self.sharding(stack)
        if sharding is None:
            return [(tuple(slice(0, size) for size in stack.shape), [None])]
        parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(stack.shape).items():
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), stack.shape, strict=True))
            parts.setdefault(bounds, []).append(device)
        return [(tuple(slice(*bound) for bound in bounds), devices) for bounds, devices in parts.items()]

    def local_bytes(self, stack: Stack) -> int:
        """Bytes of the different parts of an array that this process holds: what `place` reads."""
        sizes = [math.prod(part.stop - part.start for part in index) for index, _ in self.shards(stack)]
        return sum(sizes) * np.dtype(stack.dtype).itemsize

    def place(self, stack: Stack, done: Callable[[int], object], pool: Executor) -> Shaped[Array, "..."]:
        """Returns an array on its devices. A shard is there before the next one is made.

        Args:
          stack: the array.
          done: called with the bytes of each part of an element that has been read.
          pool: of threads: NumPy copies and transposes in all of them at once.
        """
        on_devices = []
        for index, devices in self.shards(stack):
            shard = np.empty([part.stop - part.start for part in index], stack.dtype)
            for count in pool.map(functools.partial(_fill, stack, index, shard), range(len(shard))):
                done(count)
            # A CPU may go on using the memory of NumPy, so every shard has its own.
            arrays = [jax.device_put(shard, device) for device in devices]
            jax.block_until_ready(arrays)
            on_devices += arrays
            del shard
            # JAX lets go of what it has copied when the next shard is sent (jax 0.12): there are two at a time.
        sharding = self.sharding(stack)
        if sharding is None:
            return on_devices[0]
        return jax.make_array_from_single_device_arrays(stack.shape, sharding, on_devices, dtype=stack.dtype)

    def replicate(self, array: np.ndarray) -> Shaped[Array, "..."]:
        """Returns a small array on all devices."""
        array = np.array(array, order="C")
        if self.mesh is None:
            return jax.device_put(array)
        return jax.make_array_from_callback(array.shape, NamedSharding(self.mesh, PartitionSpec()), array.__getitem__)


def _fill(stack: Stack, index: tuple[slice, ...], shard: np.ndarray, number: int) -> int:
    """Writes one expert into a shard of an array, and returns its bytes."""
    of_expert = shard[number, ...]
    copy(of_expert, stack.element(index[0].start + number)[(*index[1:], ...)])
    return of_expert.nbytes


def copy(to: np.ndarray, source: np.ndarray) -> None:
    """Writes an array into another of the same shape, converting where the dtypes differ."""
    if to.dtype == source.dtype:
        # As integers: NumPy copies its own types faster than those that others have added.
        to, source = (array.view(f"u{array.dtype.itemsize}") for array in (to, source))
    if source.ndim == 2 and source.strides[0] < source.strides[1]:
        for start in range(0, source.shape[1], BAND):
            to[:, start : start + BAND] = source[:, start : start + BAND]
    else:
        to[...] = source
