"""Text from the trained model: continues held-out bytes, on the same mesh as the training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxmoe.demo.data import Corpus
from jaxmoe.demo.model import LanguageModel
from jaxmoe.demo.options import Devices, Options

TEMPERATURE = 0.7
# What a function starts with: the model has to invent a name, arguments and a body.
PROMPT_ENDING = b"\n    def "
NUM_BYTES_TO_SAMPLE = 200


def sample(
    model: LanguageModel, options: Options, devices: Devices, held_out: Corpus, count: int = NUM_BYTES_TO_SAMPLE
) -> list[tuple[bytes, bytes]]:
    """Returns pairs of a held-out prompt and what the model writes after it, one pair for each device.

    Args:
      model: trained.
      options: sizes of the run.
      devices: to run on; their mesh must be set.
      held_out: where prompts are from.
      count: bytes to write.
    """
    prompts = held_out.windows_before(PROMPT_ENDING, devices.mesh.size, options.sequence)
    tokens = jax.device_put(prompts, devices.batch_sharding)
    written = np.asarray(_continue(model, tokens, jax.random.key(options.seed), count))
    return [(bytes(p.tolist()), bytes(w.tolist())) for p, w in zip(prompts, written, strict=True)]


@functools.partial(jax.jit, static_argnames="count")
def _continue(
    model: LanguageModel, tokens: Int32[jax.Array, "batch length"], key: jax.Array, count: int
) -> Int32[jax.Array, "batch count"]:
    """Looks at the last `length` bytes for each one that it writes: no cache of keys and values, for simplicity."""

    def next_byte(tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, _ = model(tokens)
        byte = jax.random.categorical(key, logits[:, -1] / TEMPERATURE).astype(jnp.int32)
        return jnp.concatenate([tokens[:, 1:], byte[:, None]], axis=1), byte

    return jax.lax.scan(next_byte, tokens, jax.random.split(key, count))[1].T
