"""The groups of devices that compiled code is told are those of a collective over the same mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.sharding import ExpertGroup, devices_of_groups, replica_groups

AXES = {"data": 2, "outer": 2, "inner": 2}
MESH = AbstractMesh(tuple(AXES.values()), tuple(AXES))


@pytest.mark.parametrize(
    "expert_axes", [("inner",), ("outer",), ("outer", "inner"), ("inner", "outer"), ("data", "inner")], ids=str
)
def test_a_group_is_what_all_gather_collects_in_the_order_of_ranks(expert_axes):
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))

    def collect(number: jax.Array) -> jax.Array:
        return jax.lax.all_gather(number, expert_axes, tiled=True)[None]

    # Every device has its own place in the mesh as its number.
    specs: Any = dict(in_specs=P(tuple(AXES)), out_specs=P(tuple(AXES)))
    collected = jax.jit(jax.shard_map(collect, mesh=mesh, **specs))(jnp.arange(8))
    groups = replica_groups(ExpertGroup(expert_axes, 2 ** len(expert_axes)), MESH)
    np.testing.assert_array_equal(np.unique(collected, axis=0), groups[np.argsort(groups[:, 0])])


def test_axes_that_the_compiler_handles_count_as_well():
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def layer(x: jax.Array) -> jax.Array:
        seen.append(replica_groups(ExpertGroup(("expert",), 4), jax.sharding.get_abstract_mesh()).tolist())
        return x

    specs: Any = dict(in_specs=P("expert"), out_specs=P("expert"))
    jax.jit(jax.shard_map(layer, mesh=mesh, axis_names={"expert"}, **specs)).lower(jnp.zeros(8))
    assert seen[0] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_without_expert_axes_every_device_is_a_group():
    assert replica_groups(ExpertGroup(), AbstractMesh((2, 2), ("data", "model"))).tolist() == [[0], [1], [2], [3]]


def test_without_a_mesh_there_is_one_device():
    assert replica_groups(ExpertGroup(), jax.sharding.get_abstract_mesh()).tolist() == [[0]]


def test_numbers_are_64_bit_integers_as_the_compiled_part_expects():
    assert replica_groups(ExpertGroup(("inner",), 2), MESH).dtype == np.int64


def explicit_calls(mesh: Mesh, spec: P, implementation: str) -> dict[str, Any]:
    place = lambda array: jax.device_put(array, NamedSharding(mesh, spec))  # noqa: E731
    x, ids, weights = jnp.ones((8, 16)), jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1))
    experts = jaxmoe.Experts.init(jax.random.key(0), 8, 16, 24)
    where: dict[str, Any] = {"axis_name": None, "implementation": implementation}
    layer = lambda *arrays: jaxmoe.moe_layer(*arrays, **where)  # noqa: E731
    dispatched = jaxmoe.dispatch(x, ids, num_experts=8, **where)
    layers = {
        "moe_layer: x": lambda: layer(place(x), ids, weights, experts),
        "moe_layer: topk_ids": lambda: layer(x, place(ids), weights, experts),
        "moe_layer: experts.w_gate": lambda: layer(x, ids, weights, jax.tree.map(place, experts)),
    }
    return (layers if implementation == "xla" else {}) | {
        "dispatch_matmul: matrices": lambda: jaxmoe.dispatch_matmul(x, ids, place(experts.w_gate), **where),
        "dispatch: x": lambda: jaxmoe.dispatch(place(x), ids, num_experts=8, **where),
        "combine: outputs": lambda: jaxmoe.combine(place(dispatched.rows), weights, dispatched.handle),
        "matmul_combine: matrices": lambda: jaxmoe.matmul_combine(
            dispatched.rows, place(experts.w_gate), weights, dispatched.handle
        ),
    }


@pytest.mark.parametrize("spec", [P(), P("expert")], ids=str)
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_arrays_on_a_mesh_with_explicit_axes_that_is_not_set_are_told_to_set_it(implementation, size, spec):
    mesh = jax.make_mesh((size,), ("expert",), axis_types=(AxisType.Explicit,))
    for name, call in explicit_calls(mesh, spec, implementation).items():
        if name in ("dispatch: x", "combine: outputs") and spec == P():
            assert jax.tree.leaves(call())[0].shape == (8, 16)  # which JAX can gather
            continue
        for run in (call, jax.jit(call)):
            with pytest.raises(ValueError, match=rf"^{name} lies on a mesh with Explicit axes \['expert'\].*set_mesh"):
                run()


# --- which devices those are ------------------------------------------------------------------------------------------

GROUP = ExpertGroup(("expert",), 4)


def turned_mesh() -> Mesh:
    return Mesh(np.array(jax.devices())[::-1].reshape(4, 2), ("expert", "data"))


def ids(devices: np.ndarray | None) -> Any:
    return None if devices is None else [[device.id for device in group] for group in devices]


def test_devices_of_groups_are_those_of_the_mesh_in_the_order_of_ranks():
    assert ids(devices_of_groups(GROUP, turned_mesh())) == [[7, 5, 3, 1], [6, 4, 2, 0]]
    assert devices_of_groups(GROUP, MESH) is None


def test_a_mesh_that_is_set_is_known_with_its_devices_inside_of_jit_and_of_shard_map():
    """There only a part of JAX that is not public says so. Where it is gone, `implementation=None` knows less."""
    seen = []

    def look(x: jax.Array) -> jax.Array:
        seen.append(ids(devices_of_groups(GROUP, None)))
        return x

    with jax.set_mesh(turned_mesh()):
        look(jnp.zeros(8))
        jax.jit(look).lower(jnp.zeros(8))
        jax.jit(jax.shard_map(look, in_specs=P("expert"), out_specs=P("expert"))).lower(jnp.zeros(8))
    assert seen == [[[7, 5, 3, 1], [6, 4, 2, 0]]] * 3


def test_inside_a_shard_map_of_its_own_mesh_devices_are_known_where_that_mesh_is_passed_again():
    seen = []

    def look(x: jax.Array) -> jax.Array:
        other = Mesh(np.array(jax.devices()), ("expert",))
        seen.append([ids(devices_of_groups(GROUP, mesh)) for mesh in (None, other, turned_mesh())])
        return x

    run = jax.shard_map(look, mesh=turned_mesh(), in_specs=P("expert"), out_specs=P("expert"))
    jax.jit(run).lower(jnp.zeros(8))
    assert seen[0] == [None, None, [[7, 5, 3, 1], [6, 4, 2, 0]]]
