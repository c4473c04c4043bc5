"""The benchmark of layers in a scan: on CPUs, with small sizes, and what it says of programs that are wrong."""

import json
from typing import Any

import jax
import pytest

import jaxmoe
from jaxmoe.bench import scan, scan_gradients
from jaxmoe.bench.inputs import REPACKED
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.options import NARROW
from jaxmoe.bench.shapes import Case, LayerShape

CASE = Case("small", LayerShape(32, 48, 8, 2))
# Of whole blocks of 128 x 128.
ROUNDED = Case("small", LayerShape(128, 256, 8, 2))


def measured(case: Case = CASE, **changes: Any) -> list[scan.Result]:
    fields: dict[str, Any] = {"layers": 2, "implementation": "megakernel", "seconds": 0.0}
    options = scan.ScanOptions((case,), (16,), 2, **fields | changes)
    return list(scan.measure(options, case, 16, make_mesh(2)))


@pytest.mark.slow
def test_every_line_is_checked_and_timed():
    results = measured()
    assert [result.line for result in results] == [*scan.LINES, *scan_gradients.LINES]
    for result in results:
        assert result.failure is None
        assert result.error is not None
        assert result.error < 1e-2
        assert result.microseconds is not None
        assert result.microseconds > 0
        assert result.temporaries_gb is not None
        if result.line in scan.LINES:
            # Four experts of a rank, three matrices each: with 32 tokens all of them have rows.
            assert result.weights_mb == pytest.approx(4 * 3 * 32 * 48 * 2 / 1e6)
        json.dumps(scan.dataclasses.asdict(result), allow_nan=False)


# Bytes of a weight of `ROUNDED`, with its part of the scale of a block, a column, a matrix or a group.
BYTES = {
    "fp8-block": 1 + 4 / 128**2,
    "fp8-channel": 1 + 4 * (256 + 256 + 128) / (3 * 128 * 256),
    "fp8-static": 1 + 4 / (128 * 256),
    "fp8-static-fast": 1 + 4 / (128 * 256),
    "w8a16": 1 + 4 / 128**2,
    "mxfp4-a16": 0.5 + 1 / 32,
    "mxfp4-a8": 0.5 + 1 / 32,
    "mxfp4-a8-registers": 0.5 + 1 / 32,
    "nvfp4-a8": 0.5 + 1 / 16 + 4 / (128 * 256),
    "nvfp4-a16": 0.5 + 1 / 16 + 4 / (128 * 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_layers_in_8_and_4_bits_are_checked_and_read_as_many_bytes_and_have_no_gradients(dtype, monkeypatch):
    monkeypatch.setattr(scan, "LINES", ("layer",))
    (result,) = measured(ROUNDED, dtype=dtype, layers=1)
    assert (result.line, result.failure) == ("layer", None)
    assert result.error is not None
    assert result.error < 5e-2
    # Four experts of a rank, three matrices each.
    bytes_of_weight = BYTES[dtype.removesuffix(REPACKED)]
    assert result.weights_mb == pytest.approx(4 * 3 * 128 * 256 * bytes_of_weight / 1e6, rel=1e-4)


def test_a_dtype_that_is_none_is_an_error_that_names_those_that_are():
    with pytest.raises(ValueError, match=r"--dtype=int3 is not one of bf16, .*mxfp4-a8"):
        scan.ScanOptions((CASE,), dtype="int3")


def test_experts_that_cannot_be_spread_over_the_ranks_are_a_line_that_says_so():
    (line,) = measured(Case("small", LayerShape(32, 48, 3, 2)))
    assert line.failure == "cannot run: 3 experts cannot be spread over 2 ranks."


@pytest.mark.slow
def test_a_layer_that_is_wrong_in_a_scan_alone_has_no_figures(monkeypatch):
    right = jaxmoe.moe_layer

    def wrong(x: Any, *arguments: Any, **options: Any) -> Any:
        y = right(x, *arguments, **options)
        # Of one trace of many: the third line is the first that asks for statistics.
        return (y[0] * 2, y[1]) if options.get("return_stats") else y

    monkeypatch.setattr(jaxmoe, "moe_layer", wrong)
    monkeypatch.setattr(scan_gradients, "LINES", ())
    failures = [result.failure for result in measured(layers=1)]
    assert failures == [None, None, "layer 0 does not return what the layer alone does", None]


@pytest.mark.slow
def test_statistics_that_are_wrong_have_no_figures(monkeypatch):
    right = jaxmoe.router_aux
    monkeypatch.setattr(jaxmoe, "router_aux", lambda routing: jax.tree.map(lambda sums: sums + 1, right(routing)))
    monkeypatch.setattr(scan_gradients, "LINES", ())
    assert [result.failure for result in measured(layers=1)] == [
        None,
        None,
        None,
        "the statistics of layer 0 are not the counts of its ids",
    ]


@pytest.mark.slow
def test_gradients_that_are_wrong_in_a_scan_alone_have_no_figures(monkeypatch):
    right = scan_gradients.compile_line

    def wrong(*arguments: Any) -> Any:
        program = right(*arguments)

        class Wrong:
            def __call__(self, *arrays: Any) -> Any:
                loss, gradients = program(*arrays)
                return loss, gradients._replace(router=gradients.router.at[0].multiply(1.1))

        return Wrong()

    monkeypatch.setattr(scan_gradients, "compile_line", wrong)
    monkeypatch.setattr(scan, "LINES", ())
    monkeypatch.setattr(scan_gradients, "LINES", ("save",))
    assert [result.failure for result in measured()] == ["a gradient has an error of 1.0e-01"]


def scaled_gradients(arrays: Any, factor: float) -> Any:
    """The same arrays, whose gradients are multiplied."""

    @jax.custom_vjp
    def same(arrays: Any) -> Any:
        return arrays

    same.defvjp(
        lambda arrays: (arrays, None), lambda _, gradients: (jax.tree.map(lambda array: factor * array, gradients),)
    )
    return same(arrays)


@pytest.mark.slow
def test_a_balance_loss_that_is_wrong_has_no_figures(monkeypatch):
    right = jaxmoe.MoEAux.load_balancing_loss.fget
    assert right is not None
    monkeypatch.setattr(jaxmoe.MoEAux, "load_balancing_loss", property(lambda aux: 1.001 * right(aux)))
    monkeypatch.setattr(scan, "LINES", ("loss",))
    monkeypatch.setattr(scan_gradients, "LINES", ())
    [result] = measured()
    assert result.failure == "the balance loss of layer 0 has an error of 1.0e-03, above 1.0e-05"
    monkeypatch.setattr(jaxmoe.MoEAux, "load_balancing_loss", property(lambda aux: 1.5 * right(aux)))
    monkeypatch.setattr(scan, "LINES", ())
    monkeypatch.setattr(scan_gradients, "LINES", ("save",))
    [result] = measured()
    assert (result.failure or "").startswith("the loss is ")


@pytest.mark.slow
def test_statistics_that_are_wrong_where_they_are_timed_alone_have_no_figures(monkeypatch):
    right = scan._compile

    def wrong(*arguments: Any, keeps: bool) -> Any:
        program = right(*arguments, keeps=keeps)
        if keeps:
            return program
        return lambda *arrays: jax.tree.map(lambda array: array + (array.ndim < 3), program(*arrays))

    monkeypatch.setattr(scan, "_equal", lambda *_: True)
    monkeypatch.setattr(scan, "_compile", wrong)
    monkeypatch.setattr(scan, "LINES", ("stats",))
    monkeypatch.setattr(scan_gradients, "LINES", ())
    [result] = measured(layers=1)
    assert result.failure == "the statistics of layer 0 are not the counts of its ids"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "x", "topk_weights", "the balance loss"])
def test_gradients_that_are_wrong_outside_of_a_scan_too_have_no_figures(monkeypatch, name):
    """By a tenth, of the layer or of the probabilities of the balance loss."""
    layer, aux = jaxmoe.moe_layer, jaxmoe.router_aux

    def moe_layer(x: Any, ids: Any, weights: Any, experts: Any, **options: Any) -> Any:
        given = {"x": x, "topk_weights": weights, "experts": experts}
        given |= {each: scaled_gradients(given[each], 1.1) for each in given if each == name}
        return layer(given["x"], ids, given["topk_weights"], given["experts"], **options)

    def router_aux(routing: Any) -> Any:
        scores = scaled_gradients(routing.scores, 1.1) if name == "the balance loss" else routing.scores
        return aux(scan.dataclasses.replace(routing, scores=scores))

    monkeypatch.setattr(jaxmoe, "moe_layer", moe_layer)
    monkeypatch.setattr(jaxmoe, "router_aux", router_aux)
    monkeypatch.setattr(scan, "LINES", ())
    monkeypatch.setattr(scan_gradients, "LINES", ("recompute",))
    [result] = measured()
    said = "w_gate of expert" if name == "experts" else f"{name} has"
    assert (result.failure or "").startswith(f"the gradient of {said}")
