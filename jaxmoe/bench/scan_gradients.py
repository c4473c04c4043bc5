"""The lines of `python -m jaxmoe.bench scan` with gradients: what a training step makes of layers in a `jax.lax.scan`.

- `recompute`: value and gradients, with respect to the router and the experts of every layer, of the mean square of the
  output and a hundredth of the mean balance loss, with `residuals="recompute"`.
- `save`: the same with `residuals="save"`.
- `checkpoint`: `recompute` with every layer in `jax.checkpoint(prevent_cse=False)`, which keeps its input alone.

Before a line is timed its gradients are compared with those of the same layers called one after the other, outside of a
scan, and its loss with what NumPy makes of the output and the logits. Of the first layer those gradients are compared
with the reference in float32: of the experts, and of tokens and routing weights on the way to its router, at the
samples of `gradient_check.py`; and the gradient of its router with what NumPy makes of that of the routing weights and
of the balance loss, together and of the balance loss alone, whose share is small.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxmoe
from jaxmoe.bench.gradient_check import errors_of, gradient_sample_of, of_unit_scale
from jaxmoe.bench.inputs import sampled_tokens, whole
from jaxmoe.bench.passes import Gradients
from jaxmoe.options import Arguments
from jaxmoe.testing import relative_error

GradientLine = Literal["recompute", "save", "checkpoint"]
LINES: tuple[GradientLine, ...] = get_args(GradientLine)
# Of the norm of a gradient. The products are the same; XLA may round elsewhere in a scan.
ALLOWED_ERROR = 1e-2
# Of the loss, a mean over all numbers of an output that XLA may have rounded elsewhere.
ALLOWED_LOSS_ERROR = 1e-3
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


def compare(
    program: Any, top_k: int, of_layer: dict[str, Any], x: jax.Array, layers: Layers, mesh: Mesh
) -> tuple[float, str]:
    """Returns the largest error of a gradient of any layer, relative to its norm, and what is wrong."""
    number = layers.router.shape[0]
    layer = _layer("recompute", top_k, of_layer)

    def balanced(x: jax.Array, own: Layers) -> tuple[jax.Array, jax.Array]:
        y, aux = layer(x, own)
        return y, aux.load_balancing_loss

    forward: Any = jax.jit(balanced)

    @jax.jit
    def backward(x: jax.Array, own: Layers, dy: jax.Array, of_balance: jax.Array) -> Any:
        return jax.vjp(balanced, x, own)[1]((dy, of_balance))

    of_layers = [jax.tree.map(lambda array, nth=nth: array[nth], layers) for nth in range(number)]
    inputs = [x]
    for own in of_layers:
        inputs.append(forward(inputs[-1], own)[0])
    loss, gradients = program(x, layers)
    dy, worst = jax.jit(jax.grad(_mean_square))(inputs[-1]), 0.0
    of_first = dy
    of_balance = jnp.float32(_OF_BALANCE / number)
    for nth in reversed(range(number)):
        of_first = dy
        dy, wanted = backward(inputs[nth], of_layers[nth], dy, of_balance)
        found = jax.tree.map(lambda array: array[nth], gradients)  # noqa: B023, called in this turn
        errors = jax.tree.leaves(jax.tree.map(_relative_error, found, wanted))
        # NaN is no error that is small.
        worst = max([worst, *(float(error) if error == error else float("inf") for error in errors)])
    if not worst <= ALLOWED_ERROR:
        return worst, f"a gradient has an error of {worst:.1e}"
    truth = _true_loss(inputs, of_layers, top_k, mesh)
    if not abs(float(loss) / truth - 1) <= ALLOWED_LOSS_ERROR:
        return worst, f"the loss is {float(loss):.6g}, not {truth:.6g}"
    return worst, _wrong_in_first(x, of_first, of_layers[0], backward, top_k, of_layer, float(of_balance), mesh)


def _true_loss(inputs: list[jax.Array], of_layers: list[Layers], top_k: int, mesh: Mesh) -> float:
    """The loss of the layers outside of a scan, given what each of them was given and what the last one returned."""
    losses = []
    for x, own in zip(inputs, of_layers, strict=False):
        ids = whole(_routing(x, own.router, top_k).topk_ids, mesh)
        counts = np.bincount(ids.reshape(-1), minlength=own.router.shape[1])
        losses.append(balance_loss(counts, probabilities(x, own.router, mesh)))
    return float(jax.jit(_mean_square)(inputs[-1])) + _OF_BALANCE * float(np.mean(losses))


def _wrong_in_first(
    x: jax.Array,
    dy: jax.Array,
    own: Layers,
    backward: Any,
    top_k: int,
    of_layer: dict[str, Any],
    of_balance: float,
    mesh: Mesh,
) -> str:
    """Returns what in the gradients of the first layer is not that of the reference, or not that of its formula.

    Cotangents are those of `of_unit_scale`.

    Args:
      x: its tokens.
      dy: cotangent of its output.
      own: its router and experts.
      backward: from tokens, router and experts, and the cotangents of output and balance loss, to gradients.
      top_k: of the router.
      of_layer: options of `moe_layer`.
      of_balance: cotangent of its balance loss.
      mesh: of the call.
    """
    dy, scale = of_unit_scale(dy)
    of_balance *= scale
    gradients = backward(x, own, dy, jnp.float32(of_balance))[1]
    of_balance_alone = backward(x, own, jnp.zeros_like(dy), jnp.float32(len(x)))[1]
    routing = _routing(x, own.router, top_k)

    @jax.jit
    def of_tokens(x: jax.Array, ids: jax.Array, weights: jax.Array, experts: Any, dy: jax.Array) -> Any:
        run = functools.partial(jaxmoe.moe_layer, residuals="recompute", **of_layer)
        return jax.vjp(lambda x, weights: run(x, ids, weights, experts), x, weights)[1](dy)

    arguments = Arguments(x, routing.topk_ids, routing.topk_weights, own.experts)
    dx, dweights = of_tokens(*arguments[:4], dy)
    ids, weights = (whole(array, mesh) for array in arguments[1:3])
    sample = gradient_sample_of(arguments, dy, sampled_tokens(ids), mesh)
    for name, error, allowed in errors_of(Gradients(dx, dweights, gradients.experts), sample, mesh):
        if not error <= allowed:
            return f"the gradient of {name} has an error of {error:.1e}, above {allowed:.1e}"

    scores, dweights = probabilities(x, own.router, mesh), whole(dweights, mesh).astype(np.float64)
    # Softmax of the logits that were chosen, and of all in the balance loss.
    through_weights = np.zeros_like(scores)
    weights = weights.astype(np.float64)
    chosen = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    np.put_along_axis(through_weights, ids, chosen, -1)
    share = np.bincount(ids.reshape(-1), minlength=scores.shape[1]) / ids.size
    through_balance = scores * (share - (scores @ share)[:, None]) * (scores.shape[1] / len(scores))
    tokens = whole(x, mesh).astype(np.float64)
    for name, found, dlogits in (
        ("the balance loss", of_balance_alone.router, len(x) * through_balance),
        ("the router", gradients.router, through_weights + of_balance * through_balance),
    ):
        error = relative_error(whole(found, mesh).astype(np.float32), tokens.T @ dlogits)
        if not error <= ALLOWED_ERROR:
            return f"the gradient of {name} has an error of {error:.1e}, above {ALLOWED_ERROR:.1e}"
    return ""


def probabilities(x: jax.Array, router: jax.Array, mesh: Mesh) -> np.ndarray:
    """Returns `[tokens, experts]` float64: the softmax of a router's logits, whose products are added up in float32."""
    logits = whole(_logits(x, router), mesh).astype(np.float64)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def balance_loss(rows_per_expert: np.ndarray, scores: np.ndarray) -> float:
    """Returns `E * sum_e f_e * P_e`: of the share of slots of each expert and its mean probability."""
    share = rows_per_expert / rows_per_expert.sum()
    return float(scores.shape[1] * (share * scores.mean(0)).sum())


@jax.jit
def _logits(x: jax.Array, router: jax.Array) -> jax.Array:
    return jnp.dot(x, router, precision="highest", preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def _routing(x: jax.Array, router: jax.Array, top_k: int) -> jaxmoe.Routing:
    logits = jnp.dot(x, router, preferred_element_type=jnp.float32)
    return jaxmoe.route(logits, jaxmoe.RouterConfig.qwen3_moe(top_k=top_k))


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
