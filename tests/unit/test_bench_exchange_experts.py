"""The benchmark of exchanges with experts in between: on CPUs, with small sizes, and what it says of wrong results."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe.bench import exchange, exchange_experts, kernels
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.shapes import Case, LayerShape

CASE = Case("small", LayerShape(64, 48, 8, 2))
LINES = ["layer", "halves", "halves, capacity", "apart", "in turn"]


def measured(monkeypatch: pytest.MonkeyPatch) -> list[exchange_experts.Result]:
    monkeypatch.setattr(exchange_experts, "ROUNDS", 2)
    monkeypatch.setattr(exchange_experts, "ROWS_OVER_BALANCED", 2.0)
    monkeypatch.setattr(exchange_experts, "ROWS_OF_AN_EXPERT", 4.0)
    options = exchange.ExchangeOptions((CASE,), (16,), 2, jnp.bfloat16, "xla", seconds=0.0, with_experts=True)
    return list(exchange_experts.measure(options, CASE, 16, make_mesh(2)))


@pytest.mark.slow
def test_every_line_is_checked_and_timed_and_compared(monkeypatch):
    results = measured(monkeypatch)
    assert [result.line for result in results] == LINES
    for result in results:
        assert result.failure is None
        assert result.microseconds is not None
        assert result.microseconds > 0
        assert (result.x is None) == (result.line in ("layer", "apart"))
        assert f"{result.line:<18} yes" in exchange_experts._text(result)
        json.dumps(dataclasses.asdict(result), allow_nan=False)


@pytest.mark.slow
def test_what_differs_has_no_figures(monkeypatch):
    right = jaxmoe.matmul_combine
    monkeypatch.setattr(jaxmoe, "matmul_combine", lambda *arguments: 1.1 * right(*arguments))
    start = jaxmoe.start_dispatch
    monkeypatch.setattr(jaxmoe, "start_dispatch", lambda x, *arguments, **options: start(-x, *arguments, **options))
    told = {result.line: result.failure for result in measured(monkeypatch)}
    assert told["layer"] is told["apart"] is None
    assert all("of the layer's largest number" in (told[line] or "") for line in ("halves", "halves, capacity"))
    assert told["in turn"] == "other bits than one micro-batch after the other"


@pytest.mark.slow
def test_zeros_and_dropped_rows_and_other_timed_rounds_have_no_figures(monkeypatch):
    told = lambda: {result.line: result.failure for result in measured(monkeypatch)}  # noqa: E731
    with monkeypatch.context() as planted:
        planted.setattr(jaxmoe, "combine", lambda outputs, *_: jnp.zeros((32, outputs.shape[-1]), outputs.dtype))
        assert told()["apart"] == "what comes back is zero"
    rounds = exchange_experts._rounds
    planted_in = {
        "in_turn": ("in turn", "other bits than one micro-batch after the other"),
        "function": ("halves", "of the layer's largest number"),
    }
    for name, (line, said) in planted_in.items():
        with monkeypatch.context() as planted:
            zeros = lambda function: lambda *arrays: tuple(jnp.zeros_like(y) for y in function(*arrays))  # noqa: E731
            wrong = lambda f, name=name, zeros=zeros: rounds(zeros(f) if f.__name__ == name else f)  # noqa: E731
            planted.setattr(exchange_experts, "_rounds", wrong)
            failure = told()[line] or ""
            assert failure.startswith("the rounds that are timed: ")
            assert said in failure
    monkeypatch.setattr(exchange_experts, "_rows_of_an_expert", lambda *_: 1)
    failures = told()
    assert all("and room for 1: some are dropped" in (failures[line] or "") for line in ("apart", "in turn"))


def test_time_beside_others_is_counted_once_however_many_run(monkeypatch):
    launches = {
        "moe_dispatch<bf16>": [(0.0, 4e3), (20e3, 30e3)],
        "moe_combine<bf16>": [(40e3, 50e3)],
        "gemm": [(1e3, 3e3), (22e3, 60e3)],
        "copy": [(2e3, 3.5e3), (24e3, 25e3)],
    }
    monkeypatch.setattr(kernels, "launches_of", lambda call, calls: launches)
    own, beside = kernels.beside_others(lambda: None, exchange_experts.KERNELS, calls=2)
    assert own == (4 + 10 + 10) / 2
    assert beside == (2.5 + 8 + 10) / 2
