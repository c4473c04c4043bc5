"""Experts stored and restored, by `flax.serialization` and orbax, alone and in training states."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jaxmoe
import jaxmoe.linen
import jaxmoe.nnx
from jaxmoe.testing import make_inputs

WIDE = jaxmoe.Experts.init(jax.random.key(0), 2, 256, 128, biases=True, dtype=jnp.bfloat16)
KINDS: dict[str, Any] = {
    "wide": WIDE,
    "without up and biases": jaxmoe.Experts(WIDE.w_gate, None, WIDE.w_down),
    "fused": WIDE.fuse("interleaved"),
    "8 bits": jaxmoe.quantize(WIDE, scale_dtype=jnp.float8_e8m0fnu),
    "8 bits with scales of inputs": jaxmoe.with_input_scales(jaxmoe.quantize(WIDE, "expert"), 1 / 448, 2 / 448),
    "mxfp4 through e4m3": jaxmoe.through_e4m3(jaxmoe.quantize(WIDE, "mxfp4")),
    "nvfp4": jaxmoe.quantize(WIDE, "nvfp4"),
}


def assert_same(found: Any, given: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(given), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_come_back_as_they_were(kind):
    experts = KINDS[kind]
    assert_same(
        serialization.from_bytes(jax.tree.map(jnp.zeros_like, experts), serialization.to_bytes(experts)), experts
    )


@pytest.mark.parametrize("kind", KINDS)
def test_experts_come_back_from_orbax_as_they_were(kind, tmp_path):
    experts = KINDS[kind]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "experts", experts)
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(tmp_path / "experts", jax.eval_shape(lambda: experts)), experts)


def test_statistics_come_back_as_they_were():
    stats = jaxmoe.load_stats(make_inputs(0).topk_ids, num_experts=8)
    assert_same(serialization.from_bytes(jax.tree.map(jnp.zeros_like, stats), serialization.to_bytes(stats)), stats)


def test_what_a_layer_says_of_its_routing_comes_back_as_it_was():
    logits = jax.random.normal(jax.random.key(0), (6, 4))
    routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2))
    alone = jaxmoe.router_aux(routing, logits)
    for given in (routing, alone, dataclasses.replace(alone, routing=routing, logits=logits)):
        zeros = jax.tree.map(jnp.zeros_like, given)
        assert_same(serialization.from_bytes(zeros, serialization.to_bytes(given)), given)


def through_bytes(aux: jaxmoe.MoEAux) -> Any:
    return serialization.from_bytes(aux, serialization.to_bytes(aux))


@pytest.mark.parametrize("to_numpy", [jax.device_get, through_bytes])
def test_losses_and_statistics_are_read_of_numpy_arrays_too(to_numpy):
    logits = jax.random.normal(jax.random.key(0), (6, 4))
    aux = jaxmoe.router_aux(jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2)), logits)
    found = to_numpy(aux)
    assert isinstance(found.sums, np.ndarray)
    for read in ("load_balancing_loss", "router_z_loss"):
        np.testing.assert_allclose(getattr(found, read), getattr(aux, read), rtol=1e-6)
    np.testing.assert_array_equal(found.stats.counts, aux.stats.counts)


def test_all_that_a_layer_of_linen_sows_comes_back_as_it_was():
    moe = jaxmoe.linen.MoE(8, 16, 4, jaxmoe.RouterConfig(top_k=2), return_routing=True, axis_name=None)
    x = jax.random.normal(jax.random.key(0), (6, 8))
    _, sown = moe.apply(moe.init(jax.random.key(1), x), x, mutable=["losses", "intermediates"])
    assert isinstance(sown["intermediates"]["moe_routing"][0], jaxmoe.Routing)
    assert_same(serialization.from_bytes(jax.tree.map(jnp.zeros_like, sown), serialization.to_bytes(sown)), sown)


def test_a_training_state_of_experts_comes_back_with_its_optimizer():
    state = TrainState.create(apply_fn=None, params={"experts": WIDE}, tx=optax.adam(1e-3))
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    zeros = TrainState.create(apply_fn=None, params=jax.tree.map(jnp.zeros_like, state.params), tx=state.tx)
    found: Any = serialization.from_bytes(zeros, serialization.to_bytes(state))
    assert isinstance(found.params["experts"], jaxmoe.Experts)
    assert found.step == state.step == 1
    assert_same((found.params, found.opt_state), (state.params, state.opt_state))


def test_the_state_of_a_layer_with_experts_in_4_bits_comes_back():
    experts = jaxmoe.quantize(jaxmoe.Experts(WIDE.w_gate, WIDE.w_up, WIDE.w_down), "mxfp4")
    weights = jaxmoe.convert.MoEWeights(experts, jnp.ones((256, 2)))
    layer = jaxmoe.nnx.MoE.from_weights(weights, jaxmoe.RouterConfig(top_k=1), axis_name=None)
    state = nnx.to_pure_dict(nnx.state(layer))
    assert isinstance(state["w_gate"], jaxmoe.MXFP4)
    assert_same(serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state)), state)


def test_a_field_that_is_missing_is_named():
    state = serialization.to_state_dict(WIDE)
    del state["w_down"]
    with pytest.raises(ValueError, match="w_down"):
        serialization.from_state_dict(WIDE, state)
