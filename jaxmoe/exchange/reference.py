"""The truth of dispatch and combine: every slot compared with every row, differentiated by JAX itself.

Nothing here is clever, so that it can be checked by reading. It takes slots x slots and rows x slots of memory.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.exchange.base import Arrived, ExchangeCall, Routes
from jaxmoe.formats import at_least_float32
from jaxmoe.precision import powers_of_two
from jaxmoe.quantization import quantize_rows


def send(call: ExchangeCall, x: Float[Array, "tokens hidden"], topk_ids: Int[Array, "tokens top_k"]) -> Arrived:
    """Returns the rows of this rank's experts, and where they and this rank's tokens are."""
    shape, room, mine = call.shape, call.room, call.group.index()
    expert = call.group.all_gather(topk_ids).reshape(-1)  # of every slot of all ranks
    slot = jnp.arange(shape.all_slots, dtype=jnp.int32)
    counts = (expert[:, None] == jnp.arange(shape.num_experts, dtype=jnp.int32)[None]).sum(0, dtype=jnp.int32)

    starts = []
    for number in range(shape.num_experts):
        local = number % shape.local_experts
        if room.capacity_per_expert:
            starts.append(jnp.int32(local * room.capacity_per_expert))
        elif local == 0:
            starts.append(jnp.int32(0))
        else:
            starts.append(starts[-1] + -(-counts[number - 1] // room.alignment) * room.alignment)

    is_earlier = (expert[:, None] == expert[None]) & (slot[:, None] > slot[None])
    earlier = is_earlier.sum(1, dtype=jnp.int32)  # slots of the same expert
    row = jnp.stack(starts)[expert] + earlier
    finds_room = earlier < room.capacity_per_expert if room.capacity_per_expert else row < room.rows
    row = jnp.where((expert >= 0) & finds_room, row, -1).astype(jnp.int32)

    is_mine = expert // shape.local_experts == mine
    here = (row[None] == jnp.arange(room.rows, dtype=jnp.int32)[:, None]) & is_mine[None]  # [rows, all_slots]
    slot_of_row = jnp.where(here.any(1), here.argmax(1), -1)
    source = (slot_of_row // shape.slots) * 2**24 + slot_of_row % shape.slots
    row_sources = jnp.where(slot_of_row >= 0, source, -1).astype(jnp.int32)
    my_slots = mine * shape.slots + jnp.arange(shape.slots, dtype=jnp.int32)
    routes = Routes(row_sources, row[my_slots].reshape(-1, shape.top_k))

    local_expert = expert - mine * shape.local_experts
    local_experts = jnp.arange(shape.local_experts, dtype=jnp.int32)
    is_of_expert = local_expert[:, None] == local_experts[None]  # [all_slots, local_experts]
    found = (is_of_expert & (row >= 0)[:, None]).sum(0).astype(jnp.int32)
    dropped = (is_of_expert & (row < 0)[:, None]).sum(0).astype(jnp.int32)

    def rows_of(tokens: Float[Array, "tokens width"]) -> Float[Array, "rows width"]:
        # Wide, so that the gradient of a token is added up in float32 and rounded once.
        everyone = call.group.all_gather(tokens.astype(at_least_float32(x.dtype)))
        rows = jnp.where((slot_of_row >= 0)[:, None], everyone[slot_of_row // shape.top_k], 0)
        return rows.astype(tokens.dtype)

    if call.precision is None:
        return Arrived(rows_of(x), None, found, dropped, routes)
    values, scales = quantize_rows(x, powers_of_two(call.precision))
    return Arrived(rows_of(values), rows_of(scales), found, dropped, routes)


def add_up(
    call: ExchangeCall,
    outputs: Float[Array, "rows width"],
    weights: Float[Array, "tokens top_k"] | None,
    routes: Routes,
) -> Float[Array, "tokens width"]:
    """Returns the (weighted) sum of the rows of each of this rank's tokens."""
    shape = call.shape
    everything, sources = call.group.all_gather(outputs), call.group.all_gather(routes.row_sources)
    wide = at_least_float32(outputs.dtype)
    total = jnp.zeros((shape.tokens, outputs.shape[1]), wide)
    first_slots = jnp.arange(shape.tokens, dtype=jnp.int32) * shape.top_k
    for k in range(shape.top_k):
        wanted = call.group.index() * 2**24 + first_slots + k
        is_it = wanted[:, None] == sources[None]  # [tokens, rows of all ranks]
        row = jnp.where(is_it.any(1)[:, None], everything[is_it.argmax(1)], 0).astype(wide)
        weight = 1 if weights is None else jnp.where(is_it.any(1), weights[:, k], 0)[:, None]
        total = total + row * weight
    return total.astype(outputs.dtype)
