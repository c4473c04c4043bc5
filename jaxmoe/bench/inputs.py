"""Random inputs of the benchmark, the truth that they are checked against, and copies of the weights.

A benchmark that repeats one call on one set of arrays finds in the L2 cache what no model finds there. So calls go
through several sets of tokens and routings, and where the weights that a call reads are small, through several copies
of the weights: enough that together they are more than twice what L2 holds, so that those of a call have left L2 when
their turn comes again. In a model the weights of all other layers pass between two calls of one layer. The copies hold
the same numbers, so what is checked with one of them holds with all.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

import jaxmoe
from jaxmoe import precision as precisions
from jaxmoe.activation import resolve
from jaxmoe.bench import traffic
from jaxmoe.bench.shapes import LayerShape
from jaxmoe.implementations.reference import reference
from jaxmoe.options import Accumulation, Arguments, Precision
from jaxmoe.plan import Shape
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.sharding import ExpertGroup, vary_alike
from jaxmoe.testing import RoutingKind, make_ids, relative_error, tolerance

AXIS = "expert"
SETS = 4
# Tokens that are compared with the reference: some from everywhere, and of those that chose the most popular expert
# the last ones, which a layer that dropped rows would drop first.
SPREAD_TOKENS, LAST_TOKENS = 64, 16
L2_BYTES = 50e6  # of an H100 and of an H200
# The largest magnitude of tokens and of h that static scales are for. Few of the random ones are larger.
CALIBRATED = (6.0, 24.0)
# Of a block: what is quantised to the one before it is repacked.
REPACKED = "-repacked"
# Numbers of h that sums in another order may round to the neighbour in 8 bits, which is at most an eighth away.
NEIGHBOURS = 4


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some tokens of one set and what is right for them.

    Args:
      tokens: their numbers, over all ranks; some may come twice.
      truth: the reference in float32, of a layer in 8 bits with tokens, h and weights that are rounded to them.
      allowed: relative error that an implementation may have, `jaxmoe.testing.tolerance`.
      unrounded: of a layer in 8 bits, the reference of wide experts, with nothing rounded.
    """

    tokens: Int[np.ndarray, "sample"]
    truth: Float[np.ndarray, "sample hidden"]
    allowed: float
    unrounded: Float[np.ndarray, "sample hidden"] | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What every implementation is measured with, for one shape and number of tokens.

    Args:
      shape: sizes as one rank sees them.
      experts: weights, split over the mesh.
      sets: the other arrays of a call, without `experts`.
      routings: of each set.
      samples: of each set.
      weight_copies: among which calls rotate.
      precision: of the calls, as of `moe_layer`.
      accumulation: of the calls, as of `moe_layer`.
    """

    shape: Shape
    experts: jaxmoe.Experts
    sets: tuple[Arguments, ...]
    routings: tuple[traffic.Routing, ...]
    samples: tuple[Sample, ...]
    weight_copies: int
    precision: Precision | None = None
    accumulation: Accumulation = "promoted"


def random_experts(
    shape: LayerShape, mesh: Mesh, dtype: Any, block: str | None = None, *, through_e4m3: bool = False
) -> jaxmoe.Experts:
    """Returns random experts, split over the mesh, the same on any number of ranks.

    Args:
      shape: of the layer.
      mesh: of one axis.
      dtype: of the wide experts.
      block: as of `quantized`, of experts in 8 or 4 bits. They are made one by one: wide ones of all that a rank has,
        twice as large and larger in between, may not fit beside them.
      through_e4m3: whether they, in 4 bits, are those of `jaxmoe.through_e4m3`.

    Raises:
      ValueError: they cannot be.
    """
    if shape.num_experts % mesh.size:
        raise ValueError(f"{shape.num_experts} experts cannot be spread over {mesh.size} ranks.")
    experts = make_experts(shape, mesh, dtype, block)()
    return jaxmoe.through_e4m3(experts) if through_e4m3 else experts


@functools.lru_cache(maxsize=8)
def make_experts(shape: LayerShape, mesh: Mesh, dtype: Any, block: str | None) -> Any:
    """Returns a compiled function without arguments that makes `random_experts`."""
    local_experts = shape.num_experts // mesh.size

    def make(number: jax.Array) -> jaxmoe.Experts:
        expert = _random_expert(shape, dtype, number)
        return expert if block is None else quantized(expert, block)

    def on_rank() -> jaxmoe.Experts:
        made = jax.lax.map(make, jax.lax.axis_index(AXIS) * local_experts + jnp.arange(local_experts))
        return jax.tree.map(lambda array: array.reshape(local_experts, *array.shape[2:]), made)

    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=(), out_specs=P(AXIS)))


def quantized(experts: jaxmoe.Experts, block: str) -> jaxmoe.Experts:
    """Returns random experts in 8 or 4 bits: as `jaxmoe.quantize` makes them of `block`, or of one that is named here.

    `"static"`: one scale for a matrix, and one for all tokens and one for all h, as checkpoints are calibrated.
    `"mxfp4-repacked"` and `"nvfp4-repacked"`: those of `jaxmoe.repacked`.
    """
    if block.endswith(REPACKED):
        return jaxmoe.repacked(jaxmoe.quantize(experts, block.removesuffix(REPACKED)))
    if block != "static":
        return jaxmoe.quantize(experts, block)
    return jaxmoe.with_input_scales(jaxmoe.quantize(experts, "expert"), *(size / 448 for size in CALIBRATED))


def _random_expert(shape: LayerShape, dtype: Any, number: jax.Array) -> jaxmoe.Experts:
    """One of the experts of a layer, wide."""
    key = jax.random.fold_in(jax.random.key(0), number)
    expert = jaxmoe.Experts.init(key, 1, shape.hidden, shape.intermediate, dtype=dtype)
    # Without it XLA on a GPU may leave out the rounding to `dtype` where the caller computes on in float32.
    return jax.lax.optimization_barrier(expert)


def make_inputs(
    shape: LayerShape,
    experts: jaxmoe.Experts,
    tokens: int,
    routing: RoutingKind,
    mesh: Mesh,
    *,
    sets: int = SETS,
    precision: Precision | None = None,
    accumulation: Accumulation = "promoted",
) -> Inputs:
    """Returns random tokens and routings for the experts, and the truth of a sample of them.

    Args:
      shape: of the layer.
      experts: as of `random_experts`.
      tokens: per rank.
      routing: how tokens choose experts, as of `jaxmoe.testing.make_inputs`.
      mesh: of one axis, over which tokens and experts are split.
      sets: how many.
      precision: of the calls, as of `moe_layer`. Tokens beside experts in 8 or 4 bits are BF16.
      accumulation: of the calls, as of `moe_layer`.
    """
    dtype, ranks = jnp.bfloat16 if isinstance(experts.w_down, QuantizedMatrix) else experts.w_down.dtype, mesh.size
    precision = precisions.resolve(precision, experts, dtype)
    sizes = Shape(
        tokens,
        shape.hidden,
        shape.intermediate,
        shape.num_experts,
        shape.top_k,
        ranks=ranks,
        formats=precisions.formats_of(precision, experts, dtype),
    )
    made, routings, samples = [], [], []
    for seed in range(sets):
        arguments, ids = random_arguments(shape, tokens, routing, mesh, dtype, seed)
        samples.append(sample_of(arguments._replace(experts=experts), ids, mesh, precision, shape))
        made.append(arguments)
        routings.append(traffic.Routing.of(ids, ranks, shape.num_experts))
    # Of the rank that reads most: it is waited for.
    read = min(max(traffic.weight_bytes(routing, sizes, rank) for rank in range(ranks)) for routing in routings)
    copies = weight_copies(read) if mesh.devices.flat[0].platform == "gpu" else 1
    return Inputs(sizes, experts, tuple(made), tuple(routings), tuple(samples), copies, precision, accumulation)


def random_arguments(
    shape: LayerShape, tokens: int, routing: RoutingKind, mesh: Mesh, dtype: Any, seed: int
) -> tuple[Arguments, Int[np.ndarray, "all_tokens top_k"]]:
    """Returns random tokens, `tokens` per rank, and their routing, without experts; and the ids, in every process."""
    rng = np.random.default_rng(seed)
    ids = make_ids(rng, tokens * mesh.size, shape.num_experts, shape.top_k, routing)
    raw = rng.random(ids.shape, np.float32) + np.float32(0.1)
    x = random_tokens(mesh, (len(ids), shape.hidden), dtype, seed)
    return Arguments(x, _split(ids, mesh), _split(raw / raw.sum(-1, keepdims=True), mesh), None), ids


def weight_copies(read_bytes: int) -> int:
    """Returns how many copies of the weights are together more than twice the L2 cache, 1 where one is.

    Args:
      read_bytes: of the weights that one call reads on a rank.

    >>> weight_copies(5_637_144_576), weight_copies(60_000_000), weight_copies(9_437_184)
    (1, 2, 11)
    """
    return int(2 * L2_BYTES // max(read_bytes, 1)) + 1


def copies_of(weights: Any, count: int) -> list[Any]:
    """Returns a pytree of arrays and further copies of it, `count` in all, at different addresses."""
    return [weights, *(_copy(weights) for _ in range(count - 1))]


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def arguments_of_call(sets: Sequence[Arguments], weights: Sequence[Any], call: int) -> Arguments:
    """Returns the arrays of the n-th call: sets of inputs and copies of the weights each take turns.

    >>> sets = [Arguments(name, None, None, None) for name in "ab"]
    >>> calls = [arguments_of_call(sets, "xyz", call) for call in range(6)]
    >>> [call.x + call.experts for call in calls]
    ['ax', 'by', 'az', 'bx', 'ay', 'bz']
    """
    return sets[call % len(sets)]._replace(experts=weights[call % len(weights)])


def error_of(y: jax.Array, sample: Sample, mesh: Mesh) -> float:
    """Returns the relative error of a sample's tokens in an output of the layer."""
    return relative_error(_taken(y, sample, mesh), sample.truth)


def unrounded_error_of(y: jax.Array, sample: Sample, mesh: Mesh) -> float:
    """Returns the same against the layer that nothing rounds, of a layer in 8 bits."""
    assert sample.unrounded is not None
    return relative_error(_taken(y, sample, mesh), sample.unrounded)


def _taken(y: jax.Array, sample: Sample, mesh: Mesh) -> np.ndarray:
    return np.asarray(take(mesh)(y, sample.tokens), np.float32)


def random_tokens(mesh: Mesh, shape: Sequence[int], dtype: Any, seed: int) -> jax.Array:
    """Returns normally distributed rows of tokens, split over the mesh."""
    return _normal(mesh, tuple(shape), jnp.dtype(dtype))(jax.random.key(seed))


def _split(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """Every process gives its own parts of an array that all of them have."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(AXIS)), array.__getitem__)


@functools.lru_cache(maxsize=8)
def _normal(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.jit(
        lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype),
        out_shardings=NamedSharding(mesh, P(AXIS)),
    )


@functools.lru_cache(maxsize=8)
def take(mesh: Mesh) -> Any:
    """Returns a function that gives every rank the named tokens of arrays whose tokens are split."""
    return jax.jit(
        lambda tree, tokens: jax.tree.map(lambda array: array[tokens], tree), out_shardings=NamedSharding(mesh, P())
    )


def whole(array: jax.Array, mesh: Mesh) -> np.ndarray:
    """Returns the whole of an array that is split, in every process."""
    return np.asarray(_gather(mesh)(array))


@functools.lru_cache(maxsize=8)
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, P()))


def sample_of(
    arguments: Arguments,
    ids: np.ndarray,
    mesh: Mesh,
    precision: Precision | None = None,
    shape: LayerShape | None = None,
    activation: str = "silu",
) -> Sample:
    """Returns some tokens of a call and what is right for them.

    Args:
      arguments: of the call, whose experts are split over the axis of the experts.
      ids: its experts of all tokens, in every process.
      mesh: of the call.
      precision: of the call.
      shape: of a layer whose experts are those of `random_experts`: then the sample has the unrounded answer too.
      activation: between the products.
    """
    tokens = sampled_tokens(ids)
    x, chosen, weights = take(mesh)((arguments.x, arguments.topk_ids, arguments.topk_weights), tokens)
    dtype = arguments.x.dtype

    def dense(*options: Any) -> np.ndarray:
        return np.asarray(dense_of(mesh, *options)(x, chosen, weights, arguments.experts))

    truth, rough = (dense(compute_dtype, precision, None, activation) for compute_dtype in (None, dtype))
    allowed = tolerance(rough, truth, dtype)
    if precisions.rounds_rows(precision):
        rows = max(int((ids[tokens] >= 0).sum()), 1)
        allowed += (NEIGHBOURS / (rows * arguments.experts.intermediate)) ** 0.5 / 8
    if precision is None or shape is None:
        return Sample(tokens, truth, allowed)
    return Sample(tokens, truth, allowed, unrounded=dense(None, None, (shape, dtype)))


def sampled_tokens(ids: np.ndarray) -> Int[np.ndarray, "sample"]:
    """Returns the numbers of the tokens that are compared, given the experts of all."""
    popular = np.bincount(ids[ids >= 0]).argmax()
    last = np.flatnonzero((ids == popular).any(-1))[-LAST_TOKENS:]
    spread = np.linspace(0, len(ids) - 1, SPREAD_TOKENS).astype(int)
    # Always as many, so that nothing has to be compiled again.
    return np.concatenate([spread, np.resize(last, LAST_TOKENS)]).astype(np.int32)


@functools.lru_cache(maxsize=16)
def dense_of(
    mesh: Mesh,
    compute_dtype: Any,
    precision: Precision | None = None,
    wide: tuple[LayerShape, Any] | None = None,
    activation: str = "silu",
) -> Any:
    """The reference of a few tokens that all ranks have, with the experts left where they are.

    One expert after the other is made as wide as the maths, so that there is memory for it beside all the others.

    Args:
      mesh: over which the experts are split.
      compute_dtype: as of `reference`.
      precision: as of `reference`.
      wide: makes `random_experts` of this shape and dtype again, whatever the experts are that it is called with.
      activation: between the products.
    """

    def on_rank(x: Any, ids: Any, weights: Any, experts: jaxmoe.Experts) -> jax.Array:
        first = jax.lax.axis_index(AXIS) * experts.num_experts

        def add_expert(total: jax.Array, each: tuple[jax.Array, jaxmoe.Experts]) -> tuple[jax.Array, None]:
            number, expert = each
            chosen = ids == number
            y = reference(
                x.astype(jnp.float32),
                jnp.where(chosen, 0, -1),
                jnp.where(chosen, weights, 0),
                jax.tree.map(lambda array: array[None], expert) if wide is None else _random_expert(*wide, number),
                activation=resolve(activation),
                group=ExpertGroup(),
                compute_dtype=compute_dtype,
                precision=precision,
            )
            return total + y, None

        start, _ = vary_alike((jnp.zeros_like(x, jnp.float32), first))
        total, _ = jax.lax.scan(add_expert, start, (first + jnp.arange(experts.num_experts), experts))
        return jax.lax.psum(total, AXIS)

    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=(P(), P(), P(), P(AXIS)), out_specs=P()))
