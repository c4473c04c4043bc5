"""Experts with gate and up in one array: what they are, where they go, and that no program slices them.

What they compute is in tests/layer_suite.py, which every implementation inherits.
"""

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import native, nnx
from jaxmoe.convert import MoEWeights, to_hf
from jaxmoe.experts import LAYOUTS
from jaxmoe.options import Arguments
from jaxmoe.testing import make_inputs, relative_error

E, D, F = 4, 16, 24
SIZES: dict[str, Any] = {"tokens": 32, "hidden": D, "intermediate": F, "num_experts": E, "top_k": 2}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def inputs(layout: Any, **options: Any) -> Any:
    return make_inputs(3, **SIZES, biases=True, layout=layout, **options)


def layer(arguments: Arguments, **options: Any) -> jax.Array:
    return jaxmoe.moe_layer(*arguments[:4], **{"axis_name": None, "implementation": "reference"} | options)


def gradients(arguments: Arguments, **options: Any) -> Any:
    def loss(x: jax.Array, experts: Any) -> jax.Array:
        return jnp.sum(jnp.sin(layer(arguments._replace(x=x, experts=experts), **options)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(arguments.x, arguments.experts)


# --- what they are ----------------------------------------------------------------------------------------------------


def test_halves_have_all_columns_of_gate_first_and_interleaved_ones_take_turns():
    columns = jnp.arange(8.0).reshape(1, 1, 8)
    down = jnp.ones((1, 4, 1))
    halves: Any = jaxmoe.Experts.from_fused(columns, down, layout="halves").split()
    np.testing.assert_array_equal(halves.w_gate[0, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(halves.w_up[0, 0], [4, 5, 6, 7])
    in_turn: Any = jaxmoe.Experts.from_fused(columns, down, layout="interleaved").split()
    np.testing.assert_array_equal(in_turn.w_gate[0, 0], [0, 2, 4, 6])
    np.testing.assert_array_equal(in_turn.w_up[0, 0], [1, 3, 5, 7])


@LAYOUT
def test_split_is_the_way_back_of_fuse(layout):
    apart = inputs(None).experts
    jax.tree.map(np.testing.assert_array_equal, apart.fuse(layout).split(), apart)


@LAYOUT
def test_those_whose_columns_an_explicit_axis_splits_are_split_where_they_are(layout):
    apart = inputs(None).experts
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    spec = NamedSharding(mesh, P("expert", None, "data"))
    with jax.set_mesh(mesh):
        both = apart.fuse(layout)
        found = dataclasses.replace(both, w_gate_up=jax.device_put(both.w_gate_up, spec)).split()
    for got, want in ((found.w_gate, apart.w_gate), (found.w_up, apart.w_up)):
        np.testing.assert_array_equal(np.asarray(got), want)
        assert got.sharding.spec == spec.spec


@LAYOUT
def test_a_bias_that_only_one_of_them_has_is_kept(layout):
    apart = dataclasses.replace(inputs(None).experts, b_up=None)
    arguments = inputs(None)._replace(experts=apart)
    both = arguments._replace(experts=apart.fuse(layout))
    np.testing.assert_array_equal(layer(both), layer(arguments))
    assert np.asarray(apart.b_gate).any()


@LAYOUT
def test_they_are_a_pytree_that_says_its_sizes_formats_and_layout(layout):
    experts = inputs(layout).experts
    assert (experts.num_experts, experts.hidden, experts.intermediate, experts.gated) == (E, D, F, True)
    assert len(jax.tree.leaves(experts)) == 4
    text = repr(experts)
    assert text.startswith(f"FusedExperts(w_gate_up=float32[{E}, {D}, {2 * F}]")
    assert f"layout='{layout}'" in text
    assert jax.tree.structure(experts) != jax.tree.structure(inputs(None).experts)
    assert experts.astype(jnp.bfloat16).w_gate_up.dtype == jnp.bfloat16
    assert experts.astype(jnp.bfloat16).layout == layout


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("block", ["expert", "nvfp4"])
def test_those_that_were_put_together_of_quantised_matrices_are_refused_in_words(block):
    apart = jaxmoe.quantize(jaxmoe.Experts.init(jax.random.key(0), E, 32, 32), block)
    both: Any = jaxmoe.Experts.from_fused(apart.w_gate, apart.w_down, layout="halves")
    kind = type(apart.w_gate).__name__
    for function, told in (
        (lambda: both.split(), rf"w_gate_up is {kind}, and gate and up in one array must be wide\. Pass jaxmoe\.Exp"),
        (lambda: jaxmoe.with_input_scales(both, 1.0, 1.0), rf"w_gate_up is {kind}, and gate and up in one array must"),
        (lambda: both.astype(jnp.bfloat16), rf"FusedExperts\.astype: w_gate_up is {kind}\. Pass jaxmoe\.dequantize"),
        (lambda: jaxmoe.quantize(both), rf"quantize: experts\.w_gate_up is {kind} already"),
    ):
        with pytest.raises(TypeError, match=told):
            function()


@LAYOUT
def test_a_program_with_them_can_be_exported_and_read_again(layout):
    arguments = inputs(layout)
    run = jax.jit(lambda x, experts: layer(arguments._replace(x=x, experts=experts), implementation="xla"))
    stored = jax.export.export(run)(arguments.x, arguments.experts).serialize()
    y = jax.export.deserialize(stored).call(arguments.x, arguments.experts)
    assert relative_error(y, layer(arguments)) < 1e-5


# --- no program slices them -------------------------------------------------------------------------------------------


def moved_weights(text: str) -> list[str]:
    """Returns the operations of a program between matrices with the columns of gate and such with those of both."""
    both, gate = rf"x{D}x{2 * F}x", rf"x{D}x{F}x"
    operations = (line for line in text.splitlines() if "stablehlo." in line)
    return [line for line in operations if re.search(both, line) and re.search(gate, line)]


@LAYOUT
@pytest.mark.parametrize("implementation", ["megakernel", "xla"])
def test_a_forward_and_a_backward_pass_slice_no_weights(layout, implementation):
    if implementation == "megakernel":
        native.targets("cpu")
    arguments = inputs(layout)

    def both(x: jax.Array, experts: Any) -> Any:
        run = lambda x, e: layer(arguments._replace(x=x, experts=e), implementation=implementation)  # noqa: E731
        y, pull_back = jax.vjp(run, x, experts)
        return y, pull_back(jnp.ones_like(y))

    text = jax.jit(both).lower(arguments.x, arguments.experts).as_text()
    assert moved_weights(text) == []
    # The same weights as two arrays that are put together in the program: what the search above would find.
    apart = arguments.experts.split()
    joined = jax.jit(lambda x, e: both(x, e.fuse(layout))).lower(arguments.x, apart).as_text()
    assert moved_weights(joined)


# --- where they go ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@LAYOUT
def test_a_training_step_of_scanned_layers_with_a_balance_loss_is_that_of_experts_apart(layout):
    apart = inputs(None)
    router = jax.random.normal(jax.random.key(2), (D, E))
    options: dict[str, Any] = {"data_axes": "data", "implementation": "megakernel", "residuals": "save"}
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def loss(experts: Any, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, experts: Any) -> Any:
            logits = x @ router
            routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2))
            y = jaxmoe.moe_layer(x, routing, experts, mesh=mesh, **options)
            return x + y, jaxmoe.router_aux(routing, logits).load_balancing_loss

        y, losses = jax.lax.scan(jax.checkpoint(block), x, jax.tree.map(lambda a: jnp.stack([a, a / 2]), experts))
        return jnp.mean(y**2) + 0.01 * losses.sum()

    step = jax.jit(jax.value_and_grad(loss))
    (expected, of_apart), (found, of_fused) = (
        step(experts, apart.x) for experts in (apart.experts, apart.experts.fuse(layout))
    )
    assert relative_error(found, expected) < 1e-6
    for got, want in zip(jax.tree.leaves(of_fused.split()), jax.tree.leaves(of_apart), strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.slow
@LAYOUT
def test_over_hosts_they_are_what_they_are_on_one(layout):
    arguments = inputs(layout)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    network = jaxmoe.NetworkPlan(ranks_per_host=2, chunks=2)
    options = {"axis_name": "expert", "mesh": mesh, "implementation": "xla", "network": network}
    assert relative_error(layer(arguments, **options), layer(arguments)) < 1e-5
    found, expected = gradients(arguments, **options), gradients(arguments)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(got, want) < 1e-5


@LAYOUT
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_tokens_in_16_bits_take_them_in_float32_and_their_gradients_are_float32(layout, implementation):
    arguments = inputs(layout)
    arguments = arguments._replace(x=arguments.x.astype(jnp.bfloat16))
    _, of_experts = gradients(arguments, implementation=implementation)
    assert isinstance(of_experts, jaxmoe.FusedExperts)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(of_experts))


@pytest.mark.slow
def test_a_precision_rounds_what_they_are_apart():
    arguments = inputs("interleaved")
    apart = arguments._replace(experts=arguments.experts.split())
    options = {"precision": "fp8", "implementation": "xla"}
    np.testing.assert_array_equal(layer(arguments, **options), layer(apart, **options))
    found, expected = gradients(arguments, **options)[1].split(), gradients(apart, **options)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    one, other = (jaxmoe.quantize(each.experts, "128x128") for each in (arguments, apart))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), list(zip(LAYOUTS, [AxisType.Explicit, AxisType.Auto], strict=True)))
@pytest.mark.parametrize(
    ("spec", "options"),
    [(P("expert", "data"), {"hidden_axis": "data"}), (P("expert", None, "data"), {"intermediate_axis": "data"})],
    ids=["FSDP", "FSDP of the columns"],
)
def test_they_may_be_split_over_axes_of_the_tokens(layout, kind, spec, options):
    arguments = inputs(layout)
    truth, (of_x, of_experts) = layer(arguments), gradients(arguments)
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2)
    options = {"axis_name": "expert", "data_axes": "data", "implementation": "xla"} | options
    with jax.set_mesh(mesh):
        placed = arguments.experts
        placed = dataclasses.replace(placed, w_gate_up=jax.device_put(placed.w_gate_up, NamedSharding(mesh, P(*spec))))
        spread = arguments._replace(experts=placed)
        y, (dx, dexperts) = layer(spread, **options), gradients(spread, **options)
    assert relative_error(y, truth) < 1e-5
    assert relative_error(dx, of_x) < 1e-5
    for got, want in zip(jax.tree.leaves(dexperts), jax.tree.leaves(of_experts), strict=True):
        assert relative_error(got, want) < 1e-5
    assert dexperts.w_gate_up.sharding.is_equivalent_to(placed.w_gate_up.sharding, 3)


def tensor_mesh() -> Any:
    return jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
def test_ranks_compute_parts_of_interleaved_ones():
    arguments, mesh = inputs("interleaved"), tensor_mesh()
    options = {"axis_name": "expert", "intermediate_axis": "tensor", "implementation": "xla", "mesh": mesh}
    assert relative_error(layer(arguments, **options), layer(arguments)) < 1e-5
    found, expected = gradients(arguments, **options), gradients(arguments)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(got, want) < 1e-5
    text = jax.jit(lambda a: layer(a, **options)).lower(arguments).as_text()
    assert text.count("stablehlo.all_reduce") == 1
    assert moved_weights(text) == []


def test_ranks_that_would_compute_parts_of_halves_are_told_what_to_do():
    arguments, mesh = inputs("halves"), tensor_mesh()
    refused = pytest.raises(ValueError, match=r"'tensor' in intermediate_axis .* layout='halves'.*experts.split\(\)")
    with refused:
        layer(arguments, axis_name="expert", intermediate_axis="tensor", mesh=mesh)
    one = jax.make_mesh((4, 1), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    y = layer(arguments, axis_name="expert", intermediate_axis="tensor", mesh=one)  # an axis of one rank has no parts
    assert relative_error(y, layer(arguments)) < 1e-5


@pytest.mark.parametrize("data_axes", [None, (), "data"], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_ranks_repeat_the_work_where_halves_lie_split_for_parts_and_a_warning_says_what_to_do(kind, data_axes):
    arguments = inputs("halves")
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(kind,) * 3)
    w_gate_up = jax.device_put(arguments.experts.w_gate_up, NamedSharding(mesh, P("expert", None, "tensor")))
    spread = arguments._replace(
        x=jax.device_put(arguments.x, NamedSharding(mesh, P("data"))),
        experts=dataclasses.replace(arguments.experts, w_gate_up=w_gate_up),
    )
    options: dict[str, Any] = {"axis_name": "expert", "data_axes": data_axes}
    what = r"'tensor' compute the same tokens .* lies split over 'tensor', .* layout='halves'.* pass experts.split\(\)"
    with jax.set_mesh(mesh), pytest.warns(jaxmoe.RepeatedWorkWarning, match=what):
        y = layer(spread, **options)
    assert relative_error(y, layer(arguments)) < 1e-5
    with jax.set_mesh(mesh):
        told = str(jaxmoe.explain(*spread[:4], **options))
        apart = jaxmoe.explain(*spread._replace(experts=spread.experts.split())[:4], **options).call
    assert "ranks of axis 'tensor', over which experts.w_gate_up lies split, compute the same tokens" in told
    assert (apart.expert_split.parts, apart.shape.intermediate) == (("tensor",), F // 2)


def test_what_the_warning_of_split_halves_names_where_it_is_meant_silences_it():
    arguments = inputs("halves")
    mesh = jax.make_mesh((4, 2), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    w_gate_up = jax.device_put(arguments.experts.w_gate_up, NamedSharding(mesh, P("expert", None, "tensor")))
    spread = arguments._replace(experts=dataclasses.replace(arguments.experts, w_gate_up=w_gate_up))
    with jax.set_mesh(mesh):
        with pytest.warns(jaxmoe.RepeatedWorkWarning) as warned:
            layer(spread, axis_name="expert")
        # Tokens are split over no other axis, and yet data_axes=() is not enough.
        (call,) = re.findall(r"where it is meant, (.*)\.$", str(warned[0].message))
        with warnings.catch_warnings(record=True) as left:
            eval(call, {"warnings": warnings, "jaxmoe": jaxmoe})
            layer(spread, axis_name="expert")
    assert not left


@pytest.mark.slow
def test_a_flax_layer_and_a_checkpoint_are_made_of_what_they_are_apart():
    apart: Any = make_inputs(5, **SIZES).experts
    router = jax.random.normal(jax.random.key(0), (D, E))
    fused, expected = (to_hf(MoEWeights(experts, router), "mixtral", 0) for experts in (apart.fuse("halves"), apart))
    jax.tree.map(np.testing.assert_array_equal, fused, expected)
    x = jax.random.normal(jax.random.key(1), (8, D))
    config = jaxmoe.RouterConfig.mixtral()
    outputs = [
        nnx.MoE.from_weights(MoEWeights(experts, router), config, axis_name=None)(x)[0]
        for experts in (apart.fuse("halves"), apart)
    ]
    np.testing.assert_array_equal(outputs[0], outputs[1])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_named():
    arguments = inputs("halves")
    experts = arguments.experts

    def refused(kind: Any, match: str, **changes: Any) -> None:
        with pytest.raises(kind, match=match), warnings.catch_warnings():
            layer(arguments._replace(experts=dataclasses.replace(experts, **changes)))

    with pytest.raises(ValueError, match=r"layout='columns' is not known. It must be 'halves'"):
        jaxmoe.Experts.from_fused(experts.w_gate_up, experts.w_down, layout="columns")  # pyright: ignore
    refused(ValueError, rf"w_down has shape .* must be \({E}, {F}, {D}\)", w_down=experts.w_down[:, 1:])
    refused(ValueError, r"must have an even number of columns", w_gate_up=experts.w_gate_up[..., 1:])
    refused(ValueError, r"w_gate_up has shape .*\[experts, hidden, 2 \* intermediate\]", w_gate_up=experts.w_gate_up[0])
    refused(ValueError, r"have to be transposed", w_gate_up=experts.w_gate_up.swapaxes(1, 2))
    refused(ValueError, rf"b_gate_up has shape .* must be \({E}, {2 * F}\)", b_gate_up=experts.b_gate_up[:, 1:])
    refused(TypeError, r"experts.w_down is None", w_down=None)
    refused(TypeError, r"experts.w_gate_up is bfloat16, x is float32", w_gate_up=experts.w_gate_up.astype(jnp.bfloat16))
    in_8_bits = jaxmoe.quantize(experts).w_down
    refused(TypeError, r"gate and up in one array must be wide", w_down=in_8_bits)
    with pytest.raises(ValueError, match=r"w_up is None: a plain FFN has no up projection"):
        inputs(None, gated=False).experts.fuse("halves")
    with pytest.raises(TypeError, match=r"experts.w_gate_up is .*; it must be MXFP4"):
        jaxmoe.fits_e4m3(experts)
    with pytest.raises(TypeError, match=r"w_gate is BlockScaled, and only wide matrices are fused"):
        jaxmoe.quantize(experts).fuse("halves")
