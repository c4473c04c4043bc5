"""Layers whose experts are on several hosts, which ranks of this process stand for: the same results as on one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import ROUTING_KINDS, dense, relative_error
from tests.layer_calls import EXPERTS, HIDDEN, HOSTS, TOKENS, LayerChecks, as_dict, gradients_of, layer, mesh_of

NetworkPlan = jaxmoe.NetworkPlan
# 8 tokens per rank: several rounds, the last one partly used; chunks that do not divide the tokens.
WAYS = {
    "gather": NetworkPlan(way="gather", chunks=1),
    "gather in chunks": NetworkPlan(way="gather", chunks=3),
    "send": NetworkPlan(way="send", round_tokens=3),
    "send in chunks": NetworkPlan(way="send", chunks=2, round_tokens=2),
}


class TestMegakernel(LayerChecks):
    """What moves tokens between hosts is the same whatever computes the layer on one; this compiles soonest."""

    implementation = "megakernel"

    @pytest.mark.parametrize("way", ["gather in chunks", "send in chunks"])
    @pytest.mark.parametrize("hosts", HOSTS)
    def test_output_and_gradients_equal_the_reference_over_any_hosts(self, hosts, way):
        arguments = self.inputs(50, biases=True, routing="zipf", token_valid=True)
        self.check(arguments, hosts, network=WAYS[way])

    @pytest.mark.parametrize("way", ["gather", "send"])
    @pytest.mark.parametrize("routing", ROUTING_KINDS)
    def test_output_and_gradients_equal_the_reference_for_every_routing(self, routing, way):
        self.check(self.inputs(51, biases=True, routing=routing), "hosts 4 x 2 on one axis", network=WAYS[way])

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    def test_in_16_bits_the_error_is_at_most_twice_that_of_the_same_maths(self, way):
        arguments = self.inputs(52, biases=True, routing="zipf", dtype=jnp.bfloat16)
        self.check(arguments, "hosts 2 x 4", network=WAYS[way])

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    def test_gradients_of_experts_are_rounded_once_however_many_launches_add_to_them(self, way):
        arguments = self.inputs(53, routing="zipf", dtype=jnp.bfloat16)
        narrow = as_dict(self.gradients(arguments, "hosts 8 x 1", network=WAYS[way]))
        widened = arguments._replace(experts=arguments.experts.astype(jnp.float32))
        wide = as_dict(self.gradients(widened, "hosts 8 x 1", network=WAYS[way]))
        compared = [key for key, value in wide.items() if value.dtype != narrow[key].dtype]
        assert len(compared) == 3
        for key in compared:
            np.testing.assert_array_equal(wide[key].astype(jnp.bfloat16), narrow[key], key)

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    def test_the_same_call_gives_the_same_bits_and_what_is_kept_changes_none(self, way):
        arguments = self.inputs(54, routing="zipf", dtype=jnp.bfloat16, biases=True)
        network = WAYS[way]
        first = (
            self.run(arguments, "hosts 4 x 2 on one axis", network=network),
            self.gradients(arguments, "hosts 4 x 2 on one axis", network=network, residuals="save"),
        )
        for residuals in ("save", "recompute"):
            again = (
                self.run(arguments, "hosts 4 x 2 on one axis", network=network),
                self.gradients(arguments, "hosts 4 x 2 on one axis", network=network, residuals=residuals),
            )
            jax.tree.map(np.testing.assert_array_equal, first, again)

    @pytest.mark.parametrize("way", ["gather in chunks", "send in chunks"])
    def test_statistics_count_every_slot_once(self, way):
        arguments = self.inputs(55, routing="unused-slots")
        y, stats = self.run(arguments, "hosts 2 x 4", network=WAYS[way], return_stats=True)
        self.assert_near(y, dense(arguments))
        expected = jaxmoe.load_stats(arguments.topk_ids, EXPERTS)
        jax.tree.map(np.testing.assert_array_equal, stats, expected)

    @pytest.mark.parametrize("way", ["gather", "send"])
    def test_nan_in_a_token_stays_with_that_token(self, way):
        arguments = self.inputs(56, routing="uniform")
        poisoned = arguments._replace(x=arguments.x.at[5].set(jnp.nan))
        y = np.asarray(self.run(poisoned, "hosts 2 x 4", network=WAYS[way]))
        clean = np.asarray(self.run(arguments, "hosts 2 x 4", network=WAYS[way]))
        others = np.arange(TOKENS) != 5
        assert np.isnan(y[5]).all()
        np.testing.assert_array_equal(y[others], clean[others])

    @pytest.mark.parametrize("way", ["gather", "send"])
    def test_no_tokens_give_no_tokens(self, way):
        arguments = self.inputs(57, tokens=0)
        assert self.run(arguments, "hosts 2 x 4", network=WAYS[way]).shape == (0, HIDDEN)

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    @pytest.mark.parametrize("kind", ["128x128", "mxfp4"])
    def test_experts_in_8_and_4_bits_give_what_they_give_on_one_host(self, kind, way):
        # Two blocks of scales along each side.
        arguments = self.inputs(58, hidden=256, intermediate=256, routing="zipf")
        quantized = arguments._replace(experts=jax.jit(lambda e: jaxmoe.quantize(e, kind))(arguments.experts))
        options: dict[str, Any] = {"precision": "w8a16" if kind == "128x128" else None}
        expected = self.run(quantized, "all devices", **options)
        y = self.run(quantized, "hosts 4 x 2 on one axis", network=WAYS[way], **options)
        assert relative_error(y, expected) < 1e-6

        def of_tokens(placement: str, **options: Any) -> Any:
            run = layer(placement, **self.options() | options)
            return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(run(quantized._replace(x=x))))))(quantized.x)

        dx = of_tokens("hosts 4 x 2 on one axis", network=WAYS[way], **options)
        assert relative_error(dx, of_tokens("all devices", **options)) < 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    def test_inside_shard_map_levels_are_stated(self, way):
        arguments = self.inputs(59, biases=True, routing="zipf")
        network = dataclasses.replace(WAYS[way], ranks_per_host=2)

        def run(a: Any) -> jax.Array:
            on_rank = lambda *arrays: jaxmoe.moe_layer(*arrays, network=network, **self.options())  # noqa: E731
            rows, experts = P("expert"), P("expert")
            specs = (rows, rows, rows, experts)
            return jax.shard_map(on_rank, mesh=mesh_of("expert"), in_specs=specs, out_specs=rows)(*a[:4])

        self.assert_near(jax.jit(run)(arguments), dense(arguments))
        self.assert_near(gradients_of(run)(arguments), gradients_of(dense)(arguments))

    @pytest.mark.parametrize("way", ["gather in chunks", "send"])
    def test_explicit_axes_keep_the_sharding_of_the_tokens(self, way):
        mesh = jax.make_mesh((2, 4), ("host", "expert"), axis_types=(AxisType.Explicit,) * 2)
        arguments = self.inputs(60)
        network = dataclasses.replace(WAYS[way], ranks_per_host=4)
        with jax.set_mesh(mesh):
            x = jax.device_put(arguments.x, NamedSharding(mesh, P("host", None)))
            options: dict[str, Any] = {"axis_name": ("host", "expert"), "network": network, **self.options()}
            y = jax.jit(lambda x: jaxmoe.moe_layer(x, *arguments[1:4], **options))(x)
            assert y.sharding.spec == P("host", None)
            self.assert_near(y, dense(arguments))


class TestXla(LayerChecks):
    implementation = "xla"

    @pytest.mark.parametrize(
        ("hosts", "way"), [("hosts 2 x 4", "gather in chunks"), ("hosts 2 x 2 for each of two groups", "send")]
    )
    def test_output_and_gradients_equal_the_reference(self, hosts, way):
        self.check(self.inputs(61, biases=True, routing="zipf", token_valid=True), hosts, network=WAYS[way])


class TestReference(LayerChecks):
    implementation = "reference"

    def test_output_and_gradients_equal_those_of_one_host(self):
        self.check(self.inputs(62, routing="zipf"), "hosts 4 x 2 on one axis", network=WAYS["gather"])


def second_derivatives(network: Any, implementation: Any) -> Any:
    """Of the sum of a layer's sines with respect to tokens, weights and experts, along their cosines, and the truth."""
    arguments = jaxmoe.testing.make_inputs(61, tokens=16, hidden=8, intermediate=8, num_experts=8)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def gradients(run: Any) -> Any:
        def loss(at: Any) -> jax.Array:
            x, weights, experts = at
            return jnp.sum(jnp.sin(run(arguments._replace(x=x, topk_weights=weights, experts=experts))))

        at = arguments.x, arguments.topk_weights, arguments.experts
        return jax.jit(lambda at: jax.jvp(jax.grad(loss), (at,), (jax.tree.map(jnp.cos, at),))[1])(at)

    def run(arguments: Any) -> jax.Array:
        return jaxmoe.moe_layer(*arguments[:4], mesh=mesh, network=network, implementation=implementation)

    return (lambda: gradients(run)), (lambda: gradients(dense))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_hessian_vector_products_work_forward_over_reverse_where_hosts_gather(chunks, implementation):
    found, truth = second_derivatives(NetworkPlan(ranks_per_host=2, way="gather", chunks=chunks), implementation)
    for got, want in zip(*(jax.tree.leaves(of()) for of in (found, truth)), strict=True):
        assert relative_error(got, want) < 5e-6


@pytest.mark.parametrize("implementation", ["xla", "reference", "megakernel"])
def test_second_derivatives_are_refused_where_hosts_send_and_the_way_that_has_them_named(implementation):
    found, _ = second_derivatives(NetworkPlan(ranks_per_host=2, way="send", round_tokens=2), implementation)
    with pytest.raises(NotImplementedError, match=r"way='send'.*first derivatives only.*NetworkPlan\(way='gather'\)"):
        found()
