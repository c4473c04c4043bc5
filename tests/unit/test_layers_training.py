"""Training with Flax layers in the way of either library: steps, scans over layers and the selection bias."""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
import jaxmoe.linen
import jaxmoe.nnx
from jaxmoe import RouterConfig
from jaxmoe.testing import relative_error
from tests.unit.blocks_by_hand import (
    BATCH,
    BLOCKS,
    COTANGENT,
    DEEPSEEK_V3,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LENGTH,
    X,
    by_hand,
    fill,
    numbers,
)
from tests.unit.flax_layers import LinenLayer, NNXLayer, make_mesh, place


def fill_boxes(boxes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Linen's parameters with random values, in their boxes of metadata."""
    arrays = fill({name: box.value for name, box in boxes.items()})
    return {name: box.replace_boxed(arrays[name]) for name, box in boxes.items()}


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def two_layers_by_hand(stacked: Mapping[str, jax.Array]) -> Any:
    """Returns gradients of two residual layers in a row, their output and their rows per expert."""
    tokens, rows = X().reshape(-1, HIDDEN), []
    for index in range(2):
        layer = {name: array[index] for name, array in stacked.items()}
        out, *_, load = by_hand(BLOCKS["deepseek-v3"], layer, jnp.zeros(EXPERTS), tokens)
        tokens, rows = tokens + out, [*rows, load]
    return jnp.sum(tokens * COTANGENT().reshape(-1, HIDDEN)), (tokens, jnp.stack(rows))


class Behaviours:
    """What a layer of either library does in training."""

    layer: Any

    def test_updating_the_selection_bias_evens_the_load(self):
        arguments = {"router": RouterConfig(top_k=2, score="sigmoid"), "selection_bias": True}
        p = fill(self.layer().shapes(**arguments))
        # Tokens have a direction in common, and some experts like it.
        p["router_kernel"] += 0.3 * numbers(8, 1, EXPERTS)
        x = numbers(9, 128, HIDDEN) + 0.3
        call = jax.jit(self.layer().calling(**arguments, implementation="reference"))
        bias, loads = jnp.zeros(EXPERTS), []
        for _ in range(40):
            _, aux = call(p, bias, x)
            loads.append(float(aux.stats.max_over_mean_load))
            bias = self.layer().moved_bias(bias, aux.stats, 0.02)
        assert loads[0] > 2
        assert max(loads[-5:]) < 1.4


class TestNNX(Behaviours):
    layer = NNXLayer

    @pytest.mark.slow
    def test_training_in_the_way_of_nnx_lowers_the_loss(self):
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            arguments = {**BLOCKS["everything"].arguments, "axis_name": "expert"}
            names = self.layer().names(**arguments)
            parameters = fill(self.layer().shapes(**arguments))
            placed = {name: place(array, mesh, P(*names[name])) for name, array in parameters.items()}
            moe = self.layer().filled(placed, jnp.zeros(EXPERTS), **arguments)
            optimizer = nnx.Optimizer(moe, optax.adam(1e-2), wrt=nnx.Param)
            x, target = (place(array, mesh, P(("data", "expert"))) for array in (X(), COTANGENT()))

            @nnx.jit
            def step(moe, optimizer, x, target):
                def objective(moe):
                    y, aux = nnx.remat(lambda moe, x: moe(x))(moe, x)
                    return jnp.mean((y - target) ** 2) + 0.01 * aux.load_balancing_loss, aux

                (loss, aux), gradients = nnx.value_and_grad(objective, has_aux=True)(moe)
                optimizer.update(moe, gradients)
                moe.update_selection_bias(aux.stats, 1e-3)
                return loss, aux

            losses, bias = [], np.zeros(EXPERTS, np.float32)
            for _ in range(4):
                loss, aux = step(moe, optimizer, x, target)
                losses.append(float(loss))
                rows = np.asarray(aux.stats.rows_per_expert)
                bias += 1e-3 * np.sign(rows.mean() - rows)
            moments = nnx.state(optimizer)["opt_state"][0]["mu"]["w_gate"]
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4
        np.testing.assert_allclose(moe.selection_bias[...], bias, atol=1e-6)
        assert np.any(bias)
        assert jax.typeof(moe.w_gate[...]).sharding.spec == P("expert", None, None)
        assert jax.typeof(moments[...]).sharding.spec == P("expert", None, None)

    @pytest.mark.slow
    def test_scan_over_stacked_layers_is_the_loop_over_layers(self):
        arguments = {**BLOCKS["deepseek-v3"].arguments, "axis_name": "expert", "data_axes": "data"}
        metadata = {nnx.PARTITION_NAME: None}

        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata=metadata)
        def create(rngs):
            return jaxmoe.nnx.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, rngs=rngs)

        @nnx.jit
        @functools.partial(nnx.value_and_grad, has_aux=True)
        def scanned(stack, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=metadata)
            @nnx.remat
            def body(moe, x):
                y, aux = moe(x)
                return x + y, aux

            y, aux = body(stack, x)
            return jnp.sum(y * COTANGENT()), (y, aux)

        mesh = make_mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            stack: Any = nnx.eval_shape(lambda: create(nnx.Rngs(0)))
            state = nnx.state(stack, nnx.Param)
            arrays = fill(nnx.to_pure_dict(state))
            specs: Any = nnx.get_partition_spec(state)
            for name, array in arrays.items():
                getattr(stack, name).set_value(place(array, mesh, specs[name].get_value()))
            stack.selection_bias.set_value(jnp.zeros((2, EXPERTS)))
            (_, (y, aux)), gradients = scanned(stack, X())
            stack.update_selection_bias(aux.stats, 0.5)
        assert specs["w_gate"].get_value() == P(None, "expert", None, None)

        expected_gradients, (truth, rows) = two_layers_by_hand(arrays)
        assert relative_error(y.reshape(-1, HIDDEN), truth) < 1e-5
        np.testing.assert_array_equal(aux.stats.rows_per_expert, rows)
        for name, gradient in expected_gradients.items():
            assert relative_error(gradients[name][...], gradient) < 2e-5, name
        mean = rows.sum(-1, keepdims=True) / EXPERTS
        np.testing.assert_array_equal(stack.selection_bias[...], 0.5 * np.sign(mean - rows))

    def test_a_scan_over_layers_stacks_routing_and_logits_where_they_are_asked_for_and_one_array_else(self):
        def aux_of(**arguments):
            stack = nnx.vmap(lambda rngs: self.layer().make(**arguments))(nnx.Rngs(0).split(2))
            body = nnx.scan(lambda moe, x: moe(x), in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
            return body(stack, X())[1]

        (alone,) = jax.tree.leaves(jax.eval_shape(aux_of))
        assert alone.shape[0] == 2
        assert alone.ndim == 4
        aux = jax.eval_shape(lambda: aux_of(return_routing=True))
        assert aux.routing.topk_ids.shape == (2, BATCH, LENGTH, 2)
        assert aux.logits.shape == aux.routing.scores.shape == (2, BATCH, LENGTH, EXPERTS)
        assert aux.sums.shape == alone.shape

    def test_updating_a_selection_bias_that_is_not_there_says_how_to_have_one(self):
        moe = self.layer().abstract()
        stats = jaxmoe.load_stats(jnp.zeros((1, 1), int), EXPERTS)
        with pytest.raises(ValueError, match=r"no selection bias\. Make it with selection_bias=True"):
            moe.update_selection_bias(stats)

    @pytest.mark.usefixtures("unchecked_shapes")
    def test_counts_in_the_place_of_statistics_are_an_error_that_says_so(self):
        counts: Any = jaxmoe.load_stats(jnp.zeros((1, 1), int), EXPERTS).rows_per_expert
        with pytest.raises(TypeError, match=r"it must be jaxmoe\.MoEStats, e\.g\. aux\.stats"):
            self.layer().make(selection_bias=True).update_selection_bias(counts)


class TestLinen(Behaviours):
    layer = LinenLayer

    @pytest.mark.slow
    def test_training_in_the_way_of_linen_lowers_the_loss(self):
        moe = self.layer().make(**BLOCKS["everything"].arguments, axis_name="expert", data_axes="data")
        with jax.set_mesh(make_mesh(AxisType.Auto)):
            variables = jax.eval_shape(moe.init, jax.random.key(0), X())
            parameters, state = fill_boxes(variables["params"]), {"selection_bias": jnp.zeros(EXPERTS)}
            optimizer = optax.adam(1e-2)
            moments = optimizer.init(parameters)

            @jax.jit
            def step(parameters, state, moments):
                def objective(parameters):
                    variables = {"params": parameters, "moe_state": state}
                    y, sown = moe.apply(variables, X(), mutable=["losses", "intermediates"])
                    (balance,) = sown["losses"]["load_balancing_loss"]
                    return jnp.mean((y - COTANGENT()) ** 2) + 0.01 * balance, sown["intermediates"]

                (loss, sown), gradients = jax.value_and_grad(objective, has_aux=True)(parameters)
                updates, moments_after = optimizer.update(gradients, moments)
                state_after = jaxmoe.linen.update_selection_bias(state, sown, 1e-3)
                return loss, optax.apply_updates(parameters, updates), state_after, moments_after

            losses = []
            for _ in range(4):
                loss, parameters, state, moments = step(parameters, state, moments)
                losses.append(float(loss))
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 4
        assert jnp.any(state["selection_bias"])
        assert nn.get_partition_spec(parameters)["w_gate"] == P("expert", None, None)

    @pytest.mark.slow
    def test_scan_over_layers_is_the_loop_over_layers(self):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                arguments = {**BLOCKS["deepseek-v3"].arguments, "data_axes": "data"}
                moe = jaxmoe.linen.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, name="moe")
                scan = nn.scan(
                    nn.remat(lambda moe, x, _: (x + moe(x), None)),
                    variable_axes={"params": 0, "moe_state": 0, "losses": 0, "intermediates": 0},
                    split_rngs={"params": True},
                    length=2,
                    metadata_params={nn.PARTITION_NAME: None},
                )
                return scan(moe, x, None)[0]

        with jax.set_mesh(make_mesh(AxisType.Auto)):
            variables = jax.eval_shape(Stack().init, jax.random.key(0), X())
            boxes = fill_boxes(variables["params"]["moe"])
            assert boxes["w_gate"].names == (None, "expert", None, None)
            state = {"moe": {"selection_bias": jnp.zeros(variables["moe_state"]["moe"]["selection_bias"].shape)}}

            @jax.jit
            @functools.partial(jax.grad, has_aux=True)
            def scanned(parameters, state):
                all_variables = {"params": parameters, "moe_state": state}
                y, sown = Stack().apply(all_variables, X(), mutable=["losses", "intermediates"])
                return jnp.sum(y * COTANGENT()), (y, sown)

            gradients, (y, sown) = scanned({"moe": boxes}, state)
            state = jaxmoe.linen.update_selection_bias(state, sown["intermediates"], 0.5)

        expected_gradients, (truth, rows) = two_layers_by_hand(fill(nn.unbox(variables["params"]["moe"])))
        assert relative_error(y.reshape(-1, HIDDEN), truth) < 1e-5
        for name, gradient in expected_gradients.items():
            assert relative_error(gradients["moe"][name].value, gradient) < 2e-5, name
        (stats,) = sown["intermediates"]["moe"]["moe_stats"]
        np.testing.assert_array_equal(stats.rows_per_expert, rows)
        assert sown["losses"]["moe"]["load_balancing_loss"][0].shape == (2,)
        mean = rows.sum(-1, keepdims=True) / EXPERTS
        np.testing.assert_array_equal(state["moe"]["selection_bias"], 0.5 * np.sign(mean - rows))

    def test_losses_and_statistics_are_sown_by_every_call_where_their_collections_are_mutable(self):
        class Twice(nn.Module):
            @nn.compact
            def __call__(self, x):
                moe = jaxmoe.linen.MoE(
                    HIDDEN, INTERMEDIATE, EXPERTS, DEEPSEEK_V3, selection_bias=True, axis_name=None, name="moe"
                )
                return moe(moe(x))

        x = X()[:, 0]
        variables = jax.eval_shape(Twice().init, jax.random.key(0), x)
        assert variables.keys() == {"params", "moe_state"}  # else what init sowed would count at every call
        assert jax.eval_shape(Twice().apply, variables, x).shape == x.shape
        parameters = {"moe": fill(variables["params"]["moe"])}
        state: Any = {"moe": {"selection_bias": jnp.zeros(EXPERTS)}}
        apply = jax.jit(functools.partial(Twice().apply, mutable=["losses", "intermediates"]))
        sown: Any = apply({"params": parameters, "moe_state": state}, x)[1]
        assert [len(values) for values in sown["losses"]["moe"].values()] == [2, 2]
        first, second = sown["intermediates"]["moe"]["moe_stats"]
        rows = first.rows_per_expert + second.rows_per_expert
        assert rows.sum() == 2 * 2 * BATCH

        others = {**state, "norm": {"scale": jnp.ones(1)}, "step": jnp.zeros(())}
        state = jaxmoe.linen.update_selection_bias(others, sown["intermediates"], 0.5)
        np.testing.assert_array_equal(state["moe"]["selection_bias"], 0.5 * np.sign(rows.mean() - rows))
        assert state["norm"] == others["norm"]
        assert state["step"] is others["step"]
        with pytest.raises(ValueError, match=r"no moe_stats lie beside it in intermediates, only \[\]"):
            jaxmoe.linen.update_selection_bias(others, {})

    @pytest.mark.filterwarnings("error")
    def test_intermediates_that_linen_captures_and_its_table_are_those_of_the_call(self):
        moe, x = self.layer().make(**BLOCKS["deepseek-v3"].arguments, axis_name=None), X()[:, 0]
        variables = jax.eval_shape(moe.init, jax.random.key(0), x)
        captured = functools.partial(
            moe.apply, capture_intermediates=lambda module, method: True, mutable=["intermediates"]
        )
        y, sown = jax.eval_shape(captured, variables, x)
        assert sown["intermediates"].keys() == {"__call__", "moe_stats"}
        assert sown["intermediates"]["__call__"] == (y,)
        table = moe.tabulate(jax.random.key(0), x, console_kwargs={"width": 200})
        assert all(name in table for name in variables["params"])
