"""What is drawn: the loss, and the load of every expert over training as a heat map."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from jaxmoe import plot_style
from jaxmoe.demo.train import History

TRAIN, HELD_OUT, REFERENCE_LINE = "#9db7d5", "#c2410c", "#6b7280"
STYLE: Any = plot_style.STYLE | {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def plot_loss(history: History, unigram: float, num_bytes: int, path: Path) -> None:
    """Draws the loss on training batches and on held-out text, with two models that know less for scale.

    Args:
      history: of the training.
      unigram: loss of a model that knows only how frequent each byte is.
      num_bytes: number of different bytes; the logarithm is the loss of a model that knows nothing.
      path: of the PNG file.
    """
    with _figure(path, (8, 4.5)) as figure:
        axes = figure.subplots()
        steps = len(history.train_loss)
        axes.plot(np.arange(1, steps + 1), history.train_loss, color=TRAIN, linewidth=1, label="training batch")
        at, loss = zip(*history.held_out_loss, strict=True)
        axes.plot(at, loss, color=HELD_OUT, linewidth=2, marker="o", markersize=4, label="held-out files")
        axes.annotate(
            f"{loss[-1]:.2f}",
            (at[-1], loss[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            color=HELD_OUT,
            weight="bold",
            va="center",
        )
        for level, text in (
            (np.log(num_bytes), f"every byte equally likely: ln {num_bytes} = {np.log(num_bytes):.2f}"),
            (unigram, f"frequency of each byte alone: {unigram:.2f}"),
        ):
            axes.axhline(level, color=REFERENCE_LINE, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                text,
                (1, level),
                xycoords=("axes fraction", "data"),
                xytext=(0, 3),
                textcoords="offset points",
                color=REFERENCE_LINE,
                ha="right",
                va="bottom",
            )
        axes.set(xlim=(0, steps), ylim=(0, 6), xlabel="step", ylabel="loss, nats per byte")
        axes.set_title("Next-byte loss on Python source code", pad=12)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="lower left")


def plot_load(history: History, path: Path) -> None:
    """Draws the rows of every expert over the mean, step by step, one panel for each layer.

    Args:
      history: of the training.
      path: of the PNG file.
    """
    rows = np.stack(history.rows_per_expert).astype(float)  # [steps, layers, experts]
    load = rows / rows.mean(-1, keepdims=True)
    steps, layers, experts = load.shape
    with _figure(path, (8, 0.9 + layers * max(1.7, 0.22 * experts))) as figure:
        panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
        # White is balance; twice the mean and more has the darkest colour.
        norm = TwoSlopeNorm(1.0, 0.0, 2.0)
        image: Any = None
        for layer, axes in enumerate(panels):
            image = axes.imshow(
                load[:, layer].T,
                aspect="auto",
                interpolation="nearest",
                cmap="RdBu_r",
                norm=norm,
                extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
            )
            recent = f"max/mean load, last tenth of the steps: {load[-max(1, steps // 10) :, layer].max(-1).mean():.2f}"
            axes.set_title(f"layer {layer}", loc="left", fontsize=10, weight="normal")
            axes.set_title(recent, loc="right", fontsize=9, weight="normal")
            axes.set_yticks(range(0, experts, max(1, experts // 8)))
            axes.set_ylabel("expert")
            axes.tick_params(length=2)
        panels[-1].set_xlabel("step")
        figure.suptitle("Expert load over training", x=0.01, ha="left", fontsize=12, weight="bold")
        bar = figure.colorbar(image, ax=list(panels), extend="max", pad=0.02, aspect=30)
        bar.set_ticks([0, 0.5, 1, 1.5, 2], labels=["idle", "0.5", "mean", "1.5", "2"])
        bar.outline.set_visible(False)
        bar.set_label("rows of an expert / mean over experts", labelpad=8)


@contextlib.contextmanager
def _figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """Yields a figure and writes it; the file appears complete or not at all."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, dpi=plot_style.DOTS_PER_INCH, layout="constrained")
        yield figure
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            figure.savefig(unfinished, format="png")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
