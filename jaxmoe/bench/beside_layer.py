"""What the programs of `beside_programs.py` are given: arrays, and router and layer, or something that stands for it.

With `Layer` that is `moe_layer`. With answers, what the layer has returned before, it is the same program without the
layer: its other work alone. So what a program returns can be compared with what its two parts return when each runs for
itself.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxmoe
from jaxmoe.bench.passes import Gradients, Pass, Results
from jaxmoe.options import Arguments
from jaxmoe.routing.stats import MoEStats


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
      dexperts: gradients of the experts; `None` as `y` and as `dy`, and of experts that are frozen.
    """

    x: jax.Array | None
    topk_ids: jax.Array
    topk_weights: jax.Array
    y: jax.Array | None
    dy: jax.Array | None = None
    dexperts: jaxmoe.Experts | None = None

    @property
    def pass_name(self) -> Pass:
        """The pass of the layer alone that has the same results."""
        if self.dy is None:
            return "forward"
        return "frozen" if self.dexperts is None else "both"

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
