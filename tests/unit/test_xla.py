"""The portable implementation: the suite of all implementations, and its own promises about memory and collectives."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.implementations.base import CHECKPOINT_NAMES
from jaxmoe.implementations.xla.local_rows import count_below, stable_argsort
from jaxmoe.testing import dense, make_inputs, relative_error
from tests.layer_calls import layer, mesh_of, widened
from tests.layer_suite import LayerSuite


class TestXla(LayerSuite):
    implementation = "xla"
    # A data group of 32 tokens with 3 slots has 96 slots: one pass that just fits, one with room, and three passes of
    # 40.
    plans = (jaxmoe.Plan(batch_rows=96), jaxmoe.Plan(batch_rows=1000), jaxmoe.Plan(batch_rows=40))


SIZES: dict[str, Any] = {"tokens": 4096, "hidden": 64, "intermediate": 96, "num_experts": 8, "top_k": 2}


def compiled(plan: jaxmoe.Plan | None = None, gradients: bool = False, **sizes: Any) -> Any:
    arguments = make_inputs(0, **SIZES | sizes)
    run = layer("all devices", implementation="xla", plan=plan)
    if gradients:
        function = jax.grad(lambda e, a: jnp.sum(run(a._replace(experts=e)) ** 2))
        return jax.jit(function).lower(arguments.experts, arguments._replace(experts=None)).compile()
    return jax.jit(run).lower(arguments).compile()


def temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes  # of one device


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [8, 64])
def test_temporary_memory_is_what_explain_states_and_not_that_of_the_worst_routing(num_experts):
    arguments = make_inputs(1, **SIZES | {"num_experts": num_experts})
    stated = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert"))
    slots, balanced = 4096 * 2, 4096 * 2 // 8
    assert isinstance(stated.call.plan, jaxmoe.Plan)
    assert stated.call.plan.batch_rows < 2 * balanced < slots
    measured = temporary_bytes(compiled(num_experts=num_experts))
    worst = temporary_bytes(compiled(jaxmoe.Plan(batch_rows=slots), num_experts=num_experts))
    assert measured < 1.2 * sum(stated.memory_bytes.values())
    assert measured < 0.6 * worst


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["one-hot", "zipf"])
def test_one_rank_that_receives_every_row_drops_none_in_that_memory(routing):
    arguments = make_inputs(1, **SIZES, routing=routing)
    # One program for every routing, so its memory is that of the test above.
    assert relative_error(compiled()(arguments), dense(arguments)) < 5e-6
    rows = np.bincount(np.asarray(arguments.topk_ids).reshape(-1), minlength=8)
    plan = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert")).call.plan
    assert isinstance(plan, jaxmoe.Plan)
    assert rows.max() > 2 * plan.batch_rows


@pytest.mark.slow
@pytest.mark.parametrize("batch_rows", [8, 512])
def test_gradients_in_many_batches_are_as_exact_as_in_one(batch_rows):
    arguments = make_inputs(3, tokens=512, num_experts=4, biases=True, routing="one-hot", dtype=jnp.bfloat16)

    def gradients(run):
        loss = lambda e: jnp.sum(run(arguments._replace(experts=e)).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))(arguments.experts)

    truth = jax.grad(lambda e: jnp.sum(dense(widened(arguments)._replace(experts=e)) ** 2))(widened(arguments).experts)
    once = gradients(layer("one rank", implementation="xla", plan=jaxmoe.Plan(batch_rows=1024)))
    often = gradients(layer("one rank", implementation="xla", plan=jaxmoe.Plan(batch_rows=batch_rows)))
    for one, many, want in zip(*map(jax.tree.leaves, (once, often, truth)), strict=True):
        assert relative_error(many, want) < 1.5 * relative_error(one, want)


COLLECTIVE = re.compile(
    r"\b(all-gather|all-to-all|all-reduce|reduce-scatter|collective-\w+|ragged-all-to-all)(-start)?\("
)


@pytest.mark.slow
def test_only_dense_collectives_are_used_and_none_in_the_loop_over_passes():
    text = compiled(jaxmoe.Plan(batch_rows=128), gradients=True).as_text()
    assert {match[0] for match in COLLECTIVE.findall(text)} == {"all-gather", "all-to-all"}
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    bodies = re.findall(r"body=%?([\w.\-]+)", text)
    assert len(bodies) >= 2  # forward and backward
    seen: set[str] = set()
    while bodies:
        name = bodies.pop()
        seen.add(name)
        assert not COLLECTIVE.search(computations[name])
        called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", computations[name])
        bodies += [other for other in called if other not in seen]


def test_no_floating_point_scatter_makes_the_order_of_sums_depend_on_timing():
    text = compiled(jaxmoe.Plan(batch_rows=128), gradients=True).as_text()
    assert not re.findall(r"(?:f32|bf16|f16)\[[^\]]*\]\S* scatter\(", text)


@pytest.mark.parametrize(
    ("policy", "gemms"),
    [
        ("no checkpoint", 3 + 6),
        (jax.checkpoint_policies.nothing_saveable, 3 + 2 + 6),
        (jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES), 3 + 6),
    ],
    ids=["no checkpoint", "nothing saved", "names saved"],
)
def test_checkpoint_names_spare_the_gate_and_up_gemms_and_nothing_repeats_the_down_gemm(policy, gemms):
    arguments = make_inputs(2, tokens=64)
    run = layer("one rank", implementation="xla", plan=jaxmoe.Plan(batch_rows=128))
    layered = run if policy == "no checkpoint" else jax.checkpoint(run, policy=policy)
    loss = lambda x, e: jnp.sum(layered(arguments._replace(x=x, experts=e)) ** 2)  # noqa: E731
    program: Any = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(arguments.x, arguments.experts).compile()
    # XLA:CPU makes one dot of each grouped GEMM: three forward, two for the cotangents of each, recomputed ones
    # between.
    assert len(re.findall(r" dot\(", program.as_text())) == gemms


@pytest.mark.parametrize("slots", [1, 2, 7, 64, 1000])
def test_the_borders_between_experts_are_those_of_a_search_in_the_sorted_ids(slots):
    ids = np.sort(np.random.default_rng(slots).integers(0, 9, slots)).astype(np.int32)
    values = np.arange(11, dtype=np.int32)
    np.testing.assert_array_equal(count_below(jnp.asarray(ids), jnp.asarray(values)), np.searchsorted(ids, values))


@pytest.mark.parametrize("num_keys", [3, 2**20])
def test_the_sort_is_stable_whether_or_not_key_and_position_fit_in_one_word(num_keys):
    keys = jnp.asarray(np.random.default_rng(0).integers(0, num_keys, 5000), jnp.int32)
    np.testing.assert_array_equal(stable_argsort(keys, num_keys), np.argsort(keys, kind="stable"))
