"""Dispatch and combine as each other's transpose, written once for every implementation.

    rows = dispatch(x)                   dx = sum of drows over the slots of each token
    y = combine(outputs, weights)        doutputs = dispatch of dy, each row times its slot's weight
                                         dweights[slot] = <dy[token], outputs[row]>

An implementation without `pull` and `pull_weighted` is differentiated by JAX.
"""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.exchange.base import Arrived, ExchangeCall, Implementation, Routes
from jaxmoe.guard import not_mapped
from jaxmoe.quantization import dequantize_rows
from jaxmoe.sharding import vary_alike


def dispatch(
    implementation: Implementation,
    call: ExchangeCall,
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
) -> tuple[Arrived, Float[Array, "rows hidden"] | None]:
    """Returns what arrives and, where that has 8 bits, the same decoded, which is differentiable."""
    x, topk_ids = vary(call, (x, topk_ids))
    if call.precision is not None:
        arrived: Any = _send_in_8_bits(implementation, call, x, topk_ids)
        decoded: Any = _decode(implementation, call, x, jax.lax.stop_gradient(arrived))
        return arrived, decoded
    if implementation.pull is None:
        return implementation.send(call, x, topk_ids), None
    return _send(implementation, call, x, topk_ids), None


def combine(
    implementation: Implementation,
    call: ExchangeCall,
    outputs: Float[Array, "rows width"],
    weights: Float[Array, "tokens top_k"] | None,
    routes: Routes,
) -> Float[Array, "tokens width"]:
    """Returns the sum of each token's rows, times the weights of its slots where there are any."""
    outputs, weights, routes = vary(call, (outputs, weights, routes))
    if implementation.pull_weighted is None:
        return implementation.add_up(call, outputs, weights, routes)
    return _add_up(implementation, call, outputs, weights, routes)


def vary(call: ExchangeCall, tree: Any) -> Any:
    """Casts arrays to vary over all mesh axes that any of them varies over, and over those of the group.

    A rank that is given the same tokens as its peers sends them too.
    """
    return vary_alike((tree, call.group.index()))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(implementation: Implementation, call: ExchangeCall, x: jax.Array, topk_ids: jax.Array) -> Arrived:
    return implementation.send(call, x, topk_ids)


def _send_fwd(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, topk_ids: jax.Array
) -> tuple[Arrived, Routes]:
    arrived = implementation.send(call, x, topk_ids)
    return arrived, arrived.routes


def _send_bwd(
    implementation: Implementation, call: ExchangeCall, routes: Routes, gradients: Arrived
) -> tuple[Any, Any]:
    drows = not_mapped(gradients.rows, "dispatch")
    return implementation.add_up(call, drows, None, routes), of_integers(routes.slot_rows)


_send.defvjp(_send_fwd, _send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send_in_8_bits(implementation: Implementation, call: ExchangeCall, x: jax.Array, topk_ids: jax.Array) -> Arrived:
    return implementation.send(call, x, topk_ids)


def _send_in_8_bits_fwd(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, topk_ids: jax.Array
) -> tuple[Arrived, None]:
    return implementation.send(call, x, topk_ids), None


def _send_in_8_bits_bwd(*_: Any) -> Any:
    raise TypeError(
        "dispatch: this asks for gradients with respect to rows in 8 bits, which JAX would round to 8 bits too. "
        "Compute with dispatched.wide_rows, whose gradient is that without rounding; or take dispatched.rows and "
        "dispatched.scales for constants, by jax.lax.stop_gradient."
    )


_send_in_8_bits.defvjp(_send_in_8_bits_fwd, _send_in_8_bits_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _decode(implementation: Implementation, call: ExchangeCall, x: jax.Array, arrived: Arrived) -> jax.Array:
    """The rows that were sent in 8 bits, in the dtype of x: as if a function of x that rounds nothing."""
    assert arrived.scales is not None
    return dequantize_rows(arrived.rows, arrived.scales, x.dtype)


def _decode_fwd(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, arrived: Arrived
) -> tuple[jax.Array, Routes]:
    return _decode(implementation, call, x, arrived), arrived.routes


def _decode_bwd(
    implementation: Implementation, call: ExchangeCall, routes: Routes, drows: jax.Array
) -> tuple[Any, Any]:
    return implementation.add_up(call, not_mapped(drows, "dispatch"), None, routes), None


_decode.defvjp(_decode_fwd, _decode_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_up(
    implementation: Implementation, call: ExchangeCall, outputs: jax.Array, weights: jax.Array | None, routes: Routes
) -> jax.Array:
    return implementation.add_up(call, outputs, weights, routes)


def _add_up_fwd(
    implementation: Implementation, call: ExchangeCall, outputs: jax.Array, weights: jax.Array | None, routes: Routes
) -> tuple[jax.Array, Any]:
    # Without weights nothing of the outputs is kept.
    saved = (None if weights is None else (weights, outputs)), routes
    return implementation.add_up(call, outputs, weights, routes), saved


def _add_up_bwd(implementation: Implementation, call: ExchangeCall, saved: Any, dy: jax.Array) -> Any:
    weights_and_outputs, routes = saved
    dy = not_mapped(dy, "combine")
    if weights_and_outputs is None:
        assert implementation.pull is not None
        doutputs, dweights = implementation.pull(call, dy, routes), None
    else:
        assert implementation.pull_weighted is not None
        weights, outputs = weights_and_outputs
        doutputs, dweights = implementation.pull_weighted(call, dy, weights, outputs, routes)
    return doutputs, dweights, jax.tree.map(of_integers, routes)


_add_up.defvjp(_add_up_fwd, _add_up_bwd)


def of_integers(array: jax.Array) -> np.ndarray:
    """What JAX takes for the gradient of integers."""
    return np.zeros(array.shape, jax.dtypes.float0)
