"""Bad input ends in an error that says what was given, what is needed and what to do, before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import make_inputs, relative_error
from tests.layer_calls import mesh_of
from tests.other_arrays import tensor

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

X, IDS, WEIGHTS, EXPERTS, _ = make_inputs(0, tokens=16, hidden=8, intermediate=12, num_experts=8, top_k=2)


def call(**changes: Any) -> Any:
    arguments = {"x": X, "topk_ids": IDS, "topk_weights": WEIGHTS, "experts": EXPERTS, "axis_name": None} | changes
    return jaxmoe.moe_layer(**arguments)


def changed(**arrays: Any) -> jaxmoe.Experts:
    fields = {name: getattr(EXPERTS, name) for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")}
    return jaxmoe.Experts(**fields | arrays)


def experts_of(number: int) -> jaxmoe.Experts:
    return jaxmoe.Experts.init(jax.random.key(0), number, 8, 12)


class QArray(NamedTuple):
    """Values and scales as qwix names them."""

    qvalue: jax.Array
    scale: jax.Array


def q_array(like: Any, dtype: Any) -> Any:
    return QArray(like.astype(dtype), jnp.ones((*like.shape[:-2], 1, like.shape[-1])))


# What is wrong -> (arguments, type, parts of the message: what was given, what is needed or what to do). Made when a
# test asks: XLA compiles for some, and every test process reads all of this file.
BAD: dict[str, Callable[[], tuple[dict[str, Any], type[Exception], list[str]]]] = {
    "x of one dimension": lambda: ({"x": X[0]}, ValueError, ["x has shape (8,)", "x[None]"]),
    "x of integers": lambda: ({"x": IDS}, TypeError, ["x is int32", "bfloat16"]),
    "x that is no array": lambda: ({"x": [1.0]}, TypeError, ["x is a list", "array"]),
    "x of another library": lambda: ({"x": tensor(16, 8)}, TypeError, ["x is a Tensor", "an array of NumPy or JAX"]),
    "ids of other tokens": lambda: ({"topk_ids": IDS[:4]}, ValueError, ["topk_ids has shape (4, 2)", "(16,)"]),
    "ids without a slot dimension": lambda: (
        {"topk_ids": IDS[:, 0]},
        ValueError,
        ["topk_ids has shape (16,)", "[..., top_k]"],
    ),
    "ids of floats": lambda: ({"topk_ids": WEIGHTS}, TypeError, ["topk_ids is float32", "integer"]),
    "no slots": lambda: (
        {"topk_ids": IDS[:, :0], "topk_weights": WEIGHTS[:, :0]},
        ValueError,
        ["top_k must be at least 1"],
    ),
    "weights of other slots": lambda: ({"topk_weights": WEIGHTS[:, :1]}, ValueError, ["(16, 2)", "(16, 1)", "differ"]),
    "weights in low precision": lambda: (
        {"topk_weights": WEIGHTS.astype(jnp.bfloat16)},
        TypeError,
        ["topk_weights is bfloat16", "float32", "astype"],
    ),
    "more slots than experts": lambda: (
        {"experts": experts_of(1)},
        ValueError,
        ["top_k=2", "only 1 experts", "at most 1"],
    ),
    "experts that are a tuple": lambda: ({"experts": (1, 2)}, TypeError, ["experts is a tuple", "jaxmoe.Experts("]),
    "experts without w_down": lambda: ({"experts": changed(w_down=None)}, TypeError, ["experts.w_down is None"]),
    "experts that are no arrays": lambda: ({"experts": changed(w_up="w")}, TypeError, ["experts.w_up is a str"]),
    "experts of qwix in 8 bits": lambda: (
        {"experts": changed(w_up=q_array(EXPERTS.w_up, jnp.float8_e4m3fn))},
        TypeError,
        [
            "experts.w_up is a QArray with qvalue float8_e4m3fn[8, 8, 12] and scale float32[8, 1, 12]",
            "[experts, out, in]",
            "jaxmoe.BlockScaled(q.qvalue.swapaxes(1, 2), q.scale.swapaxes(1, 2))",
        ],
    ),
    "experts of qwix as integers": lambda: (
        {"experts": changed(w_down=q_array(EXPERTS.w_down, jnp.int8))},
        TypeError,
        ["experts.w_down is a QArray with qvalue int8[8, 12, 8]", "BlockScaled", "jaxmoe.quantize(experts)"],
    ),
    "biases of qwix": lambda: (
        {"experts": changed(b_down=q_array(EXPERTS.w_down[:, 0], jnp.int8))},
        TypeError,
        ["experts.b_down is a QArray", "qvalue * scale as one array"],
    ),
    "experts of two dimensions": lambda: (
        {"experts": changed(w_gate=X)},
        ValueError,
        ["w_gate has shape (16, 8)", "[experts, hidden"],
    ),
    "experts of another width": lambda: (
        {"experts": jaxmoe.Experts.init(jax.random.key(0), 8, 12, 8)},
        ValueError,
        ["w_gate has shape (8, 12, 8)", "x has hidden=8", "transposed"],
    ),
    "w_down as torch has it": lambda: (
        {"experts": changed(w_down=EXPERTS.w_down.mT)},
        ValueError,
        ["w_down has shape (8, 8, 12)", "(8, 12, 8)"],
    ),
    "a bias of another width": lambda: (
        {"experts": changed(b_down=X[:8, :4])},
        ValueError,
        ["b_down has shape (8, 4)", "(8, 8)"],
    ),
    "experts in another dtype": lambda: (
        {"experts": EXPERTS.astype(jnp.bfloat16)},
        TypeError,
        ["experts.w_gate is bfloat16", "x is float32", "astype(x.dtype)"],
    ),
    "a bias in another dtype": lambda: (
        {"x": X.astype(jnp.bfloat16), "experts": changed(b_down=jnp.zeros((8, 8), jnp.bfloat16))},
        TypeError,
        ["experts.b_down is bfloat16", "experts.w_gate is float32", "experts.astype(jnp.float32)"],
    ),
    "b_up without w_up": lambda: (
        {"experts": changed(w_up=None, b_up=jnp.zeros((8, 12)))},
        ValueError,
        ["b_up", "w_up is None"],
    ),
    "SwiGLU without w_up": lambda: (
        {"experts": changed(w_up=None), "activation": jaxmoe.SwiGLU()},
        ValueError,
        ["SwiGLU", "w_up is None"],
    ),
    "an unknown activation": lambda: ({"activation": "swish"}, ValueError, ["'swish'", "'silu'", "jaxmoe.SwiGLU("]),
    "an activation that is none": lambda: ({"activation": 2}, TypeError, ["'silu'", "SwiGLU", "function of gate"]),
    "an activation that is a class": lambda: (
        {"activation": jaxmoe.SwiGLU},
        TypeError,
        ["SwiGLU'>", "jaxmoe.SwiGLU()"],
    ),
    "an activation of three arrays": lambda: (
        {"activation": jax.lax.clamp},
        TypeError,
        ["takes (min: ", "one array without a default, gate, or two, gate and up"],
    ),
    "a function that is not elementwise": lambda: (
        {"activation": jnp.sum},
        TypeError,
        ["activation=sum returns float32[]", "float array of the shape of gate"],
    ),
    "a function of two projections without w_up": lambda: (
        {"experts": changed(w_up=None), "activation": lambda gate, up: gate * up},
        ValueError,
        ["multiplies two projections", "w_up is None"],
    ),
    "an unknown implementation": lambda: ({"implementation": "fast"}, ValueError, ["'fast'", "'xla'", "'reference'"]),
    "a plan that is none": lambda: ({"plan": 128}, TypeError, ["plan is an int", "jaxmoe.Plan"]),
    "a mask of integers": lambda: ({"token_valid": IDS[:, 0]}, TypeError, ["token_valid is int32", "bool"]),
    "a mask of other tokens": lambda: (
        {"token_valid": jnp.ones(4, bool)},
        ValueError,
        ["token_valid has shape (4,)", "(16,)"],
    ),
    "no mesh": lambda: ({"axis_name": "expert"}, ValueError, ["needs a mesh", "jax.set_mesh", "axis_name=None"]),
    "an axis that the mesh lacks": lambda: (
        {"axis_name": "ep", "mesh": mesh_of("expert")},
        ValueError,
        ["axis 'ep' is not in the mesh", "'expert': 8"],
    ),
    "a data axis that the mesh lacks": lambda: (
        {"axis_name": "expert", "data_axes": "batch", "mesh": mesh_of("expert")},
        ValueError,
        ["axis 'batch' is not in the mesh"],
    ),
    "an axis in both roles": lambda: (
        {"axis_name": "expert", "data_axes": "expert", "mesh": mesh_of("expert")},
        ValueError,
        ["['expert'] are in data_axes"],
    ),
    "an axis named twice": lambda: (
        {"axis_name": ("expert", "expert"), "mesh": mesh_of("expert")},
        ValueError,
        ["different names"],
    ),
    "experts that the axis does not divide": lambda: (
        {"experts": experts_of(6), "axis_name": "expert", "mesh": mesh_of("data", "expert")},
        ValueError,
        [
            "num_experts=6",
            "4 ranks of mesh axis 'expert'",
            "6 % 4 = 2",
            "Use 8 experts",
            "or a mesh axis of 1, 2 or 3 ranks",
        ],
    ),
}


@pytest.mark.parametrize("wrong", BAD)
def test_bad_input_raises_what_was_given_and_what_to_do(wrong):
    changes, kind, parts = BAD[wrong]()
    with pytest.raises(kind) as raised:
        call(**changes)
    message = str(raised.value)
    assert message.startswith("moe_layer: ")
    for part in parts:
        assert part in message, message


def test_values_and_scales_of_qwix_compute_what_they_are_as_the_error_says():
    x, ids, weights, experts, _ = make_inputs(0)
    narrow = {}
    for name in ("w_gate", "w_up", "w_down"):
        q = q_array(getattr(experts, name), jnp.float8_e4m3fn)
        narrow[name] = jaxmoe.BlockScaled(q.qvalue.swapaxes(1, 2), q.scale.swapaxes(1, 2))
    rounded = jax.tree.map(lambda a: a.astype(jnp.float8_e4m3fn).astype(a.dtype), experts)
    options: Any = {"axis_name": None, "implementation": "reference"}
    y = jaxmoe.moe_layer(x, ids, weights, jaxmoe.Experts(**narrow), precision="w8a16", **options)
    expected = jaxmoe.moe_layer(x, ids, weights, rounded, **options)
    assert relative_error(y, expected) < 1e-6


def test_bad_input_raises_the_same_under_jit_and_in_explain():
    for wrong in ("experts of another width", "no mesh", "an unknown implementation"):
        changes, kind, parts = BAD[wrong]()
        arguments = {"topk_ids": IDS, "topk_weights": WEIGHTS, "experts": EXPERTS, "axis_name": None} | changes
        with pytest.raises(kind) as raised:
            jax.jit(lambda x: jaxmoe.moe_layer(x, **arguments))(X)  # noqa: B023
        assert parts[0] in str(raised.value)
        with pytest.raises(kind) as raised:
            jaxmoe.explain(X, **arguments)
        assert parts[0] in str(raised.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_axis_that_is_not_manual_inside_shard_map_is_named(kind):
    mesh = mesh_of("data", "expert", kind=kind)
    inside = jax.shard_map(
        lambda x: jaxmoe.moe_layer(x, IDS[:8], WEIGHTS[:8], EXPERTS),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="'expert' is not manual") as raised, jax.set_mesh(mesh):
        jax.jit(inside)(x)
    assert "axis_names" in str(raised.value)


def test_an_explicit_axis_left_inside_shard_map_is_named():
    mesh = mesh_of("data", "expert", kind=AxisType.Explicit)
    inside = jax.shard_map(
        lambda x: jaxmoe.moe_layer(x, IDS[:4], WEIGHTS[:4], changed(**jax.tree.map(lambda a: a[:2], vars(EXPERTS)))),
        mesh=mesh,
        in_specs=P("expert"),
        out_specs=P("expert"),
        axis_names={"expert"},
    )
    x = jax.device_put(X, NamedSharding(mesh, P("expert")))
    with pytest.raises(ValueError, match=r"\['data'\] are Explicit inside this shard_map"), jax.set_mesh(mesh):
        jax.jit(inside)(x)


@pytest.mark.parametrize("options", [{"batch_rows": 0}, {"batch_rows": 1.5}, {"batch_rows": 8, "grouped_gemm": "gmm"}])
def test_a_plan_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=r"^Plan: "):
        jaxmoe.Plan(**options)


def test_a_limit_that_clamps_everything_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        jaxmoe.SwiGLU(limit=0.0)


def test_experts_that_are_the_same_on_all_ranks_are_refused_inside_shard_map():
    inside = jax.shard_map(
        lambda x: jaxmoe.moe_layer(x, IDS[:2], WEIGHTS[:2], EXPERTS),
        mesh=mesh_of("expert"),
        in_specs=P("expert"),
        out_specs=P("expert"),
    )
    with pytest.raises(ValueError, match="the same on all ranks of mesh axis 'expert'") as raised:
        jax.jit(inside)(X)
    assert "P('expert')" in str(raised.value)


def test_a_mesh_that_differs_from_the_set_one_or_has_no_devices_is_refused():
    with pytest.raises(ValueError, match="differs from the mesh that is set"), jax.set_mesh(mesh_of("data", "expert")):
        call(axis_name="expert", mesh=mesh_of("expert"))
    with pytest.raises(ValueError, match="AbstractMesh, which has no devices"):
        call(axis_name="expert", mesh=mesh_of("expert").abstract_mesh)
    with pytest.raises(TypeError, match="mesh is a tuple"):
        call(axis_name="expert", mesh=(2, 4))


def test_more_slots_than_int32_can_number_are_refused():
    shape = jax.ShapeDtypeStruct
    slots = shape((2**26, 32), jnp.int32), shape((2**26, 32), jnp.float32)
    experts = jax.eval_shape(lambda: experts_of(64))
    with pytest.raises(ValueError, match="more rows than int32 can number"):
        jaxmoe.explain(shape((2**26, 8), jnp.float32), *slots, experts, axis_name=None)
