"""What keeps the experts evenly loaded: auxiliary losses, and the bias update that needs none.

All of it is plain JAX on what `route` returned, so that training code can weigh, replace or log it. Inside `shard_map`,
`axis_name=` makes a loss that of the global batch; under plain `jit` arrays hold all tokens and no axis is named.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing import Routing
from jaxmoe.stats import check_token_valid, load_stats, sum_over_axis


def load_balancing_loss(
    routing: Routing,
    *,
    token_valid: Bool[Array, "*batch"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Float[Array, ""]:
    """Returns `E * sum_e f_e * P_e`: 1.0 when the load is even, at most `E` when one expert gets everything.

    `f_e` is the fraction of used slots that chose expert e, `P_e` the mean over tokens of its probability
    (`Routing.scores`); both sum to one. The gradient flows through `P` alone, since counts have none. Fedus et al. 2021
    (arXiv:2101.03961), equations 4-6, for any `top_k`; Hugging Face's Mixtral does not divide `f` by `top_k` and gets
    `top_k` times this value. Without any valid token the loss is 0.

    With `axis_name` the fractions are those of all tokens on these mesh axes, as if they were in one batch. Balance
    over the global batch leaves experts free to specialise, balance over each rank's few sequences does not: Qiu et al.
    2025 (arXiv:2501.11873). The result is the same on every rank, and its gradient on a rank is that with respect to
    its own tokens (under `check_vma`, JAX's default).

    DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, equations 17-20) is the mean of this one over sequences: for
    logits `[sequences, tokens, experts]`, `jnp.mean(jax.vmap(load_balancing_loss)(routing))`.

    Args:
      routing: of `route`.
      token_valid: `[*batch]` bool, tokens to leave out besides those that were not valid for `route`.
      axis_name: mesh axes over which the tokens are spread, inside `shard_map`.

    Raises:
      TypeError, ValueError: the mask does not fit, or `axis_name` is not a manual mesh axis here.

    >>> import jax.numpy as jnp, jaxmoe
    >>> logits = 4 * jnp.eye(4)
    >>> loss = jaxmoe.load_balancing_loss(jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=1)))
    >>> round(float(loss), 3)
    1.0
    """
    scores, topk_ids = routing.scores, routing.topk_ids
    check_token_valid("load_balancing_loss", token_valid, scores.shape[:-1], "routing")
    num_experts = scores.shape[-1]
    valid = (topk_ids >= 0).any(-1)
    if token_valid is not None:
        valid &= token_valid
    rows = load_stats(topk_ids, num_experts, token_valid=valid).rows_per_expert
    mass = jnp.where(valid[..., None], scores, 0).sum(range(valid.ndim))
    rows, tokens, mass = sum_over_axis("load_balancing_loss", (rows, valid.sum(), mass), axis_name)
    fraction = rows / jnp.maximum(rows.sum(), 1).astype(scores.dtype)
    return num_experts * jnp.sum(fraction * mass / jnp.maximum(tokens, 1))


def router_z_loss(
    logits: Float[Array, "*batch experts"],
    *,
    token_valid: Bool[Array, "*batch"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Float[Array, ""]:
    """Returns the mean over tokens of `log(sum_e exp(logit_e))^2`, which keeps router logits small.

    Zoph et al. 2022, ST-MoE (arXiv:2202.08906), equation 5. Without any valid token it is 0.

    Args:
      logits: `[*batch, experts]`, any float dtype; computed in float32, float64 stays float64.
      token_valid: `[*batch]` bool, tokens to count; a NaN in another token reaches neither the loss nor a gradient.
      axis_name: mesh axes over which the tokens are spread, inside `shard_map`; the mean is over all of them.

    Raises:
      TypeError, ValueError: the mask does not fit, or `axis_name` is not a manual mesh axis here.

    >>> import jax.numpy as jnp, jaxmoe
    >>> round(float(jaxmoe.router_z_loss(jnp.zeros((5, 8)))), 3)  # log(8)^2
    4.324
    """
    check_token_valid("router_z_loss", token_valid, logits.shape[:-1], "logits")
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    valid = jnp.ones(logits.shape[:-1], bool) if token_valid is None else token_valid
    log_sum = jax.nn.logsumexp(jnp.where(valid[..., None], logits, 0), axis=-1)
    total = jnp.sum(jnp.where(valid, log_sum**2, 0))
    total, tokens = sum_over_axis("router_z_loss", (total, valid.sum()), axis_name)
    return total / jnp.maximum(tokens, 1)


def update_selection_bias(
    selection_bias: Float[Array, " experts"],
    rows_per_expert: Int[Array, " experts"],
    rate: float | Float[Array, ""] = 1e-3,
) -> Float[Array, " experts"]:
    """Returns `bias + rate * sign(mean load - load)`: balance without an auxiliary loss.

    Wang et al. 2024 (arXiv:2408.15664), algorithm 1; DeepSeek-V3 (arXiv:2412.19437, section 4.2) used the default rate
    for most of its training. Call it once per step, after the gradient step, with the load of the whole batch. The
    signs are exact, so an even load leaves the bias as it is.

    Args:
      selection_bias: `[experts]` float, as passed to `route`.
      rows_per_expert: `[experts]` integers, `MoEStats.rows_per_expert` of the step, summed over all ranks
        (`load_stats(..., axis_name=...)`).
      rate: size of the step, the scores' own unit.

    Raises:
      TypeError: the load is not counted in integers.
      ValueError: the shapes differ.

    >>> import jax.numpy as jnp, jaxmoe
    >>> jaxmoe.update_selection_bias(jnp.zeros(3), jnp.array([9, 6, 3]), rate=0.5)
    Array([-0.5,  0. ,  0.5], dtype=float32)
    """
    if not jnp.issubdtype(rows_per_expert.dtype, jnp.integer):
        raise TypeError(
            f"update_selection_bias: rows_per_expert is {rows_per_expert.dtype}; it must hold integer counts, "
            "e.g. MoEStats.rows_per_expert."
        )
    if rows_per_expert.shape != selection_bias.shape or selection_bias.ndim != 1:
        raise ValueError(
            f"update_selection_bias: selection_bias has shape {selection_bias.shape} and rows_per_expert "
            f"{rows_per_expert.shape}; both must be [experts]."
        )
    mean, rest = jnp.divmod(rows_per_expert.sum(), rows_per_expert.size)
    below_mean = (rows_per_expert < mean) | ((rows_per_expert == mean) & (rest > 0))
    sign = below_mean.astype(jnp.int32) - (rows_per_expert > mean)
    return selection_bias + jnp.asarray(rate, selection_bias.dtype) * sign.astype(selection_bias.dtype)
