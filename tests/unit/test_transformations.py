"""What JAX does around a layer besides jit and grad: NumPy inputs, export, meshes of one rank, second derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.testing import dense, make_inputs, relative_error
from tests.layer_calls import mesh_of

ARGUMENTS = make_inputs(0, biases=True)[:4]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numpy_arrays_are_taken_as_jax_takes_them(implementation):
    x, ids, weights, experts = jax.tree.map(np.asarray, ARGUMENTS)
    y = jaxmoe.moe_layer(
        x.astype(np.float64), ids.astype(np.int64), weights, experts, axis_name=None, implementation=implementation
    )
    assert y.dtype == jnp.float32
    assert relative_error(y, dense(make_inputs(0, biases=True))) < 2e-6


def test_a_layer_with_its_pytrees_can_be_exported_and_read_back():
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None, return_stats=True))
    exported = jax.export.export(run)(*ARGUMENTS)
    again: Any = jax.export.deserialize(exported.serialize())
    y, stats = again.call(*ARGUMENTS)
    expected, counted = run(*ARGUMENTS)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(stats.rows_per_expert, counted.rows_per_expert)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_expert_axis_of_one_rank_needs_nothing_split_over_it(implementation):
    mesh = jax.make_mesh((8, 1), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def block(x, ids, weights, experts):
        return jaxmoe.moe_layer(x, ids, weights, experts, implementation=implementation)

    specs = (P("data"), P("data"), P("data"), P())
    layer = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=P("data"))
    gradient = jax.jit(jax.grad(lambda e: jnp.sum(layer(*ARGUMENTS[:3], e) ** 2)))(ARGUMENTS[3])
    inputs = make_inputs(0, biases=True)
    expected = jax.grad(lambda e: jnp.sum(dense(inputs._replace(experts=e)) ** 2))(inputs.experts)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert relative_error(got, want) < 5e-6


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_taken_outside_of_shard_map_are_right_with_and_without_check_vma(check_vma):
    mesh = mesh_of("data", "expert")
    tokens = P(("data", "expert"))
    layer = jax.shard_map(
        lambda *arguments: jaxmoe.moe_layer(*arguments),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, P("expert")),
        out_specs=tokens,
        check_vma=check_vma,
    )
    gradient = jax.jit(jax.grad(lambda e: jnp.sum(layer(*ARGUMENTS[:3], e) ** 2)))(ARGUMENTS[3])
    inputs = make_inputs(0, biases=True)
    expected = jax.grad(lambda e: jnp.sum(dense(inputs._replace(experts=e)) ** 2))(inputs.experts)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert relative_error(got, want) < 5e-6


def test_hessian_vector_products_work_forward_over_reverse():
    def loss(run):
        return lambda x: jnp.sum(run(x) ** 2)

    layer = loss(lambda x: jaxmoe.moe_layer(x, *ARGUMENTS[1:], axis_name=None))
    truth = loss(lambda x: dense(make_inputs(0, biases=True)._replace(x=x)))
    x, along = ARGUMENTS[0], jnp.cos(ARGUMENTS[0])
    products = [jax.jvp(jax.grad(f), (x,), (along,))[1] for f in (layer, truth)]
    assert relative_error(*products) < 5e-6


def test_jacrev_raises_and_says_what_to_do():
    small = make_inputs(0, tokens=2, hidden=4)[:4]
    with pytest.raises(NotImplementedError, match="pass the batch dimension along"):
        jax.jacrev(lambda x: jaxmoe.moe_layer(x, *small[1:], axis_name=None))(small[0])
