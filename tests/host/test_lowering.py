"""Calls of compiled code name the devices that run them, whichever way those became known."""

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.implementations.megakernel import launching
from jaxmoe.testing import make_inputs
from tests.layer_calls import SIZES

AUTO = (AxisType.Auto,) * 2
# Of a size that no other file has: what was traced for one process is kept.
INPUTS = make_inputs(0, **{**SIZES, "tokens": 104})
ARRAYS = INPUTS[:4]
TOKENS, EXPERTS = P(("data", "expert")), P("expert")


@pytest.fixture(autouse=True)
def several_processes(monkeypatch):
    """As in a job of several processes: in one alone calls name no devices."""
    monkeypatch.setattr(launching, "_several_processes", lambda: True)


def mesh_of(ids: list[int], data: int = 2, kinds: tuple[AxisType, ...] = AUTO) -> Mesh:
    devices = np.array([jax.devices()[number] for number in ids]).reshape(data, -1)
    return Mesh(devices, ("data", "expert"), axis_types=kinds)


def layer(*arrays: Any, **options: Any) -> jax.Array:
    return jaxmoe.moe_layer(*arrays, implementation="megakernel", **{"data_axes": "data"} | options)


def in_shard_map(*arrays: Any, mesh: Mesh | None = None) -> jax.Array:
    block = lambda *shards: jaxmoe.moe_layer(*shards, implementation="megakernel")  # noqa: E731
    specs: Any = {"in_specs": (TOKENS, TOKENS, TOKENS, EXPERTS), "out_specs": TOKENS}
    return jax.shard_map(block, mesh=mesh, **specs)(*arrays)


def numbers(text: str, name: str) -> list[list[int]]:
    """What every call carries as attribute `name`."""
    found = re.findall(rf"\b{name} = dense<(.*?)> : tensor<(\d+)xi64>", text)
    lists = [[int(number) for number in re.findall(r"-?\d+", values)] for values, _ in found]
    return [list_ * (int(size) // len(list_)) for list_, (_, size) in zip(lists, found, strict=True)]


def devices_of(function: Any, *arrays: Any) -> list[list[int]]:
    return numbers(jax.jit(function).lower(*(arrays or ARRAYS)).as_text(), "devices")


def test_a_mesh_that_is_passed_names_its_devices():
    mesh = mesh_of([0, 1, 2, 3, 4, 5, 6, 7])
    text = jax.jit(lambda *arrays: layer(*arrays, mesh=mesh)).lower(*ARRAYS).as_text()
    assert numbers(text, "groups") == numbers(text, "devices") == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_mesh_that_is_set_names_its_devices():
    with jax.set_mesh(mesh_of([4, 5, 6, 7])):
        text = jax.jit(layer).lower(*ARRAYS).as_text()
    assert numbers(text, "groups") == [[0, 1, 2, 3]]
    assert numbers(text, "devices") == [[4, 5, 6, 7]]


@pytest.mark.parametrize("is_set", [True, False])
def test_the_mesh_of_a_shard_map_names_its_devices(is_set):
    mesh = mesh_of([4, 5, 6, 7])
    if not is_set:
        assert devices_of(lambda *arrays: in_shard_map(*arrays, mesh=mesh)) == [[4, 5, 6, 7]]
        return
    with jax.set_mesh(mesh):
        assert devices_of(in_shard_map) == [[4, 5, 6, 7]]


def test_devices_are_named_group_by_group_in_the_order_of_ranks_wherever_they_lie_in_the_mesh():
    order = [5, 0, 3, 6, 1, 7, 2, 4]
    mesh = Mesh(np.array([jax.devices()[n] for n in order]).reshape(4, 2), ("expert", "data"), axis_types=AUTO)
    with jax.set_mesh(mesh):
        text = jax.jit(layer).lower(*ARRAYS).as_text()
    assert numbers(text, "groups") == [[0, 2, 4, 6, 1, 3, 5, 7]]
    assert numbers(text, "devices") == [[5, 3, 1, 2, 0, 6, 7, 4]]


def test_a_trace_that_is_used_again_for_other_devices_names_those():
    traced = []

    @jax.jit
    def function(*arrays: Any) -> jax.Array:
        traced.append(arrays)
        return layer(*arrays)

    texts = []
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7], [0, 2, 1, 3], [0, 1, 2, 3]):
        with jax.set_mesh(mesh_of(ids)):
            texts.append(function.lower(*ARRAYS).as_text())
    named = [numbers(text, "devices") for text in texts]
    assert named == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[0, 2, 1, 3]], [[0, 1, 2, 3]]]
    assert len(traced) == 1, "otherwise this shows nothing"


def test_gradients_checkpoints_and_scans_name_devices_too():
    stacked = jax.tree.map(lambda array: jnp.stack([array, array]), INPUTS.experts)
    step = jax.checkpoint(lambda x, experts: (x + layer(x, *ARRAYS[1:3], experts), None))
    loss = lambda x, experts: jnp.sum(jax.lax.scan(step, x, experts)[0])  # noqa: E731
    with jax.set_mesh(mesh_of([4, 5, 6, 7])):
        text = jax.jit(jax.grad(loss, argnums=1)).lower(ARRAYS[0], stacked).as_text()
    assert text.count("@jaxmoe_forward(") >= 1
    assert text.count("@jaxmoe_backward(") == 1
    assert numbers(text, "devices") == [[4, 5, 6, 7]] * len(numbers(text, "groups"))


@pytest.mark.slow
def test_calls_that_name_devices_give_the_bits_of_calls_that_do_not(monkeypatch):
    def gradients() -> Any:
        jax.clear_caches()
        mesh = mesh_of([7, 6, 5, 4, 3, 2, 1, 0])
        loss = lambda x, ids, weights, experts: jnp.sum(layer(x, ids, weights, experts, mesh=mesh) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 2, 3)))(*ARRAYS)

    naming = gradients()
    monkeypatch.setattr(launching, "_several_processes", lambda: False)
    jax.tree.map(np.testing.assert_array_equal, naming, gradients())


def test_one_process_alone_names_none(monkeypatch):
    monkeypatch.setattr(launching, "_several_processes", lambda: False)
    mesh = mesh_of([4, 5, 6, 7])
    assert devices_of(lambda *arrays: layer(*arrays, mesh=mesh)) == [[-1]]


def test_groups_of_one_rank_name_none():
    mesh = mesh_of([4, 5, 6, 7])
    run = lambda *arrays: layer(*arrays, mesh=mesh, axis_name=None, data_axes=("data", "expert"))  # noqa: E731
    assert devices_of(run) == [[-1]]


def test_a_mesh_without_devices_names_none():
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=AUTO)
    split = [NamedSharding(mesh, spec) for spec in (TOKENS, TOKENS, TOKENS, EXPERTS)]
    shapes = [
        jax.tree.map(lambda a, where=where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), array)
        for array, where in zip(ARRAYS, split, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(layer).trace(*shapes).lower(lowering_platforms=("cpu",)).as_text()
    assert numbers(text, "groups") == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert numbers(text, "devices") == [[-1]]


def test_a_program_that_is_stored_names_none():
    disabled = [jax.export.DisabledSafetyCheck.custom_call("jaxmoe_forward")]
    with jax.set_mesh(mesh_of([0, 1, 2, 3])):
        stored = jax.export.export(jax.jit(layer), disabled_checks=disabled)(*ARRAYS)
    assert numbers(stored.mlir_module(), "groups") == [[0, 1, 2, 3]]
    assert numbers(stored.mlir_module(), "devices") == [[-1]]
