"""How tokens and experts lie on a mesh: nothing is moved that need not be, and the layer computes the same."""

import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import testing, token_split
from jaxmoe.options import Arguments
from jaxmoe.testing import relative_error
from tests.layer_calls import cotangent

NAMES = ("data", "expert", "tensor")
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
HIDDEN, INTERMEDIATE = 16, 32
# Of the experts' first matrix, [experts, hidden, intermediate].
EXPERT_SPECS = {
    "whole": P("expert"),
    "tensor parallel": P("expert", None, "tensor"),
    "FSDP": P("expert", "data"),
    "FSDP of the other dimension": P("expert", None, "data"),
    "both": P("expert", "data", "tensor"),
    "split over an axis that repeats tokens": P("expert", "tensor"),
}


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 2, 2), NAMES, axis_types=(kind,) * 3)


def inputs(batch: tuple[int, ...] = (4, 6)) -> Arguments:
    """Returns tokens with several leading dimensions."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": 4, "top_k": 2}
    flat = testing.make_inputs(tokens=int(np.prod(batch)), seed=1, biases=True, **sizes)
    x, ids, weights = (array.reshape(*batch, -1) for array in flat[:3])
    return Arguments(x, ids, weights, flat.experts)


def placed(arguments: Arguments, mesh: Mesh, tokens: P, experts: P) -> Arguments:
    """Returns the arrays as they would lie in a model."""
    first, hidden, intermediate = (*experts, None, None, None)[:3]

    def put(array: Any, *spec: Any) -> Any:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    e = arguments.experts
    spread = jaxmoe.Experts(
        put(e.w_gate, first, hidden, intermediate),
        put(e.w_up, first, hidden, intermediate),
        put(e.w_down, first, intermediate, hidden),
        put(e.b_gate, first, intermediate),
        put(e.b_up, first, intermediate),
        put(e.b_down, first, hidden),
    )
    batch = (*tokens, None, None)[:2]
    ids, weights = (put(array, *batch) for array in arguments[1:3])
    return Arguments(put(arguments.x, *tokens), ids, weights, spread)


def layer(arguments: Arguments, **options: Any) -> jax.Array:
    return jaxmoe.moe_layer(*arguments[:4], implementation="reference", **options)


def gradients(arguments: Arguments, **options: Any) -> Any:
    def loss(x: jax.Array, experts: jaxmoe.Experts) -> jax.Array:
        y = layer(arguments._replace(x=x, experts=experts), **options)
        return jnp.sum(y * cotangent(y))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(arguments.x, arguments.experts)


def on_one_device(arguments: Arguments) -> tuple[jax.Array, Any]:
    return layer(arguments, axis_name=None), gradients(arguments, axis_name=None)


def collectives(function: Any, *arrays: Any) -> dict[str, int]:
    """Returns how often each kind of collective is in the compiled program."""
    text = jax.jit(function).lower(*arrays).compile().as_text() or ""
    names = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
    return {name: count for name in names if (count := text.count(f" {name}(") + text.count(f" {name}-start("))}


def collectives_and_dtypes(lowered: str) -> set[tuple[str, str]]:
    """Returns the kinds of collectives of a program that is not compiled yet, and of what dtypes."""
    kinds = r'"stablehlo.(all_reduce|all_gather|reduce_scatter)".*?-> tensor<[^>]*?(\w+)>'
    return {(kind, dtype.rsplit("x", 1)[-1]) for kind, dtype in re.findall(kinds, lowered, re.DOTALL)}


# --- tokens -----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    "spec", [P("data"), P("data", "expert"), P(("data", "expert")), P("data", "tensor"), P(None, "data"), P()], ids=str
)
def test_tokens_may_be_split_over_any_leading_dimension_and_the_output_is_placed_as_they_were(kind, spec):
    arguments, mesh = inputs(), mesh_of(kind)
    truth, _ = on_one_device(arguments)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)
        spread = placed(arguments, mesh, spec, P("expert"))
        y = layer(spread)
    assert relative_error(y, truth) < 1e-5
    assert y.sharding.is_equivalent_to(spread.x.sharding, y.ndim)


@KINDS
def test_tokens_that_lie_over_two_dimensions_are_not_moved(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        spread = placed(inputs(), mesh, P("data", "tensor"), P())
        # Auto axes are not known inside of jit.
        where = {"data_axes": P("data", "tensor")} if kind == AxisType.Auto else {}
        run = lambda *arrays: layer(Arguments(*arrays), axis_name=None, **where)  # noqa: E731
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)
            assert collectives(run, *spread[:4]) == {}


@KINDS
@pytest.mark.parametrize("batch", [(1, 1), (3, 1), (2, 3), (5, 7)], ids=str)
def test_a_batch_that_no_axis_divides_gives_the_same_and_fills_up_less_than_one_token_a_rank(kind, batch):
    arguments, mesh = inputs(batch), mesh_of(kind)
    truth, (of_x, of_experts) = on_one_device(arguments)
    with jax.set_mesh(mesh):
        where: dict[str, Any] = {"data_axes": "data", "intermediate_axis": "tensor"}
        y, stats = jaxmoe.moe_layer(*arguments[:4], implementation="reference", **where, return_stats=True)
        gx, ge = gradients(arguments, **where)
        call = jaxmoe.explain(*arguments[:4], **where).call
    assert relative_error(y, truth) < 1e-5
    assert relative_error(gx, of_x) < 1e-5
    assert relative_error(ge.w_gate, of_experts.w_gate) < 1e-5
    assert int(stats.rows_per_expert.sum()) == 2 * np.prod(batch)
    assert int(stats.unused_slots) == 0
    assert 0 <= call.token_split.filling < call.token_split.inside_ranks


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_a_batch_in_16_bits_that_no_axis_divides_is_taken_on_a_mesh_that_has_an_axis_which_the_call_does_not_name(
    dtype,
):
    """XLA for CPUs ends the process where sums in 16 bits stand in a `shard_map` that leaves it an axis."""
    arguments = inputs(batch=(3, 5))
    narrow = arguments._replace(x=arguments.x.astype(dtype))
    of_layer = functools.partial(jaxmoe.moe_layer, implementation="reference")
    alone = of_layer(*narrow[:4], axis_name=None)
    with jax.set_mesh(mesh_of(AxisType.Auto)), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)  # of the axis that is left out
        y, pull = jax.vjp(jax.jit(lambda x: of_layer(x, *narrow[1:4], data_axes="data")), narrow.x)
        (gradient,) = pull(cotangent(y).astype(dtype))
    np.testing.assert_array_equal(y, alone)
    _, pull_alone = jax.vjp(lambda x: of_layer(x, *narrow[1:4], axis_name=None), narrow.x)
    assert relative_error(gradient, pull_alone(cotangent(y).astype(dtype))[0]) < 2 * float(jnp.finfo(dtype).eps)


def test_a_dimension_that_divides_is_split_before_any_token_is_added():
    mesh = mesh_of(AxisType.Auto)
    split = token_split.choose((3, 64), (), ("data", "expert"), mesh)
    assert (split.dims, split.inside, split.rows) == (((), ("data", "expert")), (), 48)
    split = token_split.choose((2, 3, 2), (), ("data", "expert"), mesh)
    assert (split.dims, split.inside, split.rows) == ((("data",), (), ("expert",)), (), 3)


# --- experts ----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("name", EXPERT_SPECS)
def test_experts_may_be_split_inside_and_their_gradients_lie_as_they_do(kind, name):
    arguments, mesh, spec = inputs(), mesh_of(kind), EXPERT_SPECS[name]
    truth, (of_x, of_experts) = on_one_device(arguments)
    named = dict(zip(("hidden_axis", "intermediate_axis"), (*spec[1:], None, None), strict=False))
    # Explicit axes are part of types; what is called outside of jit knows Auto axes too.
    inside_jit = {"data_axes": "data", **named} if kind == AxisType.Auto else {}
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)
        spread = placed(arguments, mesh, P("data", "expert"), spec)
        y = layer(spread)
        gx, ge = gradients(spread, **inside_jit)
    assert relative_error(y, truth) < 1e-5
    assert relative_error(gx, of_x) < 1e-5
    for field in dataclasses.fields(ge):
        gradient, parameter = getattr(ge, field.name), getattr(spread.experts, field.name)
        assert relative_error(gradient, getattr(of_experts, field.name)) < 1e-5, field.name
        if name != "split over an axis that repeats tokens":
            assert gradient.sharding.is_equivalent_to(parameter.sharding, gradient.ndim), field.name


def test_partial_outputs_of_tensor_parallel_experts_are_added_up_once():
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh):
        spread = placed(inputs(), mesh, P("data"), P(None, None, "tensor"))
        run = lambda *arrays: layer(  # noqa: E731
            Arguments(*arrays), axis_name=None, data_axes="data", intermediate_axis="tensor"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)  # of the expert axis
            assert collectives(run, *spread[:4]) == {"all-reduce": 1}


def test_experts_under_fsdp_are_gathered_once_and_their_gradients_scattered():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    arguments = inputs((8, 3))
    experts = dataclasses.replace(arguments.experts, b_gate=None, b_up=None, b_down=None)

    def loss(experts: jaxmoe.Experts) -> jax.Array:
        y = layer(arguments._replace(experts=experts), axis_name=None, data_axes="data", hidden_axis="data")
        return jnp.sum(y * y)

    with jax.set_mesh(mesh):
        split: Any = P(None, "data")
        back: Any = P(None, None, "data")
        specs = jaxmoe.Experts(split, split, back)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        found = collectives(jax.grad(loss), jax.device_put(experts, shardings))
    # One for each of the three matrices, or fewer where XLA joins them.
    assert found.keys() == {"all-gather", "reduce-scatter"}
    assert max(found.values()) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "xla", "megakernel"])
@pytest.mark.parametrize("kind", [{"hidden_axis": "data"}, {"intermediate_axis": "data"}], ids=str)
def test_float32_experts_beside_narrow_tokens_are_sent_in_16_bits_with_the_same_output_and_float32_gradients(
    implementation, kind
):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arguments = inputs((8, 4))
    arguments = arguments._replace(x=arguments.x.astype(jnp.bfloat16))
    options: Any = {"axis_name": None, "data_axes": "data"}

    def output_and_gradients(experts: jaxmoe.Experts, **split: Any) -> Any:
        def loss(experts: jaxmoe.Experts) -> Any:
            called = arguments._replace(experts=experts)
            y = jaxmoe.moe_layer(*called[:4], implementation=implementation, **options, **split)
            return jnp.sum(y.astype(jnp.float32) * cotangent(y)), y

        return jax.grad(loss, has_aux=True)(experts)

    with jax.set_mesh(mesh):
        truth, whole_y = jax.jit(output_and_gradients)(arguments.experts)
        program = jax.jit(functools.partial(output_and_gradients, **kind)).lower(arguments.experts)
        found, y = program.compile()(arguments.experts)
        of_whole = jax.jit(output_and_gradients).lower(arguments.experts).as_text()
    np.testing.assert_array_equal(y, whole_y)
    for gradient, true in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert gradient.dtype == jnp.float32
        np.testing.assert_allclose(gradient, true, rtol=0, atol=1e-6 * np.abs(true).max())
    sent = collectives_and_dtypes(program.as_text())
    assert {("all_gather", "bf16"), ("reduce_scatter", "f32")} <= sent
    assert ("all_gather", "f32") not in sent
    assert ("reduce_scatter", "bf16") not in sent
    assert collectives_and_dtypes(of_whole) == {("all_reduce", "f32")}


def test_gradients_are_scattered_before_they_are_added_up_over_the_other_axes_of_the_tokens():
    mesh, arguments = mesh_of(AxisType.Auto), inputs((8, 3))

    def loss(experts: jaxmoe.Experts) -> jax.Array:
        axes = ("data", "tensor")
        y = layer(arguments._replace(experts=experts), axis_name=None, data_axes=axes, hidden_axis="data")
        return jnp.sum(y * y)

    experts = dataclasses.replace(arguments.experts, b_gate=None, b_up=None, b_down=None)
    truth = jax.grad(lambda e: jnp.sum(layer(arguments._replace(experts=e), axis_name=None) ** 2))(experts)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)  # of the expert axis
        spread = placed(arguments, mesh, P(), P(None, "data")).experts
        spread = dataclasses.replace(spread, b_gate=None, b_up=None, b_down=None)
        program = jax.jit(jax.grad(loss)).lower(spread).compile()
        assert relative_error(program(spread).w_gate, truth.w_gate) < 1e-5
    text = program.as_text() or ""
    sums = [line for line in text.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert sums
    whole = {f"[4,{HIDDEN},{INTERMEDIATE}]", f"[4,{INTERMEDIATE},{HIDDEN}]"}
    assert not [line for line in sums if any(shape in line for shape in whole)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("hidden_axis", [(), "data"], ids=["whole", "FSDP"])
@pytest.mark.parametrize("implementation", ["reference", "xla", "megakernel"])
def test_gradients_in_16_bits_are_added_up_on_a_mesh_that_has_an_axis_which_the_call_does_not_name(
    implementation, hidden_axis, dtype
):
    """XLA for CPUs ends the process where sums in 16 bits stand in a `shard_map` that leaves it an axis."""
    sizes: dict[str, Any] = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": 4, "top_k": 2}
    arguments = testing.make_inputs(tokens=24, seed=1, dtype=dtype, **sizes)

    def of_experts(arguments: Arguments, **options: Any) -> jaxmoe.Experts:
        def loss(experts: jaxmoe.Experts) -> jax.Array:
            y = jaxmoe.moe_layer(*arguments[:3], experts, **options)
            return jnp.sum(y.astype(jnp.float32) * cotangent(y))

        return jax.jit(jax.grad(loss))(arguments.experts)

    def widened(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == dtype else leaf, tree)

    low = of_experts(arguments, implementation="reference", axis_name=None)
    truth = of_experts(widened(arguments), implementation="reference", axis_name=None)
    with jax.set_mesh(mesh_of(AxisType.Auto)), warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxmoe.RepeatedWorkWarning)  # of the axis that is left out
        found = of_experts(arguments, implementation=implementation, data_axes="data", hidden_axis=hidden_axis)
    for name in ("w_gate", "w_up", "w_down"):
        assert getattr(found, name).dtype == dtype
        allowed = testing.tolerance(getattr(low, name), getattr(truth, name), dtype)
        assert relative_error(getattr(found, name), getattr(truth, name)) < allowed, name


@pytest.mark.parametrize("format_", ["128x128", "channel", "mxfp4", "nvfp4"])
def test_quantised_experts_may_be_split_inside_too(format_):
    sizes: dict[str, Any] = {"hidden": 256, "intermediate": 256, "num_experts": 4, "top_k": 2}
    arguments = testing.make_inputs(tokens=16, seed=2, **sizes)
    experts = jaxmoe.quantize(arguments.experts, format_)
    arguments = arguments._replace(experts=experts)
    options: dict[str, Any] = {"precision": "w4a16" if "fp4" in format_ else "w8a16"}
    truth = layer(arguments, axis_name=None, **options)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        y = layer(arguments, data_axes="data", hidden_axis="data", intermediate_axis="tensor", **options)
    assert relative_error(y, truth) < 1e-5


@pytest.mark.parametrize("implementation", ["xla", "megakernel"])
def test_every_implementation_takes_parts_of_experts(implementation):
    arguments, mesh = inputs((8, 2)), mesh_of(AxisType.Auto)
    truth, _ = on_one_device(arguments)
    where: dict[str, Any] = {"data_axes": "data", "hidden_axis": "data", "intermediate_axis": "tensor"}
    with jax.set_mesh(mesh):
        y = jaxmoe.moe_layer(*arguments[:4], implementation=implementation, **where)
        told = str(jaxmoe.explain(*arguments[:4], implementation=implementation, **where))
    assert relative_error(y, truth) < 1e-5
    assert "2 ranks of 'tensor' compute parts of the intermediate dimension" in told
    assert "experts are gathered over 'data'" in told
    assert f"intermediate {INTERMEDIATE // 2}" in told


def test_inside_shard_map_the_axes_that_split_experts_are_named():
    arguments, mesh = inputs((8, 2)), mesh_of(AxisType.Auto)
    truth, _ = on_one_device(arguments)
    into: Any = P("expert", "data", "tensor")
    back: Any = P("expert", "tensor", "data")
    of_h: Any = P("expert", "tensor")
    of_answers: Any = P("expert", "data")
    experts = jaxmoe.Experts(into, into, back, of_h, of_h, of_answers)
    tokens = P(("data", "expert"))

    def on_rank(*arrays: Any) -> jax.Array:
        return layer(Arguments(*arrays), hidden_axis="data", intermediate_axis="tensor")

    run = jax.shard_map(on_rank, mesh=mesh, in_specs=(tokens, tokens, tokens, experts), out_specs=tokens)
    assert relative_error(jax.jit(run)(*arguments[:4]), truth) < 1e-5


def test_quantised_experts_that_lie_split_within_a_block_are_gathered():
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 128, "num_experts": 4, "top_k": 2}
    arguments, mesh = testing.make_inputs(tokens=16, seed=2, **sizes), mesh_of(AxisType.Explicit)
    experts = jaxmoe.quantize(arguments.experts)
    truth = layer(arguments._replace(experts=experts), axis_name=None, precision="w8a16")
    with jax.set_mesh(mesh):
        spread = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P("expert"))), experts)
        gate: Any = spread.w_gate
        within = jax.device_put(gate.values, NamedSharding(mesh, P("expert", "tensor")))
        spread = dataclasses.replace(spread, w_gate=dataclasses.replace(gate, values=within))
        y = layer(arguments._replace(experts=spread), data_axes=(), precision="w8a16")
    assert relative_error(y, truth) < 1e-5


# --- what is said -----------------------------------------------------------------------------------------------------


def test_work_that_is_repeated_is_warned_of_with_what_to_write_and_an_empty_tuple_says_that_it_is_meant():
    arguments = inputs()
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with pytest.warns(jaxmoe.RepeatedWorkWarning, match=r"'data', 'tensor'.* pass data_axes=\('data', 'tensor'\)"):
            jax.eval_shape(layer, arguments)
        for meant in ((), P()):
            jax.eval_shape(lambda a, meant=meant: layer(a, data_axes=meant), arguments)


def test_an_axis_that_data_axes_leave_out_is_warned_of_too():
    arguments = inputs()
    named = functools.partial(pytest.warns, jaxmoe.RepeatedWorkWarning)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with named(match=r"ranks of mesh axis 'tensor' .* pass data_axes=\('data', 'tensor'\); .*filterwarnings"):
            jax.eval_shape(lambda a: layer(a, data_axes="data"), arguments)
        with named(match=r"name it in data_axes=P(artitionSpec)?\('data',\) too"):
            jax.eval_shape(lambda a: layer(a, data_axes=P("data")), arguments)
        with named(match=r"ranks of mesh axis 'data'"):  # tokens are split over the experts' axis alone
            jax.eval_shape(lambda a: layer(a, data_axes=P(None, "expert"), intermediate_axis="tensor"), arguments)
        with named(match="'tensor'"):  # gathered, so that all of its ranks compute the same
            jax.eval_shape(lambda a: layer(a, data_axes="data", hidden_axis="tensor"), arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"data_axes": ("data", "tensor")},
        {"data_axes": P("data", "tensor")},
        {"data_axes": "data", "intermediate_axis": "tensor"},
        {"data_axes": "data", "axis_name": ("expert", "tensor")},
    ],
    ids=str,
)
def test_where_every_axis_splits_the_work_nothing_is_warned_of(options):
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        jax.eval_shape(lambda a: layer(a, **options), inputs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_axis": "fsdp"}, r"hidden_axis names 'fsdp', which is not in the mesh"),
        ({"intermediate_axis": "expert"}, r"'expert' is in intermediate_axis and in axis_name"),
        (
            {"hidden_axis": "tensor", "intermediate_axis": "tensor"},
            r"'tensor' is in intermediate_axis and in hidden_axis",
        ),
        ({"hidden_axis": ("data", "data")}, r"hidden_axis=\('data', 'data'\) must be a mesh axis name"),
        ({"data_axes": P("data", "fsdp")}, r"axis 'fsdp' is not in the mesh"),
    ],
    ids=str,
)
def test_axes_that_cannot_be_used_are_refused(options, message):
    with jax.set_mesh(mesh_of(AxisType.Auto)), pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(lambda a: layer(a, **options), inputs())


def test_inside_shard_map_experts_that_are_whole_where_shards_are_named_are_refused():
    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(
        lambda *arrays: layer(Arguments(*arrays), hidden_axis="data"),
        mesh=mesh,
        in_specs=(*[P(("data", "expert"))] * 3, P("expert")),
        out_specs=P(("data", "expert")),
    )
    with pytest.raises(ValueError, match=r"so hidden=16; x has hidden=16, so a shard over the 2 ranks .* must have 8"):
        jax.eval_shape(run, *inputs((16,))[:4])


def test_widths_that_an_axis_does_not_divide_are_refused_with_the_array_and_the_size():
    sizes: dict[str, Any] = {"hidden": 16, "intermediate": 31, "num_experts": 4, "top_k": 2}
    arguments = testing.make_inputs(tokens=16, seed=2, **sizes)
    refused = pytest.raises(ValueError, match=r"experts.w_gate has intermediate=31, which cannot be split over the 2")
    with jax.set_mesh(mesh_of(AxisType.Auto)), refused:
        layer(arguments, data_axes="data", intermediate_axis="tensor")
    sizes["intermediate"] = 128
    blocks = jaxmoe.quantize(testing.make_inputs(tokens=16, seed=2, **sizes).experts)
    refused = pytest.raises(ValueError, match=r"w_gate has intermediate=128 in blocks of 128, which cannot be split")
    with jax.set_mesh(mesh_of(AxisType.Auto)), refused:
        layer(arguments._replace(experts=blocks), data_axes="data", intermediate_axis="tensor")


@pytest.mark.parametrize(
    ("intermediate", "block", "told"),
    [
        (32, "128x128", "intermediate=32 in blocks of 128, .*Leave intermediate_axis out\\.$"),
        (288, "128x128", "intermediate=288 in blocks of 128, .*Leave intermediate_axis out\\.$"),
        (96, "mxfp4", "w_down has intermediate=96 in blocks of 32, .*or choose an axis whose size divides 3\\.$"),
    ],
)
def test_an_axis_that_cuts_blocks_is_an_error_that_advises_another_only_where_one_will_do(intermediate, block, told):
    experts = jaxmoe.quantize(jaxmoe.Experts.init(jax.random.key(0), 4, 128, intermediate), block)
    x, ids, weights = jnp.ones((8, 128)), jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1))
    with pytest.raises(ValueError, match=told):
        jaxmoe.moe_layer(
            x, ids, weights, experts, mesh=mesh_of(AxisType.Auto), intermediate_axis="tensor", data_axes=()
        )
