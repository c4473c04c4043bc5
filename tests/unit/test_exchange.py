"""Dispatch and combine that run anywhere: the suite of all implementations, float64, and what bad input gets."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import exchange
from jaxmoe.exchange import check
from jaxmoe.testing import make_ids, relative_error
from tests.exchange_suite import ExchangeSuite
from tests.layer_calls import mesh_of


class OnCpu(ExchangeSuite):
    """What only a CPU has."""

    def test_gradients_equal_finite_differences_in_float64(self):
        with jax.enable_x64(True):
            rng = np.random.default_rng(0)
            x, ids = rng.standard_normal((16, 3)), make_ids(rng, 16, 8, 2, "unused-slots")
            weights, matrices = rng.random((16, 2)), rng.standard_normal((8, 3, 4))
            mesh, split = mesh_of("data", "expert"), P(("data", "expert"))

            def block(x: Any, weights: Any, matrices: Any, ids: Any) -> Any:
                dispatched = self.dispatch(x, ids, num_experts=8, capacity=6)
                outputs = jnp.sin(jax.lax.ragged_dot(dispatched.rows, matrices, dispatched.group_sizes))
                return jaxmoe.combine(outputs, weights, dispatched.handle)

            specs = split, split, P("expert"), split
            layer = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=split)
            loss = lambda x, weights, matrices: jnp.sum(layer(x, weights, matrices, ids) ** 2)  # noqa: E731
            loss = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            at, step = tuple(map(jnp.asarray, (x, weights, matrices))), 1e-6
            _, gradients = loss(*at)
            assert all(gradient.dtype == jnp.float64 for gradient in gradients)
            for _ in range(3):
                along = [jnp.asarray(rng.standard_normal(array.shape)) for array in at]
                (ahead, _), (behind, _) = (
                    loss(*(array + sign * step * way for array, way in zip(at, along, strict=True))) for sign in (1, -1)
                )
                slope = sum(jnp.vdot(gradient, way) for gradient, way in zip(gradients, along, strict=True))
                np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6)

    @pytest.mark.usefixtures("unchecked_shapes")
    def test_numpy_arrays_are_taken_as_jax_takes_them(self):
        rng = np.random.default_rng(1)
        x, ids = rng.standard_normal((4, 8)), make_ids(rng, 4, 3, 2, "uniform").astype(np.int64)
        arguments: Any = (x, ids)
        valid = np.array([1, 1, 0, 1], bool)
        dispatched = self.dispatch(*arguments, num_experts=np.int64(3), token_valid=valid, axis_name=None)
        answers: Any = np.asarray(dispatched.rows), np.full((4, 2), 0.5)
        y = jaxmoe.combine(*answers, handle=jax.tree.map(np.asarray, dispatched.handle))
        assert dispatched.rows.dtype == y.dtype == jnp.float32
        np.testing.assert_array_equal(y, np.float32(x) * np.array([[1], [1], [0], [1]]))


class TestXla(OnCpu):
    implementation = "xla"


class TestReference(OnCpu):
    implementation = "reference"


# --- bad input ------------------------------------------------------------------------------------------------------

X, IDS = jnp.ones((16, 8)), jnp.zeros((16, 2), jnp.int32)
ROUTING = jax.eval_shape(lambda: jaxmoe.route(jnp.zeros((16, 8)), jaxmoe.RouterConfig(top_k=2)))

# What is wrong -> (arguments, type, parts of the message: what was given, what is needed or what to do).
BAD_DISPATCH: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "x of one dimension": ({"x": X[0]}, ValueError, ["x has shape (8,)", "x[None]"]),
    "x of integers": ({"x": IDS}, TypeError, ["x is int32", "bfloat16"]),
    "x that is no array": ({"x": [1.0]}, TypeError, ["x is a list", "array"]),
    "ids of other tokens": ({"topk_ids": IDS[:4]}, ValueError, ["topk_ids has shape (4, 2)", "(16,)"]),
    "ids of floats": ({"topk_ids": X}, TypeError, ["topk_ids is float32", "integer"]),
    "no slots": ({"topk_ids": IDS[:, :0]}, ValueError, ["top_k must be at least 1"]),
    "no number of experts": ({"num_experts": None}, TypeError, ["num_experts is missing", "jaxmoe.Routing"]),
    "no experts": ({"num_experts": 0}, ValueError, ["num_experts=0", "positive integer"]),
    "another number than the router's": (
        {"topk_ids": ROUTING, "num_experts": 4},
        ValueError,
        ["chooses among 8 experts", "num_experts=4"],
    ),
    "a mask of integers": ({"token_valid": IDS[:, 0]}, TypeError, ["token_valid is int32", "bool"]),
    "a mask of other tokens": ({"token_valid": jnp.ones(4, bool)}, ValueError, ["token_valid has shape (4,)", "(16,)"]),
    "a mask that is no array": ({"token_valid": True}, TypeError, ["token_valid is a bool", "array"]),
    "an unknown implementation": ({"implementation": "fast"}, ValueError, ["'fast'", "'xla'", "'reference'"]),
    "an unknown precision": ({"precision": "w8a16"}, ValueError, ["'w8a16'", "'fp8'", "'fp8-e8m0'"]),
    "an alignment of nothing": ({"alignment": 0}, ValueError, ["alignment=0", "positive integer"]),
    "a capacity of a half": ({"capacity": 0.5}, ValueError, ["capacity=0.5", "positive integer"]),
    "per_expert that is a number": ({"per_expert": 8}, TypeError, ["per_expert=8", "True or False"]),
    "per_expert without a capacity": ({"per_expert": True}, ValueError, ["needs capacity=", "capacity=32"]),
    "more rows than have numbers": ({"alignment": 2**28}, ValueError, ["alignment=268435456", "8 experts per rank"]),
    "no mesh": ({"axis_name": "expert"}, ValueError, ["needs a mesh", "jax.set_mesh", "axis_name=None"]),
    "an axis that is no name": ({"axis_name": 3}, TypeError, ["axis_name=3", "mesh axis name"]),
    "an axis that the mesh lacks": (
        {"axis_name": "ep", "mesh": mesh_of("expert")},
        ValueError,
        ["axis 'ep' is not in the mesh", "'expert': 8"],
    ),
    "experts that the axis does not divide": (
        {"num_experts": 6, "axis_name": "expert", "mesh": mesh_of("data", "expert")},
        ValueError,
        ["num_experts=6", "4 ranks of mesh axis 'expert'", "Use 8 experts"],
    ),
    "tokens that the axes do not divide": (
        {"x": X[:12], "topk_ids": IDS[:12], "axis_name": "expert", "mesh": mesh_of("expert")},
        ValueError,
        ["(12, 8)", "8 ranks", "12 % 8 = 4", "Fill it up to 16"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("wrong", BAD_DISPATCH)
def test_a_bad_dispatch_raises_what_was_given_and_what_to_do(wrong):
    changes, kind, parts = BAD_DISPATCH[wrong]
    with pytest.raises(kind) as raised:
        jaxmoe.dispatch(**{"x": X, "topk_ids": IDS, "num_experts": 8, "axis_name": None} | changes)
    message = str(raised.value)
    assert message.startswith("dispatch: ")
    for part in parts:
        assert part in message, message


def test_more_slots_or_ranks_than_have_numbers_are_refused():
    x, ids = (jax.ShapeDtypeStruct((2**23, width), dtype) for width, dtype in ((8, jnp.float32), (4, jnp.int32)))
    with pytest.raises(ValueError, match=r"8388608 tokens x 4 slots are too many.*Split the tokens"):
        jax.eval_shape(lambda x, ids: jaxmoe.dispatch(x, ids, num_experts=8, axis_name=None), x, ids)
    x, ids = (jax.ShapeDtypeStruct((256, width), dtype) for width, dtype in ((8, jnp.float32), (4, jnp.int32)))
    mesh = jax.sharding.AbstractMesh((256,), ("expert",))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=r"256 ranks.*at most 128.*data axis"):
        jax.eval_shape(lambda x, ids: jaxmoe.dispatch(x, ids, num_experts=256), x, ids)


def test_float64_tokens_are_not_rounded_to_8_bits():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"x is float64.*precision='fp8'.*Cast x"):
        jaxmoe.dispatch(jnp.ones((4, 8), jnp.float64), IDS[:4], num_experts=8, axis_name=None, precision="fp8")


SORTED, OF_EXPERTS = (
    jax.eval_shape(lambda rows=rows: jaxmoe.dispatch(X, IDS, num_experts=8, axis_name=None, **rows))
    for rows in ({"capacity": 24}, {"capacity": 3, "per_expert": True})
)
WEIGHTS = jnp.ones((16, 2))
BAD_COMBINE: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "what dispatch returned": ({"handle": SORTED}, TypeError, ["handle is a Dispatched", "dispatched.handle"]),
    "outputs that are a list": ({"outputs": [1.0]}, TypeError, ["outputs is a list", "array"]),
    "outputs of tokens": ({"outputs": X}, ValueError, ["outputs has shape (16, 8)", "[24, width]"]),
    "outputs of no width": ({"outputs": jnp.ones((24, 0))}, ValueError, ["outputs has shape (24, 0)", "[24, width]"]),
    "sorted outputs of rows by expert": ({"handle": OF_EXPERTS.handle}, ValueError, ["(24, 8)", "[8, 3, width]"]),
    "outputs of integers": ({"outputs": jnp.ones((24, 8), int)}, TypeError, ["outputs is int32", "bfloat16"]),
    "weights of tokens": ({"topk_weights": WEIGHTS[:, 0]}, ValueError, ["topk_weights has shape (16,)", "(16, 2)"]),
    "weights in low precision": (
        {"topk_weights": WEIGHTS.astype(jnp.bfloat16)},
        TypeError,
        ["topk_weights is bfloat16", "float32", "astype"],
    ),
    "weights that are a number": ({"topk_weights": 1.0}, TypeError, ["topk_weights is a float", "array"]),
    "a handle without ids": (
        {"handle": dataclasses.replace(SORTED.handle, topk_ids=None)},
        TypeError,
        ["topk_ids of the handle is a NoneType", "array"],
    ),
    "handles of several dispatches": (
        {"handle": jax.tree.map(lambda array: jnp.stack([jnp.zeros(array.shape, int)] * 2), SORTED.handle)},
        ValueError,
        ["slot_rows of the handle has shape (2, 16, 2)", "[..., 2] of 16 tokens", "one dispatch"],
    ),
    "ids of other tokens": (
        {"handle": dataclasses.replace(SORTED.handle, topk_ids=IDS[:4])},
        ValueError,
        ["topk_ids of the handle has shape (4, 2)", "[..., 2] of 16 tokens"],
    ),
    "sources of other rows": (
        {"handle": dataclasses.replace(SORTED.handle, row_sources=IDS[:, 0])},
        ValueError,
        ["row_sources of the handle has shape (16,)", "(24,)"],
    ),
    "counts of other experts": (
        {"handle": dataclasses.replace(SORTED.handle, rows_per_expert=IDS[:4, 0])},
        ValueError,
        ["rows_per_expert of the handle has shape (4,)", "(8,)", "split on its first dimension"],
    ),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("wrong", BAD_COMBINE)
def test_a_bad_combine_raises_what_was_given_and_what_to_do(wrong):
    changes, kind, parts = BAD_COMBINE[wrong]
    with pytest.raises(kind) as raised:
        jaxmoe.combine(**{"outputs": jnp.ones((24, 8)), "topk_weights": WEIGHTS, "handle": SORTED.handle} | changes)
    message = str(raised.value)
    assert message.startswith("combine: ")
    for part in parts:
        assert part in message, message


def test_group_sizes_are_of_sorted_rows_alone():
    with pytest.raises(ValueError, match=r"group_sizes.*per_expert=True.*einsum"):
        _ = OF_EXPERTS.group_sizes


def test_how_tokens_lie_changes_neither_rows_nor_what_finds_no_room():
    rng, mesh = np.random.default_rng(0), mesh_of("data", "expert")
    x, ids = jnp.arange(64.0).reshape(32, 2), jnp.asarray(make_ids(rng, 32, 8, 1, "uniform"))

    def dispatch(x: jax.Array) -> jaxmoe.Dispatched:
        return jaxmoe.dispatch(x, ids, num_experts=8, capacity=4)

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
        results = [dispatch(x), dispatch(placed), jax.jit(dispatch)(placed)]
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])  # one pytree, which scan and cond want


def test_combine_is_called_where_dispatch_was():
    mesh, other = mesh_of("expert"), mesh_of("data", "expert")
    split = P("expert")

    def send(x: Any, ids: Any, **where: Any) -> Any:
        dispatched = jaxmoe.dispatch(x, ids, num_experts=8, **where)
        return dispatched.rows, dispatched.handle

    def back(rows: Any, handle: Any) -> Any:
        return jaxmoe.combine(rows, None, handle)

    inside = jax.shard_map(send, mesh=mesh, in_specs=split, out_specs=split)
    from_inside = jax.eval_shape(inside, X, IDS)
    from_outside = jax.eval_shape(lambda x, ids: send(x, ids, mesh=mesh), X, IDS)
    with pytest.raises(ValueError, match=r"inside a shard_map over \('expert',\).*not manual here"):
        jax.eval_shape(back, *from_inside)
    with pytest.raises(ValueError, match=r"made outside of shard_map.*Call combine outside too"):
        jax.eval_shape(jax.shard_map(back, mesh=mesh, in_specs=split, out_specs=split), *from_outside)
    with jax.set_mesh(other), pytest.raises(ValueError, match=r"'expert': 8.*is set.*the same mesh"):
        jax.eval_shape(back, *from_outside)
    with jax.set_mesh(mesh):
        from_context = jax.eval_shape(send, X, IDS)
        assert jax.eval_shape(back, *from_context).shape == X.shape
    with pytest.raises(ValueError, match=r"and none is set.*the same mesh"):
        jax.eval_shape(back, *from_context)
    # What one shard_map returned may go into another, over an axis of the same size.
    again = jax.shard_map(back, mesh=mesh, in_specs=split, out_specs=split)
    assert jax.eval_shape(again, *from_inside).shape == X.shape
    tokens = P(("data", "expert"))
    elsewhere = jax.shard_map(back, mesh=other, in_specs=tokens, out_specs=tokens)
    with pytest.raises(ValueError, match=r"over a mesh of {'expert': 8}.*over {'data': 2, 'expert': 4}.*same sizes"):
        jax.eval_shape(elsewhere, *from_inside)
    not_split = jax.shard_map(back, mesh=mesh, in_specs=(split, P()), out_specs=split)
    with pytest.raises(ValueError, match=r"slot_rows of the handle has shape \(16, 2\).* of 2 tokens.*split on its"):
        jax.eval_shape(not_split, *from_inside)


@pytest.mark.parametrize("axis_name", ["expert", ("host", "expert")])
def test_a_handle_is_refused_by_a_mesh_of_as_many_ranks_that_lie_otherwise(axis_name):
    axes = ("data", "host", "expert")
    split = P(("expert", "host", "data"))

    def on_mesh(function: Any, *sizes: int) -> Any:
        mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * 3)
        return jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split)

    def send(x: Any, ids: Any) -> Any:
        dispatched = jaxmoe.dispatch(x, ids, num_experts=8, axis_name=axis_name)
        return dispatched.rows, dispatched.handle

    def back(rows: Any, handle: Any) -> Any:
        return jaxmoe.combine(rows, None, handle)

    # The axes of the experts have 4 or 8 ranks on each mesh, and so have all axes together.
    other = (1, 4, 2) if axis_name != "expert" else (1, 2, 4)
    sent = jax.eval_shape(on_mesh(send, *((1, 2, 4) if axis_name != "expert" else (2, 1, 4))), X, IDS)
    with pytest.raises(ValueError, match=r"^combine: .* a mesh of {'data': .* over {'data': 1.*ranks lie otherwise"):
        jax.eval_shape(on_mesh(back, *other), *sent)


@pytest.mark.parametrize("tokens", [0, 16])
def test_what_comes_back_varies_over_the_axes_of_the_group_also_where_there_are_no_tokens(tokens):
    split = P("expert")
    types: list[Any] = []

    def of_rank(x: Any, matrices: Any) -> Any:
        ys = through_the_exchange(x, matrices)
        types.extend(jax.typeof(y).manual_axis_type.varying for y in ys)
        return jax.lax.cond(True, lambda: ys, lambda: [x] * 3)

    mesh = mesh_of("data", "expert")
    layers = jax.shard_map(of_rank, mesh=mesh, in_specs=split, out_specs=split)
    jax.eval_shape(layers, jnp.ones((tokens, 4)), jnp.ones((8, 4, 4)))
    assert types == [{"expert"}] * 3


def through_the_exchange(x: jax.Array, matrices: jax.Array) -> list[jax.Array]:
    """Calls every function of the exchange."""
    ids = jnp.zeros((x.shape[0], 2), jnp.int32)
    sent = jaxmoe.dispatch(x, ids, num_experts=8)
    started = jaxmoe.start_dispatch(x, ids, num_experts=8).finish()
    halves = jaxmoe.dispatch_matmul(x, ids, matrices)
    return [
        jaxmoe.combine(sent.rows, None, sent.handle),
        jaxmoe.start_combine(started.rows, None, started.handle).finish(),
        jaxmoe.matmul_combine(halves.rows, matrices, None, halves.handle),
    ]


def test_where_users_disable_jit_all_of_it_is_compiled_as_ever():
    with jax.set_mesh(mesh_of("expert")):
        arguments = jnp.ones((8, 4)), jnp.ones((8, 4, 4))
        program = jax.make_jaxpr(through_the_exchange)(*arguments)
        with jax.disable_jit():
            without = jax.make_jaxpr(through_the_exchange)(*arguments)
    assert not [equation for equation in program.eqns if equation.primitive.name == "shard_map"]
    names = [[equation.primitive.name for equation in each.eqns] for each in (program, without)]
    assert names[0] == names[1]


# --- the choice of an implementation --------------------------------------------------------------------------------


def test_compiled_kernels_are_chosen_on_gpus_that_can_run_them(monkeypatch):
    call = SORTED.handle.call
    assert call.implementation == "xla"
    assert call.implementation_reason.startswith("implementation=None: 'xla' on cpu")

    def refuse(call: Any, caller: str) -> None:
        raise NotImplementedError("dispatch: not this one. Try another.")

    def chosen(name: Any, platform: str, check_call: Any) -> Any:
        kernels = dataclasses.replace(exchange.XLA, name="megakernel", check=check_call)
        monkeypatch.setitem(exchange.IMPLEMENTATIONS, "megakernel", kernels)
        # The constant of the table, where there is one.
        monkeypatch.setattr(check, "MEGAKERNEL", kernels, raising=False)
        call_of = lambda implementation, reason: dataclasses.replace(  # noqa: E731
            call, implementation=implementation.name, implementation_reason=reason
        )
        return check.choose(name, platform, call.group, None, call_of)

    assert chosen(None, "gpu", lambda call, caller: None).implementation == "megakernel"
    assert chosen(None, "cpu", lambda call, caller: None).implementation == "xla"
    refused = chosen(None, "gpu", refuse)
    assert refused.implementation == "xla"
    assert "'megakernel' cannot run this call (dispatch: not this one)" in refused.implementation_reason
    with pytest.raises(NotImplementedError, match="not this one"):
        chosen("megakernel", "gpu", refuse)


# --- what the documentation shows -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examples_of_the_page_run_and_give_what_moe_layer_gives():
    names: dict[str, Any] = {}
    page = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text()
    layer, halves, in_turn, in_8_bits = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(layer, "docs/exchange.md", "exec"), names)
    with jax.set_mesh(names["mesh"]):
        routing = jaxmoe.route(names["logits"], jaxmoe.RouterConfig(top_k=4))
        expected = jaxmoe.moe_layer(names["x"], routing, names["experts"], implementation="xla")
        exec(compile(halves, "docs/exchange.md", "exec"), names)
        exec(compile(in_turn, "docs/exchange.md", "exec"), names)
    for name in ("y", "y_of_halves"):
        assert relative_error(names[name], expected) < 1e-5
    x, logits, matrices = (
        jnp.asarray(np.asarray(array)) for array in (names["x"], names["logits"], names["experts"].w_gate[..., :64])
    )
    for y, sign in zip(np.asarray(names["ys"]), (1, -1), strict=True):
        routing = jaxmoe.route(sign * logits, jaxmoe.RouterConfig(top_k=4))
        sent = jaxmoe.dispatch(sign * x, routing, axis_name=None)
        outputs = jnp.tanh(jax.lax.ragged_dot(sent.rows, matrices, sent.group_sizes))
        assert relative_error(y, jaxmoe.combine(outputs, routing.topk_weights, sent.handle)) < 1e-5
    exec(compile(in_8_bits, "docs/exchange.md", "exec"), names)
    dtypes = [names[name].dtype for name in ("rows", "scales", "wide_rows")]
    assert dtypes == [jnp.float8_e4m3fn, jnp.float32, jnp.float32]
