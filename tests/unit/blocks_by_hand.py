"""Published architectures as blocks written out by hand, and the numbers that layers and blocks are compared on."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import RouterConfig, SwiGLU

BATCH, LENGTH, HIDDEN, INTERMEDIATE, SHARED, EXPERTS = 8, 3, 16, 24, 20, 8
DEEPSEEK_V3 = RouterConfig(top_k=2, score="sigmoid", num_groups=2, top_groups=1, scaling_factor=2.5)
LOSS_WEIGHTS = (0.3, 0.2)  # of the load-balancing loss and the z-loss


# The blocks: every expert on every token, weighted by a dense [tokens, experts] matrix.


@dataclasses.dataclass(frozen=True)
class Block:
    """One published architecture: the arguments that make it, and what it computes."""

    arguments: Mapping[str, Any]
    weights: Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array, jax.Array]]
    activation: Callable[[jax.Array, jax.Array], jax.Array]
    shared_activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def largest(scores: jax.Array, count: int) -> jax.Array:
    """Which scores are among the largest of their row; without ties."""
    return scores >= jnp.sort(scores, axis=-1)[:, -count, None]


def softmax_then_top2(logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    del bias
    scores = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    chosen = largest(scores, 2)
    weights = jnp.where(chosen, scores, 0)
    return weights / weights.sum(-1, keepdims=True), chosen, scores


def top2_then_softmax(logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    del bias
    chosen = largest(logits, 2)
    weights = jnp.where(chosen, jnp.exp(logits), 0)
    return weights / weights.sum(-1, keepdims=True), chosen, jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)


def best_group_then_sigmoid(logits: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores = 1 / (1 + jnp.exp(-logits))
    choice = (scores + bias).reshape(-1, 2, EXPERTS // 2)
    best_two = jnp.sort(choice, axis=-1)[..., -2:].sum(-1)
    choice = jnp.where(largest(best_two, 1)[..., None], choice, -jnp.inf).reshape(-1, EXPERTS)
    chosen = largest(choice, 2)
    weights = jnp.where(chosen, scores, 0)
    return 2.5 * weights / weights.sum(-1, keepdims=True), chosen, scores / scores.sum(-1, keepdims=True)


def sqrt_softplus(logits: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    scores = jnp.sqrt(jnp.log(1 + jnp.exp(logits)))
    chosen = largest(scores + bias, 2)
    weights = jnp.where(chosen, scores, 0)
    return 1.5 * weights / weights.sum(-1, keepdims=True), chosen, scores / scores.sum(-1, keepdims=True)


def silu_times(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1 + jnp.exp(-gate)) * up


def clamped(limit: float, alpha: float, offset: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, limit), jnp.maximum(jnp.minimum(up, limit), -limit)
        return (up + offset) * gate / (1 + jnp.exp(-alpha * gate))

    return activation


BLOCKS = {
    "mixtral": Block({"router": RouterConfig.mixtral()}, softmax_then_top2, silu_times),
    # Limits far below the published ones, so that inputs of unit scale meet them.
    "gpt-oss": Block(
        {
            "router": RouterConfig(top_k=2, score="topk_softmax"),
            "activation": SwiGLU(limit=0.7, alpha=1.702, up_offset=1.0),
            "biases": True,
            "router_bias": True,
        },
        top2_then_softmax,
        clamped(0.7, 1.702, 1.0),
    ),
    "deepseek-v3": Block(
        {"router": DEEPSEEK_V3, "selection_bias": True, "shared_intermediate": SHARED},
        best_group_then_sigmoid,
        silu_times,
        silu_times,
    ),
    "deepseek-v4": Block(
        {
            "router": RouterConfig(top_k=2, score="sqrtsoftplus", scaling_factor=1.5),
            "activation": SwiGLU(limit=0.5),
            "selection_bias": True,
            "shared_intermediate": SHARED,
        },
        sqrt_softplus,
        clamped(0.5, 1.0, 0.0),
        clamped(0.5, 1.0, 0.0),
    ),
    "qwen3-next": Block(
        {"router": RouterConfig.mixtral(), "shared_intermediate": SHARED, "shared_gate": True},
        softmax_then_top2,
        silu_times,
        silu_times,
    ),
    # Every parameter that a layer can have, and a shared expert with an activation of its own.
    "everything": Block(
        {
            "router": DEEPSEEK_V3,
            "activation": SwiGLU(limit=0.5),
            "selection_bias": True,
            "biases": True,
            "router_bias": True,
            "shared_intermediate": SHARED,
            "shared_activation": "silu",
            "shared_gate": True,
        },
        best_group_then_sigmoid,
        clamped(0.5, 1.0, 0.0),
        silu_times,
    ),
}


def by_hand(block: Block, p: Mapping[str, jax.Array], bias: jax.Array | None, tokens: jax.Array) -> Any:
    """Returns the output for tokens `[tokens, hidden]`, both losses and the rows per expert."""
    logits = tokens @ p["router_kernel"] + p.get("router_bias", 0)
    weights, chosen, probabilities = block.weights(logits, bias)
    gate = jnp.einsum("td,edf->tef", tokens, p["w_gate"]) + p.get("b_gate", 0)
    up = jnp.einsum("td,edf->tef", tokens, p["w_up"]) + p.get("b_up", 0)
    out = jnp.einsum("tef,efd->ted", block.activation(gate, up), p["w_down"]) + p.get("b_down", 0)
    y = jnp.einsum("te,ted->td", weights, out)
    if block.shared_activation is not None:
        gate = tokens @ p["shared_w_gate"] + p.get("shared_b_gate", 0)
        up = tokens @ p["shared_w_up"] + p.get("shared_b_up", 0)
        shared = block.shared_activation(gate, up) @ p["shared_w_down"] + p.get("shared_b_down", 0)
        if "shared_gate_kernel" in p:
            shared /= 1 + jnp.exp(-(tokens @ p["shared_gate_kernel"]))
        y += shared
    rows = chosen.sum(0)
    balance = EXPERTS * jnp.sum(rows / rows.sum() * probabilities.mean(0))
    return y, balance, jnp.mean(jnp.log(jnp.exp(logits).sum(-1)) ** 2), rows


# Inputs. Both libraries name their parameters alike, so both layers get the same numbers.


def numbers(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray((np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32))


def fill(shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns random parameters of unit outputs, biases included."""
    filled = {}
    for seed, (name, like) in enumerate(sorted(shapes.items())):
        is_bias = "b_" in name or name.endswith("bias")
        filled[name] = numbers(seed, *like.shape, scale=0.3 if is_bias else like.shape[-2] ** -0.5)
    return filled


X = functools.partial(numbers, 100, BATCH, LENGTH, HIDDEN)
COTANGENT = functools.partial(numbers, 101, BATCH, LENGTH, HIDDEN)
BIAS = functools.partial(numbers, 102, EXPERTS, scale=0.2)
VALID = np.random.default_rng(103).random((BATCH, LENGTH)) < 0.7
