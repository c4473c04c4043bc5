"""The behaviours of every implementation of `moe_layer` that takes experts in 4 bits. A class inherits `Fp4Suite`.

Compiling is what takes time here: most tests call one of few programs, with other arrays.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.options import Arguments
from jaxmoe.testing import ROUTING_KINDS, identity_experts, relative_error
from tests.layer_calls import EXPERTS, TOKENS, TOP_K, cotangent, layer, mesh_of
from tests.quantized_layer import QuantizedChecks, assert_as_exact, truth_of

KINDS = ("mxfp4", "nvfp4")
MATRICES = ("w_gate", "w_up", "w_down")
PRECISIONS = ("w4a16", "fp8", "fp8-e8m0")
# Of gpt-oss, but for a limit that the inputs here do reach.
GPT_OSS = jaxmoe.SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0)


@functools.cache
def jitted_quantize(kind: str) -> Any:
    return jax.jit(functools.partial(jaxmoe.quantize, block=kind))


def in_4_bits(arguments: Arguments, kind: str = "mxfp4") -> Arguments:
    return arguments._replace(experts=jitted_quantize(kind)(arguments.experts))


def repacked(arguments: Arguments) -> Arguments:
    return arguments._replace(experts=jaxmoe.repacked(arguments.experts))


def through_e4m3(arguments: Arguments) -> Arguments:
    return arguments._replace(experts=jaxmoe.through_e4m3(arguments.experts))


def as_elements(arguments: Arguments) -> Arguments:
    """The same experts with values as `float4_e2m1fn`."""

    def of(matrix: Any) -> Any:
        return None if matrix is None else dataclasses.replace(matrix, values=matrix.elements)

    experts = arguments.experts
    return arguments._replace(
        experts=dataclasses.replace(experts, **{name: of(getattr(experts, name)) for name in MATRICES})
    )


def with_scale(matrix: Any, where: Any, number: float) -> Any:
    scale = np.asarray(number, matrix.scales.dtype)
    scales = np.asarray(matrix.scales).copy()
    scales[where] = scale
    return dataclasses.replace(matrix, scales=jnp.asarray(scales))


class Fp4Suite(QuantizedChecks):
    """Inherit and set `implementation`."""

    # What the implementation takes; it refuses the others by name.
    precisions: ClassVar[tuple[str, ...]] = PRECISIONS
    # Plans with which experts that go through E4M3 are decoded ahead, where there is such a choice.
    plans_ahead: ClassVar[tuple[Any, ...]] = (None,)

    def inputs_in_4_bits(self, seed: int, kind: str = "mxfp4", **options: Any) -> Arguments:
        """With biases and a mask, since each structure is another program."""
        return in_4_bits(self.inputs(seed, **{"biases": True, "token_valid": True} | options), kind)

    # --- against the truth ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_in_4_bits_are_multiplied_as_exactly_as_wide_ones_for_every_routing(self, kind, routing):
        arguments = self.inputs_in_4_bits(1, kind, routing=routing)
        assert_as_exact(self.run(arguments), arguments, "w4a16")

    def test_weights_in_4_bits_are_multiplied_as_exactly_as_wide_ones_over_explicit_axes(self):
        arguments = self.inputs_in_4_bits(2, routing="zipf")
        assert_as_exact(self.run(arguments, "data x expert, Explicit"), arguments, "w4a16")

    @pytest.mark.parametrize("precision", PRECISIONS)
    def test_tokens_and_h_are_rounded_as_the_precision_says_and_weights_of_mxfp4_never(self, precision):
        arguments = self.inputs_in_4_bits(3)
        if precision not in self.precisions:
            with pytest.raises(NotImplementedError, match=f"precision='{precision}'.*implementation='xla'"):
                self.small_run(arguments, precision=precision)
            return
        options = {} if precision == "w4a16" else {"precision": precision}  # which it is by default
        y = self.small_run(arguments, **options)
        assert_as_exact(y, arguments, precision)
        for other in set(PRECISIONS) - {precision}:
            assert relative_error(y, truth_of(arguments, other)) > 0.01

    @pytest.mark.parametrize("kind", KINDS)
    def test_in_low_precision_experts_of_gpt_oss_cost_at_most_twice_the_error_of_the_same_maths(self, kind):
        dtype = self.dtypes[KINDS.index(kind) % len(self.dtypes)]
        arguments = self.inputs_in_4_bits(4, kind, dtype=dtype, routing="zipf")
        y = self.small_run(arguments, activation=GPT_OSS)
        assert y.dtype == dtype
        assert_as_exact(y, arguments, "w4a16", GPT_OSS)
        assert relative_error(y, truth_of(arguments, "w4a16")) > 0.1

    def test_values_as_float4_are_the_same_weights_as_bytes_with_two_of_them(self):
        arguments = self.inputs_in_4_bits(1, routing="zipf")
        np.testing.assert_array_equal(self.small_run(as_elements(arguments)), self.small_run(arguments))

    @pytest.mark.parametrize("placement", ["data x expert, Explicit", "in shard_map"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_repacked_experts_give_the_same_bits(self, kind, placement):
        arguments = self.inputs_in_4_bits(1, kind, routing="zipf")
        np.testing.assert_array_equal(self.run(repacked(arguments), placement), self.run(arguments, placement))

    @pytest.mark.parametrize("kind", KINDS)
    def test_repacked_experts_give_the_same_bits_for_every_plan_and_dtype(self, kind):
        for dtype in self.dtypes:
            arguments = self.inputs_in_4_bits(5, kind, routing="zipf", dtype=dtype)
            for plan in (None, *self.plans):
                found, expected = (self.small_run(given, plan=plan) for given in (repacked(arguments), arguments))
                np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_beside_repacked_experts_have_the_same_bits(self, kind):
        dtype = self.dtypes[KINDS.index(kind) % len(self.dtypes)]
        arguments = self.inputs_in_4_bits(6, kind, biases=False, dtype=dtype)
        run = layer("one rank", **self.options(plan=None))

        def loss(x, weights, given):
            y = run(given._replace(x=x, topk_weights=weights))
            return jnp.sum(jnp.where(given.token_valid[:, None], y, 0).astype(jnp.float32) * cotangent(y))

        gradients = jax.jit(jax.grad(loss, (0, 1)))
        found, expected = (gradients(*given[:3:2], given) for given in (repacked(arguments), arguments))
        jax.tree.map(np.testing.assert_array_equal, found, expected)

    def test_repacked_experts_beside_tokens_in_8_bits_are_refused(self):
        with pytest.raises(ValueError, match=r"those of jaxmoe\.repacked, which are for tokens in 16"):
            self.small_run(repacked(self.inputs_in_4_bits(6)), precision="fp8")

    def test_scales_far_from_each_other_are_exact_whatever_is_rounded(self):
        arguments = self.inputs_in_4_bits(7)
        experts = arguments.experts
        gate: Any = experts.w_gate
        arguments = arguments._replace(
            experts=dataclasses.replace(experts, w_gate=with_scale(gate, (slice(None), slice(0, 64)), 2.0**-30))
        )
        assert not jaxmoe.fits_e4m3(arguments.experts)["w_gate"].any()
        for precision in {"w4a16", "fp8"} & set(self.precisions):
            options = {} if precision == "w4a16" else {"precision": precision}
            assert_as_exact(self.small_run(arguments, **options), arguments, precision)

    # --- through E4M3 -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_experts_through_e4m3_are_multiplied_exactly_or_rounded_as_stated_for_every_routing(self, kind, routing):
        arguments = through_e4m3(self.inputs_in_4_bits(40, kind, routing=routing))
        assert_as_exact(self.run(arguments, precision="fp8", plan=self.plans_ahead[-1]), arguments, "fp8")

    def test_experts_through_e4m3_are_as_exact_for_every_plan_and_the_same_bits_for_those_that_decode_ahead(self):
        arguments = through_e4m3(self.inputs_in_4_bits(41, "nvfp4", routing="zipf"))
        first = self.small_run(arguments, precision="fp8")
        assert_as_exact(first, arguments, "fp8")
        for plan in self.plans_ahead:
            np.testing.assert_array_equal(self.small_run(arguments, precision="fp8", plan=plan), first)

    def test_nvfp4_is_rounded_beside_rounded_tokens_alone_and_only_where_that_was_asked_for(self):
        exact = self.inputs_in_4_bits(42, "nvfp4")
        arguments = through_e4m3(exact)
        np.testing.assert_array_equal(self.small_run(arguments), self.small_run(exact))
        rounded = self.small_run(arguments, precision="fp8-e8m0")
        assert_as_exact(rounded, arguments, "fp8-e8m0")
        # The error of the rounding, of three matrices one after the other.
        assert 0.01 < relative_error(truth_of(arguments, "fp8-e8m0"), truth_of(exact, "fp8-e8m0")) < 0.05
        told = [
            str(jaxmoe.explain(*given[:4], axis_name=None, **self.options(precision=precision, plan=None)))
            for given, precision in ((arguments, "fp8"), (arguments, "w4a16"), (exact, "w4a16"))
        ]
        assert ["rounded to E4M3, as jaxmoe.through_e4m3 asked for" in each for each in told] == [True, False, False]
        with pytest.raises(ValueError, match=r"does not fit in E4M3.*jaxmoe\.through_e4m3\(experts\)"):
            self.small_run(exact, precision="fp8")

    def test_scales_as_far_apart_as_e4m3_holds_are_exact(self):
        arguments = self.inputs_in_4_bits(43)
        matrices = {name: self.at_both_ends(getattr(arguments.experts, name)) for name in MATRICES}
        arguments = through_e4m3(arguments._replace(experts=dataclasses.replace(arguments.experts, **matrices)))
        for plan in self.plans_ahead:
            assert_as_exact(self.small_run(arguments, precision="fp8", plan=plan), arguments, "fp8")

    def test_scales_may_be_negative(self):
        arguments = self.inputs_in_4_bits(45, "nvfp4")
        some = slice(None), slice(0, None, 3), slice(0, None, 2)
        matrices = {name: with_scale(getattr(arguments.experts, name), some, -0.5) for name in MATRICES}
        arguments = through_e4m3(arguments._replace(experts=dataclasses.replace(arguments.experts, **matrices)))
        assert_as_exact(self.small_run(arguments), arguments, "w4a16")
        for plan in self.plans_ahead:
            assert_as_exact(self.small_run(arguments, precision="fp8", plan=plan), arguments, "fp8")

    @staticmethod
    def at_both_ends(matrix: Any) -> Any:
        """Every third group at 2^-4 in every third output; all others at 2^-18, also where an output has no larger."""
        small = with_scale(matrix, (slice(None),) * 3, 2.0**-18)
        return with_scale(small, (slice(None), slice(0, None, 3), slice(0, None, 3)), 2.0**-4)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_scale_that_is_no_number_stays_with_its_column_through_e4m3(self, kind):
        arguments = through_e4m3(self.inputs_in_4_bits(44, kind))
        down: Any = arguments.experts.w_down
        spoiled = dataclasses.replace(arguments.experts, w_down=with_scale(down, (2, 17, 3), float("nan")))
        options: dict[str, Any] = {"precision": "fp8", "plan": self.plans_ahead[-1]}
        y = np.asarray(self.small_run(arguments._replace(experts=spoiled), **options), np.float32)
        visits = (np.asarray(arguments.topk_ids) == 2).any(-1) & np.asarray(arguments.token_valid)
        np.testing.assert_array_equal(np.isnan(y[:, 17]), visits)
        clean = np.asarray(self.small_run(arguments, **options), np.float32)
        assert relative_error(np.delete(y, 17, 1), np.delete(clean, 17, 1)) < 0.02

    # --- closed forms -----------------------------------------------------------------------------------------------

    def test_identity_experts_return_their_tokens_times_the_weights(self):
        arguments = self.inputs(8)
        experts = in_4_bits(arguments._replace(experts=identity_experts(EXPERTS, arguments.x.shape[1]))).experts
        weights = jnp.full((TOKENS, TOP_K), 1.0, jnp.float32).at[:, 2].set(2.0)
        x = arguments.x.astype(jnp.bfloat16).astype(self.dtype)
        y = self.small_run(arguments._replace(x=x, topk_weights=weights, experts=experts), activation="relu")
        np.testing.assert_array_equal(y, 4 * x)

    # --- edges ------------------------------------------------------------------------------------------------------

    def test_nan_and_infinity_stay_with_their_tokens(self):
        clean = self.inputs_in_4_bits(9)
        clean = clean._replace(token_valid=jnp.ones(TOKENS, bool), x=jnp.nan_to_num(clean.x))
        x = clean.x.at[5, 3].set(jnp.nan).at[6, 200].set(jnp.inf).at[7, 0].set(-jnp.inf)
        y, expected = (np.asarray(self.run(clean._replace(x=tokens)), np.float32) for tokens in (x, clean.x))
        assert not np.isfinite(y[5:8]).all(-1).any()
        others = np.delete(np.arange(TOKENS), [5, 6, 7])
        np.testing.assert_array_equal(y[others], expected[others])
        assert np.isfinite(expected).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_scale_that_is_no_number_stays_with_its_expert(self, kind):
        arguments = self.inputs_in_4_bits(10, kind)
        down: Any = arguments.experts.w_down
        spoiled = dataclasses.replace(arguments.experts, w_down=with_scale(down, (2, 17, 3), float("nan")))
        y = np.asarray(self.run(arguments._replace(experts=spoiled)), np.float32)
        visits = (np.asarray(arguments.topk_ids) == 2).any(-1) & np.asarray(arguments.token_valid)
        assert 0 < visits.sum() < TOKENS
        np.testing.assert_array_equal(np.isnan(y[:, 17]), visits)
        clean = np.asarray(self.run(arguments))
        np.testing.assert_array_equal(np.delete(y, 17, 1), np.delete(clean, 17, 1))

    @pytest.mark.parametrize("kind", KINDS)
    def test_experts_of_zeros_answer_zero(self, kind):
        arguments = self.inputs(11, biases=True, token_valid=True)
        zeros = arguments._replace(experts=jax.tree.map(jnp.zeros_like, arguments.experts))
        assert not np.asarray(self.run(in_4_bits(zeros, kind))).any()

    def test_unused_slots_and_masked_tokens_take_no_part(self):
        arguments = self.inputs_in_4_bits(12, routing="unused-slots")
        masked, unused = ~np.asarray(arguments.token_valid), np.asarray(arguments.topk_ids) < 0
        assert np.isnan(np.asarray(arguments.x)[masked]).all()
        weights = jnp.where(masked[:, None] | unused, jnp.nan, arguments.topk_weights)
        y = np.asarray(self.run(arguments._replace(topk_weights=weights)))
        assert not y[masked].any()
        assert np.isfinite(y).all()
        assert_as_exact(y, arguments, "w4a16")

    # --- repeatable -------------------------------------------------------------------------------------------------

    def test_the_same_call_gives_the_same_bits(self):
        arguments = self.inputs_in_4_bits(1, routing="zipf")
        first = self.run(arguments)
        for _ in range(5):
            np.testing.assert_array_equal(self.run(arguments), first)

    def test_every_plan_is_as_exact(self):
        arguments = self.inputs_in_4_bits(2, routing="zipf")
        # The last plan is that of most tests.
        for plan in (None, *self.plans[:-1]):
            assert_as_exact(self.small_run(arguments, plan=plan), arguments, "w4a16")

    # --- frozen experts ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("kind", "placement", "precision", "biases"),
        [("mxfp4", "one rank", "fp8", True), ("nvfp4", "in shard_map", "w4a16", False)],
    )
    def test_gradients_beside_frozen_experts_are_those_of_the_decoded_layer(self, kind, placement, precision, biases):
        precision = precision if precision in self.precisions else None
        arguments = self.inputs_in_4_bits(13, kind, routing="zipf", biases=biases)
        plan = None if placement == "one rank" else self.plans[-1]
        run = layer(placement, **self.options(precision=precision, plan=plan))
        without: dict[str, Any] = dict.fromkeys(MATRICES)
        matrices = {name: getattr(arguments.experts, name) for name in MATRICES}

        def loss(x, weights, biases):
            experts = dataclasses.replace(biases, **matrices)
            y = run(arguments._replace(x=x, topk_weights=weights, experts=experts))
            y = jnp.where(arguments.token_valid[:, None], y, 0).astype(jnp.float32)
            return jnp.sum(y * cotangent(y))

        biases = dataclasses.replace(arguments.experts, **without)
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(arguments.x, arguments.topk_weights, biases)
        decoded = jax.jit(functools.partial(jaxmoe.dequantize, dtype=self.dtype))(arguments.experts)
        dx, dweights, dexperts = self.gradients(arguments._replace(experts=decoded), "one rank", plan=None)
        expected = dx, dweights, dataclasses.replace(dexperts, **without)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert relative_error(got, want) < max(5e-6, 4 * float(jnp.finfo(self.dtype).eps))
            assert np.asarray(want).any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_of_4_bits_are_refused_with_what_to_do(self, kind):
        arguments = self.inputs_in_4_bits(14, kind)
        run = layer("one rank", **self.options())

        def loss(experts):
            return jnp.sum(run(arguments._replace(experts=experts)))

        told = f"gradients of {kind.upper()} experts, and 4-bit values have none.*precision='fp8'.*stop_gradient"
        elements = as_elements(arguments).experts
        for transformed in (jax.grad(loss), jax.jit(jax.grad(jax.checkpoint(loss)))):
            with pytest.raises(TypeError, match=told):
                transformed(elements)
        # Bytes have no gradients for JAX itself; where it is told to go on, their scales have none either.
        with pytest.raises(TypeError, match=told):
            jax.grad(loss, allow_int=True)(arguments.experts)
        assert jax.eval_shape(jax.grad(lambda experts: loss(jax.lax.stop_gradient(experts))), elements)

    # --- transformations --------------------------------------------------------------------------------------------

    def test_scan_over_layers_in_4_bits_equals_the_loop_and_has_gradients_of_tokens(self):
        layers = [self.inputs_in_4_bits(20 + i).experts for i in range(2)]
        arguments = self.inputs(15, token_valid=True)
        arguments = arguments._replace(x=jnp.nan_to_num(arguments.x))
        self.assert_scan_equals_the_loop(layers, arguments, 5e-6)

    def test_shapes_are_known_without_arrays(self):
        arguments = self.inputs_in_4_bits(16)
        y = jax.eval_shape(layer("all devices", **self.options()), arguments)
        assert (y.shape, y.dtype) == (arguments.x.shape, arguments.x.dtype)

    def test_vmap_raises_and_says_what_to_do(self):
        arguments = self.inputs_in_4_bits(17)
        run = lambda e: jaxmoe.moe_layer(*arguments[:3], e, axis_name=None, **self.options())  # noqa: E731
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arguments.experts)
        with pytest.raises(NotImplementedError, match=r"jax\.lax\.scan"):
            jax.vmap(run)(stacked)

    @pytest.mark.parametrize("kind", KINDS)
    def test_explain_prints_the_formats_and_the_bytes_of_the_experts(self, kind):
        arguments = self.inputs_in_4_bits(18, kind)
        told = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert"), **self.options())
        assert told.call.precision == "w4a16"
        scale = {
            "mxfp4": "(a float8_e8m0fnu scale for 1 x 32)",
            "nvfp4": "(a float8_e4m3fn scale for 1 x 16, a float32 one for the array)",
        }[kind]
        for formats in (f"tokens {self.dtype.__name__}, ", f"weights float4_e2m1fn {scale}"):
            assert formats in str(told)
        shape = told.call.shape
        matrices: list[Any] = [getattr(arguments.experts, name) for name in MATRICES]
        assert shape.expert_bytes * EXPERTS == sum(matrix.nbytes for matrix in matrices)
        size = shape.local_experts * shape.expert_bytes / 2**20
        assert f"precision='w4a16': experts in 4 bits take {size:.1f} MiB per rank" in str(told)
