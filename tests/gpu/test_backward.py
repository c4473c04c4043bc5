"""The backward kernel on GPUs, beyond the suite: real sizes, several segments, the same bits for every plan and run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import machine
from jaxmoe.bench.kernels import kernel_times
from jaxmoe.experts import LAYOUTS, split
from jaxmoe.testing import make_inputs
from tests.layer_calls import LayerChecks, layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]


class Checks(LayerChecks):
    implementation = "megakernel"
    dtype = jnp.bfloat16


CHECKS = Checks()
# Widths that fill no tile, narrow tiles, experts of one row tile and of many.
SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"tokens": 1536, "hidden": 2880, "intermediate": 2880, "num_experts": 8, "top_k": 4},
    "many experts": {"tokens": 2048, "hidden": 512, "intermediate": 768, "num_experts": 64, "top_k": 8},
    "large experts": {"tokens": 8192, "hidden": 512, "intermediate": 384, "num_experts": 4, "top_k": 2},
}
FORWARD: dict[str, Any] = {"unit_tiles": 3, "lag_units": 1, "ring_tiles": 9}


def plan_with(**backward: Any) -> jaxmoe.KernelPlan:
    return jaxmoe.KernelPlan(**FORWARD, backward=jaxmoe.KernelPlan(**backward))


def assert_same_bits(gradients: Any, expected: Any) -> None:
    for (path, value), want in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(want), jax.tree_util.keystr(path))


@pytest.mark.parametrize("routing", ["uniform", "one-hot", "unused-slots"])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_real_sizes_cost_at_most_twice_the_error_of_the_same_maths(size, routing):
    CHECKS.check(CHECKS.inputs(31, **SIZES[size], routing=routing, biases=True), "all devices", plan=None)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_gate_and_up_in_one_array_of_real_sizes_have_the_bits_of_two_but_where_sums_have_another_order(
    size, layout, dtype
):
    # gpt-oss has widths that no tile divides, "many experts" some that no box of a tensor map does.
    sizes = SIZES[size] | ({"intermediate": 712} if size == "many experts" else {})
    arguments = CHECKS.inputs(37, **sizes, routing="zipf", biases=True, layout=layout, dtype=dtype)
    CHECKS.check(arguments, "all devices", plan=None)
    y, (dx, dweights, dexperts) = CHECKS.both(arguments, "all devices", plan=None)
    apart = arguments._replace(experts=split(arguments.experts))
    expected_y, (expected_dx, *expected) = CHECKS.both(apart, "all devices", plan=None)
    assert_same_bits((y, dweights, dexperts.split()), (expected_y, *expected))
    if layout == "halves":
        assert_same_bits(dx, expected_dx)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_and_up_in_one_float32_array_get_sums_that_are_never_rounded(layout, residuals):
    arguments = CHECKS.inputs(38, **SIZES["large experts"], routing="zipf", biases=True, layout=layout)
    wide = arguments._replace(experts=arguments.experts.astype(jnp.float32))
    plan = plan_with(unit_tiles=2, lag_units=1, ring_tiles=7, segment_tiles=3)
    options: dict[str, Any] = {"plan": plan, "residuals": residuals}
    fused, apart = (
        CHECKS.gradients(each, "one rank", **options)[2] for each in (wide, wide._replace(experts=split(wide.experts)))
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(fused))
    assert_same_bits(fused.split(), apart)


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
@pytest.mark.parametrize("tokens", [8, 2048])
@pytest.mark.parametrize(("placement", "num_experts"), [("one rank", 512), ("data x expert, groups of two", 384)])
def test_gradients_of_hundreds_of_experts_of_a_rank_cost_at_most_twice_the_error(
    placement, num_experts, tokens, routing
):
    sizes = {"tokens": tokens, "hidden": 256, "intermediate": 136, "num_experts": num_experts, "top_k": 10}
    CHECKS.check(CHECKS.inputs(36, **sizes, routing=routing, biases=True), placement, plan=None)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_experts_of_several_segments_add_up_their_weight_gradients(dtype):
    arguments = CHECKS.inputs(32, **SIZES["large experts"], routing="zipf", biases=True, dtype=dtype)
    plan = plan_with(unit_tiles=2, lag_units=1, ring_tiles=7, segment_tiles=3)
    CHECKS.check(arguments, "all devices", plan=plan)


def test_every_plan_with_the_same_segments_gives_the_same_bits():
    arguments = CHECKS.inputs(33, **SIZES["large experts"], routing="zipf", biases=True)
    plans = [
        plan_with(unit_tiles=4, lag_units=1, ring_tiles=12, segment_tiles=4),
        plan_with(unit_tiles=1, lag_units=0, ring_tiles=4, segment_tiles=4),
        plan_with(unit_tiles=2, lag_units=2, ring_tiles=40, chunk_rows=16, keep_tokens=True, segment_tiles=4),
    ]
    expected, *others = (CHECKS.gradients(arguments, "all devices", plan=plan) for plan in plans)
    for gradients in others:
        assert_same_bits(gradients, expected)


def test_five_hundred_backward_passes_give_the_same_bits():
    sizes: dict[str, Any] = {"tokens": 1024, "hidden": 256, "intermediate": 384, "num_experts": 16, "top_k": 4}
    arguments = CHECKS.inputs(34, **sizes, routing="zipf", biases=True)
    expected = CHECKS.gradients(arguments, "all devices", plan=None)
    different = jnp.zeros((), jnp.int32)
    differ = jax.jit(lambda a, b: sum(jnp.any(x != y).astype(jnp.int32) for x, y in zip(a, b, strict=True)))
    for _ in range(500):
        gradients = CHECKS.gradients(arguments, "all devices", plan=None)
        different += differ(jax.tree.leaves(gradients), jax.tree.leaves(expected))
    assert int(different) == 0


@pytest.mark.parametrize("segment_tiles", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_hundred_passes_beside_frozen_experts_give_the_bits_of_those_beside_trained_ones(size, segment_tiles):
    arguments = CHECKS.inputs(39, **SIZES[size], routing="zipf", biases=True)
    # As few ring slots as can be, so that rows are overwritten as soon as they may be.
    plan = plan_with(unit_tiles=1, lag_units=1, ring_tiles=segment_tiles + 2, segment_tiles=segment_tiles)
    run = layer("all devices", implementation="megakernel", plan=plan)
    dy = jnp.sin(jnp.arange(arguments.x.size, dtype=jnp.float32)).reshape(arguments.x.shape)

    def loss(x: Any, weights: Any, experts: Any) -> jax.Array:
        y = run(arguments._replace(x=x, topk_weights=weights, experts=experts))
        return jnp.sum(dy * y.astype(jnp.float32))

    differentiated = arguments.x, arguments.topk_weights, arguments.experts
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*differentiated)[:2]
    frozen = jax.jit(jax.grad(loss, (0, 1)))
    assert_same_bits(frozen(*differentiated), expected)
    differ = jax.jit(lambda a, b: sum(jnp.any(x != y).astype(jnp.int32) for x, y in zip(a, b, strict=True)))
    assert sum(int(differ(frozen(*differentiated), expected)) for _ in range(100)) == 0


def test_debug_nans_finds_none_in_what_is_saved_into_memory_that_held_nan():
    arguments = CHECKS.inputs(36, **SIZES["many experts"], routing="unused-slots", biases=True)
    run = layer("data x expert, Auto", implementation="megakernel", residuals="save")
    with jax.debug_nans(True):
        for _ in range(10):
            # What the layer saves is of 2 to 40 MB; it gets memory of these.
            with jax.debug_nans(False):
                jax.block_until_ready([jnp.full((megabytes, 2**18), jnp.nan) for megabytes in (1, 2, 4, 8, 16, 32, 64)])
            y, pull_back = jax.vjp(
                jax.jit(lambda x, e: run(arguments._replace(x=x, experts=e))), arguments.x, arguments.experts
            )
            gradients = pull_back(jnp.ones_like(y))
            assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((y, gradients)))


def test_gradients_are_one_kernel_of_each_pass():
    arguments = make_inputs(35, tokens=2048, hidden=512, intermediate=512, num_experts=8, top_k=2, dtype=jnp.bfloat16)
    jax.block_until_ready(CHECKS.gradients(arguments, "all devices", plan=None))
    times = kernel_times(lambda: CHECKS.gradients(arguments, "all devices", plan=None))
    launches = {each.name: each.launches for each in times if "moe_" in each.name}
    assert sorted(count for name, count in launches.items() if "moe_backward" in name) == [1]
    assert sum(count for name, count in launches.items() if "moe_forward" in name) <= 1
