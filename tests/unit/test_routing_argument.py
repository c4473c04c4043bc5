"""`moe_layer(x, routing, experts)`: what `route` returned in the place of ids and weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmoe
from tests.layer_calls import mesh_of

X = jax.random.normal(jax.random.key(0), (16, 8))
LOGITS = jax.random.normal(jax.random.key(1), (16, 8))
EXPERTS = jaxmoe.Experts.init(jax.random.key(2), num_experts=8, hidden=8, intermediate=16)
ROUTING = jaxmoe.route(LOGITS, jaxmoe.RouterConfig(top_k=2))
BY_HAND = functools.partial(jaxmoe.moe_layer, X, ROUTING.topk_ids, ROUTING.topk_weights, EXPERTS, axis_name=None)


def test_it_is_the_same_as_its_ids_and_weights():
    for y in (
        jaxmoe.moe_layer(X, ROUTING, EXPERTS, axis_name=None),
        jaxmoe.moe_layer(X, ROUTING, experts=EXPERTS, axis_name=None),
    ):
        np.testing.assert_array_equal(y, BY_HAND())
    told = jaxmoe.explain(X, ROUTING, EXPERTS, axis_name=None, return_stats=True)
    assert told.call == jaxmoe.explain(X, ROUTING.topk_ids, ROUTING.topk_weights, EXPERTS, axis_name=None).call


def test_gradients_reach_the_logits():
    def loss(logits, by_hand):
        routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2))
        if by_hand:
            return jnp.sum(jaxmoe.moe_layer(X, routing.topk_ids, routing.topk_weights, EXPERTS, axis_name=None) ** 2)
        return jnp.sum(jaxmoe.moe_layer(X, routing, EXPERTS, axis_name=None) ** 2)

    gradient, expected = (
        jax.jit(jax.grad(functools.partial(loss, by_hand=by_hand)))(LOGITS) for by_hand in (False, True)
    )
    np.testing.assert_array_equal(gradient, expected)
    assert np.asarray(gradient).any()


def test_a_router_over_another_number_of_experts_is_refused():
    wide = jaxmoe.route(jax.random.normal(jax.random.key(3), (16, 16)), jaxmoe.RouterConfig(top_k=2))
    with pytest.raises(ValueError, match=r"chooses among 16 experts, and there are 8 \(8 in experts, 1 rank"):
        jaxmoe.moe_layer(X, wide, EXPERTS, axis_name=None)


def test_whole_experts_inside_shard_map_are_refused_also_where_jax_does_not_know_that_they_are():
    def layer(x, routing, experts):
        return jaxmoe.moe_layer(x, routing, experts)

    specs = (P("expert"), P("expert"), P())
    sharded = jax.shard_map(layer, mesh=mesh_of("expert"), in_specs=specs, out_specs=P("expert"), check_vma=False)
    with pytest.raises(ValueError, match=r"chooses among 8 experts, and there are 64 .*experts are those of one rank"):
        jax.jit(sharded)(X, ROUTING, EXPERTS)


def test_missing_experts_and_weights_beside_a_routing_are_refused():
    with pytest.raises(TypeError, match="there are no experts"):
        jaxmoe.moe_layer(X, ROUTING, axis_name=None)
    with pytest.raises(TypeError, match="there are no experts"):
        jaxmoe.moe_layer(X, ROUTING.topk_ids, ROUTING.topk_weights, axis_name=None)
    with pytest.raises(TypeError, match=r"third argument is an Experts and the second one is an Array\w*, no Routing"):
        jaxmoe.moe_layer(X, ROUTING.topk_ids, EXPERTS, axis_name=None)
    with pytest.raises(TypeError, match="topk_weights come beside a Routing"):
        jaxmoe.moe_layer(X, ROUTING, ROUTING.topk_weights, EXPERTS, axis_name=None)
