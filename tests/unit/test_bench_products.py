"""`bench peaks --shape`: the products of a layer alone, of the sizes that one rank has."""

import jax
import jax.numpy as jnp
import pytest

from jaxmoe.bench import products
from jaxmoe.bench.shapes import Case, LayerShape

SHAPE = LayerShape(hidden=64, intermediate=32, num_experts=8, top_k=2)


@pytest.mark.parametrize(("ranks", "experts", "rows"), [(1, 8, 4), (2, 4, 8), (8, 1, 32)])
def test_a_rank_multiplies_all_rows_of_its_experts(ranks: int, experts: int, rows: int):
    found = products.measure(SHAPE, tokens=16, ranks=ranks, seconds=0.001)
    assert (found.experts, found.rows) == (experts, rows)
    assert found.tflops * found.seconds == pytest.approx(6 * 16 * 2 * 64 * 32 / 1e12)


@pytest.mark.parametrize(("tokens", "ranks"), [(16, 3), (16, 0), (3, 1), (0, 1)])
def test_experts_and_rows_that_cannot_be_shared_evenly_are_refused(tokens: int, ranks: int):
    with pytest.raises(ValueError, match=rf"--tokens={tokens} --ep={ranks}: 8 experts with 2 to a token.*a multiple"):
        products.measure(SHAPE, tokens, ranks)


GATE_AND_UP, DOWN = r"\(4, 8, 64\) and \(4, 64, 64\)", r"\(4, 8, 32\) and \(4, 32, 64\)"


@pytest.mark.parametrize("product", [GATE_AND_UP, DOWN])
@pytest.mark.parametrize(("expert", "row"), [(0, 0), (2, 5), (3, 7)])
def test_no_rate_is_printed_of_a_product_that_is_wrong_in_a_row(
    product: str, expert: int, row: int, monkeypatch: pytest.MonkeyPatch, capsys
):
    def wrong(a: jax.Array, b: jax.Array) -> jax.Array:
        right = jnp.einsum("emk,ekn->emn", a, b)
        is_it = a.shape[-1] == (64 if product == GATE_AND_UP else 32)
        return right.at[expert, row].multiply(1.03125) if is_it else right

    monkeypatch.setattr(products, "_product", wrong)
    told = f"product of {product} has an error of 3\\.\\de-02 in row {row} of expert {expert}, above 3.9e-03"
    with pytest.raises(RuntimeError, match=told):
        products.main([Case("small", SHAPE, 16)], seconds=0.001, rest=0.0, ranks=2)
    assert not capsys.readouterr().out


def test_no_rate_is_printed_of_a_product_that_has_a_nan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_product", lambda a, b: jnp.einsum("emk,ekn->emn", a, b).at[1, 2, 3].set(jnp.nan))
    with pytest.raises(RuntimeError, match="has an error of nan in row 2 of expert 1"):
        products.measure(SHAPE, tokens=16, ranks=2)


def test_every_layer_has_a_line(capsys):
    products.main([Case("small", SHAPE, tokens) for tokens in (16, 32)], seconds=0.001, rest=0.0, ranks=4)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("small, 16 tokens per rank, EP 4: products alone, 2 experts with 16 rows each, ")
    assert second.startswith("small, 32 tokens per rank, EP 4: products alone, 2 experts with 32 rows each, ")
