"""The fused implementation: one call of compiled code per rank and layer. From pytrees to buffers to that call.

`limits.py` has checked what the compiled code relies on. On a CPU the call is served by threads that walk the task
stream of the GPU kernel (ffi/host/).

The backward pass is another such call. It gets the inputs and the gradient of the output, and returns all gradients.
The inputs of the activation are either kept from the forward pass (`residuals="save"`) or computed again.

In 8 or 4 bits (`precision.py`) the values of matrices are operands as they lie, [experts, out, in], and their scales
are operands of their own, as are those that tokens and h are rounded with where these are given; tokens are rounded in
compiled code. The backward pass has 16 bits: wide experts go to the same call as without 8 bits, those that came in
fewer bits to one that decodes them, a few at a time. Where nothing of the experts is differentiated, as beside adapters
or a router that are trained alone, a backward pass makes no gradients of them. Biases of experts in fewer bits do have
gradients: where they are asked for, another implementation's backward pass decodes all experts.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal
from jaxtyping import Array, Float

from jaxmoe import native
from jaxmoe.activation import compiled_form
from jaxmoe.block_scaled import BlockScaled
from jaxmoe.experts import LAYOUTS, AnyExperts, FusedExperts, present
from jaxmoe.formats import at_least_float32
from jaxmoe.four_bit import FourBit
from jaxmoe.guard import not_mapped, reverse_mode_only
from jaxmoe.implementations.base import CHECKPOINT_NAMES, Call, Inputs
from jaxmoe.implementations.megakernel.launching import launch
from jaxmoe.implementations.megakernel.plan_defaults import backward_plan, kept_plan
from jaxmoe.implementations.megakernel.schedule import roomy_row_tiles, schedule_of, tile_sizes
from jaxmoe.native import BACKWARD, FORWARD
from jaxmoe.precision import ACCUMULATIONS, experts_in_8_bits, powers_of_two, row_scales
from jaxmoe.sharding import vary_alike

# Returns the gradients of x, of topk_weights and of the biases of experts in 8 bits, for the gradient of the output.
BackwardOfDecoded = Callable[[Call, Inputs, jax.Array], tuple[jax.Array, jax.Array, AnyExperts]]


def run(call: Call, inputs: Inputs, *, backward_of_decoded: BackwardOfDecoded) -> jax.Array:
    """Returns `sum_k topk_weights[:, k] * expert[topk_ids[:, k]](x)` for the tokens of this rank.

    With `residuals="recompute"` its gradients are computed from the inputs alone, so that a backward pass repeats the
    gate and up GEMMs. With `"save"` what they computed is kept, one array with a name of `CHECKPOINT_NAMES`. The bits
    are the same.
    """
    return _layer(call, backward_of_decoded, vary_alike(reverse_mode_only(inputs)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _layer(call: Call, backward_of_decoded: BackwardOfDecoded, inputs: Inputs) -> jax.Array:
    del backward_of_decoded
    return _once(_forward(dataclasses.replace(call, residuals="recompute"), inputs)[0])


def _once(result: Any) -> Any:
    """Returns what a launch has made. A user that takes it out of a loop and uses it inside as well gets one launch.

    XLA (GPU, jaxlib 0.11.2) lets a call write into an array that a scan stacks. Where the result has other users too,
    it would make two calls, and copy the layer's weights for the second one. It does not look through a barrier.
    """
    return jax.lax.optimization_barrier(result)


class SavedForward(NamedTuple):
    """What the backward pass gets beside the gradient of the output.

    Which experts are trained is told by the size of an array. A field of the pytree's structure would not do: where jax
    0.12 takes a forward pass that it has traced before, it takes the structure of the one that it has traced last, and
    experts that were frozen there had gradients of zero here.
    """

    inputs: Inputs
    gate_up: Float[Array, "rows projections intermediate"] | None  # in the kernels' own order
    trained: Float[Array, "trained"]  # of one element where something of the experts is differentiated, if only a bias

    @property
    def trains_experts(self) -> bool:
        return self.trained.size > 0


def _layer_fwd(call: Call, backward_of_decoded: BackwardOfDecoded, inputs: Inputs) -> tuple[jax.Array, SavedForward]:
    """Gets the inputs with whether JAX differentiates with respect to each: all of them are `CustomVJPPrimal`."""
    del backward_of_decoded
    is_leaf = lambda leaf: isinstance(leaf, CustomVJPPrimal)  # noqa: E731
    trains_experts = any(leaf.perturbed for leaf in jax.tree.leaves(inputs.experts, is_leaf=is_leaf))
    inputs = jax.tree.map(lambda leaf: leaf.value, inputs, is_leaf=is_leaf)
    y, gate_up = _forward(call, inputs)
    kept = None if gate_up is None else checkpoint_name(gate_up, CHECKPOINT_NAMES[-1])
    return _once(y), SavedForward(inputs, kept, jnp.zeros(int(trains_experts)))


def _layer_bwd(call: Call, backward_of_decoded: BackwardOfDecoded, saved: SavedForward, dy: jax.Array) -> tuple[Inputs]:
    dy = not_mapped(dy)  # jax.jacrev maps the backward pass alone
    inputs = saved.inputs
    dy = dy.astype(inputs.x.dtype)
    if call.freezes and saved.trains_experts:
        dx, dweights, dexperts = backward_of_decoded(call, inputs, dy)
    else:
        dx, dweights, dexperts = _backward(call.decoded if call.freezes else call.wide, saved, dy)
    no_ids = np.zeros(inputs.topk_ids.shape, jax.dtypes.float0)
    dweights = dweights.astype(inputs.topk_weights.dtype)
    return (Inputs(dx, no_ids, dweights, dexperts),)  # pyright: ignore[reportArgumentType]


# With symbolic zeros the forward pass is told what is differentiated. The one result has a gradient that is not zero
# where the backward pass is called at all.
_layer.defvjp(_layer_fwd, _layer_bwd, symbolic_zeros=True)


def _forward(call: Call, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
    results, plan = {"y": jax.typeof(inputs.x)}, call.plan
    saved_tiles = roomy_row_tiles(call.shape, call.platform) if call.residuals == "save" else 0
    if saved_tiles:
        rows = saved_tiles * tile_sizes(call.shape, call.platform).rows
        # Varies over the mesh as the tokens do. Only its type is used.
        like = jnp.broadcast_to(inputs.x[0, 0], (rows, call.shape.projections, call.shape.intermediate))
        results["gate_up"] = jax.typeof(like)
        plan = kept_plan(plan, call.shape, call.platform)
    schedule = schedule_of(call.shape, call.platform, plan, saved_tiles)
    made = _launch(FORWARD, call, schedule, _operands(call, inputs), results, inputs.experts)
    return made["y"], made.get("gate_up")


def _backward(call: Call, saved: SavedForward, dy: jax.Array) -> tuple[jax.Array, jax.Array, AnyExperts]:
    inputs, gate_up = saved.inputs, saved.gate_up
    trained = list(present(inputs.experts)) if saved.trains_experts else []
    saved_tiles = 0 if gate_up is None else gate_up.shape[0] // tile_sizes(call.shape, call.platform).rows
    plan = backward_plan(call.plan, call.shape, call.platform)
    schedule = schedule_of(call.shape, call.platform, plan, saved_tiles, frozen=not trained)
    operands = _operands(call, inputs) | {"dy": dy}
    if gate_up is not None:
        operands["gate_up"] = gate_up
    # Gradients of experts have the dtype that the user's have, which may be wider than that of the operands.
    wide = {name: operands[name].astype(inputs.experts.matrix.dtype) for name in trained}
    differentiated = {name: operands[name] for name in ("x", "topk_weights")} | wide
    results = {f"d{name}": jax.typeof(operand) for name, operand in differentiated.items()}
    made = _launch(BACKWARD, call, schedule, operands, results, inputs.experts)
    gradients = {name: made.get(f"d{name}") for name in present(inputs.experts)}
    return *_once((made["dx"], made["dtopk_weights"])), dataclasses.replace(inputs.experts, **gradients)


def _operands(call: Call, inputs: Inputs) -> dict[str, jax.Array]:
    """Returns the operands of a forward pass by their names in `ffi/common/layer_arrays.h`, those that experts have."""
    x, experts = inputs.x, inputs.experts
    if call.precision is not None:
        assert not isinstance(experts, FusedExperts), "api.py splits what is multiplied in fewer bits"
        experts = experts_in_8_bits(experts, call.precision)
    arrays: dict[str, jax.Array] = {}
    for name, array in present(experts).items():
        if isinstance(array, BlockScaled):
            arrays |= {name: array.values, f"{name}_scales": array.scales.astype(jnp.float32)}
        elif isinstance(array, FourBit):
            # Compiled code has a factor for each matrix, also where the format has none.
            ones = jnp.ones(array.shape[0], jnp.float32)
            factors = vary_alike((array.scales, ones))[1] if array.factors is None else array.factors
            of_groups = {f"{name}_group_scales": array.scales, f"{name}_scales": factors[:, None, None]}
            arrays |= {name: array.values if array.repacked else array.packed, **of_groups}
        else:
            arrays[name] = array.astype(x.dtype)
    if given := [scale for scale in row_scales(experts, call.precision) if scale is not None]:
        arrays["row_scales"] = jnp.stack(given)
    return {
        "x": x,
        "topk_ids": inputs.topk_ids,
        "topk_weights": inputs.topk_weights.astype(at_least_float32(x.dtype)),
        **arrays,
    }


def _launch(
    target: str,
    call: Call,
    schedule: Any,
    operands: dict[str, jax.Array],
    results: dict[str, Any],
    experts: AnyExperts,
) -> dict[str, jax.Array]:
    """The call of compiled code, with results like `results`. What it may assume is what `limits.py` has checked."""
    order = native.schedule().ARRAY_NAMES
    return launch(target, order, call.group, call.platform, _attributes(call, schedule, experts), operands, results)


def _attributes(call: Call, schedule: Any, experts: AnyExperts) -> dict[str, np.int32 | np.float32 | np.ndarray]:
    """Returns what a layer's call has beside those of every call: `LayerAttributes` in `ffi/common/layer_call.h`."""
    form = compiled_form(call.activation)
    assert form is not None, "limits.py rejects activations that compiled code does not have"
    layout = 1 + LAYOUTS.index(experts.layout) if isinstance(experts, FusedExperts) else 0
    return {
        "num_experts": np.int32(call.shape.num_experts),
        "activation": np.int32(form.kind),
        "limit": np.float32(form.limit),
        "alpha": np.float32(form.alpha),
        "up_offset": np.float32(form.up_offset),
        "rounds_rows": np.int32(call.shape.formats.tokens.scale_rows > 0),
        "power_of_two_scales": np.int32(powers_of_two(call.precision)),
        "accumulation": np.int32(ACCUMULATIONS.index(call.accumulation)),
        "gate_up_layout": np.int32(layout),
        "schedule": np.array(schedule.numbers, np.int32),
    }
