"""From router logits to experts and weights: the routers of the published architectures in plain differentiable JAX.

`route` computes, for the logits `z` of one token,

    s = score(z)                                    softmax, sigmoid, sqrt(softplus), or z itself (softmax after top-k)
    ids = top_k(s + bias, within the best groups)   ties go to the lowest id
    w = scaling_factor * normalise(s[ids])          without the bias

in float32 (float64 stays float64), whatever the dtype of the logits: a selection made in bfloat16 picks other experts.
Losses and bias updates that keep the experts balanced are in `balance.py`, load counts in `stats.py`.
"""

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer

from jaxmoe.array_layout import whole_in_last, with_tokens_of
from jaxmoe.arrays import check_array
from jaxmoe.formats import at_least_float32
from jaxmoe.pytrees import pytree
from jaxmoe.routing.largest import largest, lowered, positions_of
from jaxmoe.routing.stats import check_token_valid, int32_ids
from jaxmoe.wording import a_type

Score = Literal["softmax", "topk_softmax", "sigmoid", "sqrtsoftplus"]

# Added to sums of scores before dividing by them. Far below the rounding of any sum of softmax scores, so it matters
# only where independent scores (sigmoid, sqrtsoftplus) have all underflowed.
_EPSILON = 1e-20


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How experts are chosen and weighted. Hashable, and static under `jax.jit`.

    The classmethods are the routers of published models; what they are given replaces fields of theirs:
    `RouterConfig.qwen3_moe(top_k=4)`.

    Args:
      top_k: experts per token.
      score: what a logit becomes before the selection. `"softmax"` over all experts; `"sigmoid"` and `"sqrtsoftplus"`
        (`sqrt(log(1 + exp(z)))`) of each logit alone; `"topk_softmax"` selects by the logits themselves and takes the
        softmax over the selected ones.
      renormalize: divide the selected scores by their sum plus `epsilon`. Weights of `"topk_softmax"` sum to one as
        they are.
      num_groups: groups of consecutive experts for group-limited selection; 1 does not limit.
      top_groups: groups a token may choose from: those with the largest sum of their two best selection scores. Groups
        with one expert whose score is not -inf come behind all others by that score, and before those with none.
      scaling_factor: multiplies the weights at the end.
      epsilon: of the renormalisation.

    Raises:
      TypeError, ValueError: a field is of the wrong type or out of range.

    >>> import jaxmoe
    >>> jaxmoe.RouterConfig.deepseek_v3(top_k=4).scaling_factor
    2.5
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scaling_factor: float = 1.0
    epsilon: float = _EPSILON

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_groups"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral):
                raise TypeError(f"RouterConfig: {name}={value!r} must be a Python integer.")
            if isinstance(value, bool) or value < 1:
                raise ValueError(f"RouterConfig: {name}={value!r} must be an integer of at least 1.")
            object.__setattr__(self, name, int(value))
        if self.score not in get_args(Score):
            raise ValueError(
                f"RouterConfig: score={self.score!r} is not known. Use one of {', '.join(map(repr, get_args(Score)))}."
            )
        if not isinstance(self.renormalize, bool | np.bool_):
            raise TypeError(f"RouterConfig: renormalize={self.renormalize!r} must be True or False.")
        for name in ("scaling_factor", "epsilon"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"RouterConfig: {name}={value!r} must be a Python number; float(array) makes one.")
            # A number of NumPy has a dtype, which weights would get.
            object.__setattr__(self, name, float(value))
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"RouterConfig: top_groups={self.top_groups} exceeds num_groups={self.num_groups}. "
                "A token can keep at most all groups."
            )
        if not (math.isfinite(self.scaling_factor) and self.scaling_factor > 0):
            raise ValueError(f"RouterConfig: scaling_factor={self.scaling_factor} must be positive and finite.")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"RouterConfig: epsilon={self.epsilon} must be zero or positive, and finite.")

    @classmethod
    def mixtral(cls, **changes: Any) -> "RouterConfig":
        """Mixtral 8x7B (8 experts): Jiang et al. 2024, arXiv:2401.04088, section 2.1.

        Their softmax over the two largest logits is computed as softmax, top-k, renormalise: the same numbers.
        """
        return cls(**{"top_k": 2, "epsilon": 0.0} | changes)

    @classmethod
    def qwen3_moe(cls, **changes: Any) -> "RouterConfig":
        """Qwen3-30B-A3B and 235B-A22B (128 experts): Yang et al. 2025, arXiv:2505.09388; `norm_topk_prob` is true."""
        return cls(**{"top_k": 8, "epsilon": 0.0} | changes)

    @classmethod
    def deepseek_v3(cls, **changes: Any) -> "RouterConfig":
        """DeepSeek-V3 and R1 (256 experts): arXiv:2412.19437, equations 12-16; groups and scaling of its configuration.

        Needs the selection bias of the checkpoint, `e_score_correction_bias`.
        """
        published = {"top_k": 8, "score": "sigmoid", "num_groups": 8, "top_groups": 4, "scaling_factor": 2.5}
        return cls(**published | changes)

    @classmethod
    def kimi_k2(cls, **changes: Any) -> "RouterConfig":
        """Kimi K2 (384 experts): arXiv:2507.20534 and its configuration, DeepSeek-V3's router without groups."""
        return cls(**{"top_k": 8, "score": "sigmoid", "scaling_factor": 2.827} | changes)

    @classmethod
    def gpt_oss(cls, **changes: Any) -> "RouterConfig":
        """gpt-oss-20b (32 experts) and 120b (128): arXiv:2508.10925. The router's own bias belongs in the logits."""
        return cls(**{"top_k": 4, "score": "topk_softmax"} | changes)

    @classmethod
    def deepseek_v4(cls, **changes: Any) -> "RouterConfig":
        """DeepSeek-V4-Flash (256 experts): `DeepseekV4Config` of Hugging Face transformers 5.23.

        Needs `e_score_correction_bias` as selection bias. Its first layers choose experts by a table from token id to
        experts: pass those as `route(..., topk_ids=table[tokens])`.
        """
        return cls(**{"top_k": 6, "score": "sqrtsoftplus", "scaling_factor": 1.5} | changes)


_WITH_SELECTION_BIAS = (RouterConfig.deepseek_v3, RouterConfig.kimi_k2, RouterConfig.deepseek_v4)


def preset_with_selection_bias(config: RouterConfig) -> str | None:
    """Returns the name of a published router that needs a selection bias, where this is one but for `top_k`.

    Someone who changed more has a router of their own, which may do without.

    >>> preset_with_selection_bias(RouterConfig.deepseek_v3(top_k=4))
    'deepseek_v3'
    >>> preset_with_selection_bias(RouterConfig(top_k=4, score="sigmoid")) is None
    True
    """
    names = (preset.__name__ for preset in _WITH_SELECTION_BIAS if config == preset(top_k=config.top_k))
    return next(names, None)


@pytree
class Routing:
    """What `route` decided.

    Args:
      topk_ids: `[*batch, top_k]` int32, the experts of each token, best first; -1 where the token is not valid.
      topk_weights: `[*batch, top_k]` float32, the weight of each of them; 0 where unused.
      scores: `[*batch, experts]` float32, the scores of all experts as probabilities: each token's sum to one (softmax
        of the logits, or independent scores divided by their sum). Zero for tokens that are not valid. The balance
        loss differentiates through these; where no loss is taken, `jax.jit` removes them.
    """

    topk_ids: Int32[Array, "*batch top_k"]
    topk_weights: Float[Array, "*batch top_k"]
    scores: Float[Array, "*batch experts"]


def route(
    logits: Float[Array, "*batch experts"],
    config: RouterConfig,
    *,
    selection_bias: Float[Array, " experts"] | None = None,
    token_valid: Bool[Array, "*batch"] | None = None,
    topk_ids: Integer[Array, "*batch top_k"] | None = None,
) -> Routing:
    """Chooses the experts of every token and their weights.

    Ties go to the expert, and the group, with the lowest index. Gradients flow to the logits through `topk_weights` and
    `scores`; the choice itself and the selection bias have none. A logit of -inf is allowed and gives its expert no
    weight; a token that has no other has weights and scores of 0. A NaN is chosen first: a token that has one among its
    logits, and every token where the selection bias has one, has NaN among its weights.

    Sources: softmax after top-k, Shazeer et al. 2017 (arXiv:1701.06538, equations 3 and 5, without the noise); softmax
    before top-k, Fedus et al. 2021 (arXiv:2101.03961, equation 1); selection bias, Wang et al. 2024 (arXiv:2408.15664,
    section 3); sigmoid scores, normalisation, bias and groups, DeepSeek-V3 (arXiv:2412.19437, equations 12-16 and
    node-limited routing in section 2.1.2; the sum of the best two per group is that of its published code);
    sqrt(softplus) scores, the published code of DeepSeek-V4.

    Args:
      logits: `[*batch, experts]`, any float dtype; computed in float32, float64 stays float64.
      config: the router.
      selection_bias: `[experts]`, added to the scores for the selection only (see `update_selection_bias`).
      token_valid: `[*batch]` bool. Tokens that are not valid get ids -1 and weights 0, and whatever their logits hold,
        NaN included, reaches neither an output nor a gradient.
      topk_ids: `[*batch, top_k]` integers: a choice made elsewhere (a hash layer, the replay of a recorded rollout),
        which is only weighted here. Slots outside `[0, experts)` get weight 0 and stay as they are.

    Raises:
      TypeError: logits, bias, mask or ids that are no arrays, or of the wrong dtype.
      ValueError: shapes that do not fit each other or the configuration.

    Warns:
      UserWarning: a preset whose model selects with a bias (DeepSeek, Kimi) comes without one.

    >>> import jax.numpy as jnp, jaxmoe
    >>> routing = jaxmoe.route(jnp.array([[0.0, 3.0, 1.0, 2.0]]), jaxmoe.RouterConfig(top_k=2))
    >>> routing.topk_ids
    Array([[1, 3]], dtype=int32)
    >>> [round(weight, 3) for weight in routing.topk_weights[0].tolist()]
    [0.731, 0.269]
    """
    _check(logits, config, selection_bias, token_valid, topk_ids)
    if selection_bias is None and topk_ids is None and (preset := preset_with_selection_bias(config)):
        warnings.warn(
            f"route: RouterConfig.{preset}() comes without selection_bias, which chooses the experts of that model and "
            "keeps them evenly loaded. Pass selection_bias=, the checkpoint's e_score_correction_bias; where training "
            f"starts, jnp.zeros({logits.shape[-1]}).",
            UserWarning,
            stacklevel=2,
        )
    return choose(logits, config, selection_bias, token_valid, topk_ids)


def choose(
    logits: Float[Array, "*batch experts"],
    config: RouterConfig,
    selection_bias: Float[Array, " experts"] | None,
    token_valid: Bool[Array, "*batch"] | None,
    topk_ids: Integer[Array, "*batch top_k"] | None = None,
) -> Routing:
    """`route` of arguments that have been checked."""
    num_experts = logits.shape[-1]
    logits = whole_in_last(logits.astype(at_least_float32(logits.dtype)))
    selection_bias = selection_bias if selection_bias is None else whole_in_last(selection_bias)
    if token_valid is not None:
        token_valid = with_tokens_of(token_valid, logits)
        # Before any arithmetic: a zero cotangent times the slope at a NaN would be a NaN again.
        logits = jnp.where(token_valid[..., None], logits, 0)
    scores = _SCORE_FUNCTIONS[config.score](logits)
    ids = _select(scores, config, selection_bias) if topk_ids is None else with_tokens_of(int32_ids(topk_ids), logits)
    used = (ids >= 0) & (ids < num_experts)
    if token_valid is not None:
        used &= token_valid[..., None]
        ids = jnp.where(token_valid[..., None], ids, -1)
    shown = scores
    if selection_bias is not None:
        # An expert whose bias is NaN is chosen, which its score does not show. A term has no gradient, unlike a select.
        nan_or_zero = jnp.where(jnp.isnan(selection_bias), jnp.nan, 0.0).astype(scores.dtype)
        shown = scores + jnp.expand_dims(nan_or_zero, range(scores.ndim - 1))
    selected = jnp.take_along_axis(shown, jnp.where(used, ids, 0), axis=-1, mode="promise_in_bounds")
    if config.score == "topk_softmax":
        weights = _softmax(selected, used)
    else:
        weights = jnp.where(used, selected, 0)
        if config.renormalize:
            # A token that uses no slot, or whose choice made elsewhere has scores of zero alone, would divide zero by
            # zero, where epsilon is zero.
            some = (weights != 0).any(-1, keepdims=True)
            weights = _divide_by_sum(weights, jnp.where(some, jnp.asarray(config.epsilon, weights.dtype), 1))
    weights = jnp.where(used, weights * config.scaling_factor, 0)
    if config.score in ("sigmoid", "sqrtsoftplus"):
        probabilities = _divide_by_sum(scores, _EPSILON)
    else:
        probabilities = _softmax(logits)
    if token_valid is not None:
        probabilities = jnp.where(token_valid[..., None], probabilities, 0)
    return Routing(topk_ids=ids, topk_weights=weights, scores=probabilities)


def _softmax(logits: jax.Array, used: jax.Array | bool = True) -> jax.Array:
    # Zeros where no logit is more than minus infinity: their softmax would be NaN, and its gradient.
    weighed = used & (logits != -jnp.inf)
    weights = jax.nn.softmax(jnp.where(weighed, logits, jnp.finfo(logits.dtype).min), axis=-1)
    return jnp.where(weighed, weights, 0)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    # log(1 + exp(z)) underflows for very negative z, and the slope of a square root at zero is infinite: an expert that
    # was not chosen would turn its token's gradient into NaN. Below -40, sqrt(softplus(z)) is exp(z / 2) to all digits.
    tiny = logits < -40
    return jnp.where(
        tiny,
        jnp.exp(0.5 * jnp.where(tiny, logits, 0)),
        jnp.sqrt(jax.nn.softplus(jnp.where(tiny, 0, logits))),
    )


def _divide_by_sum(scores: jax.Array, epsilon: float | jax.Array) -> jax.Array:
    # Scores / total, written so that total / total = 1 carries the derivative: JAX's rule for a quotient squares the
    # denominator, which overflows float32 where all scores have underflowed and only epsilon is left.
    total = scores.sum(-1, keepdims=True) + epsilon
    size = jax.lax.stop_gradient(total)
    return (scores / size) / (total / size)


_SCORE_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": _softmax,
    "topk_softmax": lambda logits: logits,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


def _select(
    scores: Float[Array, "*batch experts"], config: RouterConfig, bias: Float[Array, " experts"] | None
) -> Int32[Array, "*batch top_k"]:
    """Returns the ids of the `top_k` largest `scores + bias` in the best groups, largest first, ties by lowest id."""
    choice = scores
    if bias is not None:
        choice += jnp.expand_dims(bias.astype(scores.dtype), range(scores.ndim - 1))
    choice = jax.lax.stop_gradient(choice)
    if config.num_groups > 1:
        group_size = choice.shape[-1] // config.num_groups
        grouped = choice.reshape(*choice.shape[:-1], config.num_groups, group_size)
        best = jnp.argmax(grouped, axis=-1, keepdims=True).astype(jnp.int32)
        others = jnp.where(positions_of(grouped) == best, -jnp.inf, grouped)
        first, second = grouped.max(-1), others.max(-1)
        # Of minus infinity the sum would say nothing: one expert that is not masked comes before none, the best first.
        is_alone = jnp.isfinite(first) & (second == -jnp.inf)
        group_score = jnp.where(is_alone, lowered(first), first + second)
        kept = largest(group_score, config.top_groups)
        is_kept = (kept[..., None] == positions_of(group_score)[..., None, :]).any(-2)
        # An expert of a kept group comes before any other, also where its logit or its bias is minus infinity.
        allowed = jnp.maximum(grouped, jnp.finfo(grouped.dtype).min)
        choice = jnp.where(is_kept[..., None], allowed, -jnp.inf).reshape(choice.shape)
    return largest(choice, config.top_k)


def _check(
    logits: jax.Array,
    config: Any,
    selection_bias: jax.Array | None,
    token_valid: jax.Array | None,
    topk_ids: jax.Array | None,
) -> None:
    if not isinstance(config, RouterConfig):
        raise TypeError(f"route: config is {a_type(config)}; pass jaxmoe.RouterConfig(top_k=...).")
    check_array("route", "logits", logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"route: logits are {logits.dtype}; they must be a float array, best float32.")
    if logits.ndim < 1:
        raise ValueError("route: logits have no dimension; they must be [*batch, experts].")
    batch, num_experts = logits.shape[:-1], logits.shape[-1]
    if config.top_k > num_experts:
        raise ValueError(
            f"route: top_k={config.top_k} exceeds num_experts={num_experts}, the last dimension of logits of shape "
            f"{logits.shape}. Choose top_k of at most {num_experts}."
        )
    if config.num_groups > 1:
        group_size, rest = divmod(num_experts, config.num_groups)
        if rest or group_size < 2:
            raise ValueError(
                f"route: num_experts={num_experts} cannot be split into num_groups={config.num_groups} equal groups of "
                "at least 2 experts (a group's score is the sum of its best two). Choose a divisor of "
                f"{num_experts} up to {num_experts // 2}, or num_groups=1."
            )
        if config.top_k > config.top_groups * group_size:
            raise ValueError(
                f"route: top_k={config.top_k} exceeds the {config.top_groups * group_size} experts of top_groups="
                f"{config.top_groups} groups of {group_size}. Raise top_groups or lower top_k."
            )
    if selection_bias is not None:
        check_array("route", "selection_bias", selection_bias)
        if not jnp.issubdtype(selection_bias.dtype, jnp.floating):
            raise TypeError(f"route: selection_bias is {selection_bias.dtype}; it must be a float array, best float32.")
        if selection_bias.shape != (num_experts,):
            raise ValueError(
                f"route: selection_bias has shape {selection_bias.shape}; it needs one entry per expert: "
                f"{(num_experts,)}."
            )
    check_token_valid("route", token_valid, batch, "logits")
    if topk_ids is not None:
        if selection_bias is not None:
            raise ValueError(
                "route: topk_ids and selection_bias are both given, but the bias only selects and topk_ids is the "
                "selection. Leave one out."
            )
        check_array("route", "topk_ids", topk_ids)
        if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
            raise TypeError(f"route: topk_ids is {topk_ids.dtype}; it must hold integers.")
        if topk_ids.shape != (*batch, config.top_k):
            raise ValueError(
                f"route: topk_ids has shape {topk_ids.shape}; logits of shape {logits.shape} and top_k={config.top_k} "
                f"need {(*batch, config.top_k)}."
            )
