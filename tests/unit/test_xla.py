"""The portable implementation: the suite of all implementations, and its own promises about memory and collectives."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.local_rows import stable_argsort
from jaxmoe.testing import dense, make_inputs, relative_error
from jaxmoe.xla_impl import CHECKPOINT_NAMES
from tests.layer_suite import LayerSuite, layer, mesh_of


class TestXla(LayerSuite):
    implementation = "xla"
    # A data group of 32 tokens with 3 slots has 96 slots: one pass that just fits, one with room, and three passes of
    # 40.
    plans = (jaxmoe.Plan(chunk_rows=96), jaxmoe.Plan(chunk_rows=1000), jaxmoe.Plan(chunk_rows=40))


SIZES: dict[str, Any] = {"tokens": 4096, "hidden": 64, "intermediate": 96, "num_experts": 8, "top_k": 2}


def compiled(plan: jaxmoe.Plan | None = None, gradients: bool = False) -> Any:
    arguments = make_inputs(0, **SIZES)
    run = layer("all devices", implementation="xla", plan=plan)
    if gradients:
        function = jax.grad(lambda e, a: jnp.sum(run(a._replace(experts=e)) ** 2))
        return jax.jit(function).lower(arguments.experts, arguments._replace(experts=None)).compile()
    return jax.jit(run).lower(arguments).compile()


@pytest.mark.parametrize("routing", ["one-hot", "zipf"])
def test_one_rank_that_receives_every_row_processes_them_in_the_memory_of_a_balanced_one(routing):
    arguments = make_inputs(1, **SIZES, routing=routing)
    program = compiled()
    slots, balanced = 4096 * 2, 4096 * 2 // 8
    plan = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert")).call.plan
    assert plan.chunk_rows < 2 * balanced < slots
    # The program is one and the same for every routing, so its memory is too; the result shows that nothing was
    # dropped.
    assert relative_error(program(arguments), dense(arguments)) < 5e-6


def test_temporary_memory_is_what_explain_states():
    arguments = make_inputs(1, **SIZES)
    stated = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert"))
    measured = compiled().memory_analysis().temp_size_in_bytes / 8  # of the 8 devices of this process
    total = sum(stated.memory_bytes.values())
    # XLA:CPU multiplies every row with every local expert and keeps the masked copies: one local expert here, so no
    # more.
    assert measured < 1.5 * total
    assert total < stated.worst_case_bytes / 1.5


def test_only_dense_collectives_are_used_and_none_in_the_loop_over_passes():
    text = compiled(jaxmoe.Plan(chunk_rows=128), gradients=True).as_text()
    found = set(re.findall(r"= \S+ (all-\w+|ragged-all-to-all|reduce-scatter|collective-permute)\(", text))
    assert found <= {"all-gather", "all-to-all", "all-reduce"}
    for body in re.findall(r"body=%?([\w.\-]+)", text):
        definition = re.search(rf"^%?{re.escape(body)} .*?^}}", text, re.M | re.S)
        assert definition
        assert not re.search(r" all-\w+\(", definition.group())


def test_no_floating_point_scatter_makes_the_order_of_sums_depend_on_timing():
    text = compiled(jaxmoe.Plan(chunk_rows=128), gradients=True).as_text()
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
    run = layer("one rank", implementation="xla", plan=jaxmoe.Plan(chunk_rows=128))
    layered = run if policy == "no checkpoint" else jax.checkpoint(run, policy=policy)
    loss = lambda x, e: jnp.sum(layered(arguments._replace(x=x, experts=e)) ** 2)  # noqa: E731
    program: Any = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(arguments.x, arguments.experts).compile()
    # XLA:CPU makes one dot of each grouped GEMM: three forward, two for the cotangents of each, recomputed ones
    # between.
    assert len(re.findall(r" dot\(", program.as_text())) == gemms


@pytest.mark.parametrize("num_keys", [3, 2**20])
def test_the_sort_is_stable_whether_or_not_key_and_position_fit_in_one_word(num_keys):
    keys = jnp.asarray(np.random.default_rng(0).integers(0, num_keys, 5000), jnp.int32)
    np.testing.assert_array_equal(stable_argsort(keys, num_keys), np.argsort(keys, kind="stable"))
