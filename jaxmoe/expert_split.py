"""How the matrices of experts are split inside an expert, and how a rank gets what it multiplies with.

Two kinds of mesh axes may split `hidden` or `intermediate`. Ranks along one kind have different tokens (FSDP): they
gather what is split before it is used, and gradients are added up and scattered back. Ranks along the other kind have
the same tokens (tensor parallelism): each computes its part of the intermediate dimension, and their partial outputs
are added up once.

`call.py` chooses, `api.py` calls the rest around the implementations, which see whole experts of a smaller width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxmoe.array_layout import known_axes
from jaxmoe.block_scaled import BLOCK, BlockScaled
from jaxmoe.experts import AnyExperts, FusedExperts, present
from jaxmoe.formats import at_least_float32
from jaxmoe.four_bit import NVFP4
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.sharding import axis_tuple, vary_as, with_wide_sums

# Dimensions of the arrays of Experts behind that of the experts. Quantised matrices lie as [out, in].
_WIDE = {
    "w_gate": ("hidden", "intermediate"),
    "w_up": ("hidden", "intermediate"),
    "w_gate_up": ("hidden", "intermediate"),
    "w_down": ("intermediate", "hidden"),
    "b_gate": ("intermediate",),
    "b_up": ("intermediate",),
    "b_gate_up": ("intermediate",),
    "b_down": ("hidden",),
}


@dataclasses.dataclass(frozen=True)
class ExpertSplit:
    """How experts are split beside their first dimension.

    Args:
      hidden: mesh axes over which their hidden dimension is split on entry of `shard_map`; it is gathered.
      intermediate: the same of the intermediate dimension.
      gathered: those axes of `intermediate` over which it is gathered.
      ranks: how many ranks compute parts of the same experts: the product of the other axes of `intermediate`.
      gathered_ranks: the product of `gathered`.
      undivided: axes over which the intermediate dimension lies split, and along which every rank computes all of it,
        since no part of gate and up in halves has both.
    """

    hidden: tuple[str, ...] = ()
    intermediate: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    ranks: int = 1
    gathered_ranks: int = 1
    undivided: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """Axes along which ranks compute parts of the same experts."""
        return tuple(name for name in self.intermediate if name not in self.gathered)

    def width(self, intermediate: int, entering: bool) -> int:
        """Returns the intermediate width that a rank multiplies with, of experts as the call has them.

        Args:
          intermediate: of the arrays.
          entering: whether `shard_map` is entered with them; else they are shards.
        """
        return intermediate // self.ranks if entering else intermediate * self.gathered_ranks

    def specs(self, experts: AnyExperts, expert_axes: tuple[str, ...]) -> AnyExperts:
        """Returns how each array of experts is split where `shard_map` is entered."""
        axes = {"hidden": self.hidden or None, "intermediate": self.intermediate or None}

        def of(leaf: Any, dimensions: tuple[str | None, ...]) -> PartitionSpec:
            return PartitionSpec(expert_axes or None, *(name and axes[name] for name in dimensions))

        return _each_array(of, experts)

    def gather(self, experts: AnyExperts, tokens: Shaped[Array, "*batch hidden"], rounds: bool) -> AnyExperts:
        """Returns the experts that this rank multiplies with: whole, but for what `parts` split.

        Args:
          experts: of this rank.
          tokens: of this rank.
          rounds: whether wide arrays are multiplied in the dtype of the tokens; they are then rounded to it before they
            are sent, and come back in their own dtype: half the bytes of float32, the same products.
        """
        axes = {"hidden": self.hidden, "intermediate": self.gathered, None: ()}

        def of(leaf: Any, dimensions: tuple[str | None, ...]) -> jax.Array:
            if any(axes[name] for name in dimensions):
                # Its transpose, which comes last, adds up gradients over the other axes of the tokens: parts of them,
                # not what was gathered.
                leaf = vary_as(leaf, tokens)
            for number, name in enumerate(dimensions, start=1):
                if axes[name]:
                    if rounds and leaf.dtype != tokens.dtype:
                        leaf = _gather_rounded(leaf, axes[name], number, tokens.dtype)
                    else:
                        leaf = _gather(leaf, axes[name], number)
            return leaf

        experts = _each_array(of, experts) if self.hidden or self.gathered else experts
        if self.parts and experts.b_down is not None:
            # Of the sum over the parts, not of each.
            first = jax.lax.axis_index(self.parts) == 0
            experts = dataclasses.replace(experts, b_down=jnp.where(first, experts.b_down, 0))
        return experts

    def add_up(self, y: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """Returns the sum of what the parts have computed, in float32, rounded once."""
        if not self.parts:
            return y
        return jax.lax.psum(y.astype(at_least_float32(y.dtype)), self.parts).astype(y.dtype)


def _gather(shard: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    return with_wide_sums(lambda part: jax.lax.all_gather(part, axes, axis=dimension, tiled=True), shard)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _gather_rounded(shard: jax.Array, axes: tuple[str, ...], dimension: int, sent: DTypeLike) -> jax.Array:
    """Returns the shards of all ranks in their own dtype, rounded to the one that they are sent in.

    Derivatives are those of a gather that rounds nothing: gradients are added up and scattered as wide as they are.
    """
    return _gather(shard.astype(sent), axes, dimension).astype(shard.dtype)


@_gather_rounded.defjvp
def _gather_rounded_jvp(
    axes: tuple[str, ...], dimension: int, sent: DTypeLike, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (shard,), (tangent,) = primals, tangents
    return _gather_rounded(shard, axes, dimension, sent), _gather(tangent, axes, dimension)


def _each_array(function: Callable[[Any, tuple[str | None, ...]], Any], experts: AnyExperts) -> AnyExperts:
    """Returns experts of what a function makes of each array, those of quantised matrices one by one.

    The function gets the dimensions behind that of the experts too; `None` is one that all elements of an expert share.
    """
    made = {}
    for name, matrix in present(experts).items():
        dimensions = _WIDE[name]
        if not isinstance(matrix, QuantizedMatrix):
            made[name] = function(matrix, dimensions)
            continue
        out_in = dimensions[::-1]
        by_kind = {"128x128": out_in, "channel": (out_in[0], None), "expert": (None, None)}
        of_scales = by_kind[matrix.kinds[0]] if isinstance(matrix, BlockScaled) else out_in
        known = {"values": out_in, "scales": of_scales, "global_scales": (), "input_scale": ()}
        arrays = {each: array for each in known if (array := getattr(matrix, each, None)) is not None}
        replaced: Any = {each: function(array, known[each]) for each, array in arrays.items()}
        made[name] = dataclasses.replace(matrix, **replaced)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(experts, **made)


def choose(
    experts: AnyExperts,
    hidden_axis: str | Sequence[str] | None,
    intermediate_axis: str | Sequence[str] | None,
    *,
    mesh: Mesh | AbstractMesh,
    entering: bool,
    expert_axes: tuple[str, ...],
    token_axes: tuple[str, ...],
) -> ExpertSplit:
    """Returns how experts are split inside an expert.

    Args:
      experts: checked, but for their sizes.
      hidden_axis: as the user wrote it; `None`: as the arrays lie, where that is known.
      intermediate_axis: the same.
      mesh: has the axes.
      entering: whether `shard_map` is entered; else the arrays are shards already.
      expert_axes: over which the first dimension is split.
      token_axes: over which the tokens are split.

    Raises:
      ValueError: an axis is not in the mesh, or splits something else as well; sizes that do not divide.
    """
    named = {
        "hidden": axis_tuple(hidden_axis, "hidden_axis"),
        "intermediate": axis_tuple(intermediate_axis, "intermediate_axis"),
    }
    taken = {**dict.fromkeys(expert_axes, "axis_name"), **dict.fromkeys(named["hidden"], "hidden_axis")}
    for dimension, names in named.items():
        for name in names:
            _check_axis(name, f"{dimension}_axis", mesh, entering)
            if taken.get(name, f"{dimension}_axis") != f"{dimension}_axis":
                raise ValueError(
                    f"moe_layer: mesh axis {name!r} is in {dimension}_axis and in {taken[name]}. A mesh axis can split "
                    "one dimension of the experts."
                )
    size = dict(mesh.shape)
    if entering:
        if hidden_axis is None and intermediate_axis is None:
            named = _as_they_lie(experts, mesh, expert_axes)
        else:
            for dimension, names in named.items():
                of_parts = dimension == "intermediate" and not {*names} <= {*token_axes}
                if not _can_be_split(experts, dimension, names, size, of_parts):
                    named[dimension] = ()
    hidden, intermediate = named["hidden"], named["intermediate"]
    gathered = tuple(name for name in intermediate if name in token_axes)
    if entering:
        # Ranks that have the same tokens and whole experts: gathered by XLA, on entry.
        hidden = tuple(name for name in hidden if name in token_axes)
    parts, undivided = tuple(name for name in intermediate if name not in gathered), ()
    if _product(parts, size) > 1 and isinstance(experts, FusedExperts) and experts.layout == "halves":
        if not entering or intermediate_axis is not None:
            raise ValueError(
                f"moe_layer: ranks along {', '.join(map(repr, parts))} in intermediate_axis compute parts of the same "
                "experts, and experts.w_gate_up has layout='halves': a part of its columns has gate or up alone. Pass "
                "experts.split(), or weights that are stored with layout='interleaved'."
            )
        # As the arrays lie, which nobody has asked for: gathered by XLA, on entry, and `call.py` warns.
        undivided, parts, intermediate = parts, (), gathered
    return ExpertSplit(hidden, intermediate, gathered, _product(parts, size), _product(gathered, size), undivided)


def _check_axis(name: str, argument: str, mesh: Mesh | AbstractMesh, entering: bool) -> None:
    if name not in mesh.axis_names:
        raise ValueError(
            f"moe_layer: {argument} names {name!r}, which is not in the mesh, whose axes are {dict(mesh.shape)}."
        )
    if not entering and name not in mesh.manual_axes:
        raise ValueError(
            f"moe_layer: {argument} names mesh axis {name!r}, which is not manual inside this shard_map, whose manual "
            f"axes are {tuple(mesh.manual_axes)}. Add it to the axis_names of that shard_map."
        )


def _as_they_lie(
    experts: AnyExperts, mesh: Mesh | AbstractMesh, expert_axes: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """Returns the axes over which the first matrix is split, as far as is known, and over which all can be."""
    first = experts.matrix
    quantized = isinstance(first, QuantizedMatrix)
    known = known_axes(first.values if quantized else first, mesh)
    if not known:
        return {"hidden": (), "intermediate": ()}
    order = _WIDE["w_gate"][::-1] if quantized else _WIDE["w_gate"]
    size, found = dict(mesh.shape), {}
    for dimension, names in zip(order, known[1:], strict=True):
        names = tuple(name for name in names if name not in expert_axes and size[name] > 1)
        found[dimension] = () if _uneven(experts, dimension, _product(names, size)) else names
    return found


def _product(names: Iterable[str], size: dict[str, int]) -> int:
    return math.prod(size[name] for name in names)


def _can_be_split(
    experts: AnyExperts, dimension: str, names: tuple[str, ...], size: dict[str, int], of_parts: bool
) -> bool:
    """Whether `shard_map` can take experts that are split so.

    Where an axis splits blocks that share a scale, the compiler gathers them on entry. Ranks that compute parts cannot
    do without whole blocks.

    Raises:
      ValueError: no rank could have an equal part, or none of whole blocks where ranks compute them.
    """
    ranks, width = _product(names, size), getattr(experts, dimension)
    uneven = _uneven(experts, dimension, ranks)
    if uneven is None:
        return True
    name, block = uneven
    if block > 1 and not of_parts and width % ranks == 0:
        return False
    of = f" in blocks of {block}" if block > 1 else ""
    blocks, rest = divmod(width, block)
    # Where a part is no whole block, or there is one block, no axis will do.
    other = f", or choose an axis whose size divides {blocks}" if blocks > 1 and not rest else ""
    raise ValueError(
        f"moe_layer: experts.{name} has {dimension}={width}{of}, which cannot be split over the {ranks} ranks of mesh "
        f"axis {', '.join(map(repr, names))}. Leave {dimension}_axis out{other}."
    )


def _uneven(experts: AnyExperts, dimension: str, ranks: int) -> tuple[str, int] | None:
    """Returns an array that so many ranks cannot share along a dimension, and how many elements stay together.

    That of the largest blocks: blocks are powers of two, so what does for them does for all.
    """
    if ranks == 1:
        return None
    blocks = {
        name: _block(matrix, along_in=_WIDE[name][0] == dimension)
        for name, matrix in present(experts).items()
        if dimension in _WIDE[name]
    }
    name = max(blocks, key=lambda name: blocks[name])
    return (name, blocks[name]) if getattr(experts, dimension) % (ranks * blocks[name]) else None


def _block(matrix: Any, along_in: bool) -> int:
    """Returns the elements along a dimension that share a scale, and so stay together; 1 where all of them do."""
    if not isinstance(matrix, QuantizedMatrix) or (isinstance(matrix, BlockScaled) and matrix.kinds[0] != "128x128"):
        return 1
    if isinstance(matrix, NVFP4) and matrix.through_e4m3:
        return BLOCK  # what is rounded together
    return matrix.format.scale_columns if along_in else matrix.format.scale_rows
