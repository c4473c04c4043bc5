"""4 bits in the implementations that need no compiled code, and the errors of `precision` and of experts in 4 bits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import MXFP4, NVFP4
from jaxmoe.testing import make_inputs
from tests.fp4_suite import KINDS, Fp4Suite, in_4_bits, jitted_quantize
from tests.layer_calls import layer
from tests.quantized_layer import SIZES


class TestXla(Fp4Suite):
    implementation = "xla"
    dtypes = (jnp.bfloat16, jnp.float16)
    # One pass, and several.
    plans = (jaxmoe.Plan(batch_rows=200), jaxmoe.Plan(batch_rows=40))


class TestReference(Fp4Suite):
    implementation = "reference"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_never_decoded_all_at_once(kind):
    arguments = in_4_bits(make_inputs(0, **SIZES, biases=True), kind)
    wholes = ("[8,256,128]", "[8,128,256]", "[8,128,8,32]", "[8,128,16,16]", "[8,128,128,2]")
    decoding: Any = jax.jit(jaxmoe.dequantize).lower(arguments.experts).compile()
    assert any(whole in decoding.as_text() for whole in wholes)
    run = layer("one rank", implementation="xla")
    loss = lambda x, arguments: jnp.sum(run(arguments._replace(x=x)) ** 2)  # noqa: E731
    for function in (run, lambda arguments: jax.grad(loss)(arguments.x, arguments)):
        program: Any = jax.jit(function).lower(arguments).compile()
        text = program.as_text()
        assert "u8[8,128,128]" in text  # as the experts came
        assert not [whole for whole in wholes if whole in text]


def test_a_layer_in_4_bits_can_be_exported_and_read_back():
    arguments = in_4_bits(make_inputs(0, **SIZES))
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None))
    again: Any = jax.export.deserialize(jax.export.export(run)(*arguments[:4]).serialize())
    np.testing.assert_array_equal(again.call(*arguments[:4]), run(*arguments[:4]))


X, IDS, WEIGHTS, WIDE, _ = make_inputs(0, tokens=16, hidden=64, intermediate=96, num_experts=8, top_k=2)
MX, NV = jitted_quantize("mxfp4")(WIDE), jitted_quantize("nvfp4")(WIDE)
GATE: Any = MX.w_gate
DOWN: Any = MX.w_down
NV_UP: Any = NV.w_up


def changed(experts: jaxmoe.Experts, **arrays: Any) -> jaxmoe.Experts:
    return dataclasses.replace(experts, **arrays)


# What is wrong -> (arguments, type, parts of the message: what was given, what is needed or what to do). Made when a
# test asks: XLA compiles for some, and every test process reads all of this file.
BAD: dict[str, Callable[[], tuple[dict[str, Any], type[Exception], list[str]]]] = {
    "a precision that nobody knows": lambda: (
        {"precision": "w4a8"},
        ValueError,
        ["precision='w4a8' is not known", "'w8a16', 'w4a16', or None", "'w4a16' with MXFP4 and NVFP4"],
    ),
    "8 bits beside NVFP4": lambda: (
        {"experts": NV, "precision": "fp8"},
        ValueError,
        ["precision='fp8'", "experts.w_gate is NVFP4", "does not fit in E4M3", "1.7 % RMS", "precision='w4a16'"],
    ),
    "8 bits with powers of two beside NVFP4": lambda: (
        {"experts": NV, "precision": "fp8-e8m0"},
        ValueError,
        ["precision='fp8-e8m0'", "experts.w_gate is NVFP4"],
    ),
    "decoding from 8 bits": lambda: (
        {"precision": "w8a16"},
        ValueError,
        ["precision='w8a16' decodes experts in 8 bits", "experts.w_gate is MXFP4", "Leave precision out"],
    ),
    "decoding of 8 bits from 4": lambda: (
        {"experts": jaxmoe.quantize(WIDE), "precision": "w4a16"},
        ValueError,
        ["precision='w4a16' decodes experts in 4 bits", "experts.w_gate is BlockScaled", "Leave precision out"],
    ),
    "decoding of wide experts": lambda: (
        {"experts": WIDE, "precision": "w4a16"},
        ValueError,
        ["experts.w_gate is float32", "jaxmoe.quantize(experts, 'mxfp4')"],
    ),
    "one wide matrix": lambda: (
        {"experts": changed(MX, w_up=WIDE.w_up)},
        TypeError,
        ["experts.w_up is float32", "all matrices of experts must be MXFP4, or none", "jaxmoe.quantize"],
    ),
    "two formats": lambda: (
        {"experts": changed(MX, w_down=NV.w_down)},
        TypeError,
        ["experts.w_down is NVFP4", "all matrices of experts must be MXFP4, or none"],
    ),
    "8 and 4 bits": lambda: (
        {"experts": changed(MX, w_gate=jaxmoe.quantize(WIDE).w_gate)},
        TypeError,
        ["experts.w_up is MXFP4", "all matrices of experts must be BlockScaled, or none"],
    ),
    "biases in 4 bits": lambda: (
        {"experts": changed(MX, b_gate=MX.w_gate)},
        TypeError,
        ["experts.b_gate is MXFP4", "biases wide"],
    ),
    "bytes of powers of two that nobody has named so": lambda: (
        {"experts": changed(MX, w_up=MXFP4(GATE.values, GATE.scales.view(jnp.uint8)))},
        TypeError,
        ["experts.w_up: MXFP4: scales are uint8", "scales.view(jnp.float8_e8m0fnu)"],
    ),
    "one scale for all experts": lambda: (
        {"experts": changed(NV, w_up=NVFP4(NV_UP.values, NV_UP.scales, jnp.ones(1)))},
        ValueError,
        ["experts.w_up: NVFP4: global_scales have shape (1,); they must be [experts], (8,)"],
    ),
    "matrices of the other way": lambda: (
        {"experts": changed(MX, w_gate=DOWN)},
        ValueError,
        ["experts.w_gate has values of shape (8, 64, 48), uint8, which must be [experts, intermediate, hidden / 2]"],
    ),
    "elements that lie as [experts, in, out]": lambda: (
        {"experts": changed(MX, w_down=MXFP4(GATE.elements, GATE.scales))},
        ValueError,
        ["experts.w_down has values of shape (8, 96, 64), float4", "[experts, hidden, intermediate]", "swapaxes(1, 2)"],
    ),
    "fewer experts": lambda: (
        {"experts": changed(MX, w_up=jax.tree.map(lambda leaf: leaf[:4], GATE))},
        ValueError,
        ["experts.w_up has shape (4, 64, 96); it must be (8, 64, 96)"],
    ),
    "bytes without scales": lambda: (
        {"experts": jaxmoe.Experts(GATE.packed, None, DOWN.packed), "activation": "relu"},
        ValueError,
        ["experts.w_gate has shape (8, 96, 32)"],
    ),
    "elements without scales": lambda: (
        {"experts": jax.tree.map(lambda array: array.astype(jnp.float4_e2m1fn), WIDE)},
        TypeError,
        ["experts.w_gate is float4_e2m1fn, which needs scales", "jaxmoe.MXFP4(values, scales) or jaxmoe.NVFP4("],
    ),
    "scales that are no array": lambda: (
        {"experts": changed(MX, w_up=MXFP4(GATE.values, 1.0))},  # pyright: ignore[reportArgumentType]
        TypeError,
        ["experts.w_up is a float; it must be an array"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("what", BAD)
def test_bad_experts_in_4_bits_are_errors_that_say_what_to_do(what):
    changes, error, told = BAD[what]()
    arguments = {"x": X, "topk_ids": IDS, "topk_weights": WEIGHTS, "experts": MX, "axis_name": None} | changes
    for function in (jaxmoe.moe_layer, jaxmoe.explain):
        with pytest.raises(error) as raised:
            function(**arguments)
        assert all(part in str(raised.value) for part in told), str(raised.value)


@pytest.mark.parametrize("experts", [MX, NV])
def test_tokens_in_float64_are_refused_in_4_bits(experts):
    with jax.enable_x64(True):
        x, weights = X.astype(jnp.float64), WEIGHTS.astype(jnp.float64)
        with pytest.raises(TypeError, match="x is float64, and precision='w4a16' is for bfloat16, float16 and float32"):
            jaxmoe.moe_layer(x, IDS, weights, experts, axis_name=None)
