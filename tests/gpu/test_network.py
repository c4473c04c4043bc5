"""Experts on several hosts, for which the GPUs of one stand: tokens travel by NCCL, each host runs the fused kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import machine
from jaxmoe.bench.kernels import kernel_times
from jaxmoe.testing import ROUTING_KINDS, make_inputs, relative_error
from tests.layer_calls import LayerChecks, layer, mesh_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs"),
]
NetworkPlan = jaxmoe.NetworkPlan
SIZES: dict[str, Any] = {"tokens": 768, "hidden": 256, "intermediate": 384, "num_experts": 16, "top_k": 4}
WAYS = {
    "gather": NetworkPlan(1, "gather", 1),
    "gather in chunks": NetworkPlan(1, "gather", 3),
    "send": NetworkPlan(1, "send"),
    "send in chunks": NetworkPlan(1, "send", 2, 50),
}


class TestTwoHosts(LayerChecks):
    """Of one GPU each where there are two."""

    implementation = "megakernel"
    dtype = jnp.bfloat16

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_output_and_gradients_equal_the_reference(self, routing, way):
        arguments = make_inputs(1, **SIZES, dtype=self.dtype, biases=True, routing=routing, token_valid=True)
        self.check(arguments, "all devices", network=WAYS[way])

    @pytest.mark.parametrize("residuals", ["save", "recompute"])
    @pytest.mark.parametrize("way", WAYS)
    def test_calls_give_the_same_bits(self, way, residuals):
        arguments = make_inputs(2, **SIZES, dtype=self.dtype, routing="zipf")
        options = {"network": WAYS[way], "residuals": residuals}
        first = (self.run(arguments, "all devices", **options), self.gradients(arguments, "all devices", **options))
        for _ in range(50):
            again = (self.run(arguments, "all devices", **options), self.gradients(arguments, "all devices", **options))
            jax.tree.map(np.testing.assert_array_equal, first, again)

    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    @pytest.mark.parametrize("kind", ["128x128", "mxfp4", "nvfp4"])
    def test_experts_in_8_and_4_bits_give_what_they_give_on_one_host(self, kind, way):
        arguments = make_inputs(3, **SIZES, dtype=self.dtype, routing="zipf")
        quantized = arguments._replace(experts=jax.jit(lambda e: jaxmoe.quantize(e, kind))(arguments.experts))
        one, several = (
            jax.jit(layer("all devices", implementation="megakernel", network=network))(quantized)
            for network in (None, WAYS[way])
        )
        # The sums of two hosts are rounded to 16 bits before they are added.
        assert relative_error(several, one) < 2 * float(jnp.finfo(self.dtype).eps)

    @pytest.mark.parametrize(
        ("network", "launches"), [(NetworkPlan(1, "gather", 2), 2), (NetworkPlan(1, "send", 1, 2048), 4)]
    )
    def test_what_one_chunk_or_round_needs_travels_beside_the_kernel_of_another(self, network, launches):
        sizes = dict(SIZES, tokens=16384, hidden=2048, intermediate=2048)
        arguments = make_inputs(4, **sizes, dtype=self.dtype)
        placed = jax.device_put(arguments, jax.NamedSharding(mesh_of("expert"), jax.P("expert")))
        run = jax.jit(layer("all devices", implementation="megakernel", network=network))
        jax.block_until_ready(run(placed))
        times = kernel_times(lambda: run(placed))
        nccl = [each for each in times if "nccl" in each.name.lower()]
        assert sum(each.launches for each in times if "moe_forward" in each.name) == launches
        assert sum(each.beside_layer for each in nccl) > 0.2 * sum(each.microseconds for each in nccl)
