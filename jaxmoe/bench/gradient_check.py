"""The truth of gradients: sampled pieces of them, exact in float32, and what an implementation has there.

All gradients of a large layer in float32 are several times as large as its weights, and computing them densely takes as
many products as there are experts. So the reference is differentiated where that is cheap and still exact:

- Gradients of tokens and routing weights need only the experts that a token chose. They are compared for the tokens
  whose outputs are compared in a forward pass.
- With the gradient of the output given, what an expert's columns of h contribute depends on no other column. So some
  columns of w_gate and w_up with the same rows of w_down, as an expert of its own, have for gradients exactly those
  columns and rows of the full gradients. The sampled columns come from all over the matrices and are compared in full
  height, for some experts of every rank, the one with most rows and the one with fewest among them.

What is right for a piece is one number per element; how far an implementation may be off is twice the error of the same
maths in the low precision, piece by piece, as for outputs (`inputs.py`).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

import jaxmoe
from jaxmoe.activation import resolve
from jaxmoe.bench.inputs import AXIS, Inputs, random_tokens, take
from jaxmoe.bench.passes import Gradients
from jaxmoe.implementations.reference import reference
from jaxmoe.options import Arguments
from jaxmoe.sharding import ExpertGroup, vary_alike
from jaxmoe.testing import relative_error, tolerance

SAMPLED_EXPERTS = 4  # of every rank
SAMPLED_COLUMNS = 64  # of h
CHUNK_ROWS = 2048  # of an expert that are differentiated at once: 60 MB of float32 for 7168 columns
WEIGHTS = ("w_gate", "w_up", "w_down")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one gradient.

    Args:
      name: of the array, and the expert where it is one's.
      truth: the reference in float32.
      allowed: relative error that an implementation may have, `jaxmoe.testing.tolerance`.
    """

    name: str
    truth: Float[np.ndarray, "..."]
    allowed: float


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some pieces of the gradients of one set of inputs and what is right for them.

    Args:
      tokens: over all ranks, whose gradients of `x` and `topk_weights` are compared.
      experts: of all ranks, whose weight gradients are compared.
      columns: of h, at which they are.
      of_tokens: pieces `x` and `topk_weights`.
      of_experts: pieces `w_gate`, `w_up` and `w_down` of each expert; none where they are frozen.
    """

    tokens: Int[np.ndarray, "sample"]
    experts: Int[np.ndarray, "experts"]
    columns: Int[np.ndarray, "columns"]
    of_tokens: tuple[Piece, Piece]
    of_experts: tuple[tuple[Piece, Piece, Piece], ...]


@dataclasses.dataclass(frozen=True)
class GradientInputs:
    """What backward passes are measured with, beside the inputs of forward passes.

    Args:
      cotangents: gradient of the output, for each set of inputs.
      samples: of each set.
    """

    cotangents: tuple[jax.Array, ...]
    samples: tuple[Sample, ...]


def make_gradient_inputs(inputs: Inputs, mesh: Mesh, *, trained: bool = True) -> GradientInputs:
    """Returns random cotangents for all sets of inputs, and the truth of samples of their gradients.

    Args:
      inputs: whose gradients they are.
      mesh: of one axis.
      trained: whether gradients of experts are asked for. Those in 8 or 4 bits have none.
    """
    cotangents, samples = [], []
    for seed, (arguments, sample) in enumerate(zip(inputs.sets, inputs.samples, strict=True)):
        dy = random_tokens(mesh, arguments.x.shape, arguments.x.dtype, seed=1000 + seed)
        cotangents.append(dy)
        arguments = arguments._replace(experts=inputs.experts)
        samples.append(gradient_sample_of(arguments, dy, sample.tokens, mesh, trained=trained))
    return GradientInputs(tuple(cotangents), tuple(samples))


def errors_of(gradients: Gradients, sample: Sample, mesh: Mesh) -> Iterator[tuple[str, float, float]]:
    """Yields name, relative error and allowed error of every piece of a sample; of frozen experts there is none."""
    of_tokens = take(mesh)((gradients.x, gradients.topk_weights), sample.tokens)
    found, pieces = [*map(_wide, of_tokens)], [*sample.of_tokens]
    if gradients.experts is not None:
        of_experts = _take_columns(mesh)(gradients.experts, sample.experts, sample.columns)
        found += [array for expert in zip(*map(_wide, of_experts), strict=True) for array in expert]
        pieces += [piece for expert in sample.of_experts for piece in expert]
    for piece, value in zip(pieces, found, strict=True):
        yield piece.name, relative_error(value, piece.truth), piece.allowed


def of_unit_scale(dy: jax.Array) -> tuple[jax.Array, float]:
    """Returns a cotangent times a power of two, so that its largest number is near 1, and that power.

    Those of a mean over all numbers are so small that float16 has few bits for what is made of them.
    """
    largest = float(jnp.abs(dy).max())
    scale = 2.0 ** -np.ceil(np.log2(largest)) if 0 < largest < np.inf else 1.0
    return jax.device_put(dy * jnp.asarray(scale, dy.dtype), dy.sharding), float(scale)


def _wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float32)


@functools.lru_cache(maxsize=8)
def _take_columns(mesh: Mesh) -> Any:
    """A function that gives every rank the named columns of the weight gradients of the named experts."""

    def of(weights: Any, experts: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        # Columns first: they lie in one rank's memory, experts are spread over all.
        if isinstance(weights, jaxmoe.FusedExperts):
            weights = weights.split()
        if isinstance(weights, jaxmoe.Experts):
            gate, up, down = weights.w_gate[:, :, columns], weights.w_up, weights.w_down
            assert up is not None, "experts of the benchmark are gated"
            up = up[:, :, columns]
        else:  # of the baseline: gate and up side by side
            gate_up, down = weights
            gate, up = (gate_up[:, :, columns + first] for first in (0, gate_up.shape[-1] // 2))
        return gate[experts], up[experts], down[:, columns][experts]

    return jax.jit(of, out_shardings=NamedSharding(mesh, P()))


# --- the truth --------------------------------------------------------------------------------------------------------


def gradient_sample_of(
    arguments: Arguments, dy: jax.Array, tokens: np.ndarray, mesh: Mesh, *, trained: bool = True
) -> Sample:
    """Returns the truth of some pieces of the gradients of one call.

    Args:
      arguments: of the call, whose experts are split over the axis of the experts.
      dy: cotangent of its output.
      tokens: whose gradients are compared, `inputs.sampled_tokens`.
      mesh: of the call.
      trained: as of `make_gradient_inputs`.
    """
    dtype, experts = arguments.x.dtype, arguments.experts
    ids, weights = (np.asarray(array) for array in _whole(mesh)((arguments.topk_ids, arguments.topk_weights)))
    chosen = _sampled_experts(ids, mesh.size, experts.num_experts)[:, : None if trained else 0]
    columns = _spread(experts.intermediate, SAMPLED_COLUMNS)

    x_taken, dy_taken = take(mesh)((arguments.x, dy), tokens)
    of_tokens = [
        [
            _wide(array)
            for array in _token_gradients(mesh, precision)(x_taken, dy_taken, ids[tokens], weights[tokens], experts)
        ]
        for precision in (None, dtype)
    ]
    of_experts = [
        _of_sampled_experts(arguments, dy, ids, weights, chosen, columns, mesh, precision)
        for precision in (None, dtype)
    ]

    def piece(name: str, truth: np.ndarray, rough: np.ndarray) -> Piece:
        return Piece(name, truth, tolerance(rough, truth, dtype))

    names = chosen.reshape(-1)
    return Sample(
        tokens,
        names,
        columns,
        tuple(map(piece, ("x", "topk_weights"), *of_tokens)),  # pyright: ignore[reportArgumentType]
        tuple(
            tuple(
                piece(f"{array} of expert {name}", truth[i], rough[i])
                for array, truth, rough in zip(WEIGHTS, *of_experts, strict=True)
            )
            for i, name in enumerate(names)
        ),  # pyright: ignore[reportArgumentType]
    )


def _spread(size: int, count: int) -> np.ndarray:
    """Different numbers below `size`, from the first to the last."""
    return np.unique(np.linspace(0, size - 1, count).astype(np.int32))


def _sampled_experts(ids: np.ndarray, ranks: int, num_experts: int) -> np.ndarray:
    """`[ranks, experts]`: of every rank as many, from the one with the fewest rows to the one with most."""
    rows = np.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts).reshape(ranks, -1)
    by_rows = rows.argsort(axis=1, kind="stable")[:, _spread(rows.shape[1], SAMPLED_EXPERTS)]
    return (by_rows + np.arange(ranks)[:, None] * rows.shape[1]).astype(np.int32)


@functools.lru_cache(maxsize=8)
def _whole(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def _pullback(compute_dtype: Any, x: Any, ids: Any, weights: Any, expert: jaxmoe.Experts, dy: Any) -> Gradients:
    """Gradients of the reference for the slots that name expert 0, which is all that there is; all in float32."""

    def output(x: jax.Array, weights: jax.Array, expert: jaxmoe.Experts) -> jax.Array:
        options: dict[str, Any] = {"activation": resolve("silu"), "group": ExpertGroup()}
        return reference(x, ids, weights, expert, compute_dtype=compute_dtype, **options)

    wide = x.astype(jnp.float32), weights, jaxmoe.dequantize(expert, jnp.float32)
    return Gradients(*jax.vjp(output, *wide)[1](dy.astype(jnp.float32)))


@functools.lru_cache(maxsize=8)
def _token_gradients(mesh: Mesh, compute_dtype: Any) -> Any:
    """Gradients of a few tokens that all ranks have, one expert after the other where they are."""

    def on_rank(x: Any, dy: Any, ids: Any, weights: Any, experts: jaxmoe.Experts) -> tuple[jax.Array, jax.Array]:
        # What varies over the ranks from the start has gradients that do: they are added up once, below.
        x, dy, ids, weights, experts = vary_alike((x, dy, ids, weights, experts))
        first = jax.lax.axis_index(AXIS) * experts.num_experts

        def add_expert(sums: Any, one: Any) -> tuple[Any, None]:
            number, expert = one
            alone = jax.tree.map(lambda array: array[None], expert)
            of_expert = _pullback(compute_dtype, x, jnp.where(ids == first + number, 0, -1), weights, alone, dy)
            return (sums[0] + of_expert.x, sums[1] + of_expert.topk_weights), None

        start = jnp.zeros_like(x, jnp.float32), jnp.zeros_like(weights)
        sums, _ = jax.lax.scan(add_expert, start, (jnp.arange(experts.num_experts), experts))
        return jax.lax.psum(sums, AXIS)

    specs = (P(), P(), P(), P(), P(AXIS))
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P()))


def _of_sampled_experts(
    arguments: Arguments,
    dy: jax.Array,
    ids: np.ndarray,
    weights: np.ndarray,
    chosen: np.ndarray,
    columns: np.ndarray,
    mesh: Mesh,
    compute_dtype: Any,
) -> list[np.ndarray]:
    """Returns `[experts, ...]` for each of `WEIGHTS`: the gradients of the chosen experts at these columns of h."""
    local_experts = arguments.experts.num_experts // mesh.size
    top_k = ids.shape[1]
    add = _add_weight_gradients(mesh, compute_dtype)
    of_all: list[list[np.ndarray]] = []
    for numbers in chosen.T:  # one of every rank at a time
        slots = [np.flatnonzero(ids.reshape(-1) == number) for number in numbers]
        local = (numbers % local_experts).astype(np.int32)
        sums = None
        for begin in range(0, max(max(map(len, slots)), 1), CHUNK_ROWS):
            part = [of_rank[begin : begin + CHUNK_ROWS] for of_rank in slots]
            used = np.array([np.arange(CHUNK_ROWS) < len(of_rank) for of_rank in part])
            filled = np.array([np.pad(of_rank, (0, CHUNK_ROWS - len(of_rank))) for of_rank in part])
            rows = (filled // top_k).astype(np.int32), np.where(used, weights.reshape(-1)[filled], 0), used
            sums = add(sums, arguments.x, dy, *rows, local, columns, arguments.experts)
        of_all.append([_wide(array) for array in _whole(mesh)(sums)])
    # [of a rank, ranks, ...] in the order of `chosen`, rank by rank.
    return [np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:]) for arrays in zip(*of_all, strict=True)]


@functools.lru_cache(maxsize=8)
def _add_weight_gradients(mesh: Mesh, compute_dtype: Any) -> Any:
    """A function that adds to `sums` what some rows of one expert of every rank contribute to its weight gradients."""

    def on_rank(x: Any, dy: Any, weights: Any, used: Any, local: Any, columns: Any, experts: jaxmoe.Experts) -> Any:
        ids = jnp.where(used[0], 0, -1)[:, None]
        number = local[0]
        assert experts.w_up is not None, "experts of the benchmark are gated"
        narrow = jaxmoe.Experts(
            experts.w_gate[number][:, columns][None],
            experts.w_up[number][:, columns][None],
            experts.w_down[number][columns][None],
        )
        of_rows = _pullback(compute_dtype, x[0], ids, weights[0][:, None], narrow, dy[0]).experts
        return tuple(getattr(of_rows, name) for name in WEIGHTS)

    specs = (*(P(AXIS),) * 5, P(), P(AXIS))
    sharded = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
    split = NamedSharding(mesh, P(AXIS))

    def add(sums: Any, x: Any, dy: Any, tokens: Any, *rest: Any) -> Any:
        rows = (jax.lax.with_sharding_constraint(array[tokens], split) for array in (x, dy))
        part = sharded(*rows, *rest)
        return part if sums is None else jax.tree.map(jnp.add, sums, part)

    return jax.jit(add)
