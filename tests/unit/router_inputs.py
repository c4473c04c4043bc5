"""Random logits and a router with groups, which the tests of routing share."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe

GROUPED = jaxmoe.RouterConfig(top_k=3, score="sigmoid", num_groups=4, top_groups=2, scaling_factor=2.5)


def random_logits(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))
