"""The checks of a call and the choice of its implementation: all that happens before anything runs.

`api.py` and `explain.py` make a `Call` here from the user's arguments. Every error of bad input is raised here, in
`expert_checks.check`, in `sharding.place` or, for what one implementation cannot do, in its own `check`. Where no
implementation is named, `reach.obstacle` knows what only speaks against choosing the megakernel.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmoe import activation as activations
from jaxmoe import expert_checks, reach, sharding, static_sizes
from jaxmoe import expert_split as expert_splits
from jaxmoe import precision as precisions
from jaxmoe import token_split as token_splits
from jaxmoe.arrays import check_array
from jaxmoe.experts import AnyExperts, present
from jaxmoe.formats import FLOAT_DTYPES, Formats
from jaxmoe.implementations import IMPLEMENTATIONS, MEGAKERNEL, XLA, AnyPlan, Implementation
from jaxmoe.implementations.base import Call, Shape
from jaxmoe.network import choice, levels
from jaxmoe.network.levels import Levels
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import Arguments, CallOptions, Residuals, check_implementation
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.routing.stats import check_token_valid
from jaxmoe.wording import a_type

# Row numbers are int32, and the last pass is padded.
MOST_SLOTS = 2**30


def check(arguments: Arguments, options: CallOptions, routed_experts: int | None = None) -> Call:
    """Returns the call, or raises what is wrong with it. The arrays may be `jax.ShapeDtypeStruct`.

    Args:
      arguments: of the call.
      options: of the call.
      routed_experts: among how many experts the router chose, where that is known.
    """
    check_implementation("moe_layer", options.implementation)
    if options.residuals is not None and options.residuals not in get_args(Residuals):
        raise ValueError(
            f"moe_layer: residuals={options.residuals!r} is not known. Use 'recompute' or 'save', or None for the "
            "default."
        )
    x, topk_ids, topk_weights, experts, token_valid = arguments
    static_sizes.check("moe_layer", arguments)
    _check_tokens(x, topk_ids, topk_weights, token_valid)
    inner_axes = {
        name: sharding.axis_tuple(getattr(options, name), name) for name in ("hidden_axis", "intermediate_axis")
    }
    shards = _manual_ranks(inner_axes["hidden_axis"])
    weights = expert_checks.check(experts, hidden=x.shape[-1], dtype=x.dtype, hidden_ranks=shards)
    precision = precisions.resolve(options.precision, weights, x.dtype)
    precisions.check_accumulation(options.accumulation, precision, weights)
    activation = activations.resolve_beside(options.activation, gated=weights.gated)

    placement = sharding.place(
        x,
        axis_name=options.axis_name,
        data_axes=options.data_axes,
        mesh=options.mesh,
        inner_axes=[name for names in inner_axes.values() for name in names],
        part_axes=inner_axes["intermediate_axis"],
    )
    token_split = token_splits.choose(x.shape[:-1], placement.known_dims, placement.token_axes, placement.mesh)
    expert_split = _expert_split(weights, options, placement)
    placement = sharding.with_manual_axes(placement, (*expert_split.hidden, *expert_split.intermediate))
    platform = sharding.platform(placement, x)
    if x.dtype == jnp.float64 and platform != "cpu":
        raise TypeError(f"moe_layer: x is float64, which is supported on CPU only, not on {platform}. Use float32.")
    if placement.mesh is None and placement.group.size > 1 and not isinstance(x, jax.ShapeDtypeStruct):
        sharding.check_split_experts(weights, x, placement.group)
    formats = precisions.formats_of(precision, weights, x.dtype)
    shape = _shape(x, topk_ids, weights, placement, (token_split, expert_split), formats)
    if routed_experts not in (None, shape.num_experts):
        raise ValueError(
            f"moe_layer: the routing chooses among {routed_experts} experts, and there are {shape.num_experts} "
            f"({weights.num_experts} in experts, {shape.ranks} rank(s) of axis_name={options.axis_name!r}). "
            "Inside shard_map experts are those of one rank, with axis_name=None all of them."
        )
    hosts = _levels(options, placement, shape)
    launch_shape = shape if hosts is None else choice.shape_on_host(shape, hosts)
    quantizes = precision is not None and not isinstance(weights.matrix, QuantizedMatrix)

    def call_of(implementation: Implementation, reason: str) -> Call:
        plan = _plan_for(implementation, options) or implementation.default_plan(launch_shape, platform)
        residuals = options.residuals or implementation.residuals
        if precisions.rounds_rows(precision):
            residuals = "recompute"  # what the forward pass computes is not what the backward pass differentiates
        return Call(
            implementation.name,
            reason,
            activation,
            placement,
            platform,
            shape,
            plan,
            residuals,
            precision,
            quantizes,
            options.accumulation,
            biases=any(name.startswith("b_") for name in present(weights)),
            levels=hosts,
            token_split=token_split,
            expert_split=expert_split,
        )

    call = _choose(options, platform, placement.group if hosts is None else hosts.on_host, call_of)
    IMPLEMENTATIONS[call.implementation].check(choice.call_on_host(call))
    if call.implementation == XLA.name:
        # Weights meet no gather, sort or grouped GEMM.
        sharding.check_mesh_is_set(arguments._replace(topk_weights=None), placement)
    return call


class RepeatedWorkWarning(UserWarning):
    """Ranks along a mesh axis compute the same: `moe_layer` was not told that tokens or experts are split over it.

    `data_axes=()` says that it is meant; beside axes of the tokens, and where gate and up in halves lie split so that
    no rank could compute a part, `warnings.filterwarnings` does.
    """


def warn_of_repeated_work(call: Call, options: CallOptions) -> None:
    """Warns where ranks would compute the same and the user did not say that this is meant."""
    is_meant = options.data_axes is not None and not sharding.names_of_tokens(options.data_axes)
    undivided = call.expert_split.undivided
    names = tuple(name for name in call.repeated_axes if name in undivided or not is_meant)
    if not names:
        return
    assert call.placement.mesh is not None
    times = math.prod(call.placement.mesh.shape[name] for name in names)
    some = ", ".join(map(repr, names))
    expert_axes = sharding.axis_tuple(options.axis_name, "axis_name")
    of_tokens = tuple(name for name in call.placement.token_axes if name not in expert_axes)
    pass_axes = f"pass data_axes={(*of_tokens, *names)}"
    if isinstance(options.data_axes, PartitionSpec):
        pass_axes = f"name it in data_axes={options.data_axes} too"
    of_experts = f"where the intermediate dimension of the experts is, pass intermediate_axis={names[0]!r}"
    if undivided:
        of_experts = (
            f"experts.w_gate_up lies split over {', '.join(map(repr, undivided))}, and has layout='halves', of which "
            "ranks cannot compute parts: a part of its columns has gate or up alone. For these pass experts.split(), "
            "or weights that are stored with layout='interleaved'"
        )
    silent = "data_axes=()"
    if undivided or of_tokens:
        silent = "warnings.filterwarnings('ignore', category=jaxmoe.RepeatedWorkWarning)"
    warnings.warn(
        f"moe_layer: the {times} ranks of mesh axis {some} compute the same tokens with the same experts. Where tokens "
        f"are split over it, or may be, {pass_axes}; {of_experts}; where it is meant, {silent}.",
        RepeatedWorkWarning,
        stacklevel=4,
    )


def _levels(options: CallOptions, placement: sharding.Placement, shape: Shape) -> Levels | None:
    """Returns what travels between hosts; `None` where the experts are on one, or nothing says that they are not."""
    if options.network is not None and not isinstance(options.network, NetworkPlan):
        raise TypeError(f"moe_layer: network is {a_type(options.network)}; it must be a jaxmoe.NetworkPlan or None.")
    group, stated = placement.group, options.network and options.network.ranks_per_host
    of_host = levels.ranks_per_host(group, options.mesh, stated)
    if of_host == group.size:
        return None
    mesh = placement.mesh if placement.mesh is not None else jax.sharding.get_abstract_mesh()
    plan = choice.complete(options.network, shape, group.size // of_host)
    return Levels(*levels.split(group, of_host, mesh), plan)


def _choose(
    options: CallOptions, platform: str, group: sharding.ExpertGroup, call_of: Callable[[Implementation, str], Call]
) -> Call:
    """Returns the call with an implementation: where none is named the megakernel on GPUs that can run it."""
    if options.implementation is not None:
        named = IMPLEMENTATIONS[options.implementation]
        return call_of(named, f"implementation={named.name!r} was asked for")
    best, otherwise = MEGAKERNEL.name, f"implementation=None: {XLA.name!r}"
    if platform != "gpu":
        return call_of(XLA, f"{otherwise} on {platform}; {best!r} is chosen on GPUs that can run it")
    if isinstance(options.plan, XLA.plan_type):
        return call_of(XLA, f"{otherwise}, which the plan is for")
    try:
        call = call_of(MEGAKERNEL, f"implementation=None: {best!r}, which can run this call")
        MEGAKERNEL.check(choice.call_on_host(call))
    except (NotImplementedError, TypeError, ValueError) as error:
        if options.plan is not None:
            raise
        return call_of(XLA, f"{otherwise}; {best!r} cannot run this call ({str(error).split('. ')[0]})")
    obstacle = reach.obstacle(group, options.mesh)
    return call_of(XLA, f"{otherwise}; {obstacle}") if obstacle else call


def _plan_for(implementation: Implementation, options: CallOptions) -> AnyPlan | None:
    plan, wanted = options.plan, implementation.plan_type
    if plan is None or isinstance(plan, wanted):
        return plan
    for other in IMPLEMENTATIONS.values():
        if options.implementation is None and isinstance(plan, other.plan_type):
            raise TypeError(
                f"moe_layer: plan is {a_type(plan)}, and implementation=None chooses {implementation.name!r}, "
                f"which takes a jaxmoe.{wanted.__name__}. Name the implementation that the plan is for: "
                f"implementation={other.name!r}."
            )
    raise TypeError(
        f"moe_layer: plan is {a_type(plan)}; implementation={implementation.name!r} takes a "
        f"jaxmoe.{wanted.__name__}, or None for its default."
    )


def _check_tokens(x: Any, topk_ids: Any, topk_weights: Any, token_valid: Any) -> None:
    for name, array in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        check_array("moe_layer", name, array)
    if len(x.shape) < 2 or 0 in x.shape[-1:]:
        raise ValueError(f"moe_layer: x has shape {x.shape}; it must be [..., tokens, hidden]. One token is x[None].")
    if jnp.dtype(x.dtype).name not in FLOAT_DTYPES:
        raise TypeError(f"moe_layer: x is {x.dtype}; it must be one of {', '.join(FLOAT_DTYPES)}.")
    for name, array in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if len(array.shape) != len(x.shape) or array.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"moe_layer: {name} has shape {array.shape}; it must be [..., top_k] with the leading dimensions "
                f"{x.shape[:-1]} of x."
            )
    if topk_ids.shape != topk_weights.shape:
        raise ValueError(f"moe_layer: topk_ids {topk_ids.shape} and topk_weights {topk_weights.shape} differ in shape.")
    if topk_ids.shape[-1] == 0:
        raise ValueError(f"moe_layer: topk_ids has shape {topk_ids.shape}; top_k must be at least 1.")
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"moe_layer: topk_ids is {topk_ids.dtype}; it must be an integer type, such as int32.")
    allowed = ("float32", "float64") if x.dtype == jnp.float64 else ("float32",)
    if jnp.dtype(topk_weights.dtype).name not in allowed:
        raise TypeError(
            f"moe_layer: topk_weights is {topk_weights.dtype}; it must be {' or '.join(allowed)} "
            "(they are small, and a lower precision would lose accuracy): topk_weights.astype(jnp.float32)."
        )
    check_token_valid("moe_layer", token_valid, x.shape[:-1], "x")


def _manual_ranks(names: tuple[str, ...]) -> int:
    """Returns over how many ranks arrays are split that are shards of mesh axes here, inside of `shard_map`."""
    context = jax.sharding.get_abstract_mesh()
    return math.prod(context.shape[name] for name in names if name in context.manual_axes)


def _expert_split(
    experts: AnyExperts, options: CallOptions, placement: sharding.Placement
) -> expert_splits.ExpertSplit:
    entering = placement.mesh is not None
    mesh = jax.sharding.get_abstract_mesh() if placement.mesh is None else placement.mesh
    token_axes = placement.token_axes if entering else sharding.names_of_tokens(options.data_axes)
    return expert_splits.choose(
        experts,
        options.hidden_axis,
        options.intermediate_axis,
        mesh=mesh,
        entering=entering,
        expert_axes=sharding.axis_tuple(options.axis_name, "axis_name"),
        token_axes=token_axes,
    )


def _shape(
    x: Any,
    topk_ids: Any,
    experts: AnyExperts,
    placement: sharding.Placement,
    splits: tuple[token_splits.TokenSplit, expert_splits.ExpertSplit],
    formats: Formats,
) -> Shape:
    ranks, names = placement.group.size, placement.group.axis_names
    entering = placement.mesh is not None
    if entering and experts.num_experts % ranks:
        raise ValueError(uneven_experts("moe_layer", experts.num_experts, ranks, names))
    num_experts = experts.num_experts if entering else experts.num_experts * ranks
    top_k = topk_ids.shape[-1]
    if top_k > num_experts:
        raise ValueError(
            f"moe_layer: topk_ids has top_k={top_k} slots per token, but there are only {num_experts} experts "
            f"({experts.num_experts} in experts, {ranks} ranks). Pass at most {num_experts} slots."
        )
    tokens, of_experts = splits
    num_tokens = tokens.rows
    if ranks * num_tokens * top_k >= MOST_SLOTS:
        raise ValueError(
            f"moe_layer: {ranks} ranks x {num_tokens} tokens x {top_k} slots are more rows than int32 can number. "
            "Split the tokens, e.g. by jax.lax.map over parts of the batch."
        )
    return Shape(
        tokens=num_tokens,
        hidden=x.shape[-1],
        intermediate=of_experts.width(experts.intermediate, entering),
        num_experts=num_experts,
        top_k=top_k,
        ranks=ranks,
        gated=experts.gated,
        formats=formats,
    )


def uneven_experts(caller: str, num_experts: int, ranks: int, names: tuple[str, ...]) -> str:
    """Returns the error of experts that are not equally many on every rank."""
    axis = f"axis {names[0]!r}" if len(names) == 1 else f"axes {names}"
    *fewer, most = [str(size) for size in range(1, max(ranks, 2)) if num_experts % size == 0]
    fitting = f"{', '.join(fewer)} or {most} ranks" if fewer else f"{most} rank"
    return (
        f"{caller}: num_experts={num_experts} cannot be spread over the {ranks} ranks of mesh {axis} "
        f"({num_experts} % {ranks} = {num_experts % ranks}). Use {-(-num_experts // ranks) * ranks} experts, "
        f"or a mesh axis of {fitting}."
    )
