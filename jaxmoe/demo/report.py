"""What is printed: the run before it starts, and its results."""

import textwrap
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jaxmoe
from jaxmoe.demo.compare import Comparison
from jaxmoe.demo.data import Corpus
from jaxmoe.demo.options import DATA_AXIS, EXPERT_AXIS, Devices, Options

INDENT = " " * 10
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def describe_devices(devices: Devices) -> str:
    """Returns one line about devices and mesh."""
    kinds = sorted({device.device_kind for device in devices.mesh.devices.flat})
    axes = " x ".join(f"{name} {size}" for name, size in devices.mesh.shape.items())
    kind = "virtual CPU devices" if devices.platform == "cpu" else f"{devices.platform.upper()}s ({', '.join(kinds)})"
    return f"devices   {devices.mesh.size} {kind}, mesh {axes}, activations {devices.dtype}"


def describe_data(train: Corpus, held_out: Corpus) -> str:
    """Returns one line about the text."""
    return (
        "data      source of Python's standard library: "
        f"{len(train.content) / 1e6:.1f} MB in {train.num_files} files to train on, "
        f"{len(held_out.content) / 1e6:.1f} MB in {held_out.num_files} other files held out"
    )


def describe_model(options: Options, total: int, active: int) -> str:
    """Returns one line about the model and one about its training."""
    return (
        f"model     {options.layers} layers of attention and {options.experts} experts (top {options.top_k}), hidden "
        f"{options.hidden}: {total:,} parameters, {active:,} of them active for each byte\n"
        f"training  {options.steps} steps of {options.batch} x {options.sequence} bytes, seed {options.seed}"
    )


def describe_layer(options: Options, devices: Devices) -> str:
    """Returns what `jaxmoe.explain` says about the MoE layers of a training step.

    Raises:
      ValueError: the sizes do not go together, or not with the mesh.
      NotImplementedError: the implementation does not exist for the devices or in this build.
    """
    tokens = (options.batch, options.sequence)
    explanation = jaxmoe.explain(
        jax.ShapeDtypeStruct((*tokens, options.hidden), devices.dtype),
        jax.ShapeDtypeStruct((*tokens, options.top_k), jnp.int32),
        jax.ShapeDtypeStruct((*tokens, options.top_k), jnp.float32),
        jax.eval_shape(
            lambda: jaxmoe.Experts.init(
                jax.random.key(0), options.experts, options.hidden, options.intermediate, dtype=devices.dtype
            )
        ),
        axis_name=EXPERT_AXIS,
        data_axes=DATA_AXIS,
        mesh=devices.mesh,
        implementation=options.implementation,
    )
    return "layer     " + textwrap.indent(str(explanation), INDENT).lstrip()


def sample_text(samples: Sequence[tuple[bytes, bytes]]) -> str:
    """Returns samples with the last line of their prompts, what the model wrote behind a marker."""
    blocks = []
    for prompt, written in samples:
        prompt_line = prompt.rsplit(b"\n", 1)[-1]
        lines = (_printable(prompt_line) + _printable(written)).splitlines()
        blocks.append("\n".join(f"  | {line}" for line in lines))
    return "\n  |\n".join(blocks)


def _printable(text: bytes) -> str:
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else UNPRINTABLE for c in decoded)


def load_table(rows_per_expert: np.ndarray) -> str:
    """Returns a table of the rows of every expert, `[layers, experts]`, and of the busiest over the mean."""
    header = ["layer", *(f"expert {e}" for e in range(rows_per_expert.shape[1])), "max/mean"]
    table = [
        [str(layer), *(f"{count:,}" for count in rows), f"{rows.max() / rows.mean():.2f}"]
        for layer, rows in enumerate(rows_per_expert)
    ]
    return _table(header, table)


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """Returns a table of comparisons: for each array, the layer that comes closest to its limit."""
    worst: dict[str, Comparison] = {}
    for comparison in comparisons:
        worst[comparison.name] = max(worst.get(comparison.name, comparison), comparison, key=lambda c: c.share)
    header = ["array", "layer", "error", "dense maths", "allowed", ""]
    table = [
        [
            name,
            str(c.layer),
            f"{c.error:.1e}",
            f"{c.low_precision_error:.1e}",
            f"{c.allowed:.1e}",
            "pass" if c.passed else "FAIL",
        ]
        for name, c in worst.items()
    ]
    return _table(header, table)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns: the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def aligned(line: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        return "  " + "  ".join([first.lstrip().ljust(widths[0]), *others]).rstrip()

    return "\n".join([aligned(header), *map(aligned, rows)])
