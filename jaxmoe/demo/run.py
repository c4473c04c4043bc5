"""The demo from top to bottom: say what runs, train, show what came out, judge it."""

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np

from jaxmoe.demo import compare, data, plots, report, sample
from jaxmoe.demo.data import Corpus
from jaxmoe.demo.options import Devices, Options, choose_devices
from jaxmoe.demo.train import History, Trainer

NUM_SAMPLES_SHOWN = 2


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of.

    Args:
      options: sizes of the run.
      output: folder of the plots.
      devices: to run on.
      train_text: to train on.
      held_out_text: never trained on.
      layer: how the MoE layers are computed, in words.
      started: time of `time.monotonic`, in seconds.
    """

    options: Options
    output: Path
    devices: Devices
    train_text: Corpus
    held_out_text: Corpus
    layer: str
    started: float


def prepare(options: Options, output: Path) -> Setup:
    """Finds devices and text, makes the folder and checks the sizes, before anything is compiled.

    Args:
      options: sizes of the run.
      output: folder of the plots.

    Raises:
      ValueError: the sizes do not go together, or not with the devices.
      NotImplementedError: the implementation does not exist for the devices or in this build.
      OSError: the folder cannot be made, or there is no text.
    """
    started = time.monotonic()
    devices = choose_devices()
    layer = report.describe_layer(options, devices)
    train_text, held_out_text = data.read(data.library_folder())
    output.mkdir(parents=True, exist_ok=True)
    return Setup(options, output, devices, train_text, held_out_text, layer, started)


def run(setup: Setup) -> bool:
    """Runs the demo and returns whether it kept its promises."""
    options, devices, train_text, held_out_text = setup.options, setup.devices, setup.train_text, setup.held_out_text
    say(report.describe_devices(devices))
    say(report.describe_data(train_text, held_out_text))
    with jax.set_mesh(devices.mesh):
        trainer = Trainer(options, devices)
        say(report.describe_model(options, *trainer.count_parameters()))
        say(setup.layer + "\n")
        history = trainer.train(train_text, held_out_text)
        samples = sample.sample(trainer.model, options, devices, held_out_text)

    say(f"\nText that the model writes after a held-out file's 'def ' (temperature {sample.TEMPERATURE})\n")
    say(report.sample_text(samples[:NUM_SAMPLES_SHOWN]))
    say("\nExpert load on held-out text: rows per expert\n")
    say(report.load_table(history.held_out_rows))
    windows = held_out_text.spread_windows(options.batch, options.sequence)
    comparisons = compare.compare(trainer.model, options, devices, windows)
    say("\nTrained layers on held-out text against the dense reference in float64: relative errors, worst layer\n")
    say(report.comparison_table(comparisons))

    loss_plot, load_plot = setup.output / "loss.png", setup.output / "expert_load.png"
    unigram = data.unigram_loss(train_text, held_out_text)
    plots.plot_loss(history, unigram, data.NUM_BYTES, loss_plot)
    plots.plot_load(history, load_plot)
    say(f"\nplots     {loss_plot} and {load_plot}")
    passed, text = verdict(options, history, comparisons)
    say(f"verdict   {text}, {time.monotonic() - setup.started:.0f} seconds")
    return passed


def verdict(options: Options, history: History, comparisons: list[compare.Comparison]) -> tuple[bool, str]:
    """Returns whether the run kept its promises, and a line that says so.

    Args:
      options: what was promised depends on the sizes.
      history: of the training.
      comparisons: with the reference.
    """
    (_, start), (_, end) = history.held_out_loss[0], history.held_out_loss[-1]
    limit = start if options.promised_loss is None else options.promised_loss
    learned, equal = end < limit and bool(np.isfinite(end)), all(comparison.passed for comparison in comparisons)
    loss = f"held-out loss {start:.2f} -> {end:.2f} nats per byte"
    if not learned:
        loss += f" (NOT below {limit:.2f})"
    reference = "layer equals the reference" if equal else "layer DIFFERS from the reference"
    return learned and equal, f"{'passed' if learned and equal else 'FAILED'}: {loss}, {reference}"


def say(text: str) -> None:
    """Prints at once, so that what is seen in a pipe is what has happened."""
    print(text, flush=True)
