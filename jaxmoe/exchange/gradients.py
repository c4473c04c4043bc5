"""Dispatch and combine as each other's transpose, written once for every implementation.

    rows = dispatch(x)                   dx = sum of drows over the slots of each token
    y = combine(outputs, weights)        doutputs = dispatch of dy, each row times its slot's weight
                                         dweights[slot] = <dy[token], outputs[row]>

An implementation without `pull` and `pull_weighted` is differentiated by JAX, in forward mode too; `caller` is whose
name errors have here, of what the others refuse.
"""

import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.exchange.base import Arrived, ExchangeCall, Implementation, Kept, Routes
from jaxmoe.guard import not_mapped, reverse_mode_only
from jaxmoe.quantization import dequantize_rows
from jaxmoe.sharding import vary_alike


def dispatch(
    implementation: Implementation,
    call: ExchangeCall,
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    caller: str = "dispatch",
) -> tuple[Arrived, Float[Array, "rows hidden"] | None]:
    """Returns what arrives and, where that has 8 bits, the same decoded, which is differentiable."""
    x, topk_ids = vary(call, (x, topk_ids))
    if call.precision is not None:
        x = reverse_mode_only(x, caller)
        arrived: Any = _send_in_8_bits(implementation, call, caller, x, topk_ids)
        decoded: Any = _decode(implementation, call, caller, x, jax.lax.stop_gradient(arrived))
        return arrived, decoded
    if implementation.pull is None:
        return implementation.send(call, x, topk_ids), None
    return _send(implementation, call, caller, reverse_mode_only(x, caller), topk_ids), None


def combine(
    implementation: Implementation,
    call: ExchangeCall,
    outputs: Float[Array, "rows width"],
    weights: Float[Array, "tokens top_k"] | None,
    routes: Routes,
    caller: str = "combine",
) -> Float[Array, "tokens width"]:
    """Returns the sum of each token's rows, times the weights of its slots where there are any."""
    outputs, weights, routes = vary(call, (outputs, weights, routes))
    if implementation.pull_weighted is None:
        return implementation.add_up(call, outputs, weights, routes)
    outputs, weights = reverse_mode_only((outputs, weights), caller)
    return _add_up(implementation, call, caller, outputs, weights, routes)


def start_dispatch(
    implementation: Implementation,
    call: ExchangeCall,
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
) -> tuple[Arrived, Kept]:
    """Starts `dispatch`: returns what `finish_dispatch` takes beside x, whose gradient it has."""
    if not runs_beside(implementation, call):
        if call.precision is None:
            return dispatch(implementation, call, x, topk_ids, "start_dispatch")[0], ()
        x, topk_ids = vary(call, (reverse_mode_only(x, "start_dispatch"), topk_ids))
        sent: Any = _send_in_8_bits(implementation, call, "start_dispatch", x, topk_ids)
        return sent, ()
    assert implementation.start_send is not None
    return implementation.start_send(call, *vary(call, jax.lax.stop_gradient((x, topk_ids))))


def finish_dispatch(
    implementation: Implementation,
    call: ExchangeCall,
    x: Float[Array, "tokens hidden"],
    started: tuple[Arrived, Kept],
) -> tuple[Arrived, Float[Array, "rows hidden"] | None]:
    """Returns what `dispatch` does, of what was started."""
    x, (arrived, kept) = vary(call, x), started
    if kept or call.precision is not None:
        x = reverse_mode_only(x, "start_dispatch")
    if kept:
        arrived = _finish_send(implementation, call, x, arrived, kept)
    if call.precision is None:
        return arrived, None
    decoded: Any = _decode(implementation, call, "start_dispatch", x, jax.lax.stop_gradient(arrived))
    return arrived, decoded


def start_combine(
    implementation: Implementation,
    call: ExchangeCall,
    outputs: Float[Array, "rows width"],
    weights: Float[Array, "tokens top_k"] | None,
    routes: Routes,
) -> tuple[Float[Array, "tokens width"], Kept]:
    """Starts `combine`: returns what `finish_combine` takes beside the other arrays, whose gradients it has."""
    if not runs_beside(implementation, call):
        return combine(implementation, call, outputs, weights, routes, "start_combine"), ()
    assert implementation.start_add_up is not None
    return implementation.start_add_up(call, *vary(call, jax.lax.stop_gradient((outputs, weights, routes))))


def finish_combine(
    implementation: Implementation,
    call: ExchangeCall,
    outputs: Float[Array, "rows width"],
    weights: Float[Array, "tokens top_k"] | None,
    routes: Routes,
    started: tuple[Float[Array, "tokens width"], Kept],
) -> Float[Array, "tokens width"]:
    """Returns what `combine` does, of what was started."""
    y, kept = started
    if not kept:
        return y
    outputs, weights, routes = vary(call, (outputs, weights, routes))
    outputs, weights = reverse_mode_only((outputs, weights), "start_combine")
    return _finish_add_up(implementation, call, outputs, weights, routes, y, kept)


def runs_beside(implementation: Implementation, call: ExchangeCall) -> bool:
    """Whether a start returns before its kernel has ended: on GPUs."""
    return implementation.finish is not None and call.platform == "gpu"


def vary(call: ExchangeCall, tree: Any) -> Any:
    """Casts arrays to vary over all mesh axes that any of them varies over, and over those of the group.

    A rank that is given the same tokens as its peers sends them too.
    """
    return vary_alike((tree, call.group.index()))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _send(
    implementation: Implementation, call: ExchangeCall, caller: str, x: jax.Array, topk_ids: jax.Array
) -> Arrived:
    return implementation.send(call, x, topk_ids)


def _send_fwd(
    implementation: Implementation, call: ExchangeCall, caller: str, x: jax.Array, topk_ids: jax.Array
) -> tuple[Arrived, Routes]:
    arrived = implementation.send(call, x, topk_ids)
    return arrived, arrived.routes


def _send_bwd(
    implementation: Implementation, call: ExchangeCall, caller: str, routes: Routes, gradients: Arrived
) -> tuple[Any, Any]:
    drows = not_mapped(gradients.rows, caller)
    return implementation.add_up(call, drows, None, routes), of_integers(routes.slot_rows)


_send.defvjp(_send_fwd, _send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _send_in_8_bits(
    implementation: Implementation, call: ExchangeCall, caller: str, x: jax.Array, topk_ids: jax.Array
) -> Arrived:
    return implementation.send(call, x, topk_ids)


def _send_in_8_bits_fwd(
    implementation: Implementation, call: ExchangeCall, caller: str, x: jax.Array, topk_ids: jax.Array
) -> tuple[Arrived, None]:
    return implementation.send(call, x, topk_ids), None


def _send_in_8_bits_bwd(implementation: Implementation, call: ExchangeCall, caller: str, *_: Any) -> Any:
    raise TypeError(
        f"{caller}: this asks for gradients with respect to rows in 8 bits, which JAX would round to 8 bits too. "
        "Compute with dispatched.wide_rows, whose gradient is that without rounding; or take dispatched.rows and "
        "dispatched.scales for constants, by jax.lax.stop_gradient."
    )


_send_in_8_bits.defvjp(_send_in_8_bits_fwd, _send_in_8_bits_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _decode(
    implementation: Implementation, call: ExchangeCall, caller: str, x: jax.Array, arrived: Arrived
) -> jax.Array:
    """The rows that were sent in 8 bits, in the dtype of x: as if a function of x that rounds nothing."""
    return _decoded(x, arrived)


def _decoded(x: jax.Array, arrived: Arrived) -> jax.Array:
    assert arrived.scales is not None
    return dequantize_rows(arrived.rows, arrived.scales, x.dtype)


def _decode_fwd(
    implementation: Implementation, call: ExchangeCall, caller: str, x: jax.Array, arrived: Arrived
) -> tuple[jax.Array, Routes]:
    return _decoded(x, arrived), arrived.routes


def _decode_bwd(
    implementation: Implementation, call: ExchangeCall, caller: str, routes: Routes, drows: jax.Array
) -> tuple[Any, Any]:
    return implementation.add_up(call, not_mapped(drows, caller), None, routes), None


_decode.defvjp(_decode_fwd, _decode_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _add_up(
    implementation: Implementation,
    call: ExchangeCall,
    caller: str,
    outputs: jax.Array,
    weights: jax.Array | None,
    routes: Routes,
) -> jax.Array:
    return implementation.add_up(call, outputs, weights, routes)


def _add_up_fwd(
    implementation: Implementation,
    call: ExchangeCall,
    caller: str,
    outputs: jax.Array,
    weights: jax.Array | None,
    routes: Routes,
) -> tuple[jax.Array, Any]:
    # Without weights nothing of the outputs is kept.
    saved = (None if weights is None else (weights, outputs)), routes
    return implementation.add_up(call, outputs, weights, routes), saved


def _add_up_bwd(implementation: Implementation, call: ExchangeCall, caller: str, saved: Any, dy: jax.Array) -> Any:
    weights_and_outputs, routes = saved
    dy = not_mapped(dy, caller)
    if weights_and_outputs is None:
        assert implementation.pull is not None
        doutputs, dweights = implementation.pull(call, dy, routes), None
    else:
        assert implementation.pull_weighted is not None
        weights, outputs = weights_and_outputs
        doutputs, dweights = implementation.pull_weighted(call, dy, weights, outputs, routes)
    return doutputs, dweights, jax.tree.map(of_integers, routes)


_add_up.defvjp(_add_up_fwd, _add_up_bwd)


# What is started is not differentiated. Its finish is, as if it were the whole: nothing else may use what is not there
# yet, or XLA would copy it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _finish_send(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, arrived: Arrived, kept: Kept
) -> Arrived:
    assert implementation.finish is not None
    return implementation.finish(arrived, kept)


def _finish_send_fwd(
    implementation: Implementation, call: ExchangeCall, x: jax.Array, arrived: Arrived, kept: Kept
) -> tuple[Arrived, Routes]:
    finished: Any = _finish_send(implementation, call, x, arrived, kept)
    return finished, finished.routes


def _finish_send_bwd(
    implementation: Implementation, call: ExchangeCall, routes: Routes, gradients: Arrived
) -> tuple[Any, None, None]:
    if call.precision is not None:
        _send_in_8_bits_bwd(implementation, call, "start_dispatch")
    return _send_bwd(implementation, call, "start_dispatch", routes, gradients)[0], None, None


_finish_send.defvjp(_finish_send_fwd, _finish_send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _finish_add_up(
    implementation: Implementation,
    call: ExchangeCall,
    outputs: jax.Array,
    weights: jax.Array | None,
    routes: Routes,
    y: jax.Array,
    kept: Kept,
) -> jax.Array:
    assert implementation.finish is not None
    return implementation.finish(y, kept)


def _finish_add_up_fwd(
    implementation: Implementation,
    call: ExchangeCall,
    outputs: jax.Array,
    weights: jax.Array | None,
    routes: Routes,
    y: jax.Array,
    kept: Kept,
) -> tuple[jax.Array, Any]:
    saved = (None if weights is None else (weights, outputs)), routes
    return _finish_add_up(implementation, call, outputs, weights, routes, y, kept), saved


def _finish_add_up_bwd(implementation: Implementation, call: ExchangeCall, saved: Any, dy: jax.Array) -> Any:
    return *_add_up_bwd(implementation, call, "start_combine", saved, dy), None, None


_finish_add_up.defvjp(_finish_add_up_fwd, _finish_add_up_bwd)


def of_integers(array: jax.Array) -> np.ndarray:
    """What JAX takes for the gradient of integers."""
    return np.zeros(array.shape, jax.dtypes.float0)
