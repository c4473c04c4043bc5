"""`python -m jaxmoe.bench exchange`: `jaxmoe.dispatch` and `jaxmoe.combine` on their own, for experts of one's own.

Rounds of both run in one `jax.lax.scan` with no host in between, each on what the one before has returned. Lines:

- `wide`: rows in the dtype of the tokens, there and back.
- `fp8`: rows in 8 bits with their scales there, wide ones back, as with experts that multiply in 8 bits. The answers
  are random rows, the same in every round, so tokens are their weighted sums after the first one.
- `ragged_all_to_all`: XLA's own collective for the same rows, there and back, without the sort, the gather and the sum
  that a program needs besides. Left out where XLA has none (CPUs).

Weights are random and add up to one. Before a line is timed its rows are compared, bit for bit, with the tokens that
their handles name, and each slot's row with its expert. Then random answers, another one for each row, have to come
back as the weighted sums that the host makes of them in float64, token by token; how far they may be off is twice the
error of the same sums in float32, rounded once. The last round that was timed is compared too: `wide` with the tokens
of the first one, `fp8` with the sums. Of the collective each rank has to get the rows that others have for it, and all
come back. With `--with_experts`: `exchange_experts.py`.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench import exchange_experts
from jaxmoe.bench.exchange_sums import Sums, has_changed, is_off
from jaxmoe.bench.inputs import AXIS, random_arguments, random_tokens, whole
from jaxmoe.bench.kernels import kernel_times
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.report import append, say
from jaxmoe.bench.shapes import Case
from jaxmoe.bench.windows import time_calls
from jaxmoe.options import Arguments
from jaxmoe.quantization import dequantize_rows, quantize_rows

Line = Literal["wide", "fp8", "ragged_all_to_all"]
LINES: tuple[Line, ...] = ("wide", "fp8", "ragged_all_to_all")
ROUNDS = 16


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """One run of `python -m jaxmoe.bench exchange`.

    Args:
      cases: shapes, of which hidden, num_experts and top_k count; with experts intermediate as well.
      tokens: per rank, for the cases that do not bring their own.
      ranks: over which the experts are spread; 0 for all devices.
      dtype: of the tokens.
      implementation: of `dispatch` and `combine`; `None` lets them choose.
      seconds: for which a line is timed.
      json: file to which the results are added, one JSON object a line.
      with_experts: the lines of `exchange_experts.py` instead.
      multiprocessors: of what runs beside experts there; `None` for the default.
    """

    cases: tuple[Case, ...]
    tokens: tuple[int, ...] = (64, 4096)
    ranks: int = 0
    dtype: Any = jnp.bfloat16
    implementation: str | None = None
    seconds: float = 0.3
    json: Path | None = None
    with_experts: bool = False
    multiprocessors: int | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One line.

    Args:
      shape: its name.
      tokens: per rank.
      ranks: that share the experts.
      line: which one.
      failure: what is wrong; `None` where it was timed.
      microseconds: of a round, there and back, median over windows, see `time_calls`.
      slowest: of the slowest window.
      there_us, back_us: of the kernel that dispatches and of the one that combines; `None` where there are none.
      link_gbs: bytes of rows that cross to this rank, and from it, per second of a round: those of the rank with most.
    """

    shape: str
    tokens: int
    ranks: int
    line: Line
    failure: str | None = None
    microseconds: float | None = None
    slowest: float | None = None
    there_us: float | None = None
    back_us: float | None = None
    link_gbs: float | None = None


def run(options: ExchangeOptions) -> int:
    """Prints the table; returns the exit status, which is 1 where a line has no figures.

    Raises:
      ValueError: more ranks than devices, or processes without a rank.
    """
    mesh = make_mesh(options.ranks or jax.device_count())
    if options.with_experts:
        return exchange_experts.run(options, mesh)
    say(
        f"{mesh.devices.flat[0].device_kind} x {mesh.size}, {jax.process_count()} process(es), jax {jax.__version__}, "
        f"{jnp.dtype(options.dtype).name}, {ROUNDS} rounds of dispatch and combine in a scan. Tokens per rank; us per "
        f"round over {options.seconds:g} s, the slowest process; NVLink: rows that cross, both ways, per GPU."
    )
    say(_row("shape", "tokens", "EP", "line", "checked", "us/round", "slowest", "there", "back", "NVLink", "x"))
    failed = False
    for case in options.cases:
        for tokens in (case.tokens,) if case.tokens else options.tokens:
            wide = None
            for result in measure(options, case, tokens, mesh):
                wide = result.microseconds if result.line == "wide" else wide
                failed |= result.failure is not None
                say(_text(result, wide))
                append(options.json, json.dumps(dataclasses.asdict(result), allow_nan=False))
    return int(failed)


def measure(options: ExchangeOptions, case: Case, tokens: int, mesh: Mesh) -> Iterator[Result]:
    """Checks and times the lines of one shape and number of tokens."""
    shape, ranks = case.shape, mesh.size
    if shape.num_experts % ranks:
        text = f"cannot run: {shape.num_experts} experts cannot be spread over {ranks} ranks."
        yield Result(case.name, tokens, ranks, LINES[0], failure=text)
        return
    arguments, ids = random_arguments(shape, tokens, "uniform", mesh, options.dtype, 1)
    remote = _remote_rows(ids, shape.num_experts, ranks)
    row_bytes = shape.hidden * jnp.dtype(options.dtype).itemsize
    for line in LINES:
        blank = Result(case.name, tokens, ranks, line)
        if line == "ragged_all_to_all" and (ranks == 1 or mesh.devices.flat[0].platform == "cpu"):
            continue
        try:
            program, arrays, told, wrong = _checked(line, arguments, ids, shape.num_experts, mesh, options)
        except (ValueError, NotImplementedError, TypeError) as error:
            yield dataclasses.replace(blank, failure=f"cannot run: {error}")
            continue
        if wrong:
            yield dataclasses.replace(blank, failure=wrong)
            continue
        compiled = program.lower(*arrays).compile()
        timed, last = time_calls(lambda _: compiled(*arrays), options.seconds)  # noqa: B023, called in this turn
        if wrong := told(whole(last, mesh)):
            yield dataclasses.replace(blank, failure=f"the rounds that are timed: {wrong}")
            continue
        there, back = _of_kernels(lambda: compiled(*arrays), mesh)  # noqa: B023, the same
        crossing = remote * row_bytes * (1.5 if line == "fp8" else 2)
        microseconds = timed.median / ROUNDS
        yield dataclasses.replace(
            blank,
            microseconds=microseconds,
            slowest=timed.slowest / ROUNDS,
            there_us=there,
            back_us=back,
            link_gbs=crossing / microseconds / 1e3,
        )


def _checked(
    line: Line, arguments: Arguments, ids: np.ndarray, num_experts: int, mesh: Mesh, options: ExchangeOptions
) -> tuple[Any, tuple[jax.Array, ...], Callable[[np.ndarray], str | None], str | None]:
    """Returns the rounds of a line, their arrays, what says whether they are wrong, and what is wrong with one.

    Raises as `dispatch` does where that cannot run the line.
    """
    x, weights = arguments.x, arguments.topk_weights
    if line == "ragged_all_to_all":
        program, arrays, wrong = _ragged(ids, x, num_experts, mesh)
        return program, arrays, functools.partial(_is_other, whole(arrays[0], mesh)), wrong
    one = _one_round(line, num_experts, mesh, options.implementation)
    given = arguments[:3]
    answers = _answers(x, arguments.topk_ids, num_experts, mesh, options.implementation)
    wrong, sums = _check(line, one, given, answers, num_experts, mesh)
    if line == "fp8" and sums is not None:
        return _rounds(one), (*given, answers), functools.partial(is_off, sums), wrong
    return _rounds(one), given, functools.partial(has_changed, whole(x, mesh), whole(weights, mesh), ROUNDS), wrong


Round = Callable[..., tuple[jax.Array, jaxmoe.Dispatched]]


def _one_round(line: Line, num_experts: int, mesh: Mesh, implementation: Any) -> Round:
    """Returns a function from tokens, ids, weights and answers to what comes back and what was dispatched.

    Answers stand for what experts make of rows. Without any the rows themselves go back.
    """
    options = {"mesh": mesh, "implementation": implementation, "num_experts": num_experts}
    precision = "fp8" if line == "fp8" else None

    def one(
        x: jax.Array, ids: jax.Array, weights: jax.Array, answers: jax.Array | None = None
    ) -> tuple[jax.Array, jaxmoe.Dispatched]:
        arrived = jaxmoe.dispatch(x, ids, precision=precision, **options)
        return jaxmoe.combine(arrived.rows if answers is None else answers, weights, arrived.handle), arrived

    return one


def _answers(x: jax.Array, ids: jax.Array, num_experts: int, mesh: Mesh, implementation: Any) -> jax.Array:
    """Returns random answers, another one for each row, in the dtype of the tokens.

    Every round needs the handle of its own dispatch for them, and in `fp8` the tokens of the next round are their sums,
    so no round can be left out.
    """
    dispatch = functools.partial(jaxmoe.dispatch, num_experts=num_experts, mesh=mesh, implementation=implementation)
    return random_tokens(mesh, jax.eval_shape(dispatch, x, ids).rows.shape, x.dtype, 3)


def _rounds(one: Round) -> Any:
    def rounds(x: jax.Array, *others: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (one(x, *others)[0], None), x, length=ROUNDS)[0]

    return jax.jit(rounds)


def _check(
    line: Line, one: Round, given: tuple[jax.Array, ...], answers: jax.Array, num_experts: int, mesh: Mesh
) -> tuple[str | None, Sums | None]:
    """Returns what is wrong with a round, `None` where nothing is, and what the sums are of these answers."""
    y, arrived = jax.tree.map(lambda array: whole(array, mesh), jax.jit(one)(*given, answers))
    x, ids, weights = (whole(array, mesh) for array in given)
    sources, slot_rows = arrived.handle.row_sources, arrived.handle.slot_rows
    there = sources >= 0
    slots = ids.size // mesh.size
    slot = np.where(there, (sources >> 24) * slots + (sources & (2**24 - 1)), 0)
    if there.sum() != ids.size or arrived.dropped_rows.any() or (slot_rows < 0).any():
        return f"{there.sum()} rows of {ids.size} slots arrived", None
    if not np.array_equal(np.sort(slot[there]), np.arange(ids.size)):
        return "a slot has more than one row", None
    rows, tokens = arrived.rows, x[slot // ids.shape[1]]
    if line == "fp8":
        # On a CPU: XLA's division on GPUs is not always rounded to the nearest.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            rows = np.asarray(dequantize_rows(jnp.asarray(rows), jnp.asarray(arrived.scales), jnp.float32))
            tokens = np.asarray(dequantize_rows(*quantize_rows(jnp.asarray(tokens)), jnp.float32))
    if not np.array_equal(rows[there], tokens[there]):
        return "rows are not those of the tokens that their handle names", None
    rank = np.arange(len(sources)) // (len(sources) // mesh.size)
    if not np.array_equal((ids.reshape(-1)[slot] // (num_experts // mesh.size))[there], rank[there]):
        return "rows are not at the rank that has their expert", None
    row_of_slot = np.zeros(ids.size, np.int64)
    row_of_slot[slot[there]] = np.flatnonzero(there)
    sums = Sums(whole(answers, mesh), row_of_slot.reshape(ids.shape), weights)
    return is_off(sums, y), sums


def _is_other(truth: np.ndarray, y: np.ndarray) -> str | None:
    return None if np.array_equal(y, truth) else "rows do not come back"


def _remote_rows(ids: np.ndarray, num_experts: int, ranks: int) -> int:
    """Returns the rows that cross to the rank that most cross to."""
    owner = ids // (num_experts // ranks)
    source = np.repeat(np.arange(ranks), len(ids) // ranks)[:, None]
    return max(int(((owner == rank) & (source != rank)).sum()) for rank in range(ranks))


def _ragged(
    ids: np.ndarray, x: jax.Array, num_experts: int, mesh: Mesh
) -> tuple[Any, tuple[jax.Array, ...], str | None]:
    """Returns the rounds of `jax.lax.ragged_all_to_all`, its arrays, and what is wrong with a round.

    The arrays are rows sorted by owner, offsets and sizes.
    """
    ranks, slots = mesh.size, ids.size // mesh.size
    owners = (ids // (num_experts // ranks)).reshape(ranks, slots)
    sizes = np.stack([(owners == rank).sum(1) for rank in range(ranks)], 1).astype(np.int32)  # [source, owner]
    begins = np.cumsum(sizes, 1, dtype=np.int32) - sizes  # in the rows of a source
    ends_at = np.cumsum(sizes, 0, dtype=np.int32) - sizes  # in the rows of an owner
    split = NamedSharding(mesh, P(AXIS))
    room = int(sizes.sum(0).max())
    rows = random_tokens(mesh, (ranks * slots, x.shape[1]), x.dtype, 2)
    tables = [
        jax.device_put(table.reshape(-1), split) for table in (sizes, begins, ends_at, sizes.T, begins.T, ends_at.T)
    ]

    def one(rows: jax.Array, *tables: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes, begins, ends_at, back_sizes, back_begins, back_ends = tables
        exchange = functools.partial(jax.lax.ragged_all_to_all, axis_name=AXIS)
        arrived = exchange(rows, _zeros_like(rows, room), begins, sizes, ends_at, back_sizes)
        back = exchange(arrived, _zeros_like(rows, slots), back_ends, back_sizes, back_begins, sizes)
        return arrived, back

    def rounds(rows: jax.Array, *tables: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda rows, _: (one(rows, *tables)[1], None), rows, length=ROUNDS)[0]

    on_ranks = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    sent, arrays = whole(rows, mesh), (rows, *tables)
    arrived, back = (whole(array, mesh) for array in jax.jit(on_ranks(one))(*arrays))
    wrong = None
    for owner, of_rank in enumerate(arrived.reshape(ranks, room, -1)):
        from_sources = [
            sent[source * slots + begins[source, owner] :][: sizes[source, owner]] for source in range(ranks)
        ]
        if not np.array_equal(of_rank[: sizes[:, owner].sum()], np.concatenate(from_sources)):
            wrong = f"rank {owner} does not get the rows that others have for it"
    if not np.array_equal(back, sent):
        wrong = "rows do not come back"
    return jax.jit(on_ranks(rounds)), arrays, wrong


def _zeros_like(rows: jax.Array, count: int) -> jax.Array:
    """So many rows of zeros that vary over the mesh as others do."""
    return jnp.broadcast_to(jnp.zeros_like(rows[:1]), (count, rows.shape[1]))


def _of_kernels(call: Callable[[], Any], mesh: Mesh) -> tuple[float | None, float | None]:
    """Returns the microseconds of a round that the two kernels take on the first GPU."""
    if mesh.devices.flat[0].platform == "cpu":
        return None, None
    times = kernel_times(call)

    def of(name: str) -> float | None:
        return sum(each.microseconds for each in times if name in each.name) / ROUNDS or None

    return of("moe_dispatch"), of("moe_combine")


def _text(result: Result, wide: float | None) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    slower = f"{result.microseconds / wide:.2f}" if result.microseconds and wide else ""
    checked = "no" if result.failure else "yes"
    text = _row(
        *(result.shape, str(result.tokens), str(result.ranks), result.line, checked),
        *map(number, (result.microseconds, result.slowest, result.there_us, result.back_us)),
        "" if result.link_gbs is None else f"{result.link_gbs:.0f}",
        slower,
    )
    return f"{text}\n    {result.failure}" if result.failure else text


def _row(*cells: str) -> str:
    widths = (20, 7, 3, 18, 8, 9, 9, 8, 8, 7, 6)
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
