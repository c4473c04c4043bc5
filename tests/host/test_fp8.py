"""8 bits on the host executor, through `moe_layer`: the suite of all implementations that multiply them."""

import jax.numpy as jnp

import jaxmoe
from tests.fp8_suite import Fp8Suite


class TestMegakernel(Fp8Suite):
    implementation = "megakernel"
    dtypes = (jnp.bfloat16, jnp.float16)
    plans = (
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=6),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=3, ring_tiles=5, chunk_rows=3, keep_tokens=True),
    )
