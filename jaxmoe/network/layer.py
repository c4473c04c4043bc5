"""A layer over several hosts: chunks of tokens, each moved by `gather.py` or `send.py` around the layer of a host.

`api.py` calls `run`. On GPUs the chunks do not depend on each other, so XLA's scheduler is free to move the tokens of
one while another is computed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.implementations.base import Call, Inputs
from jaxmoe.implementations.megakernel.layer import timeout_seconds
from jaxmoe.network import gather, roll_call, send
from jaxmoe.network.choice import call_on_host, chunk_tokens
from jaxmoe.network.gradients import summed_in_float32, trained_of
from jaxmoe.sharding import vary_alike


def run(call: Call, inputs: Inputs, run_on_host: Callable[[Call, Inputs], jax.Array]) -> Float[Array, "tokens hidden"]:
    """Returns the output for the tokens of this rank.

    Args:
      call: with levels.
      inputs: of this rank, with ids among the experts of all hosts.
      run_on_host: the implementation.
    """
    levels, of_host = call.levels, call_on_host(call)
    assert levels is not None
    assert levels.plan.chunks is not None
    if call.implementation == "megakernel" and call.platform == "gpu" and jax.process_count() > 1:
        roll_call.begin(timeout_seconds(call.platform))
    inputs = vary_alike(inputs)
    num_experts, tokens = call.shape.num_experts, call.shape.tokens

    def on_host(inputs: Inputs) -> jax.Array:
        return run_on_host(of_host, inputs)

    if levels.plan.chunks > 1:
        fixed, trained = trained_of(inputs.experts)
        inputs = inputs._replace(experts=fixed(summed_in_float32(trained)))
    way = gather if levels.plan.way == "gather" else send
    experts = inputs.experts

    def of_chunk(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        return way.run(levels, num_experts, Inputs(x, ids, weights, experts), on_host)

    chunks = _chunks(call, inputs)
    if call.platform == "cpu":
        # One after the other. On virtual devices a launch holds a thread of XLA's pool until all ranks of its host have
        # come; those of several chunks, on ranks that begin with another one each, could hold all of them.
        y = jax.lax.map(lambda chunk: of_chunk(*chunk), chunks)
    else:
        y = jnp.concatenate([of_chunk(*(array[number] for array in chunks)) for number in range(chunks[0].shape[0])])
    return y.reshape(-1, y.shape[-1])[:tokens]


def _chunks(call: Call, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns tokens, ids and weights in equal parts `[chunks, ...]`, filled up with tokens that have no slots."""
    assert call.levels is not None
    assert call.levels.plan.chunks is not None
    number = call.levels.plan.chunks
    size = chunk_tokens(call.shape, number)
    missing = number * size - call.shape.tokens

    def parts(array: jax.Array, fill: int) -> jax.Array:
        if missing:
            array = jnp.pad(array, ((0, missing), (0, 0)), constant_values=fill)
        return array.reshape(number, size, -1)

    return parts(inputs.x, 0), parts(inputs.topk_ids, -1), parts(inputs.topk_weights, 0)
