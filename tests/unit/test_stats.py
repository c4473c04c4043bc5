"""Counts and losses are exact, and one sum: what `load_stats`, the losses and `router_aux` compute, and their HLO."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
import jaxmoe.nnx
from jaxmoe.routing import stats as counting

EXPERTS, TOP_K = 16, 3
SHAPE = (16, 4)  # of a batch of tokens
COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"


class Inputs(NamedTuple):
    """Of every function here: what a router made, and padding."""

    logits: Any
    routing: jaxmoe.Routing
    token_valid: Any


@functools.cache
def inputs() -> Inputs:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*SHAPE, EXPERTS)).astype(np.float32)
    # Tokens that are not valid hold ids and scores of experts all the same, and some ids are no experts.
    ids = rng.integers(-2, EXPERTS + 2, (*SHAPE, TOP_K)).astype(np.int32)
    ids[0, 0], ids[1, 1] = -1, EXPERTS
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    routing = jaxmoe.Routing(jnp.asarray(ids), jnp.ones(ids.shape), jnp.asarray(scores))
    return Inputs(jnp.asarray(logits), routing, jnp.asarray(rng.random(SHAPE) < 0.8))


def stats_of(a: Inputs, axes: Any) -> jaxmoe.MoEStats:
    return jaxmoe.load_stats(a.routing.topk_ids, EXPERTS, token_valid=a.token_valid, axis_name=axes)


def loss_of(a: Inputs, axes: Any) -> jax.Array:
    return jaxmoe.load_balancing_loss(a.routing, token_valid=a.token_valid, axis_name=axes)


def z_loss_of(a: Inputs, axes: Any) -> jax.Array:
    return jaxmoe.router_z_loss(a.logits, token_valid=a.token_valid, axis_name=axes)


class Figures(NamedTuple):
    """What is read of a `MoEAux`."""

    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    stats: jaxmoe.MoEStats


def figures_of(aux: jaxmoe.MoEAux) -> Figures:
    return Figures(aux.load_balancing_loss, aux.router_z_loss, aux.stats)


def aux_of(a: Inputs, axes: Any) -> Figures:
    return figures_of(jaxmoe.router_aux(a.routing, a.logits, token_valid=a.token_valid, axis_name=axes))


FUNCTIONS = {"load_stats": stats_of, "load_balancing_loss": loss_of, "router_z_loss": z_loss_of, "router_aux": aux_of}
# Name: mesh axes, how tokens are split over them, and whether that is inside shard_map. Where two dimensions of the
# tokens are split, XLA has an all-reduce for each, which GPUs fold into one.
MESHES = {
    "Auto": ({"expert": 8}, P("expert"), AxisType.Auto, False),
    "Auto, sequences split too": ({"data": 4, "expert": 2}, P("data", "expert"), AxisType.Auto, False),
    "Explicit": ({"expert": 8}, P("expert"), AxisType.Explicit, False),
    "Explicit, sequences split too": ({"data": 4, "expert": 2}, P("data", "expert"), AxisType.Explicit, False),
    "in shard_map": ({"expert": 8}, P("expert"), AxisType.Auto, True),
    "in shard_map, two axes": ({"data": 4, "expert": 2}, P(("data", "expert")), AxisType.Explicit, True),
}


def on_mesh(name: str, function: Callable[[Inputs, Any], Any]) -> tuple[Mesh, Callable[[Inputs], Any], Inputs]:
    """Returns a mesh, the function of whole arrays to call under it, and inputs that are split over it."""
    sizes, spec, kind, inside = MESHES[name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    placed = jax.device_put(inputs(), NamedSharding(mesh, spec))
    if not inside:
        return mesh, lambda a: function(a, None), placed
    on_rank = jax.shard_map(lambda a: function(a, tuple(sizes)), mesh=mesh, in_specs=(spec,), out_specs=P())
    return mesh, on_rank, placed


def collectives(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, str]]:
    """Returns the kind and result type of every instruction of the compiled function that talks to other devices."""
    hlo = jax.jit(function).lower(*arguments).compile().as_text() or ""
    return [(kind, type_) for type_, kind in re.findall(rf"= (\S+|\(.*?\)) ({COLLECTIVES})(?:-start)?\(", hlo)]


def gradient_of(function: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    """Returns the gradients of all float results with respect to scores and logits, and the results."""

    def total(at: tuple[Any, Any], a: Inputs) -> tuple[Any, Any]:
        scores, logits = at
        routing = jaxmoe.Routing(a.routing.topk_ids, a.routing.topk_weights, scores)
        results = function(Inputs(logits, routing, a.token_valid))
        floats = [leaf for leaf in jax.tree.leaves(results) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(weight * leaf for weight, leaf in enumerate(floats, 1)), results

    return lambda a: jax.grad(total, has_aux=True)((a.routing.scores, a.logits), a)


# --- one all-reduce --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_all_reduce_of_floats_per_split_dimension_is_all_that_crosses_the_mesh(name: str, mesh_name: str) -> None:
    mesh, function, placed = on_mesh(mesh_name, FUNCTIONS[name])
    with jax.set_mesh(mesh):
        found = collectives(function, placed)
    assert [kind for kind, _ in found] == ["all-reduce"] * len(MESHES[mesh_name][1])
    assert all(re.fullmatch(r"f32\[\d+\]\S*", type_) for _, type_ in found), found


@pytest.mark.parametrize("mesh_name", MESHES)
def test_gradients_need_no_further_all_reduce(mesh_name: str) -> None:
    mesh, function, placed = on_mesh(mesh_name, aux_of)
    with jax.set_mesh(mesh):
        found = collectives(gradient_of(function), placed)
    assert [kind for kind, _ in found] == ["all-reduce"] * len(MESHES[mesh_name][1])


def layer_with(what: str, x: jax.Array, a: Inputs, experts: jaxmoe.Experts) -> Any:
    ids, weights = a.routing.topk_ids, a.routing.topk_weights
    y = jaxmoe.moe_layer(x, ids, weights, experts, implementation="xla", return_stats=True)
    return (y, jaxmoe.load_balancing_loss(a.routing)) if what == "both" else y


@pytest.mark.parametrize("what", ["statistics", "both"])
@pytest.mark.parametrize("mesh_name", ["Auto", "Explicit"])
def test_statistics_of_a_layer_and_a_loss_beside_it_share_an_all_reduce(mesh_name: str, what: str) -> None:
    mesh, function, placed = on_mesh(mesh_name, lambda a, _: layer_with(what, x, a, experts))
    experts = jaxmoe.Experts.init(jax.random.key(0), EXPERTS, 8, 8)
    x = jnp.ones((*SHAPE, 8))
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P("expert"))
        x, experts = jax.device_put((x, experts), split)
        (type_,) = (type_ for kind, type_ in collectives(function, placed) if kind == "all-reduce")
    assert "s32" not in type_  # XLA joins all-reduces of one type


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_flax_layer_sums_its_losses_and_its_load_in_one_all_reduce(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(kind, kind))
    router = jaxmoe.RouterConfig.mixtral()
    with jax.set_mesh(mesh):
        moe = jaxmoe.nnx.MoE(8, 8, EXPERTS, router, data_axes="data", implementation="xla", rngs=nnx.Rngs(0))
        graph, state = nnx.split(moe)
        x = jax.device_put(jnp.ones((8, 4, 8)), NamedSharding(mesh, P(("data", "expert"))))

        def call(state: Any, x: Any) -> Any:
            y, aux = nnx.merge(graph, state)(x)
            return y, figures_of(aux)

        found = collectives(call, state, x)
    assert [type_[:3] for kind, type_ in found if kind == "all-reduce"] == ["f32"]


@pytest.mark.parametrize("mesh_name", ["Auto", "Auto, sequences split too"])
@pytest.mark.parametrize("shape", [SHAPE, (8, 4), (4096, 2)])
def test_in_a_scan_over_layers_nothing_crosses_the_mesh_before_its_end(mesh_name: str, shape: tuple[int, int]) -> None:
    sizes, spec, _, _ = MESHES[mesh_name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))  # noqa: E731
    routing = jaxmoe.Routing(
        place(jnp.zeros((*shape, TOP_K), int), *spec),
        place(jnp.ones((*shape, TOP_K)), *spec),
        place(jnp.ones((*shape, EXPERTS)), *spec),
    )

    def layers(routing: jaxmoe.Routing, factors: jax.Array) -> Any:
        layer = lambda scores, factor: (scores * factor, jaxmoe.router_aux(dataclasses.replace(routing, scores=scores)))  # noqa: E731
        _, aux = jax.lax.scan(layer, routing.scores, factors)
        return figures_of(aux)

    program = jax.jit(layers).lower(routing, place(jnp.ones(3))).compile().as_text() or ""
    functions = [text.strip() for text in program.split("\n\n")]
    (entry,) = (text for text in functions if text.startswith("ENTRY"))
    found = re.findall(rf" ({COLLECTIVES})(?:-start)?\(", program)
    assert found == re.findall(rf" ({COLLECTIVES})(?:-start)?\(", entry) == ["all-reduce"] * len(found)
    assert 1 <= len(found) <= len(spec)


# --- the same numbers ------------------------------------------------------------------------------------------------


def by_hand(a: Inputs) -> tuple[Any, Any]:
    """Losses, statistics and their gradients in NumPy and float64, with loops over slots."""
    ids, valid = np.asarray(a.routing.topk_ids), np.asarray(a.token_valid)
    rows, out_of_range = np.zeros(EXPERTS), 0
    for token in np.ndindex(*SHAPE):
        for expert in ids[token] if valid[token] else ():
            if 0 <= expert < EXPERTS:
                rows[expert] += 1
            else:
                out_of_range += expert != -1
    routed = valid & ((ids >= 0) & (ids < EXPERTS)).any(-1)
    scores, logits = np.asarray(a.routing.scores, np.float64), np.asarray(a.logits, np.float64)
    balance = EXPERTS * (rows / rows.sum() * scores[routed].mean(0)).sum()
    log_sum = np.log(np.exp(logits).sum(-1))
    z = (log_sum[valid] ** 2).mean()
    stats = np.array([*rows, out_of_range, ids.size - rows.sum() - out_of_range])
    dscores = routed[..., None] * EXPERTS * rows / rows.sum() / routed.sum()
    softmax = np.exp(logits - log_sum[..., None])
    dlogits = 2 * valid[..., None] * 2 * log_sum[..., None] * softmax / valid.sum()
    return (balance, z, stats), (dscores, dlogits)


@pytest.mark.parametrize("mesh_name", ["no mesh", *MESHES])
def test_losses_statistics_and_gradients_are_those_of_the_formulas_in_float64(mesh_name: str) -> None:
    wanted, wanted_gradients = by_hand(inputs())
    if mesh_name == "no mesh":
        gradients, aux = jax.jit(gradient_of(lambda a: aux_of(a, None)))(inputs())
    else:
        mesh, function, placed = on_mesh(mesh_name, aux_of)
        with jax.set_mesh(mesh):
            gradients, aux = jax.jit(gradient_of(function))(placed)
    assert {leaf.dtype for leaf in jax.tree.leaves(aux.stats)} == {jnp.dtype(jnp.int32)}
    for got, exact in zip(jax.tree.leaves(aux), wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-6)
    for got, exact in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(got, exact, rtol=2e-6, atol=1e-9)


def test_together_and_one_by_one_are_the_same() -> None:
    a = inputs()
    aux = aux_of(a, None)
    np.testing.assert_allclose(aux.load_balancing_loss, loss_of(a, None), rtol=1e-6)
    np.testing.assert_allclose(aux.router_z_loss, z_loss_of(a, None), rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux.stats, stats_of(a, None))


def test_without_logits_the_z_loss_is_zero_and_nothing_else_changes() -> None:
    a = inputs()
    aux, whole = figures_of(jaxmoe.router_aux(a.routing, token_valid=a.token_valid)), aux_of(a, None)
    assert aux.router_z_loss == 0
    np.testing.assert_allclose(aux.load_balancing_loss, whole.load_balancing_loss, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux.stats, whole.stats)


@pytest.mark.usefixtures("unchecked_shapes")
def test_logits_of_another_routing_are_refused() -> None:
    a = inputs()
    with pytest.raises(ValueError, match=r"logits have shape \(64, 16\).* \(16, 4, 16\). Pass those, or none"):
        jaxmoe.router_aux(a.routing, a.logits.reshape(-1, EXPERTS))


def test_arrays_that_are_split_differently_over_explicit_axes_are_counted_together() -> None:
    a = inputs()
    mesh = jax.make_mesh((4, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))  # noqa: E731
        scores = put(a.routing.scores, "data", None, "expert")
        routing = jaxmoe.Routing(put(a.routing.topk_ids), put(a.routing.topk_weights), scores)
        for token_valid in (put(a.token_valid), put(a.token_valid, "data")):
            aux = jax.jit(aux_of, static_argnums=1)(Inputs(put(a.logits, "data"), routing, token_valid), None)
            for got, exact in zip(jax.tree.leaves(aux), by_hand(a)[0], strict=True):
                np.testing.assert_allclose(got, exact, rtol=1e-6)


# --- exact counts ----------------------------------------------------------------------------------------------------


def test_more_slots_than_float32_counts_are_counted_exactly() -> None:
    # The last of them is not used, so that the count is odd: float32 has no odd numbers there.
    assert int(np.float32(2**24 + 3)) != 2**24 + 3
    ids = jnp.zeros((2**23 + 2, 2), jnp.int8).at[-1, -1].set(-1)
    stats = jax.jit(jaxmoe.load_stats, static_argnums=1)(ids, 1)
    assert stats.rows_per_expert.tolist() == [2**24 + 3]
    assert (int(stats.unused_slots), int(stats.out_of_range_ids)) == (1, 0)


@hypothesis.given(
    data=st.data(),
    ranks=st.sampled_from([1, 4]),
    shape=st.sampled_from([(5,), (40,), (7, 2), (3, 5, 4), (1, 9), (2, 33), (0, 2), (6, 0)]),
    most=st.integers(4, 300),
    num_experts=st.sampled_from([1, 3]),
)
def test_no_column_exceeds_what_it_counts_exactly_and_the_counts_are_right(
    data: st.DataObject, ranks: int, shape: tuple[int, ...], most: int, num_experts: int
) -> None:
    size = ranks * math.prod(shape)
    # Often all on one expert, which fills a column as much as can be.
    id_ = st.just(0) if data.draw(st.booleans()) else st.integers(-2, num_experts)
    ids = np.array(data.draw(st.lists(id_, min_size=size, max_size=size)), np.int32).reshape(ranks, *shape)

    def on_rank(ids: jax.Array) -> tuple[jax.Array, jaxmoe.MoEStats]:
        counters = counting.Counters.of(shape, num_experts, ("expert",))
        sums = counting.sum_over_tokens([counters.columns(ids, None)], ("expert",))
        return sums, counters.stats(sums)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_MOST_PER_COLUMN", most)
        sums, stats = jax.jit(jax.vmap(on_rank, axis_name="expert"))(ids)
    assert sums.max() <= most
    assert stats.rows_per_expert[0].tolist() == [(ids == expert).sum() for expert in range(num_experts)]
    assert stats.out_of_range_ids[0] == ((ids < -1) | (ids >= num_experts)).sum()
    assert stats.unused_slots[0] == ((ids < 0) | (ids >= num_experts)).sum()
    assert stats.dropped_rows[0] == 0


def test_one_counter_is_enough_for_calls_of_usual_size() -> None:
    assert counting.Counters.of((2**21, 8), 128, ()) == counting.Counters(128, 8, token_turns=1, top_k=8)
    assert counting.Counters.of((2**21 + 1, 8), 128, ()) == counting.Counters(128, 7, token_turns=1, top_k=8)


@pytest.mark.parametrize("top_k", [31, 32, 33])
def test_tokens_with_many_slots_are_counted_like_any_other(top_k: int) -> None:
    ids = np.random.default_rng(top_k).integers(-1, 40, (6, top_k)).astype(np.int32)
    ids[0] = -1
    scores = np.full((6, 40), 1 / 40, np.float32)
    routing = jaxmoe.Routing(*map(jnp.asarray, (ids, np.ones_like(ids, np.float32), scores)))
    rows = np.bincount(ids[ids >= 0], minlength=40)
    np.testing.assert_array_equal(jaxmoe.load_stats(routing.topk_ids, 40).rows_per_expert, rows)
    np.testing.assert_allclose(jaxmoe.load_balancing_loss(routing), 1, rtol=1e-6)
