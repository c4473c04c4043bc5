"""The benchmark of dispatch and combine: on CPUs, with small sizes, and what it says of functions that are wrong."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.bench import exchange, exchange_sums
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.shapes import Case, LayerShape

CASE = Case("small", LayerShape(128, 48, 8, 2))


def measured(case: Case = CASE) -> list[exchange.Result]:
    options = exchange.ExchangeOptions((case,), (16,), 2, jnp.bfloat16, "megakernel", seconds=0.0)
    return list(exchange.measure(options, case, 16, make_mesh(2)))


@pytest.mark.slow
def test_every_line_of_a_cpu_is_checked_and_timed():
    results = measured()
    assert [result.line for result in results] == ["wide", "fp8"]
    for result in results:
        assert result.failure is None
        assert result.microseconds is not None
        assert result.link_gbs is not None
        assert result.microseconds > 0
        assert result.link_gbs > 0
        json.dumps(dataclasses.asdict(result), allow_nan=False)


def test_a_line_that_cannot_run_says_why_and_the_others_have_their_figures():
    wide, fp8 = measured(Case("small", LayerShape(63, 48, 4, 2)))
    assert wide.failure is None
    assert wide.microseconds is not None
    assert fp8.failure is not None
    assert fp8.failure.startswith("cannot run: dispatch: hidden=63 and precision='fp8'")
    (line,) = measured(Case("small", LayerShape(128, 48, 3, 2)))
    assert line.failure == "cannot run: 3 experts cannot be spread over 2 ranks."


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda arrived: dataclasses.replace(arrived, rows=jnp.roll(arrived.rows, 1, 0)), "rows are not those of the"),
        (lambda arrived: dataclasses.replace(arrived, dropped_rows=arrived.dropped_rows + 1), "64 rows of 64 slots"),
    ],
)
def test_rows_that_are_wrong_have_no_figures(monkeypatch, wrong, told):
    right = jaxmoe.dispatch
    monkeypatch.setattr(jaxmoe, "dispatch", lambda *arguments, **options: wrong(right(*arguments, **options)))
    assert all(result.failure and told in result.failure for result in measured())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right, outputs, weights, handle: right(outputs, 2 * weights, handle),
        lambda right, outputs, weights, handle: right(outputs, jnp.full_like(weights, 1 / weights.shape[1]), handle),
        lambda right, outputs, weights, handle: right(outputs, jnp.roll(weights, 1, 0), handle),
        lambda right, outputs, weights, handle: right(outputs, jnp.roll(weights, 1, 1), handle),
        lambda right, outputs, weights, handle: jnp.roll(right(outputs, weights, handle), 1, 0),
        lambda right, outputs, weights, handle: right(outputs.at[3].set(jnp.nan), weights, handle),
    ],
    ids=["twice", "means", "weights of others", "weights of other slots", "answers of others", "nan"],
)
def test_answers_that_are_wrong_have_no_figures(monkeypatch, wrong):
    monkeypatch.setattr(jaxmoe, "combine", functools.partial(wrong, jaxmoe.combine))
    for result in measured():
        assert result.failure
        assert result.failure.startswith("what comes back is not the weighted sum: a token has an error of ")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_one_slot_of_eight_that_is_lost_in_one_round_is_seen_and_roundings_are_allowed(dtype):
    rng = np.random.default_rng(0)
    tokens = np.asarray(jnp.asarray(rng.standard_normal((64, 256)), dtype))
    weights = rng.random((64, 8), np.float32) + np.float32(0.1)
    weights /= weights.sum(1, keepdims=True)
    answers = np.asarray(jnp.asarray(rng.standard_normal((512, 256)), dtype))
    sums = exchange_sums.Sums(answers, rng.permutation(512).reshape(64, 8), weights)
    # In another order than the host's.
    backwards = exchange_sums.Sums(answers, sums.rows[:, ::-1], weights[:, ::-1])
    y = backwards.of(slice(None), np.float32).astype(dtype)
    assert exchange_sums.is_off(sums, y) is None
    sent = tokens
    for _ in range(exchange.ROUNDS):
        alike = exchange_sums.Sums(sent, np.repeat(np.arange(64)[:, None], 8, 1), weights[:, ::-1])
        sent = alike.of(slice(None), np.float32).astype(dtype)
    assert exchange_sums.has_changed(tokens, weights, exchange.ROUNDS, sent) is None

    token = 17  # of which the slot with the least weight is lost
    least = weights[token].argmin()
    lost = y.astype(np.float32)
    lost[token] -= weights[token, least] * answers[sums.rows[token, least]].astype(np.float32)
    assert exchange_sums.is_off(sums, lost.astype(dtype))
    less = sent.astype(np.float32)
    less[token] *= 1 - weights[token, least]
    assert exchange_sums.has_changed(tokens, weights, exchange.ROUNDS, less.astype(dtype))


def test_rounds_that_are_wrong_where_they_are_timed_have_no_figures(monkeypatch):
    rounds = exchange._rounds

    def rolled(one: exchange.Round) -> exchange.Round:
        def wrong(*arrays: Any) -> Any:
            y, arrived = one(*arrays)
            return jnp.roll(y, 1, 0), arrived

        return wrong

    monkeypatch.setattr(exchange, "_rounds", lambda one: rounds(rolled(one)))
    for result in measured():
        assert result.failure
        assert result.failure.startswith("the rounds that are timed: what comes back is not the weighted sum")


def test_the_baseline_is_checked_by_what_every_rank_gets_and_gets_back(monkeypatch):
    """XLA has no such collective for CPUs: here it is one of all rows, written out."""

    def ragged(
        operand: Any, output: Any, begins: Any, sizes: Any, targets: Any, arriving: Any, *, axis_name: str
    ) -> Any:
        del arriving
        mine = jax.lax.axis_index(axis_name)
        everyone = [jax.lax.all_gather(each, axis_name) for each in (operand, begins, sizes, targets)]
        for rows, begin, size, target in zip(*everyone, strict=True):
            place = jnp.arange(output.shape[0]) - target[mine]
            taken = rows[jnp.clip(begin[mine] + place, 0, rows.shape[0] - 1)]
            output = jnp.where(((place >= 0) & (place < size[mine]))[:, None], taken, output)
        return output

    mesh = make_mesh(2)
    x = exchange.random_tokens(mesh, (32, 128), jnp.bfloat16, 0)
    ids = np.random.default_rng(0).integers(0, 8, (32, 2)).astype(np.int32)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
    assert exchange._ragged(ids, x, 8, mesh)[2] is None

    def lossy(*arguments: Any, **options: Any) -> Any:
        return ragged(*arguments, **options).at[0].set(0)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", lossy)
    assert exchange._ragged(ids, x, 8, mesh)[2] is not None
