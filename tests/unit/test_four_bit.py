"""Experts in 4 bits: what `MXFP4` and `NVFP4` hold and refuse, and what `quantize` makes of wide ones."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import MXFP4, NVFP4, dequantize, e2m1, expert_split, fits_e4m3, quantize
from jaxmoe.e4m3_fit import MOST_STEPS
from jaxmoe.four_bit import FourBit
from jaxmoe.testing import relative_error
from tests.layer_calls import mesh_of
from tests.quantized_layer import MAGNITUDES, NUMBERS_IN_4_BITS, exact_matrices

KINDS = ("mxfp4", "nvfp4")
GROUPS = {"mxfp4": 32, "nvfp4": 16}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def e8m0(codes: Any) -> jax.Array:
    return jnp.asarray(codes, jnp.uint8).view(jnp.float8_e8m0fnu)


def e4m3(codes: Any) -> jax.Array:
    return jnp.asarray(codes, jnp.uint8).view(jnp.float8_e4m3fn)


def all_codes(scales: int, group: int) -> jax.Array:
    """Values of one matrix, bytes: each of the 16 codes twice or more beside every one of so many scales."""
    low, high = np.arange(group // 2) % 16, (np.arange(group // 2) + 8) % 16
    return jnp.asarray(np.broadcast_to(low | high << 4, (1, scales, group // 2)), jnp.uint8)


def as_number(values: Any) -> np.ndarray:
    """Returns values of any type in float64, without arithmetic of JAX."""
    return np.asarray(values).astype(np.float64)


def experts_of(seed: int, num_experts: int, hidden: int, intermediate: int, **options: Any) -> jaxmoe.Experts:
    return jaxmoe.Experts.init(jax.random.key(seed), num_experts, hidden, intermediate, **options)


def four_bit_in(experts: jaxmoe.Experts, name: str = "w_gate") -> Any:
    found = getattr(experts, name)
    assert isinstance(found, FourBit)
    return found


def alone(matrix: np.ndarray | jax.Array, kind: str) -> Any:
    """Returns matrices [experts, in, out] in 4 bits."""
    experts = jaxmoe.Experts(jnp.asarray(matrix), None, jnp.zeros((1, 32, 32)))
    return four_bit_in(jitted(kind)(experts))


@functools.cache
def jitted(kind: str) -> Any:
    return jax.jit(functools.partial(quantize, block=kind))


# --- the element ----------------------------------------------------------------------------------------------------


def test_a_byte_holds_two_weights_the_even_index_in_the_lower_half():
    every = jnp.arange(256, dtype=jnp.uint8)
    wanted = np.stack([NUMBERS_IN_4_BITS[np.arange(256) % 16], NUMBERS_IN_4_BITS[np.arange(256) // 16]], -1).reshape(-1)
    for decode in (e2m1.decode, jax.jit(e2m1.decode), e2m1.unpack, jax.jit(e2m1.unpack)):
        found = as_number(decode(every))
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    for pack in (e2m1.pack, jax.jit(e2m1.pack)):
        np.testing.assert_array_equal(pack(e2m1.unpack(every)), every)


def test_numbers_are_rounded_to_the_nearest_and_to_the_even_code_from_the_middle():
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    around = np.concatenate([MAGNITUDES, middles, middles * (1 + 2.0**-23), middles * (1 - 2.0**-23), [7, 1e30, 1e-30]])
    numbers = np.concatenate([around, -around]).astype(np.float32)
    wanted = numbers.astype(ml_dtypes.float4_e2m1fn)
    for encode in (e2m1.encode, jax.jit(e2m1.encode)):
        found = np.asarray(e2m1.decode(encode(jnp.asarray(numbers))))
        np.testing.assert_array_equal(found.view(np.uint32), wanted.astype(np.float32).view(np.uint32))


# --- what the types hold ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_bytes", [True, False])
def test_every_value_times_every_scale_of_mxfp4_is_exact_where_the_dtype_has_it(as_bytes, dtype):
    codes, scales = all_codes(256, 32), np.arange(256)
    given = MXFP4(codes if as_bytes else e2m1.unpack(codes), e8m0(scales[None, :, None]))
    found = as_number(given.wide(dtype))[0]
    # In float64; two units are enough for each step of the exponents, so that float16 has few of them.
    wanted = NUMBERS_IN_4_BITS[np.asarray(e2m1.unpack(codes)).view(np.uint8)[0].T & 15] * np.exp2(scales - 127.0)
    assert np.isnan(found[:, 255]).all()
    found, wanted = found[:, :255], wanted[:, :255]
    info = jnp.finfo(dtype)
    held = (np.abs(wanted) <= float(info.max)) & (np.abs(wanted) >= float(info.smallest_normal)) | (wanted == 0)
    assert held.mean() > (0.1 if dtype == jnp.float16 else 0.97)
    np.testing.assert_array_equal(found[held], wanted[held])
    assert np.isinf(found[wanted > float(info.max)]).all()
    assert (np.abs(found[np.abs(wanted) < float(info.smallest_normal)]) <= float(info.smallest_normal)).all()


@pytest.mark.parametrize("factor", [1.0, 0.0078125, 0.0123, 3e-5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_times_every_scale_of_nvfp4_is_rounded_once_after_float32(dtype, factor):
    codes, scales = all_codes(256, 16), e4m3(np.arange(256)[None, :, None])
    given = NVFP4(codes, scales, jnp.full(1, factor, jnp.float32))
    found = as_number(jax.jit(lambda matrix: matrix.wide(dtype))(given))[0]
    products = exact_matrices(NVFP4(codes, scales, jnp.ones(1)))[0]
    assert np.isnan(found[:, [127, 255]]).all()
    keep = np.delete(np.arange(256), [127, 255])
    # Exact but for the factor, which is one rounding in float32.
    wanted = (products.astype(np.float32) * np.float32(factor)).astype(jnp.dtype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(found[:, keep], wanted[:, keep])
    plain = as_number(given.without_factors(dtype))[0]
    np.testing.assert_array_equal(plain[:, keep], products[:, keep])


@pytest.mark.parametrize("kind", KINDS)
def test_values_as_bytes_and_as_elements_are_the_same_weights(kind):
    given = four_bit_in(jitted(kind)(experts_of(1, 2, 64, 96)))
    assert given.values.dtype == jnp.uint8
    elements = jax.jit(lambda matrix: type(matrix)(matrix.elements, *jax.tree.leaves(matrix)[1:]))(given)
    assert elements.values.dtype == jnp.float4_e2m1fn
    assert (given.shape, elements.shape) == ((2, 64, 96), (2, 64, 96))
    assert given.packed.shape == (2, 96, 32)
    np.testing.assert_array_equal(jax.jit(lambda matrix: matrix.packed)(elements), given.packed)
    np.testing.assert_array_equal(elements.packed, given.values)
    np.testing.assert_array_equal(given.wide(jnp.float32), elements.wide(jnp.float32))
    np.testing.assert_array_equal(given.wide(jnp.float32), exact_matrices(given).astype(np.float32))
    assert given.nbytes == elements.nbytes == given.format.bytes(96, 64) * 2
    assert given.format == elements.format
    assert given.dtype == elements.dtype == jnp.float4_e2m1fn


@pytest.mark.parametrize(("kind", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_weights_take_4_bits_and_their_share_of_a_scale(kind, bits):
    given = four_bit_in(jitted(kind)(experts_of(2, 3, 256, 128)))
    of_matrices = 4 * 3 if kind == "nvfp4" else 0
    assert given.nbytes == 3 * 256 * 128 * bits / 8 + of_matrices
    assert given.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(given))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_4_bits_is_a_pytree_with_the_sizes_of_wide_experts_and_its_biases(kind):
    experts = experts_of(3, 2, 64, 96, biases=True)
    found = jitted(kind)(experts)
    assert (found.num_experts, found.hidden, found.intermediate) == (2, 64, 96)
    np.testing.assert_array_equal(found.b_gate, experts.b_gate)
    shapes = jax.eval_shape(functools.partial(quantize, block=kind), experts)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), found
    )
    assert len(jax.tree.leaves(found)) == (9 if kind == "mxfp4" else 12)
    plain = experts_of(3, 2, 64, 96, gated=False)
    assert jax.eval_shape(functools.partial(quantize, block=kind), plain).w_up is None
    wide = jax.jit(dequantize)(found)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype(jnp.bfloat16)}
    assert wide.w_down.shape == experts.w_down.shape
    exported: Any = jax.export.export(jax.jit(lambda experts: dequantize(experts).w_up))(found)
    again: Any = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(found), wide.w_up)


def test_experts_in_4_bits_print_their_formats_and_bytes():
    experts = experts_of(6, 2, 128, 256, biases=True, dtype=jnp.bfloat16)
    found = jitted("mxfp4")(experts)
    assert repr(found) == (
        "Experts(w_gate=MXFP4 uint8[2, 256, 64] with scales float8_e8m0fnu[2, 256, 4], "
        "w_up=MXFP4 uint8[2, 256, 64] with scales float8_e8m0fnu[2, 256, 4], "
        "w_down=MXFP4 uint8[2, 128, 128] with scales float8_e8m0fnu[2, 128, 8], "
        "b_gate=bfloat16[2, 256], b_up=bfloat16[2, 256], b_down=bfloat16[2, 128]; 107008 bytes)"
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(found)) == 107008
    assert repr(jax.eval_shape(lambda: found)) == repr(found)
    gate: Any = found.w_gate
    matrix: Any = MXFP4(gate.elements, gate.scales)
    elements = jaxmoe.Experts(matrix, None, found.w_down)
    assert "w_gate=MXFP4 float4_e2m1fn[2, 256, 128] with scales float8_e8m0fnu[2, 256, 4]" in repr(elements)
    assert repr(elements).endswith(f"; {2 * 34816} bytes)")
    nvidias = repr(jax.eval_shape(functools.partial(quantize, block="nvfp4"), experts))
    assert "w_gate=NVFP4 uint8[2, 256, 64] with scales float8_e4m3fn[2, 256, 8] and float32[2]" in nvidias


# --- what the types refuse --------------------------------------------------------------------------------------------

BYTES, ELEMENTS = jnp.zeros((2, 96, 32), jnp.uint8), jnp.zeros((2, 96, 64), jnp.float4_e2m1fn)
POWERS, E4M3 = jnp.ones((2, 96, 2), jnp.float8_e8m0fnu), jnp.ones((2, 96, 4), jnp.float8_e4m3fn)
ONES = jnp.ones(2)

BAD: dict[str, tuple[FourBit, type[Exception], str]] = {
    "values of another type": (
        MXFP4(BYTES.astype(jnp.int8), POWERS),
        TypeError,
        r"MXFP4: values are int8; .*uint8 \[experts, out, in / 2\] with the even index.*values.view\(jnp.uint8\)",
    ),
    "bytes of powers of two that nobody has named so": (
        MXFP4(BYTES, jnp.full((2, 96, 2), 127, jnp.uint8)),
        TypeError,
        r"MXFP4: scales are uint8; they must be float8_e8m0fnu.*scales.view\(jnp.float8_e8m0fnu\), and not by astype",
    ),
    "powers of two in float32": (
        MXFP4(BYTES, jnp.ones((2, 96, 2))),
        TypeError,
        r"scales are float32.*scales.astype\(jnp.float8_e8m0fnu\)",
    ),
    "bytes of E4M3 that nobody has named so": (
        NVFP4(BYTES, jnp.ones((2, 96, 4), jnp.uint8), ONES),
        TypeError,
        r"NVFP4: scales are uint8; they must be float8_e4m3fn.*scales.view\(jnp.float8_e4m3fn\)",
    ),
    "scales of groups of 16 in MXFP4": (
        MXFP4(BYTES, jnp.ones((2, 96, 4), jnp.float8_e8m0fnu)),
        ValueError,
        r"uint8 values \(2, 96, 32\) and scales \(2, 96, 4\) .*\[experts, out, in / 2\].* \[experts, out, in / 32\]",
    ),
    "elements that lie as [experts, in, out]": (
        MXFP4(ELEMENTS.swapaxes(1, 2), POWERS.swapaxes(1, 2)),
        ValueError,
        r"values \(2, 64, 96\) and scales \(2, 2, 96\).*values.swapaxes\(1, 2\), scales.swapaxes\(1, 2\)",
    ),
    "bytes that lie as [experts, in, out / 2]": (
        NVFP4(jnp.zeros((2, 64, 48), jnp.uint8), E4M3.swapaxes(1, 2), ONES),
        ValueError,
        r"values \(2, 64, 48\) and scales \(2, 4, 96\).*\[experts, in, out / 2\] have to be made anew: jaxmoe.quantize",
    ),
    "inputs that are no multiple of 32": (
        MXFP4(jnp.zeros((2, 96, 24), jnp.uint8), jnp.ones((2, 96, 2), jnp.float8_e8m0fnu)),
        ValueError,
        "where in is a multiple of 32",
    ),
    "inputs that are no multiple of 16": (
        NVFP4(jnp.zeros((2, 96, 20), jnp.float4_e2m1fn), jnp.ones((2, 96, 2), jnp.float8_e4m3fn), ONES),
        ValueError,
        "where in is a multiple of 16",
    ),
    "no dimension of experts": (MXFP4(BYTES[0], POWERS[0]), ValueError, r"values \(96, 32\)"),
    "scales of other experts": (MXFP4(BYTES, POWERS[:1]), ValueError, r"scales \(1, 96, 2\)"),
    "a scale for the matrix in bfloat16": (
        NVFP4(BYTES, E4M3, ONES.astype(jnp.bfloat16)),
        TypeError,
        "global_scales are bfloat16; they must be float32",
    ),
    "one scale for all matrices": (
        NVFP4(BYTES, E4M3, jnp.ones(())),
        ValueError,
        r"global_scales have shape \(\); they must be \[experts\], \(2,\)",
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("what", BAD)
def test_arrays_that_make_no_matrices_are_errors_that_say_what_to_do(what):
    matrix, error, told = BAD[what]
    for use in (matrix.check, lambda: matrix.packed, lambda: matrix.elements, lambda: matrix.wide(jnp.float32)):
        with pytest.raises(error, match=told):
            use()


# --- quantize ---------------------------------------------------------------------------------------------------------


def mxfp4_by_hand(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns values and scales of groups of finite numbers, none of them all zero: [groups, 32]."""
    scales = np.exp2(np.floor(np.log2(np.abs(groups).max(-1, keepdims=True).astype(np.float64))) - 2)
    return (groups / scales).astype(ml_dtypes.float4_e2m1fn).astype(np.float64), scales


def nvfp4_by_hand(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Returns values, scales and the scale of all for [groups, 16], each step in float32."""
    of_all = np.abs(matrix).max() / np.float32(448 * 6)
    wanted = np.abs(matrix).max(-1, keepdims=True) / np.float32(6) / of_all
    scales = np.maximum(wanted, 2.0**-9).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (
        (matrix * (np.float32(1) / (scales * of_all))).astype(ml_dtypes.float4_e2m1fn).astype(np.float64),
        scales,
        of_all,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_group_has_the_scale_of_its_largest_weight_and_values_to_the_nearest(kind, dtype):
    rng, group = np.random.default_rng(1), GROUPS[kind]
    sizes = np.exp2(rng.uniform(-6, 0, (2, 96 // group, 1, 40)))  # of groups along the inputs
    wide = rng.standard_normal((2, 96 // group, group, 40)) * sizes
    given = np.asarray(jnp.asarray(wide.reshape(2, 96, 40), dtype)).astype(np.float32)
    experts = jaxmoe.Experts(jnp.asarray(given, dtype), None, jnp.zeros((2, 96, 32), dtype))
    for function in (jitted(kind), functools.partial(quantize, block=kind)):
        found = four_bit_in(function(experts))
        for expert in range(2):
            groups = given[expert].T.reshape(-1, group)
            if kind == "mxfp4":
                values, scales = mxfp4_by_hand(groups)
            else:
                values, scales, of_all = nvfp4_by_hand(groups)
                assert found.global_scales[expert] == of_all
            np.testing.assert_array_equal(as_number(found.scales[expert]).reshape(-1, 1), scales)
            np.testing.assert_array_equal(as_number(found.elements[expert]).reshape(-1, group), values)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1))
def test_numbers_that_4_bits_can_hold_come_back_as_they_were(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (1, 24, 48)).astype(np.uint8)
    matrix: Any = MXFP4(jnp.asarray(codes), e8m0(rng.integers(20, 250, (1, 24, 3))))
    again = alone(matrix.wide(jnp.float32), "mxfp4")
    np.testing.assert_array_equal(exact_matrices(again), exact_matrices(matrix))
    # Of NVFP4 those whose groups use all of the range, one of them all of the scales too, beside an exact factor.
    codes[..., ::8] |= 7
    scales = np.asarray(e4m3(rng.integers(8, 127, (1, 24, 6)))).copy()
    scales[0, 3, 1] = 448
    matrix = NVFP4(jnp.asarray(codes), jnp.asarray(scales), jnp.full(1, 2.0 ** int(rng.integers(-60, 60))))
    again = alone(matrix.wide(jnp.float32), "nvfp4")
    for found, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(matrix), strict=True):
        np.testing.assert_array_equal(as_number(found), as_number(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_again_changes_nothing(kind):
    once = four_bit_in(jitted(kind)(experts_of(7, 2, 64, 96)))
    again = alone(once.wide(jnp.float32), kind)
    np.testing.assert_array_equal(once.values, again.values)
    np.testing.assert_array_equal(as_number(once.scales), as_number(again.scales))
    np.testing.assert_allclose(again.wide(jnp.float32), once.wide(jnp.float32), rtol=2.0**-22)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_zeros_tiny_weights_and_weights_that_are_no_numbers_are_defined(kind):
    matrix = np.ones((1, 192, 8), np.float32)
    matrix[0, 32:64] = 0
    matrix[0, 64:96] = 1e-38
    matrix[0, 96, 0], matrix[0, 128, 1], matrix[0, 160, 2] = np.nan, np.inf, -np.inf
    found = np.asarray(alone(matrix, kind).wide(jnp.float32))[0]
    broken = np.zeros(found.shape, bool)
    for column, start in enumerate((96, 128, 160)):
        broken[start : start + GROUPS[kind], column] = True
    assert np.isnan(found[broken]).all()
    kept = np.where(broken, 1, found)
    assert (kept[32:64] == 0).all()
    assert (np.abs(kept[64:96]) <= 1.5e-38).all()
    kept[32:96] = 1
    np.testing.assert_allclose(kept, 1, rtol=1e-6)
    if kind == "mxfp4":
        codes = np.asarray(alone(matrix, kind).scales).view(np.uint8)[0]
        assert [codes[0, 3], codes[1, 4], codes[2, 5]] == [255] * 3
        assert (codes == 255).sum() == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0.0, 1e-38, 2.0**-120, 3.3e38, float(np.finfo(np.float32).max)])
def test_matrices_of_one_number_are_finite_and_as_near_as_4_bits_can_be(kind, number):
    found = np.asarray(alone(np.full((1, 64, 2), number, np.float32), kind).wide(jnp.float32))
    # Below these MXFP4 has no scale, and NVFP4 wants one for the matrix that is a normal number.
    smallest = {"mxfp4": 2.0**-126, "nvfp4": 2.0**-100}[kind]
    np.testing.assert_allclose(found, number, rtol=1 / 4, atol=smallest)
    assert found.all() if number >= smallest else not found.any() or number


def test_the_largest_of_mxfp4_is_6_times_its_scale_for_what_lies_above_as_the_standard_says():
    found = alone(np.full((1, 32, 1), 7.9, np.float32), "mxfp4")
    np.testing.assert_array_equal(found.wide(jnp.float32), 6)
    np.testing.assert_array_equal(as_number(found.scales), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_experts_that_are_split_stay_where_they_are(axes, kind):
    mesh = mesh_of("expert", kind=axes)
    split = NamedSharding(mesh, P("expert"))
    experts = jax.device_put(experts_of(2, 8, 64, 96), split)
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(quantize, block=kind)).lower(experts).compile()
        found = program(experts)
        wide = jax.jit(dequantize)(found)
    text = program.as_text() or ""
    assert "8,64,96" not in text
    assert not [line for line in text.splitlines() if "all-gather" in line or "all-reduce" in line]
    for leaf in jax.tree.leaves((found, wide)):
        assert leaf.sharding.is_equivalent_to(split, leaf.ndim)
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {1}
    undivided = jitted(kind)(jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), experts))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, undivided)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_cannot_be_quantised_is_an_error_that_says_what_to_do():
    experts = experts_of(5, 2, 64, 96)
    with pytest.raises(ValueError, match="'fp4' must be one of '128x128', 'channel', 'expert', 'mxfp4', 'nvfp4'"):
        quantize(experts, "fp4")
    with pytest.raises(TypeError, match="'mxfp4' has scales in float8_e8m0fnu; leave scale_dtype"):
        quantize(experts, "mxfp4", scale_dtype=jnp.float32)
    with pytest.raises(TypeError, match=r"experts.w_gate is MXFP4 already. Pass dequantize"):
        quantize(jitted("mxfp4")(experts), "nvfp4")
    with pytest.raises(ValueError, match=r"experts.w_down has 48 inputs, and 'mxfp4' has a scale for each 32 of them"):
        quantize(experts_of(5, 2, 64, 48), "mxfp4")
    with pytest.raises(ValueError, match=r"experts.w_gate has 40 inputs, and 'nvfp4' has a scale for each 16 of them"):
        quantize(experts_of(5, 2, 40, 48), "nvfp4")
    with pytest.raises(TypeError, match=r"astype: w_gate is NVFP4. Pass jaxmoe.dequantize"):
        jitted("nvfp4")(experts).astype(jnp.float32)


# --- whether MXFP4 is exact as E4M3 -----------------------------------------------------------------------------------


def test_e2m1_times_15_powers_of_two_in_a_row_is_exact_in_e4m3_and_no_more():
    exact = [
        exponent
        for exponent in range(-12, 12)
        if (as_number((MAGNITUDES * 2.0**exponent).astype(ml_dtypes.float8_e4m3fn)) == MAGNITUDES * 2.0**exponent).all()
    ]
    assert exact == list(range(-8, 7))
    assert len(exact) == MOST_STEPS + 1


def in_e4m3(matrix: np.ndarray) -> np.ndarray:
    """Returns a matrix `[out, in]` in E4M3 with one scale, 2^-6 of its largest power of two, for each 128 x 128."""
    found = np.zeros_like(matrix)
    for row in range(0, matrix.shape[0], 128):
        for column in range(0, matrix.shape[1], 128):
            block = matrix[row : row + 128, column : column + 128]
            scale = np.exp2(np.floor(np.log2(np.abs(block).max() / 6)) - 6)
            rounded = np.clip(block / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            found[row : row + 128, column : column + 128] = as_number(rounded) * scale
    return found


def with_every_magnitude(span: int, seed: int) -> MXFP4:
    """A matrix of [160, 192] whose groups have all magnitudes, and in one block exponents that differ by `span`."""
    rng = np.random.default_rng(seed)
    codes = np.tile(np.arange(16, dtype=np.uint8) | (np.arange(16, dtype=np.uint8)[::-1] << 4), (1, 160, 6))
    exponents = np.full((1, 160, 6), 120) + rng.integers(0, min(span, 14) + 1, (1, 160, 6))
    row, group = rng.integers(0, 128), rng.integers(0, 4)
    exponents[0, :128, :4] = np.clip(exponents[0, :128, :4], 120, 120 + span)
    exponents[0, row, group], exponents[0, (row + 1) % 128, (group + 1) % 4] = 120, 120 + span
    matrix: Any = MXFP4(jnp.asarray(codes), e8m0(exponents))
    return matrix


def fits(matrix: Any) -> bool:
    nothing: Any = MXFP4(jnp.zeros((1, 32, 16), jnp.uint8), e8m0(np.zeros((1, 32, 1))))
    found = jax.jit(fits_e4m3)(jaxmoe.Experts(matrix, None, nothing))
    assert found["w_down"].all()
    return bool(found["w_gate"][0])


@pytest.mark.parametrize("span", [0, 5, 14, 15, 16])
def test_experts_fit_where_the_exponents_of_no_block_differ_by_more_than_14(span):
    matrix: Any = with_every_magnitude(span, seed=span)
    wide = exact_matrices(matrix)[0].T
    assert fits(matrix) == (span <= 14)
    assert (in_e4m3(wide) == wide).all() == (span <= 14)


def test_groups_of_zeros_and_of_other_blocks_do_not_count_and_nan_does_not_fit():
    matrix: Any = with_every_magnitude(14, seed=1)
    values, scales = np.array(matrix.values), np.array(matrix.scales).view(np.uint8)
    values[0, 5, 16:32], scales[0, 5, 1] = 0x80, 3  # a group of zeros of either sign
    scales[0, 128:], scales[0, :, 4:] = 2, 1
    scales[0, 128:, 4:] = 200
    assert fits(MXFP4(jnp.asarray(values), e8m0(scales)))
    values[0, 5, 20] = 0x10
    assert not fits(MXFP4(jnp.asarray(values), e8m0(scales)))
    values[0, 5, 16:32], scales[0, 5, 1] = 0, 255
    assert not fits(MXFP4(jnp.asarray(values), e8m0(scales)))


def test_experts_that_do_not_fit_are_named_each_by_its_matrix():
    experts = jitted("mxfp4")(experts_of(1, 2, 64, 96))
    up: Any = experts.w_up
    scales = np.array(up.scales)
    scales[1, 3, 1] *= 2.0**-30
    matrix: Any = MXFP4(up.values, jnp.asarray(scales))
    found = fits_e4m3(dataclasses.replace(experts, w_up=matrix))
    assert {name: of.tolist() for name, of in found.items()} == {
        "w_gate": [True, True],
        "w_up": [True, False],
        "w_down": [True, True],
    }
    assert set(fits_e4m3(dataclasses.replace(experts, w_up=None))) == {"w_gate", "w_down"}
    with pytest.raises(TypeError, match=r"experts.w_gate is NVFP4; it must be MXFP4, whose scales are powers of two"):
        fits_e4m3(jitted("nvfp4")(experts_of(1, 2, 64, 96)))


def test_experts_go_through_e4m3_where_they_are_exact_and_others_are_named():
    experts = jitted("mxfp4")(experts_of(1, 3, 128, 256))
    marked = jaxmoe.through_e4m3(experts)
    assert all(getattr(marked, name).through_e4m3 for name in ("w_gate", "w_up", "w_down"))
    for mine, other in zip(jax.tree.leaves(marked), jax.tree.leaves(experts), strict=True):
        assert mine is other
    up: Any = experts.w_up
    scales = np.array(up.scales)
    scales[1:, 3, 1] *= 2.0**-30
    spoiled = dataclasses.replace(experts, w_up=dataclasses.replace(up, scales=jnp.asarray(scales)))
    told = r"not hold their weights \(experts.w_up: 1, 2\).*decodes them exactly in registers"
    with pytest.raises(ValueError, match=told):
        jaxmoe.through_e4m3(spoiled)


def test_a_group_of_zeros_can_be_what_a_block_of_e4m3_is_made_for():
    """What decodes it looks at scales alone."""
    matrix: Any = with_every_magnitude(0, seed=1)
    values, scales = np.array(matrix.values), np.array(matrix.scales).view(np.uint8)
    values[0, 5, 16:32] = 0
    for byte, goes in ((134, True), (135, False)):
        scales[0, 5, 1] = byte
        large: Any = MXFP4(jnp.asarray(values), e8m0(scales))
        assert fits(large)
        nothing: Any = MXFP4(jnp.zeros((1, 32, 16), jnp.uint8), e8m0(np.zeros((1, 32, 1))))
        experts = jaxmoe.Experts(large, None, nothing)
        if goes:
            assert jaxmoe.through_e4m3(experts)
        else:
            with pytest.raises(ValueError, match=r"\(experts.w_gate: 0\)"):
                jaxmoe.through_e4m3(experts)


def test_going_through_e4m3_is_asked_for_where_weights_are_made():
    experts = experts_of(1, 2, 128, 128)
    with pytest.raises(TypeError, match=r"through_e4m3: experts.w_gate is traced.*before that"):
        jax.jit(jaxmoe.through_e4m3)(jitted("mxfp4")(experts))
    with pytest.raises(TypeError, match=r"through_e4m3: experts.w_gate is BlockScaled; it must be MXFP4 or NVFP4"):
        jaxmoe.through_e4m3(jaxmoe.quantize(experts))
    # The rounding of NVFP4 depends on no number.
    marked = jax.jit(jaxmoe.through_e4m3)(jitted("nvfp4")(experts))
    assert marked.w_down.through_e4m3


@pytest.mark.parametrize("largest", [2.0**-9, 2.0**-6, 1.75, 448.0])
def test_nvfp4_through_e4m3_is_rounded_with_a_power_of_two_for_each_block(largest):
    scales = np.array([0.0, 2.0**-9, 1.5 * 2.0**-6, 1.125, 1.875, 60.0, 208.0, 448.0])
    scales = np.minimum(scales, largest).astype(ml_dtypes.float8_e4m3fn)
    codes = np.arange(256, dtype=np.uint8)
    values = np.tile(codes[:64], (1, 8, 1))
    matrix: Any = NVFP4(jnp.asarray(values), jnp.asarray(np.tile(scales, (1, 8, 1))), jnp.full(1, 0.5))
    exact, marked = exact_matrices(matrix), dataclasses.replace(matrix, through_e4m3=True)
    np.testing.assert_array_equal(marked.wide(jnp.float32), exact)
    found = np.asarray(jax.jit(lambda matrix: matrix.wide_multiplied(jnp.float32))(marked))
    power = 2.0 ** (np.floor(np.log2(max(largest, 2.0**-6))) - 5) / 2
    wanted = (exact / power).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * power
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(wanted / power).max() <= 384
    assert relative_error(found, exact) < 2.0**-4


@pytest.mark.slow
def test_the_error_of_nvfp4_through_e4m3_is_what_its_docs_say():
    experts = jaxmoe.through_e4m3(jitted("nvfp4")(experts_of(3, 2, 512, 256)))
    for matrix in (experts.w_gate, experts.w_up, experts.w_down):
        exact, rounded = (np.asarray(wide(jnp.float32), np.float64) for wide in (matrix.wide, matrix.wide_multiplied))
        of_each = ((rounded - exact)[exact != 0] / exact[exact != 0]) ** 2
        assert 0.016 < np.sqrt(of_each.mean()) < 0.018
        assert 0.020 < relative_error(rounded, exact) < 0.024


def test_nvfp4_through_e4m3_is_split_over_ranks_in_whole_blocks_since_what_is_rounded_stays_together():
    exact = jitted("nvfp4")(experts_of(4, 2, 128, 192))
    assert expert_split._uneven(exact, "intermediate", 2) is None
    assert expert_split._uneven(jaxmoe.through_e4m3(exact), "intermediate", 2) == ("w_gate", 128)
    # MXFP4 is exact however it is cut.
    assert (
        expert_split._uneven(jaxmoe.through_e4m3(jitted("mxfp4")(experts_of(4, 2, 128, 192))), "intermediate", 2)
        is None
    )


def test_nvfp4_has_the_same_bits_with_and_without_jit():
    """With seed 9 the two once differed, by a scale."""
    for seed in range(60):
        matrices = np.random.default_rng(seed).normal(size=(2, 64, 64)) * 0.02
        wide = jaxmoe.Experts(*[jnp.asarray(matrices, jnp.float16)] * 3)
        one, other = jaxmoe.quantize(wide, "nvfp4"), jitted("nvfp4")(wide)
        assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), one, other))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("function", [jaxmoe.through_e4m3, jaxmoe.fits_e4m3])
def test_a_matrix_in_the_place_of_experts_is_an_error_that_says_what_to_pass(function):
    matrix = jaxmoe.quantize(jaxmoe.Experts.init(jax.random.key(0), 2, 128, 128), "mxfp4").w_gate
    with pytest.raises(TypeError, match=r"experts is a MXFP4; it must be jaxmoe\.Experts"):
        function(matrix)
