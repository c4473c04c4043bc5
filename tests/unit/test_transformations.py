"""What JAX does around a layer besides jit and grad: NumPy inputs, export, meshes of one rank, second derivatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import testing
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.nnx import MoE
from jaxmoe.testing import dense, make_inputs, relative_error
from tests.layer_calls import layer, mesh_of

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


EXPERTS_OF_IDS = testing.identity_experts(3, 4)
TOKENS, LOGITS, EVEN = jnp.ones((2, 4)), jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 2))


def routing_of(ids: Any) -> jaxmoe.Routing:
    return jaxmoe.Routing(ids, EVEN, jax.nn.softmax(LOGITS))


def layer_and_rows(ids: Any) -> Any:
    """Returns the output of a layer that adds up to the slots used, and the rows of each expert."""
    y, stats = jaxmoe.moe_layer(TOKENS, ids, EVEN, EXPERTS_OF_IDS, axis_name=None, return_stats=True)
    return y[:, 0], stats.counts


ENTRIES_WITH_IDS: dict[str, Any] = {
    "moe_layer": layer_and_rows,
    "moe_layer with a Routing": lambda ids: jaxmoe.moe_layer(TOKENS, routing_of(ids), EXPERTS_OF_IDS, axis_name=None),
    "route": lambda ids: jaxmoe.route(LOGITS, jaxmoe.RouterConfig(top_k=2), topk_ids=ids).topk_weights,
    "load_stats": lambda ids: jaxmoe.load_stats(ids, 3).counts,
    "router_aux": lambda ids: jaxmoe.router_aux(routing_of(ids), LOGITS).sums.sum((0, 1)),
    "load_balancing_loss": lambda ids: jaxmoe.load_balancing_loss(routing_of(ids)),
    "dispatch": lambda ids: jaxmoe.dispatch(TOKENS, ids, num_experts=3, axis_name=None),
    "dispatch of a Routing": lambda ids: jaxmoe.dispatch(TOKENS, routing_of(ids), axis_name=None),
    "start_dispatch": lambda ids: jaxmoe.start_dispatch(TOKENS, ids, num_experts=3, axis_name=None).finish(),
    "dispatch_matmul": lambda ids: jaxmoe.dispatch_matmul(TOKENS, ids, jnp.ones((3, 4, 4)), axis_name=None),
}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("library", ["NumPy", "JAX with x64"])
@pytest.mark.parametrize("entry", ENTRIES_WITH_IDS)
def test_ids_whose_lower_32_bits_name_an_expert_are_no_experts_where_x64_is_off(entry, library):
    wide = np.array([[1, 2**32], [2**32 + 1, -(2**32)]])
    narrow = np.array([[1, 3], [3, -2]], np.int32)  # neither an expert nor -1, but for the first
    if library == "JAX with x64":
        with jax.enable_x64(True):
            wide: Any = jnp.asarray(wide)
    call = ENTRIES_WITH_IDS[entry]
    jax.tree.map(np.testing.assert_array_equal, call(wide), call(narrow))


def test_a_layer_with_its_pytrees_can_be_exported_and_read_back():
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None, return_stats=True))
    exported = jax.export.export(run)(*ARGUMENTS)
    again: Any = jax.export.deserialize(exported.serialize())
    y, stats = again.call(*ARGUMENTS)
    expected, counted = run(*ARGUMENTS)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(stats.rows_per_expert, counted.rows_per_expert)


def test_where_users_disable_jit_a_layer_over_a_mesh_gives_the_same_bits():
    run, arguments = layer("all devices", implementation="megakernel"), make_inputs(0)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(run(arguments._replace(x=x)) ** 2)

    want = run(arguments), jax.value_and_grad(loss)(arguments.x)
    with jax.disable_jit():
        got = run(arguments), jax.value_and_grad(loss)(arguments.x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
@pytest.mark.parametrize("mesh", [None, "expert"])
def test_symbolic_sizes_are_refused_and_named(implementation, mesh):
    where: dict[str, Any] = {"axis_name": None} if mesh is None else {"mesh": mesh_of(mesh)}
    tokens, num_experts = jax.export.symbolic_shape("tokens, num_experts")
    x, ids, weights = (jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype) for a in ARGUMENTS[:3])
    experts = jax.tree.map(lambda a: jax.ShapeDtypeStruct((num_experts, *a.shape[1:]), a.dtype), ARGUMENTS[3])
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, implementation=implementation, **where))
    message = r"moe_layer: x has shape \(tokens, 32\) with the symbolic size tokens; .* Export once for each size"
    with pytest.raises(ValueError, match=message):
        jax.export.export(run)(x, ids, weights, ARGUMENTS[3])
    with pytest.raises(ValueError, match=r"experts\.w_gate has shape .* the symbolic size num_experts"):
        jax.export.export(run)(*ARGUMENTS[:3], experts)


@pytest.mark.usefixtures("unchecked_shapes")
def test_symbolic_sizes_are_refused_by_flax_layers_and_explain_too():
    (tokens,) = jax.export.symbolic_shape("tokens")
    moe = MoE(32, 48, 8, jaxmoe.RouterConfig(top_k=2), axis_name=None, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((tokens, 32), jnp.float32)
    for run in (jax.export.export(jax.jit(lambda x: moe(x)[0])), moe.explain):
        with pytest.raises(ValueError, match=r"x has shape \(tokens, 32\) with the symbolic size tokens"):
            run(x)


@pytest.mark.slow
def test_a_layer_with_a_vjp_can_be_exported_for_each_size():
    run: Any = jax.jit(lambda *arguments: jaxmoe.moe_layer(*arguments, axis_name=None, implementation="xla"))
    for tokens in (64, 3):
        arguments = (*(array[:tokens] for array in ARGUMENTS[:3]), ARGUMENTS[3])
        exported = jax.export.export(run)(*arguments)
        again: Any = jax.export.deserialize(exported.serialize(vjp_order=int(tokens == 3)))
        np.testing.assert_array_equal(again.call(*arguments), run(*arguments))
    gradient = jax.grad(lambda run, x: jnp.sum(run(x, *arguments[1:]) ** 2), argnums=1)
    assert relative_error(gradient(again.call, arguments[0]), gradient(run, arguments[0])) < 1e-6


@pytest.mark.slow
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


@pytest.mark.parametrize("residuals", ["save", "recompute"])
@pytest.mark.parametrize("implementation", ["xla", "megakernel"])
def test_forward_mode_raises_and_says_what_to_do(implementation, residuals):
    def layer(x, weights, experts):
        return jaxmoe.moe_layer(
            x, ARGUMENTS[1], weights, experts, axis_name=None, implementation=implementation, residuals=residuals
        )

    x, _, *others = ARGUMENTS
    for run in (
        lambda: jax.jvp(layer, (x, *others), (x, *others)),
        lambda: jax.jvp(lambda weights: layer(x, weights, others[1]), others[:1], others[:1]),
        lambda: jax.jit(lambda x: jax.jvp(lambda x: layer(x, *others), (x,), (x,)))(x),
        lambda: jax.linearize(lambda x: layer(x, *others), x)[1](x),
    ):
        with pytest.raises(NotImplementedError, match=r"reverse-mode ones only\. Use jax\.grad .*='reference'"):
            run()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_forward_mode_raises_over_several_hosts_too(implementation):
    def layer(x):
        network = jaxmoe.NetworkPlan(ranks_per_host=2)
        return jaxmoe.moe_layer(
            x, *ARGUMENTS[1:], mesh=mesh_of("expert"), network=network, implementation=implementation
        )

    with pytest.raises(NotImplementedError, match=r"reverse-mode ones only.* experts of one host"):
        jax.jit(lambda x: jax.jvp(layer, (x,), (x,)))(ARGUMENTS[0])


def test_forward_mode_raises_where_the_reference_rounds_and_works_where_it_does_not():
    x, ids, weights, experts = ARGUMENTS

    def layer(x, **options):
        return jaxmoe.moe_layer(x, ids, weights, experts, axis_name=None, implementation="reference", **options)

    along, step = jnp.cos(x), 1e-2
    _, tangent = jax.jvp(layer, (x,), (along,))
    assert relative_error(tangent, (layer(x + step * along) - layer(x - step * along)) / (2 * step)) < 1e-3
    with pytest.raises(NotImplementedError, match="precision=None"):
        jax.jvp(lambda x: layer(x, precision="fp8"), (x,), (along,))


EXCHANGES = ("dispatch", "combine", "dispatch_matmul", "matmul_combine", "start_dispatch", "start_combine")


def exchange(name: str, implementation: str, **options: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    """A function of an exchange, and the arrays that it is differentiated with respect to."""
    x, ids, weights, experts = ARGUMENTS
    into, back = experts.w_gate, experts.w_down
    where: dict[str, Any] = {"axis_name": None, "implementation": implementation, **options}
    if name == "dispatch_matmul":
        return lambda x, into: jaxmoe.dispatch_matmul(x, ids, into, **where).rows, (x, into)
    where["num_experts"] = experts.num_experts
    if name == "dispatch":
        return lambda x: jaxmoe.dispatch(x, ids, **where).wide_rows, (x,)
    if name == "start_dispatch":
        return lambda x: jaxmoe.start_dispatch(x, ids, **where).finish().wide_rows, (x,)
    handle = jaxmoe.dispatch(x, ids, **where).handle
    rows = jnp.cos(jnp.arange(1.0, 1 + handle.row_sources.size * back.shape[1])).reshape(-1, back.shape[1])
    if name == "combine":
        return lambda rows, weights: jaxmoe.combine(rows, weights, handle), (rows, weights)
    if name == "start_combine":
        return lambda rows, weights: jaxmoe.start_combine(rows, weights, handle).finish(), (rows, weights)
    return lambda rows, back, weights: jaxmoe.matmul_combine(rows, back, weights, handle), (rows, back, weights)


def refuses_forward_mode(name: str) -> Any:
    return pytest.raises(
        NotImplementedError, match=rf"^{name}: .* {name} has reverse-mode ones only.*jax\.lax\.ragged_dot"
    )


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("implementation", ["xla", "megakernel"])
def test_forward_mode_of_an_exchange_raises_in_its_name_and_says_what_to_do(implementation, name):
    function, at = exchange(name, implementation)
    for place, array in enumerate(at):
        with refuses_forward_mode(name):
            jax.jvp(lambda one, place=place: function(*at[:place], one, *at[place + 1 :]), (array,), (array,))
    with refuses_forward_mode(name):
        jax.linearize(function, *at)[1](*at)
    with refuses_forward_mode(name):
        jax.jit(lambda *at: jax.jvp(function, at, at))(*at)
    with pytest.raises(NotImplementedError, match=rf"^{name}: jax\.vmap"):
        jax.jacfwd(function)(*at)


@pytest.mark.parametrize(
    ("name", "options"), [("dispatch", {"precision": "fp8"}), ("dispatch_matmul", {}), ("matmul_combine", {})]
)
def test_forward_mode_of_what_rounds_or_multiplies_raises_with_the_reference_too(name, options):
    function, at = exchange(name, "reference", **options)
    with refuses_forward_mode(name):
        jax.jvp(function, at, at)


@pytest.mark.parametrize("name", [name for name in EXCHANGES if "matmul" not in name])
def test_forward_mode_of_an_exchange_works_with_the_reference(name):
    function, at = exchange(name, "reference")
    tangent = jax.jvp(function, at, at)[1]
    # Linear in each array, and the tangents are the arrays.
    assert relative_error(tangent, len(at) * function(*at)) < 1e-6


@pytest.mark.parametrize("name", EXCHANGES)
def test_hessian_vector_products_of_an_exchange_work_forward_over_reverse(name):
    function, at = exchange(name, "xla")
    gradient = jax.grad(lambda at: jnp.sum(function(*at) ** 2))
    along, step = jax.tree.map(jnp.cos, at), 1e-3
    product = jax.jvp(gradient, (at,), (along,))[1]
    ahead, behind = (
        gradient(jax.tree.map(lambda array, way, sign=sign: array + sign * step * way, at, along)) for sign in (1, -1)
    )
    for got, one, other in zip(product, ahead, behind, strict=True):
        assert relative_error(got, (one - other) / (2 * step)) < 1e-3


@pytest.mark.parametrize("name", EXCHANGES)
def test_second_derivatives_of_an_exchange_by_the_kernel_are_refused_and_what_has_them_named(name):
    function, at = exchange(name, "megakernel")
    gradient = jax.grad(lambda at: jnp.sum(function(*at) ** 2))
    for differentiate in (
        lambda: jax.jvp(gradient, (at,), (at,)),
        lambda: jax.grad(lambda at: sum(jnp.sum(each) for each in gradient(at)))(at),
    ):
        with pytest.raises(NotImplementedError, match=r"first derivatives only.* Pass implementation='xla' .*dispatch"):
            differentiate()


def test_a_hessian_is_told_how_it_is_had_and_had_that_way():
    small = make_inputs(0, tokens=2, hidden=4)[:4]

    def loss(x):
        return jnp.sum(jnp.sin(jaxmoe.moe_layer(x, *small[1:], axis_name=None)))

    with pytest.raises(
        NotImplementedError, match=r"jax\.hessian map.*jax\.lax\.map over directions of jax\.jvp of jax\.grad"
    ):
        jax.hessian(loss)(small[0])
    directions = jnp.eye(8).reshape(8, 2, 4)
    found = jax.lax.map(lambda way: jax.jvp(jax.grad(loss), (small[0],), (way,))[1], directions)
    want = jax.hessian(lambda x: jnp.sum(jnp.sin(dense(make_inputs(0, tokens=2, hidden=4)._replace(x=x)))))(small[0])
    assert relative_error(found.reshape(want.shape), want) < 5e-6


def test_forward_over_reverse_works_between_different_arguments_and_under_checkpoint_and_scan():
    x, ids, weights, experts = ARGUMENTS

    def loss(run, x, weights):
        def step(carry, _):
            return jax.checkpoint(lambda x: x + run(x, weights))(carry), None

        return jnp.sum(jnp.sin(jax.lax.scan(step, x, length=2)[0]))

    def layer(x, weights):
        return jaxmoe.moe_layer(x, ids, weights, experts, axis_name=None)

    def truth(x, weights):
        return dense(make_inputs(0, biases=True)._replace(x=x, topk_weights=weights))

    products = [
        jax.jit(lambda x, run=run: jax.jvp(lambda x: jax.grad(loss, argnums=2)(run, x, weights), (x,), (jnp.cos(x),)))(
            x
        )
        for run in (layer, truth)
    ]
    for got, want in zip(*products, strict=True):
        assert relative_error(got, want) < 5e-6


def test_jacrev_raises_and_says_what_to_do():
    small = make_inputs(0, tokens=2, hidden=4)[:4]
    with pytest.raises(NotImplementedError, match="pass the batch dimension along"):
        jax.jacrev(lambda x: jaxmoe.moe_layer(x, *small[1:], axis_name=None))(small[0])


def scans_in(jaxpr: Any) -> list[Any]:
    """The scans of a program and of all that it calls."""
    found = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        found += [scan for each in inner if hasattr(each, "eqns") for scan in scans_in(each)]
    return found


def matrices_that_scans_store(run: Any, arguments: Any) -> tuple[int, int]:
    """Of a scan over five layers with gradients: arrays of whole matrices that the two passes stack."""
    stacked = jax.tree.map(lambda array: jnp.stack([array] * 5), arguments.experts)

    def loss(x: jax.Array, experts: jaxmoe.Experts) -> jax.Array:
        step = lambda x, own: (x + run(arguments._replace(x=x, experts=own)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, experts)[0] ** 2)

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(arguments.x, stacked)
    forward, backward = (scan for scan in scans_in(program.jaxpr) if scan.params["length"] == 5)
    shapes = {array.shape[-2:] for array in (arguments.experts.w_gate, arguments.experts.w_down)}
    stored, gradients = (sum(out.aval.shape[-2:] in shapes for out in scan.outvars) for scan in (forward, backward))
    return stored, gradients


KEEPS_NO_EXPERTS = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX below 0.11 stores all arguments")


@KEEPS_NO_EXPERTS
@pytest.mark.parametrize("residuals", ["recompute", "save"])
@pytest.mark.parametrize("placement", ["one rank", "data x expert, Auto", "data x expert, Explicit", "in shard_map"])
@pytest.mark.parametrize("implementation", ["xla", "megakernel"])
def test_a_scan_over_layers_keeps_no_copy_of_the_experts_for_its_backward_pass(implementation, placement, residuals):
    run = layer(placement, implementation=implementation, residuals=residuals)
    assert matrices_that_scans_store(run, make_inputs(0, hidden=24, intermediate=40)) == (0, 3)


@KEEPS_NO_EXPERTS
@pytest.mark.parametrize("implementation", ["xla", "megakernel"])
def test_nor_does_it_keep_what_was_gathered_of_experts_that_are_split_inside(implementation):
    mesh = jax.make_mesh((4, 2), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    options: dict[str, Any] = {"mesh": mesh, "axis_name": "expert", "data_axes": "fsdp", "hidden_axis": "fsdp"}
    run = lambda arguments: jaxmoe.moe_layer(*arguments[:4], implementation=implementation, **options)  # noqa: E731
    assert matrices_that_scans_store(run, make_inputs(0, hidden=24, intermediate=40)) == (0, 3)
