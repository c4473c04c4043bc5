"""Layers with weights in 8 bits on the host executor: how rows are rounded, what they are multiplied to, and in what
order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import native
from jaxmoe.block_scaled import BlockScaled
from jaxmoe.quantization import quantize_rows
from jaxmoe.testing import make_inputs, relative_error
from tests import eight_bit_model as model

schedule, executor = native.schedule(), native.executor()
KernelPlan = jaxmoe.KernelPlan
BLOCKS = ("128x128", "channel", "expert")
PLAN = KernelPlan(2, 1, 6, 4)
PLANS = (
    KernelPlan(1, 0, 1, 1),
    KernelPlan(1, 40, 41, 7, keep_tokens=True),
    KernelPlan(3, 2, 2**31 - 1, 16),
    KernelPlan(2, 1, 4, 3, keep_tokens=True),
)
SIZES: dict[str, Any] = {"tokens": 24, "hidden": 256, "intermediate": 384, "num_experts": 8, "top_k": 2}
ACTIVATIONS = {"silu": (0, model.silu), "relu": (3, model.relu)}


def inputs(seed: int, *, block: str = "128x128", exact: bool = True, **options: Any) -> Any:
    """Arguments of a layer in 8 bits; where they are exact its scales and routing weights are powers of two."""
    made = make_inputs(seed, **{**SIZES, **options})
    if not exact:
        return made._replace(experts=jaxmoe.quantize(made.experts, block))
    weights = np.random.default_rng(seed).choice([0.25, 0.5, 1.0], made.topk_ids.shape).astype(np.float32)
    return made._replace(topk_weights=jnp.asarray(weights), experts=model.quantized(made.experts, block))


def expected(arguments: Any, activation: str = "relu", **options: Any) -> np.ndarray:
    x, ids, weights = map(np.asarray, arguments[:3])
    return model.layer(x, ids, weights, arguments.experts, activation=ACTIVATIONS[activation][1], **options)


def operands_of(arguments: Any) -> dict[str, Any]:
    experts: dict[str, Any] = {name: array for name, array in vars(arguments.experts).items() if array is not None}
    for name, matrix in list(experts.items()):
        if isinstance(matrix, BlockScaled):
            experts[name], experts[f"{name}_scales"] = matrix.values, matrix.scales
    return {"x": arguments.x, "topk_ids": arguments.topk_ids, "topk_weights": arguments.topk_weights, **experts}


def run(
    arguments: Any,
    *,
    ranks: int = 1,
    plan: KernelPlan = PLAN,
    activation: str = "relu",
    power_of_two: bool = False,
    accumulation: int = 0,
    rounds_rows: int = 1,
    weight_slots: int = 0,
    changes: dict[str, Any] | None = None,
    results: tuple[str, ...] = ("y",),
    tile: tuple[int, int, int] | None = None,
) -> np.ndarray:
    """The output of compiled code, for `ranks` virtual devices that share tokens and experts.

    Args:
      arguments: of the layer; its experts are in 8 bits.
      ranks: devices.
      plan: of the forward pass.
      activation: by name.
      power_of_two: whether scales of rows are.
      accumulation: 1 for fast sums.
      rounds_rows: 1 where rows are rounded.
      weight_slots: of experts that are decoded ahead.
      changes: operands to replace, or with None to leave out.
      results: names of the results; `y` comes last.
      tile: rows, columns of h and of answers of a tile; None for those of a CPU.
    """
    native.targets("cpu")
    operands = {name: array for name, array in (operands_of(arguments) | (changes or {})).items() if array is not None}
    x, experts = arguments.x, arguments.experts
    shape = schedule.Shape(
        ranks,
        len(x) // ranks,
        experts.hidden,
        experts.intermediate,
        experts.num_experts,
        arguments.topk_ids.shape[1],
        1 if experts.w_up is None else 2,
    )
    carried = schedule.schedule_for(shape, "cpu", plan, 0, True, weight_slots)
    numbers = [*tile, *carried.numbers[3:]] if tile else carried.numbers
    order = schedule.ARRAY_NAMES
    given = [name for name in order if name in operands]
    attributes = {
        "version": native.version(),
        "ranks": np.int32(ranks),
        "num_experts": np.int32(experts.num_experts),
        "arrays": np.int32(sum(1 << order.index(name) for name in ("place", *given, *results))),
        "activation": np.int32(ACTIVATIONS[activation][0]),
        **{name: np.float32(0) for name in ("limit", "alpha", "up_offset")},
        "rounds_rows": np.int32(rounds_rows),
        "power_of_two_scales": np.int32(power_of_two),
        "accumulation": np.int32(accumulation),
        "gate_up_layout": np.int32(0),
        "schedule": np.array(numbers, np.int32),
        "timeout_seconds": np.float32(60),
        "groups": np.arange(ranks),
        "devices": np.array([-1]),
    }

    def of_rank(*arrays: jax.Array) -> Any:
        tokens = arrays[given.index("x")]
        types = [jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)] * len(results)
        place = jnp.stack([jax.lax.axis_index("expert"), jnp.int32(0)])
        return jax.ffi.ffi_call("jaxmoe_forward", types)(place, *arrays, **attributes)

    mesh = Mesh(np.array(jax.devices()[:ranks]), ("expert",))
    split = jax.shard_map(of_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    return np.asarray(jax.jit(split)(*(operands[name] for name in given))[-1])


# --- numbers of 8 bits and rows of them -------------------------------------------------------------------------------


def test_all_256_numbers_of_8_bits_are_those_of_float8_e4m3fn():
    codes = np.arange(256, dtype=np.uint8)
    found = executor.load_8_bits(codes)
    np.testing.assert_array_equal(found, codes.view(model.E4M3).astype(np.float32))
    numbers = ~np.isnan(found)
    np.testing.assert_array_equal(executor.store_8_bits(found)[numbers], codes[numbers])


def test_numbers_are_rounded_to_8_bits_as_jax_rounds_them():
    values = np.arange(256, dtype=np.uint8).view(model.E4M3).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    random = rng.standard_normal(100_000).astype(np.float32) * np.exp2(rng.uniform(-20, 8, 100_000)).astype(np.float32)
    numbers = np.concatenate(
        [values, ties, *near, random, np.array([464, -464, 449, 2.0**-149, -(2.0**-140), -0.0], np.float32)]
    )
    numbers = numbers[np.abs(numbers) <= 464]
    found = executor.store_8_bits(numbers).view(model.E4M3)
    wanted = jnp.asarray(numbers).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(found.view(np.uint8), np.asarray(wanted).view(np.uint8))


def test_what_is_too_large_for_8_bits_becomes_the_largest_and_nan_stays():
    numbers = np.array([464.1, 1e30, np.inf, -480, -np.inf, np.nan, -np.nan], np.float32)
    found = executor.load_8_bits(executor.store_8_bits(numbers))
    np.testing.assert_array_equal(found, np.array([448, 448, 448, -448, -448, np.nan, np.nan], np.float32))


def rows_of_all_sizes() -> np.ndarray:
    """[rows, 512] float32: four scales in each row."""
    rng = np.random.default_rng(1)
    sizes = np.exp2(rng.uniform(-148, 120, (200, 4, 1)))
    rows = (rng.standard_normal((200, 4, 128)) * sizes).astype(np.float32)
    rows[0] = 0
    rows[1] = 2.0**-149
    rows[2] = 2.0**-100
    rows[3] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    rows[4] = np.finfo(np.float32).max
    rows[5, :, ::2] = 448 * 2.0**3  # a scale of a power of two
    rows[6] = np.nextafter(np.float32(448), np.float32(1000))
    rows[7, 1, 5], rows[7, 2, 127], rows[7, 3, 0] = np.nan, np.inf, -np.inf
    rows[8:20] *= np.where(np.arange(128) == 77, 30, 1)  # an outlier
    return rows.reshape(200, 512)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_are_rounded_128_columns_at_a_time_bit_for_bit(power_of_two):
    rows = rows_of_all_sizes()
    found, scales = executor.round_rows(rows, power_of_two)
    wanted = model.rounded(rows, power_of_two)
    np.testing.assert_array_equal(scales, wanted.scales)
    np.testing.assert_array_equal(executor.load_8_bits(found), wanted.values)
    assert np.isnan(scales[7, 1:]).all()
    assert np.isfinite(scales[7, 0])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_python_rounds_rows_to_the_same_bits(dtype, power_of_two):
    rows = jnp.asarray(rows_of_all_sizes()).astype(dtype)
    found, scales = executor.round_rows(np.asarray(rows.astype(jnp.float32)), power_of_two)
    values, wanted = jax.jit(quantize_rows, static_argnums=1)(rows, power_of_two)
    np.testing.assert_array_equal(scales, wanted)
    np.testing.assert_array_equal(executor.load_8_bits(found), np.asarray(values).astype(np.float32))


GIVEN = (1.0, 0.25, 3e-3, 2.0**-100, 2.0**100, 1.7e28)
NO_SCALES = (0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 1e-40, 2.0**-101, 2.0**101)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_python_rounds_rows_with_a_given_scale_to_the_same_bits(dtype, given):
    rows = rows_of_all_sizes()
    sizes = given * np.exp2(np.linspace(-16, 16, 100))[:, None]
    rows[100:] = np.random.default_rng(2).standard_normal((100, 512)) * np.minimum(sizes, 1e36)
    rows = jnp.asarray(rows).astype(dtype)
    found, scales = executor.round_rows(np.asarray(rows.astype(jnp.float32)), False, given)
    for function in (quantize_rows, jax.jit(quantize_rows, static_argnums=1)):
        values, wanted = function(rows, False, jnp.float32(given))
        np.testing.assert_array_equal(scales, wanted)
        np.testing.assert_array_equal(executor.load_8_bits(found), np.asarray(values).astype(np.float32))
    with np.errstate(over="ignore"):
        of_model = model.rounded(np.asarray(rows.astype(jnp.float32)), given=given)
    np.testing.assert_array_equal(scales, of_model.scales)
    np.testing.assert_array_equal(executor.load_8_bits(found), of_model.values)
    finite = np.isfinite(np.asarray(rows, np.float32)).reshape(200, 4, 128).all(-1)
    np.testing.assert_array_equal(scales, np.where(finite, np.float32(given), np.float32(np.nan)))


@pytest.mark.parametrize("given", NO_SCALES)
def test_with_what_can_be_no_scale_every_number_is_nan(given):
    rows = rows_of_all_sizes()
    found, scales = executor.round_rows(rows, False, given)
    values, wanted = jax.jit(quantize_rows, static_argnums=1)(jnp.asarray(rows), False, jnp.float32(given))
    for each in (executor.load_8_bits(found), scales, np.asarray(values).astype(np.float32), wanted):
        assert np.isnan(each).all()


def test_a_power_of_two_is_the_least_that_holds_the_largest():
    rows = rows_of_all_sizes()
    largest = np.abs(rows.reshape(200, 4, 128)).max(-1)
    scales = executor.round_rows(rows, True)[1]
    fits = np.isfinite(scales) & (largest >= 2.0**-100)
    scales, largest = scales[fits].astype(np.float64), largest[fits]
    assert (np.frexp(scales)[0] == 0.5).all()
    assert (largest <= 448 * scales).all()
    assert (largest > 448 * scales / 2).all()


# --- the layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("gated", "biases"), [(True, False), (True, True), (False, False), (False, True)])
def test_a_layer_has_the_bits_of_the_model(gated, biases, block, dtype):
    arguments = inputs(1, block=block, gated=gated, biases=biases, dtype=dtype)
    np.testing.assert_array_equal(run(arguments), expected(arguments))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("routing", ["zipf", "one-hot", "unused-slots", "all-unused", "repeated"])
def test_a_layer_has_the_bits_of_the_model_on_any_number_of_ranks(ranks, routing, power_of_two):
    arguments = inputs(2, routing=routing, biases=True, dtype=jnp.bfloat16)
    found = run(arguments, ranks=ranks, power_of_two=power_of_two)
    np.testing.assert_array_equal(found, expected(arguments, power_of_two=power_of_two))


def given_scales(tokens: float, h: float, ranks: int = 1) -> dict[str, Any]:
    return {"row_scales": jnp.asarray([tokens, h] * ranks, jnp.float32)}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("given", [(0.0078125, 0.03125), (0.00390625, 0.001953125)])
def test_a_layer_with_given_scales_has_the_bits_of_the_model(given, gated, ranks):
    arguments = inputs(14, routing="zipf", biases=True, gated=gated, dtype=jnp.bfloat16)
    found = run(arguments, ranks=ranks, changes=given_scales(given[0], given[1], ranks))
    np.testing.assert_array_equal(found, expected(arguments, given=given))
    assert (found != run(arguments, ranks=ranks)).any()


def test_every_plan_gives_the_same_bits_with_given_scales():
    arguments = inputs(15, routing="zipf", biases=True, exact=False, tokens=64)
    found = [
        run(arguments, ranks=4, plan=plan, activation="silu", changes=given_scales(5 / 448, 9 / 448, 4))
        for plan in PLANS
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert relative_error(found[0], expected(arguments, "silu", given=(5 / 448, 9 / 448))) < 1e-6


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_scales_of_any_number_and_silu_change_the_output_by_rounding_alone(block, gated):
    arguments = inputs(3, block=block, gated=gated, biases=True, exact=False)
    found = run(arguments, ranks=2, activation="silu")
    assert relative_error(found, expected(arguments, "silu")) < 1e-6


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_every_plan_gives_the_same_bits(gated, ranks):
    arguments = inputs(4, routing="zipf", biases=True, exact=False, gated=gated, tokens=64)
    found = [run(arguments, ranks=ranks, plan=plan, activation="silu") for plan in PLANS]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert relative_error(found[0], expected(arguments, "silu")) < 1e-6


def test_tiles_of_several_groups_of_columns_give_the_same_bits():
    arguments = inputs(5, routing="zipf", exact=False)
    first = run(arguments)
    for tile in ((16, 256, 64), (8, 384, 256), (3, 128, 40)):
        np.testing.assert_array_equal(run(arguments, tile=tile), first)


def identity_experts(block: str, hidden: int = 256, num_experts: int = 4) -> jaxmoe.Experts:
    """Plain experts that return what is positive."""
    eye = np.broadcast_to(np.eye(hidden, dtype=np.float32), (num_experts, hidden, hidden))
    return model.quantized(jaxmoe.Experts(jnp.asarray(eye), None, jnp.asarray(eye)), block)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_identity_experts_return_numbers_that_8_bits_hold_as_they_are(block, power_of_two):
    rng = np.random.default_rng(6)
    numbers = np.arange(0x7F, dtype=np.uint8).view(model.E4M3).astype(np.float32)  # all that are not negative
    x = rng.choice(numbers, (20, 256))
    x[:, ::128] = 448
    x *= np.exp2(rng.integers(-30, 30, (20, 1)))
    arguments = inputs(6)._replace(
        x=jnp.asarray(x, jnp.float32),
        topk_ids=jnp.asarray(rng.integers(0, 4, (20, 1)).astype(np.int32)),
        topk_weights=jnp.ones((20, 1)),
        experts=identity_experts(block),
    )
    np.testing.assert_array_equal(run(arguments, power_of_two=power_of_two), x)


def positive(seed: int, hidden: int, intermediate: int, block: str, outliers: float = 1.0) -> Any:
    """One expert, plain, of which everything is positive; a column in 40 of x is larger by `outliers`."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1, shape).astype(np.float32))

    x = numbers(3, hidden) * jnp.where(jnp.arange(hidden) % 40 == 7, outliers, 1.0)
    experts = jaxmoe.Experts(numbers(1, hidden, intermediate), None, numbers(1, intermediate, hidden))
    arguments = inputs(0, tokens=3, top_k=1)
    return arguments._replace(
        x=x,
        topk_ids=jnp.zeros((3, 1), jnp.int32),
        topk_weights=jnp.ones((3, 1)),
        experts=jaxmoe.quantize(experts, block),
    )


@pytest.mark.parametrize("outliers", [1.0, 30.0])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(14336, 128), (128, 14336)])
def test_long_sums_of_one_sign_are_those_of_float64(hidden, intermediate, block, outliers):
    arguments = positive(7, hidden, intermediate, block, outliers)
    found, exact = run(arguments), expected(arguments, multiply=model.in_float64)
    assert np.abs(found / exact - 1).max() < 1e-5


# --- what is no number, and what is none ------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_finite_makes_its_own_token_nan_and_no_other(ranks, odd):
    arguments = inputs(8, routing="unused-slots", dtype=jnp.bfloat16)
    clean = run(arguments, ranks=ranks)
    ids = np.asarray(arguments.topk_ids)
    used = (ids >= 0).any(1)
    spoiled = np.zeros(len(ids), bool)
    spoiled[[3, 10, np.argmin(used)]] = True
    assert not used[spoiled].all()
    x = np.asarray(arguments.x).copy()
    x[spoiled, 200] = odd
    found = run(arguments._replace(x=jnp.asarray(x)), ranks=ranks)
    np.testing.assert_array_equal(found[~spoiled], clean[~spoiled])
    assert np.isnan(found[spoiled & used].astype(np.float32)).all()
    assert (found[spoiled & ~used] == 0).all(), "nobody asked for them"


def test_an_h_that_is_not_finite_makes_its_token_nan():
    arguments = inputs(9, gated=True)
    x = np.asarray(arguments.x).copy()
    x[5] = 1e25  # gate times up is beyond float32
    found = run(arguments._replace(x=jnp.asarray(x)))
    assert np.isnan(found[5]).all()
    np.testing.assert_array_equal(np.delete(found, 5, 0), np.delete(run(arguments), 5, 0))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_zeros_and_of_next_to_nothing_give_zeros_or_biases(power_of_two):
    arguments = inputs(10, biases=True)
    x = np.asarray(arguments.x).copy()
    x[0], x[1], x[2, :128], x[3] = 0, 2.0**-140, 0, 2.0**-126
    arguments = arguments._replace(x=jnp.asarray(x))
    found = run(arguments, power_of_two=power_of_two)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected(arguments, power_of_two=power_of_two))


def test_a_nan_among_weights_or_scales_is_not_lost():
    arguments = inputs(11, routing="one-hot", num_experts=2)
    down = arguments.experts.w_down
    spoiled = BlockScaled(down.values, down.scales.at[1, 0, 2].set(jnp.nan))
    found = run(arguments, changes={"w_down_scales": spoiled.scales})
    assert np.isnan(found[:, :128]).all()
    assert np.isfinite(found[:, 128:]).all()
    values = np.asarray(down.values).copy()
    values.view(np.uint8)[1, 200, 3] = 0xFF
    found = run(arguments, changes={"w_down": jnp.asarray(values)})
    assert np.isnan(found[:, 200]).all()
    assert np.isnan(found).sum() == len(found)


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "scales left out": ({"w_down_scales": None}, "a forward pass without w_down_scales"),
    "no scales": ({f"w_{name}_scales": None for name in ("gate", "up", "down")}, "shapes do not go together"),
    "scales of another size": ({"w_up_scales": jnp.ones((8, 3, 3))}, "shapes do not go together"),
    "scales of another type": ({"w_up_scales": jnp.ones((8, 3, 2), jnp.bfloat16)}, "and the scales float32"),
    "one scale of rows": ({"row_scales": jnp.ones(1)}, "shapes do not go together"),
    "scales of rows of another type": ({"row_scales": jnp.ones(2, jnp.bfloat16)}, "the scales float32, also of rows"),
    "scales of rows beside wide weights": (
        {f"w_{name}_scales": None for name in ("gate", "up", "down")}
        | {f"w_{name}": jnp.zeros((8, 256, 384)) for name in ("gate", "up")}
        | {"w_down": jnp.zeros((8, 384, 256)), "row_scales": jnp.ones(2)},
        "a forward pass with row_scales",
    ),
    "wide weights": ({"w_gate": jnp.zeros((8, 384, 256))}, "weights with scales float8_e4m3fn"),
    "the gradient of an output": ({"dy": jnp.zeros((24, 256))}, "a backward pass without dx.* with y, dy"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_arrays_that_make_no_layer_in_8_bits_are_refused(wrong):
    changes, told = WRONG[wrong]
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        run(inputs(12), changes=changes)


def test_fast_sums_are_refused_where_scales_change_within_them():
    given = {"row_scales": jnp.full(2, 1 / 32)}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"accumulation=2\. It must be 0 for promoted sums, 1 for"):
        run(inputs(12), accumulation=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"accumulation=1\. Sums by the tensor cores .* row_scales"):
        run(inputs(12), accumulation=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"accumulation=1\. Sums .* a scale for each output channel"):
        run(inputs(12), accumulation=1, changes=given)


def test_rows_are_rounded_only_beside_weights_in_8_bits_that_nothing_decodes_ahead():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rounds_rows=2\. It must be 0 or 1"):
        run(inputs(12), rounds_rows=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rounds_rows=0, weights in 8 bits and no weight_slots"):
        run(inputs(12), rounds_rows=0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rounds_rows=1\. Rows in 8 bits .* no weight_slots"):
        run(inputs(12), weight_slots=2)


def test_weights_in_4_bits_beside_rounded_rows_are_decoded_ahead_or_have_scales_that_are_powers_of_two():
    def of_4_bits(format_: str) -> dict[str, Any]:
        experts = jaxmoe.quantize(make_inputs(12, **SIZES).experts, format_)
        operands: dict[str, Any] = {}
        for name in ("w_gate", "w_up", "w_down"):
            matrix = getattr(experts, name)
            factors = jnp.ones(experts.num_experts) if matrix.factors is None else matrix.factors
            operands |= {name: matrix.packed, f"{name}_group_scales": matrix.scales}
            operands[f"{name}_scales"] = factors[:, None, None]
        return operands

    assert np.isfinite(run(inputs(12), changes=of_4_bits("mxfp4"))).all()
    assert np.isfinite(run(inputs(12), changes=of_4_bits("nvfp4"), weight_slots=2)).all()
    told = r"rounds_rows=1\. Weights in 4 bits beside rows in 8 must have weight_slots, or scales .* powers of two"
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        run(inputs(12), changes=of_4_bits("nvfp4"))


def test_gate_and_up_of_weights_in_8_bits_are_not_kept():
    with pytest.raises(jax.errors.JaxRuntimeError, match="a forward pass with gate_up"):
        run(inputs(12), results=("gate_up", "y"))


def test_tokens_of_float64_are_refused_with_the_types_that_go():
    with jax.enable_x64(True):
        arguments = inputs(12, dtype=jnp.float64)
        told = "x is float64; with weights that have scales it must be float32, bfloat16 or float16"
        with pytest.raises(jax.errors.JaxRuntimeError, match=told):
            run(arguments)


def test_widths_that_are_no_multiple_of_128_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="shapes do not go together"):
        run(inputs(12, hidden=192))


def test_tiles_that_part_the_columns_of_a_scale_are_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"h_columns=64 of a tile; .* must be a multiple of 128"):
        run(inputs(12), tile=(16, 64, 64))


# --- layers back to back ----------------------------------------------------------------------------------------------

RANKS, LAUNCHES = 4, 4
SHAPE = schedule.Shape(RANKS, 10, 128, 256, 8, 3)


def plan_of(tile: tuple[int, int, int], *numbers: int, narrow_rows: int, keep_tokens: int) -> Any:
    return schedule.Schedule(schedule.TileSizes(*tile), *numbers, narrow_rows=narrow_rows, keep_tokens=keep_tokens)


SCHEDULES = {
    "no lag, ring of one tile": plan_of((4, 128, 64), 1, 0, 1, 1, 4, 1, narrow_rows=0, keep_tokens=0),
    "small ring": plan_of((4, 128, 8), 2, 1, 4, 2, 3, 4, narrow_rows=0, keep_tokens=1),
    "long lag": plan_of((4, 256, 24), 3, 4, 15, 3, 2, 3, narrow_rows=3, keep_tokens=0),
    "narrow tiles, small ring": plan_of((4, 128, 16), 2, 1, 4, 2, 3, 4, narrow_rows=2, keep_tokens=1),
    "every last tile is narrow": plan_of((8, 128, 50), 8, 1, 256, 2, 8, 2, narrow_rows=8, keep_tokens=1),
}


@functools.cache
def layers() -> tuple[Any, jaxmoe.Experts]:
    """Four layers with another routing each, and experts."""
    rng = np.random.default_rng(13)
    ids = rng.integers(-1, SHAPE.num_experts, (LAUNCHES, RANKS, SHAPE.tokens, SHAPE.top_k)).astype(np.int32)
    ids[1, -1] = -1
    ids[2] = np.where(ids[2] >= 0, 5, -1)  # one expert gets everything
    x = rng.standard_normal((LAUNCHES, RANKS, SHAPE.tokens, SHAPE.hidden)).astype(np.float32)
    weights = rng.uniform(-1, 1, ids.shape).astype(np.float32)
    experts = make_inputs(13, **{**SIZES, "hidden": SHAPE.hidden, "intermediate": SHAPE.intermediate}).experts
    return (x, ids, weights), jaxmoe.quantize(experts)


def back_to_back(plan: Any, **options: Any) -> np.ndarray:
    arrays, experts = layers()
    matrices: Any = (experts.w_gate, experts.w_up, experts.w_down)
    values = [np.asarray(matrix.values).view(np.uint8) for matrix in matrices]
    scales = [np.asarray(matrix.scales) for matrix in matrices]
    weights = schedule.Format("float8_e4m3fn", 128, 128)
    return executor.run_passes(SHAPE, [plan], *arrays, *values, weights=weights, scales=scales, **options)["y"]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_layers_back_to_back_are_those_of_the_model(power_of_two):
    (x, ids, weights), experts = layers()
    tokens = LAUNCHES * RANKS * SHAPE.tokens
    flat = (x.reshape(tokens, -1), ids.reshape(tokens, -1), weights.reshape(tokens, -1))
    wanted = model.layer(*flat, experts, activation=model.silu, power_of_two=power_of_two)
    found = back_to_back(SCHEDULES["small ring"], power_of_two_scales=power_of_two)
    assert relative_error(found.reshape(tokens, -1), wanted) < 1e-6


@pytest.mark.parametrize("seed", range(3 * len(SCHEDULES)))
def test_delays_at_every_signal_change_no_bit(seed):
    delays = executor.Disturbance(delay_seed=seed, most_delay_us=[20, 200][seed % 2])
    found = back_to_back(list(SCHEDULES.values())[seed % len(SCHEDULES)], disturbance=delays)
    np.testing.assert_array_equal(found, back_to_back(SCHEDULES["small ring"]))


@pytest.mark.parametrize("site", ["gate_up", "down"])
def test_a_wait_that_a_rank_leaves_out_spoils_the_output(site):
    plan = plan_of((4, 128, 64), 1, 0, 2, 3, 2, 6, narrow_rows=0, keep_tokens=0)
    right = back_to_back(plan)

    def is_spoiled(seed: int) -> bool:
        fault = executor.Disturbance(
            delay_seed=seed, most_delay_us=50, rank=1, skipped_site=schedule.Site.__members__[site]
        )
        return not np.array_equal(back_to_back(plan, disturbance=fault), right)

    assert any(is_spoiled(seed) for seed in range(10))


def test_a_backward_pass_of_weights_with_scales_is_refused():
    plan = schedule.Schedule(
        schedule.TileSizes(4, 128, 64), 1, 0, 8, 1, 4, 1, narrow_rows=0, keep_tokens=0, segment_tiles=2
    )
    with pytest.raises(ValueError, match="with scales there are forward passes only"):
        back_to_back(plan, dy=layers()[0][0])
