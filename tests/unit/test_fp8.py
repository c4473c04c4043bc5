"""8 bits in the implementations that need no compiled code, and the errors of `precision` and of experts in 8 bits."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import BlockScaled
from jaxmoe.block_scaled import BLOCK_KINDS
from jaxmoe.options import Arguments
from jaxmoe.testing import make_inputs, relative_error
from tests.fp8_suite import Fp8Suite, in_8_bits, with_given_scales
from tests.layer_calls import layer
from tests.quantized_layer import SIZES, assert_as_exact


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


@pytest.mark.slow
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
STATIC = jaxmoe.with_input_scales(NARROW, 5 / 448, 9 / 448)


def changed(experts: jaxmoe.Experts = NARROW, **arrays: Any) -> jaxmoe.Experts:
    return dataclasses.replace(experts, **arrays)


def with_input_scale(scale: Any) -> BlockScaled:
    matrix: Any = NARROW.w_up
    return dataclasses.replace(matrix, input_scale=scale)


def turned(matrix: Any) -> BlockScaled:
    return BlockScaled(matrix.values.swapaxes(1, 2), matrix.scales.swapaxes(1, 2))


# What is wrong -> (arguments, type, parts of the message: what was given, what is needed or what to do). Made when a
# test asks: XLA compiles for some, and every test process reads all of this file.
BAD: dict[str, Callable[[], tuple[dict[str, Any], type[Exception], list[str]]]] = {
    "a precision that nobody knows": lambda: (
        {"precision": "fp4"},
        ValueError,
        ["precision='fp4' is not known", "'fp8', 'fp8-e8m0', 'fp8-static', 'w8a16', 'w4a16', or None"],
    ),
    "sums that nobody knows": lambda: (
        {"accumulation": "slow"},
        ValueError,
        ["accumulation='slow' is not known", "'promoted', 'fast'"],
    ),
    "fast sums of tokens whose scales change": lambda: (
        {"accumulation": "fast"},
        ValueError,
        ["precision='fp8' does not give all tokens one scale", "precision='fp8-static'", "accumulation='promoted'"],
    ),
    "fast sums of experts whose scales change": lambda: (
        {"experts": STATIC, "accumulation": "fast"},
        ValueError,
        ["blocks of 128 x 128", "jaxmoe.quantize(experts, 'channel')", "accumulation='promoted'"],
    ),
    "given scales of wide experts": lambda: (
        {"experts": WIDE, "precision": "fp8-static"},
        ValueError,
        ["experts.w_gate is float32", "jaxmoe.with_input_scales(jaxmoe.quantize(experts), tokens, h)", "'fp8'"],
    ),
    "given scales of experts in 4 bits": lambda: (
        {"experts": jaxmoe.quantize(WIDE, "mxfp4"), "precision": "fp8-static"},
        ValueError,
        ["experts.w_gate is MXFP4, which has none", "Leave precision out"],
    ),
    "given scales of experts that have none": lambda: (
        {"precision": "fp8-static"},
        ValueError,
        [
            "experts.w_gate and experts.w_up and experts.w_down have none",
            "jaxmoe.with_input_scales(experts, tokens, h)",
        ],
    ),
    "given scales of experts of which a matrix has none": lambda: (
        {"experts": changed(STATIC, w_down=NARROW.w_down), "precision": "fp8-static"},
        ValueError,
        ["experts.w_down has none", "precision='fp8'"],
    ),
    "given scales of another type": lambda: (
        {"experts": changed(w_up=with_input_scale(jnp.ones(8, jnp.bfloat16)))},
        TypeError,
        ["experts.w_up: BlockScaled: input_scale is bfloat16[8]; it must be float32[8]", "jaxmoe.with_input_scales"],
    ),
    "one given scale for all experts": lambda: (
        {"experts": changed(w_up=with_input_scale(jnp.ones(())))},
        ValueError,
        ["experts.w_up: BlockScaled: input_scale is float32[]; it must be float32[8]"],
    ),
    "given scales that are no array": lambda: (
        {"experts": changed(w_up=with_input_scale(1.0))},
        TypeError,
        ["experts.w_up is a float; it must be an array"],
    ),
    "decoding of wide experts": lambda: (
        {"experts": WIDE, "precision": "w8a16"},
        ValueError,
        ["precision='w8a16' decodes experts in 8 bits", "float32", "jaxmoe.quantize(experts)"],
    ),
    "one wide matrix": lambda: (
        {"experts": changed(w_up=WIDE.w_up)},
        TypeError,
        ["experts.w_up is float32", "all matrices of experts must be BlockScaled, or none", "jaxmoe.quantize"],
    ),
    "biases in 8 bits": lambda: (
        {"experts": changed(b_gate=NARROW.w_gate)},
        TypeError,
        ["experts.b_gate is BlockScaled", "biases wide"],
    ),
    "biases in another dtype than x": lambda: (
        {"experts": changed(b_down=jnp.zeros((8, 256), jnp.bfloat16))},
        TypeError,
        ["experts.b_down is bfloat16, x is float32"],
    ),
    "scales of different blocks": lambda: (
        {"experts": changed(w_up=jaxmoe.quantize(WIDE, "channel").w_up)},
        ValueError,
        ["w_gate 128x128 of float32, w_up channel of float32", "the same"],
    ),
    "scales of different types": lambda: (
        {"experts": changed(w_up=jaxmoe.quantize(WIDE, scale_dtype=jnp.float8_e8m0fnu).w_up)},
        ValueError,
        ["w_up 128x128 of float8_e8m0fnu", "the same"],
    ),
    "values that lie as [experts, in, out]": lambda: (
        {"experts": changed(w_gate=turned(NARROW.w_gate))},
        ValueError,
        ["experts.w_gate has values of shape (8, 256, 384)", "[experts, intermediate, hidden]", "swapaxes(1, 2)"],
    ),
    "values of the way back that lie as [experts, in, out]": lambda: (
        {"experts": changed(w_down=turned(NARROW.w_down))},
        ValueError,
        ["experts.w_down has values of shape (8, 384, 256)", "[experts, hidden, intermediate]", "swapaxes(1, 2)"],
    ),
    "values without scales": lambda: (
        {"experts": jax.tree.map(lambda array: array.astype(jnp.float8_e4m3fn), WIDE)},
        TypeError,
        ["experts.w_gate is float8_e4m3fn, which needs scales", "jaxmoe.BlockScaled(values, scales)"],
    ),
    "scales that make no blocks": lambda: (
        {"experts": changed(w_gate=BlockScaled(NARROW.w_gate.values, jnp.ones((8, 2, 2))))},  # pyright: ignore
        ValueError,
        ["experts.w_gate: BlockScaled: values (8, 384, 256) and scales (8, 2, 2) make no blocks"],
    ),
    "scales of other experts": lambda: (
        {"experts": changed(w_up=BlockScaled(NARROW.w_gate.values[:4], jnp.ones((4, 3, 2))))},  # pyright: ignore
        ValueError,
        ["experts.w_up has shape (4, 256, 384); it must be (8, 256, 384)"],
    ),
    "scales that are no array": lambda: (
        {"experts": changed(w_up=BlockScaled(NARROW.w_gate.values, 1.0))},  # pyright: ignore
        TypeError,
        ["experts.w_up is a float; it must be an array"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("what", BAD)
def test_bad_experts_in_8_bits_are_errors_that_say_what_to_do(what):
    changes, error, told = BAD[what]()
    arguments = {"x": X, "topk_ids": IDS, "topk_weights": WEIGHTS, "experts": NARROW, "axis_name": None} | changes
    for function in (jaxmoe.moe_layer, jaxmoe.explain):
        with pytest.raises(error) as raised:
            function(**arguments)
        assert all(part in str(raised.value) for part in told), str(raised.value)


def test_explain_says_how_products_become_sums_where_that_is_not_the_default():
    experts = jaxmoe.with_input_scales(jaxmoe.quantize(WIDE, "channel"), 5 / 448, 9 / 448)
    told = [
        str(jaxmoe.explain(X, IDS, WEIGHTS, experts, axis_name=None, accumulation=accumulation))
        for accumulation in ("promoted", "fast")
    ]
    assert ["sums are those of the tensor cores" in text for text in told] == [False, True]


@pytest.mark.parametrize("experts", [NARROW, WIDE])
def test_tokens_in_float64_are_refused_in_8_bits(experts):
    with jax.enable_x64(True):
        x, weights = X.astype(jnp.float64), WEIGHTS.astype(jnp.float64)
        wide = experts if experts is NARROW else experts.astype(jnp.float64)
        with pytest.raises(TypeError, match="x is float64, and precision='fp8' is for bfloat16, float16 and float32"):
            jaxmoe.moe_layer(x, IDS, weights, wide, axis_name=None, precision="fp8")


# --- given scales of tokens and of h ----------------------------------------------------------------------------------


def test_experts_that_bring_scales_of_tokens_and_h_are_multiplied_with_these_by_default():
    def precision_of(experts: jaxmoe.Experts, **options: Any) -> str | None:
        told = jaxmoe.explain(X, IDS, WEIGHTS, experts, axis_name=None, **options)
        assert f"precision={told.call.precision!r}" in str(told)
        return told.call.precision

    assert precision_of(STATIC) == "fp8-static"
    assert precision_of(STATIC, precision="fp8") == "fp8"
    assert precision_of(changed(STATIC, w_down=NARROW.w_down)) == "fp8"
    assert precision_of(NARROW) == "fp8"
    told = jaxmoe.explain(X, IDS, WEIGHTS, STATIC, axis_name=None)
    assert "scales of tokens and h are given, one for all of either: input_scale of the experts" in str(told)


def test_with_input_scales_sets_one_number_for_tokens_and_one_for_h():
    for tokens, h in ((0.5, 0.25), (jnp.float32(0.5), np.full(8, 0.25))):
        made = jaxmoe.with_input_scales(NARROW, tokens, h)
        for name, scale in (("w_gate", 0.5), ("w_up", 0.5), ("w_down", 0.25)):
            matrix: Any = getattr(made, name)
            matrix.check()
            assert matrix.input_scale.dtype == jnp.float32
            np.testing.assert_array_equal(matrix.input_scale, np.full(8, scale))
            assert matrix.values is getattr(NARROW, name).values
    plain = jaxmoe.with_input_scales(jaxmoe.quantize(dataclasses.replace(WIDE, w_up=None)), 1, 1)
    assert plain.w_up is None


def test_a_scale_that_is_too_large_for_a_float_is_infinite_like_one_that_is_too_large_for_float32():
    for scale, wanted in ((10**400, np.inf), (10**39, np.inf), (-(10**400), -np.inf)):
        matrix: Any = jaxmoe.with_input_scales(NARROW, scale, 1).w_gate
        assert (matrix.input_scale == wanted).all()
    with pytest.raises(TypeError, match=r"^with_input_scales: tokens is a list; it must be a number"):
        jaxmoe.with_input_scales(NARROW, [10**400] * 8, 1)


def test_with_input_scales_refuses_what_is_not_in_8_bits_no_numbers_and_other_shapes():
    with pytest.raises(TypeError, match=r"experts.w_gate is float32; it must be BlockScaled.*jaxmoe.quantize"):
        jaxmoe.with_input_scales(WIDE, 1, 1)
    with pytest.raises(TypeError, match=r"experts\.w_gate is MXFP4; it must be BlockScaled"):
        jaxmoe.with_input_scales(jaxmoe.quantize(WIDE, "mxfp4"), 1, 1)
    for scale, kind in (
        (None, "a NoneType"),
        ("1", "a str"),
        (1j, "complex64"),
        (True, "bool"),
        (jnp.ones(8, bool), "bool"),
    ):
        with pytest.raises(TypeError, match=rf"^with_input_scales: tokens is {kind}; it must be a "):
            jaxmoe.with_input_scales(NARROW, scale, 1)
    with pytest.raises(ValueError, match=r"h has shape \(3,\); it must be a number, or have one for each of the 8"):
        jaxmoe.with_input_scales(NARROW, 1, jnp.ones(3))


def test_a_rank_takes_the_largest_scale_of_its_experts_of_gate_and_up_together():
    given: Any = STATIC
    for name, scale in (("w_gate", 6 / 448), ("w_up", 7 / 448), ("w_down", 11 / 448)):
        matrix = getattr(given, name)
        given = changed(given, **{name: dataclasses.replace(matrix, input_scale=matrix.input_scale.at[5].set(scale))})
    wanted = jaxmoe.with_input_scales(NARROW, 7 / 448, 11 / 448)
    for implementation in ("xla", "reference"):
        call = layer("one rank", implementation=implementation)
        run = jax.jit(lambda experts, call=call: call(Arguments(X, IDS, WEIGHTS, experts)))
        np.testing.assert_array_equal(run(given), run(wanted))
        assert (np.asarray(run(given)) != np.asarray(run(STATIC))).any()


def test_experts_with_given_scales_are_a_pytree_that_prints_them():
    assert len(jax.tree.leaves(STATIC)) == len(jax.tree.leaves(NARROW)) + 3
    assert "w_up=float8_e4m3fn[8, 384, 256] with scales float32[8, 3, 2] and input_scale float32[8]," in repr(STATIC)
    assert "input_scale" not in repr(NARROW)
    assert STATIC.w_down.nbytes == NARROW.w_down.nbytes + 8 * 4
    assert jax.tree.map(jnp.shape, jax.eval_shape(lambda: STATIC)) == jax.tree.map(jnp.shape, STATIC)
    jax.tree.map(np.testing.assert_array_equal, jaxmoe.dequantize(STATIC), jaxmoe.dequantize(NARROW))
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None))
    y = jax.eval_shape(run, X, IDS, WEIGHTS, STATIC)
    assert (y.shape, y.dtype) == (X.shape, X.dtype)
    again: Any = jax.export.deserialize(jax.export.export(run)(X, IDS, WEIGHTS, STATIC).serialize())
    np.testing.assert_array_equal(again.call(X, IDS, WEIGHTS, STATIC), run(X, IDS, WEIGHTS, STATIC))


@pytest.mark.slow
def test_scan_over_layers_takes_the_given_scales_of_each():
    layers = [jaxmoe.with_input_scales(NARROW, scale / 448, 9 / 448) for scale in (2, 5)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    run = lambda x, experts: (x + jaxmoe.moe_layer(x, IDS, WEIGHTS, experts, axis_name=None), None)  # noqa: E731
    y = jax.jit(lambda x: jax.lax.scan(run, x, stacked)[0])(X)
    x = X
    for experts in layers:
        x = jax.jit(run)(x, experts)[0]
    np.testing.assert_allclose(y, x, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [{"hidden_axis": "inner"}, {"intermediate_axis": "inner"}])
def test_experts_with_given_scales_may_be_split_inside(axes, kind):
    """Over the data axis, where they are gathered, and over one of their own, whose ranks have parts of them."""
    sizes: dict[str, Any] = SIZES | {"intermediate": 512}
    arguments = with_given_scales(in_8_bits(make_inputs(5, **sizes)))
    one = jax.jit(layer("one rank", implementation="xla"))(arguments)
    for data_axes in ("inner", ()):
        if data_axes == () and "hidden_axis" in axes:
            continue
        mesh = jax.make_mesh((2, 4), ("inner", "expert"), axis_types=(kind,) * 2)
        experts = dataclasses.replace(
            arguments.experts,
            **{
                name: jax.device_put(getattr(arguments.experts, name), NamedSharding(mesh, P("expert")))
                for name in ("w_gate", "w_up", "w_down")
            },
        )
        y = jaxmoe.moe_layer(*arguments[:3], experts, mesh=mesh, data_axes=data_axes, implementation="xla", **axes)
        assert relative_error(y, one) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_with_input_scales_leaves_experts_on_their_devices(kind):
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(kind,))
    set_scales = lambda experts: jaxmoe.with_input_scales(experts, 0.5, 0.25)  # noqa: E731
    with jax.set_mesh(mesh):
        experts = jax.device_put(NARROW, NamedSharding(mesh, P("expert")))
        made: Any = [set_scales(experts), jax.jit(set_scales)(experts)]
        for each in made[: 1 if kind == AxisType.Auto else 2]:  # under jit the compiler has Auto axes
            assert each.w_down.input_scale.sharding.spec == P("expert")
        for each in made:
            assert np.isfinite(np.asarray(jax.jit(jaxmoe.moe_layer)(X, IDS, WEIGHTS, each))).all()


@pytest.mark.slow
def test_over_several_hosts_tokens_and_h_are_rounded_with_the_scales_that_experts_bring():
    arguments = with_given_scales(in_8_bits(make_inputs(6, **SIZES, biases=True, routing="zipf")))
    y = jax.jit(layer("hosts 2 x 4", implementation="xla"))(arguments)
    assert_as_exact(y, arguments, "fp8-static")
