"""The checks of a combine: whether a handle, and the rows that come with it, fit where it is called.

Callers: `combine`, `start_combine`, `matmul_combine`. What was chosen when tokens were dispatched (check.py) stays.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxmoe.arrays import check_array
from jaxmoe.exchange import IMPLEMENTATIONS
from jaxmoe.exchange.base import ExchangeCall
from jaxmoe.exchange.check import (
    check_matrix_dtype,
    check_mesh_of_plain_jax,
    check_multiprocessors,
    token_shards,
)
from jaxmoe.exchange.handle import Handle
from jaxmoe.formats import FLOAT_DTYPES
from jaxmoe.wording import a_type


def check_combine(
    outputs: Any,
    topk_weights: Any,
    handle: Any,
    caller: str = "combine",
    name_of_rows: str = "outputs",
    multiprocessors: Any = None,
) -> ExchangeCall:
    """Returns the call of the handle, or raises what is wrong with it or with the arrays."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{caller}: handle is {a_type(handle)}; it must be the handle that jaxmoe.dispatch returned, "
            "dispatched.handle."
        )
    call = handle.call
    _check_place(caller, call)
    shards = token_shards(call.placement)
    _check_arrays(caller, handle, shards)
    room, experts = call.room, call.shape.local_experts
    places = (shards * room.rows,)
    if room.capacity_per_expert:
        places = (shards * experts, room.capacity_per_expert)
    for name, array in ((name_of_rows, outputs), ("topk_weights", topk_weights)):
        if not (name == "topk_weights" and array is None):
            check_array(caller, name, array)
    if len(outputs.shape) != len(places) + 1 or outputs.shape[:-1] != places or outputs.shape[-1] == 0:
        raise ValueError(
            f"{caller}: {name_of_rows} has shape {outputs.shape}; it must be [{', '.join(map(str, places))}, width]: a "
            "row for each of dispatched.rows, in the same place."
        )
    if jnp.dtype(outputs.dtype).name not in FLOAT_DTYPES:
        raise TypeError(f"{caller}: {name_of_rows} is {outputs.dtype}; it must be one of {', '.join(FLOAT_DTYPES)}.")
    if topk_weights is not None:
        if topk_weights.shape != handle.slot_rows.shape:
            raise ValueError(
                f"{caller}: topk_weights has shape {topk_weights.shape}; it must be {handle.slot_rows.shape}, that of "
                "the topk_ids which were dispatched."
            )
        allowed = ("float32", "float64") if outputs.dtype == jnp.float64 else ("float32",)
        if jnp.dtype(topk_weights.dtype).name not in allowed:
            raise TypeError(
                f"{caller}: topk_weights is {topk_weights.dtype}; it must be {' or '.join(allowed)} "
                "(they are small, and a lower precision would lose accuracy): topk_weights.astype(jnp.float32)."
            )
    IMPLEMENTATIONS[call.implementation].check_rows(call, caller, name_of_rows, outputs)
    check_mesh_of_plain_jax(call, caller, {name_of_rows: outputs}, products=False, takes_handle=True)
    return dataclasses.replace(call, multiprocessors=check_multiprocessors(caller, multiprocessors))


def _check_arrays(caller: str, handle: Handle, shards: int) -> None:
    """Raises where a handle has not the sizes that its call says: of one rank, or outside of `shard_map` of all."""
    call = handle.call
    tokens, top_k = shards * call.shape.tokens, call.shape.top_k
    of_one_dimension = {"row_sources": call.room.rows, "rows_per_expert": call.shape.local_experts}
    for name in ("slot_rows", "topk_ids", *of_one_dimension):
        array = getattr(handle, name)
        check_array(caller, f"{name} of the handle", array)
        if name in of_one_dimension:
            size = shards * of_one_dimension[name]
            fits, expected = array.shape == (size,), f"({size},)"
        else:
            *batch, slots = array.shape or (0,)
            fits, expected = (math.prod(batch), slots) == (tokens, top_k), f"[..., {top_k}] of {tokens} tokens"
        if not fits:
            raise ValueError(
                f"{caller}: {name} of the handle has shape {array.shape}; it must be {expected}. Pass the handle that "
                "one dispatch returned; into a shard_map each of its arrays goes split on its first dimension."
            )


def check_matmul_combine(rows: Any, matrices: Any, topk_weights: Any, handle: Any) -> ExchangeCall:
    """The same of rows that are multiplied before they are added up."""
    caller = "matmul_combine"
    call = check_combine(rows, topk_weights, handle, caller, "rows")
    experts = call.shape.local_experts * (1 if call.placement.mesh is None else call.group.size)
    check_array(caller, "matrices", matrices)
    expected = (experts, rows.shape[-1])
    if len(matrices.shape) != 3 or matrices.shape[:2] != expected or matrices.shape[2] == 0:
        raise ValueError(
            f"{caller}: matrices has shape {matrices.shape}; it must be [{expected[0]}, {expected[1]}, width]: for "
            "each expert one with as many rows as rows are wide."
        )
    check_matrix_dtype(caller, matrices, "rows", rows)
    IMPLEMENTATIONS[call.implementation].check_rows(call, caller, "matrices", matrices)
    check_mesh_of_plain_jax(call, caller, {"rows": rows, "matrices": matrices}, products=True, takes_handle=True)
    return call


def _check_place(caller: str, call: ExchangeCall) -> None:
    """Raises where `shard_map` was entered for one of dispatch and combine by the user, for the other by us, or where
    the mesh is another one.
    """
    context, placement = jax.sharding.get_abstract_mesh(), call.placement
    if placement.mesh is None:
        names = tuple(name for name in call.group.axis_names if name not in context.manual_axes)
        if names:
            raise ValueError(
                f"{caller}: the handle was made inside a shard_map over {call.group.axis_names}, and mesh axes {names} "
                "are not manual here. Call combine in a shard_map over the same axes, or dispatch outside of it."
            )
        # Also of as many ranks in all: their numbers, and with them what an array's shards are, follow from each size.
        if any(context.shape.get(name, size) != size for name, size in call.axis_sizes):
            raise ValueError(
                f"{caller}: the handle was made inside a shard_map over a mesh of {dict(call.axis_sizes)}, and this "
                f"one is over {dict(context.shape)}: ranks lie otherwise in it. Call combine in a shard_map over axes "
                "of the same sizes."
            )
        return
    if context.manual_axes:
        raise ValueError(
            f"{caller}: the handle was made outside of shard_map, of the rows of all ranks, and this is inside of one "
            f"over {tuple(context.manual_axes)}. Call combine outside too, or dispatch inside of it."
        )
    made_on = placement.mesh if isinstance(placement.mesh, AbstractMesh) else placement.mesh.abstract_mesh
    if made_on != context and (isinstance(placement.mesh, AbstractMesh) or not context.empty):
        raise ValueError(
            f"{caller}: the handle was made for the mesh {made_on}, and {'none' if context.empty else context} is set. "
            "Call dispatch and combine under the same mesh."
        )
