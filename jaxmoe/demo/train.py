"""Training: one jitted step over the whole mesh with donated state, the loop around it, the held-out loss.

Experts and their optimizer state lie on the ranks of the expert axis; everything else is replicated. The batch is split
over all devices. The mesh axes are Auto: the compiler derives the rest from these shardings, and `moe_layer` enters
`shard_map` by itself.
"""

import dataclasses
import functools
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int32
from tqdm import tqdm

from jaxmoe.demo.data import Corpus
from jaxmoe.demo.model import LanguageModel
from jaxmoe.demo.options import Devices, Options

LEARNING_RATE = 4e-3
LOAD_BALANCING_FACTOR = 0.01
ROUTER_Z_FACTOR = 1e-3
# Evaluations on held-out bytes over a run, and bytes in one of them.
NUM_EVALUATIONS = 10
HELD_OUT_BYTES = 2**15


class State(NamedTuple):
    """What a step replaces."""

    parameters: nnx.State
    optimizer: optax.OptState


class Metrics(NamedTuple):
    """Mean loss in nats per byte, a scalar; rows that every expert of every layer got, `[layers, experts]` int32."""

    loss: Any
    rows_per_expert: Any


@dataclasses.dataclass
class History:
    """What happened.

    Args:
      train_loss: of every step.
      rows_per_expert: of every step, `[layers, experts]` each.
      held_out_loss: `(steps trained, loss)` pairs.
      held_out_rows: `[layers, experts]`, of the last evaluation.
      seconds: of the loop, compilation included.
    """

    train_loss: list[float] = dataclasses.field(default_factory=list)
    rows_per_expert: list[np.ndarray] = dataclasses.field(default_factory=list)
    held_out_loss: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    held_out_rows: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    seconds: float = 0.0


class Trainer:
    """A model in training.

    Args:
      options: sizes of the run.
      devices: to run on; their mesh must be set (`jax.set_mesh`) here and in every method.
    """

    def __init__(self, options: Options, devices: Devices) -> None:
        self.options, self.devices = options, devices
        self._optimizer = make_optimizer(options.steps)
        create = functools.partial(_create, options, devices)
        self._abstract_model = nnx.eval_shape(create)
        self._graph = nnx.graphdef(self._abstract_model)

        def initial_state() -> State:
            parameters = nnx.state(create())
            return State(parameters, self._optimizer.init(parameters))

        # Of every parameter and of the optimizer's moments of it: what the layer that made it said.
        shardings = nnx.get_named_sharding(jax.eval_shape(initial_state), devices.mesh)
        self.state = jax.jit(initial_state, out_shardings=shardings)()
        self._step = jax.jit(self._updated, donate_argnums=0, out_shardings=(shardings, None))
        self._evaluate = jax.jit(lambda parameters, windows: self._loss(parameters, windows)[1])

    def count_parameters(self) -> tuple[int, int]:
        """Returns the number of parameters, and how many of them take part in predicting one byte."""
        total = sum(leaf.size for leaf in jax.tree.leaves(self._abstract_model))
        experts = [(block.moe.w_gate, block.moe.w_up, block.moe.w_down) for block in self._abstract_model.blocks]
        of_experts = sum(leaf.size for leaf in jax.tree.leaves(experts))
        return total, total - of_experts + of_experts * self.options.top_k // self.options.experts

    @property
    def model(self) -> LanguageModel:
        """The model with the parameters of now; they are gone after the next step."""
        return nnx.merge(self._graph, self.state.parameters)

    def _loss(self, parameters: Any, windows: Int32[Array, "batch length"]) -> tuple[jax.Array, Metrics]:
        logits, aux = nnx.merge(self._graph, parameters)(windows[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()
        balance = sum(layer.load_balancing_loss for layer in aux)
        router_z = sum(layer.router_z_loss for layer in aux)
        rows = jnp.stack([layer.stats.rows_per_expert for layer in aux])
        return loss + LOAD_BALANCING_FACTOR * balance + ROUTER_Z_FACTOR * router_z, Metrics(loss, rows)

    def _updated(self, state: State, windows: Int32[Array, "batch length"]) -> tuple[State, Metrics]:
        gradients, metrics = jax.grad(self._loss, has_aux=True)(state.parameters, windows)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.parameters)
        return State(optax.apply_updates(state.parameters, updates), optimizer), metrics  # pyright: ignore

    def _place(self, windows: np.ndarray) -> jax.Array:
        return jax.device_put(windows, self.devices.batch_sharding)

    def evaluate(self, corpus: Corpus) -> Metrics:
        """Returns the mean loss over windows spread over a corpus, and the sum of the rows of every expert."""
        batch, length = self.options.batch, self.options.sequence + 1
        batches = max(1, HELD_OUT_BYTES // (batch * self.options.sequence))
        windows = corpus.spread_windows(batches * batch, length).reshape(batch, batches, length)
        results = [
            jax.device_get(self._evaluate(self.state.parameters, self._place(windows[:, i]))) for i in range(batches)
        ]
        return Metrics(np.mean([result.loss for result in results]), sum(result.rows_per_expert for result in results))

    def train(self, train: Corpus, held_out: Corpus) -> History:
        """Trains with a progress bar; returns what happened."""
        options, history, started = self.options, History(), time.monotonic()
        # Closer together at first, where the loss falls fastest.
        evaluate_at = {round(options.steps * (i / NUM_EVALUATIONS) ** 2) for i in range(NUM_EVALUATIONS + 1)}
        rng = np.random.default_rng(options.seed)
        # Carriage returns do not move back in a log file: write there only now and then.
        interval = 0.2 if sys.stderr.isatty() else 10
        bar = tqdm(total=options.steps, desc="compiling", unit="step", mininterval=interval, dynamic_ncols=True)
        with bar:
            self._record_held_out(history, held_out, bar)
            running: Metrics | None = None
            for step in range(1, options.steps + 1):
                windows = self._place(train.random_windows(rng, options.batch, options.sequence + 1))
                self.state, metrics = self._step(self.state, windows)
                # Fetching the step before this one keeps the devices busy and never more than two steps in flight.
                self._record_step(history, running, bar)
                running = metrics
                if step in evaluate_at:
                    self._record_step(history, running, bar)
                    running = None
                    self._record_held_out(history, held_out, bar)
        history.seconds = time.monotonic() - started
        return history

    def _record_step(self, history: History, metrics: Metrics | None, bar: Any) -> None:
        if metrics is None:
            return
        loss, rows = jax.device_get(metrics)
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss of step {len(history.train_loss) + 1} is {loss}.")
        history.train_loss.append(float(loss))
        history.rows_per_expert.append(rows)
        bar.set_description("training", refresh=False)
        load = (rows.max(-1) / rows.mean(-1)).max()
        bar.set_postfix_str(
            f"loss {loss:.3f}, held-out {history.held_out_loss[-1][1]:.3f}, max/mean load {load:.2f}", refresh=False
        )
        bar.update()

    def _record_held_out(self, history: History, held_out: Corpus, bar: Any) -> None:
        loss, rows = self.evaluate(held_out)
        history.held_out_loss.append((len(history.train_loss), float(loss)))
        history.held_out_rows = np.asarray(rows)
        bar.set_postfix_str(f"held-out {loss:.3f}", refresh=False)


def _create(options: Options, devices: Devices) -> LanguageModel:
    return LanguageModel(options, devices, rngs=nnx.Rngs(options.seed))


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) with linear warm-up and cosine decay."""
    warm_up = max(1, min(50, steps // 5))
    rate = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warm_up, max(steps, warm_up + 1), LEARNING_RATE / 20)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.05))
