"""Inputs, closed forms and the tolerance rule for tests of MoE layers, ours and a user's.

Imports neither pytest nor any test library.
"""

import os
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from jaxmoe.activation import resolve_beside
from jaxmoe.experts import Experts, Layout
from jaxmoe.implementations.reference import reference
from jaxmoe.options import Arguments, Precision
from jaxmoe.precision import resolve as resolve_precision
from jaxmoe.routing.stats import int32_ids
from jaxmoe.sharding import ExpertGroup

AnyArray = Float[Array | np.ndarray, "*shape"]
RoutingKind = Literal["uniform", "zipf", "one-hot", "empty-expert", "unused-slots", "all-unused", "repeated", "even"]
# What suites run. "even" is for measurements: an implementation finds nothing in it that "uniform" has not.
ROUTING_KINDS: tuple[RoutingKind, ...] = (
    "uniform",
    "zipf",
    "one-hot",
    "empty-expert",
    "unused-slots",
    "all-unused",
    "repeated",
)


def use_virtual_devices(count: int = 8) -> None:
    """Makes JAX's CPU backend show `count` devices, for meshes on a machine without accelerators.

    Also makes XLA's thread pool large enough: with fewer threads than devices x programs in flight, collectives of
    several virtual devices wait for threads that earlier programs hold, and the process hangs (jax 0.10 to 0.12).

    Args:
      count: number of devices.

    Raises:
      RuntimeError: JAX has made its CPU client already; call this first.
    """
    # The variable that XLA:CPU reads for the size of its pool when the client is made.
    os.environ.setdefault("NPROC", str(max(32, 4 * count)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise RuntimeError(
            "use_virtual_devices: JAX is running already. Call it before the first use of jax.devices() or of an array."
        ) from error


def make_inputs(
    seed: int = 0,
    *,
    tokens: int = 64,
    hidden: int = 32,
    intermediate: int = 48,
    num_experts: int = 8,
    top_k: int = 2,
    dtype: DTypeLike = jnp.float32,
    routing: RoutingKind = "uniform",
    gated: bool = True,
    biases: bool = False,
    token_valid: bool = False,
    layout: Layout | None = None,
) -> Arguments:
    """Returns random arguments of `moe_layer`, whose outputs have unit scale.

    Args:
      seed: of the random numbers.
      tokens: of all ranks.
      hidden: width of a token.
      intermediate: width between the two GEMMs.
      num_experts: of all ranks.
      top_k: slots per token.
      dtype: of tokens and weights.
      routing: `"uniform"` over different experts; `"zipf"`: expert e in proportion to 1 / (e + 1); `"one-hot"`: every
        slot names expert 1; `"empty-expert"`: nobody names expert 0; `"unused-slots"`: a third of the slots is -1;
        `"all-unused"`; `"repeated"`: a token names one expert in all its slots; `"even"`: as uniform, and all experts
        are named equally often, or some once more than others.
      gated: with an up projection.
      biases: with random biases.
      token_valid: with a mask that leaves out a quarter of the tokens; those hold NaN.
      layout: of gate and up in one array, as of `Experts.from_fused`; `None` for two.
    """
    rng = np.random.default_rng(seed)
    wide = np.float64 if jnp.dtype(dtype) == jnp.float64 else np.float32

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape).astype(wide) * wide(scale), dtype)

    x = normal(tokens, hidden)
    experts = Experts(
        w_gate=normal(num_experts, hidden, intermediate, scale=hidden**-0.5),
        w_up=normal(num_experts, hidden, intermediate, scale=hidden**-0.5) if gated else None,
        w_down=normal(num_experts, intermediate, hidden, scale=2 * intermediate**-0.5),
        b_gate=normal(num_experts, intermediate, scale=0.3) if biases else None,
        b_up=normal(num_experts, intermediate, scale=0.3) if biases and gated else None,
        b_down=normal(num_experts, hidden, scale=0.3) if biases else None,
    )
    topk_ids = jnp.asarray(make_ids(rng, tokens, num_experts, top_k, routing))
    raw = rng.random((tokens, top_k)).astype(wide) + wide(0.1)
    topk_weights = jnp.asarray(raw / raw.sum(-1, keepdims=True))
    valid = None
    if token_valid:
        valid = jnp.asarray(rng.random(tokens) < 0.75)
        x = jnp.where(valid[:, None], x, jnp.nan)
    return Arguments(x, topk_ids, topk_weights, experts if layout is None else experts.fuse(layout), valid)


def make_ids(
    rng: np.random.Generator, tokens: int, num_experts: int, top_k: int, routing: RoutingKind
) -> Shaped[np.ndarray, "tokens top_k"]:
    """Returns the experts of every token as `make_inputs` describes them, `[tokens, top_k]` int32."""
    if routing == "one-hot":
        return np.full((tokens, top_k), min(1, num_experts - 1), np.int32)
    if routing == "all-unused":
        return np.full((tokens, top_k), -1, np.int32)
    if routing == "repeated":
        return np.repeat(rng.integers(0, num_experts, (tokens, 1)), top_k, axis=1).astype(np.int32)
    if routing == "even":
        return _even_ids(rng, tokens, num_experts, top_k)
    popularity = 1.0 / (1 + np.arange(num_experts)) if routing == "zipf" else np.ones(num_experts)
    if routing == "empty-expert":
        popularity[0] = 1e-12
    # Gumbel noise on log-popularity: a sample without replacement for every token.
    keys = np.log(popularity) + rng.gumbel(size=(tokens, num_experts))
    ids = np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)
    if routing == "unused-slots":
        ids[rng.random((tokens, top_k)) < 1 / 3] = -1
    return ids


def _even_ids(
    rng: np.random.Generator, tokens: int, num_experts: int, top_k: int
) -> Shaped[np.ndarray, "tokens top_k"]:
    """Deals all experts out to one token after the other, in a random order, and then again, in another one."""
    dealt: list[int] = []
    while len(dealt) < tokens * top_k:
        # Those that the token in hand has already come last, so that it has none twice.
        in_hand = set(dealt[len(dealt) // top_k * top_k :])
        dealt += sorted(rng.permutation(num_experts).tolist(), key=in_hand.__contains__)
    return np.array(dealt[: tokens * top_k], np.int32).reshape(tokens, top_k)


def identity_experts(num_experts: int, hidden: int, dtype: DTypeLike = jnp.float32) -> Experts:
    """Returns plain experts that compute exactly `expert(x) = x` under `activation="relu"`: relu(x) - relu(-x).

    >>> identity_experts(2, 4).w_gate.shape
    (2, 4, 8)
    """
    eye = np.eye(hidden, dtype=np.float32)
    into = jnp.asarray(np.concatenate([eye, -eye], 1), dtype)
    back = jnp.asarray(np.concatenate([eye, -eye], 0), dtype)
    return Experts(
        w_gate=jnp.broadcast_to(into, (num_experts, *into.shape)),
        w_up=None,
        w_down=jnp.broadcast_to(back, (num_experts, *back.shape)),
    )


def dense(
    arguments: Arguments,
    *,
    activation: object = "silu",
    compute_dtype: DTypeLike | None = None,
    precision: Precision | None = None,
) -> jax.Array:
    """Returns the reference's output for all tokens on one device, without any sharding.

    Args:
      arguments: as of `make_inputs`.
      activation: as for `moe_layer`.
      compute_dtype: of intermediate results; `None` is float32, or float64 for float64 tokens.
      precision: as for `moe_layer`.

    Raises:
      ValueError: as `moe_layer`, of an activation that is not known or needs an up projection that is not there.
      TypeError: as `moe_layer`, of an activation that is none.
    """
    x, ids, weights = arguments.x, arguments.topk_ids, arguments.topk_weights
    ids = int32_ids(ids)
    used = (ids >= 0) & (ids < arguments.experts.num_experts)
    if arguments.token_valid is not None:
        used &= arguments.token_valid[:, None]
        x = jnp.where(arguments.token_valid[:, None], x, 0)
    ids, weights = jnp.where(used, ids, -1), jnp.where(used, weights, 0)
    return reference(
        x,
        ids,
        weights,
        arguments.experts,
        activation=resolve_beside(activation, gated=arguments.experts.gated),  # pyright: ignore[reportArgumentType]
        group=ExpertGroup(),
        compute_dtype=compute_dtype,
        precision=resolve_precision(precision, arguments.experts, x.dtype),
    )


def relative_error(value: AnyArray, truth: AnyArray) -> float:
    """Returns `|value - truth| / |truth|` in float64 (Frobenius norms); 0 where both are all zero, NaN stays NaN.

    >>> relative_error(jnp.array([1.0, 1.0]), jnp.array([1.0, 1.0]))
    0.0
    """
    a, b = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    error, size = np.linalg.norm(a - b), np.linalg.norm(b)
    return float(error if size == 0 else error / size)


def tolerance(low_precision: AnyArray, truth: AnyArray, dtype: DTypeLike) -> float:
    """Returns the relative error that an implementation may have: twice that of the same maths in low precision.

    Args:
      low_precision: computed by the reference with every intermediate in `dtype`.
      truth: computed by the reference in a wider type.
      dtype: that the implementation is given; the rounding of one result to it (a quarter of its spacing, as a norm)
        is always granted, for results that the low precision happens to get exactly.
    """
    return 2 * relative_error(low_precision, truth) + float(jnp.finfo(dtype).eps) / 4
