"""Routing of logits that are split over GPUs, where XLA chooses other programs than for CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmoe
from tests.layer_calls import mesh_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")]

CONFIGS = {"softmax": jaxmoe.RouterConfig.qwen3_moe(top_k=4), "groups": jaxmoe.RouterConfig.deepseek_v3(top_k=8)}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("part", ["topk_ids", "all"])
@pytest.mark.parametrize("tokens", [1024, 16384])  # few scores are sorted; of many the largest are taken one by one
def test_ids_of_split_logits_are_those_of_whole_ones(name: str, kind: AxisType, part: str, tokens: int) -> None:
    """Also where they are all that a program returns: with `jax.lax.top_k` they were zeros then (jaxlib 0.11.2)."""
    logits = jnp.round(jax.random.normal(jax.random.key(0), (tokens, 64)), 1)
    bias = jnp.linspace(0, 0.1, 64) if name == "groups" else None

    def routed(logits: jax.Array) -> jaxmoe.Routing | jax.Array:
        routing = jaxmoe.route(logits, CONFIGS[name], selection_bias=bias)
        return routing.topk_ids if part == "topk_ids" else routing

    with jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.jit(routed)(jax.device_put(logits, jax.devices("cpu")[0]))
    mesh = mesh_of("expert", kind=kind)
    with jax.set_mesh(mesh):
        got = jax.jit(routed)(jax.device_put(logits, NamedSharding(mesh, PartitionSpec("expert"))))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)
