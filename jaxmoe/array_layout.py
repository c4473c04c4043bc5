"""How arrays lie on a mesh: what JAX knows of it, and how they are moved where it is part of their types.

`sharding.py` places calls by it, and what enters `shard_map` moves arrays with it.
"""

from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

Pytree = TypeVar("Pytree")
# For each dimension of an array, the mesh axes over which it is split.
AxesOfDims = tuple[tuple[str, ...], ...]


def axes_of_type(kind: AxisType, mesh: Mesh | AbstractMesh) -> frozenset[str]:
    return frozenset(name for name, type_ in zip(mesh.axis_names, mesh.axis_types, strict=True) if type_ == kind)


def same_axes(mesh: Mesh | AbstractMesh, other: Mesh | AbstractMesh) -> bool:
    """Whether they agree but for the types of axes: those that are Manual inside `shard_map` are not outside."""
    return (mesh.axis_names, mesh.axis_sizes) == (other.axis_names, other.axis_sizes)


def known_axes(array: Any, mesh: Mesh | AbstractMesh) -> AxesOfDims:
    """Returns the axes of a mesh over which each dimension of an array is split; nothing where that is not known.

    Explicit axes are part of a type. Auto axes are known of an array with values, outside of `jit`, that lies on the
    mesh, or of a `jax.ShapeDtypeStruct` with the devices of one.
    """
    while isinstance(array, Tracer) and hasattr(array, "primal"):
        array = array.primal  # under `grad` alone: JAX's own name for the value that is differentiated
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not same_axes(mesh, sharding.mesh):
        return ()
    of_type = isinstance(sharding.mesh, AbstractMesh)
    known = axes_of_type(AxisType.Explicit, mesh) if of_type else {*mesh.axis_names}
    if not known:
        return ()
    spec = (*sharding.spec, *([None] * (len(array.shape) - len(sharding.spec))))
    return tuple(tuple(name for name in names_in(entry) if name in known) for entry in spec)


def names_in(entry: Any) -> tuple[str, ...]:
    """Returns the axes of an entry of a `PartitionSpec`; what is unconstrained names none."""
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def reshard_explicit(tree: Pytree, specs: Any, mesh: Mesh | AbstractMesh | None) -> Pytree:
    """Reshards arrays over the Explicit axes of the mesh, since `shard_map` then wants an exact match.

    Args:
      tree: a pytree of arrays.
      specs: a `PartitionSpec` for each, a prefix of the tree; `None` leaves what it is for as it is.
      mesh: axes that are not Explicit are left to the compiler.
    """
    explicit = frozenset() if mesh is None else axes_of_type(AxisType.Explicit, mesh)
    if mesh is None or not explicit:
        return tree

    def explicit_part(entry: Any) -> Any:
        return tuple(name for name in names_in(entry) if name in explicit) or None

    def move(spec: PartitionSpec | None, subtree: Any) -> Any:
        if spec is None:
            return subtree
        wanted = PartitionSpec(*(explicit_part(entry) for entry in spec))
        return jax.tree.map(lambda array: jax.sharding.reshard(array, _on_mesh(wanted, mesh)), subtree)

    return jax.tree.map(move, specs, tree, is_leaf=lambda leaf: leaf is None or isinstance(leaf, PartitionSpec))


def whole_in_last(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns an array whose last dimension no Explicit axis splits; the others stay as they are."""
    sharding = jax.typeof(array).sharding
    spec = tuple(sharding.spec)
    if len(spec) < array.ndim or not names_in(spec[-1]):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec[:-1], None)))


def with_tokens_of(array: Shaped[Array, "..."], model: Shaped[Array, "*batch columns"]) -> Array:
    """Returns an array whose tokens Explicit axes split as those of another: JAX joins no others.

    Args:
      array: `[*batch]`, or with a dimension more, which is then whole.
      model: `[*batch, columns]`.
    """
    known, of_model = jax.typeof(array).sharding, jax.typeof(model).sharding
    batch = model.ndim - 1
    wanted = (*[*of_model.spec, *[None] * batch][:batch], *[None] * (array.ndim - batch))
    if tuple(known.spec) == wanted or not any((*known.spec, *wanted)):
        return array
    # Where no mesh is set, arrays that are not split know none.
    mesh = of_model.mesh if any(wanted) else known.mesh
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*wanted)))


def like(
    array: Shaped[Array, "..."],
    model: Shaped[Array, "..."],
    mesh: Mesh | AbstractMesh | None,
    on_auto_axes: PartitionSpec | None = None,
) -> Array:
    """Places an array as another is, where its type says how (Explicit axes), or where `on_auto_axes` does."""
    if mesh is None:
        return array
    if on_auto_axes is not None:
        return jax.lax.with_sharding_constraint(array, _on_mesh(on_auto_axes, mesh))
    if not axes_of_type(AxisType.Explicit, mesh):
        return array
    return jax.sharding.reshard(array, _on_mesh(jax.typeof(model).sharding.spec, mesh))


def _on_mesh(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> NamedSharding | PartitionSpec:
    return NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec
