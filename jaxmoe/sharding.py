"""Meshes: the ranks that share the experts, and how `moe_layer` enters `shard_map` when it is called outside of one.

Called by `api.py`; the implementations get an `ExpertGroup` and never see a mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxmoe.array_layout import AxesOfDims, axes_of_type, known_axes, names_in, same_axes
from jaxmoe.wording import a_type

try:  # JAX's own name of it: jax.sharding.get_mesh, which is public, has no answer inside of jit
    from jax._src.mesh import get_concrete_mesh
except ImportError:  # meshes are then abstract there; tests/unit/test_sharding.py notices
    get_concrete_mesh = None

Pytree = TypeVar("Pytree")


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """Ranks that share something, such as the experts: mesh axes that are manual where the methods are called.

    A group without axes has one rank; every method is then the identity, so that no caller needs a second path.

    Args:
      axis_names: the axes.
      size: number of ranks in the group.
      parts: where the axes hold several groups, the positions along the axes (first one slowest) of each, all of
        `size`; empty where the axes are one group.
    """

    axis_names: tuple[str, ...] = ()
    size: int = 1
    parts: tuple[tuple[int, ...], ...] = ()

    def index(self) -> Int[Array, ""]:
        """Returns this rank's position in the group, first axis slowest."""
        return self._of_position(lambda number, place: place)

    def part(self) -> Int[Array, ""]:
        """Returns the number of this rank's group among `parts`."""
        return self._of_position(lambda number, place: number) if self.parts else jnp.int32(0)

    def _of_position(self, value: Callable[[int, int], int]) -> Int[Array, ""]:
        if not self.axis_names:
            return jnp.int32(0)
        position = jax.lax.axis_index(self.axis_names)
        if not self.parts:
            return position
        table = {
            each: value(number, place) for number, part in enumerate(self.parts) for place, each in enumerate(part)
        }
        return jnp.array([table[each] for each in range(len(table))], jnp.int32)[position]

    def all_gather(self, array: Shaped[Array, "rows ..."]) -> Shaped[Array, "all_rows ..."]:
        """Returns the arrays of all ranks, concatenated along the first dimension in the order of `index`."""
        if not self.axis_names:
            return array
        gather = functools.partial(
            jax.lax.all_gather, axis_name=self.axis_names, tiled=True, axis_index_groups=self._index_groups()
        )
        return with_wide_sums(gather, array)

    def exchange(self, array: Shaped[Array, "all_rows ..."]) -> Shaped[Array, "ranks rows ..."]:
        """Sends the i-th of `size` equal parts to rank i and returns what the ranks sent here, `[ranks, rows, ...]`."""
        parts = array.reshape(self.size, array.shape[0] // self.size, *array.shape[1:])
        if not self.axis_names:
            return parts
        return jax.lax.all_to_all(parts, self.axis_names, 0, 0, axis_index_groups=self._index_groups())

    def _index_groups(self) -> list[list[int]] | None:
        return [list(part) for part in self.parts] or None


def replica_groups(group: ExpertGroup, mesh: Mesh | AbstractMesh) -> np.ndarray:
    """Returns the devices of every group that shares experts, as XLA numbers the devices of a program.

    Args:
      group: the ranks of the experts; without axes every device is a group of its own.
      mesh: the whole mesh, axes that the compiler handles included.

    Returns:
      `[groups, ranks]` int64, ranks in the order of `ExpertGroup.index`; the groups of `parts` follow each other. A
      device's number is its place in the mesh, last axis fastest.

    >>> replica_groups(ExpertGroup(("expert",), 2), AbstractMesh((2, 2), ("expert", "data"))).tolist()
    [[0, 2], [1, 3]]
    """
    numbers = np.arange(math.prod(mesh.axis_sizes), dtype=np.int64).reshape(mesh.axis_sizes)
    expert_axes = [mesh.axis_names.index(name) for name in group.axis_names]
    last = range(numbers.ndim - len(expert_axes), numbers.ndim)
    of_axes = np.moveaxis(numbers, expert_axes, list(last))
    if group.parts:
        of_axes = of_axes.reshape(-1, len(group.parts) * group.size)[:, np.array(group.parts)]
    return of_axes.reshape(-1, group.size)


def devices_of_groups(group: ExpertGroup, mesh: Mesh | AbstractMesh | None) -> np.ndarray | None:
    """Returns the devices of every group that shares experts, `[groups, ranks]`, ranks in the order of the group.

    Inside of `jit` they are those of the mesh that is set while it is traced. JAX does not trace again for another mesh
    of the same shape, so nothing but a choice between implementations may hang on them, and whom a message names.

    Args:
      group: the ranks of the experts.
      mesh: what the user passed, if anything.

    Returns:
      `None` where only an abstract mesh is known: inside a `shard_map` that was given its mesh while none is set.
    """
    context = jax.sharding.get_abstract_mesh()
    for known in (mesh, get_concrete_mesh() if get_concrete_mesh else None):
        if isinstance(known, Mesh) and not known.empty and (context.empty or same_axes(known, context)):
            return known.devices.reshape(-1)[replica_groups(group, known)]
    return None


def vary_alike(tree: Pytree) -> Pytree:
    """Casts every array of a pytree to vary over all the manual mesh axes that any of them varies over.

    The transpose of the cast is the sum over those axes: it is what adds up the gradient of weights that are
    replicated over a data axis. Where `check_vma=False` nothing is known to vary and nothing is cast.
    """
    axes = frozenset[Any]().union(*(_varying(leaf) for leaf in jax.tree.leaves(tree)))

    return jax.tree.map(lambda leaf: _vary_over(leaf, axes), tree)


def vary_as(array: jax.Array, other: jax.Array) -> jax.Array:
    """Casts an array to vary over the manual mesh axes that another varies over too, as `vary_alike` does."""
    return _vary_over(array, _varying(other))


def _vary_over(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    missing = tuple(sorted(axes - _varying(array)))
    return with_wide_sums(lambda leaf: jax.lax.pcast(leaf, missing, to="varying"), array) if missing else array


def with_wide_sums(move: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """Returns `move(array)`, which brings an array to more ranks and adds up over them, itself or in its transpose.

    Where XLA cannot add up in 16 bits the array goes through float32: on CPUs jaxlib 0.11.2 ends the process in its
    pass AllReducePromotion if some axes of the mesh are not manual. Elsewhere on CPUs that pass adds up in float32 too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_partly_manual = any(size > 1 for name, size in mesh.shape.items() if name not in mesh.manual_axes)
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 2
    if is_narrow and is_partly_manual and _platform_of(mesh) == "cpu":
        return move(array.astype(jnp.float32)).astype(array.dtype)
    return move(array)


def _varying(array: Any) -> frozenset[Any]:
    return jax.typeof(array).manual_axis_type.varying


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one call of `moe_layer` runs.

    Args:
      group: the ranks of the experts.
      mesh: the mesh whose `shard_map` is still to be entered; `None` where the call is inside one, or needs none.
      token_axes: mesh axes over which the tokens are split on entry.
      known_dims: how the leading dimensions of x are split already, or as the user wrote it; shorter where it is not
        known.
      result: how y is to be placed on Auto axes: as x lies; `None` where that is not known.
      manual_axes: mesh axes that become manual on entry: those, those that split experts, and Explicit ones, over which
        nothing is then split.
      stats_axes: manual axes over which statistics are added up, where nothing is entered.
    """

    group: ExpertGroup
    mesh: Mesh | AbstractMesh | None = None
    token_axes: tuple[str, ...] = ()
    known_dims: AxesOfDims = ()
    result: PartitionSpec | None = None
    manual_axes: frozenset[str] = frozenset()
    stats_axes: tuple[str, ...] = ()


def axis_tuple(names: str | Sequence[str] | None, argument: str, caller: str = "moe_layer") -> tuple[str, ...]:
    """Returns axis names as a tuple; raises where they are not a name, a sequence of different names, or `None`."""
    if names is None:
        return ()
    if not isinstance(names, str | Sequence):
        raise TypeError(f"{caller}: {argument}={names!r} must be a mesh axis name or a tuple of names.")
    names = (names,) if isinstance(names, str) else tuple(names)
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise ValueError(f"{caller}: {argument}={names!r} must be a mesh axis name or a tuple of different names.")
    return names


def names_of_tokens(
    data_axes: str | Sequence[str] | PartitionSpec | None, caller: str = "moe_layer"
) -> tuple[str, ...]:
    """Returns the mesh axes that `data_axes` names, which may say for each dimension of x."""
    if isinstance(data_axes, PartitionSpec):
        data_axes = tuple(name for entry in data_axes for name in names_in(entry))
    return axis_tuple(data_axes, "data_axes", caller)


def place(
    x: Any,
    *,
    axis_name: str | Sequence[str] | None,
    data_axes: str | Sequence[str] | PartitionSpec | None,
    mesh: Mesh | AbstractMesh | None,
    inner_axes: Sequence[str] = (),
    part_axes: Sequence[str] = (),
    caller: str = "moe_layer",
) -> Placement:
    """Decides whether the call is inside `shard_map` already, and over which axes tokens and experts lie.

    Args:
      x: the tokens.
      axis_name: of the experts.
      data_axes: of the tokens; `None`: those of x.
      mesh: what the user passed, if anything.
      inner_axes: those that split experts beside their first dimension, as far as they are named.
      part_axes: those among them whose ranks have the same tokens, unless `data_axes` names them.
      caller: for messages.

    Raises:
      ValueError: an axis is not in the mesh, is not manual inside a `shard_map`, or there is no mesh at all.
    """
    expert_axes = axis_tuple(axis_name, "axis_name", caller)
    as_they_lie = data_axes is None  # an empty tuple says that tokens are split over no other axis
    stated = None
    if isinstance(data_axes, PartitionSpec):
        data_axes = PartitionSpec(*tuple(data_axes)[: len(x.shape) - 1])  # that of x itself may go on
        stated = tuple(names_in(entry) for entry in data_axes)
    data_axes = names_of_tokens(data_axes, caller)
    if stated is not None:  # a PartitionSpec may say which dimension experts' axes split
        data_axes = tuple(name for name in data_axes if name not in expert_axes)
    if both := set(expert_axes) & set(data_axes):
        raise ValueError(
            f"{caller}: mesh axes {sorted(both)} are in data_axes={data_axes} and in axis_name={expert_axes}; "
            "data_axes are the other axes over which tokens are split."
        )
    context = jax.sharding.get_abstract_mesh()
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{caller}: mesh is {a_type(mesh)}; it must be a jax.sharding.Mesh or None.")
    if context.manual_axes:
        return Placement(_group_inside(expert_axes, context, caller), stats_axes=expert_axes)
    if mesh is not None and not context.empty and mesh.abstract_mesh != context:
        raise ValueError(
            f"{caller}: mesh={mesh} differs from the mesh that is set, {context}. Leave out mesh=, or set that mesh."
        )
    if isinstance(mesh, AbstractMesh) and context.empty:
        raise ValueError(f"{caller}: mesh= is an AbstractMesh, which has no devices. Pass a Mesh, or set one.")
    chosen = context if mesh is None else mesh
    explicit = axes_of_type(AxisType.Explicit, chosen)
    if not (expert_axes or data_axes or inner_axes or explicit):
        return Placement(ExpertGroup())
    if chosen.empty:
        needing = f"axis_name={axis_name!r}" if expert_axes else f"mesh axis {(*data_axes, *inner_axes)[0]!r}"
        raise ValueError(
            f"{caller}: {needing} needs a mesh and none is set. Call it inside shard_map, under "
            "`with jax.set_mesh(mesh):` (`with mesh:` does not set it), or pass mesh=; axis_name=None runs without "
            "expert parallelism."
        )
    _check_in_mesh((*data_axes, *expert_axes), chosen, caller)
    known = known_axes(x, chosen)
    auto = not explicit and known
    dims = known[:-1] if stated is None else stated
    if as_they_lie:
        data_axes = tuple(name for names in dims for name in names if name not in (*expert_axes, *part_axes))
    token_axes = (*data_axes, *expert_axes)
    return Placement(
        _group(expert_axes, chosen),
        chosen,
        token_axes,
        tuple(tuple(name for name in names if name in token_axes) for names in dims),
        PartitionSpec(*(names or None for names in known)) if auto else None,
        explicit | {*token_axes, *inner_axes},
        stats_axes=token_axes,
    )


def check_mesh_is_set(
    arrays: Any, placement: Placement, caller: str = "moe_layer", products: bool = True, takes_handle: bool = False
) -> None:
    """Raises where arrays lie along Explicit axes of a mesh that is neither set nor passed, in plain JAX.

    JAX has no rule for gathers and sorts of arrays that such an axis splits, and none for grouped GEMMs of any on such
    a mesh; its own errors name arguments that no user passes.

    Args:
      arrays: a pytree of them, whose names the message has.
      placement: of the call.
      caller: for the message.
      products: there is a grouped GEMM.
      takes_handle: the caller takes a handle, and no `mesh=`.
    """
    if placement.mesh is not None or jax.sharding.get_abstract_mesh().manual_axes:
        return
    for path, array in jax.tree_util.tree_leaves_with_path(arrays):
        lies = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array).sharding
        explicit = axes_of_type(AxisType.Explicit, lies.mesh) if isinstance(lies, NamedSharding) else ()
        if explicit and (products or any(lies.spec)):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            callers, otherwise = (f"dispatch and {caller}", "") if takes_handle else (caller, ", or pass mesh=")
            raise ValueError(
                f"{caller}: {name} lies on a mesh with Explicit axes {sorted(explicit)}, and no mesh is set. Call "
                f"{callers} under `with jax.set_mesh(mesh):`{otherwise}."
            )


def with_manual_axes(placement: Placement, names: Sequence[str]) -> Placement:
    """Returns the placement with more axes that become manual, where anything is entered."""
    if placement.mesh is None:
        return placement
    return dataclasses.replace(placement, manual_axes=placement.manual_axes | {*names})


def _group_inside(expert_axes: tuple[str, ...], context: AbstractMesh, caller: str) -> ExpertGroup:
    _check_in_mesh(expert_axes, context, caller)
    manual = tuple(context.manual_axes)
    for name in expert_axes:
        if name not in manual:
            raise ValueError(
                f"{caller}: mesh axis {name!r} is not manual inside this shard_map, whose manual axes are {manual}. "
                f"Add {name!r} to the axis_names of that shard_map, or call {caller} outside of it."
            )
    # Sorts and grouped GEMMs have no rule for arrays that are still split over an Explicit axis.
    if remaining := axes_of_type(AxisType.Explicit, context):
        raise ValueError(
            f"{caller}: mesh axes {sorted(remaining)} are Explicit inside this shard_map, whose manual axes are "
            f"{manual}. Make them manual too (leave out axis_names=), or call {caller} outside of it."
        )
    return _group(expert_axes, context)


def _group(expert_axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> ExpertGroup:
    size = math.prod(mesh.shape[name] for name in expert_axes)
    # Axes of size one are no peers, and nothing has to vary over them.
    return ExpertGroup(expert_axes, size) if size > 1 else ExpertGroup()


def check_split_experts(experts: Any, x: Any, group: ExpertGroup) -> None:
    """Raises where the types say that all ranks of the group hold the same experts, inside `shard_map`."""
    axes, matrices = set(group.axis_names), jax.tree.leaves(experts.matrix)[0]
    tracked = _varying(x) or _varying(matrices)
    if tracked and not axes <= _varying(matrices):
        raise ValueError(
            f"moe_layer: experts are the same on all ranks of mesh axis {', '.join(map(repr, group.axis_names))}; "
            "every rank must have its own. Pass them to shard_map with that axis on their first dimension, e.g. "
            f"in_specs P({group.axis_names[0]!r}), or call moe_layer with axis_name=None."
        )


def _check_in_mesh(names: Sequence[str], mesh: Mesh | AbstractMesh, caller: str) -> None:
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(
                f"{caller}: axis {name!r} is not in the mesh, whose axes are "
                f"{dict(mesh.shape)}. Pass axis_name= (experts) or data_axes= (tokens) with names of that mesh, "
                "or axis_name=None for no expert parallelism."
            )


def platform(placement: Placement, x: Any) -> str:
    """Returns the platform the call will be compiled for: of the mesh, of `x`, or the one JAX uses by default."""
    return _platform_of(placement.mesh if placement.mesh is not None else jax.sharding.get_abstract_mesh(), x)


def _platform_of(mesh: Mesh | AbstractMesh, x: Any = None) -> str:
    if isinstance(mesh, Mesh) and not mesh.empty:
        return mesh.devices.flat[0].platform
    if known := getattr(getattr(mesh, "abstract_device", None), "platform", None):
        return known
    if isinstance(x, jax.Array) and not isinstance(x, Tracer):
        return next(iter(x.devices())).platform
    default = getattr(jax.config, "jax_default_device", None)
    return default if isinstance(default, str) else getattr(default, "platform", None) or jax.default_backend()
