"""The trained layers against the truth: output and gradients of `moe_layer` on the mesh, on held-out text.

The truth is what `implementation="reference"` computes (every expert applied to every token), here in float64 and on
one device, so that it shares neither precision nor sharding with what it judges. The tolerance is the library's rule
for tests: twice the error that the same dense maths makes in the precision of the layer.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

import jaxmoe
from jaxmoe.demo.model import LanguageModel
from jaxmoe.demo.options import DATA_AXIS, EXPERT_AXIS, Devices, Options
from jaxmoe.options import Arguments
from jaxmoe.testing import dense, relative_error, tolerance


class OutputAndGradients(NamedTuple):
    """Of one layer, in the order of `ARRAYS`."""

    y: Any
    dx: Any
    dtopk_weights: Any
    dw_gate: Any
    dw_up: Any
    dw_down: Any


ARRAYS = ("output", *(f"gradient of {name}" for name in ("x", "topk_weights", "w_gate", "w_up", "w_down")))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One array of one layer.

    Args:
      layer: which layer.
      name: what the array is.
      error: relative to the truth.
      low_precision_error: that of the dense maths in the precision of the layer.
      allowed: the largest error that passes.
    """

    layer: int
    name: str
    error: float
    low_precision_error: float
    allowed: float

    @property
    def share(self) -> float:
        """The error over the largest that passes; infinite where the error is no number."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed

    @property
    def passed(self) -> bool:
        """Whether the error is allowed."""
        return self.share <= 1


def compare(
    model: LanguageModel, options: Options, devices: Devices, windows: Int32[np.ndarray, "batch length"]
) -> list[Comparison]:
    """Returns the comparisons of the output and of every gradient of each MoE layer.

    Args:
      model: trained.
      options: sizes of the run.
      devices: to run on; no mesh may be set, since the reference runs on one of them.
      windows: held-out bytes.
    """
    with jax.set_mesh(devices.mesh):
        arguments = _moe_arguments(model, options, jax.device_put(windows, devices.batch_sharding))
    on_mesh = jax.jit(
        functools.partial(
            _output_and_gradients,
            lambda a: jaxmoe.moe_layer(
                a.x,
                a.topk_ids,
                a.topk_weights,
                a.experts,
                axis_name=EXPERT_AXIS,
                data_axes=DATA_AXIS,
                mesh=devices.mesh,
                implementation=options.implementation,
            ),
        )
    )
    results = []
    for layer, of_layer in enumerate(arguments):
        cotangent = np.random.default_rng(layer).standard_normal(of_layer.x.shape).astype(np.float32)
        values = on_mesh(of_layer, jax.device_put(cotangent, devices.batch_sharding))
        truth, low = _dense_twice(jax.device_get(of_layer), cotangent, devices.mesh.devices.flat[0])
        for name, *arrays in zip(ARRAYS, values, truth, low, strict=True):
            value, true, rough = arrays
            results.append(
                Comparison(
                    layer=layer,
                    name=name,
                    error=relative_error(value, true),
                    low_precision_error=relative_error(rough, true),
                    allowed=tolerance(rough, true, devices.dtype),
                )
            )
    return results


def _moe_arguments(model: LanguageModel, options: Options, tokens: jax.Array) -> list[Arguments]:
    """Returns what `moe_layer` is called with in every layer of the model, with the tokens in one dimension."""

    @jax.jit
    def arguments(model: Any, tokens: jax.Array) -> list[Arguments]:
        layers = []
        for block, x in zip(model.blocks, model.moe_inputs(tokens), strict=True):
            x, moe = x.reshape(-1, x.shape[-1]), block.moe
            logits = jnp.dot(x.astype(jnp.float32), moe.router_kernel[...], precision=jax.lax.Precision.HIGHEST)
            routing = jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=options.top_k))
            experts = jaxmoe.Experts(moe.w_gate[...], moe.w_up[...], moe.w_down[...]).astype(x.dtype)
            layers.append(Arguments(x, routing.topk_ids, routing.topk_weights, experts))
        return layers

    return arguments(model, tokens)


def _output_and_gradients(
    layer: Any, arguments: Arguments, cotangent: Float[jax.Array, "tokens hidden"]
) -> OutputAndGradients:
    """Returns the output of a layer, and the gradients of its product with a cotangent."""

    def of_differentiable(x: Any, topk_weights: Any, experts: jaxmoe.Experts) -> Any:
        return layer(arguments._replace(x=x, topk_weights=topk_weights, experts=experts))

    y, vjp = jax.vjp(of_differentiable, arguments.x, arguments.topk_weights, arguments.experts)
    dx, dweights, dexperts = vjp(cotangent.astype(y.dtype))
    return OutputAndGradients(y, dx, dweights, dexperts.w_gate, dexperts.w_up, dexperts.w_down)


def _dense_twice(
    arguments: Arguments, cotangent: np.ndarray, device: Any
) -> tuple[OutputAndGradients, OutputAndGradients]:
    """Returns the dense reference in float64, and in the dtype of the arguments, both computed on one device."""
    dtype = arguments.x.dtype
    # The layer's own cotangent: what it is in the precision of the output.
    cotangent = cotangent.astype(dtype)
    low = _dense_in(dtype)(*jax.device_put((arguments, cotangent), device))
    with jax.enable_x64(True):
        wide = jax.tree.map(_widened, (arguments, cotangent))
        truth = _dense_in(jnp.dtype(np.float64))(*jax.device_put(wide, device))
    return truth, low


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


@functools.cache
def _dense_in(dtype: jnp.dtype) -> Any:
    return jax.jit(functools.partial(_output_and_gradients, functools.partial(dense, compute_dtype=dtype)))
