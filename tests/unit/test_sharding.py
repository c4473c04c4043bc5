"""The groups of devices that compiled code is told are those of a collective over the same mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe.sharding import ExpertGroup, replica_groups

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
