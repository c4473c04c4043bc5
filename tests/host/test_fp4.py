"""4 bits on the host executor, through `moe_layer`: the suite of all implementations that take them.

Weights are decoded by the tasks that multiply them, and with one plan ahead of these.
"""

from typing import Any

import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import sharding
from jaxmoe.testing import make_inputs
from tests.fp4_suite import Fp4Suite, in_4_bits
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
