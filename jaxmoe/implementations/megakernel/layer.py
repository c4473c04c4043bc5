"""The fused implementation: one call of compiled code per rank and layer. From pytrees to buffers to that call.

`api.py` calls `megakernel` for `implementation="megakernel"`, with ids outside the experts already -1 and masked tokens
already zero, after `limits.py` has checked what the compiled code relies on. On a CPU the call is served by threads
that walk the task stream of the GPU kernel (ffi/host/).

The backward pass is another such call. It gets the inputs and the gradient of the output, and returns all gradients.
The inputs of the activation are either kept from the forward pass (`residuals="save"`) or computed again.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Float, Int, Int32

from jaxmoe.activation import Activation, compiled_form
from jaxmoe.experts import Experts
from jaxmoe.guard import not_mapped
from jaxmoe.implementations.base import CHECKPOINT_NAMES, Inputs, Shape
from jaxmoe.implementations.megakernel import lowering
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.megakernel.plan_defaults import backward_plan
from jaxmoe.implementations.megakernel.tiling import granularity, most_row_tiles, saved_row_tiles
from jaxmoe.native import BACKWARD, FORWARD
from jaxmoe.sharding import ExpertGroup, replica_groups, vary_alike

# A wait inside the kernel that takes longer ends in an error that names the signal. On a CPU all ranks are threads of
# this process; on GPUs of several processes a rank may wait while another one's host reads data or writes a checkpoint.
TIMEOUT_SECONDS = {"cpu": 60.0, "gpu": 600.0}
# Environment variable that replaces both; read when a layer is traced.
TIMEOUT_VARIABLE = "JAXMOE_TIMEOUT_SECONDS"
# 31 years. Compiled code counts nanoseconds in 64 bits, beside those since the machine has started.
LONGEST_TIMEOUT_SECONDS = 1e9


class Static(NamedTuple):
    """What is known when the layer is traced."""

    activation: Activation
    group: ExpertGroup
    plan: KernelPlan
    shape: Shape
    platform: str
    saved_tiles: int  # row tiles whose inputs of the activation are kept for the backward pass


def megakernel(
    x: Float[Array, "tokens hidden"],
    topk_ids: Int[Array, "tokens top_k"],
    topk_weights: Float[Array, "tokens top_k"],
    experts: Experts,
    *,
    activation: Activation,
    group: ExpertGroup,
    plan: KernelPlan,
    shape: Shape,
    platform: str,
    save: bool = False,
) -> Float[Array, "tokens hidden"]:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)` for the tokens of this rank.

    Without `save` its gradients are computed from the inputs alone, so that a backward pass repeats the gate and up
    GEMMs. With it what they computed is kept, one array with a name of `CHECKPOINT_NAMES`. The bits are the same.

    Args:
      x: tokens of this rank.
      topk_ids: expert of each slot among all experts of the group, -1 for an unused slot.
      topk_weights: routing weight of each slot.
      experts: experts of this rank.
      activation: between the GEMMs, one that compiled code has.
      group: the ranks that hold the experts.
      plan: order of the work and size of the rings.
      shape: sizes of the call.
      platform: `"cpu"` or `"gpu"`.
      save: whether to keep the inputs of the activation for the backward pass.
    """
    saved_tiles = saved_row_tiles(shape, platform) if save else 0
    inputs = vary_alike(Inputs(x, topk_ids, topk_weights, experts))
    return _layer(Static(activation, group, plan, shape, platform, saved_tiles), inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(static: Static, inputs: Inputs) -> jax.Array:
    return _forward(static._replace(saved_tiles=0), inputs)[0]


class Residuals(NamedTuple):
    """What the backward pass gets."""

    inputs: Inputs
    saved: Float[Array, "rows projections intermediate"] | None


def _layer_fwd(static: Static, inputs: Inputs) -> tuple[jax.Array, Residuals]:
    y, saved = _forward(static, inputs)
    return y, Residuals(inputs, None if saved is None else checkpoint_name(saved, CHECKPOINT_NAMES[-1]))


def _layer_bwd(static: Static, residuals: Residuals, dy: jax.Array) -> tuple[Inputs]:
    dy = not_mapped(dy)  # jax.jacrev maps the backward pass alone
    inputs = residuals.inputs
    dx, dweights, dexperts = _backward(static, residuals, dy.astype(inputs.x.dtype))
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    dweights = dweights.astype(inputs.topk_weights.dtype)
    return (Inputs(dx, no_ids, dweights, dexperts),)  # pyright: ignore[reportArgumentType]


_layer.defvjp(_layer_fwd, _layer_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(static: Static, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
    y, *saved = _launch(FORWARD, static, static.plan, _operands(static, inputs), _results_of_forward(static, inputs.x))
    return y, saved[0] if saved else None


def _results_of_forward(static: Static, x: jax.Array) -> tuple[Any, ...]:
    like_x = jax.typeof(x)
    if not static.saved_tiles:
        return (like_x,)
    shape = static.shape
    rows = static.saved_tiles * granularity(static.platform, shape.gated).tile_rows
    # Varies over the mesh as the tokens do. Only its type is used.
    saved = jnp.broadcast_to(x[0, 0], (rows, 2 if shape.gated else 1, shape.intermediate))
    return like_x, jax.typeof(saved)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(static: Static, residuals: Residuals, dy: jax.Array) -> tuple[jax.Array, jax.Array, Experts]:
    inputs, saved = residuals
    of_layer = _operands(static, inputs)
    operands = (*of_layer, dy) if saved is None else (*of_layer, dy, saved)
    plan = backward_plan(static.plan, static.shape, static.platform)
    # Gradients have the shapes of the operands from x on, but for the ids.
    # Gradients of experts have the dtype that the user's have, which may be wider than that of the operands.
    dtype, experts = inputs.experts.w_gate.dtype, inputs.experts
    of_experts = (jax.typeof(operand.astype(dtype)) for operand in of_layer[4:])
    results = (jax.typeof(of_layer[1]), jax.typeof(of_layer[3]), *of_experts)
    dx, dweights, *gradients = _launch(BACKWARD, static, plan, operands, results)
    present = [getattr(experts, field.name) is not None for field in dataclasses.fields(experts)]
    leaves = [gradient for gradient, is_there in zip(gradients, present, strict=True) if is_there]
    return dx, dweights, jax.tree.unflatten(jax.tree.structure(experts), leaves)


def _operands(static: Static, inputs: Inputs) -> tuple[jax.Array, ...]:
    """Returns the operands of a forward pass: LayerBuffers in ffi/common/layer_call.h, in order."""
    x, experts = inputs.x, inputs.experts.astype(inputs.x.dtype)
    # What experts without an up projection or biases pass: an array without elements, and one that depends on all
    # inputs. jax.grad moves what does not depend on the carry of a lax.scan out of its loop, and so through shard_map,
    # where XLA (jax 0.11.2) crashes on an operand without elements. Nothing of the barrier is left after compilation.
    nothing = jax.lax.optimization_barrier(inputs).x[:0]
    return (
        _place(static.group),
        x,
        inputs.topk_ids,
        inputs.topk_weights.astype(jnp.promote_types(x.dtype, jnp.float32)),
        experts.w_gate,
        nothing if experts.w_up is None else experts.w_up,
        experts.w_down,
        *(nothing if bias is None else bias for bias in (experts.b_gate, experts.b_up, experts.b_down)),
    )


def _launch(
    target: str, static: Static, plan: KernelPlan, operands: tuple[jax.Array, ...], results: tuple[Any, ...]
) -> tuple[jax.Array, ...]:
    """The call of compiled code, with results like `results`. What it may assume is what `limits.py` has checked."""
    attributes = _attributes(static, plan)
    if static.group.size > 1 and _several_processes() and lowering.can_name_devices():
        call = functools.partial(lowering.call, target, results, **attributes)
    else:
        call = functools.partial(jax.ffi.ffi_call(target, results), **attributes, devices=lowering.NOT_KNOWN)
    if static.platform == "gpu" and static.group.size > 1:
        call = _on_collective_stream(call)
    # The number of the group varies over every manual axis, and operands must vary alike. The results do not depend on
    # that number, so they vary as the inputs do.
    return tuple(call(*vary_alike(operands)))


def _several_processes() -> bool:
    """Whether ranks may be in other processes: only then do devices need names that all of them know.

    Programs whose calls name devices have to use one mesh, which JAX checks, and cannot be lowered without devices.
    """
    return jax.process_count() > 1


def _on_collective_stream(call: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a call that waits for its peers on the stream of XLA's own collectives.

    On a stream of its own it could hold all multiprocessors of one GPU while a collective holds those of another, each
    waiting for its peer.
    """
    # jax 0.10 has no such argument, and no way to reach the other GPUs either: limits.py lets no call come here.
    options: dict[str, Any] = {"out_memory_spaces": jax.memory.Space.Device}
    annotate = compute_on(compute_type="gpu_stream:collective", **options)
    return annotate(call)


@_forward.defjvp
@_backward.defjvp
def _no_jvp(static: Static, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "moe_layer: implementation='megakernel' has first derivatives only (jax.grad, jax.vjp), and this asks for "
        "second ones. Pass implementation='xla' for those."
    )


def _place(group: ExpertGroup) -> Int32[Array, "2"]:
    """Returns this rank's position in its group, and the number of the group among those of the mesh."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    others = tuple(name for name in manual if name not in group.axis_names)
    number = jax.lax.axis_index(others) if others else jnp.int32(0)
    return jnp.stack(vary_alike((group.index(), number)))


def timeout_seconds(platform: str) -> float:
    """Returns how long a wait inside the kernel may take, from `JAXMOE_TIMEOUT_SECONDS` where that is set.

    Anything above `LONGEST_TIMEOUT_SECONDS` means that.

    Raises:
      ValueError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return TIMEOUT_SECONDS[platform]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r} must be a positive number of seconds, such as 600.")
    return min(seconds, LONGEST_TIMEOUT_SECONDS)


def _attributes(static: Static, plan: KernelPlan) -> dict[str, np.int32 | np.float32 | np.ndarray]:
    """Returns the attributes of the call: LayerAttributes in ffi/common/layer_call.h, by name."""
    form = compiled_form(static.activation)
    assert form is not None, "limits.py rejects activations that compiled code does not have"
    pieces = granularity(static.platform, static.shape.gated)
    integers = {
        "ranks": static.group.size,
        "num_experts": static.shape.num_experts,
        "activation": form.kind,
        "tile_rows": pieces.tile_rows,
        "hidden_columns": pieces.hidden_columns,
        "output_columns": pieces.output_columns,
        "unit_tiles": plan.unit_tiles,
        "lag_units": plan.lag_units,
        "ring_tiles": min(plan.ring_tiles, most_row_tiles(static.shape, static.platform)),
        "chunk_rows": plan.chunk_rows,
        "workers": pieces.workers,
        "dispatchers_per_worker": pieces.dispatchers_per_worker,
        "keep_tokens": int(plan.keep_tokens),
        "segment_tiles": plan.segment_tiles,
        "saved_tiles": static.saved_tiles,
    }
    floats = {
        "limit": form.limit,
        "alpha": form.alpha,
        "up_offset": form.up_offset,
        "timeout_seconds": timeout_seconds(static.platform),
    }
    groups = replica_groups(static.group, jax.sharding.get_abstract_mesh())
    return (
        {name: np.int32(value) for name, value in integers.items()}
        | {name: np.float32(value) for name, value in floats.items()}
        | {"groups": groups.reshape(-1)}
    )
