"""Beside experts that are not trained, compiled code makes no gradients of them: what the backward call returns."""

import dataclasses
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import make_inputs
from tests.layer_calls import SIZES

# Of a size that no other file has: what was traced there is kept.
INPUTS = make_inputs(0, **{**SIZES, "tokens": 72}, biases=True)
IDS = INPUTS.topk_ids
DIFFERENTIATED = INPUTS.x, INPUTS.topk_weights, INPUTS.experts
RESULTS = {"frozen": 2, "trained": 2 + len(jax.tree.leaves(INPUTS.experts))}


def loss(x: jax.Array, weights: jax.Array, experts: Any, **options: Any) -> jax.Array:
    chosen: dict[str, Any] = {"axis_name": None} | options
    y = jaxmoe.moe_layer(x, IDS, weights, experts, implementation="megakernel", **chosen)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def results_of(function: Any, *arrays: Any) -> list[int]:
    """The number of results of every backward call of a program."""
    text = jax.jit(function).lower(*(arrays or DIFFERENTIATED)).as_text()
    calls = re.findall(r"@jaxmoe_backward\(.*-> (.*)", text)
    return [len(re.findall("tensor<", results)) for results in calls]


def stopped(x: jax.Array, weights: jax.Array, experts: Any) -> jax.Array:
    return loss(x, weights, jax.lax.stop_gradient(experts))


def one_bias(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    return loss(x, weights, dataclasses.replace(jax.lax.stop_gradient(INPUTS.experts), b_down=bias))


def layers(x: jax.Array, weights: jax.Array, experts: Any) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = jaxmoe.moe_layer(x, IDS, weights, experts, implementation="megakernel", axis_name=None)
        return x + y, None

    return jnp.sum(jax.lax.scan(step, x, None, length=2)[0])


WAYS: dict[str, tuple[Any, str]] = {
    "tokens": (jax.grad(loss), "frozen"),
    "routing weights": (jax.grad(loss, 1), "frozen"),
    "both": (jax.grad(loss, (0, 1)), "frozen"),
    "vjp": (lambda *arrays: jax.vjp(lambda x: loss(x, *arrays[1:]), arrays[0])[1](jnp.float32(1)), "frozen"),
    "stop_gradient": (jax.grad(stopped, (0, 1, 2)), "frozen"),
    "stop_gradient under jit": (jax.grad(jax.jit(stopped), (0, 1, 2)), "frozen"),
    "checkpoint": (jax.grad(jax.checkpoint(loss)), "frozen"),
    "scan": (jax.grad(layers), "frozen"),
    "scan in a checkpoint": (jax.grad(jax.checkpoint(layers)), "frozen"),
    "saved": (jax.grad(lambda *arrays: loss(*arrays, residuals="save")), "frozen"),
    "experts": (jax.grad(loss, 2), "trained"),
    "all": (jax.grad(loss, (0, 1, 2)), "trained"),
    "all in a scan": (jax.grad(layers, (0, 2)), "trained"),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_experts_are_made_where_they_are_asked_for_and_nowhere_else(way):
    function, kind = WAYS[way]
    assert results_of(function) == [RESULTS[kind]]


def test_gradients_of_one_bias_are_those_of_a_layer_whose_experts_are_all_trained():
    assert results_of(jax.grad(one_bias, 2), *DIFFERENTIATED[:2], INPUTS.experts.b_down) == [RESULTS["trained"]]
    found = jax.grad(one_bias, 2)(*DIFFERENTIATED[:2], INPUTS.experts.b_down)
    np.testing.assert_array_equal(found, jax.grad(loss, 2)(*DIFFERENTIATED).b_down)


@pytest.mark.parametrize("inside", [False, True], ids=["outside shard_map", "in shard_map"])
def test_ranks_of_a_mesh_make_none_either(inside):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tokens, experts = P(("data", "expert")), P("expert")

    def run(x: jax.Array, weights: jax.Array, matrices: Any, ids: jax.Array) -> jax.Array:
        options: Any = {} if inside else {"mesh": mesh, "data_axes": "data"}
        return jaxmoe.moe_layer(x, ids, weights, matrices, implementation="megakernel", **options)

    def of_mesh(x: jax.Array, weights: jax.Array, matrices: Any) -> jax.Array:
        specs: Any = {"in_specs": (tokens, tokens, experts, tokens), "out_specs": tokens}
        call = jax.shard_map(run, mesh=mesh, **specs) if inside else run
        return jnp.sum(jnp.sin(call(x, weights, matrices, IDS)))

    split = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(DIFFERENTIATED, (tokens, tokens, experts), strict=True)
    ]
    assert results_of(jax.grad(of_mesh, (0, 1)), *split) == [RESULTS["frozen"]]
    frozen, trained = jax.grad(of_mesh, (0, 1))(*split), jax.grad(of_mesh, (0, 1, 2))(*split)
    jax.tree.map(np.testing.assert_array_equal, frozen, trained[:2])


QUANTIZED = {
    "fp8": jaxmoe.quantize,
    "mxfp4": lambda experts: jaxmoe.quantize(experts, "mxfp4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantised_experts_with_frozen_biases_are_differentiated_by_compiled_code(kind):
    wide = make_inputs(1, tokens=48, hidden=128, intermediate=256, num_experts=4, top_k=2, biases=True)
    quantized = QUANTIZED[kind](wide.experts)

    def of_biases(x: jax.Array, weights: jax.Array, biases: Any) -> jax.Array:
        experts = dataclasses.replace(quantized, b_gate=biases[0], b_up=biases[1], b_down=biases[2])
        y = jaxmoe.moe_layer(x, wide.topk_ids, weights, experts, implementation="megakernel", axis_name=None)
        return jnp.sum(jnp.sin(y))

    arrays = wide.x, wide.topk_weights, (quantized.b_gate, quantized.b_up, quantized.b_down)
    assert results_of(jax.grad(of_biases, (0, 1)), *arrays) == [RESULTS["frozen"]]
    assert results_of(jax.grad(of_biases, (0, 1, 2)), *arrays) == [], "another implementation does it"
    frozen = jax.jit(jax.grad(of_biases, (0, 1)))(*arrays)
    trained = jax.jit(jax.grad(of_biases, (0, 1, 2)))(*arrays)
    for found, expected in zip(frozen, trained[:2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(expected))))


# The gradient of the output does not come of the output, which is returned as well.
TRAINS_BIASES = """
import dataclasses
from jaxmoe import testing
testing.use_virtual_devices(4)
import jax, jax.numpy as jnp, jaxmoe
mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
given = testing.make_inputs(0, tokens=12, hidden=128, intermediate=128, num_experts=8, top_k=2, biases=True)
experts = jaxmoe.quantize(given.experts, "mxfp4")
def loss(x, biases):
    y = jaxmoe.moe_layer(x, given.topk_ids, given.topk_weights, dataclasses.replace(experts, **biases), mesh=mesh,
                         data_axes="data", implementation="megakernel")
    return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y
biases = {name: getattr(experts, name) for name in ("b_gate", "b_up", "b_down")}
gradients = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
first = jax.block_until_ready(gradients(given.x, biases))
for _ in range(200):
    again = jax.block_until_ready(gradients(given.x, biases))
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), first, again))
"""


def test_devices_run_a_call_and_collectives_beside_it_in_any_order():
    """A process of its own: where a call kept its device it waited for ever in 3 of 3 runs, or until XLA ended it."""
    subprocess.run([sys.executable, "-c", TRAINS_BIASES], check=True, timeout=300)
