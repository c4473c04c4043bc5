"""Halves of a layer by CPU threads, in the place of the thread blocks of the GPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import native
from jaxmoe.exchange import kernel
from jaxmoe.implementations.megakernel import plan_defaults
from jaxmoe.testing import make_ids
from tests.matmul_suite import KernelSuite
from tests.unit.test_exchange_matmul import OnCpu


class TestMegakernel(OnCpu, KernelSuite):
    pass


class TestMegakernelInBf16(KernelSuite):
    dtype = jnp.bfloat16


def halves(tokens: int = 96, hidden: int = 40, experts: int = 4) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x, first = rng.standard_normal((tokens, hidden)), rng.standard_normal((experts, hidden, 72))
    ids = jnp.asarray(make_ids(rng, tokens, experts, 2, "zipf"))
    second, weights = rng.standard_normal((experts, 72, hidden)), rng.random((tokens, 2))
    return (*(jnp.asarray(array, jnp.float32) for array in (x, first, second, weights)), ids)


def both(x: jax.Array, first: jax.Array, second: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    arrived = jaxmoe.dispatch_matmul(x, ids, first, axis_name=None, implementation="megakernel")
    return jaxmoe.matmul_combine(jnp.tanh(arrived.rows), second, weights, arrived.handle)


@pytest.mark.parametrize(
    "changes",
    [
        {"unit_tiles": 1, "ring_tiles": 1, "chunk_rows": 1},
        {"unit_tiles": 1, "ring_tiles": 4, "chunk_rows": 4, "share_columns": True},  # as few rows have on a GPU
        {"unit_tiles": 3, "ring_tiles": 3, "chunk_rows": 5, "keep_tokens": True},
        {"unit_tiles": 7, "ring_tiles": 50, "chunk_rows": 32},
    ],
)
def test_every_plan_gives_the_same_bits(monkeypatch, changes):
    arrays = halves()
    expected = both(*arrays)
    default = plan_defaults.kernel_plan
    plans = []

    def other(shape, platform):
        plan = default(shape, platform)
        plans.append(jaxmoe.KernelPlan(lag_units=plan.lag_units, **changes))
        return plans[-1]

    monkeypatch.setattr(kernel.plan_defaults, "kernel_plan", other)
    jax.clear_caches()
    np.testing.assert_array_equal(jax.jit(lambda *arrays: both(*arrays))(*arrays), expected)
    assert len(plans) == 2


def test_rows_per_expert_that_no_dispatch_returned_write_nowhere_else():
    """The handle is the caller's: whatever its numbers are, what is read and written stays in the arrays."""
    x, first, second, weights, ids = halves()
    arrived = jaxmoe.dispatch_matmul(x, ids, first, axis_name=None, implementation="megakernel")
    call, sources = arrived.handle.call, arrived.handle.row_sources
    for counts in ([1000, 1000, 1000, 1000], [-5, 2**30, 7, 0], [0, 0, 0, 2**31 - 1]):
        routes = kernel.Routes(sources, arrived.handle.slot_rows)
        wrong = jnp.asarray(counts, jnp.int32)
        y = kernel.matmul_add_up(call, arrived.rows, second, weights, routes, wrong)
        assert y.shape == x.shape


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("half", 0, "half=0"),
        ("half", 2, "half=2"),
        ("lag_units", 1, "lag_units=1"),
        ("ring_tiles", 0, "a ring of at least unit_tiles"),
        ("unit_tiles", 0, "positive sizes"),
        ("frozen", 1, "no gradients"),
        ("share_columns", 1, "no shared columns"),
        ("summed_tiles", 1, "no sums at experts"),
    ],
)
def test_compiled_code_refuses_a_schedule_that_python_would_not_make(monkeypatch, field, value, told):
    right = kernel.launch
    names = ["rows", "h_columns", "columns", "unit_tiles", "lag_units", "ring_tiles"]
    place = {name: number for number, name in enumerate(names)}
    place |= {"half": -4, "frozen": -3, "share_columns": -2, "summed_tiles": -1}

    def launch(target, order, group, platform, attributes, *arrays):
        numbers = attributes["schedule"].copy()
        numbers[place[field]] = value
        return right(target, order, group, platform, attributes | {"schedule": numbers}, *arrays)

    monkeypatch.setattr(kernel, "launch", launch)
    x, first, *_, ids = halves(tokens=8 + 8 * len(field) + value)  # of sizes that no other test has
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(jaxmoe.dispatch_matmul(x, ids, first, axis_name=None, implementation="megakernel").rows)


def test_a_half_walks_the_tasks_of_its_product_alone():
    schedule_of = native.schedule()
    shape = schedule_of.Shape(1, 96, 40, 72, 4, 2, 1)
    whole = schedule_of.schedule_for(
        shape, "cpu", jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=8), scaled=False
    )
    rows = [50, 0, 3, 139]
    of_layer = [task for worker in range(whole.workers) for task in schedule_of.tasks(shape, whole, rows, worker)]
    for half, gemm in ((schedule_of.FIRST_HALF, "gate_up"), (schedule_of.SECOND_HALF, "down")):
        schedule = schedule_of.half_of(whole, half)
        tasks = [task for worker in range(whole.workers) for task in schedule_of.tasks(shape, schedule, rows, worker)]
        assert tasks
        assert {task.gemm.name for task in tasks} == {gemm}
        places = lambda tasks: {(task.expert, task.row_tile, task.column_tile, task.rows) for task in tasks}  # noqa: E731
        assert places(tasks) == places([task for task in of_layer if task.gemm.name == gemm])
        assert len(tasks) == len(places(tasks))
