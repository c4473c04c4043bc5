"""A product with a dispatch before it, or a combine after it, and the gradients of both.

    rows = dispatch(x) W                          dx = combine(drows W^T)             dW = dispatch(x)^T drows
    y = combine(weights * (h W))                  dh = weights * (dispatch(dy) W^T)   dW = (weights * h)^T dispatch(dy)
                                                  dweights[slot] = <h[row], (dispatch(dy) W^T)[row]>

An implementation that has both as one kernel each computes dx and dh by the other one. Others are differentiated by way
of `gradients.py` and `products.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.exchange import gradients, products, xla
from jaxmoe.exchange.base import Arrived, ExchangeCall, Implementation, Routes, is_row
from jaxmoe.formats import at_least_float32
from jaxmoe.guard import not_mapped, reverse_mode_only


def dispatch_matmul(
    implementation: Implementation,
    call: ExchangeCall,
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    matrices: Float[Array, "experts hidden width"],
) -> Arrived:
    """Returns what arrives, each row times the matrix of its expert."""
    x, topk_ids, matrices = gradients.vary(call, (x, topk_ids, matrices))
    x, matrices = reverse_mode_only((x, matrices), "dispatch_matmul")
    if implementation.send_matmul is not None:
        return _send(implementation, call, x, topk_ids, matrices)
    arrived, _ = gradients.dispatch(implementation, call, x, topk_ids, "dispatch_matmul")
    multiplied: Any = products.times(call, arrived.rows, matrices, arrived.rows_per_expert)
    # Grouped products have no gradients under jax.vmap, and JAX would say so in its own words.
    return arrived._replace(rows=not_mapped(_somebodys(multiplied, arrived.routes), "dispatch_matmul"))


def matmul_combine(
    implementation: Implementation,
    call: ExchangeCall,
    rows: Float[Array, "rows inner"],
    matrices: Float[Array, "experts inner width"],
    weights: Float[Array, "tokens top_k"] | None,
    route: tuple[Routes, Int[Array, "local_experts"], Int[Array, "tokens top_k"]],
) -> Float[Array, "tokens width"]:
    """Returns the (weighted) sum of each token's rows times the matrices of their experts.

    `route` has the routes of the dispatch, the rows of each expert, and the ids.
    """
    rows, matrices, weights, route = gradients.vary(call, (rows, matrices, weights, route))
    # All at once (guard.py). JAX differentiates with respect to weights where there is no `pull_weighted`.
    guarded = (rows, matrices, weights if implementation.pull_weighted else None)
    rows, matrices, guarded_weights = reverse_mode_only(guarded, "matmul_combine")
    weights = weights if guarded_weights is None else guarded_weights
    if implementation.matmul_add_up is not None:
        return _add_up(implementation, call, rows, matrices, weights, route)
    routes, rows_per_expert, _ = route
    rows = _somebodys(rows, routes)
    outputs: Any = products.times(call, rows, matrices, rows_per_expert)
    y = gradients.combine(implementation, call, outputs, weights, routes, "matmul_combine")
    return not_mapped(y, "matmul_combine")


def _somebodys(rows: Float[Array, "rows width"], routes: Routes) -> Float[Array, "rows width"]:
    """Rows, and gradients of them, without what the caller has left in those that are nobody's."""
    return jnp.where(is_row(routes.row_sources)[:, None], rows, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, topk_ids: jax.Array, matrices: jax.Array
) -> Arrived:
    return _send_fwd(implementation, call, x, topk_ids, matrices)[0]


def _send_fwd(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, topk_ids: jax.Array, matrices: jax.Array
) -> tuple[Arrived, Any]:
    # As in `_add_up_fwd`.
    assert implementation.send_matmul is not None
    arrived = implementation.send_matmul(call, x, topk_ids, matrices)
    return arrived, (x, matrices, arrived.routes, arrived.rows_per_expert)


def _send_bwd(implementation: Implementation, call: ExchangeCall, saved: Any, gradient: Arrived) -> tuple[Any, ...]:
    x, matrices, routes, rows_per_expert = saved
    assert implementation.pull is not None
    assert implementation.matmul_add_up is not None
    drows = not_mapped(gradient.rows, "dispatch_matmul")
    dx = implementation.matmul_add_up(call, drows, matrices.swapaxes(1, 2), None, routes, rows_per_expert)
    x_of_row, drows = implementation.pull(call, x, routes), _somebodys(drows, routes)
    dmatrices = products.sums_over_rows(call, x_of_row, drows, rows_per_expert)
    return dx, gradients.of_integers(routes.slot_rows), dmatrices.astype(matrices.dtype)


_send.defvjp(_send_fwd, _send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_up(
    implementation: Implementation,
    call: ExchangeCall,
    rows: jax.Array,
    matrices: jax.Array,
    weights: jax.Array | None,
    route: Any,
) -> jax.Array:
    return _add_up_fwd(implementation, call, rows, matrices, weights, route)[0]


def _add_up_fwd(
    implementation: Implementation,
    call: ExchangeCall,
    rows: jax.Array,
    matrices: jax.Array,
    weights: jax.Array | None,
    route: Any,
) -> tuple[jax.Array, Any]:
    # The sums here, and the function itself by way of this one: of a custom_vjp in here a second derivative would say
    # nothing but that it has none.
    assert implementation.matmul_add_up is not None
    routes, rows_per_expert, _ = route
    y = implementation.matmul_add_up(call, rows, matrices, weights, routes, rows_per_expert)
    return y, (rows, matrices, weights, route)


def _add_up_bwd(implementation: Implementation, call: ExchangeCall, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    rows, matrices, weights, route = saved
    routes, rows_per_expert, ids = route
    assert implementation.pull is not None
    assert implementation.send_matmul is not None
    dy = not_mapped(dy, "matmul_combine")
    # The order of rows follows from the ids, so these are the rows of the dispatch.
    drows, dweights = implementation.send_matmul(call, dy, ids, matrices.swapaxes(1, 2)).rows, None
    dy_of_row, rows = implementation.pull(call, dy, routes), _somebodys(rows, routes)
    if weights is not None:
        wide = at_least_float32(rows.dtype)
        wide_drows, wide_rows = drows.astype(wide), rows.astype(wide)
        dweights = xla.sums_of_slots(call, (wide_drows * wide_rows).sum(-1), routes).astype(weights.dtype)
        weight = xla.weights_of_rows(call, weights, routes).astype(wide)
        drows, rows = (weight * wide_drows).astype(rows.dtype), (weight * wide_rows).astype(rows.dtype)
    dmatrices = products.sums_over_rows(call, rows, dy_of_row, rows_per_expert).astype(matrices.dtype)
    return drows, dmatrices, dweights, jax.tree.map(gradients.of_integers, route)


_add_up.defvjp(_add_up_fwd, _add_up_bwd)
