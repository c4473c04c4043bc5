"""A layer over several hosts: chunks of tokens, each moved by `gather.py` or `send.py` around the layer of a host.

`api.py` calls `run`. On GPUs the chunks do not depend on each other, so XLA's scheduler is free to move the tokens of
one while another is computed. Rounds of `send.py` overlap by themselves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.guard import reverse_mode_only
from jaxmoe.implementations.base import Call, Inputs
from jaxmoe.implementations.megakernel.launching import timeout_seconds
from jaxmoe.network import gather, roll_call, send
from jaxmoe.network.choice import call_on_host, chunk_tokens
from jaxmoe.network.gradients import summed_in_float32, trained_of
from jaxmoe.sharding import devices_of_groups, vary_alike


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
        groups = devices_of_groups(call.group, call.placement.mesh)
        roll_call.begin(timeout_seconds(call.platform), roll_call.processes_of(groups))
    inputs = vary_alike(reverse_mode_only(inputs))
    num_experts, tokens = call.shape.num_experts, call.shape.tokens

    def on_host(inputs: Inputs) -> jax.Array:
        return run_on_host(of_host, inputs)

    if levels.plan.chunks > 1:
        fixed, trained = trained_of(inputs.experts)
        inputs = inputs._replace(experts=fixed(summed_in_float32(trained)))
    way = gather if levels.plan.way == "gather" else send

    def of_chunk(chunk: Inputs) -> jax.Array:
        return way.run(levels, num_experts, chunk, on_host)

    chunks = _chunks(call, inputs)
    if call.platform == "cpu" and len(chunks) > 1:
        # One after the other. On virtual devices a launch holds a thread of XLA's pool until all ranks of its host have
        # come; those of several chunks, on ranks that begin with another one each, could hold all of them.
        tokens_of = jax.tree.map(lambda *parts: jnp.stack(parts), *(chunk._replace(experts=None) for chunk in chunks))
        outputs = list(jax.lax.map(lambda chunk: of_chunk(chunk._replace(experts=inputs.experts)), tokens_of))
    else:
        outputs = [of_chunk(chunk) for chunk in chunks]
    return outputs[0][:tokens] if len(outputs) == 1 else jnp.concatenate(outputs)[:tokens]


def _chunks(call: Call, inputs: Inputs) -> list[Inputs]:
    """Returns equal parts of the tokens; the last one is filled up with tokens that have no slots."""
    assert call.levels is not None
    assert call.levels.plan.chunks is not None
    number = call.levels.plan.chunks
    size = chunk_tokens(call.shape, number)
    x, ids, weights = inputs.x, inputs.topk_ids, inputs.topk_weights
    if missing := number * size - call.shape.tokens:
        x, weights = (jnp.pad(array, ((0, missing), (0, 0))) for array in (x, weights))
        ids = jnp.pad(ids, ((0, missing), (0, 0)), constant_values=-1)
    parts = [slice(each * size, (each + 1) * size) for each in range(number)]
    return [Inputs(x[part], ids[part], weights[part], inputs.experts) for part in parts]
