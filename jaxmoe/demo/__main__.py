"""Command line of the demo: reads the options, runs it, turns the verdict into an exit status."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

from jaxmoe.demo.interrupt import exit_on_interrupt
from jaxmoe.demo.options import HEAD_WIDTH, SHORT, VIRTUAL_DEVICES, Options
from jaxmoe.implementations import IMPLEMENTATIONS

USAGE = """Trains a small Mixture-of-Experts language model on the source of Python's standard library,
on the GPUs that JAX has, else on 8 virtual CPU devices; checks and plots what came out.

    make demo ARGS="--short"          python -m jaxmoe.demo --short

Exit status 0: the held-out loss fell as promised and the layer equals the reference. 1: not. 130: Ctrl-C.
"""
# What only this module needs to know; importing Flax and matplotlib can wait until the options are right.
PACKAGES = ("flax", "optax", "matplotlib", "tqdm")


def _define_size(name: str, meaning: str) -> None:
    default, short = getattr(Options(), name), getattr(SHORT, name)
    values = f"{default}" if default == short else f"{default}, or {short} with --short"
    flags.DEFINE_integer(name, None, f"{meaning} (default: {values})", lower_bound=1)


_define_size("steps", "training steps")
_define_size("batch", "sequences in a step, over all devices")
_define_size("sequence", "bytes in a sequence")
_define_size("hidden", f"width of the model and of each expert, a multiple of {HEAD_WIDTH}")
_define_size("layers", "layers, each attention and experts")
_define_size("experts", "experts in a layer, a multiple of the expert axis of the mesh")
_define_size("top_k", "experts that each byte visits")
flags.DEFINE_enum("implementation", None, tuple(IMPLEMENTATIONS), "of moe_layer (default: the layer's own choice)")
flags.DEFINE_integer("seed", Options().seed, "of parameters, batches and sampled text", lower_bound=0)
flags.DEFINE_string("output", "demo_output", "folder that the plots are written to")
flags.DEFINE_boolean("short", False, "a small run of about 20 seconds that shows every part")
flags.register_validator(
    "hidden",
    lambda hidden: hidden is None or hidden % HEAD_WIDTH == 0,
    message=f"must be a multiple of {HEAD_WIDTH}, the width of an attention head.",
)


def parse(arguments: Sequence[str]) -> list[str]:
    """Parses the command line; absl alone would end `--help` with status 1, which make reports as an error."""
    if {"--help", "-help", "-h"} & set(arguments[1:]):
        print(USAGE + flags.FLAGS.main_module_help())
        sys.exit(0)
    try:
        positional = flags.FLAGS(arguments)
        if len(positional) > 1:
            raise flags.Error(f"{' '.join(positional[1:])}: the demo has options only.")
    except flags.Error as error:
        message = str(error).rstrip(".")
        sys.exit(f"jaxmoe demo: {message}. See --help.")
    if flags.FLAGS["verbosity"].using_default_value:
        # absl would raise it and show what JAX and matplotlib log for their developers.
        logging.set_verbosity(logging.WARNING)
    return positional


def chosen_options() -> Options:
    """Returns the options of the command line over their defaults."""
    preset = SHORT if flags.FLAGS.short else Options()
    names = {field.name for field in dataclasses.fields(Options)}
    given = {name: flags.FLAGS[name].value for name in names if flags.FLAGS[name].value is not None}
    return dataclasses.replace(preset, **given)


def main(arguments: Sequence[str]) -> None:
    """Runs the demo and ends the process with its verdict."""
    del arguments
    from jaxmoe.testing import use_virtual_devices

    # Of JAX's CPU backend, which stays unused where JAX has GPUs.
    use_virtual_devices(VIRTUAL_DEVICES)
    try:
        from jaxmoe.demo import run
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        sys.exit(f"jaxmoe demo: the package {error.name} is not installed. Run: pip install 'jaxmoe[demo]'")
    try:
        setup = run.prepare(chosen_options(), Path(flags.FLAGS.output))
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"jaxmoe demo: {error}")
    sys.exit(0 if run.run(setup) else 1)


if __name__ == "__main__":
    exit_on_interrupt()
    app.run(main, flags_parser=parse)
