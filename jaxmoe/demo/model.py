"""The model: a decoder over bytes whose feed-forward part is `jaxmoe.nnx.MoE`.

    h = embedding[bytes]
    h = h + attention(norm(h));  h = h + moe(norm(h))      once per layer
    logits = norm(h) @ embedding.T

Causal attention with rotary positions (Su et al. 2021, arXiv:2104.09864), RMSNorm (Zhang and Sennrich 2019,
arXiv:1910.07467). Parameters and norms are float32, matrix products run in the dtype of `Devices`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import jaxmoe
from jaxmoe.demo.data import NUM_BYTES
from jaxmoe.demo.options import DATA_AXIS, EXPERT_AXIS, HEAD_WIDTH, Devices, Options
from jaxmoe.nnx import MoE, MoEAux

ROTARY_BASE = 10_000.0


class Matrix(nnx.Module):
    """`x @ kernel` in the dtype of `x`."""

    def __init__(self, width_in: int, width_out: int, scale: float, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (width_in, width_out)) * scale * width_in**-0.5)

    def __call__(self, x: Float[Array, "*batch width_in"]) -> Float[Array, "*batch width_out"]:
        return x @ self.kernel[...].astype(x.dtype)


class Norm(nnx.Module):
    """Scales every vector to unit mean square, in float32."""

    def __init__(self, hidden: int) -> None:
        self.scale = nnx.Param(jnp.ones(hidden))

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        return (unit * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Each byte looks at itself and at those before it."""

    def __init__(self, hidden: int, layers: int, *, rngs: nnx.Rngs) -> None:
        self.query_key_value = Matrix(hidden, 3 * hidden, 1.0, rngs=rngs)
        # Smaller with depth, so that the sum of all layers' outputs starts at the scale of one.
        self.out = Matrix(hidden, hidden, (2 * layers) ** -0.5, rngs=rngs)

    def __call__(self, x: Float[Array, "batch length hidden"]) -> Float[Array, "batch length hidden"]:
        heads = self.query_key_value(x).reshape(*x.shape[:2], -1, HEAD_WIDTH)
        query, key, value = jnp.split(heads, 3, axis=2)
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.reshape(x.shape))


def rotate(heads: Float[Array, "batch length heads width"]) -> Float[Array, "batch length heads width"]:
    """Turns pairs of components by angles in proportion to the position, so that products see distances alone."""
    length, width = heads.shape[1], heads.shape[3]
    frequencies = ROTARY_BASE ** (-jnp.arange(0, width, 2) / width)
    angles = (jnp.arange(length)[:, None] * frequencies)[None, :, None, :]
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], -1).astype(heads.dtype)


class Block(nnx.Module):
    """One layer: attention, then experts."""

    def __init__(self, options: Options, devices: Devices, *, rngs: nnx.Rngs) -> None:
        self.attention_norm, self.moe_norm = Norm(options.hidden), Norm(options.hidden)
        self.attention = Attention(options.hidden, options.layers, rngs=rngs)
        self.moe = MoE(
            options.hidden,
            options.intermediate,
            options.experts,
            jaxmoe.RouterConfig(top_k=options.top_k),
            axis_name=EXPERT_AXIS,
            data_axes=DATA_AXIS,
            implementation=options.implementation,
            dtype=devices.dtype,
            # Small logits: chance spreads the first batches, and the load starts near its mean.
            router_init=jax.nn.initializers.normal(0.02),
            rngs=rngs,
        )

    def __call__(
        self, h: Float[Array, "batch length hidden"]
    ) -> tuple[Float[Array, "batch length hidden"], Float[Array, "batch length hidden"], MoEAux]:
        """Returns the layer's output, the input of its experts, and what they say about their routing."""
        h = h + self.attention(self.attention_norm(h))
        x = self.moe_norm(h)
        y, aux = self.moe(x)
        return h + y, x, aux


class LanguageModel(nnx.Module):
    """Predicts the next byte."""

    def __init__(self, options: Options, devices: Devices, *, rngs: nnx.Rngs) -> None:
        # Small, so that the logits of the untrained model are: its loss starts at ln(256).
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (NUM_BYTES, options.hidden)) * 0.02)
        self.blocks = nnx.List([Block(options, devices, rngs=rngs) for _ in range(options.layers)])
        self.norm = Norm(options.hidden)
        self.dtype = devices.dtype

    def __call__(self, tokens: Int32[Array, "batch length"]) -> tuple[Float[Array, "batch length bytes"], list[MoEAux]]:
        """Returns the logits of the byte after each, float32, and what every MoE layer says about its routing."""
        logits, _, aux = self.run(tokens)
        return logits, aux

    def moe_inputs(self, tokens: Int32[Array, "batch length"]) -> list[Float[Array, "batch length hidden"]]:
        """Returns what the experts of every layer are given."""
        return self.run(tokens)[1]

    def run(self, tokens: Int32[Array, "batch length"]) -> tuple[Any, list[Any], list[MoEAux]]:
        """Returns the logits, the inputs of all MoE layers and what these say about their routing."""
        hidden = self.embedding.shape[1]
        h = (self.embedding[...][tokens] * hidden**0.5).astype(self.dtype)
        inputs, auxiliary = [], []
        for block in self.blocks:
            h, x, aux = block(h)
            inputs.append(x)
            auxiliary.append(aux)
        logits = self.norm(h).astype(jnp.float32) @ self.embedding[...].T
        return logits, inputs, auxiliary
