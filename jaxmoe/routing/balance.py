"""What keeps the experts evenly loaded: auxiliary losses, and the bias update that needs none.

All of it is plain JAX on what `route` returned, so that training code can weigh, replace or log it. Inside `shard_map`,
`axis_name=` makes a loss that of the global batch; under plain `jit` arrays hold all tokens and no axis is named.
`stats.py` says how all of it is summed at once.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.array_layout import whole_in_last, with_tokens_of
from jaxmoe.arrays import check_array, is_array
from jaxmoe.formats import at_least_float32
from jaxmoe.pytrees import pytree
from jaxmoe.routing.router import Routing
from jaxmoe.routing.stats import (
    Counters,
    MoEStats,
    any_slot,
    check_token_valid,
    int32_ids,
    manual_axes,
    stats_of,
    sum_over_parts,
    sum_over_tokens,
)
from jaxmoe.wording import a_type


@pytree
class MoEAux:
    """What a layer says about its routing besides its output, over the tokens of all ranks.

    The Flax layers return it, and so does `router_aux`. What is kept are sums over tokens; losses and statistics are
    made of them where they are asked for. Under `lax.scan` over layers return it as it is: that is one array to store,
    and under plain `jit` the sums are then added up over the mesh once, behind the loop. Read what you need before the
    jitted function returns: what it returns of the sums may lie with several processes.

    Args:
      sums: `[*stack, parts, parts, columns]` float32, of parts of the tokens (two dimensions of them, since sequences
        and their tokens may be split each; 1 x 1 where `axis_name` is given or axes are Explicit). Columns are the
        counts of `MoEStats`, more than once where one sum could not count exactly; the probability of each expert,
        summed over tokens that have any; how many those are; squares of the z-loss, summed over valid tokens; how many
        those are.
      num_experts: of the layer.
      routing: what `route` returned in a Flax layer made with `return_routing=True`, for losses and logs of your own;
        else `None`, and so from `router_aux`. A scan over layers then stores it for every layer, and a `shard_map`
        needs `out_specs` such as `MoEAux(P(), num_experts, routing=P("expert"), logits=P("expert"))`.
      logits: `[*stack, *batch, experts]` float32, what it was made of; there where `routing` is.
    """

    sums: Float[Array, "*stack parts other_parts columns"]
    num_experts: int = dataclasses.field(metadata={"static": True})
    routing: Routing | None = None
    logits: Float[Array, "*stack_and_batch experts"] | None = None

    @property
    def load_balancing_loss(self) -> Float[Array, "*stack"]:
        """`[*stack]` float32, see `jaxmoe.load_balancing_loss`; add it to the loss with a small factor."""
        total = self._total()
        mass, tokens = total[..., -self.num_experts - 3 : -3], total[..., -3:-2]
        rows = self.stats.rows_per_expert
        used = jnp.maximum(rows.sum(-1, keepdims=True, dtype=jnp.int32), 1).astype(mass.dtype)
        # Nothing is left to do behind the sum: that would be a kernel of its own.
        return jnp.sum(rows.astype(mass.dtype) * (rows.shape[-1] / used) * _mean(mass, tokens), -1)

    @property
    def router_z_loss(self) -> Float[Array, "*stack"]:
        """`[*stack]` float32, see `jaxmoe.router_z_loss`; 0 where `router_aux` was given no logits."""
        total = self._total()
        return _mean(total[..., -2], total[..., -1])

    @property
    def stats(self) -> MoEStats:
        """The rows of every expert, and what became of the other slots."""
        counts = jax.lax.stop_gradient(self._total()[..., : -self.num_experts - 3])
        return stats_of(counts.reshape(*counts.shape[:-1], -1, self.num_experts + 2))

    def _total(self) -> Float[Array, "*stack columns"]:
        """Returns the sums of all parts, added up once for all figures: XLA makes an all-reduce of each such sum."""
        known = self.__dict__.get("_known_total")
        if known is None:
            # NumPy's arrays, as `jax.device_get` has them, are here as a whole.
            may_be_elsewhere = isinstance(self.sums, jax.Array) and not isinstance(self.sums, Tracer)
            if may_be_elsewhere and not (self.sums.is_fully_addressable or self.sums.is_fully_replicated):
                raise RuntimeError(
                    "MoEAux: its sums lie with several processes, and adding them up would wait for all of them, for "
                    "ever where only one asks. Read losses and statistics inside of the jitted function, and return "
                    "these: `return loss, aux.stats` in the place of `return loss, aux`."
                )
            known = jnp.sum(self.sums, (-3, -2))
            # What an inner trace makes of `sums` is of no use outside. A tracer that names no trace is not kept either,
            # and no array, since it belongs to the mesh that is set here.
            if isinstance(known, Tracer) and getattr(known, "_trace", known) is getattr(self.sums, "_trace", None):
                object.__setattr__(self, "_known_total", known)
        return known


def router_aux(
    routing: Routing,
    logits: Float[Array, "*batch experts"] | None = None,
    *,
    token_valid: Bool[Array, "*batch"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> MoEAux:
    """Returns the balance loss, the z-loss and the load of a routing: sums for all of them, in one all-reduce.

    The same as `load_balancing_loss`, `router_z_loss` and `load_stats`, or `moe_layer(..., return_stats=True)`, which
    sum over the mesh one by one.

    Args:
      routing: of `route`.
      logits: `[*batch, experts]`, what the routing was made of; without them `router_z_loss` is 0.
      token_valid: `[*batch]` bool, as passed to `route`: other tokens count in no loss, and their slots as unused.
      axis_name: mesh axes over which the tokens are spread, inside `shard_map`.

    Raises:
      TypeError, ValueError: the arrays do not fit each other, or `axis_name` is not a manual mesh axis here.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=8, intermediate=16)
    >>> @jax.jit
    ... def loss(router, x):
    ...     logits = x @ router
    ...     routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=1))
    ...     y = jaxmoe.moe_layer(x, routing.topk_ids, routing.topk_weights, experts, axis_name=None)
    ...     aux = jaxmoe.router_aux(routing, logits)
    ...     return jnp.mean(y**2) + 0.01 * aux.load_balancing_loss + 0.001 * aux.router_z_loss, aux.stats
    >>> (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.eye(8, 4), jnp.eye(8)[:4])
    >>> stats.rows_per_expert
    Array([1, 1, 1, 1], dtype=int32)
    """
    return _aux("router_aux", routing, logits, token_valid, axis_name)


def _aux(
    caller: str,
    routing: Routing,
    logits: jax.Array | None,
    token_valid: jax.Array | None,
    axis_name: str | Sequence[str] | None,
) -> MoEAux:
    if not isinstance(routing, Routing):
        raise TypeError(f"{caller}: routing is {a_type(routing)}; it must be the jaxmoe.Routing that route returned.")
    if logits is not None:
        check_array(caller, "logits", logits)
        if logits.shape != routing.scores.shape:
            raise ValueError(
                f"{caller}: logits have shape {logits.shape}, and routing was made of logits of shape "
                f"{routing.scores.shape}. Pass those, or none."
            )
    check_token_valid(caller, token_valid, routing.scores.shape[:-1], "routing")
    axes, num_experts = manual_axes(caller, axis_name), routing.scores.shape[-1]
    counters = Counters.of(routing.topk_ids.shape, num_experts, axes)
    counts = counters.columns(routing.topk_ids, token_valid)
    mass, routed = _probabilities(routing, token_valid)
    squares = _squares(logits, token_valid) if logits is not None else [jnp.zeros_like(routed)] * 2
    return MoEAux(sum_over_parts([counts.astype(mass.dtype), mass, routed, *squares], axes), num_experts)


def load_balancing_loss(
    routing: Routing,
    *,
    token_valid: Bool[Array, "*batch"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Float[Array, ""]:
    """Returns `E * sum_e f_e * P_e`: 1.0 when the load is even, at most `E` when one expert gets everything.

    `f_e` is the fraction of used slots that chose expert e, `P_e` the mean over tokens that use any of its probability
    (`Routing.scores`); both sum to one. A slot is used whose id is an expert. The gradient flows through `P` alone,
    since counts have none. Fedus et al. 2021 (arXiv:2101.03961), equations 4-6, for any `top_k`; Hugging Face's Mixtral
    does not divide `f` by `top_k` and gets `top_k` times this value. Without any valid token the loss is 0.

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
    return _aux("load_balancing_loss", routing, None, token_valid, axis_name).load_balancing_loss


def router_z_loss(
    logits: Float[Array, "*batch experts"],
    *,
    token_valid: Bool[Array, "*batch"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Float[Array, ""]:
    """Returns the mean over tokens of `log(sum_e exp(logit_e))^2`, which keeps router logits small.

    Zoph et al. 2022, ST-MoE (arXiv:2202.08906), equation 5. Without any valid token it is 0. A valid
    token whose logits are all -inf makes it infinite: leave it out by `token_valid`.

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
    check_array("router_z_loss", "logits", logits)
    check_token_valid("router_z_loss", token_valid, logits.shape[:-1], "logits")
    axes = manual_axes("router_z_loss", axis_name)
    squares, tokens = sum_over_tokens(_squares(logits, token_valid), axes)
    return _mean(squares, tokens)


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
      selection_bias: `[experts]`, as passed to `route`, in float32 or float64: narrower floats lose steps of this size
        to rounding.
      rows_per_expert: `[experts]` integers, `MoEStats.rows_per_expert` of the step, summed over all ranks
        (`load_stats(..., axis_name=...)`).
      rate: size of the step, the scores' own unit: one number for all experts, or an array without dimensions.

    Raises:
      TypeError: an argument is no array, or the rate no number; the bias is in fewer bits than float32; the load is not
        counted in integers.
      ValueError: the shapes differ; the rate has one.

    >>> import jax.numpy as jnp, jaxmoe
    >>> jaxmoe.update_selection_bias(jnp.zeros(3), jnp.array([9, 6, 3]), rate=0.5)
    Array([-0.5,  0. ,  0.5], dtype=float32)
    """
    if isinstance(rows_per_expert, MoEStats):
        raise TypeError("update_selection_bias: rows_per_expert is a MoEStats; pass its rows_per_expert.")
    for name, array in (("selection_bias", selection_bias), ("rows_per_expert", rows_per_expert)):
        check_array("update_selection_bias", name, array)
    if jnp.dtype(selection_bias.dtype).name not in ("float32", "float64"):
        raise TypeError(
            f"update_selection_bias: selection_bias is {selection_bias.dtype}, in which steps get lost to rounding; it "
            "must be float32 or float64. Keep it in float32: selection_bias.astype(jnp.float32)."
        )
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
    _check_rate(rate)
    # Counts of many steps may fit their type where their sum does not; in NumPy they may have more bits than JAX has.
    library = np if isinstance(rows_per_expert, np.ndarray) else jnp
    of_sums = library.sum(library.zeros(0, rows_per_expert.dtype)).dtype
    rows, dtype = rows_per_expert.astype(of_sums), selection_bias.dtype
    parts, rests = library.divmod(rows, rows.size)
    more, rest = library.divmod(rests.sum(), rows.size)
    mean = parts.sum() + more
    below_mean = (rows < mean) | ((rows == mean) & (rest > 0))
    sign = below_mean.astype(dtype) - (rows > mean).astype(dtype)
    return selection_bias + jnp.asarray(rate, dtype) * sign


def _check_rate(rate: Any) -> None:
    """Raises where it is not one number, of Python or in an array."""
    needed = "it must be one number, or an array without dimensions"
    if is_array(rate):
        if rate.shape != ():
            raise ValueError(
                f"update_selection_bias: rate has shape {tuple(rate.shape)}; {needed}: all experts take the same step."
            )
        if not (jnp.issubdtype(rate.dtype, jnp.floating) or jnp.issubdtype(rate.dtype, jnp.integer)):
            raise TypeError(f"update_selection_bias: rate is {rate.dtype}; {needed}, such as 1e-3.")
    elif isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise TypeError(f"update_selection_bias: rate is {a_type(rate)}; {needed}, such as 1e-3.")


def _probabilities(routing: Routing, token_valid: jax.Array | None) -> list[jax.Array]:
    """Returns each token's probabilities, and one where it has any expert: `_masked`."""
    scores = routing.scores
    ids = with_tokens_of(int32_ids(routing.topk_ids), scores)
    valid = any_slot((ids >= 0) & (ids < scores.shape[-1]))
    return _masked(scores, valid if token_valid is None else valid & with_tokens_of(token_valid, scores))


def _squares(logits: jax.Array, token_valid: jax.Array | None) -> list[jax.Array]:
    """Returns each token's square of the z-loss, and one where it is valid: `_masked`."""
    logits = whole_in_last(logits.astype(at_least_float32(logits.dtype)))
    valid = jnp.ones_like(logits[..., 0], bool) if token_valid is None else with_tokens_of(token_valid, logits)
    log_sum = jax.nn.logsumexp(jnp.where(valid[..., None], logits, 0), axis=-1)
    return _masked(log_sum[..., None] ** 2, valid)


def _masked(values: Float[Array, "*batch columns"], valid: Bool[Array, "*batch"]) -> list[Float[Array, "*batch _"]]:
    """Returns the columns of a mean over valid tokens: values that are 0 for others, and what counts tokens."""
    return [jnp.where(valid[..., None], values, 0), valid[..., None].astype(values.dtype)]


def _mean(sums: Float[Array, "..."], tokens: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns means, given the sums of what `_masked` returned; 0 without a valid token."""
    return sums / jnp.maximum(jax.lax.stop_gradient(tokens), 1)
