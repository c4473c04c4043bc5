"""What a line times: a forward pass, a backward pass, or both in one call; and how many operations that counts as.

A backward pass has all gradients, or, where the experts are frozen, those of tokens and routing weights.

`layer.py` compiles `function_of`; `candidates.py` makes the forward function that it is given.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxmoe.options import Arguments

Pass = Literal["forward", "backward", "both", "frozen"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "both", "frozen")
BACKWARD_ALONE: tuple[Pass, ...] = ("backward", "frozen")
# Those without gradients of experts.
UNTRAINED: frozenset[Pass] = frozenset(("forward", "frozen"))
Layer = Callable[[Arguments], jax.Array]


class Gradients(NamedTuple):
    """Of a layer's output times a cotangent.

    Args:
      x: `[tokens, hidden]`.
      topk_weights: `[tokens, top_k]`.
      experts: a pytree like the weights that the layer was given; `None` of frozen ones.
    """

    x: jax.Array
    topk_weights: jax.Array
    experts: Any


class Results(NamedTuple):
    """What a timed call returns; `None` for what is not of its pass."""

    y: jax.Array | None = None
    gradients: Gradients | None = None


def function_of(
    pass_name: Pass, layer: Layer, *, with_output: bool = False
) -> Callable[[Arguments, jax.Array | None], Results]:
    """Returns the function that is compiled and timed, of a call's arrays and the cotangent of its output.

    A backward pass starts from the inputs alone, as the part of a training step does whose forward pass has kept
    nothing (`jax.checkpoint` around the layer). Of its forward pass only what the gradients need is left, since nothing
    returns the output: an implementation that computes values of the forward pass again pays for that here, whether it
    would keep them in a training step or not. `"both"` returns the output too.

    Args:
      pass_name: what is timed.
      layer: the forward pass, differentiable in tokens, routing weights and experts.
      with_output: whether the output is returned too where the pass does not say so.
    """
    if pass_name == "forward":
        return lambda arguments, dy: Results(y=layer(arguments))

    with_output |= pass_name == "both"

    def function(arguments: Arguments, dy: jax.Array | None) -> Results:
        def output(x: jax.Array, topk_weights: jax.Array, experts: Any) -> jax.Array:
            return layer(arguments._replace(x=x, topk_weights=topk_weights, experts=experts))

        if pass_name == "frozen":
            y, pullback = jax.vjp(lambda x, weights: output(x, weights, arguments.experts), *_of_tokens(arguments))
            gradients = Gradients(*pullback(dy), experts=None)
        else:
            y, pullback = jax.vjp(output, *_of_tokens(arguments), arguments.experts)
            gradients = Gradients(*pullback(dy))
        return Results(y if with_output else None, gradients)

    return function


def _of_tokens(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    return arguments.x, arguments.topk_weights


def flops(pass_name: Pass, *, tokens: int, top_k: int, hidden: int, intermediate: int, gated: bool = True) -> int:
    """Returns the floating-point operations of the products of one rank; what is computed twice counts once.

    A forward pass has three products per row, two where the experts have no up projection. A backward pass has two for
    each of those: the gradients of its rows and of its weights; of frozen experts the former alone.

    >>> sizes = dict(tokens=8192, top_k=2, hidden=4096, intermediate=14336)
    >>> [flops(name, **sizes) / 1e12 for name in PASSES]
    [5.772436045824, 11.544872091648, 17.317308137472, 5.772436045824]
    """
    products = {"forward": 1, "backward": 2, "both": 3, "frozen": 1}[pass_name] * (3 if gated else 2)
    return 2 * products * tokens * top_k * hidden * intermediate
