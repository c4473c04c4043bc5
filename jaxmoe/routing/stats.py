"""Expert load: how many rows every expert gets, and what became of the other slots.

`moe_layer(..., return_stats=True)` returns these statistics; `balance.py` makes losses and a bias update of them.

Counts and losses are sums over tokens, and those that are asked for together are one sum: every token has a row of
floats (`Counters.columns` and what `balance.py` adds), and `sum_over_tokens` adds up all rows. One reduction is one
all-reduce, also under plain `jit`, where the compiler puts one behind every reduction over split tokens; of losses that
a scan stacks, `sum_over_parts` leaves it to the end of the scan. Counts are floats on the way because an all-reduce has
one type, and because XLA's fast kernel for small ones takes floats only.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer

from jaxmoe.array_layout import with_tokens_of
from jaxmoe.arrays import check_array
from jaxmoe.integers import integer, saturated
from jaxmoe.pytrees import pytree

# float32 holds every integer up to here, so ones that add up to no more are added exactly, in whatever order.
_MOST_PER_COLUMN = 2**24
# Over at most so many parts of the tokens of each device sums are spread, see `sum_over_parts`. A thread adds up one
# column of one part: of 1024 tokens and 128 experts the kernel took 7.8 us with 128 parts, 3.7 with 512, 3.1 with 1024
# (H200). In a scan each layer stores them: 0.5 MB of 128 experts.
_PARTS_OF_A_DEVICE = 512
# So many slots of a token are looked at one by one, in the kernel that sums over tokens. More are a reduction of their
# own ahead of it.
_MOST_UNROLLED_SLOTS = 32


@pytree
class MoEStats:
    """Counts of one layer's slots, over the ranks that were asked for.

    Every slot is counted once: `rows_per_expert.sum() + dropped_rows + unused_slots` is the number of slots. Counts
    add up over steps and micro-batches (`jax.tree.map(jnp.add, a, b)`) and may carry leading dimensions (stacked by
    `lax.scan` over layers).

    Args:
      counts: `[*stack, experts + 2]` int32: the slots that name each expert, those out of range, and the other unused
        ones. One array, since in a scan over layers each result is stored by a kernel of its own: with an array for
        each property statistics took 21 us of a layer of 319 (docs/performance.md).

    >>> import jax.numpy as jnp, jaxmoe
    >>> stats = jaxmoe.load_stats(jnp.array([[0, 1], [0, -1], [0, 7]]), num_experts=4)
    >>> stats.rows_per_expert
    Array([3, 1, 0, 0], dtype=int32)
    >>> int(stats.unused_slots), int(stats.out_of_range_ids), float(stats.max_over_mean_load)
    (2, 1, 3.0)
    """

    counts: Int32[Array, "*stack columns"]

    @property
    def rows_per_expert(self) -> Int32[Array, "*stack experts"]:
        """The (token, k) pairs that each expert gets. A token that names an expert in two slots counts twice."""
        return self.counts[..., :-2]

    @property
    def dropped_rows(self) -> Int32[Array, "*stack"]:
        """Pairs that found no room. Every implementation of this library is dropless: always 0."""
        return jnp.zeros_like(self.counts[..., 0])

    @property
    def unused_slots(self) -> Int32[Array, "*stack"]:
        """Slots that give no row: id -1, an id outside the experts, or a token that is not valid."""
        return self.counts[..., -2] + self.counts[..., -1]

    @property
    def out_of_range_ids(self) -> Int32[Array, "*stack"]:
        """Those unused slots of valid tokens whose id is neither -1 nor an expert: 0 but for a mistake upstream."""
        return self.counts[..., -2]

    @property
    def max_over_mean_load(self) -> Float[Array, "*stack"]:
        """Rows of the busiest expert over the mean: 1.0 is perfect balance, `experts` is everything on one expert.

        Without any row it is 1.0 as well, since no expert waits for another.
        """
        rows = self.rows_per_expert.astype(jnp.float32)
        most, mean = rows.max(-1), rows.mean(-1)
        return jnp.where(mean > 0, most / jnp.where(mean > 0, mean, 1), 1)


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
      TypeError: an argument is no array; `topk_ids` holds no integers; `token_valid` is not bool.
      ValueError: shapes do not fit, or `axis_name` is not a manual mesh axis here.

    >>> import jax.numpy as jnp, jaxmoe
    >>> ids = jnp.array([[2, 0], [2, 1]])
    >>> jaxmoe.load_stats(ids, 3, token_valid=jnp.array([True, False])).rows_per_expert
    Array([1, 0, 1], dtype=int32)
    """
    check_array("load_stats", "topk_ids", topk_ids)
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"load_stats: topk_ids is {topk_ids.dtype}; it must hold integers, e.g. Routing.topk_ids.")
    if (experts := integer(num_experts)) is None or experts < 1:
        raise ValueError(f"load_stats: num_experts={num_experts!r} must be an integer of at least 1.")
    check_token_valid("load_stats", token_valid, topk_ids.shape[:-1], "topk_ids")
    axes = manual_axes("load_stats", axis_name)
    counters = Counters.of(topk_ids.shape, experts, axes)
    sums = counters.sums(topk_ids, token_valid)
    return counters.stats(jax.lax.psum(sums, axes) if axes else sums)


@dataclasses.dataclass(frozen=True)
class Counters:
    """How slots are counted in float32: what each token adds to which column, and what the sums mean.

    A counter has `num_experts + 2` columns: the slots of every expert, those out of range, and the other unused ones.
    Each slot is compared with each column, in the kernels that also sum over tokens. For 65,536 x 8 slots and 512
    experts that took 55 us on an H100, which needs 5 ms or more for the GEMMs of so many slots (qwen3-30b-a3b's
    widths). Scattering the slots into 64 histograms took 17 us, but for few tokens it is the number of kernels that
    counts, and a compiler that splits tokens adds up all histograms over the mesh. On a CPU, where XLA fuses less, the
    columns are written to memory: as much as the router's probabilities take.

    There is one counter unless a column could exceed `_MOST_PER_COLUMN`. Then the slots of a token are spread over
    several, and where that is not enough, tokens take turns.

    Args:
      num_experts: of the ids that are counted.
      slots_per_counter: successive slots of a token that go to one counter.
      token_turns: counters among which tokens take turns, by their position on this rank.
      top_k: slots of a token.
    """

    num_experts: int
    slots_per_counter: int
    token_turns: int
    top_k: int

    @classmethod
    def of(cls, shape: tuple[int, ...], num_experts: int, axes: tuple[str, ...]) -> "Counters":
        """Returns the fewest counters for ids `[*batch, top_k]` on every rank of the mesh axes to sum over."""
        tokens, top_k = max(math.prod(shape[:-1]), 1), max(shape[-1], 1)
        ranks = math.prod(jax.lax.axis_size(name) for name in axes)
        most_per_rank = max(_MOST_PER_COLUMN // ranks, 1)
        slots_per_counter = min(max(most_per_rank // tokens, 1), top_k)
        return cls(num_experts, slots_per_counter, -(-tokens // most_per_rank), top_k)

    def columns(
        self, topk_ids: Integer[Array, "*batch top_k"], token_valid: Bool[Array, "*batch"] | None
    ) -> Float[Array, "*batch columns"]:
        """Returns what each token adds to each column: how many of its slots belong there."""
        belongs = self._column_of(topk_ids, token_valid)
        columns = jnp.expand_dims(self._numbers_of_columns(), range(belongs.ndim - 1))

        def counter(slots: jax.Array) -> jax.Array:
            if not _are_unrolled(slots):
                return (slots[..., None] == columns[..., None, :]).sum(-2, dtype=jnp.float32)
            count = jnp.zeros((), jnp.float32)
            for slot in _each(slots):
                count = jnp.where(slot[..., None] == columns, count + 1, count)
            return count

        return jnp.concatenate([counter(slots) for slots in self._slots_of_counters(belongs)], -1)

    def sums(
        self, topk_ids: Integer[Array, "*batch top_k"], token_valid: Bool[Array, "*batch"] | None
    ) -> Float[Array, " columns"]:
        """Returns the sums over tokens of `columns`, where nothing else is to be added up with them.

        Each column looks at all slots: what a kernel does with no array in between, where sums over tokens take one to
        write what is added up, one to clear the sums and one to add up.
        """
        belongs = self._column_of(topk_ids, token_valid)
        columns = jnp.expand_dims(self._numbers_of_columns(), range(1, 1 + belongs.ndim))
        slots = self._slots_of_counters(belongs)
        return jnp.concatenate(
            [(columns == each[None]).sum(range(1, columns.ndim), dtype=jnp.float32) for each in slots]
        )

    def _numbers_of_columns(self) -> Int32[Array, " columns"]:
        return jnp.arange((self.num_experts + 2) * self.token_turns, dtype=jnp.int32)

    def _column_of(
        self, topk_ids: Integer[Array, "*batch top_k"], token_valid: Bool[Array, "*batch"] | None
    ) -> Int32[Array, "*batch top_k"]:
        """Returns the column of the counter of each slot."""
        ids = int32_ids(topk_ids)
        is_expert = (ids >= 0) & (ids < self.num_experts)
        out_of_range, unused = self.num_experts, self.num_experts + 1
        belongs = jnp.where(is_expert, ids, jnp.where(ids == -1, unused, out_of_range))
        if token_valid is not None:
            belongs = jnp.where(with_tokens_of(token_valid, ids)[..., None], belongs, unused)
        if self.token_turns > 1:
            turn = _positions(ids.shape[:-1]) % self.token_turns
            belongs += (self.num_experts + 2) * turn[..., None]
        return belongs

    def _slots_of_counters(self, belongs: Int32[Array, "*batch top_k"]) -> list[Int32[Array, "*batch slots"]]:
        firsts = range(0, max(belongs.shape[-1], 1), self.slots_per_counter)
        return [belongs[..., first : first + self.slots_per_counter] for first in firsts]

    @property
    def number(self) -> int:
        """Of counters."""
        return -(-self.top_k // self.slots_per_counter) * self.token_turns

    def stats(self, sums: Float[Array, " columns"]) -> MoEStats:
        """Returns the statistics, given the sums over tokens of `columns`."""
        return stats_of(sums.reshape(self.number, self.num_experts + 2))


def stats_of(sums: Float[Array, "*stack counters columns"]) -> MoEStats:
    """Returns the statistics, given the sums over tokens of each counter's columns."""
    return MoEStats(sums.astype(jnp.int32).sum(-2, dtype=jnp.int32))


def any_slot(slots: Bool[Array, "*batch slots"]) -> Bool[Array, "*batch"]:
    """Returns whether any slot of each token is true."""
    return functools.reduce(operator.or_, _each(slots)) if _are_unrolled(slots) else slots.any(-1)


def _are_unrolled(slots: jax.Array) -> bool:
    return 1 <= slots.shape[-1] <= _MOST_UNROLLED_SLOTS and jax.typeof(slots).sharding.spec[-1] is None


def _each(slots: jax.Array) -> list[jax.Array]:
    return [slots[..., slot] for slot in range(slots.shape[-1])]


def sum_over_tokens(columns: Sequence[Float[Array, "..."]], axes: tuple[str, ...]) -> Float[Array, " columns"]:
    """Returns the sums of arrays `[*batch, n]` over the batch and over mesh axes behind each other, in one all-reduce.

    XLA fuses what makes the arrays with the sum, or writes them as one array first, whichever it takes for faster.
    """
    rows = jnp.concatenate(_split_alike(columns), axis=-1)
    sums = rows.sum(range(rows.ndim - 1))
    return jax.lax.psum(sums, axes) if axes else sums


def sum_over_parts(
    columns: Sequence[Float[Array, "..."]], axes: tuple[str, ...]
) -> Float[Array, "parts other_parts columns"]:
    """Returns such sums of parts of the batch, which add up to those of all of it.

    Under plain `jit` a compiler that splits tokens over devices then has nothing to add up over them before somebody
    asks for the sum of the parts: in a scan over layers that is one all-reduce behind the loop in the place of one in
    every turn. And a part is so few tokens that one kernel makes and adds up its rows, where sums over all of them take
    three: to write them, to clear the sums, to add up (docs/performance.md has what that saves). Where mesh axes are
    named, or axes are Explicit, there is one part.
    """
    rows = jnp.concatenate(_split_alike(columns), axis=-1)
    batch = rows.shape[:-1]
    is_known = all(isinstance(size, int) for size in batch)  # unlike those of an export for any number of tokens
    if axes or any(jax.typeof(rows).sharding.spec) or not batch or not is_known:
        return sum_over_tokens([rows], axes)[None, None]
    # The tokens of a device have to be whole parts, or it would be sent those of others. Over how many devices each of
    # the first two dimensions (sequences and their tokens, say) is split is not known here, but it divides the number
    # of them all.
    devices, sequences, tokens = jax.device_count(), batch[0], math.prod(batch[1:2])
    first = math.gcd(sequences, devices * _PARTS_OF_A_DEVICE)
    second = math.gcd(tokens, devices * max(_PARTS_OF_A_DEVICE // first, 1))
    if not rows.size:
        return jnp.zeros((first, second, rows.shape[-1]), rows.dtype)
    return rows.reshape(first, sequences // first, second, -1, rows.shape[-1]).sum((1, 3))


def _split_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits arrays over Explicit axes, each dimension but the last as the first that is split: to be concatenated."""
    shardings = [jax.typeof(array).sharding for array in arrays]
    specs = [tuple(sharding.spec) for sharding in shardings]
    wanted = (*(next(filter(None, axes), None) for axes in zip(*(spec[:-1] for spec in specs), strict=True)), None)
    if all(spec == wanted for spec in specs):
        return list(arrays)
    # Where no mesh is set, arrays that are not split know none.
    mesh = next(sharding.mesh for sharding, spec in zip(shardings, specs, strict=True) if any(spec))
    return [jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*wanted))) for array in arrays]


def int32_ids(ids: Integer[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Returns ids of any integer type as int32: those that do not fit become the nearest that does, which is no expert.

    To be called before any comparison: `ids < num_experts` in a narrow type would wrap `num_experts`.
    """
    return jnp.asarray(saturated(ids, jnp.int32))


def manual_axes(caller: str, axis_name: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes to sum over as a tuple.

    Raises:
      ValueError: an axis is not manual where this is called.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError as error:
            raise ValueError(
                f"{caller}: axis_name={axis_name!r} names {name!r}, which is not a manual mesh axis here. Call it "
                "inside shard_map over that axis; outside of shard_map arrays hold all tokens already, so leave "
                "axis_name=None."
            ) from error
    return names


def check_token_valid(caller: str, token_valid: Any, batch: tuple[int, ...], like: str) -> None:
    """Raises where a token mask is no bool array with one entry per token of the array named `like`."""
    if token_valid is None:
        return
    check_array(caller, "token_valid", token_valid)
    if token_valid.dtype != jnp.bool_:
        raise TypeError(f"{caller}: token_valid is {token_valid.dtype}; it must be bool. Compare, e.g. mask != 0.")
    if token_valid.shape != batch:
        raise ValueError(
            f"{caller}: token_valid has shape {token_valid.shape}; it needs one entry per token of {like}: {batch}."
        )


def _positions(batch: tuple[int, ...]) -> Int32[Array, "..."]:
    """Returns the number of every token, last dimension fastest."""
    strides = [math.prod(batch[dimension + 1 :]) for dimension in range(len(batch))]
    iotas = (jax.lax.broadcasted_iota(jnp.int32, batch, dimension) for dimension in range(len(batch)))
    return sum((iota * stride for iota, stride in zip(iotas, strides, strict=True)), jnp.zeros(batch, jnp.int32))
