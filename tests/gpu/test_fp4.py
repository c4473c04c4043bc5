"""The suite of 4 bits on GPUs, with tokens in 16 bits, over as many devices as there are."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import machine
from jaxmoe.options import Arguments
from jaxmoe.testing import ROUTING_KINDS
from tests.fp4_suite import MATRICES, Fp4Suite, repacked, through_e4m3, with_scale
from tests.quantized_layer import assert_as_exact

pytestmark = pytest.mark.gpu
needs_cuda_part = pytest.mark.skipif(
    not machine.cuda_status().available, reason=f"the CUDA part cannot run: {machine.cuda_status().reason}"
)

# Of few rows, half of a column tile to each block.
SHARES_COLUMNS = jaxmoe.KernelPlan(unit_tiles=1, lag_units=2, ring_tiles=8, share_columns=True)


def every_token_everywhere(arguments: Arguments) -> Arguments:
    """All tokens to the same experts, each of which has a row of every one."""
    ids = jnp.broadcast_to(jnp.arange(arguments.topk_ids.shape[1], dtype=jnp.int32), arguments.topk_ids.shape)
    return arguments._replace(topk_ids=ids)


def with_large_zeros(matrix: jaxmoe.MXFP4) -> jaxmoe.MXFP4:
    """Every third group has zeros and a scale 2^20, which no other comes near."""
    values = np.asarray(matrix.packed).copy()
    groups = values.reshape(*values.shape[:2], -1, matrix.group // 2)
    groups[:, :, ::3] = 0
    return with_scale(
        dataclasses.replace(matrix, values=jnp.asarray(values)), (slice(None), slice(None), slice(0, None, 3)), 2.0**20
    )


def with_growing_scales(matrix: jaxmoe.MXFP4) -> jaxmoe.MXFP4:
    """Each group's scale is 2^4 times that of the group before it, and that of the last one is 2^-4."""
    groups = matrix.scales.shape[2]
    for group in range(groups):
        matrix = with_scale(matrix, (slice(None), slice(None), group), 2.0 ** (4 * (group - groups)))
    return matrix


class OnGpu(Fp4Suite):
    dtype = jnp.bfloat16
    dtypes = (jnp.bfloat16, jnp.float16)


class TestXla(OnGpu):
    implementation = "xla"


@needs_cuda_part
class TestMegakernel(OnGpu):
    """Weights decoded in registers, but where x is float16."""

    implementation = "megakernel"
    plans = (
        None,
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1, weight_slots=1),
        SHARES_COLUMNS,
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, chunk_rows=3, keep_tokens=True),
    )
    plans_ahead = (
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1, weight_slots=1),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, chunk_rows=3, keep_tokens=True, weight_slots=4),
    )

    @pytest.mark.parametrize("plan", [plans[-1], SHARES_COLUMNS], ids=["columns of its own", "shared columns"])
    @pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 48, 64, 65, 80, 81, 96, 128, 129, 160, 192, 193, 257])
    @pytest.mark.parametrize(("kind", "precision"), [("mxfp4", "w4a16"), ("nvfp4", "w4a16"), ("mxfp4", "fp8")])
    def test_tiles_of_any_number_of_rows_are_as_exact(self, kind, precision, rows, plan):
        arguments = every_token_everywhere(self.inputs_in_4_bits(30, kind, tokens=rows))
        y = self.small_run(arguments, precision=precision, plan=plan)
        assert_as_exact(y, arguments, precision)
        if precision == "w4a16":
            np.testing.assert_array_equal(self.small_run(repacked(arguments), precision=precision, plan=plan), y)

    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_beside_rows_in_8_bits_they_are_as_exact_for_every_routing(self, routing):
        arguments = self.inputs_in_4_bits(31, routing=routing)
        assert_as_exact(self.run(arguments, precision="fp8"), arguments, "fp8")

    def test_beside_rows_in_8_bits_the_same_call_gives_the_same_bits_for_every_plan(self):
        arguments = self.inputs_in_4_bits(32, routing="zipf")
        first = self.small_run(arguments, precision="fp8")
        assert_as_exact(first, arguments, "fp8")
        for plan in (None, SHARES_COLUMNS, *[self.plans[-1]] * 5):
            np.testing.assert_array_equal(self.small_run(arguments, precision="fp8", plan=plan), first)

    def test_beside_rows_in_8_bits_a_scale_that_is_no_number_stays_with_its_column(self):
        arguments = self.inputs_in_4_bits(33)
        spoiled = with_scale(arguments.experts.w_down, (2, 17, 3), float("nan"))
        y, clean = (
            np.asarray(self.run(arguments._replace(experts=experts), precision="fp8"), np.float32)
            for experts in (dataclasses.replace(arguments.experts, w_down=spoiled), arguments.experts)
        )
        visits = (np.asarray(arguments.topk_ids) == 2).any(-1) & np.asarray(arguments.token_valid)
        np.testing.assert_array_equal(np.isnan(y[:, 17]), visits)
        np.testing.assert_array_equal(np.delete(y, 17, 1), np.delete(clean, 17, 1))

    @pytest.mark.parametrize("plan", [plans[-1], SHARES_COLUMNS], ids=["columns of its own", "shared columns"])
    @pytest.mark.parametrize("rows", [16, 24, 40, 64, 72, 80])
    def test_beside_rows_in_8_bits_wide_experts_are_as_exact(self, rows, plan):
        arguments = every_token_everywhere(self.inputs_in_4_bits(39, tokens=rows, hidden=1024, intermediate=1536))
        assert_as_exact(self.small_run(arguments, precision="fp8", plan=plan), arguments, "fp8")

    @pytest.mark.parametrize("rows", [16, 32, 48, 64, 80, 120, 128, 250])
    def test_beside_rows_in_8_bits_groups_far_smaller_than_their_neighbours_are_exact(self, rows):
        arguments = every_token_everywhere(self.inputs_in_4_bits(35, tokens=rows))
        matrices = {name: with_large_zeros(getattr(arguments.experts, name)) for name in MATRICES}
        arguments = arguments._replace(experts=dataclasses.replace(arguments.experts, **matrices))
        y = self.small_run(arguments, precision="fp8")
        assert_as_exact(y, arguments, "fp8")
        assert np.asarray(y).any()

    @pytest.mark.parametrize("rows", [16, 32, 48, 64, 80, 96, 128, 160, 250])
    def test_beside_rows_in_8_bits_groups_that_grow_along_the_depth_are_exact(self, rows):
        arguments = every_token_everywhere(self.inputs_in_4_bits(38, tokens=rows))
        matrices = {name: with_growing_scales(getattr(arguments.experts, name)) for name in MATRICES}
        arguments = arguments._replace(experts=dataclasses.replace(arguments.experts, **matrices))
        assert_as_exact(self.small_run(arguments, precision="fp8"), arguments, "fp8")

    @pytest.mark.parametrize("rows", [1, 64, 65, 128, 129, 256, 300])
    @pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
    def test_through_e4m3_tiles_of_any_number_of_rows_are_as_exact(self, kind, rows):
        arguments = through_e4m3(every_token_everywhere(self.inputs_in_4_bits(36, kind, tokens=rows)))
        y = self.small_run(arguments, precision="fp8", plan=self.plans_ahead[-1])
        assert_as_exact(y, arguments, "fp8")

    def test_through_e4m3_many_experts_of_many_blocks_are_as_exact_in_every_run(self):
        sizes: dict[str, Any] = {"hidden": 1024, "intermediate": 768, "tokens": 512, "num_experts": 16}
        arguments = through_e4m3(self.inputs_in_4_bits(37, **sizes))
        first = self.small_run(arguments, precision="fp8", plan=self.plans_ahead[-1])
        assert_as_exact(first, arguments, "fp8")
        for _ in range(50):
            again = self.small_run(arguments, precision="fp8", plan=self.plans_ahead[-1])
            np.testing.assert_array_equal(again, first)

    def test_beside_rows_in_8_bits_float16_is_refused_with_what_to_do(self):
        arguments = self.inputs_in_4_bits(34, dtype=jnp.float16)
        with pytest.raises(NotImplementedError, match=r"x is float16.*takes bfloat16.*precision='w4a16'"):
            self.small_run(arguments, precision="fp8")


@needs_cuda_part
class TestMegakernelAhead(OnGpu):
    """Weights decoded ahead of the tasks that multiply them."""

    implementation = "megakernel"
    plans = (
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1, weight_slots=1),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, chunk_rows=3, keep_tokens=True, weight_slots=4),
    )
