"""`python -m jaxmoe.bench scan`: layers as a program runs them, many in one `jax.lax.scan` with no host in between.

For each shape and number of tokens four lines of forward passes, each with all that the one before has but for the
last, which has `jaxmoe.router_aux` in the place of the layer's own statistics (`scan_gradients.py` has lines besides):

- `layer`: `x + moe_layer(x, ...)`, with ids and weights given for each layer.
- `routed`: the router too, a product and `jaxmoe.route`.
- `stats`: with `return_stats=True`.
- `loss`: `routed` with the load statistics and the balance loss of each layer.

Before a line is timed, its program runs once with what every layer was given among its results. The layer alone, called
for each of them, has to return equal numbers, as `"megakernel"` does; of the first one a sample is compared with the
reference; statistics have to be the counts of the ids, and balance losses what NumPy makes of those and of the logits.
The program that is timed has to return the same output, and statistics and losses that are as right. An implementation
that XLA fuses in another way in a scan has no figures here.

Experts in 8 or 4 bits (`--dtype` of `options.NARROW`) have the four lines alone: they are frozen.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import precision as precisions
from jaxmoe.bench import peaks, scan_gradients, traffic
from jaxmoe.bench.inputs import AXIS, error_of, quantized, random_tokens, sample_of, whole
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.options import DTYPES, NARROW, check_dtype, narrow_of, wide_dtype_of
from jaxmoe.bench.report import append, say
from jaxmoe.bench.shapes import Case
from jaxmoe.bench.windows import time_calls
from jaxmoe.four_bit import marked
from jaxmoe.implementations.base import Shape
from jaxmoe.options import Arguments, Precision
from jaxmoe.testing import make_ids

Line = Literal["layer", "routed", "stats", "loss"]
LINES: tuple[Line, ...] = ("layer", "routed", "stats", "loss")
AnyLine = Line | scan_gradients.GradientLine
COLUMNS = ("shape", "tokens", "EP", "line", "checked", "us/layer", "slowest", "more us", "MB", "floor us", "x floor")
# Of a balance loss in float32, whose logits and sums over tokens are added up in another order.
ALLOWED_LOSS_ERROR = 1e-5
# With what a line is compared.
WITHOUT: dict[AnyLine, Line] = {"routed": "layer", "stats": "routed", "loss": "routed"}


@dataclasses.dataclass(frozen=True)
class ScanOptions:
    """One run of `python -m jaxmoe.bench scan`.

    Args:
      cases: shapes.
      tokens: per rank, for the cases that do not bring their own.
      ranks: over which the experts are spread; 0 for all devices.
      layers: in a scan, each with weights of its own.
      dtype: a key of `DTYPES`, of tokens and weights, or one of `NARROW`.
      implementation: of `moe_layer`; `None` lets it choose.
      seconds: for which a line is timed.
      json: file to which the results are added, one JSON object a line.
    """

    cases: tuple[Case, ...]
    tokens: tuple[int, ...] = (64, 1024, 8192)
    ranks: int = 0
    layers: int = 16
    dtype: str = "bf16"
    implementation: str | None = None
    seconds: float = 0.3
    json: Path | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype, (*DTYPES, *NARROW))


@dataclasses.dataclass(frozen=True)
class Result:
    """One line.

    Args:
      shape: its name.
      tokens: per rank.
      ranks: that share the experts.
      layers: in the scan.
      dtype: as of `ScanOptions`.
      line: what each of them is.
      failure: what is wrong; `None` where it was timed.
      error: of the first layer's sample against the reference; of gradients against those outside of a scan.
      microseconds: per layer, median over windows, see `time_calls`.
      slowest: per layer of the slowest window.
      weights_mb: of the experts that a layer reads on the rank that reads most, the mean over layers.
      floor_us: to read those at the rate of a copy; `None` where that was not measured on this device.
      temporaries_gb: what the program takes besides its arguments and results on a device.
    """

    shape: str
    tokens: int
    ranks: int
    layers: int
    dtype: str
    line: AnyLine
    failure: str | None = None
    error: float | None = None
    microseconds: float | None = None
    slowest: float | None = None
    weights_mb: float | None = None
    floor_us: float | None = None
    temporaries_gb: float | None = None


class Weights(NamedTuple):
    """Of all layers, first dimension of every array; `ids` and `weights` are those that the line `layer` is given."""

    router: jax.Array
    experts: jaxmoe.Experts
    ids: jax.Array
    weights: jax.Array


class Seen(NamedTuple):
    """What a layer was given and returned."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    y: jax.Array


def run(options: ScanOptions) -> int:
    """Prints the table; returns the exit status, which is 1 where a line has no figures.

    Raises:
      ValueError: more ranks than devices, or processes without a rank.
    """
    mesh = make_mesh(options.ranks or jax.device_count())
    say(
        f"{mesh.devices.flat[0].device_kind} x {mesh.size}, {jax.process_count()} process(es), jax {jax.__version__}, "
        f"{options.dtype}, {options.layers} layers in a scan. Tokens per rank; us per layer over "
        f"{options.seconds:g} s, the slowest process. floor: the weights that a layer reads, at the rate of a copy."
    )
    say(_row(*COLUMNS, "temp GB"))
    failed = False
    for case in options.cases:
        for tokens in (case.tokens,) if case.tokens else options.tokens:
            found: dict[AnyLine, Result] = {}
            for result in measure(options, case, tokens, mesh):
                found[result.line] = result
                failed |= result.failure is not None
                say(_text(result, found))
                append(options.json, json.dumps(dataclasses.asdict(result), allow_nan=False))
    return int(failed)


def measure(options: ScanOptions, case: Case, tokens: int, mesh: Mesh) -> Iterator[Result]:
    """Checks and times the lines of one shape and number of tokens."""
    shape, narrow = case.shape, narrow_of(options.dtype)
    if shape.num_experts % mesh.size:
        text = f"cannot run: {shape.num_experts} experts cannot be spread over {mesh.size} ranks."
        yield Result(case.name, tokens, mesh.size, options.layers, options.dtype, LINES[0], failure=text)
        return
    x = random_tokens(mesh, (tokens * mesh.size, shape.hidden), wide_dtype_of(options.dtype), 0)
    weights = _make_weights(options, case, tokens, mesh)
    # Without numbers: a layer's are as large as an arena.
    of_one_layer = jax.eval_shape(lambda experts: jax.tree.map(lambda array: array[0], experts), weights.experts)
    precision = precisions.resolve(narrow.precision, of_one_layer, x.dtype)
    formats = precisions.formats_of(precision, of_one_layer, x.dtype)
    sizes = Shape(
        tokens, shape.hidden, shape.intermediate, shape.num_experts, shape.top_k, ranks=mesh.size, formats=formats
    )
    of_layer: dict[str, Any] = {"mesh": mesh, "implementation": options.implementation}
    of_layer |= {"precision": precision, "accumulation": narrow.accumulation}
    alone = jax.jit(functools.partial(jaxmoe.moe_layer, **of_layer))
    known = peaks.known(mesh.devices.flat[0].device_kind)
    for line in LINES:
        blank = Result(case.name, tokens, mesh.size, options.layers, options.dtype, line)
        compile_ = functools.partial(_compile, line, shape.top_k, of_layer, x, weights)
        y, (seen, stats) = compile_(keeps=True)(x, weights)
        routings = _routings(seen, mesh, shape.num_experts)
        error, wrong = _check(seen, stats, routings, weights.experts, alone, mesh, precision)
        timed_program = compile_(keeps=False)
        if not wrong:
            timed_y, found = timed_program(x, weights)
            if not bool(_equal(timed_y, y)):
                wrong = "the program that is timed does not return what the checked one does"
            elif line in ("stats", "loss"):
                losses, stats = found if line == "loss" else (None, found)
                wrong = _wrong_figures(stats, losses, routings, seen, weights.router, mesh)
        if wrong:
            yield dataclasses.replace(blank, failure=wrong)
            continue
        del seen
        timed, _ = time_calls(lambda _: timed_program(x, weights), options.seconds)  # noqa: B023, called in this turn
        read = np.mean([max(traffic.weight_bytes(each, sizes, rank) for rank in range(mesh.size)) for each in routings])
        yield dataclasses.replace(
            blank,
            error=error,
            microseconds=timed.median / options.layers,
            slowest=timed.slowest / options.layers,
            weights_mb=float(read) / 1e6,
            floor_us=float(read) / known.copy_gbs / 1e3 if known else None,
            temporaries_gb=_temporaries_gb(timed_program),
        )
    if options.dtype in NARROW:
        return
    layers = scan_gradients.Layers(weights.router, weights.experts)
    for line in scan_gradients.LINES:
        blank = Result(case.name, tokens, mesh.size, options.layers, options.dtype, line)
        program = scan_gradients.compile_line(line, shape.top_k, of_layer, x, layers)
        error, wrong = scan_gradients.compare(program, shape.top_k, of_layer, x, layers, mesh)
        if wrong:
            yield dataclasses.replace(blank, failure=wrong)
            continue
        timed, _ = time_calls(lambda _: program(x, layers), options.seconds)  # noqa: B023, called in this turn
        yield dataclasses.replace(
            blank,
            error=error,
            microseconds=timed.median / options.layers,
            slowest=timed.slowest / options.layers,
            temporaries_gb=_temporaries_gb(program),
        )


def _temporaries_gb(program: Any) -> float:
    return program.memory_analysis().temp_size_in_bytes / 1e9


def _compile(
    line: Line, top_k: int, of_layer: dict[str, Any], x: jax.Array, weights: Weights, *, keeps: bool
) -> Callable[[jax.Array, Weights], Any]:
    """Returns the compiled scan, from tokens and weights to the output and, where it keeps it, what layers saw."""
    config = jaxmoe.RouterConfig.qwen3_moe(top_k=top_k)

    def layer(x: jax.Array, own: Weights) -> tuple[jax.Array, Any]:
        ids, chosen, aux = own.ids, own.weights, None
        if line != "layer":
            routing = jaxmoe.route(jnp.dot(x, own.router, preferred_element_type=jnp.float32), config)
            # XLA may compute weights once for the layer and once to be looked at, and round in another way.
            ids, chosen = jax.lax.optimization_barrier((routing.topk_ids, routing.topk_weights))
            aux = jaxmoe.router_aux(routing) if line == "loss" else None
        y = jaxmoe.moe_layer(x, ids, chosen, own.experts, return_stats=line == "stats", **of_layer)
        if line == "stats":
            y, aux = y
        stats = aux.stats if isinstance(aux, jaxmoe.MoEAux) else aux
        return x + y, (Seen(x, ids, chosen, y), stats) if keeps else aux

    def layers(x: jax.Array, weights: Weights) -> tuple[jax.Array, Any]:
        y, found = jax.lax.scan(layer, x, weights)
        return y, (found.load_balancing_loss, found.stats) if line == "loss" and not keeps else found

    return jax.jit(layers).lower(x, weights).compile()


def _check(
    seen: Seen,
    stats: Any,
    routings: list[traffic.Routing],
    experts: jaxmoe.Experts,
    alone: Any,
    mesh: Mesh,
    precision: Precision | None,
) -> tuple[float, str]:
    """Returns the error of the first layer's sample, and what is wrong."""
    worst = 0.0
    for number, routing in enumerate(routings):
        given, own = jax.tree.map(lambda array: array[number], (seen, experts))  # noqa: B023, called in this turn
        arguments = Arguments(given.x, given.ids, given.weights, own)
        if not bool(_equal(alone(*arguments[:4]), given.y)):
            return worst, f"layer {number} does not return what the layer alone does"
        if number == 0:
            sample = sample_of(arguments, whole(given.ids, mesh), mesh, precision)
            worst = error_of(given.y, sample, mesh)
            if not worst <= sample.allowed:
                return worst, f"an error of {worst:.1e}, above {sample.allowed:.1e}"
        if stats is not None and (wrong := _wrong_counts(number, stats, routing)):
            return worst, wrong
    return worst, ""


def _wrong_counts(number: int, stats: Any, routing: traffic.Routing) -> str:
    same = np.array_equal(np.asarray(stats.rows_per_expert[number]), routing.slots.sum(0))
    return "" if same else f"the statistics of layer {number} are not the counts of its ids"


def _wrong_figures(
    stats: Any, losses: Any, routings: list[traffic.Routing], seen: Seen, router: jax.Array, mesh: Mesh
) -> str:
    """Returns what is wrong with the statistics of the program that is timed, and with its losses, if it has some."""
    losses = None if losses is None else whole(losses, mesh)
    for number, routing in enumerate(routings):
        if wrong := _wrong_counts(number, stats, routing):
            return wrong
        if losses is not None:
            scores = scan_gradients.probabilities(seen.x[number], router[number], mesh)
            truth = scan_gradients.balance_loss(routing.slots.sum(0), scores)
            error = abs(float(losses[number]) / truth - 1)
            if not error <= ALLOWED_LOSS_ERROR:
                return f"the balance loss of layer {number} has an error of {error:.1e}, above {ALLOWED_LOSS_ERROR:.1e}"
    return ""


def _routings(seen: Seen, mesh: Mesh, num_experts: int) -> list[traffic.Routing]:
    return [traffic.Routing.of(ids, mesh.size, num_experts) for ids in whole(seen.ids, mesh)]


@jax.jit
def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether two arrays are equal; NaN equals nothing."""
    return jnp.all(a == b)


def _make_weights(options: ScanOptions, case: Case, tokens: int, mesh: Mesh) -> Weights:
    shape, dtype, narrow = case.shape, wide_dtype_of(options.dtype), narrow_of(options.dtype)

    def of_layer(key: jax.Array) -> tuple[jax.Array, jaxmoe.Experts]:
        router = jax.random.normal(key, (shape.hidden, shape.num_experts), jnp.float32) * shape.hidden**-0.5
        experts = jaxmoe.Experts.init(key, shape.num_experts, shape.hidden, shape.intermediate, dtype=dtype)
        # Small answers: there is no norm between layers, and tokens would grow without end.
        experts = dataclasses.replace(experts, w_down=experts.w_down / 16)
        return router.astype(dtype), experts if narrow.block is None else quantized(experts, narrow.block)

    split = NamedSharding(mesh, P(None, AXIS))
    make = jax.jit(lambda keys: jax.lax.map(of_layer, keys), out_shardings=(NamedSharding(mesh, P()), split))
    router, experts = make(jax.random.split(jax.random.key(2), options.layers))
    if narrow.through_e4m3:
        for number in range(options.layers):
            jaxmoe.through_e4m3(jax.tree.map(lambda array: array[number], experts))  # noqa: B023, called in this turn
        experts = marked(experts, through_e4m3=True)
    rng = np.random.default_rng(3)
    ids = np.stack(
        [make_ids(rng, tokens * mesh.size, shape.num_experts, shape.top_k, "uniform") for _ in range(options.layers)]
    )
    raw = rng.random(ids.shape, np.float32) + np.float32(0.1)
    chosen = raw / raw.sum(-1, keepdims=True)
    arrays = (jax.make_array_from_callback(each.shape, split, each.__getitem__) for each in (ids, chosen))
    return Weights(router, experts, *arrays)


def _text(result: Result, found: dict[AnyLine, Result]) -> str:
    r = result
    if r.failure is not None:
        return f"{_row(r.shape, r.tokens, r.ranks, r.line)} no figures: {r.failure}"
    assert r.microseconds is not None
    assert r.temporaries_gb is not None
    before = found[WITHOUT[r.line]].microseconds if r.line in WITHOUT and WITHOUT[r.line] in found else None
    return _row(
        r.shape,
        r.tokens,
        r.ranks,
        r.line,
        f"{r.error:.0e}",
        f"{r.microseconds:.1f}",
        f"{r.slowest:.1f}",
        "-" if before is None else f"{r.microseconds - before:+.1f}",
        "-" if r.weights_mb is None else f"{r.weights_mb:.0f}",
        "-" if r.floor_us is None else f"{r.floor_us:.0f}",
        "-" if r.floor_us is None else f"{r.microseconds / r.floor_us:.3f}",
        f"{r.temporaries_gb:.2f}",
    )


def _row(*cells: Any) -> str:
    widths = (18, 6, 3, 10, 8, 9, 8, 8, 6, 9, 8, 8)
    return " ".join(
        f"{cell!s:<{width}}" if number in (0, 3) else f"{cell!s:>{width}}"
        for number, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ).rstrip()
