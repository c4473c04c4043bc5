"""Experts in 8 bits: what `quantize` makes of wide ones, and what `BlockScaled` says of itself."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import BlockScaled, dequantize, quantize
from jaxmoe.block_scaled import BLOCK_KINDS
from jaxmoe.formats import Format
from jaxmoe.quantization import dequantize_rows, quantize_rows
from tests.layer_calls import mesh_of
from tests.other_arrays import tensor

BLOCKS = BLOCK_KINDS
SCALES = (jnp.float32, jnp.float8_e8m0fnu)
LARGEST = 448.0  # of float8_e4m3fn


def experts_of(seed: int, num_experts: int, hidden: int, intermediate: int, **options: Any) -> jaxmoe.Experts:
    return jaxmoe.Experts.init(jax.random.key(seed), num_experts, hidden, intermediate, **options)


@functools.cache
def jitted(block: str, scale_dtype: Any) -> Any:
    return jax.jit(functools.partial(quantize, block=block, scale_dtype=scale_dtype))


def blocks_of(matrix: np.ndarray, block: str) -> list[tuple[slice, slice]]:
    """The blocks of a matrix `[out, in]`."""
    out, inner = matrix.shape
    rows, columns = {"128x128": (128, 128), "channel": (1, inner), "expert": (out, inner)}[block]
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, out, rows)
        for column in range(0, inner, columns)
    ]


def scaled_in(experts: jaxmoe.Experts, name: str = "w_gate") -> BlockScaled:
    found = getattr(experts, name)
    assert isinstance(found, BlockScaled)
    return found


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 136), (130, 7)])
def test_every_block_has_the_scale_of_its_largest_weight_and_values_to_the_nearest(
    hidden, intermediate, block, scale_dtype
):
    experts = experts_of(1, 2, hidden, intermediate)
    found = jitted(block, scale_dtype)(experts)
    for name in ("w_gate", "w_up", "w_down"):
        scaled = scaled_in(found, name)
        assert scaled.shape == getattr(experts, name).shape
        for wide, values, scales in zip(getattr(experts, name), scaled.values, scaled.scales, strict=True):
            matrix, numbers = np.asarray(wide, np.float64).T, np.asarray(scales, np.float64)
            places = blocks_of(matrix, block)
            wanted = np.array([np.abs(matrix[where]).max() / LARGEST for where in places]).reshape(numbers.shape)
            if scale_dtype != jnp.float32:
                wanted = 2.0 ** np.ceil(np.log2(wanted))
            np.testing.assert_allclose(numbers, wanted, rtol=1e-6)
            nearest = np.empty_like(matrix)
            for scale, where in zip(numbers.reshape(-1), places, strict=True):
                nearest[where] = (matrix[where] / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            error = np.abs(np.asarray(values, np.float64) - nearest)
            # Division in float32 may fall on the other side of the middle between two values.
            assert (error <= 2**-3 * np.abs(nearest)).all()
            assert (error > 0).mean() < 1e-3


@given(st.integers(-90, 90), st.sampled_from(BLOCKS), st.sampled_from(SCALES))
def test_what_8_bits_can_hold_comes_back_as_it_was(exponent, block, scale_dtype):
    codes = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.concatenate([codes[:-1], -codes[:-1], [LARGEST, 0]])  # the last code is NaN
    matrix = np.resize(codes, (1, 256, 256)) * np.float32(2.0**exponent)
    experts = jaxmoe.Experts(jnp.asarray(matrix), None, jnp.asarray(matrix))
    again = dequantize(jitted(block, scale_dtype)(experts), jnp.float32)
    # XLA divides by a constant with its reciprocal, so that a float32 scale may be off by its last bit.
    tolerance = 0 if scale_dtype == jnp.float8_e8m0fnu else 2.0**-22
    np.testing.assert_allclose(again.w_gate, matrix, rtol=tolerance, atol=0)


@pytest.mark.parametrize("call", ["given", "of constants"])
@pytest.mark.parametrize("block", BLOCKS)
def test_every_value_times_every_power_of_two_is_exact_where_float32_has_it(block, call):
    values = np.broadcast_to(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn), (256, 128, 256))
    values = np.ascontiguousarray(values[..., :128] if block == "128x128" else values)
    blocks = {"128x128": (1, 1), "channel": (128, 1), "expert": (1, 1)}[block]
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, *blocks)).view(jnp.float8_e8m0fnu)
    scaled = jaxmoe.BlockScaled(jnp.asarray(values), jnp.asarray(scales))
    wide = jax.jit(lambda: scaled.wide(jnp.float32))() if call == "of constants" else scaled.wide(jnp.float32)
    found = np.asarray(wide, np.float64).swapaxes(1, 2)
    assert np.isnan(found[255]).all()
    wanted = values[:255].astype(np.float64) * np.exp2(np.arange(255) - 127.0)[:, None, None]
    held = (np.abs(wanted) >= 2.0**-126) & (np.abs(wanted) < 2.0**128) | (wanted == 0) | np.isnan(wanted)
    assert held[0].mean() > 0.4  # 2^-127 is no normal number, and of most values the product is
    np.testing.assert_array_equal(found[:255][held], wanted[held])
    assert np.isinf(found[:255][wanted >= 2.0**128]).all()
    assert (np.abs(found[:255][np.abs(wanted) < 2.0**-126]) <= 2.0**-126).all()


@pytest.mark.parametrize("scale_dtype", SCALES)
def test_blocks_of_zeros_tiny_weights_and_weights_that_are_no_numbers_are_defined(scale_dtype):
    matrix = np.ones((1, 512, 128), np.float32)
    matrix[:, 128:256] = 0
    matrix[:, 256:384] *= 1e-38
    matrix[0, 400, 5], matrix[0, 3, 3] = np.inf, np.nan
    scaled = scaled_in(
        quantize(jaxmoe.Experts(jnp.asarray(matrix), None, jnp.asarray(matrix)), scale_dtype=scale_dtype)
    )
    found = np.asarray(scaled.wide(jnp.float32))[0]
    assert np.isnan(found[:128]).all()
    assert (found[128:256] == 0).all()
    assert (np.abs(found[256:384]) <= 2.0**-100).all()
    assert np.isnan(found[384:]).all()
    assert np.isfinite(np.asarray(scaled.scales, np.float32)[0, 0, 1:3]).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_experts_that_are_split_stay_where_they_are(kind):
    mesh = mesh_of("expert", kind=kind)
    split = NamedSharding(mesh, P("expert"))
    experts = jax.device_put(experts_of(2, 8, 256, 384), split)
    with jax.set_mesh(mesh):
        program = jax.jit(quantize).lower(experts).compile()
        found = program(experts)
    text = program.as_text() or ""
    assert "8,384,256" not in text
    assert not [line for line in text.splitlines() if "all-gather" in line or "all-reduce" in line]
    with jax.set_mesh(mesh):
        wide = jax.jit(dequantize)(found)
    for leaf in jax.tree.leaves((found, wide)):
        assert leaf.sharding.is_equivalent_to(split, 3)
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}
    alone = quantize(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), experts))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, alone)


@pytest.mark.parametrize("compiled", [False, True], ids=["without jit", "jit"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P(None, "data"), P("expert", None, "data")], ids=["inputs", "outputs"])
@pytest.mark.parametrize("block", ["128x128", "mxfp4", "nvfp4"])
def test_values_of_experts_whose_blocks_an_axis_cuts_stay_split_as_weights_were(block, spec, kind, compiled):
    wide = experts_of(5, 2, 288, 96)  # over two ranks 144 and 48: no whole groups of 32, nor blocks of 128
    alone = quantize(wide, block)
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2)
    split = jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, spec)), wide)
    call: Any = lambda experts: quantize(experts, block)  # noqa: E731
    back: Any = lambda experts: dequantize(experts, jnp.float32)  # noqa: E731
    with jax.set_mesh(mesh):
        found = (jax.jit(call) if compiled else call)(split)
        wide_again = (jax.jit(back) if compiled else back)(found)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))  # noqa: E731
    jax.tree.map(same, found, alone)
    jax.tree.map(same, wide_again, back(alone))
    if kind == AxisType.Auto and compiled:
        return  # JAX does not say there how arrays lie, and the compiler decides
    experts, inputs, outputs = (*spec, None)[:3]
    for matrix in (found.w_gate, found.w_up, found.w_down):
        assert matrix.values.sharding.is_equivalent_to(NamedSharding(mesh, P(experts, outputs, inputs)), 3)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("spec", [P("expert", "data"), P("expert", None, "data")], ids=["rows", "columns"])
def test_experts_that_are_split_inside_too_are_dequantized_where_they_are(spec, block):
    scaled = quantize(experts_of(2, 4, 256, 512), block)
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)

    def split(array: jax.Array) -> jax.Array:
        whole = [name if length > 1 else None for name, length in zip((*spec, None, None), array.shape, strict=False)]
        return jax.device_put(array, NamedSharding(mesh, P(*whole)))

    with jax.set_mesh(mesh):
        wide = jax.tree.map(split, scaled)
        found = dequantize(wide, jnp.float32), jax.jit(dequantize, static_argnums=1)(wide, jnp.float32)
    for each in found:
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), each, dequantize(scaled, jnp.float32)
        )
        assert each.w_gate.sharding.spec[0] == "expert"
        assert "data" in each.w_gate.sharding.spec


def test_stacked_layers_are_dequantized_under_vmap_and_refused_without():
    one, other = (quantize(experts_of(seed, 2, 128, 256)) for seed in (3, 4))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)
    with pytest.raises(
        ValueError, match=r"^dequantize: experts\.w_gate has shape \(2, 2, 128, 256\); it must be \[experts"
    ):
        dequantize(stacked)
    for nth, layer in enumerate((one, other)):
        jax.tree.map(
            lambda got, want, nth=nth: np.testing.assert_array_equal(got[nth], want),
            jax.vmap(dequantize)(stacked),
            dequantize(layer),
        )


def test_what_is_quantised_is_a_pytree_with_the_sizes_of_wide_experts_and_its_biases():
    experts = experts_of(3, 4, 128, 256, biases=True)
    found = jax.jit(quantize)(experts)
    assert (found.num_experts, found.hidden, found.intermediate) == (4, 128, 256)
    np.testing.assert_array_equal(found.b_gate, experts.b_gate)
    shapes = jax.eval_shape(quantize, experts)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), found
    )
    assert len(jax.tree.leaves(found)) == 9  # values and scales of three matrices, three biases
    assert quantize(experts_of(3, 4, 128, 256, gated=False)).w_up is None


@pytest.mark.parametrize("block", BLOCKS)
def test_its_format_counts_its_bytes(block):
    scaled = scaled_in(jitted(block, jnp.float32)(experts_of(4, 3, 300, 200)))
    _, inner, out = scaled.shape
    assert isinstance(scaled.format, Format)
    assert scaled.nbytes == 3 * scaled.format.bytes(out, inner)
    assert scaled.nbytes == scaled.values.nbytes + scaled.scales.nbytes


VALUES = jnp.zeros((2, 256, 384), jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("values", "scales", "error", "told"),
    [
        (VALUES, jnp.ones((2, 3, 2)), ValueError, r"values \(2, 256, 384\) and scales \(2, 3, 2\) make no blocks"),
        (VALUES, jnp.ones((2, 3, 2)), ValueError, r"have to be transposed: values.swapaxes\(1, 2\)"),
        (VALUES, jnp.ones((1, 2, 3)), ValueError, "make no blocks"),
        (VALUES, jnp.ones((2, 2)), ValueError, "make no blocks"),
        (VALUES.astype(jnp.int8), jnp.ones((2, 2, 3)), TypeError, "values are int8"),
        (VALUES, jnp.ones((2, 2, 3), jnp.bfloat16), TypeError, "scales bfloat16; they must be float8_e4m3fn"),
    ],
)
def test_what_makes_no_blocks_is_an_error_that_says_what_does(values, scales, error, told):
    with pytest.raises(error, match=told):
        BlockScaled(values, scales).wide(jnp.float32)


def test_errors_of_quantising_name_the_argument_and_what_to_do():
    experts = experts_of(5, 2, 128, 128)
    with pytest.raises(ValueError, match="block='row' must be one of '128x128', 'channel', 'expert'"):
        quantize(experts, "row")
    with pytest.raises(TypeError, match=r"scale_dtype=.*float16.* must be float32 or float8_e8m0fnu"):
        quantize(experts, scale_dtype=jnp.float16)
    with pytest.raises(TypeError, match=r"scale_dtype=e8m0 must be float32 or float8_e8m0fnu"):
        quantize(experts, scale_dtype="e8m0")
    with pytest.raises(TypeError, match=r"experts.w_gate is BlockScaled already"):
        quantize(quantize(experts))
    with pytest.raises(TypeError, match=r"w_gate is BlockScaled. Pass jaxmoe.dequantize\(experts, dtype\)"):
        quantize(experts).astype(jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.bool_, jnp.float8_e4m3fn])
def test_wide_experts_are_in_a_wide_dtype_before_and_after_they_are_quantised(dtype):
    experts = experts_of(5, 2, 128, 128)
    told = f"{jnp.dtype(dtype)}; it must be one of bfloat16, float16, float32, float64"
    for kind in ("128x128", "nvfp4"):
        with pytest.raises(TypeError, match=f"quantize: experts.w_gate is {told}"):
            quantize(jax.tree.map(lambda array: array.astype(dtype), experts), kind)
    for some in (experts, quantize(experts)):
        with pytest.raises(TypeError, match=f"dequantize: dtype is {told}"):
            dequantize(some, dtype)


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "mxfp4", "nvfp4"])
def test_experts_in_float64_are_quantised_as_float32(kind):
    experts = experts_of(5, 2, 128, 128)
    with jax.enable_x64(True):
        wide = experts.astype(jnp.float64)
        finer = jax.tree.map(lambda array: array * (1 + 2.0**-40), wide)
        for given in (wide, finer):
            jax.tree.map(np.testing.assert_array_equal, quantize(given, kind), quantize(experts, kind))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("function", [quantize, dequantize, lambda e: jaxmoe.with_input_scales(e, 1.0, 1.0)])
def test_what_is_no_experts_or_has_no_arrays_is_an_error_that_says_what_is(function):
    numbers: Any = [[[1.0]]]
    experts, fused = experts_of(5, 2, 128, 128), jaxmoe.Experts.from_fused(numbers, numbers, layout="halves")
    other = tensor(2, 128, 128)
    bad = {
        r"experts\.w_up is a Tensor; it must be an array of NumPy or JAX": dataclasses.replace(experts, w_up=other),
        r"experts\.w_gate is a Tensor; it must be an array of NumPy": jaxmoe.Experts(
            jaxmoe.BlockScaled(other, other), None, experts.w_down
        ),
        r"experts is a dict; pass jaxmoe\.Experts": {"w_gate": experts.w_gate},
        r"experts is a NoneType; pass jaxmoe\.Experts": None,
        r"experts\.w_gate is a list; it must be an array": jaxmoe.Experts(numbers, numbers, numbers),
        r"experts\.w_gate_up is a list; it must be an array": fused,
        r"experts\.w_down is None; only w_up and the biases": dataclasses.replace(experts, w_down=None),
    }
    for told, passed in bad.items():
        with pytest.raises(TypeError, match=f"^(quantize|dequantize|with_input_scales): {told}"):
            function(passed)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("block", ["128x128", "mxfp4"])
def test_matrices_of_other_dimensions_are_not_quantized(block):
    experts, flat = experts_of(5, 2, 128, 128), jnp.ones((128, 256))
    for name, passed in (
        ("w_gate", dataclasses.replace(experts, w_gate=flat)),
        ("w_down", dataclasses.replace(experts, w_down=flat)),
        ("w_gate_up", jaxmoe.Experts.from_fused(flat, flat, layout="halves")),
    ):
        told = rf"quantize: experts\.{name} has shape \(128, 256\); it must be \[experts, "
        with pytest.raises(ValueError, match=told):
            quantize(passed, block)


def test_stacked_layers_are_quantized_each():
    layers = [experts_of(seed, 2, 128, 256) for seed in (5, 6)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    with pytest.raises(ValueError, match=r"experts\.w_gate has shape \(2, 2, "):
        quantize(stacked)
    together = jax.vmap(quantize)(stacked)
    for number, layer in enumerate(layers):
        for got, want in zip(*map(jax.tree.leaves, (together, quantize(layer))), strict=True):
            np.testing.assert_array_equal(got[number], want)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn, None, "bf16"])
def test_experts_are_made_in_wide_dtypes_and_cast_to_those_alone(dtype):
    experts = experts_of(5, 2, 128, 128)
    for caller, make in {
        "Experts.astype": lambda: experts.astype(dtype),
        "FusedExperts.astype": lambda: experts.fuse("halves").astype(dtype),
        "Experts.init": lambda: jaxmoe.Experts.init(jax.random.key(0), 2, 8, 8, dtype=dtype),
    }.items():
        with pytest.raises(TypeError, match=rf"^{caller}: dtype is .*; it must be one of bfloat16, float16, float32"):
            make()


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("dtype", ["bf16", None, 3])
def test_what_names_no_dtype_is_not_one(dtype):
    with pytest.raises(TypeError, match=f"dequantize: dtype is {dtype!r}; it must be one of bfloat16"):
        dequantize(quantize(experts_of(5, 2, 128, 128)), dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_are_weights_times_the_reciprocal_of_their_scale(compiled):
    experts = experts_of(6, 4, 256, 384).astype(jnp.bfloat16)
    found = scaled_in(jitted("channel", jnp.float32)(experts) if compiled else quantize(experts, "channel"))
    weights, scales = np.asarray(experts.w_gate).swapaxes(1, 2).astype(np.float32), np.asarray(found.scales)
    wanted = (weights * (np.float32(1) / scales)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (wanted != (weights / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).any()
    np.testing.assert_array_equal(np.asarray(found.values).astype(np.float32), wanted)


def rows_by_hand(rows: np.ndarray, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rule of tokens and h, one IEEE operation in float32 after the other, on whole groups of 128."""
    groups = rows.astype(np.float32).reshape(len(rows), -1, 128)
    with np.errstate(all="ignore"):
        largest = np.maximum(np.abs(groups).max(-1), np.float32(2.0**-100))
        scales = largest / np.float32(448)
        if power_of_two:
            exact = np.maximum(np.abs(groups.astype(np.float64)).max(-1), 2.0**-100) / 448
            scales = np.exp2(np.ceil(np.log2(exact))).astype(np.float32)
        scales = np.where(np.isfinite(groups).all(-1), scales, np.float32(np.nan))
        values = (groups * (np.float32(1) / scales)[..., None]).astype(ml_dtypes.float8_e4m3fn)
    return values.reshape(rows.shape), scales


def test_no_rows_are_quantized_to_none():
    values, scales = quantize_rows(jnp.zeros((0, 200)))
    assert (values.shape, scales.shape) == ((0, 200), (0, 2))
    assert dequantize_rows(values, scales, jnp.bfloat16).shape == (0, 200)


jitted_rows = jax.jit(quantize_rows, static_argnums=1)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_have_the_bits_of_the_rule_with_and_without_jit(dtype, power_of_two):
    rng = np.random.default_rng(0)
    # In 16 bits many quotients are halfway between two values.
    rows = np.asarray(jnp.asarray(rng.standard_normal((300, 384)) * np.exp2(rng.integers(-9, 9, (300, 1))), dtype))
    values, scales = rows_by_hand(rows, power_of_two)
    for function in (quantize_rows, jitted_rows):
        found = function(jnp.asarray(rows), power_of_two)
        np.testing.assert_array_equal(np.asarray(found[0]).view(np.uint8), values.view(np.uint8))
        np.testing.assert_array_equal(found[1], scales)


@given(st.integers(-110, 119), st.integers(0, 2**23 - 1))
def test_scales_of_rows_that_are_powers_of_two_are_the_least_with_which_nothing_is_too_large(exponent, mantissa):
    largest = np.float32(2.0**exponent) * np.float32(1 + mantissa / 2**23)
    _, scales = jitted_rows(jnp.full((1, 3), largest), True)
    scale = float(scales[0, 0])
    assert np.log2(scale) == np.round(np.log2(scale))
    floor = max(float(largest), 2.0**-100)
    assert floor / scale <= 448 < floor / (scale / 2)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
def test_a_last_group_of_fewer_columns_has_a_scale_of_its_own(columns, power_of_two):
    rows = jax.random.normal(jax.random.key(columns), (5, columns))
    values, scales = jitted_rows(rows, power_of_two)
    assert (values.shape, scales.shape) == ((5, columns), (5, -(-columns // 128)))
    padded = np.pad(np.asarray(rows), ((0, 0), (0, -columns % 128)))
    wanted, wanted_scales = rows_by_hand(padded, power_of_two)
    np.testing.assert_array_equal(np.asarray(values, np.float32), wanted[:, :columns].astype(np.float32))
    np.testing.assert_array_equal(scales, wanted_scales)
    again = np.asarray(dequantize_rows(values, scales, jnp.float32))
    # Half a unit in the last of 4 bits, or of a subnormal value.
    largest = np.repeat(np.asarray(scales), 128, axis=1)[:, :columns] * 2.0**-9
    assert (np.abs(again - rows) <= np.maximum(np.abs(rows) / 16, largest / 2) * 1.00001).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_zeros_of_tiny_numbers_and_of_none_are_defined(power_of_two):
    rows = np.ones((6, 256), np.float32)
    rows[0] = 0
    rows[1] *= 1e-38
    rows[2, 3], rows[3, 4], rows[4, 5] = np.nan, np.inf, -np.inf
    rows[5] *= np.float32(3e38)
    values, scales = (np.asarray(array, np.float32) for array in jitted_rows(jnp.asarray(rows), power_of_two))
    assert (values[:2] == 0).all()
    assert np.isfinite(scales[:2]).all()
    assert np.isnan(values[2:5, :128]).all()
    assert np.isnan(scales[2:5, 0]).all()
    assert np.isfinite(values[2:5, 128:]).all()
    again = np.asarray(dequantize_rows(jnp.asarray(values), jnp.asarray(scales), jnp.float32))
    assert np.isnan(again[2:5, :128]).all()
    np.testing.assert_allclose(again[5], rows[5], rtol=2**-4)


def test_experts_print_their_formats_and_bytes():
    experts = quantize(experts_of(6, 2, 128, 256, biases=True, dtype=jnp.bfloat16))
    assert repr(experts) == (
        "Experts(w_gate=float8_e4m3fn[2, 256, 128] with scales float32[2, 2, 1], "
        "w_up=float8_e4m3fn[2, 256, 128] with scales float32[2, 2, 1], "
        "w_down=float8_e4m3fn[2, 128, 256] with scales float32[2, 1, 2], "
        "b_gate=bfloat16[2, 256], b_up=bfloat16[2, 256], b_down=bfloat16[2, 128]; 199216 bytes)"
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(experts)) == 199216
    assert repr(jax.eval_shape(lambda: experts)) == repr(experts)
    assert "w_up" not in repr(experts_of(6, 2, 128, 256, gated=False))
    masked: Any
    for masked in (experts, experts_of(6, 2, 8, 8)):
        of_adam = optax.masked(optax.adam(1e-3), jax.tree.map(lambda leaf: False, masked)).init(masked)
        assert "w_gate=" in repr(of_adam)
    assert "values=None" in repr(jax.tree.map(lambda leaf: None, experts))
    assert repr(jax.tree.map(lambda leaf: P("expert"), experts_of(6, 2, 8, 8))).startswith("Experts(w_gate=P")


# Gradients: of wide experts that are rounded there are none.

FORMATS = (*BLOCKS, "mxfp4", "nvfp4")
NO_GRADIENTS = r"quantize: this asks for gradients of \w+ experts, and [48]-bit values have none.*stop_gradient"


def sum_of(experts: Any) -> Any:
    return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(experts))


def sum_after(block: str, wide: jaxmoe.Experts) -> Any:
    """Through the numbers, as every use of them goes."""
    return sum_of(dequantize(quantize(wide, block), jnp.float32))


def over_layers(wide: jaxmoe.Experts, body: Any) -> Any:
    """The sum over a scan of two layers with these experts."""
    return jax.lax.scan(lambda total, layer: (total + body(layer), None), 0.0, stacked(wide))[0]


def stacked(wide: jaxmoe.Experts) -> jaxmoe.Experts:
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), wide)


def in_shard_map(wide: jaxmoe.Experts, body: Any) -> Any:
    return jax.shard_map(
        lambda part: jax.lax.psum(body(part), "expert"), mesh=mesh_of("expert"), in_specs=P("expert"), out_specs=P()
    )(wide)


# Each makes a sum of experts and of what sums the experts that it hands on.
AROUND: dict[str, Any] = {
    "nothing": lambda wide, body: body(wide),
    "jit": lambda wide, body: jax.jit(body)(wide),
    "remat": lambda wide, body: jax.checkpoint(body)(wide),
    "vmap": lambda wide, body: jnp.sum(jax.vmap(body)(stacked(wide))),
    "scan": over_layers,
    "scan of remat": lambda wide, body: over_layers(wide, jax.checkpoint(body)),
    "shard_map": in_shard_map,
}


@pytest.mark.parametrize(
    ("block", "around"),
    [(block, around) for block in FORMATS for around in AROUND if around == "nothing" or block in ("128x128", "mxfp4")],
)
def test_gradients_of_wide_experts_that_are_rounded_are_refused_in_every_format(block, around):
    wide = experts_of(7, 8, 32, 32, biases=True)

    def loss(wide: jaxmoe.Experts) -> Any:
        return AROUND[around](wide, functools.partial(sum_after, block))

    assert jax.eval_shape(loss, wide).shape == ()
    with pytest.raises(TypeError, match=NO_GRADIENTS):
        jax.grad(loss)(wide)
    with pytest.raises(TypeError, match=NO_GRADIENTS):
        jax.jvp(loss, (wide,), (wide,))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("block", ["128x128", "mxfp4"])
def test_experts_behind_stop_gradient_are_rounded_beside_what_is_trained(block, around):
    wide = experts_of(7, 8, 32, 32, biases=True)

    def loss(scale: jax.Array, biases: jaxmoe.Experts, wide: jaxmoe.Experts) -> Any:
        def body(experts: jaxmoe.Experts) -> Any:
            matrices = {name: getattr(experts, name) for name in ("w_gate", "w_up", "w_down")}
            frozen = dataclasses.replace(experts, **jax.lax.stop_gradient(matrices))
            return scale * sum_after(block, frozen)

        return AROUND[around](dataclasses.replace(wide, b_gate=biases.b_gate), body)

    # Left out of the argnums, and stopped.
    value, (of_scale, of_biases) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(jnp.float32(1), wide, wide)
    assert of_scale == pytest.approx(float(value), rel=1e-5)
    assert not np.asarray(of_biases.w_gate).any()
    assert (of_biases.b_gate == (2 if around in ("vmap", "scan", "scan of remat") else 1)).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("block", ["128x128", "mxfp4"])
def test_gradients_of_experts_that_are_split_are_refused_too(block, kind):
    mesh = mesh_of("expert", kind=kind)
    wide = jax.device_put(experts_of(2, 8, 32, 32), NamedSharding(mesh, P("expert")))
    with jax.set_mesh(mesh):
        for gradient in (jax.grad, lambda loss: jax.jit(jax.grad(loss))):
            with pytest.raises(TypeError, match=NO_GRADIENTS):
                gradient(functools.partial(sum_after, block))(wide)
        stopped = jax.jit(jax.grad(lambda wide: sum_after(block, jax.lax.stop_gradient(wide))))(wide)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(stopped))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_layer_of_experts_that_a_loss_rounds_to_mxfp4_says_so_and_trains_their_biases(implementation):
    wide, x = experts_of(8, 4, 32, 32, biases=True), jax.random.normal(jax.random.key(9), (6, 32))
    routing = jaxmoe.route(x[:, :4], jaxmoe.RouterConfig(top_k=2))

    def loss(wide: jaxmoe.Experts) -> Any:
        rounded = quantize(wide, "mxfp4")
        return jnp.sum(jaxmoe.moe_layer(x, routing, rounded, axis_name=None, implementation=implementation))

    with pytest.raises(TypeError, match="quantize: this asks for gradients of MXFP4 experts"):
        jax.jit(jax.grad(loss))(wide)
    matrices = {name: getattr(wide, name) for name in ("w_gate", "w_up", "w_down")}
    of_biases = jax.grad(lambda biases: loss(dataclasses.replace(biases, **matrices)))(wide)
    assert not np.asarray(of_biases.w_gate).any()
    assert all(np.asarray(bias).any() for bias in (of_biases.b_gate, of_biases.b_up, of_biases.b_down))


def test_a_straight_through_estimator_has_the_gradients_of_the_rounded_matrices():
    wide, x = experts_of(8, 4, 32, 32), jax.random.normal(jax.random.key(9), (6, 32))
    routing = jaxmoe.route(x[:, :4], jaxmoe.RouterConfig(top_k=2))

    def loss(experts: jaxmoe.Experts) -> Any:
        return jnp.sum(jaxmoe.moe_layer(x, routing, experts, axis_name=None))

    def through(wide: jaxmoe.Experts) -> Any:
        rounded = dequantize(quantize(jax.lax.stop_gradient(wide), "mxfp4"), jnp.float32)
        return loss(jax.tree.map(lambda w, r: w + jax.lax.stop_gradient(r - w), wide, rounded))

    expected = jax.grad(loss)(dequantize(quantize(wide, "mxfp4"), jnp.float32))
    for got, want in zip(jax.tree.leaves(jax.grad(through)(wide)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
