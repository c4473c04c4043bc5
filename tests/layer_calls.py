"""How tests call `moe_layer`: where, jitted how, and beside which truth. What they hold it to is in layer_suite.py.

Functions are jitted once for each structure and then fed with different routings, since compiling is what takes time
here.
"""

import dataclasses
import functools
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import native
from jaxmoe.options import Arguments
from jaxmoe.plan import AnyPlan
from jaxmoe.testing import dense, make_inputs, relative_error, tolerance

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 24, 40, 8, 3
SIZES: dict[str, Any] = {
    "tokens": TOKENS,
    "hidden": HIDDEN,
    "intermediate": INTERMEDIATE,
    "num_experts": EXPERTS,
    "top_k": TOP_K,
}
PLACEMENTS = (
    "one rank",
    "all devices",
    "data x expert, Auto",
    "data x expert, Explicit",
    "data x expert, groups of two",
    "two expert axes",
    "in shard_map",
)
# As if the ranks were on several hosts: axes of a mesh, which of them are the experts', and ranks of a host.
HOSTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], int]] = {
    "hosts 2 x 4": ((2, 4), ("host", "expert"), 4),
    "hosts 4 x 2 on one axis": ((8,), ("expert",), 2),
    "hosts 8 x 1": ((8,), ("expert",), 1),
    "hosts 2 x 2 for each of two groups": ((2, 4), ("data", "expert"), 2),
}
# Answers are added up at experts before they travel.
SUMS = jaxmoe.KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=4, sum_at_experts=True)


@functools.cache
def mesh_of(*names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    """All devices (8, 4, 2 or 1) over the named axes: two for the last axes first, the rest for the first one."""
    left, sizes = jax.device_count(), []
    for _ in names[1:]:
        sizes.append(min(2, left))
        left //= sizes[-1]
    sizes = [left, *sizes] if names[0] == "expert" or len(names) > 2 else [sizes[0], left]
    return jax.make_mesh(tuple(sizes), names, axis_types=(kind,) * len(names))


def layer(placement: str, **options: Any):
    """Returns a function of the arrays of a call which runs moe_layer in one of `PLACEMENTS`."""
    if placement in HOSTS:
        return _over_hosts(placement, **options)
    explicit = placement == "data x expert, Explicit"
    data_expert = mesh_of("data", "expert", kind=AxisType.Explicit if explicit else AxisType.Auto)

    def call(arguments: Arguments, **where: Any) -> Any:
        x, ids, weights, experts, valid = arguments
        return jaxmoe.moe_layer(x, ids, weights, experts, token_valid=valid, **where, **options)

    if placement == "one rank":
        return functools.partial(call, axis_name=None)
    if placement == "all devices":
        return functools.partial(call, mesh=mesh_of("expert"))
    if placement in ("data x expert, Auto", "data x expert, Explicit"):
        return functools.partial(call, mesh=data_expert, data_axes="data")
    if placement == "data x expert, groups of two":
        ranks = min(2, jax.device_count())
        mesh = jax.make_mesh((jax.device_count() // ranks, ranks), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
        return functools.partial(call, mesh=mesh, data_axes="data")
    if placement == "two expert axes":
        mesh = mesh_of("data", "node", "gpu")
        return functools.partial(call, mesh=mesh, axis_name=("node", "gpu"), data_axes=("data",))
    assert placement == "in shard_map"

    def in_shard_map(arguments: Arguments) -> Any:
        tokens = P(("data", "expert"))
        specs = Arguments(tokens, tokens, tokens, P("expert"), tokens)
        return jax.shard_map(call, mesh=data_expert, in_specs=(specs,), out_specs=tokens)(arguments)

    return in_shard_map


def _over_hosts(placement: str, network: jaxmoe.NetworkPlan | None = None, **options: Any):
    sizes, names, ranks_per_host = HOSTS[placement]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    network = dataclasses.replace(network or jaxmoe.NetworkPlan(), ranks_per_host=ranks_per_host)
    experts = tuple(name for name in names if name != "data")
    where: dict[str, Any] = {"mesh": mesh, "axis_name": experts, "data_axes": tuple({*names} - {*experts})}

    def call(arguments: Arguments) -> Any:
        return jaxmoe.moe_layer(*arguments[:4], token_valid=arguments.token_valid, network=network, **where, **options)

    return call


def cotangent(y: jax.Array) -> jax.Array:
    return jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


def gradients_of(function: Any):
    """Returns the jitted gradients of a fixed weighted sum of the outputs, for x, topk_weights and experts."""

    def loss(x: jax.Array, weights: jax.Array, experts: jaxmoe.Experts, ids: jax.Array, valid: Any) -> jax.Array:
        y = function(Arguments(x, ids, weights, experts, valid))
        y = y if valid is None else jnp.where(valid[:, None], y, 0)
        return jnp.sum(y.astype(jnp.promote_types(y.dtype, jnp.float32)) * cotangent(y))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return lambda a: gradients(a.x, a.topk_weights, a.experts, a.topk_ids, a.token_valid)


def both_of(function: Any):
    """Returns the jitted outputs, and beside them what `gradients_of` returns: one program for both."""

    def loss(x: jax.Array, weights: jax.Array, experts: jaxmoe.Experts, ids: jax.Array, valid: Any) -> Any:
        y = function(Arguments(x, ids, weights, experts, valid))
        counted = y if valid is None else jnp.where(valid[:, None], y, 0)
        return jnp.sum(counted.astype(jnp.promote_types(y.dtype, jnp.float32)) * cotangent(y)), y

    pair = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    return lambda a: pair(a.x, a.topk_weights, a.experts, a.topk_ids, a.token_valid)[::-1]


@functools.cache
def jitted(placement: str, gradients: bool, options: tuple[tuple[str, Any], ...]) -> Any:
    function = layer(placement, **dict(options))
    return gradients_of(function) if gradients else jax.jit(function)


@functools.cache
def jitted_both(placement: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return both_of(layer(placement, **dict(options)))


@functools.cache
def jitted_dense_both(activation: Any, compute_dtype: Any) -> Any:
    return both_of(functools.partial(dense, activation=activation, compute_dtype=compute_dtype))


def widened(arguments: Arguments) -> Arguments:
    cast = lambda array: array.astype(jnp.promote_types(array.dtype, jnp.float32))  # noqa: E731
    return arguments._replace(x=cast(arguments.x), experts=jax.tree.map(cast, arguments.experts))


def as_dict(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


class LayerChecks:
    """Calls of one implementation and comparisons with the truth. Inherit and set `implementation`."""

    implementation: ClassVar[str]
    # Of tokens and weights, where a test does not say otherwise.
    dtype: ClassVar[Any] = jnp.float32
    # That one call of the suite may have: what an 8-bit id can name.
    most_experts: ClassVar[int] = 256
    # Of which the widths of tokens and hidden rows are multiples, where the implementation wants it.
    width_multiple: ClassVar[int] = 1
    # Plans that the suite must hold for besides the default; None where the implementation has no choices.
    plans: ClassVar[tuple[AnyPlan | None, ...]] = (None,)

    def options(self) -> dict[str, Any]:
        return {"implementation": self.implementation, "plan": self.plans[-1]}

    def run(self, arguments: Arguments, placement: str = "data x expert, Auto", **options: Any) -> Any:
        return jitted(placement, False, tuple(sorted((self.options() | options).items())))(arguments)

    def gradients(self, arguments: Arguments, placement: str = "data x expert, Auto", **options: Any) -> Any:
        return jitted(placement, True, tuple(sorted((self.options() | options).items())))(arguments)

    def both(self, arguments: Arguments, placement: str = "data x expert, Auto", **options: Any) -> Any:
        """The output and the gradients, of one program: it compiles in little more time than that of the gradients."""
        return jitted_both(placement, tuple(sorted((self.options() | options).items())))(arguments)

    def plan_of(self, number: int) -> AnyPlan | None:
        """A plan that is legal for every size, another one for each number from 1."""
        if self.implementation == "xla":
            return jaxmoe.Plan(batch_rows=number)
        if self.implementation == "megakernel":
            unit_tiles, lag_units = 1 + number % 3, number // 3 % 4
            room = number // 12 % 3
            return jaxmoe.KernelPlan(unit_tiles, lag_units, (lag_units + 1) * unit_tiles + room)
        return None

    def inputs(self, seed: int, **options: Any) -> Arguments:
        return make_inputs(seed, **{"dtype": self.dtype} | SIZES | options)

    def assert_near(self, value: Any, truth: Any) -> None:
        """Every array within the error of a few operations in the suite's dtype."""
        allowed = 5e-6 if self.dtype == jnp.float32 else 4 * float(jnp.finfo(self.dtype).eps)
        for key, got in as_dict(value).items():
            error = relative_error(got, as_dict(truth)[key])
            assert error <= allowed, f"{key}: error {error:.2e} above {allowed:.2e}"

    def check(self, arguments: Arguments, placement: str = "data x expert, Auto", **options: Any) -> None:
        """The output and every gradient agree with the dense reference."""
        activation, dtype = options.get("activation", "silu"), arguments.x.dtype
        truth = jitted_dense_both(activation, None)(widened(arguments))
        value = self.both(arguments, placement, **options)
        if dtype == jnp.float32:  # the truth is no wider: only the order of sums differs
            self.assert_near(value, truth)
            return
        rough = as_dict(jitted_dense_both(activation, dtype)(arguments))
        for key, want in as_dict(truth).items():
            error, allowed = relative_error(as_dict(value)[key], want), tolerance(rough[key], want, dtype)
            assert error <= allowed, f"{key}: error {error:.2e} above {allowed:.2e}"


def schedule_in(text: str, target: str) -> Any:
    """The schedule that a call carries."""
    line = next(line for line in text.splitlines() if f"@{target}(" in line)
    (numbers,) = re.findall(r"schedule = dense<\[([-\d, ]+)\]>", line)
    rows, h_columns, columns, *others = map(int, numbers.split(","))
    steps = native.schedule()
    return steps.Schedule(steps.TileSizes(rows, h_columns, columns), *others)
