"""The sums of outer products that are the gradients of the experts' matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.implementations.xla import outer_products
from jaxmoe.implementations.xla.outer_products import sum_of_outer_products

INNER, OUTER = 3, 5


def inputs(rows: int, dtype: object = jnp.float32) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    return tuple(jnp.asarray(rng.integers(-8, 9, (rows, width)), dtype) for width in (INNER, OUTER))  # pyright: ignore


def expected(lhs: jax.Array, rhs: jax.Array, sizes: list[int]) -> np.ndarray:
    ends = np.cumsum(sizes)
    a, b = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    return np.stack([a[end - size : end].T @ b[end - size : end] for end, size in zip(ends, sizes, strict=True)])


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9), behind=st.integers(0, 70))
def test_sums_of_whole_numbers_are_exact_for_every_number_of_rows_and_experts(sizes, behind):
    rows = max(sum(sizes) + behind, 1)
    lhs, rhs = inputs(rows)
    sums = sum_of_outer_products(lhs, rhs, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_array_equal(sums, expected(lhs, rhs, sizes))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_rows_are_added_up_in_float32(dtype):
    sizes = [700, 0, 324]
    lhs, rhs = inputs(1024, dtype)
    sums = sum_of_outer_products(lhs, rhs, jnp.asarray(sizes, jnp.int32))
    assert sums.dtype == jnp.float32
    np.testing.assert_array_equal(sums, expected(lhs, rhs, sizes))


@pytest.mark.parametrize("nan_row", [0, 10, 25, 63])
def test_nan_stays_with_the_expert_of_its_row_or_with_nobody(nan_row):
    sizes = [9, 0, 17, 30]  # and eight rows behind the last one
    lhs, rhs = (array.at[nan_row].set(jnp.nan) for array in inputs(64))
    sums = np.asarray(sum_of_outer_products(lhs, rhs, jnp.asarray(sizes, jnp.int32)))
    owner = np.searchsorted(np.cumsum(sizes), nan_row, side="right")
    assert [bool(np.isnan(of_expert).any()) for of_expert in sums] == [expert == owner for expert in range(4)]


def test_as_many_blocks_as_fit_are_multiplied_in_one_step(monkeypatch):
    sizes, product_bytes = [9, 0, 17, 30], 4 * INNER * OUTER
    lhs, rhs = inputs(64)
    results = []
    for at_once in (1, 3):
        monkeypatch.setattr(outer_products, "STEP_BYTES", at_once * product_bytes)
        results.append(np.asarray(sum_of_outer_products(lhs, rhs, jnp.asarray(sizes, jnp.int32))))
        text = str(jax.make_jaxpr(lambda a, b: sum_of_outer_products(a, b, jnp.asarray(sizes, jnp.int32)))(lhs, rhs))
        assert f"f32[{at_once},{INNER},{OUTER}]" in text
    np.testing.assert_array_equal(*results)
