"""The test tools themselves: what they call uniform, skewed or masked is so."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.testing import (
    ROUTING_KINDS,
    dense,
    identity_experts,
    make_ids,
    make_inputs,
    relative_error,
    tolerance,
    use_virtual_devices,
)


@pytest.mark.parametrize("routing", ROUTING_KINDS)
def test_routings_are_what_they_are_called(routing):
    ids = np.asarray(make_inputs(0, tokens=4096, num_experts=8, top_k=2, routing=routing).topk_ids)
    counts = np.bincount(ids[ids >= 0], minlength=8)
    distinct = ids[:, 0] != ids[:, 1]
    facts = {
        "uniform": counts.min() > 0.9 * counts.mean() and distinct.all(),
        "zipf": counts[0] > 2 * counts[-1] and distinct.all(),
        "one-hot": counts[1] == 8192,
        "empty-expert": counts[0] == 0 and counts[1:].min() > 0 and distinct.all(),
        "unused-slots": 0.3 < (ids < 0).mean() < 0.37,
        "all-unused": (ids == -1).all(),
        "repeated": not distinct.any() and counts.min() > 0,
    }
    assert facts[routing]


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(64, 8, 2), (7, 5, 3), (10, 3, 3), (3, 8, 1), (0, 4, 2)])
def test_even_routing_names_all_experts_equally_often_but_once_and_different_ones_for_a_token(
    tokens, num_experts, top_k
):
    for seed in range(20):
        ids = make_ids(np.random.default_rng(seed), tokens, num_experts, top_k, "even")
        counts = np.bincount(ids.ravel(), minlength=num_experts)
        assert ids.shape == (tokens, top_k)
        assert counts.max() - counts.min() <= 1
        assert all(len(set(of_token)) == top_k for of_token in ids.tolist())
    first, second = (make_ids(np.random.default_rng(seed), 64, 8, 2, "even") for seed in range(2))
    assert (first != second).any()


def test_inputs_have_outputs_of_unit_scale():
    assert 0.3 < float(jnp.std(dense(make_inputs(0, tokens=256, biases=True)))) < 3


def test_identity_experts_return_their_input_in_every_precision():
    for dtype in (jnp.bfloat16, jnp.float32):
        arguments = make_inputs(1, dtype=dtype)._replace(experts=identity_experts(8, 32, dtype))
        arguments = arguments._replace(topk_weights=jnp.ones_like(arguments.topk_weights))
        np.testing.assert_array_equal(dense(arguments, activation="relu"), 2 * arguments.x)


@pytest.mark.parametrize("activation", [jaxmoe.SwiGLU(), lambda gate, up: gate * up])
def test_an_activation_without_the_projection_that_it_needs_is_refused_as_by_the_layer(activation):
    arguments = make_inputs(0, gated=False)
    with pytest.raises(ValueError, match=r"multiplies two projections, but experts\.w_up is None"):
        dense(arguments, activation=activation)
    with pytest.raises(ValueError, match=r"multiplies two projections, but experts\.w_up is None"):
        jaxmoe.moe_layer(*arguments[:4], axis_name=None, activation=activation)


def test_the_tolerance_is_twice_the_error_of_the_low_precision():
    truth, rough = jnp.array([1.0, 1.0]), jnp.array([1.0, 1.1])
    assert tolerance(rough, truth, jnp.float32) == pytest.approx(2 * 0.1 / 2**0.5, rel=1e-4)
    assert np.isnan(relative_error(jnp.array([jnp.nan]), jnp.array([1.0])))
    assert relative_error(jnp.array([0.5]), jnp.zeros(1)) == 0.5


def test_virtual_devices_cannot_be_had_once_jax_runs():
    with pytest.raises(RuntimeError, match="JAX is running already"):
        use_virtual_devices(4)
