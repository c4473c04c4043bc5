"""The suite of 8 bits on GPUs, with tokens in 16 bits, over as many devices as there are."""

import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import machine
from jaxmoe.testing import relative_error
from tests.fp8_suite import LONGEST, Fp8Suite, allowed_for_fast_sums, positive_inputs, with_given_scales
from tests.quantized_layer import truth_of

pytestmark = pytest.mark.gpu


class OnGpu(Fp8Suite):
    dtype = jnp.bfloat16
    dtypes = (jnp.bfloat16, jnp.float16)


class TestReference(OnGpu):
    implementation = "reference"


class TestXla(OnGpu):
    implementation = "xla"
    plans = (jaxmoe.Plan(batch_rows=200), jaxmoe.Plan(batch_rows=40))


@pytest.mark.skipif(
    not machine.cuda_status().available, reason=f"the CUDA part cannot run: {machine.cuda_status().reason}"
)
class TestMegakernel(OnGpu):
    implementation = "megakernel"

    def test_fast_sums_are_those_of_the_tensor_cores_and_promoted_ones_are_not(self):
        arguments = with_given_scales(positive_inputs(LONGEST, 128, self.dtype, "channel"))
        truth = truth_of(arguments, "fp8-static", activation="relu")
        promoted, fast = (
            relative_error(self.small_run(arguments, activation="relu", accumulation=accumulation), truth)
            for accumulation in ("promoted", "fast")
        )
        assert 2 * promoted < fast <= allowed_for_fast_sums(arguments, truth, "relu")

    plans = (
        None,
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=40, ring_tiles=41),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, chunk_rows=3, keep_tokens=True),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=2, ring_tiles=8, share_columns=True),
    )
