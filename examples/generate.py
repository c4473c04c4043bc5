"""Writes on with Mixtral, Qwen3-MoE or gpt-oss, from a directory as Hugging Face transformers saves it.

    python examples/generate.py --checkpoint Qwen3-30B-A3B --prompt "The tides are" --max-new-tokens 64
    python examples/generate.py --checkpoint gpt-oss-20b --prompt-ids 976,260,5419 --mesh data=2,expert=4

It runs on all GPUs that JAX has, else on the CPU; `--mesh expert=4` without GPUs takes 4 virtual devices of it. The
model is in `decoder.py`, and how a directory becomes one in `checkpoint.py`.
"""

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from checkpoint import EXPERT_AXIS, FORMATS, load
from decoder import Decoder
from flax import nnx
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Int32

from jaxmoe.testing import use_virtual_devices


@functools.partial(nnx.jit, static_argnames=("max_new_tokens", "ends"))
def generate(
    model: Decoder, prompt: Int32[Array, "batch length"], max_new_tokens: int, ends: tuple[int, ...] = ()
) -> Int32[Array, "batch new"]:
    """Returns the tokens of the largest logits behind each prompt, all in one program; compiled for each length.

    Args:
      model: of `load`.
      prompt: ids of tokens; prompts of a batch have the same length.
      max_new_tokens: how many to write.
      ends: tokens behind which a sequence is over: what would follow is -1, and nothing is computed once all are over.
    """
    batch, length = prompt.shape

    def best(h: Any) -> Any:
        """The likeliest token behind the last of [batch, tokens, hidden]."""
        return jnp.argmax(model.logits(h[:, -1]), axis=-1).astype(jnp.int32)  # [batch]

    # Prefill: the whole prompt at once.
    h, cache, _ = model.run(prompt, model.empty_cache(batch, length + max_new_tokens), 0)
    written = jnp.full((batch, max_new_tokens), -1, jnp.int32).at[:, 0].set(best(h))

    def is_over(token: Any) -> Any:
        return (token == -1) | jnp.isin(token, jnp.array(ends, jnp.int32))  # [batch]

    def goes_on(state: Any) -> Any:
        count, written, _ = state
        return (count < max_new_tokens) & ~is_over(written[:, count - 1]).all()

    def write(state: Any) -> Any:
        """Decodes one token of every sequence."""
        count, written, cache = state
        last = written[:, count - 1]
        h, cache, _ = model.run(jnp.maximum(last, 0)[:, None], cache, length + count - 1)
        return count + 1, written.at[:, count].set(jnp.where(is_over(last), -1, best(h))), cache

    return jax.lax.while_loop(goes_on, write, (1, written, cache))[1]


def axes_of(sizes: Sequence[str] | None) -> dict[str, int]:
    """Returns the mesh axes of `data=2,expert=4`."""
    axes = {}
    for each in sizes or ():
        name, _, size = each.partition("=")
        if not (name and size.isdecimal() and int(size)):
            raise ValueError(f"--mesh={','.join(sizes or ())}: must be axes with their sizes, such as data=2,expert=4.")
        axes[name] = int(size)
    return axes


def mesh_of(axes: Mapping[str, int]) -> Mesh:
    """Returns the mesh of these axes; without any, all devices are for experts."""
    axes = axes or {EXPERT_AXIS: jax.device_count()}
    if (needed := math.prod(axes.values())) > jax.device_count():
        raise ValueError(f"--mesh: {dict(axes)} needs {needed} devices, and there are {jax.device_count()}.")
    # Auto axes: the compiler chooses how to split what is computed between the experts of one layer and the next.
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def prompt_of(ids: Sequence[Any], vocabulary: int) -> Int32[Array, "1 length"]:
    """Returns a prompt. Its ids are checked: what lies outside of an embedding gets, of JAX, some vector of it."""
    if wrong := [each for each in ids if not str(each).isdecimal() or int(each) >= vocabulary]:
        raise ValueError(f"the prompt has {wrong[0]!r}; ids of tokens are numbers from 0 to {vocabulary - 1}.")
    return jnp.array([[int(each) for each in ids]], jnp.int32)


def ends_of(directory: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text, of generation_config.json or config.json."""
    for file in (directory / "generation_config.json", directory / "config.json"):
        if file.is_file() and (ends := json.loads(file.read_text()).get("eos_token_id")) is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return ()


def tokenizer_of(directory: Path) -> Any:
    """Returns the tokenizer of a directory, or raises what it takes."""
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError("--prompt needs a package: pip install tokenizers. Or pass --prompt-ids.") from error
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(f"{directory / 'tokenizer.json'}: is not there, and --prompt needs it. Or pass --prompt-ids.")
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def define_flags() -> None:
    """Defines the flags of the command line: not when this is imported, beside programs that have some themselves."""
    flags.DEFINE_string("checkpoint", None, "directory with config.json and safetensors files", required=True)
    flags.DEFINE_string("prompt", None, "text to go on with; needs tokenizer.json and the package tokenizers")
    flags.DEFINE_list("prompt_ids", None, "the same as ids of tokens: 1,2,3")
    flags.DEFINE_integer("max_new_tokens", 16, "tokens to write at most", lower_bound=1)
    flags.DEFINE_list("mesh", None, "sizes of axes, such as data=2,expert=4 (default: all devices for experts)")
    flags.DEFINE_enum("experts", None, tuple(FORMATS), "format to quantise experts to (default: as they are)")
    flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float16", "float32"), "to compute in")
    names = ("megakernel", "xla", "reference")
    flags.DEFINE_enum("implementation", None, names, "of moe_layer (default: it chooses)")


def run() -> None:
    """Reads the checkpoint, writes, and prints what was written."""
    given = flags.FLAGS
    directory, axes = Path(given.checkpoint), axes_of(given.mesh)
    tokenizer = None if given.prompt is None else tokenizer_of(directory)
    ids = given.prompt_ids or [] if tokenizer is None else tokenizer.encode(given.prompt).ids
    if not ids:
        raise ValueError("pass --prompt-ids=1,2,3, or --prompt with a text.")
    if axes:
        # Of JAX's CPU backend, which stays unused where JAX has GPUs.
        use_virtual_devices(math.prod(axes.values()))
    with jax.set_mesh(mesh_of(axes)):
        model = load(directory, dtype=given.dtype, experts=given.experts, implementation=given.implementation)
        new = generate(model, prompt_of(ids, model.config.vocabulary), given.max_new_tokens, ends_of(directory))
    written = [int(each) for each in new[0] if each >= 0]
    print(",".join(map(str, written)))
    if tokenizer is not None:
        print(tokenizer.decode(ids + written))


def underscored(argument: str) -> str:
    """Returns an argument with underscores for the dashes in its name: `--prompt_ids=1` for `--prompt-ids=1`."""
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


def parse(arguments: Sequence[str]) -> list[str]:
    """Parses the command line."""
    if {"--help", "-h"} & set(arguments[1:]):
        print(f"{__doc__}{flags.FLAGS.main_module_help()}")
        sys.exit(0)
    try:
        positional = flags.FLAGS([underscored(each) for each in arguments])
    except flags.Error as error:
        sys.exit(f"generate: {str(error).rstrip('.')}. See --help.")
    logging.set_verbosity(logging.WARNING)  # absl would show what JAX logs for its developers
    return positional


def main(_: Sequence[str]) -> None:
    """Ends with one line that says what was wrong, if anything was."""
    try:
        run()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        sys.exit(f"generate: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=parse)
