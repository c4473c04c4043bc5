"""`implementation="megakernel"` of a dispatch and a combine: one launch of compiled code on every rank for each.

Rows are pulled by the rank that owns their expert straight from the tokens of the others into its array, and pushed
back the same way, over the memory that the layer's kernels use (ffi/cuda/kernel/exchange_kernel.cuh).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import native
from jaxmoe.exchange.base import Arrived, ExchangeCall, Kept, Routes
from jaxmoe.formats import Formats, at_least_float32
from jaxmoe.implementations.base import Shape
from jaxmoe.implementations.megakernel import plan_defaults
from jaxmoe.implementations.megakernel.launching import launch
from jaxmoe.implementations.megakernel.limits import (
    DTYPES,
    GPU_MULTIPLE,
    MOST_EXPERTS,
    MOST_LOCAL_EXPERTS,
    MOST_RANKS,
    MOST_TOP_K,
    SLOTS_END,
    check_platform,
)
from jaxmoe.implementations.megakernel.schedule import schedule_of
from jaxmoe.precision import ROWS, powers_of_two
from jaxmoe.sharding import vary_alike


def send(call: ExchangeCall, x: jax.Array, topk_ids: jax.Array) -> Arrived:
    """Returns the rows of this rank's experts, and where each comes from."""
    return _arrived(_launch(native.DISPATCH, call, *_sent(call, x, topk_ids)))


def start_send(call: ExchangeCall, x: jax.Array, topk_ids: jax.Array) -> tuple[Arrived, Kept]:
    """Starts to send: the kernel runs beside what follows in the program."""
    made, kept = _start(native.DISPATCH, call, *_sent(call, x, topk_ids))
    return _arrived(made), kept


def send_matmul(call: ExchangeCall, x: jax.Array, topk_ids: jax.Array, matrices: jax.Array) -> Arrived:
    """Returns the rows of this rank's experts, each times the matrix of its expert, and where each comes from."""
    results = _arriving(call, x, topk_ids, matrices.shape[2], x.dtype)
    operands = {"x": x, "topk_ids": topk_ids, "matrices": matrices}
    schedule = _half(call, x.shape[1], matrices.shape[2], x.dtype, native.schedule().FIRST_HALF)
    return _arrived(_launch(native.DISPATCH, call, operands, results, schedule))


def matmul_add_up(
    call: ExchangeCall,
    rows: jax.Array,
    matrices: jax.Array,
    weights: jax.Array | None,
    routes: Routes,
    rows_per_expert: jax.Array,
) -> jax.Array:
    """Returns for every token the sum of the products of its slots, times their weights where there are any."""
    operands = {
        "outputs": rows,
        "slot_rows": routes.slot_rows,
        "row_sources": routes.row_sources,
        "matrices": matrices,
        "known_rows_per_expert": rows_per_expert,
    }
    if weights is not None:
        operands["weights"] = _as_sums(weights, rows)
    results = {"y": _like(rows, (call.shape.tokens, matrices.shape[2]), rows.dtype)}
    schedule = _half(call, matrices.shape[2], rows.shape[1], rows.dtype, native.schedule().SECOND_HALF)
    return _launch(native.COMBINE, call, operands, results, schedule)["y"]


def pull(call: ExchangeCall, x: jax.Array, routes: Routes) -> jax.Array:
    """Returns rows of other tokens by the routes of an earlier dispatch."""
    results = {"rows": _like(x, (call.room.rows, x.shape[1]), x.dtype)}
    return _launch(native.DISPATCH, call, {"x": x, "row_sources": routes.row_sources}, results)["rows"]


def pull_weighted(
    call: ExchangeCall, dy: jax.Array, weights: jax.Array, outputs: jax.Array, routes: Routes
) -> tuple[jax.Array, jax.Array]:
    """Returns rows of `dy` times the weight of their slot, and of each slot the product of its row and `dy`."""
    operands = {"x": dy, "outputs": outputs, "row_sources": routes.row_sources, "weights": _as_sums(weights, dy)}
    results = {
        "rows": _like(dy, (call.room.rows, dy.shape[1]), dy.dtype),
        "weight_gradients": jax.typeof(operands["weights"]),
    }
    made = _launch(native.DISPATCH, call, operands, results)
    return made["rows"], made["weight_gradients"].astype(weights.dtype)


def add_up(call: ExchangeCall, outputs: jax.Array, weights: jax.Array | None, routes: Routes) -> jax.Array:
    """Returns for every token the sum of the rows of its slots, times their weights where there are any."""
    return _launch(native.COMBINE, call, *_added_up(call, outputs, weights, routes))["y"]


def start_add_up(
    call: ExchangeCall, outputs: jax.Array, weights: jax.Array | None, routes: Routes
) -> tuple[jax.Array, Kept]:
    """Starts to add up: the kernel runs beside what follows in the program."""
    made, kept = _start(native.COMBINE, call, *_added_up(call, outputs, weights, routes))
    return made["y"], kept


def finish(started: Any, kept: Kept) -> Any:
    """Returns what was started, once it is there.

    The arrays are those of the start itself, which compiled code checks. It keeps those that the kernel reads as well:
    XLA has no other reason not to give them away.
    """
    arrays, tree = jax.tree.flatten(started)
    aliases = {number: number for number in range(len(arrays))}
    call = jax.ffi.ffi_call(native.FINISH, tuple(map(jax.typeof, arrays)), input_output_aliases=aliases)
    # Else XLA makes two calls of one whose results are used and also stacked by a scan, and copies what both take.
    return jax.lax.optimization_barrier(jax.tree.unflatten(tree, call(*arrays, *kept)))


def check(call: ExchangeCall, caller: str) -> None:
    """Raises where compiled code cannot run a call.

    Raises:
      NotImplementedError: it does not exist for the platform, the build or the processes.
      TypeError: the dtype of x.
      ValueError: sizes.
    """
    shape, platform = call.shape, call.platform
    where = f"implementation='megakernel' on {platform}"
    check_platform(caller, "kernel to dispatch", native.DISPATCH, platform, shape.ranks)
    _check_rows(caller, "x", shape.dtype, shape.hidden, platform)
    limits = (
        (shape.ranks, MOST_RANKS[platform], "ranks"),
        (shape.num_experts, MOST_EXPERTS, "experts"),
        (shape.local_experts, MOST_LOCAL_EXPERTS, "experts per rank"),
        (shape.top_k, MOST_TOP_K, "slots per token"),
        (shape.slots, SLOTS_END - 1, "slots per rank"),
    )
    for number, most, what in limits:
        if number > most:
            raise ValueError(
                f"{caller}: {number} {what}; {where} takes at most {most}. Pass implementation='xla', which has no "
                "such limit."
            )
    if call.precision is not None and shape.hidden % ROWS.scale_columns:
        raise ValueError(
            f"{caller}: hidden={shape.hidden} and precision={call.precision!r}; {where} needs a multiple of "
            f"{ROWS.scale_columns}, the columns that share a scale. Pass implementation='xla', or no precision."
        )


def check_rows(call: ExchangeCall, caller: str, name: str, array: Any) -> None:
    """Raises where compiled code cannot take the rows of an array, by their dtype and width."""
    _check_rows(caller, name, jnp.dtype(array.dtype), array.shape[-1], call.platform)


def _check_rows(caller: str, name: str, dtype: Any, width: int, platform: str) -> None:
    where = f"implementation='megakernel' on {platform}"
    if dtype.name not in DTYPES[platform]:
        raise TypeError(
            f"{caller}: {name} is {dtype}; {where} takes {' and '.join(DTYPES[platform])}. Cast it, or pass "
            "implementation='xla' to dispatch."
        )
    if platform == "gpu" and width % GPU_MULTIPLE:
        raise ValueError(
            f"{caller}: {name} has rows of {width}; {where} needs a multiple of {GPU_MULTIPLE}: rows are copied in "
            "pieces of 16 bytes. Fill them up with zeros, or pass implementation='xla' to dispatch."
        )


def _launch(
    target: str,
    call: ExchangeCall,
    operands: dict[str, jax.Array],
    results: dict[str, Any],
    schedule: Any = None,
) -> dict[str, jax.Array]:
    schedule = schedule or native.schedule().exchange_schedule(call.platform)
    attributes = {
        "num_experts": np.int32(call.shape.num_experts),
        "top_k": np.int32(call.shape.top_k),
        "alignment": np.int32(call.room.alignment),
        "capacity_per_expert": np.int32(call.room.capacity_per_expert),
        "power_of_two_scales": np.int32(powers_of_two(call.precision)),
        "schedule": np.array(schedule.numbers, np.int32),
    }
    order = native.schedule().EXCHANGE_ARRAY_NAMES
    return launch(target, order, call.group, call.platform, attributes, operands, results)


def _start(
    target: str, call: ExchangeCall, operands: dict[str, jax.Array], results: dict[str, Any]
) -> tuple[dict[str, jax.Array], Kept]:
    # The start and the finish have to get the same arrays, not each a slice of its own of what a scan has stacked.
    operands = jax.lax.optimization_barrier(operands)
    schedule = native.schedule().exchange_schedule(call.platform, call.multiprocessors or 0)
    return _launch(target, call, operands, results, schedule), tuple(operands.values())


def _sent(call: ExchangeCall, x: jax.Array, topk_ids: jax.Array) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Operands and types of the results of a dispatch that sorts."""
    rounded = call.precision is not None
    results = _arriving(call, x, topk_ids, x.shape[1], jnp.float8_e4m3fn if rounded else x.dtype)
    if rounded:
        results["scales"] = _like(x, (call.room.rows, -(-x.shape[1] // ROWS.scale_columns)), jnp.float32)
    return {"x": x, "topk_ids": topk_ids}, results


def _added_up(
    call: ExchangeCall, outputs: jax.Array, weights: jax.Array | None, routes: Routes
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The same of a combine."""
    operands = {"outputs": outputs, "slot_rows": routes.slot_rows, "row_sources": routes.row_sources}
    if weights is not None:
        operands["weights"] = _as_sums(weights, outputs)
    return operands, {"y": _like(outputs, (call.shape.tokens, outputs.shape[1]), outputs.dtype)}


def _half(call: ExchangeCall, hidden: int, width: int, dtype: Any, half: int) -> Any:
    """The schedule of a product: that of a layer without up, by the default plan, without the other product.

    Args:
      call: what is dispatched.
      hidden: width of tokens, of x or of y.
      width: of the rows at the experts.
      dtype: of both.
      half: which one.
    """
    sizes = call.shape
    shape = Shape(
        sizes.tokens, hidden, width, sizes.num_experts, sizes.top_k, sizes.ranks, False, Formats.of(jnp.dtype(dtype))
    )
    plan = plan_defaults.kernel_plan(shape, call.platform)
    return native.schedule().half_of(schedule_of(shape, call.platform, plan), half)


def _arriving(call: ExchangeCall, x: jax.Array, topk_ids: jax.Array, width: int, dtype: Any) -> dict[str, Any]:
    """The types of what every dispatch makes that sorts."""
    rows, experts = call.room.rows, call.shape.local_experts
    return {
        "rows": _like(x, (rows, width), dtype),
        "made_row_sources": _like(x, (rows,), jnp.int32),
        "made_slot_rows": _like(x, topk_ids.shape, jnp.int32),
        "rows_per_expert": _like(x, (experts,), jnp.int32),
        "dropped_rows": _like(x, (experts,), jnp.int32),
    }


def _arrived(made: dict[str, jax.Array]) -> Arrived:
    routes = Routes(made["made_row_sources"], made["made_slot_rows"])
    return Arrived(made["rows"], made.get("scales"), made["rows_per_expert"], made["dropped_rows"], routes)


def _as_sums(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return weights.astype(at_least_float32(rows.dtype))


def _like(model: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of an array that varies over the mesh as another does."""
    return jax.typeof(vary_alike((model, jnp.zeros(shape, dtype)))[1])
