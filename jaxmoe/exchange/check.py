"""The checks of a dispatch and the choice of the implementation: all before anything runs.

Every error of bad input is raised here, in check_combine.py, in `sharding.place` or in an implementation's own `check`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import reach, sharding
from jaxmoe.arrays import check_array
from jaxmoe.call import MOST_SLOTS, uneven_experts
from jaxmoe.exchange import IMPLEMENTATIONS, MEGAKERNEL, XLA
from jaxmoe.exchange.base import (
    MOST_RANKS,
    MOST_SLOTS_OF_RANK,
    ExchangeCall,
    ExchangePrecision,
    ExchangeShape,
    Implementation,
    Room,
)
from jaxmoe.formats import FLOAT_DTYPES
from jaxmoe.integers import integer
from jaxmoe.options import ImplementationName, check_implementation
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.routing.router import Routing
from jaxmoe.routing.stats import check_token_valid
from jaxmoe.wording import a_type

# Multiprocessors of a kernel beside other work: so few that collectives find some, whatever it waits for itself
# (kMostWorkersBeside in ffi/cuda/host/call_checks.h).
MOST_BESIDE = 64


@dataclasses.dataclass(frozen=True)
class DispatchOptions:
    """What a dispatch is given besides arrays, as the user wrote it: `dispatch` documents it."""

    num_experts: Any = None
    axis_name: Any = "expert"
    capacity: Any = None
    alignment: Any = 1
    per_expert: Any = False
    precision: Any = None
    data_axes: Any = ()
    mesh: Any = None
    implementation: Any = None
    caller: str = "dispatch"
    multiprocessors: Any = None  # None: of a call that is not started beside others


def check_dispatch(
    x: Any, topk_ids: Any, token_valid: Any, options: DispatchOptions, matrices: Any = None
) -> ExchangeCall:
    """Returns the call, or raises what is wrong with it. `topk_ids` may be a `Routing`.

    With `matrices`, which tokens are multiplied with, there are as many experts as matrices.
    """
    caller = options.caller
    check_implementation(caller, options.implementation)
    precisions = get_args(ExchangePrecision)
    if options.precision is not None and options.precision not in precisions:
        raise ValueError(
            f"{caller}: precision={options.precision!r} is not known. Use one of "
            f"{', '.join(map(repr, precisions))} to send tokens in 8 bits, or None for the dtype of x."
        )
    routing, topk_ids = topk_ids, topk_ids.topk_ids if isinstance(topk_ids, Routing) else topk_ids
    _check_tokens(caller, x, topk_ids, token_valid)
    if options.precision is not None and x.dtype == jnp.float64:
        raise TypeError(
            f"{caller}: x is float64, and precision={options.precision!r} is for bfloat16, float16 and float32: scales "
            "are float32. Cast x, or leave precision out."
        )
    placement = sharding.place(
        x, axis_name=options.axis_name, data_axes=options.data_axes, mesh=options.mesh, caller=caller
    )
    # How x lies changes nothing here, and handles of equal calls are to be equal pytrees.
    placement = dataclasses.replace(placement, known_dims=(), result=None)
    platform = sharding.platform(placement, x)
    if x.dtype == jnp.float64 and platform != "cpu":
        raise TypeError(f"{caller}: x is float64, which is supported on CPU only, not on {platform}. Use float32.")
    given = options.num_experts if matrices is None else _num_matrices(caller, x, matrices, placement)
    num_experts = _num_experts(caller, routing, given, matrices)
    shape = _shape(caller, x, topk_ids, num_experts, placement)
    room, multiprocessors = _room(shape, options), check_multiprocessors(caller, options.multiprocessors)
    inside = placement.mesh is None and placement.group.axis_names
    axis_sizes = tuple(jax.sharding.get_abstract_mesh().shape.items()) if inside else ()

    def call_of(implementation: Implementation, reason: str) -> ExchangeCall:
        of_rows = shape, room, options.precision, multiprocessors
        return ExchangeCall(implementation.name, reason, placement, platform, *of_rows, axis_sizes)

    call = choose(options.implementation, platform, placement.group, options.mesh, call_of, caller, matrices)
    arrays = {"x": x, "topk_ids": topk_ids, "token_valid": token_valid, "matrices": matrices}
    check_mesh_of_plain_jax(call, caller, arrays, products=matrices is not None)
    return call


def check_mesh_of_plain_jax(
    call: ExchangeCall, caller: str, arrays: dict[str, Any], products: bool, takes_handle: bool = False
) -> None:
    """Raises where plain JAX runs the call and has no rules for how arrays lie; see `sharding.check_mesh_is_set`."""
    if call.implementation != MEGAKERNEL.name:
        sharding.check_mesh_is_set(arrays, call.placement, caller, products, takes_handle)


def choose(
    name: ImplementationName | None,
    platform: str,
    group: sharding.ExpertGroup,
    mesh: Any,
    call_of: Callable[[Implementation, str], ExchangeCall],
    caller: str = "dispatch",
    matrices: Any = None,
) -> ExchangeCall:
    """Returns the call with an implementation: where none is named compiled kernels on GPUs that can run it."""

    def check(implementation: Implementation, call: ExchangeCall) -> None:
        implementation.check(call, caller)
        if matrices is not None:
            implementation.check_rows(call, caller, "matrices", matrices)

    if name is not None and name not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"{caller}: implementation={name!r} has no dispatch and combine of its own. Use one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}, or None to choose."
        )
    if name is not None:
        call = call_of(IMPLEMENTATIONS[name], f"implementation={name!r} was asked for")
        check(IMPLEMENTATIONS[name], call)
        return call
    otherwise, best = f"implementation=None: {XLA.name!r}", IMPLEMENTATIONS[MEGAKERNEL.name]
    if platform != "gpu":
        return call_of(XLA, f"{otherwise} on {platform}; {best.name!r} is chosen on GPUs that can run it")
    call = call_of(best, f"implementation=None: {best.name!r}, which can run this call")
    try:
        check(best, call)
    except (NotImplementedError, TypeError, ValueError) as error:
        return call_of(XLA, f"{otherwise}; {best.name!r} cannot run this call ({str(error).split('. ')[0]})")
    obstacle = reach.obstacle(group, mesh)
    return call_of(XLA, f"{otherwise}; {obstacle}") if obstacle else call


def check_multiprocessors(caller: str, given: Any) -> int | None:
    """Returns the number; raises where it is none that a kernel can have beside other work."""
    number = integer(given)
    if given is not None and (number is None or number % 2 or not 2 <= number <= MOST_BESIDE):
        raise ValueError(
            f"{caller}: multiprocessors={given!r} must be an even number from 2 to {MOST_BESIDE}, those of a GPU that "
            "the kernel takes."
        )
    return number


def _num_matrices(caller: str, x: Any, matrices: Any, placement: sharding.Placement) -> int:
    """Returns the matrices of all ranks together, after all checks of them."""
    check_array(caller, "matrices", matrices)
    if len(matrices.shape) != 3 or 0 in matrices.shape or matrices.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{caller}: matrices has shape {matrices.shape}; it must be [experts, {x.shape[-1]}, width], a matrix for "
            "each expert of a rank inside shard_map, of all ranks outside."
        )
    check_matrix_dtype(caller, matrices, "x", x)
    return matrices.shape[0] * (placement.group.size if placement.mesh is None else 1)


def check_matrix_dtype(caller: str, matrices: Any, name: str, rows: Any) -> None:
    """Raises where a product would have factors of two dtypes."""
    if isinstance(matrices, QuantizedMatrix):
        raise TypeError(
            f"{caller}: matrices is {a_type(matrices)} and {name} {rows.dtype}; it must be an array of that dtype. "
            f"Decode it: matrices.wide({name}.dtype)."
        )
    if matrices.dtype != rows.dtype:
        raise TypeError(
            f"{caller}: matrices is {matrices.dtype} and {name} {rows.dtype}; they are multiplied as they are. Cast "
            f"one of them: matrices.astype({name}.dtype)."
        )


def _num_experts(caller: str, topk_ids: Any, given: Any, matrices: Any) -> int:
    routed = topk_ids.scores.shape[-1] if isinstance(topk_ids, Routing) else None
    if given is None and routed is None:
        raise TypeError(
            f"{caller}: num_experts is missing. Pass num_experts=, the experts of all ranks together; with a "
            "jaxmoe.Routing in place of topk_ids it may be left out."
        )
    num_experts = routed if given is None else integer(given)
    if num_experts is None or num_experts < 1:
        raise ValueError(f"{caller}: num_experts={given!r} must be a positive integer, the experts of all ranks.")
    if routed not in (None, num_experts):
        if matrices is not None:
            raise ValueError(
                f"{caller}: the routing chooses among {routed} experts, and matrices of shape {matrices.shape} are "
                f"those of {num_experts} on all ranks together. Pass a matrix for each expert, those of a rank inside "
                "shard_map."
            )
        raise ValueError(
            f"{caller}: the routing chooses among {routed} experts, and num_experts={num_experts}. Leave num_experts "
            "out, or pass the experts of all ranks."
        )
    return num_experts


def _check_tokens(caller: str, x: Any, topk_ids: Any, token_valid: Any) -> None:
    for name, array in (("x", x), ("topk_ids", topk_ids), ("token_valid", token_valid)):
        if not (name == "token_valid" and array is None):
            check_array(caller, name, array)
    if len(x.shape) < 2 or 0 in x.shape[-1:]:
        raise ValueError(f"{caller}: x has shape {x.shape}; it must be [..., tokens, hidden]. One token is x[None].")
    if jnp.dtype(x.dtype).name not in FLOAT_DTYPES:
        raise TypeError(f"{caller}: x is {x.dtype}; it must be one of {', '.join(FLOAT_DTYPES)}.")
    if len(topk_ids.shape) != len(x.shape) or topk_ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{caller}: topk_ids has shape {topk_ids.shape}; it must be [..., top_k] with the leading dimensions "
            f"{x.shape[:-1]} of x."
        )
    if topk_ids.shape[-1] == 0:
        raise ValueError(f"{caller}: topk_ids has shape {topk_ids.shape}; top_k must be at least 1.")
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"{caller}: topk_ids is {topk_ids.dtype}; it must be an integer type, such as int32.")
    check_token_valid(caller, token_valid, x.shape[:-1], "x")


def _shape(caller: str, x: Any, topk_ids: Any, num_experts: int, placement: sharding.Placement) -> ExchangeShape:
    ranks, shards = placement.group.size, token_shards(placement)
    if num_experts % ranks:
        raise ValueError(uneven_experts(caller, num_experts, ranks, placement.group.axis_names))
    if x.shape[0] % shards:
        raise ValueError(
            f"{caller}: the first dimension of x {x.shape} is split over the {shards} ranks of mesh axes "
            f"{placement.token_axes}, and {x.shape[0]} % {shards} = {x.shape[0] % shards}. Fill it up to "
            f"{-(-x.shape[0] // shards) * shards}, with topk_ids of -1, or flatten the leading dimensions."
        )
    tokens, top_k = math.prod(x.shape[:-1]) // shards, topk_ids.shape[-1]
    if ranks > MOST_RANKS:
        raise ValueError(
            f"{caller}: {ranks} ranks share the experts, and a row's source names one of at most {MOST_RANKS}. Spread "
            "the experts over fewer ranks, and the others as a data axis."
        )
    if tokens * top_k > MOST_SLOTS_OF_RANK or ranks * tokens * top_k >= MOST_SLOTS:
        raise ValueError(
            f"{caller}: {ranks} ranks x {tokens} tokens x {top_k} slots are too many: at most {MOST_SLOTS_OF_RANK} "
            f"slots of a rank, and fewer than {MOST_SLOTS} of all, have numbers. Split the tokens, e.g. by jax.lax.map "
            "over parts of the batch."
        )
    return ExchangeShape(tokens, x.shape[-1], num_experts, top_k, ranks, jnp.dtype(x.dtype))


def token_shards(placement: sharding.Placement) -> int:
    """Returns the parts into which the first dimension of the tokens is split on entry of `shard_map`."""
    return 1 if placement.mesh is None else math.prod(placement.mesh.shape[name] for name in placement.token_axes)


def _room(shape: ExchangeShape, options: DispatchOptions) -> Room:
    caller = options.caller
    capacity, alignment = options.capacity, integer(options.alignment)
    if alignment is None or alignment < 1:
        raise ValueError(f"{caller}: alignment={options.alignment!r} must be a positive integer, a number of rows.")
    if not isinstance(options.per_expert, bool | np.bool_):
        raise TypeError(f"{caller}: per_expert={options.per_expert!r} must be True or False.")
    if capacity is not None:
        capacity = integer(capacity)
        if capacity is None or capacity < 1:
            raise ValueError(f"{caller}: capacity={options.capacity!r} must be a positive integer, a number of rows.")
    if options.per_expert:
        if capacity is None:
            raise ValueError(
                f"{caller}: per_expert=True needs capacity=, the rows of each expert; those beyond it are dropped. No "
                f"row is with capacity={shape.all_slots}, all slots of all ranks."
            )
        room = Room(shape.local_experts * capacity, capacity_per_expert=capacity)
    else:
        if capacity is None:
            worst = shape.all_slots + shape.local_experts * (alignment - 1)
            capacity = -(-worst // alignment) * alignment
        room = Room(capacity, alignment)
    # The first row of an expert is computed in int32, also where it lies behind the last one.
    most = max(room.rows, shape.all_slots + shape.local_experts * room.alignment)
    if most >= MOST_SLOTS:
        raise ValueError(
            f"{caller}: capacity={options.capacity} and alignment={options.alignment} with {shape.local_experts} "
            f"experts per rank make up to {most} rows, and there can be fewer than {MOST_SLOTS}. Make them smaller."
        )
    return room
