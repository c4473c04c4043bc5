"""Expert load: how many rows every expert gets, and what became of the other slots.

`moe_layer(..., return_stats=True)` returns these statistics; `balance.py` makes a loss and a bias update of the counts.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer

from jaxmoe.pytrees import pytree

Pytree = TypeVar("Pytree")

# A GPU adds to one address one after the other, so slots are counted in this many histograms in turn. Mean time of a
# count of 65,536 x 8 slots and 512 experts on an H100, even load / all on one expert: 64 histograms 17 / 28 us, one
# 87 / 393 us, comparing every slot with every expert 55 / 56 us but 1 GB of memory on a CPU (jax 0.11.2, jitted loop of
# 200, 2026-11).
_NUM_HISTOGRAMS = 64


@pytree
class MoEStats:
    """Counts of one layer's slots, over the ranks that were asked for.

    Every slot is counted once: `rows_per_expert.sum() + dropped_rows + unused_slots` is the number of slots. All fields
    add up over steps and micro-batches (`jax.tree.map(jnp.add, a, b)`) and may carry leading dimensions (stacked by
    `lax.scan` over layers).

    Args:
      rows_per_expert: `[*stack, experts]` int32, (token, k) pairs that each expert gets. A token that names the same
        expert in two slots counts twice.
      dropped_rows: `[*stack]` int32, pairs that found no room. Every implementation of this library is dropless:
        always 0.
      unused_slots: `[*stack]` int32, slots that give no row: id -1, an id outside the experts, or a token that is not
        valid.
      out_of_range_ids: `[*stack]` int32, those unused slots of valid tokens whose id is neither -1 nor an expert.
        Anything but 0 points at a mistake upstream.

    >>> import jax.numpy as jnp, jaxmoe
    >>> stats = jaxmoe.load_stats(jnp.array([[0, 1], [0, -1], [0, 7]]), num_experts=4)
    >>> stats.rows_per_expert
    Array([3, 1, 0, 0], dtype=int32)
    >>> int(stats.unused_slots), int(stats.out_of_range_ids), float(stats.max_over_mean_load)
    (2, 1, 3.0)
    """

    rows_per_expert: Int32[Array, "*stack experts"]
    dropped_rows: Int32[Array, "*stack"]
    unused_slots: Int32[Array, "*stack"]
    out_of_range_ids: Int32[Array, "*stack"]

    @property
    def max_over_mean_load(self) -> Float[Array, "*stack"]:
        """Rows of the busiest expert over the mean: 1.0 is perfect balance, `experts` is everything on one expert.

        Without any row it is 1.0 as well, since no expert waits for another.
        """
        rows = self.rows_per_expert
        mean = rows.sum(-1) / jnp.float32(rows.shape[-1])
        return jnp.where(mean > 0, rows.max(-1) / jnp.where(mean > 0, mean, 1), 1).astype(jnp.float32)


def load_stats(
    topk_ids: Integer[Array, "*batch top_k"],
    num_experts: int,
    *,
    token_valid: Bool[Array, "*batch"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> MoEStats:
    """Counts the rows of every expert.

    The counts are sums of integers, so they are the same from run to run in whatever order they are added.

    Args:
      topk_ids: `[*batch, top_k]` integers, the expert of each slot; -1 is an unused slot.
      num_experts: number of experts in all.
      token_valid: `[*batch]` bool; slots of tokens that are not valid count as unused.
      axis_name: mesh axes to add the counts over, inside `shard_map`. `None` counts what is passed: this rank's tokens
        inside `shard_map`, all tokens under plain `jit`.

    Raises:
      TypeError: `topk_ids` holds no integers.
      ValueError: shapes do not fit, or `axis_name` is not a manual mesh axis here.

    >>> import jax.numpy as jnp, jaxmoe
    >>> ids = jnp.array([[2, 0], [2, 1]])
    >>> jaxmoe.load_stats(ids, 3, token_valid=jnp.array([True, False])).rows_per_expert
    Array([1, 0, 1], dtype=int32)
    """
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"load_stats: topk_ids is {topk_ids.dtype}; it must hold integers, e.g. Routing.topk_ids.")
    if num_experts < 1:
        raise ValueError(f"load_stats: num_experts={num_experts} must be at least 1.")
    check_token_valid("load_stats", token_valid, topk_ids.shape[:-1], "topk_ids")
    ids = int32_ids(topk_ids)
    valid = jnp.bool_(True) if token_valid is None else token_valid[..., None]
    is_expert = (ids >= 0) & (ids < num_experts)
    used = valid & is_expert
    counts = MoEStats(
        rows_per_expert=_histogram(ids, used, num_experts),
        dropped_rows=jnp.zeros((), jnp.int32),
        unused_slots=_count(~used),
        out_of_range_ids=_count(valid & ~is_expert & (ids != -1)),
    )
    return sum_over_axis("load_stats", counts, axis_name)


def int32_ids(ids: Integer[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns ids of any integer type as int32: those that do not fit become the nearest that does, which is no expert.

    To be called before any comparison: `ids < num_experts` in a narrow type would wrap `num_experts`.
    """
    known, wide = jnp.iinfo(ids.dtype), jnp.iinfo(jnp.int32)
    if known.max > wide.max:
        ids = jnp.clip(ids, max(known.min, wide.min), wide.max)
    return ids.astype(jnp.int32)


def sum_over_axis(caller: str, tree: Pytree, axis_name: str | Sequence[str] | None) -> Pytree:
    """Returns the sum of a pytree over mesh axes, the pytree itself for none.

    Raises:
      ValueError: an axis is not manual where this is called.
    """
    if not axis_name:
        return tree
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError as error:
            raise ValueError(
                f"{caller}: axis_name={axis_name!r} names {name!r}, which is not a manual mesh axis here. Call it "
                "inside shard_map over that axis; outside of shard_map arrays hold all tokens already, so leave "
                "axis_name=None."
            ) from error
    return jax.lax.psum(tree, names)


def check_token_valid(caller: str, token_valid: Any, batch: tuple[int, ...], like: str) -> None:
    """Raises where a token mask is no bool array with one entry per token of the array named `like`."""
    if token_valid is None:
        return
    if token_valid.dtype != jnp.bool_:
        raise TypeError(f"{caller}: token_valid is {token_valid.dtype}; it must be bool. Compare, e.g. mask != 0.")
    if token_valid.shape != batch:
        raise ValueError(
            f"{caller}: token_valid has shape {token_valid.shape}; it needs one entry per token of {like}: {batch}."
        )


def _histogram(
    ids: Int32[Array, "*batch top_k"], used: Bool[Array, "..."], num_experts: int
) -> Int32[Array, " num_experts"]:
    position = sum(jax.lax.broadcasted_iota(jnp.int32, ids.shape, dimension) for dimension in range(ids.ndim))
    num_bins = _NUM_HISTOGRAMS * num_experts
    # Unused slots go to a bin that does not exist, and the scatter leaves them out.
    bins = jnp.where(used, position % _NUM_HISTOGRAMS * num_experts + ids, num_bins)
    # Where bins carry their sharding in their type (Explicit axes), a scatter must be told that its sum is replicated.
    mesh = jax.typeof(bins).sharding.mesh
    out_sharding = NamedSharding(mesh, PartitionSpec()) if AxisType.Explicit in mesh.axis_types else None
    counts = jnp.zeros(num_bins, jnp.int32).at[bins].add(1, mode="drop", out_sharding=out_sharding)
    return counts.reshape(_NUM_HISTOGRAMS, num_experts).sum(0, dtype=jnp.int32)


def _count(mask: Bool[Array, "..."]) -> Int32[Array, ""]:
    return jnp.sum(mask, dtype=jnp.int32)
