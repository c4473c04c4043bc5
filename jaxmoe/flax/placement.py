"""How the arrays of a layer are spread over a mesh, with Auto or Explicit axes."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmoe.array_layout import reshard_explicit
from jaxmoe.sharding import get_concrete_mesh


def place(value: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    """Spreads an array over a mesh, the context's for `mesh=None`; without a mesh returns it as it is."""
    mesh = mesh_to_enter(mesh)
    if mesh is None:
        return value
    if AxisType.Explicit in mesh.axis_types:
        return reshard_explicit(value, spec, mesh)
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def place_explicit(value: jax.Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    """As `place`, over Explicit axes alone; Auto axes are left to the compiler."""
    mesh = mesh_to_enter(mesh)
    return value if mesh is None else reshard_explicit(value, spec, mesh)


def put(value: Any, axis: Any, mesh: Mesh | AbstractMesh | None) -> Any:
    """Moves arrays that lie elsewhere onto a mesh, the context's for `mesh=None`, split on their first dimension.

    What is on the mesh already, or traced, stays as it is. Without devices, or inside `shard_map`, everything does.
    """
    mesh = get_concrete_mesh() if mesh is None and get_concrete_mesh else mesh
    if not isinstance(mesh, Mesh) or mesh_to_enter(mesh) is None:
        return value

    def moved(array: jax.Array) -> jax.Array:
        if isinstance(array, Tracer) or getattr(array.sharding, "mesh", None) == mesh:
            return array
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(axis)))

    return jax.tree.map(moved, value)


def mesh_to_enter(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """Returns the mesh over which arrays are to be spread here: none where none is set, nor inside `shard_map`."""
    context = jax.sharding.get_abstract_mesh()
    mesh = context if mesh is None else mesh
    return None if mesh.empty or context.manual_axes else mesh


def whole(array: jax.Array, mesh: Mesh | AbstractMesh, but_first: int = 0) -> jax.Array:
    """Undoes the split over Explicit axes of all dimensions but the first few; Auto axes are left to the compiler."""
    return split_as(array, split_of(array)[:but_first], mesh)


def split_as(array: jax.Array, split: tuple[Any, ...], mesh: Mesh | AbstractMesh) -> jax.Array:
    """Splits the first dimensions over Explicit axes as another array's are, the others not at all."""
    wanted = (*split, *(None for _ in array.shape[len(split) :]))
    return array if split_of(array) == wanted else reshard_explicit(array, PartitionSpec(*wanted), mesh)


def split_of(array: jax.Array) -> tuple[Any, ...]:
    """Returns the Explicit axes over which each dimension is split; nothing is known of Auto axes."""
    return tuple(jax.typeof(array).sharding.spec)
