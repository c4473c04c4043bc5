"""The lines of `python -m jaxmoe.bench scan` with gradients: what a training step makes of layers in a `jax.lax.scan`.

- `recompute`: value and gradients, with respect to the router and the experts of every layer, of the mean square of the
  output and a hundredth of the mean balance loss, with `residuals="recompute"`.
- `save`: the same with `residuals="save"`.
- `checkpoint`: `recompute` with every layer in `jax.checkpoint(prevent_cse=False)`, which keeps its input alone.

Before a line is timed its gradients are compared with those of the same layers called one after the other, outside of a
scan.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

import jaxmoe

GradientLine = Literal["recompute", "save", "checkpoint"]
LINES: tuple[GradientLine, ...] = get_args(GradientLine)
# Of the norm of a gradient. The products are the same; XLA may round elsewhere in a scan.
ALLOWED_ERROR = 1e-2
_OF_BALANCE = 0.01


class Layers(NamedTuple):
    """Of all layers, first dimension of every array."""

    router: jax.Array
    experts: jaxmoe.Experts


def compile_line(line: GradientLine, top_k: int, of_layer: dict[str, Any], x: jax.Array, layers: Layers) -> Any:
    """Returns the compiled program from tokens and layers to the loss and the gradients of the layers."""
    layer = _layer(line, top_k, of_layer)
    if line == "checkpoint":
        layer = jax.checkpoint(layer, prevent_cse=False)

    def loss(layers: Layers, x: jax.Array) -> jax.Array:
        y, balance = jax.lax.scan(layer, x, layers)
        return _mean_square(y) + _OF_BALANCE * balance.load_balancing_loss.mean()

    program = jax.jit(lambda x, layers: jax.value_and_grad(loss)(layers, x))
    return program.lower(x, layers).compile()


def error_of(program: Any, top_k: int, of_layer: dict[str, Any], x: jax.Array, layers: Layers) -> float:
    """Returns the largest error of a gradient of any layer, relative to its norm."""
    number = layers.router.shape[0]
    layer = _layer("recompute", top_k, of_layer)

    def balanced(x: jax.Array, own: Layers) -> tuple[jax.Array, jax.Array]:
        y, aux = layer(x, own)
        return y, aux.load_balancing_loss

    forward: Any = jax.jit(balanced)

    @jax.jit
    def backward(x: jax.Array, own: Layers, dy: jax.Array) -> Any:
        return jax.vjp(balanced, x, own)[1]((dy, jnp.float32(_OF_BALANCE / number)))

    of_layers = [jax.tree.map(lambda array, nth=nth: array[nth], layers) for nth in range(number)]
    inputs = [x]
    for own in of_layers:
        inputs.append(forward(inputs[-1], own)[0])
    _, gradients = program(x, layers)
    dy, worst = jax.jit(jax.grad(_mean_square))(inputs[-1]), 0.0
    for nth in reversed(range(number)):
        dy, wanted = backward(inputs[nth], of_layers[nth], dy)
        found = jax.tree.map(lambda array: array[nth], gradients)  # noqa: B023, called in this turn
        errors = jax.tree.leaves(jax.tree.map(_relative_error, found, wanted))
        # NaN is no error that is small.
        worst = max([worst, *(float(error) if error == error else float("inf") for error in errors)])
    return worst


def _layer(line: GradientLine, top_k: int, of_layer: dict[str, Any]) -> Callable[..., tuple[jax.Array, jaxmoe.MoEAux]]:
    config = jaxmoe.RouterConfig.qwen3_moe(top_k=top_k)
    residuals = "save" if line == "save" else "recompute"
    run = functools.partial(jaxmoe.moe_layer, residuals=residuals, **of_layer)

    def layer(x: jax.Array, own: Layers) -> tuple[jax.Array, jaxmoe.MoEAux]:
        routing = jaxmoe.route(jnp.dot(x, own.router, preferred_element_type=jnp.float32), config)
        return x + run(x, routing.topk_ids, routing.topk_weights, own.experts), jaxmoe.router_aux(routing)

    return layer


def _mean_square(y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


@jax.jit
def _relative_error(found: jax.Array, wanted: jax.Array) -> jax.Array:
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.linalg.norm((found - wanted).ravel()) / jnp.linalg.norm(wanted.ravel())
