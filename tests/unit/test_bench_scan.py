"""The benchmark of layers in a scan: on CPUs, with small sizes, and what it says of programs that are wrong."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe.bench import scan, scan_gradients
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.shapes import Case, LayerShape

CASE = Case("small", LayerShape(32, 48, 8, 2))


def measured(**changes: Any) -> list[scan.Result]:
    fields: dict[str, Any] = {"layers": 2, "dtype": jnp.bfloat16, "implementation": "megakernel", "seconds": 0.0}
    options = scan.ScanOptions((CASE,), (16,), 2, **fields | changes)
    return list(scan.measure(options, CASE, 16, make_mesh(2)))


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
