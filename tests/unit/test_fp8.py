"""8 bits in the implementations that need no compiled code, and the errors of `precision` and of experts in 8 bits."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import BlockScaled
from jaxmoe.block_scaled import BLOCK_KINDS
from jaxmoe.testing import make_inputs
from tests.fp8_suite import Fp8Suite, in_8_bits
from tests.layer_calls import layer
from tests.quantized_layer import SIZES


class TestXla(Fp8Suite):
    implementation = "xla"
    # One pass, and several.
    plans = (jaxmoe.Plan(batch_rows=200), jaxmoe.Plan(batch_rows=40))


class TestReference(Fp8Suite):
    implementation = "reference"


def test_tokens_cross_to_other_ranks_in_8_bits_with_their_scales():
    arguments = in_8_bits(make_inputs(0, **SIZES, dtype=jnp.bfloat16))
    program: Any = jax.jit(layer("all devices", implementation="xla")).lower(arguments)
    kinds = {kind for _, kind in re.findall(r'all_gather"?\(.*?-> tensor<(\d+)x(\w+)>', program.as_text(), re.S)}
    assert "256xf8E4M3FN" in kinds
    assert "2xf32" in kinds
    assert not any("256xbf16" in kind for kind in kinds)


def test_a_layer_in_8_bits_can_be_exported_and_read_back():
    arguments = in_8_bits(make_inputs(0, **SIZES))
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None))
    again: Any = jax.export.deserialize(jax.export.export(run)(*arguments[:4]).serialize())
    np.testing.assert_array_equal(again.call(*arguments[:4]), run(*arguments[:4]))


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_gradients_beside_decoded_experts_are_those_of_wide_ones_whatever_is_kept(residuals):
    arguments = in_8_bits(make_inputs(1, **SIZES, biases=True))
    decoded = jaxmoe.dequantize(arguments.experts, jnp.float32)
    run = layer("one rank", implementation="xla", residuals=residuals)
    narrow = layer("one rank", implementation="xla", residuals=residuals, precision="w8a16")

    def gradients(run: Any, experts: jaxmoe.Experts) -> Any:
        loss = lambda x, weights: jnp.sum(run(arguments._replace(x=x, topk_weights=weights, experts=experts)) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(arguments.x, arguments.topk_weights)

    for got, want in zip(
        *map(jax.tree.leaves, (gradients(narrow, arguments.experts), gradients(run, decoded))), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.float8_e8m0fnu])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_bytes_of_experts_that_are_stated_are_those_that_they_have(gated, kind, scale_dtype):
    sizes: dict[str, Any] = SIZES | {"intermediate": 300, "gated": gated}
    x, ids, weights, experts, _ = make_inputs(2, **sizes)
    narrow = jax.eval_shape(lambda: jaxmoe.quantize(experts, kind, scale_dtype=scale_dtype))
    shape = jaxmoe.explain(
        x, ids, weights, narrow, axis_name=None, activation="relu" if not gated else "silu"
    ).call.shape
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(narrow))
    assert shape.num_experts * shape.expert_bytes == nbytes


X, IDS, WEIGHTS, WIDE, _ = make_inputs(0, tokens=16, hidden=256, intermediate=384, num_experts=8, top_k=2)
NARROW = jaxmoe.quantize(WIDE)


def changed(experts: jaxmoe.Experts = NARROW, **arrays: Any) -> jaxmoe.Experts:
    return dataclasses.replace(experts, **arrays)


def turned(matrix: Any) -> BlockScaled:
    return BlockScaled(matrix.values.swapaxes(1, 2), matrix.scales.swapaxes(1, 2))


# What is wrong -> (arguments, type, parts of the message: what was given, what is needed or what to do).
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "a precision that nobody knows": (
        {"precision": "fp4"},
        ValueError,
        ["precision='fp4' is not known", "'fp8', 'fp8-e8m0', 'w8a16', 'w4a16', or None"],
    ),
    "decoding of wide experts": (
        {"experts": WIDE, "precision": "w8a16"},
        ValueError,
        ["precision='w8a16' decodes experts in 8 bits", "float32", "jaxmoe.quantize(experts)"],
    ),
    "one wide matrix": (
        {"experts": changed(w_up=WIDE.w_up)},
        TypeError,
        ["experts.w_up is float32", "all matrices of experts must be BlockScaled, or none", "jaxmoe.quantize"],
    ),
    "biases in 8 bits": (
        {"experts": changed(b_gate=NARROW.w_gate)},
        TypeError,
        ["experts.b_gate is BlockScaled", "biases wide"],
    ),
    "biases in another dtype than x": (
        {"experts": changed(b_down=jnp.zeros((8, 256), jnp.bfloat16))},
        TypeError,
        ["experts.b_down is bfloat16, x is float32"],
    ),
    "scales of different blocks": (
        {"experts": changed(w_up=jaxmoe.quantize(WIDE, "channel").w_up)},
        ValueError,
        ["w_gate 128x128 of float32, w_up channel of float32", "the same"],
    ),
    "scales of different types": (
        {"experts": changed(w_up=jaxmoe.quantize(WIDE, scale_dtype=jnp.float8_e8m0fnu).w_up)},
        ValueError,
        ["w_up 128x128 of float8_e8m0fnu", "the same"],
    ),
    "values that lie as [experts, in, out]": (
        {"experts": changed(w_gate=turned(NARROW.w_gate))},
        ValueError,
        ["experts.w_gate has values of shape (8, 256, 384)", "[experts, intermediate, hidden]", "swapaxes(1, 2)"],
    ),
    "values of the way back that lie as [experts, in, out]": (
        {"experts": changed(w_down=turned(NARROW.w_down))},
        ValueError,
        ["experts.w_down has values of shape (8, 384, 256)", "[experts, hidden, intermediate]", "swapaxes(1, 2)"],
    ),
    "values without scales": (
        {"experts": WIDE.astype(jnp.float8_e4m3fn)},
        TypeError,
        ["experts.w_gate is float8_e4m3fn, which needs scales", "jaxmoe.BlockScaled(values, scales)"],
    ),
    "scales that make no blocks": (
        {"experts": changed(w_gate=BlockScaled(NARROW.w_gate.values, jnp.ones((8, 2, 2))))},  # pyright: ignore
        ValueError,
        ["experts.w_gate: BlockScaled: values (8, 384, 256) and scales (8, 2, 2) make no blocks"],
    ),
    "scales of other experts": (
        {"experts": changed(w_up=BlockScaled(NARROW.w_gate.values[:4], jnp.ones((4, 3, 2))))},  # pyright: ignore
        ValueError,
        ["experts.w_up has shape (4, 256, 384); it must be (8, 256, 384)"],
    ),
    "scales that are no array": (
        {"experts": changed(w_up=BlockScaled(NARROW.w_gate.values, 1.0))},  # pyright: ignore
        TypeError,
        ["experts.w_up is a float; it must be an array"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("what", BAD)
def test_bad_experts_in_8_bits_are_errors_that_say_what_to_do(what):
    changes, error, told = BAD[what]
    arguments = {"x": X, "topk_ids": IDS, "topk_weights": WEIGHTS, "experts": NARROW, "axis_name": None} | changes
    for function in (jaxmoe.moe_layer, jaxmoe.explain):
        with pytest.raises(error) as raised:
            function(**arguments)
        assert all(part in str(raised.value) for part in told), str(raised.value)


@pytest.mark.parametrize("experts", [NARROW, WIDE])
def test_tokens_in_float64_are_refused_in_8_bits(experts):
    with jax.enable_x64(True):
        x, weights = X.astype(jnp.float64), WEIGHTS.astype(jnp.float64)
        wide = experts if experts is NARROW else experts.astype(jnp.float64)
        with pytest.raises(TypeError, match="x is float64, and precision='fp8' is for bfloat16, float16 and float32"):
            jaxmoe.moe_layer(x, IDS, weights, wide, axis_name=None, precision="fp8")
