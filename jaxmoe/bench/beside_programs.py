"""Programs that run the layer beside other work, as users' programs do; `beside.py` checks and times them.

Each is one function of its inputs and of something that stands for the layer (`beside_layer.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench.beside_layer import Inputs, Layer, Outcome, Seen
from jaxmoe.bench.inputs import AXIS
from jaxmoe.bench.passes import Results

DATA_AXIS = "data"
# Dense layers between calls of the layer, in the programs that have some.
DENSE_LAYERS = 3
# The width inside of a dense layer over that of a token: both matrices of one hold 34 MB at 2048, as much as the query
# and the output projection of Qwen3-30B-A3B.
DENSE_WIDENING = 2
LOSS_WEIGHT = 0.01


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


def _train_router(layer: Layer, inputs: Inputs) -> Outcome:
    def loss(router: jax.Array, x: jax.Array, tap: jax.Array) -> tuple[jax.Array, Seen]:
        call, y, routing, _ = layer(inputs, x=x, router=router, tap=tap)
        return _sum_of_squares(y) / y.size + LOSS_WEIGHT * jaxmoe.load_balancing_loss(routing), call

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (value, call), (drouter, dx, dy) = gradient(inputs.router, inputs.x, inputs.x)
    norm = jnp.sqrt(_sum_of_squares((drouter, dx)))
    return Outcome((call._replace(x=None, dy=dy),), {"loss": value, "drouter": drouter, "norm": norm})


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
      asks_host: whether it waits for the host ahead of the layer, so that no launch is enqueued early.
      trains: whether experts are differentiated, which those in 8 or 4 bits cannot be.
      compiler_options: for XLA.
    """

    stands_for: str
    function: Callable[[Layer, Inputs], Outcome]
    per_rank: bool = False
    groups: bool = False
    prefetches: bool = False
    asks_host: bool = False
    trains: bool = False
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_of_host(self) -> bool:
        """Whether the host is a part of what the program does."""
        return self.prefetches or self.asks_host

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
    "train_router": Program("gradients of router and tokens beside frozen experts, their norm", _train_router),
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
    "callback": _in_shard_map("the host is asked before and after the layer", _callback, asks_host=True),
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
