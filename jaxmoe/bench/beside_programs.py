"""Programs that run the layer beside other work, as users' programs do; `beside.py` checks and times them.

Each is one function of its inputs and of something that stands for the layer. With `Layer` that is `moe_layer`. With
answers, what the layer has returned before, it is the same program without the layer: its other work alone. So what a
program returns can be compared with what its two parts return when each runs for itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench.inputs import AXIS
from jaxmoe.bench.passes import Gradients, Pass, Results
from jaxmoe.options import Arguments
from jaxmoe.routing.stats import MoEStats

DATA_AXIS = "data"
# Dense layers between calls of the layer, in the programs that have some.
DENSE_LAYERS = 3
# The width inside of a dense layer over that of a token: both matrices of one hold 34 MB at 2048, as much as the query
# and the output projection of Qwen3-30B-A3B.
DENSE_WIDENING = 2
LOSS_WEIGHT = 0.01


class Inputs(NamedTuple):
    """What every program is given.

    Args:
      x: `[tokens, hidden]`, split over the ranks.
      router: `[hidden, experts]`, on every rank.
      experts: of two layers, which calls take in turn; split over the axis of the experts.
      dense: two matrices of each dense layer, `[hidden, width]` and `[width, hidden]`, both split over that axis too.
    """

    x: jax.Array
    router: jax.Array
    experts: tuple[jaxmoe.Experts, jaxmoe.Experts]
    dense: tuple[tuple[jax.Array, jax.Array], ...]

    def experts_of(self, number: int) -> jaxmoe.Experts:
        """Returns the experts of the n-th call of the layer."""
        return self.experts[number % len(self.experts)]


class Seen(NamedTuple):
    """One call of the layer: what the program gave it and what it returned.

    Args:
      x: tokens; `None` where they are those of the inputs.
      topk_ids: of the routing.
      topk_weights: of the routing.
      y: output; `None` from other work alone, which was given it.
      dy: cotangent of `y`; `None` in a program without a backward pass.
      dexperts: gradients of the experts; `None` as `y` and as `dy`.
    """

    x: jax.Array | None
    topk_ids: jax.Array
    topk_weights: jax.Array
    y: jax.Array | None
    dy: jax.Array | None = None
    dexperts: jaxmoe.Experts | None = None

    @property
    def pass_name(self) -> Pass:
        """What the layer alone does for the same answer."""
        return "forward" if self.dy is None else "both"

    def arguments(self, inputs: Inputs, number: int) -> Arguments:
        """Returns the arrays with which the layer alone gives the same answer; this is the n-th call of its program."""
        x = inputs.x if self.x is None else self.x
        return Arguments(x, self.topk_ids, self.topk_weights, inputs.experts_of(number))


class Outcome(NamedTuple):
    """What a program returns.

    Args:
      calls: of the layer.
      results: of the other work, by name.
    """

    calls: tuple[Seen, ...]
    results: dict[str, Any]

    @property
    def of_work(self) -> "Outcome":
        """Without what the layer has returned."""
        return self._replace(calls=tuple(call._replace(y=None, dexperts=None) for call in self.calls))


@dataclasses.dataclass(frozen=True)
class Layer:
    """Router and layer as programs call them.

    Args:
      config: of the router.
      options: of `moe_layer`.
      answers: of every call, with gradients where the program has a backward pass; `None` runs `moe_layer`.
    """

    config: jaxmoe.RouterConfig
    options: Mapping[str, Any]
    answers: Sequence[Results] | None = None

    def __call__(
        self,
        inputs: Inputs,
        number: int = 0,
        x: jax.Array | None = None,
        *,
        router: jax.Array | None = None,
        experts: jaxmoe.Experts | None = None,
        tap: jax.Array | None = None,
        stats: bool = False,
    ) -> tuple[Seen, jax.Array, jaxmoe.Routing, MoEStats | None]:
        """Returns the call, its output, the routing, and statistics where they are asked for.

        Args:
          inputs: of the program.
          number: of this call in the program, from 0.
          x: tokens where they are not those of the inputs.
          router: where it is differentiated.
          experts: where they are differentiated.
          tap: an array like the output. It changes nothing, and its gradient is the cotangent of the output.
          stats: whether statistics are wanted.
        """
        tokens = inputs.x if x is None else x
        weights = inputs.experts_of(number) if experts is None else experts
        logits = jnp.dot(tokens, inputs.router if router is None else router, preferred_element_type=jnp.float32)
        routing = jaxmoe.route(logits, self.config)
        found = None
        if self.answers is None:
            y = jaxmoe.moe_layer(
                tokens, routing.topk_ids, routing.topk_weights, weights, return_stats=stats, **self.options
            )
            y, found = y if stats else (y, None)
        else:
            y = _answered(tokens, routing.topk_weights, weights, self.answers[number])
            if stats:
                found = jaxmoe.load_stats(routing.topk_ids, logits.shape[-1])
        if tap is not None:
            y = _tapped(y, tap)
        return Seen(x, routing.topk_ids, routing.topk_weights, y), y, routing, found


@jax.custom_vjp
def _answered(x: Any, topk_weights: Any, experts: Any, answer: Results) -> Any:
    """What the layer has returned for these arguments, with the gradients that it has returned."""
    return answer.y


def _answered_backward(gradients: Gradients, dy: Any) -> tuple[Any, ...]:
    return gradients.x, gradients.topk_weights, gradients.experts, None


_answered.defvjp(lambda x, weights, experts, answer: (answer.y, answer.gradients), _answered_backward)


@jax.custom_vjp
def _tapped(y: Any, tap: Any) -> Any:
    return y


_tapped.defvjp(lambda y, tap: (y, None), lambda _, dy: (dy, dy))


def _sum_of_squares(tree: Any) -> jax.Array:
    return sum((jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(tree)), jnp.float32(0))


def _normed(h: jax.Array) -> jax.Array:
    wide = h.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(h.dtype)


def _dense(h: jax.Array, shards: tuple[jax.Array, jax.Array]) -> jax.Array:
    """A dense layer whose weights are split over the ranks: gathered before use, gradients scattered behind it."""
    into, back = (lax.all_gather(shard, AXIS, tiled=True) for shard in shards)
    return h + (h @ into) @ back


# --- the programs -----------------------------------------------------------------------------------------------------


def _plain(layer: Layer, inputs: Inputs) -> Outcome:
    call, *_ = layer(inputs)
    return Outcome((call,), {})


def _stats(layer: Layer, inputs: Inputs) -> Outcome:
    call, _, _, stats = layer(inputs, stats=True)
    return Outcome((call,), {"stats": stats})


def _loss(layer: Layer, inputs: Inputs) -> Outcome:
    call, _, routing, _ = layer(inputs)
    return Outcome((call,), {"loss": jaxmoe.load_balancing_loss(routing)})


def _both(layer: Layer, inputs: Inputs) -> Outcome:
    call, _, routing, stats = layer(inputs, stats=True)
    return Outcome((call,), {"stats": stats, "loss": jaxmoe.load_balancing_loss(routing)})


def _aux(layer: Layer, inputs: Inputs) -> Outcome:
    call, _, routing, _ = layer(inputs)
    aux = jaxmoe.router_aux(routing)
    return Outcome((call,), {"stats": aux.stats, "loss": aux.load_balancing_loss})


def _norm_before(layer: Layer, inputs: Inputs) -> Outcome:
    call, *_ = layer(inputs)
    return Outcome((call,), {"norm": _sum_of_squares(inputs.x)})


def _norm_after(layer: Layer, inputs: Inputs) -> Outcome:
    call, y, *_ = layer(inputs)
    return Outcome((call,), {"norm": _sum_of_squares(y)})


def _train(layer: Layer, inputs: Inputs) -> Outcome:
    def loss(router: jax.Array, experts: jaxmoe.Experts, tap: jax.Array) -> tuple[jax.Array, Seen]:
        call, y, routing, _ = layer(inputs, router=router, experts=experts, tap=tap)
        return _sum_of_squares(y) / y.size + LOSS_WEIGHT * jaxmoe.load_balancing_loss(routing), call

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (value, call), (drouter, dexperts, dy) = gradient(inputs.router, inputs.experts_of(0), inputs.x)
    return Outcome((call._replace(dy=dy, dexperts=dexperts),), {"loss": value, "drouter": drouter})


def _train_norm(layer: Layer, inputs: Inputs) -> Outcome:
    outcome = _train(layer, inputs)
    gradients = (outcome.results["drouter"], outcome.calls[0].dexperts)
    return outcome._replace(results=outcome.results | {"norm": jnp.sqrt(_sum_of_squares(gradients))})


def _gathers(layer: Layer, inputs: Inputs) -> Outcome:
    h, calls = inputs.x, []
    for number, dense in enumerate(inputs.dense):
        call, y, *_ = layer(inputs, number, _normed(h) if number else None)
        calls.append(call)
        h = _dense(h + y, dense)
    return Outcome(tuple(calls), {"h": h})


def _scatters(layer: Layer, inputs: Inputs) -> Outcome:
    layers = len(inputs.experts)

    def loss(dense: Any, experts: Any, taps: Any) -> tuple[jax.Array, list[Seen]]:
        h, calls = inputs.x, []
        for number in range(layers):
            x = _normed(h) if number else None
            call, y, *_ = layer(inputs, number, x, experts=experts[number], tap=taps[number])
            calls.append(call)
            h = _dense(h + y, dense[number])
        return _sum_of_squares(h) / h.size, calls

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    of_inputs = (inputs.dense[:layers], inputs.experts, (inputs.x,) * layers)
    (value, calls), (ddense, dexperts, dys) = gradient(*of_inputs)
    calls = [call._replace(dy=dy, dexperts=of) for call, dy, of in zip(calls, dys, dexperts, strict=True)]
    return Outcome(tuple(calls), {"loss": value, "ddense": ddense})


def _permute(layer: Layer, inputs: Inputs) -> Outcome:
    first, y, *_ = layer(inputs)
    ranks = lax.axis_size(AXIS)
    passed_on = lax.ppermute(y, AXIS, [(rank, (rank + 1) % ranks) for rank in range(ranks)])
    second, *_ = layer(inputs, 1, -inputs.x)
    return Outcome((first, second), {"passed on": passed_on})


def _all_to_all(layer: Layer, inputs: Inputs) -> Outcome:
    call, *_ = layer(inputs)
    return Outcome((call,), {"exchanged": lax.all_to_all(inputs.x, AXIS, 1, 0, tiled=True)})


def _two_layers(layer: Layer, inputs: Inputs) -> Outcome:
    return Outcome(tuple(layer(inputs, number)[0] for number in range(2)), {})


def _groups(layer: Layer, inputs: Inputs) -> Outcome:
    call, y, routing, _ = layer(inputs)
    return Outcome((call,), {"loss": jaxmoe.load_balancing_loss(routing), "norm": _sum_of_squares(y)})


def _callback(layer: Layer, inputs: Inputs) -> Outcome:
    def on_host(value: Any) -> np.ndarray:
        return np.asarray(np.sqrt(np.asarray(value)))

    def ask(value: jax.Array) -> jax.Array:
        return io_callback(on_host, jax.ShapeDtypeStruct((), jnp.float32), value)

    before = ask(_sum_of_squares(inputs.x))
    call, y, *_ = layer(inputs)
    return Outcome((call,), {"before": before, "after": ask(_sum_of_squares(y))})


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Args:
      stands_for: what of users' programs it is.
      function: the program.
      per_rank: whether the function is what each rank does, inside `shard_map`. Others see whole arrays, and the
        compiler decides what travels.
      groups: whether the ranks form two groups that share no experts, on a mesh with a data axis.
      prefetches: whether a thread of the host brings the next tokens and reads the last loss while calls run.
      trains: whether experts are differentiated, which those in 8 or 4 bits cannot be.
      compiler_options: for XLA.
    """

    stands_for: str
    function: Callable[[Layer, Inputs], Outcome]
    per_rank: bool = False
    groups: bool = False
    prefetches: bool = False
    trains: bool = False
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def on(self, mesh: Mesh, config: jaxmoe.RouterConfig, of_layer: Mapping[str, Any]) -> Callable[..., Outcome]:
        """Returns the program as a function of inputs and answers, without which `moe_layer` runs with `of_layer`."""
        options = {**of_layer, **({"axis_name": AXIS} if self.per_rank else where(mesh))}

        def function(inputs: Inputs, answers: Sequence[Results] | None) -> Outcome:
            outcome = self.function(Layer(config, options, answers), inputs)
            return outcome if answers is None else outcome.of_work

        def on_rank(inputs: Inputs, answers: Sequence[Results] | None) -> Outcome:
            # Every result gets a dimension in which those of the ranks lie side by side.
            return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], function(inputs, answers))

        if not self.per_rank:
            return function
        of_inputs = Inputs(P(AXIS), P(), P(AXIS), P(AXIS))  # pyright: ignore[reportArgumentType]
        return jax.shard_map(on_rank, mesh=mesh, in_specs=(of_inputs, P(AXIS)), out_specs=P(AXIS))


def where(mesh: Mesh) -> dict[str, Any]:
    """Returns the options of `moe_layer` that name the mesh and its axes."""
    return {"mesh": mesh, "data_axes": tuple(name for name in mesh.axis_names if name != AXIS)}


# XLA starts collectives as early as it can and lets other work run before it waits for them.
_OVERLAP: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
# And has so many of them in flight at once, on streams of their own.
_PARALLEL: dict[str, Any] = _OVERLAP | {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}

_in_shard_map = functools.partial(Program, per_rank=True)

PROGRAMS: dict[str, Program] = {
    "plain": Program("router and layer, nothing else", _plain),
    "stats": Program("load statistics of the layer, summed over ranks", _stats),
    "loss": Program("load balancing loss over all tokens", _loss),
    "both": Program("statistics and loss, each by its own function", _both),
    "aux": Program("statistics and loss by jaxmoe.router_aux", _aux),
    "norm_before": Program("global sum over the tokens that the layer reads too", _norm_before),
    "norm_after": Program("global sum over what the layer returns", _norm_after),
    "train": Program("gradients of router and experts, with the balance loss", _train, trains=True),
    "train_norm": Program("the same and the norm of all gradients, as for clipping", _train_norm, trains=True),
    "gathers": _in_shard_map(
        "three layers, weights of dense ones gathered meanwhile (FSDP)", _gathers, compiler_options=_OVERLAP
    ),
    "scatters": _in_shard_map(
        "gradients of two layers, those of dense ones scattered meanwhile (FSDP)",
        _scatters,
        trains=True,
        compiler_options=_OVERLAP,
    ),
    "permute": _in_shard_map(
        "micro-batches of a pipeline: one is passed on, the next computed", _permute, compiler_options=_OVERLAP
    ),
    "all_to_all": _in_shard_map(
        "activations exchanged between ranks, as for attention by heads", _all_to_all, compiler_options=_OVERLAP
    ),
    "two_layers": Program("two layers that do not wait for each other", _two_layers),
    "groups": Program("two groups with experts of their own, sums over both", _groups, groups=True),
    "callback": _in_shard_map("the host is asked before and after the layer", _callback),
    "prefetch": Program("the host copies the next tokens and reads the last loss", _loss, prefetches=True),
    "gathers_parallel": _in_shard_map(
        "as gathers, up to four collectives in flight", _gathers, compiler_options=_PARALLEL
    ),
    "two_layers_parallel": Program(
        "as two_layers, up to four collectives in flight", _two_layers, compiler_options=_PARALLEL
    ),
    "all_to_all_parallel": _in_shard_map(
        "as all_to_all, up to four collectives in flight", _all_to_all, compiler_options=_PARALLEL
    ),
}
