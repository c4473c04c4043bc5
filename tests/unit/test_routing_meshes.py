"""`route`, the balance losses and the load statistics under jit, vmap and shard_map: the same numbers on every mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxmoe
from jaxmoe.routing import largest
from tests.unit.router_inputs import GROUPED, random_logits


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def everything(logits: jax.Array, axis_name: str | tuple[str, ...] | None = None) -> Any:
    token_valid = logits[..., 0] > -1
    routing = jaxmoe.route(logits, GROUPED, token_valid=token_valid, selection_bias=jnp.linspace(0, 0.1, 12))
    aux = jaxmoe.router_aux(routing, logits, token_valid=token_valid, axis_name=axis_name)
    replicated = (
        jaxmoe.load_balancing_loss(routing, axis_name=axis_name),
        jaxmoe.router_z_loss(logits, token_valid=token_valid, axis_name=axis_name),
        jaxmoe.load_stats(routing.topk_ids, 12, token_valid=token_valid, axis_name=axis_name),
        (aux.load_balancing_loss, aux.router_z_loss, aux.stats),
    )
    return routing, replicated


def assert_close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, wanted)


def test_a_config_is_a_static_argument_of_jit_and_equal_ones_share_a_compilation() -> None:
    traced = []

    @jax.jit
    def route(logits: jax.Array, config: jaxmoe.RouterConfig) -> jaxmoe.Routing:
        traced.append(config)
        return jaxmoe.route(logits, config)

    logits = random_logits(4, 12)
    assert_close(route(logits, GROUPED), jaxmoe.route(logits, GROUPED))
    route(logits, dataclasses.replace(GROUPED))
    assert traced == [GROUPED]
    route(logits, dataclasses.replace(GROUPED, top_k=2))
    assert len(traced) == 2


def test_vmap_equals_a_loop() -> None:
    logits = random_logits(3, 4, 12)
    one = jax.jit(everything)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *[one(row) for row in logits])
    assert_close(jax.jit(jax.vmap(everything))(logits), stacked)


def sum_of_losses(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array], jax.Array]:
    def total(logits: jax.Array) -> jax.Array:
        routing, (balance, z_loss, _, (balance_too, z_loss_too, _)) = function(logits)
        together = balance_too + z_loss_too
        return balance + z_loss + 0.5 * together + routing.topk_weights[..., 0].sum()

    return total


@pytest.mark.slow
@pytest.mark.parametrize("names", [("expert",), ("data", "expert")])
def test_inside_shard_map_the_axis_makes_losses_and_counts_those_of_the_global_batch(names: tuple[str, ...]) -> None:
    logits = random_logits(16, 12)
    split = PartitionSpec(names)
    sharded = jax.shard_map(
        lambda rows: everything(rows, names),
        mesh=mesh_of((4,) if len(names) == 1 else (2, 2), names),
        in_specs=split,
        out_specs=(split, PartitionSpec()),
    )
    assert_close(jax.jit(sharded)(logits), jax.jit(everything)(logits))
    gradient, wanted = (jax.jit(jax.grad(sum_of_losses(function)))(logits) for function in (sharded, everything))
    assert_close(gradient, wanted)


def test_a_gradient_taken_inside_shard_map_is_that_of_the_global_loss() -> None:
    logits = random_logits(16, 12)

    def loss(logits: jax.Array, axis_name: str | None) -> jax.Array:
        return jaxmoe.load_balancing_loss(jaxmoe.route(logits, GROUPED), axis_name=axis_name)

    split = PartitionSpec("expert")
    inside = jax.shard_map(
        jax.grad(lambda rows: loss(rows, "expert")), mesh=mesh_of((4,), ("expert",)), in_specs=split, out_specs=split
    )
    assert_close(jax.jit(inside)(logits), jax.jit(jax.grad(lambda logits: loss(logits, None)))(logits))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_logits_and_a_bias_that_explicit_axes_split_over_experts_give_the_same(jit: bool) -> None:
    def loss(logits: jax.Array, bias: jax.Array) -> jax.Array:
        routing = jaxmoe.route(logits, GROUPED, selection_bias=bias)
        aux = jaxmoe.router_aux(routing, logits)
        losses = aux.load_balancing_loss + aux.router_z_loss + jaxmoe.router_z_loss(logits)
        return jnp.sum(routing.topk_weights**2) + losses

    logits, bias = random_logits(4, 12), jnp.linspace(0, 0.1, 12)
    wanted = jax.value_and_grad(loss)(logits, bias)
    with jax.set_mesh(mesh_of((2, 2), ("data", "expert"), AxisType.Explicit)):
        split = jax.reshard(logits, PartitionSpec("data", "expert")), jax.reshard(bias, PartitionSpec("expert"))
        function = jax.value_and_grad(loss)
        got = (jax.jit(function) if jit else function)(*split)
        assert jax.typeof(got[1]).sharding.spec == PartitionSpec("data", "expert")
    assert_close(got, wanted)


def test_losses_that_were_read_under_one_mesh_are_read_under_another() -> None:
    logits = random_logits(4, 8)
    aux = jaxmoe.router_aux(jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2)), logits)
    found = [aux.load_balancing_loss]
    for kind in (AxisType.Explicit, AxisType.Auto):
        with jax.set_mesh(mesh_of((4,), ("expert",), kind)):
            found.append(aux.load_balancing_loss)
    assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("tokens", [("expert", "data"), ("data",), (None, None, "expert"), ()], ids=str)
def test_a_mask_and_a_choice_that_are_split_otherwise_than_logits_give_the_same(tokens: Any, jit: bool) -> None:
    def found(logits: jax.Array, mask: jax.Array, ids: jax.Array) -> Any:
        routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2), token_valid=mask, topk_ids=ids)
        aux = jaxmoe.router_aux(routing, logits, token_valid=mask)
        counts = jaxmoe.load_stats(ids, 8, token_valid=mask).counts
        return routing, aux.load_balancing_loss, aux.router_z_loss, aux.stats.counts, counts

    logits, mask = random_logits(4, 4, 8), random_logits(4, 4) > -0.5
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 9, (4, 4, 2)), jnp.int32)
    wanted = found(logits, mask, ids)
    with jax.set_mesh(mesh_of((2, 2), ("data", "expert"), AxisType.Explicit)):
        split = [jax.reshard(logits, PartitionSpec("data", "expert"))]
        split += [jax.reshard(mask, PartitionSpec(*tokens[:2])), jax.reshard(ids, PartitionSpec(*tokens))]
        got = (jax.jit(found) if jit else found)(*split)
        assert jax.typeof(got[0].topk_ids).sharding.spec == PartitionSpec("data", "expert", None)
    assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_need_no_axis_name_under_jit(kind: AxisType) -> None:
    mesh = mesh_of((2, 2), ("data", "expert"), kind)
    logits = random_logits(8, 4, 12)
    functions = everything, jax.grad(sum_of_losses(everything))
    wanted = [jax.jit(function)(logits) for function in functions]
    with jax.set_mesh(mesh):
        sharded = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "expert")))
        got = [jax.jit(function)(sharded) for function in functions]
    assert_close(jax.device_get(got), wanted)


def test_an_axis_that_the_surrounding_shard_map_leaves_automatic_is_refused() -> None:
    shard = jax.shard_map(
        lambda ids: jaxmoe.load_stats(ids, 4, axis_name=("expert", "data")).rows_per_expert,
        mesh=mesh_of((2, 2), ("data", "expert")),
        in_specs=PartitionSpec("expert"),
        out_specs=PartitionSpec(),
        axis_names={"expert"},
    )
    with pytest.raises(ValueError, match="names 'data', which is not a manual mesh axis here"):
        jax.jit(shard)(jnp.zeros((4, 1), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("many_scores", [0, 2**19])
@pytest.mark.parametrize("config", [jaxmoe.RouterConfig(top_k=4), GROUPED])
def test_on_gpus_ids_come_without_top_k_and_are_those_of_top_k(
    config: jaxmoe.RouterConfig, many_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA makes zeros of the ids of `top_k` of logits that are split over GPUs, which a CPU can't show."""
    # With many ties, with infinities and with NaNs of both signs.
    logits = jnp.round(2 * random_logits(256, 12)) / 2
    logits = logits.at[0, 3].set(jnp.inf).at[1, :5].set(-jnp.inf).at[2].set(-jnp.inf).at[3, 2:].set(-0.0)
    logits = logits.at[4, 2].set(jnp.nan).at[5, 7].set(-jnp.nan).at[6].set(-jnp.nan)
    bias = jnp.where(jnp.arange(12) % 3 == 0, -0.0, 0.0)
    ids = lambda logits: jaxmoe.route(logits, config, selection_bias=bias).topk_ids  # noqa: E731
    wanted = ids(logits)
    monkeypatch.setattr(largest, "_MANY_SCORES", many_scores)
    program = jax.jit(ids).trace(logits).lower(lowering_platforms=("cuda",)).as_text()
    assert "top_k" not in program
    assert ("stablehlo.sort" in program) == (many_scores > 0)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda values, *, cuda, **others: cuda(values))
    np.testing.assert_array_equal(ids(logits), wanted)
