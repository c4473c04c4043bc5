"""The behaviours of every implementation of `moe_layer` that multiplies 8 bits. A test class inherits `Fp8Suite`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.block_scaled import BLOCK_KINDS
from jaxmoe.options import Arguments
from jaxmoe.testing import ROUTING_KINDS, identity_experts, relative_error, tolerance
from tests.layer_calls import EXPERTS, TOKENS, TOP_K, cotangent, layer, mesh_of
from tests.quantized_layer import (
    HIDDEN,
    QuantizedChecks,
    assert_as_exact,
    jitted_dense,
    truth_of,
    without_biases,
)

# Of the sums in the longest dimension that a model has.
LONGEST = 14336
# Fraction bits that Hopper's tensor cores keep of sums of 8-bit products, aligned to the largest of them.
FRACTION_BITS = 13


def multiply_unpromoted(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """A product of matrices as tensor cores sum 8-bit products where no one promotes the sums.

    Products and the sum so far are cut to `FRACTION_BITS` below the largest of them, 32 products at a time.
    """
    sums = np.zeros((len(rows), matrix.shape[1]))
    for start in range(0, rows.shape[1], 32):
        products = rows[:, start : start + 32, None] * matrix[None, start : start + 32]
        largest = np.maximum(np.abs(products).max(1), np.abs(sums))
        unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - FRACTION_BITS)
        sums = (np.trunc(products / unit[:, None]).sum(1) + np.trunc(sums / unit)) * unit
    return sums


def in_8_bits(arguments: Arguments, block: str = "128x128", scale_dtype: Any = jnp.float32) -> Arguments:
    return arguments._replace(experts=jitted_quantize(block, scale_dtype)(arguments.experts))


def with_given_scales(arguments: Arguments, tokens: Any = 5 / 448, h: Any = 9 / 448) -> Arguments:
    """Experts that bring the scales of tokens and of h along, by default such that few of either are too large."""
    return arguments._replace(experts=jitted_given_scales(arguments.experts, jnp.float32(tokens), jnp.float32(h)))


jitted_given_scales = jax.jit(jaxmoe.with_input_scales)


def numbers_in_8_bits(seed: int) -> np.ndarray:
    """`[tokens, hidden]` numbers that `float8_e4m3fn` has."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 127, (TOKENS, HIDDEN)).astype(np.uint8) | (rng.integers(0, 2, (TOKENS, HIDDEN)) << 7)
    return np.array(jax.lax.bitcast_convert_type(jnp.asarray(codes, jnp.uint8), jnp.float8_e4m3fn), np.float32)


@functools.cache
def jitted_quantize(block: str, scale_dtype: Any) -> Any:
    return jax.jit(functools.partial(jaxmoe.quantize, block=block, scale_dtype=scale_dtype))


def positive_inputs(hidden: int, intermediate: int, dtype: Any, block: str = "128x128") -> Arguments:
    """Rows whose sums have one sign, which is where sums that are cut are off by most."""
    rng = np.random.default_rng(0)

    def positive(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1.5, shape), dtype)

    experts = jaxmoe.Experts(positive(2, hidden, intermediate) / hidden, None, positive(2, intermediate, hidden))
    ids = jnp.asarray(np.arange(8)[:, None] % 2, jnp.int32)
    return in_8_bits(Arguments(positive(8, hidden), ids, jnp.ones((8, 1)), experts), block)


def allowed_for_fast_sums(arguments: Arguments, truth: np.ndarray, activation: Any = "silu") -> float:
    """Twice the error that the dtype of x makes, and tensor cores beside it."""
    cut = truth_of(arguments, "fp8-static", activation, multiply_unpromoted)
    dtype = arguments.x.dtype
    rough = jitted_dense(activation, "fp8-static", None if dtype == jnp.float32 else dtype)(arguments)
    return tolerance(rough, truth, dtype) + 2 * relative_error(cut, truth)


class Fp8Suite(QuantizedChecks):
    """Inherit and set `implementation`."""

    # --- against the truth ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_sums_of_8_bits_are_as_exact_as_float32_for_every_routing(self, routing):
        arguments = in_8_bits(self.inputs(1, biases=True, routing=routing))
        assert_as_exact(self.run(arguments), arguments)

    # Other tests call on one rank, over data x expert, and in shard_map.
    @pytest.mark.parametrize("placement", ["all devices", "data x expert, Explicit", "two expert axes"])
    def test_sums_of_8_bits_are_as_exact_as_float32_wherever_it_is_called(self, placement):
        arguments = in_8_bits(self.inputs(2, biases=True, routing="zipf", token_valid=True))
        assert_as_exact(self.run(arguments, placement), arguments)

    # A kernel's warpgroups share the steps of a tile of 64 rows at most, each of which is 128 along the depth.
    @pytest.mark.parametrize("rows", [1, 17, 64, 65])
    @pytest.mark.parametrize(("hidden", "intermediate"), [(128, 384), (256, 640), (896, 128)])
    def test_tiles_of_few_rows_are_as_exact_however_many_steps_they_have(self, hidden, intermediate, rows):
        sizes = {"hidden": hidden, "intermediate": intermediate, "tokens": rows, "num_experts": 2, "top_k": 2}
        arguments = in_8_bits(self.inputs(22, **sizes))
        assert_as_exact(self.small_run(arguments), arguments)

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_decoded_experts_are_as_exact_as_wide_ones_for_every_routing(self, routing):
        arguments = in_8_bits(self.inputs(21, biases=True, routing=routing))
        assert_as_exact(self.run(arguments, precision="w8a16"), arguments, "w8a16")

    # Compiled code has float32 scales, whatever they were.
    @pytest.mark.parametrize(
        ("kind", "scale_dtype", "precision"),
        [
            *((kind, jnp.float32, "fp8") for kind in BLOCK_KINDS),
            ("128x128", jnp.float8_e8m0fnu, "fp8"),
            ("channel", jnp.float32, "w8a16"),
            ("expert", jnp.float8_e8m0fnu, "w8a16"),
        ],
    )
    def test_weights_may_have_scales_of_every_kind(self, kind, scale_dtype, precision):
        arguments = in_8_bits(self.inputs(3, gated=False, num_experts=3), kind, scale_dtype)
        y = self.small_run(arguments, activation="relu", precision=precision)
        assert_as_exact(y, arguments, precision, activation="relu")

    @pytest.mark.parametrize("precision", ["fp8", "fp8-e8m0", "w8a16"])
    def test_tokens_and_h_are_rounded_as_the_precision_says(self, precision):
        arguments = in_8_bits(self.inputs(4))
        y = self.small_run(arguments, precision=precision)
        assert_as_exact(y, arguments, precision)
        for other in {"fp8", "fp8-e8m0", "w8a16"} - {precision}:
            assert relative_error(y, truth_of(arguments, other)) > 0.01

    def test_in_low_precision_it_costs_at_most_twice_the_error_of_the_same_maths(self):
        for dtype in self.dtypes:
            arguments = in_8_bits(self.inputs(5, dtype=dtype, biases=True, routing="zipf"))
            y = self.small_run(arguments)
            assert y.dtype == dtype
            assert_as_exact(y, arguments)

    def test_channels_that_are_30_times_the_others_cost_no_exactness(self):
        arguments = self.inputs(1, biases=True)
        channels = np.random.default_rng(1).choice(HIDDEN, 12, replace=False)
        arguments = in_8_bits(arguments._replace(x=arguments.x.at[:, channels].multiply(30)))
        assert_as_exact(self.run(arguments), arguments)

    # --- closed forms -----------------------------------------------------------------------------------------------

    def test_identity_experts_return_what_8_bits_can_hold_times_its_weights(self):
        x = numbers_in_8_bits(0)
        x[:, ::128], x[:, 1::128] = 448, -448  # so that scales are 1, of tokens and of either sign of h
        arguments = self.inputs(6)
        experts = identity_experts(EXPERTS, HIDDEN, self.dtype)
        weights = jnp.full((TOKENS, TOP_K), 1.0, jnp.float32).at[:, 2].set(2.0)
        arguments = arguments._replace(x=jnp.asarray(x, self.dtype), topk_weights=weights, experts=experts)
        y = self.run(in_8_bits(arguments, scale_dtype=jnp.float8_e8m0fnu), activation="relu")
        np.testing.assert_array_equal(y, 4 * arguments.x)

    @pytest.mark.parametrize(("hidden", "intermediate"), [(LONGEST, 128), (128, LONGEST)])
    def test_long_sums_of_one_sign_lose_nothing_and_sums_that_are_not_promoted_would_fail(self, hidden, intermediate):
        arguments = positive_inputs(hidden, intermediate, self.dtype)
        truth = truth_of(arguments, activation="relu")
        y = self.small_run(arguments, activation="relu")
        assert_as_exact(y, arguments, activation="relu", truth=truth)
        unpromoted = truth_of(arguments, activation="relu", multiply=multiply_unpromoted)
        with pytest.raises(AssertionError, match="above"):
            assert_as_exact(unpromoted, arguments, activation="relu", truth=truth)

    # --- edges ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("given_scales", [False, True])
    def test_nan_and_infinity_stay_with_their_tokens(self, given_scales):
        clean = in_8_bits(self.inputs(7, biases=True))
        clean = with_given_scales(clean) if given_scales else clean
        x = clean.x.at[5, 3].set(jnp.nan).at[6, 200].set(jnp.inf).at[7, 0].set(-jnp.inf)
        y, expected = (np.asarray(self.run(clean._replace(x=tokens)), np.float32) for tokens in (x, clean.x))
        assert np.isnan(y[5:8]).all()
        others = np.delete(np.arange(TOKENS), [5, 6, 7])
        np.testing.assert_array_equal(y[others], expected[others])
        assert np.isfinite(expected).all()

    def test_tokens_of_zeros_and_of_less_than_the_smallest_scale_are_numbers(self):
        arguments = in_8_bits(self.inputs(8, biases=True))
        arguments = arguments._replace(experts=without_biases(arguments.experts))
        x = arguments.x.at[3].set(0).at[4].set(1e-38).at[5, :128].set(0)
        y = np.asarray(self.run(arguments._replace(x=x)), np.float32)
        assert not y[3:5].any()
        assert np.isfinite(y).all()
        assert y[5].any()
        assert_as_exact(y, arguments._replace(x=x))

    def test_experts_of_zeros_answer_zero(self):
        arguments = self.inputs(9, biases=True)
        arguments = in_8_bits(arguments._replace(experts=jax.tree.map(jnp.zeros_like, arguments.experts)))
        assert not np.asarray(self.run(arguments)).any()

    def test_unused_slots_and_masked_tokens_take_no_part(self):
        arguments = in_8_bits(self.inputs(10, biases=True, routing="unused-slots", token_valid=True))
        masked, unused = ~np.asarray(arguments.token_valid), np.asarray(arguments.topk_ids) < 0
        assert np.isnan(np.asarray(arguments.x)[masked]).all()
        weights = jnp.where(masked[:, None] | unused, jnp.nan, arguments.topk_weights)
        y = np.asarray(self.run(arguments._replace(topk_weights=weights)))
        assert not y[masked].any()
        assert np.isfinite(y).all()
        assert_as_exact(y, arguments)

    # --- given scales -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "placement", ["one rank", "data x expert, Auto", "data x expert, Explicit", "in shard_map"]
    )
    def test_tokens_and_h_are_rounded_with_the_scales_that_experts_bring_wherever_it_is_called(self, placement):
        arguments = with_given_scales(in_8_bits(self.inputs(30, biases=True, routing="zipf", token_valid=True)))
        y = self.run(arguments, placement)
        assert_as_exact(y, arguments, "fp8-static")
        assert relative_error(y, truth_of(arguments, "fp8")) > 0.01

    @pytest.mark.parametrize(("kind", "scale_dtype"), [("channel", jnp.float32), ("expert", jnp.float8_e8m0fnu)])
    def test_weights_beside_given_scales_may_have_scales_of_every_kind(self, kind, scale_dtype):
        for dtype in self.dtypes:
            arguments = in_8_bits(self.inputs(31, gated=False, num_experts=3, dtype=dtype), kind, scale_dtype)
            arguments = with_given_scales(arguments)
            assert_as_exact(self.small_run(arguments, activation="relu"), arguments, "fp8-static", activation="relu")

    @pytest.mark.parametrize(("kind", "scale_dtype"), [("channel", jnp.float32), ("expert", jnp.float8_e8m0fnu)])
    def test_fast_sums_have_at_most_twice_the_error_of_sums_that_tensor_cores_make(self, kind, scale_dtype):
        for dtype in self.dtypes:
            inputs = self.inputs(32, biases=True, routing="zipf", dtype=dtype)
            arguments = with_given_scales(in_8_bits(inputs, kind, scale_dtype))
            truth = truth_of(arguments, "fp8-static")
            y = self.small_run(arguments, accumulation="fast")
            assert relative_error(y, truth) <= allowed_for_fast_sums(arguments, truth)

    @pytest.mark.parametrize(("tokens", "h", "largest"), [(1.0, 1.0, 448), (0.25, 1.0, 112), (1.0, 0.125, 56)])
    def test_what_is_beyond_448_times_a_given_scale_becomes_that(self, tokens, h, largest):
        x = numbers_in_8_bits(1)
        x[3:5] *= 2.0**10
        x[5, ::7], x[6, ::7] = 1e30, -1e30
        experts = identity_experts(EXPERTS, HIDDEN, self.dtype)
        arguments = self.inputs(6)
        weights = jnp.full((TOKENS, TOP_K), 1.0, jnp.float32).at[:, 2].set(2.0)
        arguments = arguments._replace(x=jnp.asarray(x, self.dtype), topk_weights=weights, experts=experts)
        arguments = with_given_scales(in_8_bits(arguments, scale_dtype=jnp.float8_e8m0fnu), tokens, h)
        y = self.run(arguments, activation="relu")
        np.testing.assert_array_equal(y, 4 * jnp.clip(arguments.x, -largest, largest))
        assert (np.abs(x) > largest).any()

    @pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-40])
    def test_a_given_scale_that_can_be_none_makes_everything_nan(self, scale):
        arguments = in_8_bits(self.inputs(32))
        for scales in ((scale, 1.0), (1.0, scale)):
            assert np.isnan(np.asarray(self.small_run(with_given_scales(arguments, *scales)), np.float32)).all()

    def test_another_precision_ignores_given_scales(self):
        arguments = in_8_bits(self.inputs(33, biases=True))
        given = with_given_scales(arguments)
        for precision in ("fp8", "w8a16"):
            y, expected = (self.small_run(each, precision=precision) for each in (given, arguments))
            np.testing.assert_array_equal(y, expected)

    def test_gradients_beside_given_scales_are_those_of_the_layer_that_rounds_nothing(self):
        given = with_given_scales(in_8_bits(self.inputs(35)))

        def gradients(precision: str) -> Any:
            run = layer("one rank", **self.options(plan=None, precision=precision))
            loss = lambda x: jnp.sum(run(given._replace(x=x)).astype(jnp.float32) * cotangent(x))  # noqa: E731
            return np.asarray(jax.jit(jax.grad(loss))(given.x))

        found = gradients("fp8-static")
        np.testing.assert_array_equal(found, gradients("fp8"))
        assert found.any()

    def test_with_given_scales_the_same_call_gives_the_same_bits(self):
        arguments = with_given_scales(in_8_bits(self.inputs(34, biases=True, routing="zipf")))
        first = self.run(arguments)
        np.testing.assert_array_equal(self.run(arguments), first)
        # Plans of XLA part the rows of a token, whose sums are rounded in between.
        for plan in (plan for plan in self.plans if isinstance(plan, jaxmoe.KernelPlan)):
            np.testing.assert_array_equal(self.run(arguments, plan=plan), first)

    # --- repeatable -------------------------------------------------------------------------------------------------

    def test_the_same_call_gives_the_same_bits(self):
        arguments = in_8_bits(self.inputs(1, biases=True, routing="zipf"))
        first = self.run(arguments)
        for _ in range(5):
            np.testing.assert_array_equal(self.run(arguments), first)

    @pytest.mark.parametrize("precision", ["fp8", "fp8-static", "w8a16"])
    def test_every_plan_is_as_exact(self, precision):
        arguments = with_given_scales(in_8_bits(self.inputs(2, biases=True, routing="zipf", token_valid=True)))
        for plan in (None, *self.plans):
            assert_as_exact(self.small_run(arguments, plan=plan, precision=precision), arguments, precision)

    # --- wide master weights ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("precision", "scale_dtype"), [("fp8", jnp.float32), ("fp8-e8m0", jnp.float8_e8m0fnu)])
    def test_wide_experts_are_rounded_in_the_call_as_quantize_rounds_them(self, precision, scale_dtype):
        arguments = self.inputs(11, biases=True)
        y = self.small_run(arguments, precision=precision)
        again = self.small_run(in_8_bits(arguments, scale_dtype=scale_dtype), precision=precision)
        np.testing.assert_array_equal(y, again)
        assert relative_error(y, jitted_dense("silu", None, None)(arguments)) > 0.02

    def test_gradients_of_wide_experts_are_those_of_the_layer_without_rounding(self):
        arguments = self.inputs(12, biases=True, routing="zipf", token_valid=True)
        rounded = self.gradients(arguments, precision="fp8", plan=None)
        wide = self.gradients(arguments, "one rank", plan=None)
        for got, want in zip(jax.tree.leaves(rounded), jax.tree.leaves(wide), strict=True):
            assert relative_error(got, want) < max(5e-6, 4 * float(jnp.finfo(self.dtype).eps))
            assert np.asarray(want).any()

    def test_master_weights_in_float32_get_gradients_in_float32_beside_narrow_tokens(self):
        narrow = self.inputs(13, dtype=jnp.bfloat16, biases=True, num_experts=2, top_k=2)
        arguments = narrow._replace(experts=narrow.experts.astype(jnp.float32))
        dx, _, dexperts = self.gradients(arguments, "one rank", precision="fp8", plan=None)
        assert dx.dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves(dexperts)} == {jnp.dtype(jnp.float32)}
        wide = self.gradients(arguments, "one rank", plan=None)
        for got, want in zip(jax.tree.leaves((dx, dexperts)), jax.tree.leaves((wide[0], wide[2])), strict=True):
            assert relative_error(got, want) < 2**-8

    # --- frozen experts ---------------------------------------------------------------------------------------------

    def test_gradients_beside_frozen_experts_are_those_of_the_decoded_layer(self):
        arguments = in_8_bits(self.inputs(14, biases=True, routing="zipf"))
        decoded = jax.jit(functools.partial(jaxmoe.dequantize, dtype=self.dtype))(arguments.experts)
        in_shard_map = layer("in shard_map", **self.options())
        on_one_rank = layer("one rank", **self.options(plan=None))
        without = {"w_gate": None, "w_up": None, "w_down": None}
        biases = dataclasses.replace(arguments.experts, **without)

        def gradients(run: Any, experts: Any) -> Any:
            def loss(x, weights, biases):
                matrices = {name: getattr(experts, name) for name in without}
                with_biases = dataclasses.replace(biases, **matrices)
                y = run(arguments._replace(x=x, topk_weights=weights, experts=with_biases))
                return jnp.sum(jnp.sin(jnp.arange(y.size)).reshape(y.shape) * y.astype(jnp.float32))

            return jax.jit(jax.grad(loss, (0, 1, 2)))(arguments.x, arguments.topk_weights, biases)

        found, expected = gradients(in_shard_map, arguments.experts), gradients(on_one_rank, decoded)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert relative_error(got, want) < max(5e-6, 4 * float(jnp.finfo(self.dtype).eps))
            assert np.asarray(want).any()

    def test_gradients_of_8_bits_are_refused_with_what_to_do(self):
        arguments = in_8_bits(self.inputs(15))
        run = layer("data x expert, Auto", **self.options())

        def loss(experts):
            return jnp.sum(run(arguments._replace(experts=experts)))

        told = "gradients of BlockScaled experts.*precision='fp8'.*stop_gradient"
        for transformed in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss))):
            with pytest.raises(TypeError, match=told):
                transformed(arguments.experts)
        nothing = jax.jit(jax.grad(lambda experts: loss(jax.lax.stop_gradient(experts))))(arguments.experts)
        assert not any(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(nothing))

    # --- transformations --------------------------------------------------------------------------------------------

    def test_scan_over_layers_in_8_bits_equals_the_loop_and_has_gradients_of_tokens(self):
        layers = [in_8_bits(self.inputs(20 + i)).experts for i in range(2)]
        arguments = self.inputs(16)
        self.assert_scan_equals_the_loop(layers, arguments, 2e-3)

    def test_shapes_are_known_without_arrays(self):
        arguments = in_8_bits(self.inputs(17))
        run = layer("all devices", **self.options())
        y = jax.eval_shape(run, arguments)
        assert (y.shape, y.dtype) == (arguments.x.shape, arguments.x.dtype)

    def test_vmap_raises_and_says_what_to_do(self):
        arguments = in_8_bits(self.inputs(18))
        run = lambda e: jaxmoe.moe_layer(*arguments[:3], e, axis_name=None, **self.options())  # noqa: E731
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arguments.experts)
        with pytest.raises(NotImplementedError, match=r"jax\.lax\.scan"):
            jax.vmap(run)(stacked)

    def test_explain_prints_the_formats_and_the_bytes_of_the_experts(self):
        arguments = in_8_bits(self.inputs(19))
        told = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert"), **self.options())
        assert told.call.precision == "fp8"
        for formats in ("tokens float8_e4m3fn (a float32 scale for 1 x 128)", "scale for 128 x 128)", "answers "):
            assert formats in str(told)
        shape = told.call.shape
        leaves = jax.tree.leaves(arguments.experts)
        assert shape.expert_bytes * EXPERTS == sum(leaf.nbytes for leaf in leaves)
        assert f"take {shape.local_experts * shape.expert_bytes / 2**20:.1f} MiB per rank" in str(told)
        wide = jaxmoe.explain(*self.inputs(19)[:4], mesh=mesh_of("expert"), **self.options())
        # One rank sends nothing, and those of the reference send experts.
        assert told.wire_bytes < 0.9 * wide.wire_bytes or not wide.wire_bytes or self.implementation == "reference"
