"""A launch goes on with whatever multiprocessors it gets (ffi/cuda/kernel/crew.cuh), and gives the same bits."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import machine, native
from jaxmoe.options import Arguments
from jaxmoe.testing import make_inputs
from tests.layer_calls import layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]

# Multiprocessors that something else holds, of 132: one, half, all but a few clusters. Clusters need two neighbours, so
# one that is held costs two.
HELD = (1, 66, 124)
# Beyond what any of these layers takes, and short of the layer's own limit.
MOST_SECONDS = 20.0

# Experts in 4 bits beside tokens in 8: epilogues of their own, which late workers rehearse while others multiply.
IN_4_BITS = "forward in 4 bits"
PASSES = ["forward", "backward", IN_4_BITS]


@functools.cache
def arguments(name: str) -> Arguments:
    given = make_inputs(
        5, tokens=4096, hidden=1024, intermediate=768, num_experts=16, top_k=4, routing="zipf", dtype=jnp.bfloat16
    )
    return given._replace(experts=jaxmoe.quantize(given.experts, "mxfp4")) if name == IN_4_BITS else given


@functools.cache
def pass_of(name: str) -> Any:
    options = {"precision": "fp8"} if name == IN_4_BITS else {}
    on_devices = layer("all devices", implementation="megakernel", **options)
    if name != "backward":
        return jax.jit(lambda given: [on_devices(given)])

    def loss(x: jax.Array, weights: jax.Array, experts: Any, given: Arguments) -> jax.Array:
        y = on_devices(given._replace(x=x, topk_weights=weights, experts=experts))
        return (y.astype(jnp.float32) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    return jax.jit(lambda given: jax.tree.leaves(gradients(given.x, given.topk_weights, given.experts, given)))


@functools.cache
def alone(name: str) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in pass_of(name)(arguments(name))]


def occupant(blocks: int, device: int = 0) -> Any:
    """Holds multiprocessors of one GPU of the group; its peers have all of theirs."""
    ordinal = jax.local_devices()[device].local_hardware_id
    compiled = native.extension("gpu")
    assert compiled is not None
    return compiled.Occupant(device=ordinal, blocks=blocks, most_seconds=MOST_SECONDS)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("held", HELD)
def test_a_pass_ends_while_another_kernel_holds_multiprocessors_of_one_gpu(held, name):
    expected = alone(name)
    holder = occupant(held)
    results = jax.block_until_ready(pass_of(name)(arguments(name)))
    assert holder.held_to_the_end()
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), value)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("held", HELD)
def test_workers_that_come_late_change_no_bit(held, name):
    """Multiprocessors are let go at some moment of a few calls in a row, so that workers join launches on their way."""
    expected, run = alone(name), pass_of(name)
    given = arguments(name)
    for trial in range(20):
        holder = occupant(held)
        results = [run(given) for _ in range(2)]
        time.sleep(1e-4 * trial)
        holder.release()
        results.append(run(given))
        for result in jax.block_until_ready(results):
            for leaf, value in zip(result, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(leaf), value)
