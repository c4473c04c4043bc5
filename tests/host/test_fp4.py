"""4 bits on the host executor, through `moe_layer`: the suite of all implementations that take them.

Weights are decoded by the tasks that multiply them, and with one plan ahead of these.
"""

import jax.numpy as jnp

import jaxmoe
from tests.fp4_suite import Fp4Suite


class TestMegakernel(Fp4Suite):
    implementation = "megakernel"
    dtypes = (jnp.bfloat16, jnp.float16)
    plans = (
        jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=6, weight_slots=3),
        jaxmoe.KernelPlan(unit_tiles=1, lag_units=3, ring_tiles=5, chunk_rows=3, keep_tokens=True),
    )
