"""`python -m jaxmoe.bench exchange --with_experts`: the exchange together with experts.

Rounds in one `jax.lax.scan`, each on what the one before has returned, with random weights. Lines:

- `layer`: `jaxmoe.moe_layer` of gated experts.
- `halves`: the same by `jaxmoe.dispatch_matmul`, an activation in JAX, and `jaxmoe.matmul_combine`, with room for all
  slots. Compared with `layer` too.
- `halves, capacity`: with 1.1 times the balanced rows.
- `apart`: two micro-batches, one after the other, through `relu(rows @ w1) @ w2` as einsums, between
  `jaxmoe.dispatch` and `jaxmoe.combine`, with 1.25 times the balanced rows of each expert.
- `in turn`: the same by `jaxmoe.start_dispatch` and `jaxmoe.start_combine`, one beside the experts of the other.
  Compared bit for bit with `apart` too.

Before a line is timed, everything that it returns has to be finite, and sampled tokens of it are compared with the
reference in float32, of gated experts or of plain ones, as `inputs.py` says. So are the same tokens behind the rounds
that were timed: a token depends on no other, so the reference computes the rounds of a few.

Of the last two lines a profile on GPUs says how long the kernels take that dispatch and combine, and how much of that
lies beside other kernels.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxmoe
from jaxmoe.bench.inputs import (
    Sample,
    dense_of,
    random_arguments,
    random_experts,
    random_tokens,
    sample_of,
    take,
    whole,
)
from jaxmoe.bench.kernels import beside_others
from jaxmoe.bench.report import append, say
from jaxmoe.bench.shapes import Case, LayerShape
from jaxmoe.bench.windows import time_calls
from jaxmoe.options import Arguments
from jaxmoe.testing import relative_error, tolerance

Line = Literal["layer", "halves", "halves, capacity", "apart", "in turn"]
# What a line is compared with, and its time divided by.
MODELS: dict[Line, Line] = {"halves": "layer", "halves, capacity": "layer", "in turn": "apart"}
# With experts of one's own, whose kernels are others than those of the exchange.
OWN: tuple[Line, ...] = ("apart", "in turn")
KERNELS = ("moe_dispatch", "moe_combine")
ROUNDS = 8
ROWS_OVER_BALANCED = 1.1
ROWS_OF_AN_EXPERT = 1.25
# Of halves, which round gate and up, against the layer: the largest difference over the largest number.
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-4}


@dataclasses.dataclass(frozen=True)
class Result:
    """One line.

    Args:
      shape: its name.
      tokens: per rank, of a micro-batch where there are two.
      ranks: that share the experts.
      line: which one.
      failure: what is wrong; `None` where it was timed.
      microseconds: of a round, median over windows.
      slowest: of the slowest window.
      x: its time over that of the line that it is compared with.
      exchange_us: of a round, the time of the kernels that dispatch and combine, on the first GPU; of the last two
        lines, `None` on CPUs.
      beside_us: that part of it in which other kernels were running as well.
    """

    shape: str
    tokens: int
    ranks: int
    line: Line
    failure: str | None = None
    microseconds: float | None = None
    slowest: float | None = None
    x: float | None = None
    exchange_us: float | None = None
    beside_us: float | None = None


def run(options: Any, mesh: Mesh) -> int:
    """Prints the table of `ExchangeOptions`; returns 1 where a line has no figures."""
    say(
        f"{mesh.devices.flat[0].device_kind} x {mesh.size}, {jax.process_count()} process(es), jax {jax.__version__}, "
        f"{jnp.dtype(options.dtype).name}, experts in between, {ROUNDS} rounds in a scan. Tokens per rank, of each of "
        f"two batches in the last two lines; us per round over {options.seconds:g} s; the exchange by its kernels on "
        "the first GPU, and how much of it lies beside others."
    )
    say(_row("shape", "tokens", "EP", "line", "checked", "us/round", "slowest", "x", "exchange", "beside"))
    failed = False
    for case in options.cases:
        for tokens in (case.tokens,) if case.tokens else options.tokens:
            for result in measure(options, case, tokens, mesh):
                failed |= result.failure is not None
                say(_text(result))
                append(options.json, json.dumps(dataclasses.asdict(result), allow_nan=False))
    return int(failed)


def measure(options: Any, case: Case, tokens: int, mesh: Mesh) -> Iterator[Result]:
    """Checks and times the lines of one shape and number of tokens."""
    shape, ranks = case.shape, mesh.size
    given, ids = random_arguments(shape, tokens, "uniform", mesh, options.dtype, 1)
    x, other = given.x, random_tokens(mesh, given.x.shape, options.dtype, 2)
    experts = random_experts(shape, mesh, options.dtype)
    assert experts.w_up is not None
    both = jnp.concatenate([experts.w_gate, experts.w_up], -1)
    arrays = given.topk_ids, given.topk_weights, experts, both
    plain = dataclasses.replace(experts, w_up=None)
    gated_truth = [_Truth.of(given._replace(experts=experts), ids, "silu", mesh)]
    plain_truth = [_Truth.of(given._replace(x=each, experts=plain), ids, "relu", mesh) for each in (x, other)]
    most = int(np.bincount(ids.reshape(-1)).max())
    done: dict[Line, tuple[Any, Any, float]] = {}
    for line, function in _lines(options, case, tokens, mesh).items():
        blank = Result(case.name, tokens, ranks, line)
        model = done.get(MODELS.get(line, line))
        if line in OWN and most > (room := _rows_of_an_expert(case.shape, tokens, ranks)):
            yield dataclasses.replace(
                blank, failure=f"an expert has {most} rows, and room for {room}: some are dropped"
            )
            continue
        results = jax.tree.map(lambda y: whole(y, mesh), jax.jit(function)((x, other), *arrays))
        truths = plain_truth if line in OWN else gated_truth
        wrong = None if model is None else _difference(line, results, model[0], options.dtype)
        wrong = wrong or _wrong(results, [truth.once for truth in truths])
        if wrong:
            yield dataclasses.replace(blank, failure=wrong)
            continue
        compiled = _rounds(function).lower((x, other), *arrays).compile()
        timed, last = time_calls(lambda _: compiled((x, other), *arrays), options.seconds)  # noqa: B023, in this turn
        microseconds = timed.median / ROUNDS
        ends = jax.tree.map(lambda y: whole(y, mesh), last)
        wrong = None if model is None else _difference(line, ends, model[1], options.dtype)
        if wrong := wrong or _wrong(ends, [truth.at_the_end for truth in truths]):
            yield dataclasses.replace(blank, failure=f"the rounds that are timed: {wrong}")
            continue
        done[line] = results, ends, microseconds
        exchange_us = beside_us = None
        if line in OWN and mesh.devices.flat[0].platform != "cpu":
            kernels = beside_others(lambda: compiled((x, other), *arrays), KERNELS)  # noqa: B023, the same
            exchange_us, beside_us = (time / ROUNDS for time in kernels)
        yield dataclasses.replace(
            blank,
            exchange_us=exchange_us,
            beside_us=beside_us,
            microseconds=microseconds,
            slowest=timed.slowest / ROUNDS,
            x=None if model is None else microseconds / model[2],
        )


@dataclasses.dataclass(frozen=True)
class _Truth:
    """What is right for some tokens of a micro-batch.

    Args:
      once: for what a call returns.
      at_the_end: for what goes into the round after the last one.
    """

    once: Sample
    at_the_end: Sample

    @classmethod
    def of(cls, arguments: Arguments, ids: np.ndarray, activation: str, mesh: Mesh) -> "_Truth":
        """Computes it, of these experts with this activation."""
        once, dtype = sample_of(arguments, ids, mesh, activation=activation), arguments.x.dtype
        x, *routing = take(mesh)((arguments.x, arguments.topk_ids, arguments.topk_weights), once.tokens)

        def after_rounds(compute_dtype: Any) -> np.ndarray:
            dense = dense_of(mesh, compute_dtype, None, None, activation)
            tokens = np.asarray(x, np.float32)
            for _ in range(ROUNDS):
                tokens = (tokens + np.asarray(dense(tokens, *routing, arguments.experts))) / 2
                if compute_dtype is not None:
                    tokens = tokens.astype(compute_dtype).astype(np.float32)
            return tokens

        truth, rough = after_rounds(None), after_rounds(dtype)
        return cls(once, Sample(once.tokens, truth, tolerance(rough, truth, dtype)))


def _wrong(results: tuple[np.ndarray, ...], samples: list[Sample]) -> str | None:
    """Says what is wrong with the results of micro-batches; those of lines with one come with the other as it was."""
    for y, sample in zip(results, samples, strict=False):
        if not y.any():
            return "what comes back is zero"
        if not np.isfinite(y.astype(np.float32)).all():
            return "what comes back is not finite"
        error = relative_error(y[sample.tokens].astype(np.float32), sample.truth)
        if not error <= sample.allowed:
            return f"what comes back has an error of {error:.1e}, above {sample.allowed:.1e}"
    return None


def _lines(options: Any, case: Case, tokens: int, mesh: Mesh) -> dict[Line, Callable[..., tuple[jax.Array, ...]]]:
    """Returns functions from two micro-batches, ids, weights, experts, and gate and up in one, to what comes back."""
    shape, ranks = case.shape, mesh.size
    where: dict[str, Any] = {"mesh": mesh, "implementation": options.implementation}
    balanced = tokens * shape.top_k
    of_expert = _rows_of_an_expert(shape, tokens, ranks)
    own: dict[str, Any] = {"num_experts": shape.num_experts, "capacity": of_expert, "per_expert": True, **where}

    def layer(batches: Any, ids: Any, weights: Any, experts: Any, _: Any) -> tuple[jax.Array, ...]:
        return (jaxmoe.moe_layer(batches[0], ids, weights, experts, **where),)

    def halves(capacity: int | None) -> Any:
        def function(batches: Any, ids: Any, weights: Any, experts: Any, both: Any) -> tuple[jax.Array, ...]:
            arrived = jaxmoe.dispatch_matmul(batches[0], ids, both, capacity=capacity, **where)
            gate, up = jnp.split(arrived.rows.astype(jnp.float32), 2, -1)
            h = (jax.nn.silu(gate) * up).astype(both.dtype)
            return (jaxmoe.matmul_combine(h, experts.w_down, weights, arrived.handle),)

        return function

    def compute(sent: jaxmoe.Dispatched, experts: Any) -> jax.Array:
        h = jax.nn.relu(jnp.einsum("eci,eio->eco", sent.rows, experts.w_gate))
        return jnp.einsum("eci,eio->eco", h, experts.w_down)

    def apart(batches: Any, ids: Any, weights: Any, experts: Any, _: Any) -> tuple[jax.Array, ...]:
        sent = [jaxmoe.dispatch(batch, ids, **own) for batch in batches]
        return tuple(jaxmoe.combine(compute(each, experts), weights, each.handle) for each in sent)

    def in_turn(batches: Any, ids: Any, weights: Any, experts: Any, _: Any) -> tuple[jax.Array, ...]:
        first = jaxmoe.dispatch(batches[0], ids, **own)
        start = jaxmoe.start_dispatch(batches[1], ids, **own, **beside)
        outputs, second = start.beside(compute, first, experts)
        others, y = jaxmoe.start_combine(outputs, weights, first.handle, **beside).beside(compute, second, experts)
        return y, jaxmoe.combine(others, weights, second.handle)

    beside = {} if options.multiprocessors is None else {"multiprocessors": options.multiprocessors}
    capacity = int(ROWS_OVER_BALANCED * balanced) + shape.num_experts // ranks
    return {
        "layer": layer,
        "halves": halves(None),
        "halves, capacity": halves(capacity),
        "apart": apart,
        "in turn": in_turn,
    }


def _rows_of_an_expert(shape: LayerShape, tokens: int, ranks: int) -> int:
    """Returns the room of each expert of one's own."""
    balanced = tokens * ranks * shape.top_k / shape.num_experts
    return -(-math.ceil(ROWS_OF_AN_EXPERT * balanced) // 64) * 64


def _rounds(function: Callable[..., tuple[jax.Array, ...]]) -> Any:
    def rounds(batches: Any, *arrays: Any) -> Any:
        def one(batches: Any, _: Any) -> tuple[Any, None]:
            # Half of what a round returns goes into the next one: a wrong round shows at the end.
            ys = function(batches, *arrays)
            mixed = tuple(((batch + y) / 2).astype(y.dtype) for batch, y in zip(batches, ys, strict=False))
            return mixed + batches[len(ys) :], None

        return jax.lax.scan(one, batches, length=ROUNDS)[0]

    return jax.jit(rounds)


def _difference(line: Line, results: Any, model: Any, dtype: Any) -> str | None:
    if line == "in turn":
        same = all(np.array_equal(*pair) for pair in zip(results, model, strict=True))
        return None if same else "other bits than one micro-batch after the other"
    y, truth = (np.asarray(each[0], np.float32) for each in (results, model))
    error = np.abs(y - truth).max() / np.abs(truth).max()
    limit = TOLERANCE[jnp.dtype(dtype).name]
    return None if error <= limit else f"off by {error:.1e} of the layer's largest number; {limit:.0e} is allowed"


def _text(result: Result) -> str:
    number = lambda value, digits: "" if value is None else f"{value:.{digits}f}"  # noqa: E731
    text = _row(
        *(result.shape, str(result.tokens), str(result.ranks), result.line, "no" if result.failure else "yes"),
        *(number(result.microseconds, 1), number(result.slowest, 1), number(result.x, 3)),
        *(number(result.exchange_us, 1), number(result.beside_us, 1)),
    )
    return f"{text}\n    {result.failure}" if result.failure else text


def _row(*cells: str) -> str:
    widths = (20, 7, 3, 18, 8, 9, 9, 6, 9, 9)
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
