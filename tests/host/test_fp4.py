"""4 bits on the host executor, through `moe_layer`: the suite of all implementations that take them.

Weights are decoded by the tasks that multiply them, and with one plan ahead of these.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import sharding
from jaxmoe.implementations.megakernel import plan_defaults
from jaxmoe.testing import make_inputs
from tests.fp4_suite import Fp4Suite, in_4_bits
from tests.layer_calls import schedule_in
from tests.quantized_layer import SIZES


class TestMegakernel(Fp4Suite):
    implementation = "megakernel"
    dtypes = (jnp.bfloat16, jnp.float16)
    plans = (
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=6, weight_slots=3),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=3, ring_tiles=5, chunk_rows=3, keep_tokens=True),
    )
    plans_ahead = (
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1, weight_slots=1),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=6, keep_tokens=True, weight_slots=3),
    )


def test_on_gpus_the_megakernel_rounds_no_float16_beside_4_bits_and_says_so(monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda *_: "gpu")
    arguments = in_4_bits(make_inputs(0, **SIZES, dtype=jnp.float16))
    options: dict[str, Any] = {"axis_name": None, "precision": "fp8"}
    assert jaxmoe.explain(*arguments[:4], **options).implementation == "xla"
    told = r"x is float16.*precision='fp8', which rounds tokens.*takes bfloat16.*'w4a16'.*implementation='xla'"
    with pytest.raises(NotImplementedError, match=told):
        jaxmoe.explain(*arguments[:4], **options, implementation="megakernel")


def test_beside_rounded_tokens_the_megakernel_decodes_4_bits_where_they_are_multiplied():
    arguments = in_4_bits(make_inputs(0, **SIZES))
    options: dict[str, Any] = {"axis_name": None, "precision": "fp8", "implementation": "megakernel"}
    told = str(jaxmoe.explain(*arguments[:4], **options))
    assert "weight_slots=0: beside rows in 8 bits weights are decoded in the registers that multiply" in told
    plan = jaxmoe.KernelPlan(unit_tiles=1, lag_units=1, ring_tiles=8, weight_slots=3)
    with pytest.raises(ValueError, match=r"weight_slots=3: beside tokens in 8 bits.*Leave weight_slots at 0"):
        jaxmoe.explain(*arguments[:4], **options, plan=plan)
    narrow = in_4_bits(make_inputs(0, **{**SIZES, "intermediate": 192}))
    with pytest.raises(ValueError, match=r"intermediate=192.*multiples of 128 in 4 bits.*share a scale"):
        jaxmoe.explain(*narrow[:4], **options)


@pytest.mark.parametrize(("room", "lag_units", "slots"), [(8, 3, 6), (5, 2, 5), (1, 1, 4)])
def test_explain_counts_the_decoded_weights_of_a_forward_pass_that_is_kept(monkeypatch, room, lag_units, slots):
    arguments = in_4_bits(make_inputs(0, **{**SIZES, "num_experts": 8}))
    plan = jaxmoe.KernelPlan(unit_tiles=1, lag_units=3, ring_tiles=5, chunk_rows=room)
    options: dict[str, Any] = {"axis_name": None, "implementation": "megakernel", "precision": "w4a16", "plan": plan}
    recompute = jaxmoe.explain(*arguments[:4], **options, residuals="recompute")
    assert "arena: decoded_weights" not in recompute.memory_bytes
    # As many as the room that all slots may take is for, and those that a lag of one unit needs at least.
    decoded = recompute.call.shape.wide.expert_bytes
    monkeypatch.setattr(plan_defaults, "DECODED_BYTES", room * decoded)
    told = jaxmoe.explain(*arguments[:4], **options, residuals="save")

    def loss(x: jax.Array) -> jax.Array:
        y = jaxmoe.moe_layer(x, *arguments[1:4], **options, residuals="save")
        return jnp.sum(y.astype(jnp.float32))

    carried = schedule_in(jax.jit(jax.grad(loss)).lower(arguments.x).as_text(), "jaxmoe_forward")
    assert (carried.lag_units, carried.weight_slots) == (lag_units, slots)
    assert told.memory_bytes.get("arena: decoded_weights") == slots * decoded
    assert sum(told.memory_bytes.values()) < told.worst_case_bytes
    text = str(told)
    assert ("forward pass that is kept: lag_units=" in text) == (lag_units < plan.lag_units)
    assert f"forward pass that is kept: weight_slots={slots}: " in text
