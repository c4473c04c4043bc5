"""The truth: every expert applied to every token, in float32 or float64, differentiated by JAX itself.

Nothing here is clever, so that it can be checked by reading. Every test compares with it.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmoe.activation import Activation
from jaxmoe.experts import Experts
from jaxmoe.implementations.base import Call, Inputs
from jaxmoe.implementations.explanation import Explanation
from jaxmoe.sharding import ExpertGroup, vary_alike


def reference(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    topk_weights: Float[Array, "tokens top_k"],
    experts: Experts,
    *,
    activation: Activation,
    group: ExpertGroup,
    compute_dtype: DTypeLike | None = None,
) -> Float[Array, "tokens hidden"]:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)`, computed densely.

    Args:
      x: tokens of this rank.
      topk_ids: expert of each slot among all experts of the group, -1 for an unused slot.
      topk_weights: routing weight of each slot.
      experts: experts of this rank; the others are gathered from the group.
      activation: between the GEMMs.
      group: the ranks that hold the experts.
      compute_dtype: of every intermediate result; `None` is float32, or float64 for float64 tokens. A low precision
        here gives "the same maths in low precision", the yardstick of the tests' tolerances.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32) if compute_dtype is None else jnp.dtype(compute_dtype)
    x, topk_ids, topk_weights, experts = vary_alike((x, topk_ids, topk_weights, experts))
    everyone: Experts = jax.tree.map(lambda array: group.all_gather(array).astype(dtype), experts)
    tokens = x.astype(dtype)

    def add_expert(total: jax.Array, expert: tuple[jax.Array, Experts]) -> tuple[jax.Array, None]:
        expert_id, e = expert
        chosen = topk_ids == expert_id
        weight = jnp.where(chosen, topk_weights, 0).sum(-1, keepdims=True)
        visits = chosen.any(-1, keepdims=True)
        # Select, both here and behind the expert: 0 * NaN would carry a NaN of one token, or of the cotangent of its
        # output, into the gradients of experts it never visited.
        rows = jnp.where(visits, tokens, 0)
        gate = _affine(rows, e.w_gate, e.b_gate)
        up = None if e.w_up is None else _affine(rows, e.w_up, e.b_up)
        out = _affine(activation.value(gate, up).astype(dtype), e.w_down, e.b_down)
        return total + jnp.where(visits, weight * jnp.where(visits, out, 0), 0), None

    total_dtype = jnp.promote_types(dtype, jnp.float32)
    start = jnp.zeros_like(x, total_dtype)
    total, _ = jax.lax.scan(add_expert, start, (jnp.arange(everyone.num_experts), everyone))
    return total.astype(x.dtype)


def _affine(rows: jax.Array, weights: jax.Array, bias: jax.Array | None) -> jax.Array:
    # Highest precision: by default a float32 product on a GPU rounds its inputs to TF32.
    out = jnp.matmul(rows, weights, precision="highest")
    return out if bias is None else out + bias


def run(call: Call, inputs: Inputs) -> jax.Array:
    """Returns the output of a call for the tokens of this rank."""
    x, topk_ids, topk_weights, experts = inputs
    return reference(x, topk_ids, topk_weights, experts.astype(x.dtype), activation=call.activation, group=call.group)


def explain(call: Call) -> Explanation:
    """Returns what a dense computation takes: all experts on every rank, each of them applied to every token."""
    shape = call.shape
    wide = shape.formats.sums.row_bytes(1)
    matrices = shape.projections + 1
    memory = {
        "experts of all ranks, in float32": shape.num_experts * matrices * shape.hidden * shape.intermediate * wide,
        "one expert on every token": shape.tokens * (3 * shape.intermediate + 2 * shape.hidden) * wide,
    }
    return Explanation(
        call=call,
        reasons=(call.implementation_reason, "every expert is applied to every token"),
        memory_bytes=memory,
        worst_case_bytes=sum(memory.values()),
        wire_bytes=(shape.ranks - 1) * shape.num_experts // shape.ranks * matrices * shape.matrix_bytes,
        flops=shape.flops // shape.top_k * shape.num_experts,
    )
