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
@pytest.mark.parametrize(
    ("name", "lines"), [("moe_layer", ["layer"]), ("combine", ["apart", "in turn"]), ("matmul_combine", LINES[1:3])]
)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda y, _: y.at[3, 5].set(jnp.nan), "what comes back is not finite"),
        (lambda y, _: jnp.roll(y, 1, 0), "what comes back has an error of "),
        (lambda _, means: means, "what comes back has an error of "),
    ],
    ids=["nan", "answers of others", "means"],
)
def test_what_is_not_that_of_the_reference_has_no_figures(monkeypatch, name, lines, wrong, said):
    right, place = getattr(jaxmoe, name), {"moe_layer": 2, "combine": 1, "matmul_combine": 2}[name]

    def planted(*arguments, **options):
        weights = arguments[place]
        means = (*arguments[:place], jnp.full_like(weights, 1 / weights.shape[1]), *arguments[place + 1 :])
        return wrong(right(*arguments, **options), right(*means, **options))

    monkeypatch.setattr(jaxmoe, name, planted)
    told = {result.line: result.failure for result in measured(monkeypatch)}
    # Halves are compared with the layer first.
    assert all((told[line] or "").startswith((said, "off by ")) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), [("layer", "layer"), ("apart", "apart")])
def test_lines_that_no_other_is_like_are_compared_where_they_are_timed_too(monkeypatch, name, line):
    rounds = exchange_experts._rounds
    rolled = lambda function: lambda *arrays: tuple(jnp.roll(y, 1, 0) for y in function(*arrays))  # noqa: E731
    monkeypatch.setattr(exchange_experts, "_rounds", lambda f: rounds(rolled(f) if f.__name__ == name else f))
    told = {result.line: result.failure for result in measured(monkeypatch)}
    assert (told[line] or "").startswith("the rounds that are timed: what comes back has an error of ")


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
