"""`dispatch_matmul` and `matmul_combine`: the two halves of a layer, around activations of the caller's own.

`api.py` says how such functions are called; `matmul_gradients.py` has what runs on a rank.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Integer

from jaxmoe.exchange import IMPLEMENTATIONS, gradients, matmul_gradients
from jaxmoe.exchange.api import Tokens, dispatched, flat_tokens, nothing
from jaxmoe.exchange.base import ExchangeCall, Routes
from jaxmoe.exchange.check import DispatchOptions, check_dispatch
from jaxmoe.exchange.check_combine import check_matmul_combine
from jaxmoe.exchange.entry import entered
from jaxmoe.exchange.handle import Dispatched, Handle
from jaxmoe.guard import not_mapped
from jaxmoe.options import ImplementationName, as_jax
from jaxmoe.routing.router import Routing


def dispatch_matmul(
    x: Float[Array, "*batch hidden"],
    topk_ids: Integer[Array, "*batch top_k"] | Routing,
    matrices: Float[Array, "experts hidden width"],
    *,
    axis_name: str | Sequence[str] | None = "expert",
    capacity: int | None = None,
    alignment: int = 1,
    per_expert: bool = False,
    data_axes: str | Sequence[str] = (),
    token_valid: Bool[Array, "*batch"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    implementation: ImplementationName | None = None,
) -> Dispatched:
    """Sends every token to the ranks of its experts and multiplies it with the matrix of each.

    The first half of a layer, whose activation is yours: `matmul_combine` is the second half, and any JAX may stand in
    between. What `dispatch(x, ...)` and a grouped product of its rows give, but as `"megakernel"` in one kernel on each
    GPU, which multiplies while rows arrive. Gate and up are one array of matrices, `experts.fuse().w_gate` and
    `.w_up` side by side. Differentiable in `x` and `matrices`; sums have float32 and are rounded once.

    Called as `dispatch` is, inside `shard_map` or outside.

    Args:
      x: tokens, as of `dispatch`.
      topk_ids: the same.
      matrices: of the dtype of `x`; inside `shard_map` those of this rank's experts, outside those of all, split over
        `axis_name`.
      axis_name: the same as of `dispatch`.
      capacity: the same.
      alignment: the same.
      per_expert: the same.
      data_axes: the same.
      token_valid: the same.
      mesh: the same.
      implementation: the same.

    Returns:
      `Dispatched`, whose `rows` are the products `[rows, width]`, or `[local_experts, capacity, width]`.

    Raises:
      ValueError: shapes, sizes or mesh axes that do not go together; unknown implementation.
      TypeError: wrong types or dtypes.
      NotImplementedError: under `jax.vmap` or `jax.jvp`; a named implementation that does not exist here.

    >>> import jax.numpy as jnp, jaxmoe
    >>> x, topk_ids = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[2, 0], [0, -1], [2, 2]])
    >>> matrices = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    >>> arrived = jaxmoe.dispatch_matmul(x, topk_ids, matrices, axis_name=None)
    >>> arrived.rows[:, 0].tolist(), arrived.rows_per_expert.tolist()
    ([1.0, 2.0, 100.0, 300.0, 300.0, 0.0], [2, 0, 3])
    """
    x, topk_ids, matrices, token_valid = as_jax((x, topk_ids, matrices, token_valid))
    options = DispatchOptions(
        None, axis_name, capacity, alignment, per_expert, None, data_axes, mesh, implementation, "dispatch_matmul"
    )
    call = check_dispatch(x, topk_ids, token_valid, options, matrices)
    ids = topk_ids.topk_ids if isinstance(topk_ids, Routing) else topk_ids
    arrays = Tokens(x, ids, token_valid), matrices
    return _compiled_dispatch(call)(*jax.tree.map(functools.partial(not_mapped, caller="dispatch_matmul"), arrays))


def matmul_combine(
    rows: Float[Array, "*places inner"],
    matrices: Float[Array, "experts inner width"],
    topk_weights: Float[Array, "*batch top_k"] | None,
    handle: Handle,
) -> Float[Array, "*batch width"]:
    """Multiplies every row with the matrix of its expert and returns the weighted sum of each token's products.

    The second half of a layer: what a grouped product and `combine` give, but as `"megakernel"` in one kernel on each
    GPU, which sends products while it multiplies. Products are rounded to the dtype of `rows` before they are added up,
    in float32. Differentiable in `rows`, `matrices` and `topk_weights`.

    Args:
      rows: a row for each of `dispatched.rows`, in the same place. What those that are nobody's hold has no effect.
      matrices: of the dtype of `rows`; inside `shard_map` those of this rank's experts, outside those of all, split
        over the `axis_name` of the dispatch.
      topk_weights: as of `combine`.
      handle: of `dispatch_matmul`, or of `dispatch`.

    Returns:
      `y`, in the dtype of `rows`, zero for a token without rows.

    Raises:
      ValueError: shapes that do not go together; a place that is not that of the dispatch.
      TypeError: wrong types or dtypes.
      NotImplementedError: under `jax.vmap` or `jax.jvp`.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> topk_ids, matrices = jnp.array([[0, 1], [1, 2], [2, -1], [0, 1]]), jnp.stack([jnp.eye(2)] * 3)
    >>> arrived = jaxmoe.dispatch_matmul(jnp.ones((4, 2)), topk_ids, matrices, axis_name=None)
    >>> jaxmoe.matmul_combine(arrived.rows, matrices, jnp.full((4, 2), 0.5), arrived.handle)[:, 0].tolist()
    [1.0, 1.0, 0.5, 1.0]
    """
    rows, matrices, topk_weights, handle = as_jax((rows, matrices, topk_weights, handle))
    call = check_matmul_combine(rows, matrices, topk_weights, handle)
    answers = _Answers(
        rows, topk_weights, handle.row_sources, handle.slot_rows, handle.rows_per_expert, handle.topk_ids
    )
    arrays = jax.tree.map(functools.partial(not_mapped, caller="matmul_combine"), (answers, matrices))
    return _compiled_combine(call)(*arrays)


class _Answers(NamedTuple):
    """The arrays of a combine with a product, but for the matrices."""

    rows: Any
    topk_weights: Any
    row_sources: Any
    slot_rows: Any
    rows_per_expert: Any
    topk_ids: Any


@functools.lru_cache(maxsize=1024)
def _compiled_dispatch(call: ExchangeCall) -> Callable[[Tokens, jax.Array], Dispatched]:
    return entered(call, functools.partial(_dispatch_on_rank, call), with_matrices=True)


@functools.lru_cache(maxsize=1024)
def _compiled_combine(call: ExchangeCall) -> Callable[[_Answers, jax.Array], jax.Array]:
    return entered(call, functools.partial(_combine_on_rank, call), with_matrices=True)


def _dispatch_on_rank(call: ExchangeCall, tokens: Tokens, matrices: jax.Array) -> Dispatched:
    x, ids = flat_tokens(call, tokens)
    if call.shape.tokens:
        implementation = IMPLEMENTATIONS[call.implementation]
        arrived = matmul_gradients.dispatch_matmul(implementation, call, x, ids, matrices)
    else:
        arrived, _ = nothing(call, x, ids, matrices.shape[2])
    return dispatched(call, arrived, ids, tokens.x.shape[:-1])


def _combine_on_rank(call: ExchangeCall, answers: _Answers, matrices: jax.Array) -> jax.Array:
    batch, width, top_k = answers.slot_rows.shape[:-1], matrices.shape[2], call.shape.top_k
    if not call.shape.tokens:
        return gradients.vary(call, (jnp.zeros((*batch, width), answers.rows.dtype), answers, matrices))[0]
    flat = answers.rows.reshape(-1, answers.rows.shape[-1])
    weights = None if answers.topk_weights is None else answers.topk_weights.reshape(-1, top_k)
    routes = Routes(answers.row_sources, answers.slot_rows.reshape(-1, top_k))
    route = routes, answers.rows_per_expert, answers.topk_ids.reshape(-1, top_k)
    implementation = IMPLEMENTATIONS[call.implementation]
    return matmul_gradients.matmul_combine(implementation, call, flat, matrices, weights, route).reshape(*batch, width)
