"""Models of Flax NNX and Flax Linen that train through `implementation="megakernel"`, beside the same through "xla".

What `jax.checkpoint`, `jax.lax.scan` and donated accumulators do to the bare layer is in tests/layer_suite.py; here
they meet in one model, with its router, optimizer and sharded parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe.linen
import jaxmoe.nnx
from jaxmoe import CHECKPOINT_NAMES, RouterConfig, SwiGLU
from jaxmoe.testing import relative_error
from tests.layer_calls import mesh_of

BATCH, LENGTH, HIDDEN, INTERMEDIATE, EXPERTS = 16, 4, 16, 24, 8
STEPS, MICRO_BATCHES, DEPTH, RATE = 6, 2, 2, 0.1
# Gradients of one call agree within 5e-6 of their norm in float32 (LayerChecks.assert_near). A step of plain gradient
# descent moves the loss by -RATE * |gradient|^2, to first order, so such an error changes the loss of any later step by
# at most that share of what it has fallen; and a loss computed twice differs by that share of itself. Measured: 1.2e-7.
# With Adam there is no such bound: it divides gradients by their size, also those that are nothing but rounding.
LOSS_TOLERANCE = 2 * 5e-6
# Of the distance that a parameter has come: as much again for the points at which later gradients are taken, and for
# the parameter itself one rounding to float32, which counts more the shorter that distance is. Measured: 1.8e-6.
MOVE_TOLERANCE, ROUNDING = 2 * 5e-6, 2**-24

DEEPSEEK_V3 = RouterConfig(top_k=2, score="sigmoid", num_groups=2, top_groups=1)
# By mesh: its axis types, where a batch lies, and layers that leave no part of the package out between them.
MESHES: dict[str, tuple[AxisType, P, dict[str, Any]]] = {
    "data x expert": (
        AxisType.Auto,
        P(("data", "expert")),
        {
            "router": RouterConfig(top_k=2, score="topk_softmax"),
            "activation": SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0),  # a limit that these inputs reach
            "biases": True,
            "router_bias": True,
            "data_axes": "data",
        },
    ),
    "expert": (
        AxisType.Explicit,
        P("expert"),
        {"router": DEEPSEEK_V3, "selection_bias": True, "shared_intermediate": 20},
    ),
}


class Run(NamedTuple):
    """Loss and rows of every expert in every step, parameters by name before and after all steps."""

    losses: np.ndarray
    rows: np.ndarray
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def batches(mesh_name: str) -> list[tuple[jax.Array, jax.Array]]:
    """Tokens and what a model has to make of them, once for each micro-batch; every step sees the same."""
    rng = np.random.default_rng(0)
    teacher = rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32) / HIDDEN**0.5
    _, spec, _ = MESHES[mesh_name]
    sharding = NamedSharding(mesh_called(mesh_name), spec)
    x = rng.standard_normal((MICRO_BATCHES, BATCH, LENGTH, HIDDEN)).astype(np.float32)
    return [(jax.device_put(part, sharding), jax.device_put(part + np.tanh(part @ teacher), sharding)) for part in x]


def mesh_called(name: str) -> jax.sharding.Mesh:
    return mesh_of(*name.split(" x "), kind=MESHES[name][0])


def objective(y: jax.Array, target: jax.Array, balance: Any, router_z: Any) -> jax.Array:
    return jnp.mean((y - target) ** 2) + 0.01 * jnp.sum(balance) + 0.001 * jnp.sum(router_z)


def by_name(parameters: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def layer_arguments(mesh_name: str, implementation: str) -> dict[str, Any]:
    return MESHES[mesh_name][2] | {"implementation": implementation}


def assert_same_training(found: Run, expected: Run) -> None:
    """The losses fall and agree at every step, and so does all else."""
    assert (np.diff(expected.losses) < 0).all(), expected.losses
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS_TOLERANCE)
    np.testing.assert_array_equal(found.rows, expected.rows)
    assert found.after.keys() == expected.after.keys()
    for name, start in expected.before.items():
        np.testing.assert_array_equal(found.before[name], start)
        come, right = found.after[name] - start, expected.after[name] - start
        assert right.any(), f"{name} has not moved"
        rounding = ROUNDING * np.linalg.norm(start) / np.linalg.norm(right)
        assert relative_error(come, right) <= MOVE_TOLERANCE + rounding, name


# --- models in the way of their library -------------------------------------------------------------------------------


class Model(nnx.Module):
    """A layer between two matrices, of which the first one learns through the layer."""

    def __init__(self, arguments: dict[str, Any], *, rngs: nnx.Rngs) -> None:
        self.into, self.out = (nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs) for _ in range(2))
        self.moe = jaxmoe.nnx.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jaxmoe.nnx.MoEAux]:
        h = self.into(x)
        y, aux = self.moe(h)
        return self.out(h + y), aux


def train_nnx(mesh_name: str, implementation: str) -> Run:
    (x, target), *_ = batches(mesh_name)
    with jax.set_mesh(mesh_called(mesh_name)):
        model = nnx.jit(lambda: Model(layer_arguments(mesh_name, implementation), rngs=nnx.Rngs(0)))()
        optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

        @nnx.jit
        def step(model: Model, optimizer: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
            def loss(model: Model) -> Any:
                y, aux = model(x)
                return objective(y, target, aux.load_balancing_loss, aux.router_z_loss), aux.stats

            (value, stats), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
            optimizer.update(model, gradients)
            if model.moe.selection_bias is not None:
                model.moe.update_selection_bias(stats)
            return value, stats.rows_per_expert

        before = by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        losses, rows = zip(*[jax.device_get(step(model, optimizer, x, target)) for _ in range(STEPS)], strict=True)
        after = by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return Run(np.array(losses), np.array(rows), before, after)


class LinenModel(nn.Module):
    """The same in Linen."""

    arguments: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(HIDDEN, use_bias=False)(x)
        h = h + jaxmoe.linen.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **self.arguments, name="moe")(h)
        return nn.Dense(HIDDEN, use_bias=False)(h)


def sown_losses(sown: Any) -> tuple[jax.Array, jax.Array]:
    (balance,), (router_z,) = (sown["losses"]["moe"][name] for name in ("load_balancing_loss", "router_z_loss"))
    return balance, router_z


def train_linen(mesh_name: str, implementation: str) -> Run:
    (x, target), *_ = batches(mesh_name)
    model, optimizer = LinenModel(layer_arguments(mesh_name, implementation)), optax.sgd(RATE)
    with jax.set_mesh(mesh_called(mesh_name)):
        variables: Any = jax.jit(model.init)(jax.random.key(0), x)
        parameters, state = variables["params"], variables.get("moe_state", {})
        before, moments = by_name(parameters), optimizer.init(parameters)

        @jax.jit
        def step(parameters: Any, state: Any, moments: Any, x: jax.Array, target: jax.Array) -> Any:
            def loss(parameters: Any) -> Any:
                variables = {"params": parameters, "moe_state": state}
                y, sown = model.apply(variables, x, mutable=["losses", "intermediates"])
                return objective(y, target, *sown_losses(sown)), sown["intermediates"]

            (value, said), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
            updates, after = optimizer.update(gradients, moments)
            rows = said["moe"]["moe_stats"][0].rows_per_expert
            moved = jaxmoe.linen.update_selection_bias(state, said) if state else state
            return value, rows, optax.apply_updates(parameters, updates), moved, after

        losses, counts = [], []
        for _ in range(STEPS):
            value, rows, parameters, state, moments = step(parameters, state, moments, x, target)
            losses.append(np.asarray(value))
            counts.append(np.asarray(rows))
    return Run(np.array(losses), np.array(counts), before, by_name(parameters))


@pytest.mark.slow
@pytest.mark.parametrize(("train", "mesh_name"), [(train_nnx, "data x expert"), (train_linen, "expert")])
def test_a_model_trains_as_it_does_through_xla_step_by_step(train, mesh_name):
    assert_same_training(train(mesh_name, "megakernel"), train(mesh_name, "xla"))


# --- a scan over layers with a policy of what to keep, and accumulated gradients --------------------------------------

POLICY = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
Loss = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def scanned_nnx(arguments: dict[str, Any]) -> tuple[Callable[[jax.Array], tuple[Any, Any]], Loss]:
    """Returns what makes parameters and other state, and the loss of a stack of layers."""
    metadata = {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=DEPTH)
    @nnx.vmap(transform_metadata=metadata)
    def create(rngs: nnx.Rngs) -> jaxmoe.nnx.MoE:
        return jaxmoe.nnx.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, rngs=rngs)

    def init(x: jax.Array) -> tuple[Any, Any]:
        del x
        _, parameters, state = nnx.split(create(nnx.Rngs(0)), nnx.Param, ...)
        return parameters, state

    def loss(parameters: Any, state: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=metadata)
        @functools.partial(nnx.remat, policy=POLICY)
        def body(moe: jaxmoe.nnx.MoE, x: jax.Array) -> tuple[jax.Array, Any]:
            y, aux = moe(x)
            return x + y, aux

        graph = nnx.graphdef(nnx.eval_shape(lambda: create(nnx.Rngs(0))))
        y, aux = body(nnx.merge(graph, parameters, state), x)
        return objective(y, target, aux.load_balancing_loss, aux.router_z_loss), aux.stats.rows_per_expert

    return init, loss


def scanned_linen(arguments: dict[str, Any]) -> tuple[Callable[[jax.Array], tuple[Any, Any]], Loss]:
    """The same in Linen."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            moe = jaxmoe.linen.MoE(HIDDEN, INTERMEDIATE, EXPERTS, **arguments, name="moe")
            scan = nn.scan(
                nn.remat(lambda moe, x, _: (x + moe(x), None), policy=POLICY),
                variable_axes={"params": 0, "moe_state": 0, "losses": 0, "intermediates": 0},
                split_rngs={"params": True},
                length=DEPTH,
                metadata_params={nn.PARTITION_NAME: None},
            )
            return scan(moe, x, None)[0]

    def init(x: jax.Array) -> tuple[Any, Any]:
        variables: Any = Stack().init(jax.random.key(0), x)
        return variables["params"], variables.get("moe_state", {})

    def loss(parameters: Any, state: Any, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        variables = {"params": parameters, "moe_state": state}
        applied: Any = Stack().apply(variables, x, mutable=["losses", "intermediates"])
        y, sown = applied
        return objective(y, target, *sown_losses(sown)), sown["intermediates"]["moe"]["moe_stats"][0].rows_per_expert

    return init, loss


def train_accumulating(scanned: Any, mesh_name: str, implementation: str) -> tuple[Run, str]:
    """Takes steps of several micro-batches, whose gradients are added up in place; returns the program's text too."""
    init, loss = scanned(layer_arguments(mesh_name, implementation))
    parts = batches(mesh_name)
    with jax.set_mesh(mesh_called(mesh_name)):
        parameters, state = jax.jit(init)(parts[0][0])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, parameters)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None, None))
        def accumulate(total: Any, parameters: Any, state: Any, x: jax.Array, target: jax.Array) -> Any:
            (value, rows), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, state, x, target)
            return jax.tree.map(jnp.add, total, gradients), value, rows

        @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(shardings, shardings))
        def descend(parameters: Any, total: Any) -> tuple[Any, Any]:
            moved = jax.tree.map(lambda p, g: p - RATE / MICRO_BATCHES * g, parameters, total)
            return moved, jax.tree.map(jnp.zeros_like, total)

        before = by_name(parameters)
        total = jax.device_put(jax.tree.map(jnp.zeros_like, parameters), shardings)
        lowered = accumulate.lower(total, parameters, state, *parts[0])
        text, compiled = lowered.as_text(), lowered.compile()
        losses, counts = [], []
        for _ in range(STEPS):
            of_parts = []
            for part in parts:
                given = total
                total, *said = compiled(given, parameters, state, *part)
                assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
                of_parts.append(jax.device_get(said))
            parameters, total = descend(parameters, total)
            losses.append(np.mean([value for value, _ in of_parts]))
            counts.append([rows for _, rows in of_parts])
    return Run(np.array(losses), np.array(counts), before, by_name(parameters)), text


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "mesh_name"), [(scanned_nnx, "data x expert"), (scanned_linen, "expert")])
def test_a_scan_over_checkpointed_layers_with_accumulated_gradients_trains_as_it_does_through_xla(scanned, mesh_name):
    found, text = train_accumulating(scanned, mesh_name, "megakernel")
    expected, _ = train_accumulating(scanned, mesh_name, "xla")
    assert_same_training(found, expected)
    # One layer's program, whatever the depth; and the policy makes it repeat no call of compiled code.
    assert (text.count("@jaxmoe_forward("), text.count("@jaxmoe_backward(")) == (1, 1)
