"""A token to the hosts that have one of its experts, once to each, in rounds of bounded size.

Called by `layer.py` for one chunk of tokens. In a round every rank sends each host up to `round_tokens` of the tokens
that it needs, to the rank of its own place there. That host's ranks compute the layer for what has arrived, and the
answers go back. There are as many rounds as the busiest pair of hosts needs, so nothing is dropped, and at least two.

While a round is computed, the tokens of the next one and the answers of the one before travel, all of them in one
collective (`message.py`): XLA lets one be in flight at a time, and beside the layer's kernel there is time for it. The
first tokens and the last answers have nothing to hide behind.

The backward pass does the same rounds again: tokens go with gradients of outputs, and it keeps nothing of the forward
pass but the inputs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.formats import at_least_float32
from jaxmoe.guard import first_derivatives_only, not_mapped
from jaxmoe.implementations.base import Inputs
from jaxmoe.network.cost import FEWEST_ROUNDS
from jaxmoe.network.gradients import gradients_like, summed_in_float32, trained_of
from jaxmoe.network.levels import Levels
from jaxmoe.network.message import exchange, exchange_beside
from jaxmoe.sharding import vary_alike

OnHost = Callable[[Inputs], jax.Array]


class Routes(NamedTuple):
    """Which tokens of this rank go to which host, and when.

    Args:
      order: for each host, the tokens that it needs in their order; behind them, those that it does not.
      counts: how many it needs.
      places: of each token among those that a host needs; -1 where it does not need it.
      rounds: the same on all ranks, at least `FEWEST_ROUNDS`.
    """

    order: Int[Array, "hosts tokens"]
    counts: Int[Array, " hosts"]
    places: Int[Array, "tokens hosts"]
    rounds: Int[Array, ""]


class Tokens(NamedTuple):
    """Tokens and their slots: of a round, for each host, and as they arrive there."""

    x: Array
    topk_ids: Array
    topk_weights: Array

    def inputs(self, experts: Any) -> Inputs:
        """Returns the arguments of the layer of a host."""
        return Inputs(self.x, self.topk_ids, self.topk_weights, experts)


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

    def compute(arrived: Tokens) -> tuple[jax.Array, None]:
        return on_host(arrived.inputs(inputs.experts)), None

    sums, _ = _in_rounds(static, routes, lambda number: _tokens(static, routes, number, inputs), compute, inputs.x)
    return sums.astype(inputs.x.dtype)


# Rows travel as words (message.py), which have no derivative.
_FIRST_DERIVATIVES = (
    "moe_layer: over several hosts with way='send' there are first derivatives only (jax.grad, jax.vjp), and this asks "
    "for second ones. Pass network=jaxmoe.NetworkPlan(way='gather') and implementation='xla' for those."
)


def _layer_fwd(static: _Static, on_host: OnHost, inputs: Inputs) -> tuple[jax.Array, Inputs]:
    return _layer(static, on_host, first_derivatives_only(inputs, _FIRST_DERIVATIVES)), inputs


def _layer_bwd(static: _Static, on_host: OnHost, inputs: Inputs, dy: jax.Array) -> tuple[Inputs]:
    inputs, dy = first_derivatives_only((inputs, not_mapped(dy)), _FIRST_DERIVATIVES)
    dy = dy.astype(inputs.x.dtype)
    routes = _routes(static, inputs.topk_ids)
    fixed, trained = trained_of(inputs.experts)

    def tokens(number: jax.Array) -> tuple[Tokens, jax.Array]:
        return _tokens(static, routes, number, inputs), _rows(static, routes, number, dy)

    def compute(arrived: tuple[Tokens, jax.Array]) -> tuple[Any, Any]:
        tokens, dout = arrived

        def layer(x: jax.Array, weights: jax.Array, trained: dict[str, Any]) -> jax.Array:
            return on_host(Inputs(x, tokens.topk_ids, weights, fixed(trained)))

        # Cast here, not ahead of the loop: casts there and back in one computation are dropped by the compiler.
        dx, dweights, dtrained = jax.vjp(layer, tokens.x, tokens.topk_weights, summed_in_float32(trained))[1](dout)
        return (dx, dweights), dtrained

    (dx, dweights), dtrained = _in_rounds(static, routes, tokens, compute, (inputs.x, inputs.topk_weights))
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    gradients = gradients_like(
        inputs.experts, jax.tree.map(lambda sum_, array: sum_.astype(array.dtype), dtrained, trained)
    )
    return (Inputs(dx.astype(inputs.x.dtype), no_ids, dweights.astype(inputs.topk_weights.dtype), gradients),)  # pyright: ignore[reportArgumentType]


_layer.defvjp(_layer_fwd, _layer_bwd)


def _routes(static: _Static, topk_ids: Int[Array, "tokens top_k"]) -> Routes:
    levels = static.levels
    hosts = jnp.arange(levels.hosts, dtype=jnp.int32)[None, :, None]
    needs = (levels.ids_on_host(topk_ids[:, None], hosts, static.num_experts) >= 0).any(-1)
    counts = needs.sum(0, dtype=jnp.int32)
    places = jnp.where(needs, jnp.cumsum(needs, 0, dtype=jnp.int32) - 1, -1)
    order = jnp.argsort(~needs.T, axis=1, stable=True).astype(jnp.int32)
    missing = -order.shape[1] % static.round_tokens  # so that every round has a whole slice of it
    order = jnp.pad(order, ((0, 0), (0, missing)))
    # Launches and collectives of a round take all ranks of all hosts.
    axes = tuple(dict.fromkeys((*levels.across.axis_names, *levels.on_host.axis_names)))
    rounds = jax.lax.pmax(-(-counts.max() // static.round_tokens), axes)
    return Routes(order, counts, places, jnp.maximum(rounds, FEWEST_ROUNDS))


def _sources(
    static: _Static, routes: Routes, number: jax.Array
) -> tuple[Int[Array, "hosts n"], Bool[Array, "hosts n"]]:
    """Returns the tokens that go to each host in a round, and which places of the round are used."""
    start, size = number * static.round_tokens, static.round_tokens
    tokens = jax.lax.dynamic_slice_in_dim(routes.order, start, size, axis=1)
    return tokens, start + jnp.arange(size, dtype=start.dtype)[None] < routes.counts[:, None]


def _rows(
    static: _Static, routes: Routes, number: jax.Array, rows: Float[Array, "tokens n"]
) -> Float[Array, "hosts places n"]:
    """Returns the rows of the tokens that go to each host in a round, zeros in places that are not used."""
    tokens, used = _sources(static, routes, number)
    return jnp.where(used[..., None], rows[tokens], 0)


def _tokens(static: _Static, routes: Routes, number: jax.Array, inputs: Inputs) -> Tokens:
    """Returns what goes to each host in a round; ids are among its experts."""
    tokens, used = _sources(static, routes, number)
    hosts = jnp.arange(static.levels.hosts, dtype=jnp.int32)[:, None, None]
    ids = static.levels.ids_on_host(inputs.topk_ids[tokens], hosts, static.num_experts)
    ids = jnp.where(used[..., None], ids, -1)
    weights = jnp.where(ids >= 0, inputs.topk_weights[tokens], 0)
    return Tokens(_rows(static, routes, number, inputs.x), ids, weights)


def _add_answers(static: _Static, routes: Routes, number: jax.Array, sums: Any, arrived: Any) -> Any:
    """Adds to each token what the hosts have answered in a round, in the order of hosts."""
    hosts, size = static.levels.hosts, static.round_tokens
    places = routes.places - number * size
    here = (routes.places >= 0) & (places >= 0) & (places < size)

    def add(sums: Float[Array, "tokens n"], rows: Float[Array, "hosts places n"]) -> Float[Array, "tokens n"]:
        of_tokens = rows[jnp.arange(hosts, dtype=places.dtype)[None], jnp.clip(places, 0, size - 1)]
        return sums + jnp.where(here[..., None], of_tokens, 0).astype(sums.dtype).sum(1)

    return jax.tree.map(add, sums, arrived)


def _in_rounds(
    static: _Static,
    routes: Routes,
    tokens: Callable[[jax.Array], Any],
    compute: Callable[[Any], tuple[Any, Any]],
    like: Any,
) -> tuple[Any, Any]:
    """Returns the sums of answers for the tokens of this rank, and the sums of what stays on this host.

    Args:
      static: what is no array.
      routes: of the tokens.
      tokens: for the number of a round, what goes to the hosts: arrays `[hosts, places, n]`.
      compute: from what has arrived, arrays `[hosts * places, n]`, to answers of that many rows and what stays here.
      like: arrays like the sums, which are in float32 at least.
    """
    across, hosts = static.levels.across, static.levels.hosts

    def by_host(rows: Any) -> Any:
        return jax.tree.map(lambda array: array.reshape(hosts, -1, *array.shape[1:]), rows)

    def beside(arrived: Any, sent: Any) -> tuple[Any, Any, Any]:
        answers, kept = compute(jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), arrived))
        exchanged, (answers, kept) = exchange_beside(across, sent, (answers, kept))
        return by_host(answers), kept, exchanged

    def step(state: tuple[jax.Array, Any, Any, Any, Any]) -> tuple[jax.Array, Any, Any, Any, Any]:
        number, sums, kept, arrived, answers = state
        answers, more, (following, returned) = beside(arrived, (tokens(number + 1), answers))
        sums = _add_answers(static, routes, number - 1, sums, returned)
        return number + 1, sums, jax.tree.map(jnp.add, kept, more), following, answers

    sums = jax.tree.map(lambda array: jnp.zeros_like(array, at_least_float32(array.dtype)), like)
    arrived = exchange(across, tokens(jnp.int32(0)))
    answers, kept, following = beside(arrived, tokens(jnp.int32(1)))
    state = vary_alike((sums, kept, following, answers))
    number, sums, kept, arrived, answers = jax.lax.while_loop(
        lambda state: state[0] < routes.rounds - 1, step, (jnp.int32(1), *state)
    )
    answers, more, returned = beside(arrived, answers)
    # Two additions in one kernel of XLA's took 500 us where each alone takes 75 (mixtral-8x7b, 8192 tokens).
    sums = jax.lax.optimization_barrier(_add_answers(static, routes, number - 1, sums, returned))
    sums = _add_answers(static, routes, number, sums, exchange(across, answers))
    return sums, jax.tree.map(jnp.add, kept, more)
