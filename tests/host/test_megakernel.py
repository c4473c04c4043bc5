"""`implementation="megakernel"` on a CPU, where threads walk the task stream of the GPU kernel."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import native, reach, sharding
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.implementations.base import Inputs
from jaxmoe.implementations.megakernel import launching, limits
from jaxmoe.implementations.megakernel import layer as megakernel
from jaxmoe.implementations.megakernel.launching import TIMEOUT_VARIABLE, timeout_seconds
from jaxmoe.implementations.megakernel.plan_defaults import SEGMENT_TILES_ON_CPU, backward_plan
from jaxmoe.implementations.megakernel.schedule import (
    MOST_LOCAL_EXPERTS_AHEAD,
    most_row_tiles,
    roomy_row_tiles,
    tile_sizes,
)
from jaxmoe.nnx import MoE
from jaxmoe.testing import dense, make_inputs, relative_error
from tests.layer_calls import SIZES, cotangent, layer, mesh_of, schedule_in
from tests.layer_suite import LayerSuite

KernelPlan = jaxmoe.KernelPlan


class TestMegakernel(LayerSuite):
    implementation = "megakernel"
    # On the mesh of most tests a rank has up to 96 rows of 2 experts: 8 row tiles.
    plans = (
        None,
        KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=1),
        KernelPlan(unit_tiles=1, lag_units=40, ring_tiles=41),
        KernelPlan(unit_tiles=3, lag_units=2, ring_tiles=2**31 - 1),
        KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, share_columns=True),
    )
    # Of backward passes, with one number of segments; the last one is the default.
    backward_plans = (
        KernelPlan(unit_tiles=1, lag_units=0, ring_tiles=3, segment_tiles=3),
        KernelPlan(unit_tiles=1, lag_units=40, ring_tiles=83, segment_tiles=3, keep_tokens=True),
        KernelPlan(unit_tiles=3, lag_units=2, ring_tiles=2**31 - 1, segment_tiles=3),
        KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=7, segment_tiles=3, chunk_rows=3),
        None,
    )

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("routing", ["zipf", "one-hot"])
    def test_every_plan_gives_the_same_bits(self, routing, dtype):
        arguments = self.inputs(40, routing=routing, biases=True, dtype=dtype)
        expected = self.run(arguments, plan=None)
        for plan in self.plans:
            np.testing.assert_array_equal(self.run(arguments, plan=plan), expected)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("routing", ["zipf", "one-hot"])
    def test_every_backward_plan_with_as_large_segments_gives_the_same_bits(self, routing, dtype):
        arguments = self.inputs(41, routing=routing, biases=True, token_valid=True, dtype=dtype)
        expected = self.gradients(arguments, plan=None)
        for backward in self.backward_plans:
            found = self.gradients(arguments, plan=KernelPlan(2, 1, 4, backward=backward))
            jax.tree.map(np.testing.assert_array_equal, found, expected)

    @pytest.mark.parametrize("segment_tiles", [1, 2, 100])
    def test_segments_of_any_size_change_gradients_of_weights_by_rounding_and_no_other(self, segment_tiles):
        arguments = self.inputs(42, routing="zipf", biases=True)
        expected = self.gradients(arguments, plan=None)
        backward = KernelPlan(2, 1, 2**31 - 1, segment_tiles=segment_tiles)
        found = self.gradients(arguments, plan=KernelPlan(2, 1, 4, backward=backward))
        jax.tree.map(np.testing.assert_array_equal, found[:2], expected[:2])
        self.assert_near(found, expected)

    @pytest.mark.parametrize("routing", ["zipf", "one-hot"])
    @pytest.mark.parametrize(
        ("placement", "num_experts"),
        [("one rank", 512), ("data x expert, groups of two", 384), ("all devices", 4096)],
        ids=["512 on one rank", "384 over groups of two", "4096 over eight ranks"],
    )
    def test_hundreds_of_experts_of_a_rank_equal_the_reference(self, placement, num_experts, routing):
        sizes = {"tokens": 64, "hidden": 6, "intermediate": 5, "num_experts": num_experts, "top_k": 10}
        self.check(self.inputs(43, **sizes, routing=routing, biases=True), placement, plan=None)


def call(arguments: Any, **options: Any) -> Any:
    options = {"implementation": "megakernel", "mesh": mesh_of("expert")} | options
    return jaxmoe.moe_layer(*arguments[:4], token_valid=arguments.token_valid, **options)


def calls_of_compiled_code(function: Any, *arguments: Any) -> tuple[int, int]:
    """How often a function calls the forward and the backward pass; it multiplies with experts in no other way."""
    text = jax.jit(function).lower(*arguments).as_text()
    assert "ragged" not in text
    assert "dot_general" not in text
    return text.count("@jaxmoe_forward("), text.count("@jaxmoe_backward(")


def test_a_layer_is_one_call_of_compiled_code_and_its_gradients_another():
    arguments = make_inputs(0, **SIZES, biases=True)
    run = layer("data x expert, Auto", implementation="megakernel")
    loss = lambda e: jnp.sum(run(arguments._replace(experts=e)) ** 2)  # noqa: E731
    assert calls_of_compiled_code(run, arguments) == (1, 0)
    assert calls_of_compiled_code(jax.value_and_grad(loss), arguments.experts) == (1, 1)


def test_what_a_call_returns_for_tokens_goes_through_a_barrier():
    """Without it XLA makes two calls on GPUs where a scan stacks such a result and uses it too (seen in programs)."""
    arguments = make_inputs(0, **SIZES)
    run = layer("data x expert, Auto", implementation="megakernel")
    loss = lambda x: jnp.sum(run(arguments._replace(x=x)) ** 2)  # noqa: E731
    barriers = lambda function: jax.jit(function).lower(arguments.x).as_text().count("optimization_barrier")  # noqa: E731
    assert barriers(lambda x: run(arguments._replace(x=x))) == 1
    assert barriers(jax.grad(loss)) == 2


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names(*jaxmoe.CHECKPOINT_NAMES)])
def test_checkpoint_repeats_no_call_of_compiled_code(policy):
    arguments = make_inputs(0, **SIZES)
    run = jax.checkpoint(layer("data x expert, Auto", implementation="megakernel"), policy=policy)
    loss = lambda e: jnp.sum(run(arguments._replace(experts=e)) * cotangent(arguments.x))  # noqa: E731
    assert calls_of_compiled_code(jax.value_and_grad(loss), arguments.experts) == (1, 1)


@pytest.mark.parametrize(("policy", "forward_passes"), [(None, 2), ("names", 1)])
def test_what_is_saved_is_kept_by_a_policy_that_knows_its_name_and_computed_again_without(policy, forward_passes):
    arguments = make_inputs(0, **SIZES)
    keep = jax.checkpoint_policies.save_only_these_names(*jaxmoe.CHECKPOINT_NAMES) if policy else None
    run = jax.checkpoint(layer("data x expert, Auto", implementation="megakernel", residuals="save"), policy=keep)
    loss = lambda e: jnp.sum(run(arguments._replace(experts=e)) * cotangent(arguments.x))  # noqa: E731
    assert calls_of_compiled_code(jax.value_and_grad(loss), arguments.experts) == (forward_passes, 1)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names(*jaxmoe.CHECKPOINT_NAMES)])
def test_what_is_saved_goes_through_a_scan_over_layers_and_into_donated_accumulators(policy):
    arguments = make_inputs(1, **SIZES, routing="zipf")
    stacked = jax.tree.map(lambda array: jnp.stack([array, array * 0.5]), arguments.experts)

    def accumulated(residuals: str) -> Any:
        run = layer("data x expert, Auto", implementation="megakernel", residuals=residuals)
        step = jax.checkpoint(lambda x, e: (x + run(arguments._replace(x=x, experts=e)), None), policy=policy)
        loss = lambda e: jnp.sum(jax.lax.scan(step, arguments.x, e)[0] ** 2)  # noqa: E731
        add = jax.jit(lambda total, e: jax.tree.map(jnp.add, total, jax.grad(loss)(e)), donate_argnums=0)
        return add(add(jax.tree.map(jnp.zeros_like, stacked), stacked), stacked)

    saved, again = accumulated("save"), accumulated("recompute")
    for value, expected in zip(jax.tree.leaves(saved), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(value, expected)


def attributes_of(text: str, target: str) -> dict[str, str]:
    """The numbers that a call carries."""
    line = next(line for line in text.splitlines() if f"@{target}(" in line)
    return dict(re.findall(r"(\w+) = (\S+) : [if]32", line))


CHOICES = ("unit_tiles", "lag_units", "ring_tiles", "chunk_rows", "keep_tokens", "share_columns", "segment_tiles")


def test_the_call_carries_the_schedule_of_the_plan_and_the_activation():
    arguments = make_inputs(0, **SIZES)
    swiglu = jaxmoe.SwiGLU(limit=7.0, alpha=1.5, up_offset=1.0)
    plan = KernelPlan(3, 1, 7, 2, True, share_columns=True, backward=KernelPlan(1, 2, 6, 3, segment_tiles=2))
    run = layer("all devices", implementation="megakernel", activation=swiglu, plan=plan)
    text = jax.jit(jax.value_and_grad(lambda a: jnp.sum(run(a)), allow_int=True)).lower(arguments).as_text()
    pieces = native.schedule().granularity("cpu", True)
    integers = {"ranks": 8, "num_experts": 8, "activation": 4}
    floats = {"limit": 7.0, "alpha": 1.5, "up_offset": 1.0, "timeout_seconds": 60.0}
    for target, of_pass in (("jaxmoe_forward", plan), ("jaxmoe_backward", plan.backward)):
        attributes = attributes_of(text, target)
        assert {name: int(attributes[name]) for name in integers} == integers
        assert {name: float(attributes[name]) for name in floats} == floats
        carried = schedule_in(text, target)
        assert {name: getattr(carried, name) for name in CHOICES} == {name: getattr(of_pass, name) for name in CHOICES}
        assert (carried.tile, carried.workers) == (pieces.tile, pieces.workers)
        assert (carried.dispatchers, carried.narrow_rows) == (pieces.workers, pieces.tile.rows // 2)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.5", 0.5), ("1e9", 1e9), ("1e10", 1e9), ("1e300", 1e9), (" 600 ", 600.0)]
)
def test_the_timeout_is_what_the_variable_says_and_at_most_31_years(monkeypatch, text, seconds):
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    assert [timeout_seconds(platform) for platform in ("cpu", "gpu")] == [seconds, seconds]


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "-inf", "1e400", "a minute"])
def test_a_timeout_that_is_no_positive_number_is_refused(monkeypatch, text):
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=rf"^{TIMEOUT_VARIABLE}='{text}' must be a positive number of seconds, such"):
        timeout_seconds("cpu")


def inputs_of(tokens: int) -> Any:
    """Of a size that no other test has: what was traced for one is kept."""
    return make_inputs(11, **{**SIZES, "tokens": tokens})


def test_ranks_wait_for_each_other_with_the_longest_timeout_as_well(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1e30")
    arguments = inputs_of(tokens=56)
    run = layer("all devices", implementation="megakernel")
    assert attributes_of(jax.jit(run).lower(arguments).as_text(), "jaxmoe_forward")["timeout_seconds"] == "1.000000e+09"
    assert relative_error(jax.jit(run)(arguments), dense(arguments)) < 2e-6


def test_compiled_code_refuses_a_timeout_whose_nanoseconds_it_cannot_count(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "1e10")
    monkeypatch.setattr(launching, "LONGEST_TIMEOUT_SECONDS", 1e30)
    arguments = inputs_of(tokens=72)
    with pytest.raises(jax.errors.JaxRuntimeError, match="timeout_seconds must be positive and at most 1e9"):
        jax.block_until_ready(jax.jit(layer("one rank", implementation="megakernel"))(arguments))


def test_compiled_code_takes_any_id_that_names_no_expert_for_a_slot_nobody_uses():
    """`moe_layer` makes them -1 before; this is what keeps other callers within the arrays."""
    arguments = make_inputs(12, **SIZES, routing="unused-slots")
    checked = jaxmoe.explain(*arguments[:4], axis_name=None, implementation="megakernel").call

    def outputs_and_gradients(ids: jax.Array) -> Any:
        def output(x: jax.Array, weights: jax.Array, experts: jaxmoe.Experts) -> jax.Array:
            return IMPLEMENTATIONS["megakernel"].run(checked, Inputs(x, ids, weights, experts))

        y, pull = jax.vjp(output, arguments.x, arguments.topk_weights, arguments.experts)
        return y, pull(cotangent(y))

    ids = np.asarray(arguments.topk_ids)
    outside = np.resize(np.array([SIZES["num_experts"], 2**31 - 1, -(2**31), -7], np.int32), ids.shape)
    assert (ids < 0).sum() > 4
    found = outputs_and_gradients(jnp.asarray(np.where(ids < 0, outside, ids)))
    jax.tree.map(np.testing.assert_array_equal, found, outputs_and_gradients(arguments.topk_ids))


# What a call from elsewhere may get wrong: arrays by name, and what compiled code says.
WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "left out": ({"w_down": None}, "a forward pass without w_down"),
    "of the other pass": (
        {"dx": jnp.zeros((88, 24))},
        "8 operands and 1 results; the attribute `arrays` names 7 and 2",
    ),
    "of another size": ({"w_down": jnp.zeros((8, 24, 39))}, "shapes do not go together"),
    "of another type": ({"w_down": jnp.zeros((8, 40, 24), jnp.bfloat16)}, "weights, biases, y, dy, dx and what is"),
    "unknown": ({"topk_ids": jnp.zeros((88, 3))}, "topk_ids must be int32"),
    "a place of another type": ({"place": jnp.zeros(2)}, "place and topk_ids must be int32"),
    "of fused experts too": ({"w_gate_up": jnp.zeros((8, 24, 80))}, "a forward pass with w_gate, w_up"),
    "of fused experts alone": (
        {"w_gate": None, "w_up": None, "w_gate_up": jnp.zeros((8, 24, 80))},
        "gate_up_layout=0 with w_gate_up",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_ARRAYS)
def test_compiled_code_refuses_arrays_that_make_no_layer(monkeypatch, wrong):
    changes, told = WRONG_ARRAYS[wrong]
    right = megakernel._operands

    def operands(call: Any, inputs: Inputs) -> dict[str, Any]:
        return {name: array for name, array in (right(call, inputs) | changes).items() if array is not None}

    monkeypatch.setattr(megakernel, "_operands", operands)
    arguments = make_inputs(11, **{**SIZES, "tokens": 88})
    # A plan of its own: what was traced for one is kept.
    run = layer("one rank", implementation="megakernel", plan=KernelPlan(1, 1, 2 + list(WRONG_ARRAYS).index(wrong)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(jax.jit(run)(arguments))


@pytest.mark.parametrize("rank", [-1, 1])
def test_compiled_code_refuses_the_place_of_a_rank_that_does_not_exist(monkeypatch, rank):
    monkeypatch.setattr(launching, "place", lambda group: jnp.array([rank, 0], jnp.int32))
    arguments = inputs_of(tokens=80 + rank)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"place names rank {rank} of 1 ranks"):
        jax.block_until_ready(jax.jit(layer("one rank", implementation="megakernel"))(arguments))


@pytest.mark.parametrize(
    ("order", "sizes"),
    [((7, 6, 5, 4, 3, 2, 1, 0), {"expert": 4, "data": 2}), ((3, 6, 0, 5, 7, 1, 4, 2), {"data": 2, "expert": 4})],
    ids=["reversed, expert x data", "mixed, data x expert"],
)
def test_the_order_of_devices_in_the_mesh_does_not_matter(order, sizes):
    mesh = Mesh(np.array(jax.devices())[np.array(order)].reshape(tuple(sizes.values())), tuple(sizes))
    arguments = make_inputs(13, **SIZES, biases=True, routing="zipf")

    def outputs_and_gradients(run: Any) -> Any:
        loss = lambda x, weights, experts: jnp.sum(  # noqa: E731
            run(arguments._replace(x=x, topk_weights=weights, experts=experts)) * cotangent(x)
        )
        gradients = jax.grad(loss, argnums=(0, 1, 2))
        return jax.jit(lambda *of: (run(arguments), gradients(*of)))(
            arguments.x, arguments.topk_weights, arguments.experts
        )

    found = outputs_and_gradients(lambda arguments: call(arguments, mesh=mesh, data_axes="data"))
    for got, want in zip(*map(jax.tree.leaves, (found, outputs_and_gradients(dense))), strict=True):
        assert relative_error(got, want) < 5e-6


def test_without_a_plan_for_it_the_backward_pass_has_the_default_one():
    arguments = make_inputs(0, **SIZES)
    run = layer("all devices", implementation="megakernel", plan=KernelPlan(3, 1, 7))
    text = jax.jit(jax.grad(lambda x: jnp.sum(run(arguments._replace(x=x))))).lower(arguments.x).as_text()
    told = jaxmoe.explain(*arguments[:4], mesh=mesh_of("expert"), implementation="megakernel")
    assert isinstance(told.call.plan, KernelPlan)
    assert told.call.plan.backward is None
    default = backward_plan(told.call.plan, told.call.shape, "cpu")
    carried = schedule_in(text, "jaxmoe_backward")
    assert default.segment_tiles == SEGMENT_TILES_ON_CPU
    assert {name: getattr(carried, name) for name in CHOICES} == {name: getattr(default, name) for name in CHOICES}


def test_no_more_ring_is_asked_for_than_a_rank_can_fill():
    arguments = make_inputs(0, **SIZES)
    told = jaxmoe.explain(*arguments[:4], axis_name=None, implementation="megakernel", plan=KernelPlan(1, 1, 10**9))
    most = most_row_tiles(told.call.shape, "cpu")
    assert sum(told.memory_bytes.values()) == told.worst_case_bytes
    run = layer("one rank", implementation="megakernel", plan=KernelPlan(1, 1, 10**9))
    assert schedule_in(jax.jit(run).lower(arguments).as_text(), "jaxmoe_forward").ring_tiles == most


def test_explain_states_the_arena_region_by_region_and_the_bytes_of_uniform_routing():
    shape, tokens = jax.ShapeDtypeStruct, 8 * 4096
    experts = jax.eval_shape(lambda: jaxmoe.Experts.init(jax.random.key(0), 16, 64, 96, dtype=jnp.bfloat16))
    slots = shape((tokens, 2), jnp.int32), shape((tokens, 2), jnp.float32)
    x = shape((tokens, 64), jnp.bfloat16)
    told = jaxmoe.explain(x, *slots, experts, mesh=mesh_of("expert"), implementation="megakernel")
    plan = told.call.plan
    assert isinstance(plan, KernelPlan)
    rows = plan.ring_tiles * tile_sizes(told.call.shape, "cpu").rows
    assert told.memory_bytes["arena: rows"] == rows * 64 * 2
    assert told.memory_bytes["arena: h"] == rows * 96 * 2
    assert told.memory_bytes["arena: tokens"] == 4096 * 64 * 2
    assert told.memory_bytes["arena: answers"] == 4096 * 2 * 64 * 2
    assert sum(told.memory_bytes.values()) < told.worst_case_bytes
    # Seven of eight slots name an expert of another rank: a row there, its output back, and its number.
    assert not plan.keep_tokens
    assert told.wire_bytes == 4096 * 2 * 7 // 8 * (2 * 64 * 2 + 4)
    choices = "unit_tiles=2:", "lag_units=1:", f"ring_tiles={plan.ring_tiles}:", "chunk_rows=4:", "keep_tokens=False:"
    for part in ("backward pass: segment_tiles=3", *choices, "was asked for", "kept"):
        assert part in str(told)
    backward = backward_plan(plan, told.call.shape, "cpu")
    rows = backward.ring_tiles * tile_sizes(told.call.shape, "cpu").rows
    assert told.backward_memory_bytes["arena: rows"] == rows * 2 * 64 * 2  # tokens and gradients of their outputs
    assert told.backward_memory_bytes["arena: projections"] == rows * 2 * 96 * 2
    saved_rows = roomy_row_tiles(told.call.shape, "cpu") * tile_sizes(told.call.shape, "cpu").rows
    assert told.residual_bytes == {"recompute": 0, "save": saved_rows * 2 * 96 * 2}
    assert "residuals='recompute'; kept beside the inputs: 0.0 MiB with 'recompute'" in str(told)


def test_two_layers_that_do_not_depend_on_each_other_may_run_in_any_order():
    first, second = make_inputs(1, **SIZES, biases=True), make_inputs(2, **SIZES, gated=False, routing="zipf")
    mesh = mesh_of("data", "expert")

    @jax.jit
    def both(first, second):
        return [call(a, mesh=mesh, data_axes="data", activation=f) for a, f in ((first, "silu"), (second, "relu"))]

    expected = [dense(first), dense(second, activation="relu")]
    outputs = [both(first, second) for _ in range(30)]  # in flight together
    for output in outputs:
        for got, again, want in zip(output, outputs[0], expected, strict=True):
            np.testing.assert_array_equal(got, again)
            assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "split"])
def test_an_auto_axis_that_the_layer_is_not_told_of_repeats_the_work_and_it_says_so(split):
    arguments = make_inputs(3, **SIZES, biases=True)
    mesh = mesh_of("data", "expert")
    if split:
        arguments = arguments._replace(x=jax.device_put(arguments.x, NamedSharding(mesh, P("data"))))
    with pytest.warns(jaxmoe.RepeatedWorkWarning, match="'data' compute the same tokens"):
        y = jax.jit(lambda a: call(a, mesh=mesh))(arguments)
    assert relative_error(y, dense(arguments)) < 2e-6


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_manual_axis_over_which_nothing_is_split_repeats_the_work(check_vma):
    arguments = make_inputs(4, **SIZES, biases=True)[:4]
    specs = (P("expert"), P("expert"), P("expert"), P("expert"))
    run = jax.shard_map(
        lambda *a: jaxmoe.moe_layer(*a, implementation="megakernel"),
        mesh=mesh_of("data", "expert"),
        in_specs=specs,
        out_specs=P("expert"),  # y is the same on all ranks of "data", and its type has to say so
        check_vma=check_vma,
    )
    truth = make_inputs(4, **SIZES, biases=True)
    assert relative_error(jax.jit(run)(*arguments), dense(truth)) < 2e-6
    loss = lambda e: jnp.sum(run(*arguments[:3], e) ** 2)  # noqa: E731
    expected = jax.grad(lambda e: jnp.sum(dense(truth._replace(experts=e)) ** 2))(truth.experts)
    for got, want in zip(*map(jax.tree.leaves, (jax.jit(jax.grad(loss))(arguments[3]), expected)), strict=True):
        assert relative_error(got, want) < 5e-6


def test_float32_routing_weights_serve_float64_tokens():
    with jax.enable_x64(True):
        arguments = make_inputs(5, **SIZES, dtype=jnp.float64)
        arguments = arguments._replace(topk_weights=arguments.topk_weights.astype(jnp.float32))
        assert relative_error(call(arguments), dense(arguments)) < 1e-14


@pytest.mark.slow
def test_flax_layers_take_it_with_its_plan():
    x = make_inputs(9, tokens=16, hidden=8).x

    def output(**options: Any) -> jax.Array:
        moe = MoE(8, 16, 4, jaxmoe.RouterConfig(top_k=2), axis_name=None, rngs=nnx.Rngs(0), **options)
        return moe(x)[0]

    kernel = output(implementation="megakernel", plan=KernelPlan(1, 0, 1))
    assert relative_error(kernel, output(implementation="xla")) < 2e-6


def test_second_derivatives_are_refused_and_the_implementation_that_has_them_named():
    arguments = make_inputs(6, **SIZES)
    gradient = jax.grad(lambda x: jnp.sum(call(arguments._replace(x=x)) ** 2))
    for differentiate in (
        lambda: jax.jvp(gradient, (arguments.x,), (arguments.x,)),
        lambda: jax.grad(lambda x: jnp.sum(gradient(x)))(arguments.x),
    ):
        with pytest.raises(NotImplementedError, match=r"first derivatives only.* Pass implementation='xla'"):
            differentiate()


def test_jacrev_raises_and_says_what_to_do():
    arguments = make_inputs(7, tokens=2, hidden=4)
    with pytest.raises(NotImplementedError, match="pass the batch dimension along"):
        jax.jacrev(lambda x: call(arguments._replace(x=x), mesh=None, axis_name=None))(arguments.x)


def test_on_a_cpu_the_default_is_another_implementation_and_explain_says_so():
    told = jaxmoe.explain(*make_inputs(8, **SIZES)[:4], axis_name=None)
    assert told.implementation == "xla"
    assert "'xla' on cpu; 'megakernel' is chosen on GPUs that can run it" in str(told)


@pytest.fixture
def choose(monkeypatch):
    """Returns what is chosen, and why, for a call that is compiled for GPUs."""
    monkeypatch.setattr(sharding, "platform", lambda *_: "gpu")

    def choose(**where: Any) -> tuple[str, str]:
        call = jaxmoe.explain(*make_inputs(8, **SIZES, dtype=jnp.bfloat16)[:4], **where).call
        return call.implementation, call.implementation_reason

    return choose


def test_on_a_gpu_the_default_is_the_megakernel_where_it_can_run_the_call(monkeypatch, choose):
    """What can run is asked of limits.py, which finds no GPU here and is told so."""
    chosen, reason = choose(axis_name=None)
    assert (chosen, "'megakernel' cannot run this call (moe_layer: " in reason) == ("xla", True)
    monkeypatch.setattr(limits, "check_megakernel", lambda *_: None)
    assert choose(axis_name=None) == ("megakernel", "implementation=None: 'megakernel', which can run this call")


def test_on_gpus_that_do_not_reach_each_other_the_default_is_the_implementation_that_needs_no_reach(
    monkeypatch, choose
):
    monkeypatch.setattr(limits, "check_megakernel", lambda *_: None)
    monkeypatch.setattr(reach, "obstacle", lambda group, mesh: "there is a sea between them" if group.size > 1 else "")
    assert choose(axis_name=None)[0] == "megakernel"
    reason = "implementation=None: 'xla'; there is a sea between them"
    assert choose(mesh=mesh_of("expert")) == ("xla", reason)


def test_the_compiled_code_has_the_limits_that_python_checks():
    assert native.schedule().max_slots == limits.SLOTS_END
    assert native.schedule().max_ranks == limits.MOST_RANKS["cpu"]
    assert native.schedule().max_experts == limits.MOST_EXPERTS
    assert native.schedule().max_local_experts == limits.MOST_LOCAL_EXPERTS
    assert native.schedule().max_local_experts_ahead == MOST_LOCAL_EXPERTS_AHEAD
