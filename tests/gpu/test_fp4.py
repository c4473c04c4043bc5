"""The suite of 4 bits on GPUs, with tokens in 16 bits, over as many devices as there are."""

import jax.numpy as jnp
import pytest

import jaxmoe
from jaxmoe import machine
from tests.fp4_suite import KINDS, Fp4Suite
from tests.quantized_layer import assert_as_exact

pytestmark = pytest.mark.gpu
needs_cuda_part = pytest.mark.skipif(
    not machine.cuda_status().available, reason=f"the CUDA part cannot run: {machine.cuda_status().reason}"
)


class OnGpu(Fp4Suite):
    dtype = jnp.bfloat16
    dtypes = (jnp.bfloat16, jnp.float16)


class TestXla(OnGpu):
    implementation = "xla"


@needs_cuda_part
class TestMegakernel(OnGpu):
    """Weights decoded in registers, but where x is float16."""

    implementation = "megakernel"
    precisions = ("w4a16",)
    plans = (
        None,
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1, weight_slots=1),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, chunk_rows=3, keep_tokens=True),
    )

    @pytest.mark.parametrize("rows", [1, 8, 9, 16, 33, 64, 65, 128, 129, 257])
    @pytest.mark.parametrize("kind", KINDS)
    def test_tiles_of_any_number_of_rows_are_multiplied_as_exactly_as_wide_ones(self, kind, rows):
        arguments = self.inputs_in_4_bits(30, kind, tokens=rows)
        # All tokens to the same experts, each of which has a row of every one.
        ids = jnp.broadcast_to(jnp.arange(arguments.topk_ids.shape[1], dtype=jnp.int32), arguments.topk_ids.shape)
        arguments = arguments._replace(topk_ids=ids)
        assert_as_exact(self.small_run(arguments), arguments, "w4a16")


@needs_cuda_part
class TestMegakernelAhead(OnGpu):
    """Weights decoded ahead of the tasks that multiply them."""

    implementation = "megakernel"
    precisions = ("w4a16",)
    plans = (
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1, weight_slots=1),
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, chunk_rows=3, keep_tokens=True, weight_slots=4),
    )
