"""`dispatch` and `combine`: tokens to their experts and back, around whatever computes the experts.

As `moe_layer` does, both work inside `shard_map` on the arrays of a rank, and enter it themselves outside. Everything
is checked first (`check.py`); `gradients.py` makes the two each other's transpose; `__init__.py` has the table of what
runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Integer

from jaxmoe.exchange import IMPLEMENTATIONS, gradients
from jaxmoe.exchange.base import Arrived, ExchangeCall, ExchangePrecision, Routes
from jaxmoe.exchange.check import DispatchOptions, check_dispatch
from jaxmoe.exchange.check_combine import check_combine
from jaxmoe.exchange.entry import entered
from jaxmoe.exchange.handle import Dispatched, Handle
from jaxmoe.guard import not_mapped
from jaxmoe.options import ImplementationName, as_jax
from jaxmoe.routing.router import Routing
from jaxmoe.routing.stats import int32_ids


def dispatch(
    x: Float[Array, "*batch hidden"],
    topk_ids: Integer[Array, "*batch top_k"] | Routing,
    *,
    num_experts: int | None = None,
    axis_name: str | Sequence[str] | None = "expert",
    capacity: int | None = None,
    alignment: int = 1,
    per_expert: bool = False,
    precision: ExchangePrecision | None = None,
    data_axes: str | Sequence[str] = (),
    token_valid: Bool[Array, "*batch"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    implementation: ImplementationName | None = None,
) -> Dispatched:
    """Sends every token to the ranks of its experts and returns what has arrived, sorted by expert.

    For experts that are computed by something of your own; `combine` brings the answers back. Every slot of every token
    makes a row at its expert: rows lie by local expert, those of an expert by source rank, those of a rank by slot, in
    every implementation. Rows that are nobody's are zero. Differentiable in `x`.

    Inside `shard_map` with `axis_name` manual, all arrays are this rank's. Outside, with a mesh set by `jax.set_mesh`
    or passed as `mesh`, it enters `shard_map` itself: tokens are split on their first dimension over `(*data_axes,
    *axis_name)`, and results are those of all ranks one behind the other, split over the same axes.

    Args:
      x: tokens, bfloat16, float16, float32, or float64 on CPU; at least two dimensions.
      topk_ids: experts of each token, any integer type. -1 is an unused slot, and so is every other value outside
        `[0, num_experts)`. A token may name an expert twice and is then sent twice. Or a `jaxmoe.Routing`.
      num_experts: experts of all ranks; may be left out with a `Routing`.
      axis_name: mesh axis, or axes, over which the experts are spread; `None`: one rank has them all.
      capacity: rows of a rank, or with `per_expert` of each expert. What finds no room is dropped and counted: the last
        rows in the order above. `None`: as many as there are slots on all ranks (and alignment), so nothing is dropped.
      alignment: the first row of each expert is a multiple of it; the rows between are zero. Not used with
        `per_expert`.
      per_expert: rows are `[local_experts, capacity, hidden]`, each expert's from the first one on.
      precision: `"fp8"`: tokens are rounded to `float8_e4m3fn` before they travel, with a float32 scale for each 128
        columns; `"fp8-e8m0"`: with scales that are powers of two. Gradients are those without rounding, of
        `dispatched.wide_rows`.
      data_axes: the other mesh axes over which tokens are split, where it enters `shard_map`.
      token_valid: `False` for padding: such a token is not sent, whatever it holds.
      mesh: where none is set by `jax.set_mesh`.
      implementation: `"xla"` (portable), `"reference"` (dense: the truth, slow), `"megakernel"` (compiled kernels, on
        GPUs), or `None` to choose.

    Returns:
      `Dispatched`: rows, how many each expert has, and the handle for `combine`.

    Raises:
      ValueError: shapes, sizes or mesh axes that do not go together; unknown precision or implementation.
      TypeError: wrong types or dtypes; gradients with respect to rows in 8 bits.
      NotImplementedError: under `jax.vmap`; under `jax.jvp`, but for `"reference"` without a precision; a named
        implementation that does not exist here.

    >>> import jax.numpy as jnp, jaxmoe
    >>> x, topk_ids = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[2, 0], [0, -1], [2, 2]])
    >>> dispatched = jaxmoe.dispatch(x, topk_ids, num_experts=3, axis_name=None, alignment=2, capacity=8)
    >>> dispatched.rows[:, 0].tolist(), dispatched.rows_per_expert.tolist(), dispatched.group_sizes.tolist()
    ([1.0, 2.0, 1.0, 3.0, 3.0, 0.0, 0.0, 0.0], [2, 0, 3], [2, 0, 4])
    >>> dispatched.handle.source_token.tolist()
    [0, 1, 0, 2, 2, -1, -1, -1]
    """
    x, topk_ids, token_valid = as_jax((x, topk_ids, token_valid))
    options = DispatchOptions(
        num_experts, axis_name, capacity, alignment, per_expert, precision, data_axes, mesh, implementation
    )
    call = check_dispatch(x, topk_ids, token_valid, options)
    ids = topk_ids.topk_ids if isinstance(topk_ids, Routing) else topk_ids
    arrays = jax.tree.map(functools.partial(not_mapped, caller="dispatch"), Tokens(x, ids, token_valid))
    return _compiled_dispatch(call)(arrays)


def combine(
    outputs: Float[Array, "*places width"],
    topk_weights: Float[Array, "*batch top_k"] | None,
    handle: Handle,
) -> Float[Array, "*batch width"]:
    """Brings every row back to its token and returns the weighted sum of each token's rows.

    `y[t] = sum_k topk_weights[t, k] * outputs[slot_rows[t, k]]` over the slots whose row was not dropped, where
    `slot_rows` is that of the handle. Sums have float32 and are rounded once to the dtype of `outputs`. Differentiable
    in `outputs` and `topk_weights`.

    Called as `dispatch` was: inside a `shard_map` over the same axes, or outside under the same mesh.

    Args:
      outputs: a row for each of `dispatched.rows`, in the same place; another width or dtype than x had will do.
      topk_weights: float32 (or float64 with float64 outputs), of the shape of the ids; `None`: each is one.
      handle: of the dispatch.

    Returns:
      `y`, in the dtype of `outputs`, zero for a token without rows.

    Raises:
      ValueError: shapes that do not go together; a place that is not that of the dispatch.
      TypeError: wrong types or dtypes.
      NotImplementedError: under `jax.vmap`; under `jax.jvp`, but for a handle of `"reference"`.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> topk_ids, matrices = jnp.array([[0, 1], [1, 2], [2, -1], [0, 1]]), jnp.stack([jnp.eye(2)] * 3)
    >>> dispatched = jaxmoe.dispatch(jnp.ones((4, 2)), topk_ids, num_experts=3, axis_name=None)
    >>> outputs = jax.lax.ragged_dot(dispatched.rows, matrices, dispatched.group_sizes)
    >>> jaxmoe.combine(outputs, jnp.full((4, 2), 0.5), dispatched.handle)[:, 0].tolist()
    [1.0, 1.0, 0.5, 1.0]
    """
    outputs, topk_weights, handle = as_jax((outputs, topk_weights, handle))
    call = check_combine(outputs, topk_weights, handle)
    arrays = Answers(outputs, topk_weights, handle.row_sources, handle.slot_rows)
    return _compiled_combine(call)(jax.tree.map(functools.partial(not_mapped, caller="combine"), arrays))


class Tokens(NamedTuple):
    """The arrays of a dispatch."""

    x: Any
    topk_ids: Any
    token_valid: Any


class Answers(NamedTuple):
    """The arrays of a combine."""

    outputs: Any
    topk_weights: Any
    row_sources: Any
    slot_rows: Any


@functools.lru_cache(maxsize=1024)
def _compiled_dispatch(call: ExchangeCall) -> Callable[[Tokens], Dispatched]:
    """One function per kind of call, so that calling it again outside of any `jit` finds it compiled."""
    return entered(call, functools.partial(_dispatch_on_rank, call))


@functools.lru_cache(maxsize=1024)
def _compiled_combine(call: ExchangeCall) -> Callable[[Answers], jax.Array]:
    return entered(call, functools.partial(_combine_on_rank, call))


def _dispatch_on_rank(call: ExchangeCall, tokens: Tokens) -> Dispatched:
    x, ids = flat_tokens(call, tokens)
    if call.shape.tokens:
        arrived, decoded = gradients.dispatch(IMPLEMENTATIONS[call.implementation], call, x, ids)
    else:
        arrived, decoded = nothing(call, x, ids)
    return dispatched(call, arrived, ids, tokens.x.shape[:-1], decoded)


def flat_tokens(call: ExchangeCall, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Returns x and the ids of a rank as implementations take them."""
    shape = call.shape
    ids = int32_ids(tokens.topk_ids.reshape(-1, shape.top_k))
    used = (ids >= 0) & (ids < shape.num_experts)
    if tokens.token_valid is not None:
        used &= tokens.token_valid.reshape(-1, 1)
    return tokens.x.reshape(-1, shape.hidden), jnp.where(used, ids, -1)


def dispatched(
    call: ExchangeCall, arrived: Arrived, ids: jax.Array, batch: tuple[int, ...], decoded: jax.Array | None = None
) -> Dispatched:
    """Returns what has arrived as the user gets it."""
    shape, places = call.shape, (call.room.rows,)
    if call.room.capacity_per_expert:
        places = (shape.local_experts, call.room.capacity_per_expert)
    rows, scales, decoded = jax.tree.map(
        lambda array: array.reshape(*places, array.shape[-1]), (arrived.rows, arrived.scales, decoded)
    )
    slot_rows, ids = (array.reshape(*batch, shape.top_k) for array in (arrived.routes.slot_rows, ids))
    plain = dataclasses.replace(call, multiprocessors=None)  # a pytree equal to that of a dispatch that is not started
    handle = Handle(arrived.routes.row_sources, slot_rows, arrived.rows_per_expert, ids, plain)
    return Dispatched(rows, scales, arrived.rows_per_expert, arrived.dropped_rows, handle, decoded)


def nothing(
    call: ExchangeCall, x: jax.Array, ids: jax.Array, width: int | None = None
) -> tuple[Arrived, jax.Array | None]:
    """What arrives where no rank has any token, in rows of `width`: no implementation needs to know of it."""
    shape, rows = call.shape, call.room.rows
    zeros = jnp.zeros((rows, shape.hidden if width is None else width), x.dtype)
    scales = decoded = None
    if call.precision is not None:
        decoded, zeros = zeros, zeros.astype(jnp.float8_e4m3fn)
        scales = jnp.zeros((rows, -(-shape.hidden // 128)), jnp.float32)
    none = jnp.zeros(shape.local_experts, jnp.int32)
    arrived = Arrived(zeros, scales, none, none, Routes(jnp.full(rows, -1, jnp.int32), ids))
    return gradients.vary(call, (arrived, decoded, x))[:2]


def _combine_on_rank(call: ExchangeCall, answers: Answers) -> jax.Array:
    batch, width = answers.slot_rows.shape[:-1], answers.outputs.shape[-1]
    if not call.shape.tokens:
        return gradients.vary(call, (jnp.zeros((*batch, width), answers.outputs.dtype), answers))[0]
    y = gradients.combine(IMPLEMENTATIONS[call.implementation], call, *flat_answers(call, answers))
    return y.reshape(*batch, width)


def flat_answers(call: ExchangeCall, answers: Answers) -> tuple[jax.Array, jax.Array | None, Routes]:
    """Returns outputs, weights and routes of a rank as implementations take them."""
    outputs, weights, row_sources, slot_rows = answers
    flat = outputs.reshape(-1, outputs.shape[-1])
    weights = None if weights is None else weights.reshape(-1, call.shape.top_k)
    return flat, weights, Routes(row_sources, slot_rows.reshape(-1, call.shape.top_k))
