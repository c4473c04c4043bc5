"""A decoder as Mixtral, Qwen3-MoE and gpt-oss are, in Flax NNX; its feed-forward part is `jaxmoe.nnx.MoE`.

    h = embedding[tokens]
    h = h + attention(norm(h));  h = h + moe(norm(h))      once per layer
    logits = norm(h) @ head

What these families differ in is said by `Config`: gpt-oss has biases, attention sinks, windows and longer rotary waves
(YaRN), Qwen3 norms of queries and keys. `checkpoint.py` makes the model of a directory, `generate.py` writes with it.
Apart from experts, which `MoE` spreads over the mesh, weights are on every device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxmoe.nnx import MoE

# Returns a tensor of the checkpoint by its name, which has to have the shape.
Read = Callable[[str, tuple[int, ...]], jax.Array]


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Rotary waves made longer for positions beyond those of the training (Peng et al. 2023, arXiv:2309.00071).

    Args:
      factor: by which slow waves are stretched.
      original_length: positions of the training.
      fast: waves that turn more often than this within them stay as they are.
      slow: waves that turn less often are stretched in full, those between in part.
      truncate: whether the two bounds are moved to whole dimensions.
      attention_factor: queries and keys are multiplied by it; `None` is the paper's `0.1 ln(factor) + 1`.
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a decoder, and which of its parts it has."""

    vocabulary: int
    hidden: int
    heads: int
    key_value_heads: int  # each is shared by heads / key_value_heads queries (GQA)
    head_width: int
    windows: tuple[int | None, ...]  # of each layer: how many positions a token sees, its own included; None is all
    rotary_base: float
    yarn: Yarn | None
    norm_epsilon: float
    biases: bool  # of the projections of attention
    head_norms: bool  # of each query and key
    sinks: bool
    tied: bool  # the head is the embedding


@dataclasses.dataclass(frozen=True)
class Devices:
    """The names and sizes of the mesh's axes, which are Auto; without any there is no mesh."""

    axes: tuple[tuple[str, int], ...]

    def split(self, h: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens hidden"]:
        """Splits sequences over those axes that share them out evenly; along others all devices compute the same.

        Left to itself, the compiler splits them between two layers of experts as these split tokens, which attention
        then has to undo.
        """
        if not self.axes:
            return h
        over, parts = [], 1
        for name, size in self.axes:
            if len(h) % (parts * size) == 0:
                over.append(name)
                parts *= size
        return jax.lax.with_sharding_constraint(h, PartitionSpec(tuple(over) or None))


class KeyValue(NamedTuple):
    """Keys and values of one layer, for all positions that there will be."""

    keys: Float[Array, "batch length key_value_heads width"]
    values: Float[Array, "batch length key_value_heads width"]


class Linear(nnx.Module):
    """`x @ kernel.T + bias`, with the kernel as files have it: `[width_out, width_in]`."""

    def __init__(self, name: str, width_in: int, width_out: int, bias: bool, read: Read) -> None:
        self.kernel = nnx.Param(read(f"{name}.weight", (width_out, width_in)))
        self.bias = nnx.Param(read(f"{name}.bias", (width_out,))) if bias else None

    def __call__(self, x: Float[Array, "*batch width_in"]) -> Float[Array, "*batch width_out"]:
        y = x @ self.kernel[...].T
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """Scales every vector to unit mean square, in float32."""

    def __init__(self, name: str, width: int, epsilon: float, read: Read) -> None:
        self.scale = nnx.Param(read(f"{name}.weight", (width,)))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (unit * self.scale[...]).astype(x.dtype)


def rotary_waves(config: Config) -> tuple[np.ndarray, float]:
    """Returns the angle by which each pair of components turns from one position to the next, and YaRN's factor."""
    width, base, yarn = config.head_width, config.rotary_base, config.yarn
    waves = base ** (-np.arange(0, width, 2, dtype=np.float64) / width)  # [width / 2], fast ones first
    if yarn is None:
        return waves.astype(np.float32), 1.0

    def pair_with(turns: float) -> float:
        """The number, with a fraction, of the pair that turns so often within the original length."""
        return width * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with(yarn.fast), pair_with(yarn.slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    stretched = np.clip((np.arange(width // 2) - first) / max(last - first, 1e-3), 0, 1)
    waves = waves * (1 - stretched) + waves / yarn.factor * stretched
    factor = yarn.attention_factor
    return waves.astype(np.float32), 0.1 * math.log(yarn.factor) + 1 if factor is None else factor


def rotate(
    heads: Float[Array, "batch tokens heads width"], positions: Int32[Array, " tokens"], config: Config
) -> Float[Array, "batch tokens heads width"]:
    """Turns pairs of components by angles in proportion to the position, so that products see distances alone.

    A pair is a component of the first half and the one at its place in the second (Su et al. 2021, arXiv:2104.09864).
    """
    waves, factor = rotary_waves(config)
    angles = positions[:, None, None] * waves  # [tokens, 1, width / 2]
    cosine, sine = factor * jnp.cos(angles), factor * jnp.sin(angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(heads.dtype)


class Attention(nnx.Module):
    """Each token looks at itself and at those before it, or at the last few of them."""

    def __init__(self, config: Config, name: str, window: int | None, read: Read) -> None:
        self.config, self.window = config, window
        width, inner = config.head_width, config.heads * config.head_width
        shared = config.key_value_heads * width
        self.query = Linear(f"{name}.q_proj", config.hidden, inner, config.biases, read)
        self.key = Linear(f"{name}.k_proj", config.hidden, shared, config.biases, read)
        self.value = Linear(f"{name}.v_proj", config.hidden, shared, config.biases, read)
        self.out = Linear(f"{name}.o_proj", inner, config.hidden, config.biases, read)
        norms = config.head_norms
        self.query_norm = Norm(f"{name}.q_norm", width, config.norm_epsilon, read) if norms else None
        self.key_norm = Norm(f"{name}.k_norm", width, config.norm_epsilon, read) if norms else None
        self.sinks = nnx.Param(read(f"{name}.sinks", (config.heads,))) if config.sinks else None

    def __call__(
        self, x: Float[Array, "batch tokens hidden"], cache: KeyValue, position: Int32[Array, ""]
    ) -> tuple[Float[Array, "batch tokens hidden"], KeyValue]:
        """Returns what tokens see, and the cache with them; `position` is that of the first of them."""
        batch, tokens, _ = x.shape
        heads, shared, width = self.config.heads, self.config.key_value_heads, self.config.head_width
        query = self.query(x).reshape(batch, tokens, heads, width)
        key = self.key(x).reshape(batch, tokens, shared, width)
        value = self.value(x).reshape(batch, tokens, shared, width)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        positions = position + jnp.arange(tokens)
        query, key = rotate(query, positions, self.config), rotate(key, positions, self.config)
        cache = KeyValue(
            jax.lax.dynamic_update_slice_in_dim(cache.keys, key, position, axis=1),
            jax.lax.dynamic_update_slice_in_dim(cache.values, value, position, axis=1),
        )

        query = query.reshape(batch, tokens, shared, heads // shared, width)
        scores = jnp.einsum("btkgw,blkw->bkgtl", query, cache.keys, preferred_element_type=jnp.float32) * width**-0.5
        distance = positions[:, None] - jnp.arange(cache.keys.shape[1])  # [tokens, length]
        seen = (distance >= 0) & (distance < (cache.keys.shape[1] if self.window is None else self.window))
        scores = jnp.where(seen, scores, -jnp.inf)  # [batch, key_value_heads, group, tokens, length]
        if self.sinks is not None:
            # A position that takes its share of the attention and has nothing to say.
            sinks = self.sinks[...].astype(jnp.float32).reshape(shared, -1, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : cache.keys.shape[1]]
        mixed = jnp.einsum("bkgtl,blkw->btkgw", weights.astype(x.dtype), cache.values)
        return self.out(mixed.reshape(batch, tokens, heads * width)), cache


class Block(nnx.Module):
    """One layer: attention, then experts."""

    def __init__(self, config: Config, name: str, window: int | None, moe: MoE, devices: Devices, read: Read) -> None:
        self.attention_norm = Norm(f"{name}.input_layernorm", config.hidden, config.norm_epsilon, read)
        self.attention = Attention(config, f"{name}.self_attn", window, read)
        self.moe_norm = Norm(f"{name}.post_attention_layernorm", config.hidden, config.norm_epsilon, read)
        self.moe, self.devices = moe, devices

    def __call__(
        self, h: Float[Array, "batch tokens hidden"], cache: KeyValue, position: Int32[Array, ""]
    ) -> tuple[Float[Array, "batch tokens hidden"], KeyValue, Int32[Array, " experts"]]:
        """Returns the layer's output, its cache, and how many rows each of its experts computed."""
        y, cache = self.attention(self.attention_norm(h), cache, position)
        h = self.devices.split(h + y)
        y, aux = self.moe(self.moe_norm(h))
        return self.devices.split(h + y), cache, aux.stats.rows_per_expert


class Decoder(nnx.Module):
    """Predicts the next token.

    Args:
      config: the model.
      moes: the experts of each layer.
      devices: of the mesh over which `moes` split their tokens.
      dtype: to compute in.
      read: returns the tensors of everything else.
    """

    def __init__(self, config: Config, moes: list[MoE], devices: Devices, dtype: jnp.dtype, read: Read) -> None:
        self.config, self.devices, self.dtype = config, devices, dtype
        self.embedding = nnx.Param(read("model.embed_tokens.weight", (config.vocabulary, config.hidden)))
        self.blocks = nnx.List(
            [
                Block(config, f"model.layers.{layer}", window, moe, devices, read)
                for layer, (window, moe) in enumerate(zip(config.windows, moes, strict=True))
            ]
        )
        self.norm = Norm("model.norm", config.hidden, config.norm_epsilon, read)
        self.head = None if config.tied else Linear("lm_head", config.hidden, config.vocabulary, False, read)

    def empty_cache(self, batch: int, length: int) -> list[KeyValue]:
        """Returns a cache for `length` positions, in layers with a window too."""
        shape = batch, length, self.config.key_value_heads, self.config.head_width
        return [KeyValue(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in self.blocks]

    def run(
        self, tokens: Int32[Array, "batch tokens"], cache: list[KeyValue], position: Int32[Array, ""] | int
    ) -> tuple[Float[Array, "batch tokens hidden"], list[KeyValue], Int32[Array, "layers experts"]]:
        """Returns what the last layer says of tokens that lie at `position` and behind, the cache, and rows per expert.

        Prefill is `run(prompt, empty_cache(...), 0)`, a step of decoding `run(last_token[:, None], cache, position)`.
        """
        h = self.devices.split(self.embedding[...][tokens].astype(self.dtype))
        position = jnp.int32(position)
        filled, rows = [], []
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            h, layer_cache, layer_rows = block(h, layer_cache, position)
            filled.append(layer_cache)
            rows.append(layer_rows)
        return self.norm(h), filled, jnp.stack(rows)

    def logits(self, h: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocabulary"]:
        """Returns the logits of the next token, of what `run` said, in float32."""
        kernel = self.embedding if self.head is None else self.head.kernel  # [vocabulary, hidden]
        return jnp.dot(h, kernel[...].T, preferred_element_type=jnp.float32)

    def __call__(
        self, tokens: Int32[Array, "batch tokens"]
    ) -> tuple[Float[Array, "batch tokens vocabulary"], Int32[Array, "layers experts"]]:
        """Returns the logits behind every token of whole sequences, and how many rows each expert computed."""
        h, _, rows = self.run(tokens, self.empty_cache(*tokens.shape), 0)
        return self.logits(h), rows
