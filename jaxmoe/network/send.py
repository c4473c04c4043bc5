"""A token to the hosts that have one of its experts, once to each, in rounds of bounded size.

Called by `layer.py` for one chunk of tokens. In a round every rank sends each host up to `round_tokens` of the tokens
that it needs, to the rank of its own place there. That host's ranks compute the layer for what has arrived, and the
answers go back. There are as many rounds as the busiest pair of hosts needs, so nothing is dropped.

The tokens of a round are fetched while the one before could be computed: nothing in the loop forbids it, but in a
profile XLA ran them one after the other (docs/performance.md). The backward pass does the same rounds again: it fetches
tokens and gradients of outputs together, and keeps nothing of the forward pass but the inputs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.guard import not_mapped
from jaxmoe.implementations.base import Inputs
from jaxmoe.network.gradients import gradients_like, summed_in_float32, trained_of
from jaxmoe.network.levels import Levels
from jaxmoe.sharding import vary_alike

OnHost = Callable[[Inputs], jax.Array]


class Routes(NamedTuple):
    """Which tokens of this rank go to which host, and when.

    Args:
      order: for each host, the tokens that it needs in their order; behind them, those that it does not.
      counts: how many it needs.
      places: of each token among those that a host needs; -1 where it does not need it.
      rounds: the same on all ranks.
    """

    order: Int[Array, "hosts tokens"]
    counts: Int[Array, " hosts"]
    places: Int[Array, "tokens hosts"]
    rounds: Int[Array, ""]


class _Static(NamedTuple):
    """What is no array, hashable."""

    levels: Levels
    num_experts: int
    round_tokens: int


def run(levels: Levels, num_experts: int, inputs: Inputs, on_host: OnHost) -> Float[Array, "tokens hidden"]:
    """Returns the output for the tokens of this rank; arguments are those of `gather.run`."""
    assert levels.plan.round_tokens is not None
    return _layer(_Static(levels, num_experts, levels.plan.round_tokens), on_host, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _layer(static: _Static, on_host: OnHost, inputs: Inputs) -> jax.Array:
    routes = _routes(static, inputs.topk_ids)

    def work(number: jax.Array, sums: jax.Array, arrived: Inputs) -> jax.Array:
        return sums + _bring_back(static, routes, number, on_host(arrived))

    wide = jnp.promote_types(inputs.x.dtype, jnp.float32)
    sums = _in_rounds(
        routes, lambda number: _fetch(static, routes, number, inputs), work, jnp.zeros_like(inputs.x, wide)
    )
    return sums.astype(inputs.x.dtype)


def _layer_fwd(static: _Static, on_host: OnHost, inputs: Inputs) -> tuple[jax.Array, Inputs]:
    return _layer(static, on_host, inputs), inputs


def _layer_bwd(static: _Static, on_host: OnHost, inputs: Inputs, dy: jax.Array) -> tuple[Inputs]:
    dy = not_mapped(dy).astype(inputs.x.dtype)
    routes = _routes(static, inputs.topk_ids)
    fixed, trained = trained_of(inputs.experts)

    def fetch(number: jax.Array) -> tuple[Inputs, jax.Array]:
        return _fetch(static, routes, number, inputs), _send(static, routes, number, dy)

    def work(number: jax.Array, sums: Any, arrived: tuple[Inputs, jax.Array]) -> Any:
        tokens, dout = arrived

        def layer(x: jax.Array, weights: jax.Array, trained: dict[str, Any]) -> jax.Array:
            return on_host(Inputs(x, tokens.topk_ids, weights, fixed(trained)))

        # Cast here, not ahead of the loop: casts there and back in one computation are dropped by the compiler.
        dx, dweights, dtrained = jax.vjp(layer, tokens.x, tokens.topk_weights, summed_in_float32(trained))[1](dout)
        returned = (_bring_back(static, routes, number, dx), _bring_back(static, routes, number, dweights))
        return jax.tree.map(jnp.add, sums, (*returned, dtrained))

    zeros = (
        jnp.zeros_like(inputs.x, jnp.promote_types(inputs.x.dtype, jnp.float32)),
        jnp.zeros_like(inputs.topk_weights),
        jax.tree.map(jnp.zeros_like, jax.eval_shape(summed_in_float32, trained)),
    )
    dx, dweights, dtrained = _in_rounds(routes, fetch, work, zeros)
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    gradients = gradients_like(
        inputs.experts, jax.tree.map(lambda sum_, array: sum_.astype(array.dtype), dtrained, trained)
    )
    return (Inputs(dx.astype(inputs.x.dtype), no_ids, dweights, gradients),)  # pyright: ignore[reportArgumentType]


_layer.defvjp(_layer_fwd, _layer_bwd)


def _routes(static: _Static, topk_ids: Int[Array, "tokens top_k"]) -> Routes:
    levels = static.levels
    hosts = jnp.arange(levels.hosts, dtype=jnp.int32)
    needs = (levels.ids_on_host(topk_ids[:, None], hosts[:, None], static.num_experts) >= 0).any(-1)
    counts = needs.sum(0, dtype=jnp.int32)
    places = jnp.where(needs, jnp.cumsum(needs, 0, dtype=jnp.int32) - 1, -1)
    order = jnp.argsort(~needs.T, axis=1, stable=True).astype(jnp.int32)
    missing = -order.shape[1] % static.round_tokens  # so that every round has a whole slice of it
    order = jnp.pad(order, ((0, 0), (0, missing)))
    # Launches and collectives of a round take all ranks of all hosts.
    axes = tuple(dict.fromkeys((*levels.across.axis_names, *levels.on_host.axis_names)))
    rounds = jax.lax.pmax(-(-counts.max() // static.round_tokens), axes)
    return Routes(order, counts, places, rounds)


def _sources(
    static: _Static, routes: Routes, number: jax.Array
) -> tuple[Int[Array, "hosts n"], Bool[Array, "hosts n"]]:
    """Returns the tokens that go to each host in a round, and which places of the round are used."""
    start, size = number * static.round_tokens, static.round_tokens
    tokens = jax.lax.dynamic_slice_in_dim(routes.order, start, size, axis=1)
    return tokens, start + jnp.arange(size) < routes.counts[:, None]


def _send(static: _Static, routes: Routes, number: jax.Array, rows: Float[Array, "tokens n"]) -> Float[Array, "all n"]:
    """Sends each host the rows of its tokens of a round; returns what all hosts sent here, in their order."""
    tokens, used = _sources(static, routes, number)
    sent = jnp.where(used[..., None], rows[tokens], 0)
    return _exchange(static, sent)


def _exchange(static: _Static, parts: Array) -> Array:
    """Sends part i of `[hosts, n, ...]` to host i and returns `[hosts * n, ...]` of all hosts."""
    flat = parts.reshape(-1, *parts.shape[2:])
    return static.levels.across.exchange(flat).reshape(flat.shape)


def _fetch(static: _Static, routes: Routes, number: jax.Array, inputs: Inputs) -> Inputs:
    """Sends tokens, ids and routing weights of a round; returns what arrived, ids among the experts of this host."""
    levels = static.levels
    tokens, used = _sources(static, routes, number)
    hosts = jnp.arange(levels.hosts, dtype=jnp.int32)[:, None, None]
    ids = levels.ids_on_host(inputs.topk_ids[tokens], hosts, static.num_experts)
    ids = jnp.where(used[..., None], ids, -1)
    weights = jnp.where(ids >= 0, inputs.topk_weights[tokens], 0)
    x = _send(static, routes, number, inputs.x)
    return inputs._replace(x=x, topk_ids=_exchange(static, ids), topk_weights=_exchange(static, weights))


def _bring_back(
    static: _Static, routes: Routes, number: jax.Array, rows: Float[Array, "all n"]
) -> Float[Array, "tokens n"]:
    """Sends the rows of a round back to their tokens' hosts, and adds up those of each token in the order of hosts."""
    hosts, size = static.levels.hosts, static.round_tokens
    arrived = static.levels.across.exchange(rows)
    places = routes.places - number * size
    here = (routes.places >= 0) & (places >= 0) & (places < size)
    of_tokens = arrived[jnp.arange(hosts), jnp.clip(places, 0, size - 1)]
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.where(here[..., None], of_tokens, 0).astype(wide).sum(1)


def _in_rounds(
    routes: Routes, fetch: Callable[[jax.Array], Any], work: Callable[[jax.Array, Any, Any], Any], sums: Any
) -> Any:
    """Returns the sums after all rounds: `sums = work(number, sums, fetch(number))`.

    The loop fetches a round ahead, so that its body computes and fetches what do not depend on each other. The last
    round is computed behind it, where nothing is left to fetch.
    """

    def step(state: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        number, sums, arrived = state
        return number + 1, work(number, sums, arrived), fetch(number + 1)

    first = fetch(jnp.int32(0))
    sums, first = vary_alike((sums, first))
    number, sums, arrived = jax.lax.while_loop(
        lambda state: state[0] < routes.rounds - 1, step, (jnp.int32(0), sums, first)
    )
    return work(number, sums, arrived)
