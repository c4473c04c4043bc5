"""What `implementation="megakernel"` cannot do, said before anything runs.

The numbers are those of the compiled part: ffi/common/layout.h packs a rank and a slot into one word, and a GPU keeps
counts of experts in shared memory.
"""

import jax
import jax.numpy as jnp

from jaxmoe import machine, native
from jaxmoe.activation import ACTIVATIONS, Activation, compiled_form
from jaxmoe.formats import bits
from jaxmoe.implementations.base import Call, Shape
from jaxmoe.implementations.megakernel.plan import KernelPlan
from jaxmoe.implementations.megakernel.schedule import (
    MOST_LOCAL_EXPERTS,
    decodes_ahead,
    decodes_in_registers,
    most_experts_ahead,
    most_row_tiles,
    not_compiled,
    roomy_row_tiles,
    tile_sizes,
)
from jaxmoe.native import FORWARD
from jaxmoe.precision import rounds_rows

# Ranks of one group: on a GPU those of one host, on a CPU what a byte numbers.
MOST_RANKS = {"cpu": 256, "gpu": 8}
MOST_EXPERTS, MOST_TOP_K = 4096, 32
# Slots of a rank are numbered by 24 bits.
SLOTS_END = 2**24
# A row must be whole pieces of 16 bytes, which is what a bulk copy moves.
GPU_MULTIPLE = 8
# Of what a warp adds up in one go, a lane for each: sums of the ranks and answers of a token's slots.
MOST_SUMMED = 32
# Experts in 8 bits: a scale for 128 columns of a row, which is a tile of the GEMMs.
MULTIPLE_IN_8_BITS = 128
MULTIPLE_TO_DECODE = 16
DTYPES = {"cpu": ("bfloat16", "float16", "float32", "float64"), "gpu": ("bfloat16", "float16")}

_ANY_SIZE = "Or pass implementation='xla', which has no such limit."


def check(call: Call) -> None:
    """Raises where the megakernel cannot run a call."""
    dtype = call.shape.formats.answers.dtype
    four_bit_beside_rounded = bits(call.shape.formats.weights.dtype) == 4 and rounds_rows(call.precision)
    if call.platform != "cpu" and four_bit_beside_rounded and dtype.name != "bfloat16":
        raise NotImplementedError(
            f"moe_layer: x is {dtype}; beside experts in 4 bits and precision={call.precision!r}, which rounds tokens, "
            "implementation='megakernel' on GPUs takes bfloat16. Cast x, pass precision='w4a16', or "
            "implementation='xla'."
        )
    sums = isinstance(call.plan, KernelPlan) and call.plan.sum_at_experts and call.shape.ranks > 1
    if call.platform != "cpu" and sums and rounds_rows(call.precision) and call.accumulation == "fast":
        raise ValueError(
            "moe_layer: plan has sum_at_experts=True and accumulation='fast'; on GPUs that takes 'promoted'. Leave one "
            "of them out."
        )
    check_megakernel(call.shape, call.platform, call.activation, call.plan)


def check_megakernel(shape: Shape, platform: str, activation: Activation, plan: KernelPlan) -> None:
    """Raises where the megakernel cannot run a call.

    Raises:
      NotImplementedError: it does not exist for the platform, its build, the processes or the activation.
      TypeError: formats.
      ValueError: sizes, or a plan that would wait for ever.
    """
    check_platform("moe_layer", "forward kernel", FORWARD, platform, shape.ranks)
    dtype = shape.formats.answers.dtype
    if dtype.name not in DTYPES[platform]:
        raise TypeError(
            f"moe_layer: x is {dtype}; implementation='megakernel' on {platform} takes "
            f"{' and '.join(DTYPES[platform])}. Cast x and experts, or pass implementation='xla'."
        )
    if compiled_form(activation) is None:
        raise NotImplementedError(
            f"moe_layer: activation={activation!r} exists in Python only; implementation='megakernel' has "
            f"{', '.join(map(repr, ACTIVATIONS))} and jaxmoe.SwiGLU. Use one of those, pass implementation='xla', or "
            "None to choose."
        )
    _check_sizes(shape, platform)
    _check_precision(shape, platform)
    if plan.segment_tiles:
        raise ValueError(
            f"moe_layer: plan has segment_tiles={plan.segment_tiles}: it is one for a backward pass. Pass it as "
            "jaxmoe.KernelPlan(..., backward=plan)."
        )
    for name, each in (("plan", plan), ("plan.backward", plan.backward)):
        if each is not None:
            _check_ring(name, each, shape, platform)
            _check_weight_slots(name, each, shape, platform)
    if plan.sum_at_experts and shape.ranks > 1:
        _check_sum_at_experts(plan, shape, platform)


def _check_sum_at_experts(plan: KernelPlan, shape: Shape, platform: str) -> None:
    waiting = roomy_row_tiles(shape, platform) * tile_sizes(shape, platform).rows
    if shape.tokens * shape.top_k + waiting >= SLOTS_END:
        raise ValueError(
            f"moe_layer: plan has sum_at_experts=True: {shape.tokens} tokens per rank x {shape.top_k} slots and "
            f"{waiting} rows to add up; implementation='megakernel' numbers fewer than {SLOTS_END} of both. Leave it "
            "out."
        )
    if platform == "cpu":
        return
    if shape.ranks + shape.top_k > MOST_SUMMED:
        raise ValueError(
            f"moe_layer: plan has sum_at_experts=True: {shape.ranks} ranks and top_k={shape.top_k}; a GPU takes "
            f"{MOST_SUMMED} of both together. Leave it out."
        )
    dtype, scaled = shape.formats.answers.dtype, bool(shape.formats.tokens.scale_rows)
    if shape.formats.decodes or (scaled and dtype != jnp.bfloat16):
        raise ValueError(
            f"moe_layer: plan has sum_at_experts=True beside weights in {bits(shape.formats.weights.dtype)} bits, "
            f"tokens in {8 if scaled else 16} and x in {dtype}: a GPU has such kernels for tokens and weights of 16 "
            "bits, and of 8 where x is bfloat16. Leave it out."
        )


def _check_weight_slots(name: str, plan: KernelPlan, shape: Shape, platform: str) -> None:
    beside_8_bits = not plan.segment_tiles and shape.formats.decodes and shape.formats.tokens.scale_rows
    if beside_8_bits and not decodes_ahead(shape, platform):
        most, through = most_experts_ahead(shape, platform), shape.formats.weights.through_e4m3
        if plan.weight_slots and not through:
            raise ValueError(
                f"moe_layer: {name} has weight_slots={plan.weight_slots}: beside tokens in 8 bits, weights in 4 bits "
                "are decoded where they are multiplied. Leave weight_slots at 0, or pass "
                "jaxmoe.through_e4m3(experts)."
            )
        if plan.weight_slots or not decodes_in_registers(shape, platform):
            raise ValueError(
                f"moe_layer: {shape.local_experts} experts per rank in 4 bits beside tokens in 8: implementation="
                f"'megakernel' on {platform} decodes those of at most {most} ahead. Spread them over more ranks, pass "
                f"precision='w4a16', or leave weight_slots at 0 for MXFP4. {_ANY_SIZE}"
            )
    if not plan.weight_slots or plan.weight_slots >= min(plan.fewest_weight_slots, shape.local_experts):
        return
    lags = "2 * lag_units" if plan.segment_tiles else "lag_units"
    raise ValueError(
        f"moe_layer: {name} has weight_slots={plan.weight_slots}, with which the kernel would wait for ever. With "
        f"lag_units={plan.lag_units} it needs {lags} + 1 = {plan.fewest_weight_slots}, or {shape.local_experts}, all "
        "experts of a rank. Raise weight_slots, leave it at 0 for the fewest, or lower lag_units."
    )


def _check_ring(name: str, plan: KernelPlan, shape: Shape, platform: str) -> None:
    most = most_row_tiles(shape, platform)
    if plan.ring_tiles >= min(plan.fewest_ring_tiles, most):
        return
    needed = "segment_tiles + 2 * lag_units * unit_tiles" if plan.segment_tiles else "(lag_units + 1) * unit_tiles"
    segments = f", segment_tiles={plan.segment_tiles}" if plan.segment_tiles else ""
    raise ValueError(
        f"moe_layer: {name} has ring_tiles={plan.ring_tiles}, with which the kernel would wait for ever. With "
        f"lag_units={plan.lag_units} and unit_tiles={plan.unit_tiles}{segments} it needs {needed} = "
        f"{plan.fewest_ring_tiles}, or {most}, all row tiles that a rank can have. Raise ring_tiles, or lower the "
        "others."
    )


def _check_precision(shape: Shape, platform: str) -> None:
    if not shape.formats.weights.scale_rows:
        return
    weights, width = shape.formats.weights, bits(shape.formats.weights.dtype)
    multiple, reason = MULTIPLE_TO_DECODE, "weights are decoded in pieces of 16 bytes"
    if shape.formats.tokens.scale_rows:
        multiple, reason = MULTIPLE_IN_8_BITS, "that many columns of a row share a scale"
    elif width == 4:
        multiple, reason = weights.scale_columns, "that many weights share a scale"
    if shape.hidden % multiple or shape.intermediate % multiple:
        raise ValueError(
            f"moe_layer: hidden={shape.hidden} and intermediate={shape.intermediate}; implementation='megakernel' on "
            f"{platform} needs multiples of {multiple} in {width} bits: {reason}. {_ANY_SIZE}"
        )


def check_platform(caller: str, kernel: str, target: str, platform: str, ranks: int) -> None:
    """Raises where a kernel, an FFI target, does not exist for a platform, its build, or so many processes."""
    if platform not in DTYPES:
        raise NotImplementedError(
            f"{caller}: implementation='megakernel' runs on cpu and gpu; this call is for {platform!r}. "
            "Pass implementation='xla'."
        )
    try:
        registered = native.targets(platform)
    except ModuleNotFoundError as error:
        raise not_compiled(error) from error
    if platform == "gpu" and not (status := machine.cuda_status()).available:
        raise NotImplementedError(
            f"{caller}: implementation='megakernel' cannot run on this GPU. {status.reason} "
            "Or pass implementation='xla'."
        )
    if target not in registered:
        raise NotImplementedError(
            f"{caller}: implementation='megakernel' has no {kernel} for platform {platform!r} in this build of jaxmoe "
            "yet. Pass implementation='xla'."
        )
    if platform == "cpu" and ranks > 1 and jax.process_count() > 1:
        raise NotImplementedError(
            f"{caller}: {jax.process_count()} processes and experts over {ranks} ranks; on CPUs "
            "implementation='megakernel' reaches other ranks in its own process only. Run one with virtual devices "
            "(jaxmoe.testing.use_virtual_devices), or pass implementation='xla'."
        )


def _check_sizes(shape: Shape, platform: str) -> None:
    where = f"implementation='megakernel' on {platform}"
    if shape.ranks > MOST_RANKS[platform]:
        raise ValueError(
            f"moe_layer: the experts are spread over {shape.ranks} ranks; {where} takes at most "
            f"{MOST_RANKS[platform]} on a host. If they are on several, say so: "
            "network=jaxmoe.NetworkPlan(ranks_per_host=...). Else spread them over fewer, and use the other mesh axes "
            f"as data_axes. {_ANY_SIZE}"
        )
    if shape.num_experts > MOST_EXPERTS or shape.local_experts > MOST_LOCAL_EXPERTS:
        raise ValueError(
            f"moe_layer: num_experts={shape.num_experts} over {shape.ranks} ranks, {shape.local_experts} per rank; "
            f"{where} takes at most {MOST_EXPERTS}, and {MOST_LOCAL_EXPERTS} per rank. Spread them over more ranks. "
            f"{_ANY_SIZE}"
        )
    if shape.top_k > MOST_TOP_K:
        raise ValueError(
            f"moe_layer: topk_ids has top_k={shape.top_k} slots per token; {where} takes at most {MOST_TOP_K}. "
            f"{_ANY_SIZE}"
        )
    if shape.tokens * shape.top_k >= SLOTS_END:
        raise ValueError(
            f"moe_layer: {shape.tokens} tokens per rank x {shape.top_k} slots; {where} takes fewer than {SLOTS_END} "
            f"slots per rank. Split the tokens into several calls, or over more ranks. {_ANY_SIZE}"
        )
    if platform == "gpu" and (shape.hidden % GPU_MULTIPLE or shape.intermediate % GPU_MULTIPLE):
        raise ValueError(
            f"moe_layer: hidden={shape.hidden} and intermediate={shape.intermediate}; {where} needs multiples of "
            f"{GPU_MULTIPLE}: rows are copied in pieces of 16 bytes. Pad the weights with zeros. {_ANY_SIZE}"
        )
