"""The suite of all implementations on GPUs, in BF16, over as many devices as there are."""

import jax
import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import machine
from jaxmoe.implementations.xla.plan import has_tokamax
from jaxmoe.testing import make_inputs
from tests.layer_suite import LayerSuite

pytestmark = pytest.mark.gpu


class OnGpu(LayerSuite):
    dtype = jnp.bfloat16

    def test_gradients_equal_finite_differences_in_float64(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        """GPUs have no float64 path; the call says so."""
        with jax.enable_x64(True):
            arguments = make_inputs(0, dtype=jnp.float64)
            with pytest.raises(TypeError, match=r"x is float64, which is supported on CPU only"):
                jaxmoe.moe_layer(*arguments[:4], axis_name=None)

    def test_gradients_of_experts_with_thousands_of_rows_cost_at_most_twice_the_error_of_the_same_maths(self):
        """Where the weight gradients of tokamax 0.0.17 are wrong by percents, and those of small experts are not."""
        self.check(self.inputs(41, tokens=8192, hidden=256, intermediate=256, num_experts=8, top_k=2), plan=None)


class TestReference(OnGpu):
    implementation = "reference"


class TestXlaWithLaxRaggedDot(OnGpu):
    implementation = "xla"
    plans = (jaxmoe.Plan(batch_rows=96), jaxmoe.Plan(batch_rows=1000), jaxmoe.Plan(batch_rows=40))


@pytest.mark.skipif(not has_tokamax(), reason="tokamax is not installed")
class TestXlaWithTokamax(OnGpu):
    implementation = "xla"
    plans = (
        None,
        jaxmoe.Plan(batch_rows=1000, grouped_gemm="tokamax"),
        jaxmoe.Plan(batch_rows=40, grouped_gemm="tokamax"),
    )


@pytest.mark.skipif(
    not machine.cuda_status().available, reason=f"the CUDA part cannot run: {machine.cuda_status().reason}"
)
class TestMegakernel(OnGpu):
    implementation = "megakernel"
    width_multiple = 8  # 16 bytes, what a bulk copy wants
    most_experts = min(64 * jax.device_count(), 256)  # 64 a rank
    plans = (
        None,
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=40, ring_tiles=41),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4),
    )
