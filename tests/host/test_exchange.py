"""Dispatch and combine by CPU threads, in the place of the thread blocks of the GPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.exchange import kernel
from jaxmoe.exchange.base import Routes
from jaxmoe.testing import make_ids
from tests.exchange_suite import ExchangeSuite
from tests.unit.test_exchange import OnCpu


class TestMegakernel(OnCpu):
    implementation = "megakernel"
    hidden = 128  # so that rows in 8 bits have whole blocks


# The suite is inherited with it.
assert issubclass(TestMegakernel, ExchangeSuite)


def dispatched(rng: np.random.Generator) -> tuple[jaxmoe.Dispatched, Routes, jax.Array]:
    x = jnp.asarray(rng.standard_normal((32, 16)), jnp.float32)
    ids = jnp.asarray(make_ids(rng, 32, 8, 2, "unused-slots"))
    arrived = jaxmoe.dispatch(x, ids, num_experts=8, axis_name=None, implementation="megakernel")
    return arrived, Routes(arrived.handle.row_sources, arrived.handle.slot_rows), x


def test_other_tokens_are_dispatched_by_the_routes_of_an_earlier_dispatch():
    arrived, routes, x = dispatched(np.random.default_rng(0))
    np.testing.assert_array_equal(kernel.pull(arrived.handle.call, x, routes), arrived.rows)
    np.testing.assert_array_equal(kernel.pull(arrived.handle.call, -2 * x, routes), -2 * arrived.rows)


def test_routes_that_name_no_rank_or_slot_are_nobodys():
    arrived, routes, x = dispatched(np.random.default_rng(1))
    wrong = routes.row_sources.at[0].set(1 << 24).at[1].set(64).at[2].set(-7)  # one rank has slots 0 to 63
    rows = kernel.pull(arrived.handle.call, x, Routes(wrong, routes.slot_rows))
    assert not np.asarray(rows[:3]).any()
    np.testing.assert_array_equal(rows[3:], arrived.rows[3:])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("alignment", 0, "The alignment has to be positive"),
        ("capacity_per_expert", 7, "shapes do not go together"),
        ("top_k", 3, "shapes do not go together"),
    ],
)
def test_compiled_code_refuses_a_call_that_python_would_not_make(monkeypatch, name, value, told):
    right = kernel.launch

    def launch(target, order, group, platform, attributes, *arrays):
        return right(target, order, group, platform, attributes | {name: np.int32(value)}, *arrays)

    monkeypatch.setattr(kernel, "launch", launch)
    x, ids = jnp.ones((4 + len(name), 8)), jnp.zeros((4 + len(name), 2), jnp.int32)  # of sizes that no other test has
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(jaxmoe.dispatch(x, ids, num_experts=2, axis_name=None, implementation="megakernel").rows)
