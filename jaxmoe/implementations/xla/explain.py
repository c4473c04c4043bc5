"""What a call of the portable implementation costs."""

from jaxmoe.e2m1 import ELEMENT
from jaxmoe.implementations.base import Call
from jaxmoe.implementations.explanation import Explanation, precision_reasons, residual_bytes, split_reasons
from jaxmoe.implementations.xla.plan import Plan


def explain(call: Call) -> Explanation:
    """Returns the bytes of the temporary arrays and those that ranks send each other."""
    shape, plan = call.shape, call.plan
    token_bytes, answer_bytes = shape.tokens * shape.token_bytes, shape.tokens * shape.answer_bytes
    return Explanation(
        call=call,
        reasons=(call.implementation_reason, *precision_reasons(call), *plan.reasons, *split_reasons(call)),
        memory_bytes=_memory(call, plan),
        residual_bytes=residual_bytes(call, plan.batch_rows),
        worst_case_bytes=sum(_memory(call, Plan(max(shape.all_slots, 1))).values()),
        # Tokens in, sums of tokens out, and 8 bytes of id and weight for each slot.
        wire_bytes=(shape.ranks - 1) * (token_bytes + answer_bytes + 8 * shape.tokens * shape.top_k),
        flops=shape.flops,
    )


def _memory(call: Call, plan: Plan) -> dict[str, int]:
    """Bytes of the temporary arrays of `layer.py`, each counted once although the compiler lets some share memory."""
    shape, wide, batch_rows = call.shape, call.shape.wide, plan.batch_rows
    all_tokens, answer_bytes = shape.ranks * shape.tokens, shape.answer_bytes
    # What goes into the grouped GEMMs has the dtype of x.
    four_bits = shape.formats.weights.dtype == ELEMENT
    decoded = 0 if call.precision is None else shape.local_experts * wide.expert_bytes
    name, decoded = (
        (f"a matrix of one expert decoded to {call.dtype}", wide.matrix_bytes)
        if four_bits
        else (f"experts decoded to {call.dtype}", decoded)
    )
    quantized = shape.local_experts * shape.expert_bytes if call.quantizes else 0
    # XLA:CPU multiplies a copy of the rows for every local expert, zero but for the expert's own.
    copies = shape.local_experts if plan.grouped_gemm == "ragged_dot" and not four_bits else 0
    return {
        "tokens of all ranks": all_tokens * shape.token_bytes if shape.ranks > 1 else 0,
        "rows of one batch: tokens and outputs": 2 * batch_rows * wide.token_bytes,
        "rows of one batch: gate, up and h": (shape.projections + 1) * batch_rows * wide.h_bytes,
        "masked copies of the rows, in jax.lax.ragged_dot": copies * batch_rows * max(wide.token_bytes, wide.h_bytes),
        "sums of all tokens, sent and received": (2 if shape.ranks > 1 else 1) * all_tokens * answer_bytes,
        **({} if call.precision is None else {name: decoded}),
        **({"experts rounded to 8 bits": quantized} if quantized else {}),
        "routing of all ranks, sorted": 5 * 4 * shape.all_slots,
    }
