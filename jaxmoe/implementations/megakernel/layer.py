"""The fused implementation: one call of compiled code per rank and layer. From pytrees to buffers to that call.

`limits.py` has checked what the compiled code relies on. On a CPU the call is served by threads that walk the task
stream of the GPU kernel (ffi/host/).

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
from jaxtyping import Array, Float, Int32

from jaxmoe.activation import compiled_form
from jaxmoe.experts import Experts
from jaxmoe.guard import not_mapped
from jaxmoe.implementations.base import CHECKPOINT_NAMES, Call, Inputs
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


def run(call: Call, inputs: Inputs) -> jax.Array:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)` for the tokens of this rank.

    With `residuals="recompute"` its gradients are computed from the inputs alone, so that a backward pass repeats the
    gate and up GEMMs. With `"save"` what they computed is kept, one array with a name of `CHECKPOINT_NAMES`. The bits
    are the same.
    """
    return _layer(call, vary_alike(inputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(call: Call, inputs: Inputs) -> jax.Array:
    return _forward(dataclasses.replace(call, residuals="recompute"), inputs)[0]


class SavedForward(NamedTuple):
    """What the backward pass gets beside the gradient of the output."""

    inputs: Inputs
    gate_up: Float[Array, "rows projections intermediate"] | None


def _layer_fwd(call: Call, inputs: Inputs) -> tuple[jax.Array, SavedForward]:
    y, gate_up = _forward(call, inputs)
    return y, SavedForward(inputs, None if gate_up is None else checkpoint_name(gate_up, CHECKPOINT_NAMES[-1]))


def _layer_bwd(call: Call, saved: SavedForward, dy: jax.Array) -> tuple[Inputs]:
    dy = not_mapped(dy)  # jax.jacrev maps the backward pass alone
    inputs = saved.inputs
    dx, dweights, dexperts = _backward(call, saved, dy.astype(inputs.x.dtype))
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    dweights = dweights.astype(inputs.topk_weights.dtype)
    return (Inputs(dx, no_ids, dweights, dexperts),)  # pyright: ignore[reportArgumentType]


_layer.defvjp(_layer_fwd, _layer_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(call: Call, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
    operands, results = _operands(call.group, inputs), _results_of_forward(call, inputs.x)
    y, *gate_up = _launch(FORWARD, call, call.plan, operands, results)
    return y, gate_up[0] if gate_up else None


def _results_of_forward(call: Call, x: jax.Array) -> tuple[Any, ...]:
    like_x = jax.typeof(x)
    if not (saved_tiles := _saved_tiles(call)):
        return (like_x,)
    shape = call.shape
    rows = saved_tiles * granularity(call.platform, shape.gated).tile_rows
    # Varies over the mesh as the tokens do. Only its type is used.
    gate_up = jnp.broadcast_to(x[0, 0], (rows, shape.projections, shape.intermediate))
    return like_x, jax.typeof(gate_up)


def _saved_tiles(call: Call) -> int:
    """Row tiles whose inputs of the activation are kept for the backward pass."""
    return saved_row_tiles(call.shape, call.platform) if call.residuals == "save" else 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(call: Call, saved: SavedForward, dy: jax.Array) -> tuple[jax.Array, jax.Array, Experts]:
    inputs, gate_up = saved
    of_layer = _operands(call.group, inputs)
    operands = (*of_layer, dy) if gate_up is None else (*of_layer, dy, gate_up)
    plan = backward_plan(call.plan, call.shape, call.platform)
    # Gradients have the shapes of the operands from x on, but for the ids.
    # Gradients of experts have the dtype that the user's have, which may be wider than that of the operands.
    dtype, experts = inputs.experts.w_gate.dtype, inputs.experts
    of_experts = (jax.typeof(operand.astype(dtype)) for operand in of_layer[4:])
    results = (jax.typeof(of_layer[1]), jax.typeof(of_layer[3]), *of_experts)
    dx, dweights, *gradients = _launch(BACKWARD, call, plan, operands, results)
    present = [getattr(experts, field.name) is not None for field in dataclasses.fields(experts)]
    leaves = [gradient for gradient, is_there in zip(gradients, present, strict=True) if is_there]
    return dx, dweights, jax.tree.unflatten(jax.tree.structure(experts), leaves)


def _operands(group: ExpertGroup, inputs: Inputs) -> tuple[jax.Array, ...]:
    """Returns the operands of a forward pass: LayerBuffers in ffi/common/layer_call.h, in order."""
    x, experts = inputs.x, inputs.experts.astype(inputs.x.dtype)
    # What experts without an up projection or biases pass: an array without elements, and one that depends on all
    # inputs. jax.grad moves what does not depend on the carry of a lax.scan out of its loop, and so through shard_map,
    # where XLA (jax 0.11.2) crashes on an operand without elements. Nothing of the barrier is left after compilation.
    nothing = jax.lax.optimization_barrier(inputs).x[:0]
    return (
        _place(group),
        x,
        inputs.topk_ids,
        inputs.topk_weights.astype(jnp.promote_types(x.dtype, jnp.float32)),
        experts.w_gate,
        nothing if experts.w_up is None else experts.w_up,
        experts.w_down,
        *(nothing if bias is None else bias for bias in (experts.b_gate, experts.b_up, experts.b_down)),
    )


def _launch(
    target: str, call: Call, plan: KernelPlan, operands: tuple[jax.Array, ...], results: tuple[Any, ...]
) -> tuple[jax.Array, ...]:
    """The call of compiled code, with results like `results`. What it may assume is what `limits.py` has checked."""
    attributes = _attributes(call, plan)
    if call.group.size > 1 and _several_processes() and lowering.can_name_devices():
        launch = functools.partial(lowering.call, target, results, **attributes)
    else:
        launch = functools.partial(jax.ffi.ffi_call(target, results), **attributes, devices=lowering.NOT_KNOWN)
    if call.platform == "gpu" and call.group.size > 1:
        launch = _on_collective_stream(launch)
    # The number of the group varies over every manual axis, and operands must vary alike. The results do not depend on
    # that number, so they vary as the inputs do.
    return tuple(launch(*vary_alike(operands)))


def _several_processes() -> bool:
    """Whether ranks may be in other processes: only then do devices need names that all of them know.

    Programs whose calls name devices have to use one mesh, which JAX checks, and cannot be lowered without devices.
    """
    return jax.process_count() > 1


def _on_collective_stream(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Puts a launch that waits for its peers on the stream of XLA's own collectives.

    On a stream of its own it could hold all multiprocessors of one GPU while a collective holds those of another, each
    waiting for its peer.
    """
    # jax 0.10 has no such argument, and no way to reach the other GPUs either: limits.py lets no call come here.
    options: dict[str, Any] = {"out_memory_spaces": jax.memory.Space.Device}
    return compute_on(compute_type="gpu_stream:collective", **options)(launch)


@_forward.defjvp
@_backward.defjvp
def _no_jvp(call: Call, primals: Any, tangents: Any) -> Any:
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


def _attributes(call: Call, plan: KernelPlan) -> dict[str, np.int32 | np.float32 | np.ndarray]:
    """Returns the attributes of the call: LayerAttributes in ffi/common/layer_call.h, by name."""
    form = compiled_form(call.activation)
    assert form is not None, "limits.py rejects activations that compiled code does not have"
    pieces = granularity(call.platform, call.shape.gated)
    integers = {
        "ranks": call.group.size,
        "num_experts": call.shape.num_experts,
        "activation": form.kind,
        "tile_rows": pieces.tile_rows,
        "tile_h_columns": pieces.h_columns,
        "tile_columns": pieces.columns,
        "unit_tiles": plan.unit_tiles,
        "lag_units": plan.lag_units,
        "ring_tiles": min(plan.ring_tiles, most_row_tiles(call.shape, call.platform)),
        "chunk_rows": plan.chunk_rows,
        "workers": pieces.workers,
        "dispatchers_per_worker": pieces.dispatchers_per_worker,
        "keep_tokens": int(plan.keep_tokens),
        "segment_tiles": plan.segment_tiles,
        "saved_tiles": _saved_tiles(call),
    }
    floats = {
        "limit": form.limit,
        "alpha": form.alpha,
        "up_offset": form.up_offset,
        "timeout_seconds": timeout_seconds(call.platform),
    }
    groups = replica_groups(call.group, jax.sharding.get_abstract_mesh())
    return (
        {name: np.int32(value) for name, value in integers.items()}
        | {name: np.float32(value) for name, value in floats.items()}
        | {"groups": groups.reshape(-1)}
    )
