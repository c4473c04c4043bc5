"""The weights of a checkpoint as the arrays of a layer, for `jaxmoe.nnx.MoE.from_weights`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmoe.convert import checks
from jaxmoe.convert.weights import MoEWeights
from jaxmoe.experts import split
from jaxmoe.flax.config import EXPERT_ARRAYS, Parameter
from jaxmoe.quantization import dequantize
from jaxmoe.quantized_matrix import QuantizedMatrix
from jaxmoe.wording import a_type


def arguments_of(weights: Any) -> dict[str, Any]:
    """Returns the arguments of a layer that its weights say.

    Raises:
      TypeError: other weights.
      ValueError: experts that do not go together, or a shared gate alone.
      NotImplementedError: weights of what the layer does not have.
    """
    if not isinstance(weights, MoEWeights):
        raise TypeError(
            f"MoE.from_weights: weights is {a_type(weights)}; pass what jaxmoe.convert.from_hf returned, or "
            "jaxmoe.convert.MoEWeights(experts, router_kernel)."
        )
    if weights.token_table is not None:
        raise NotImplementedError(
            "MoE.from_weights: weights.token_table chooses experts by the ids of tokens, and the layer sees none. Call "
            "jaxmoe.route(logits, router, topk_ids=weights.token_table[tokens]) and jaxmoe.moe_layer."
        )
    if weights.shared_gate is not None and weights.shared is None:
        raise ValueError(
            "MoE.from_weights: weights.shared_gate multiplies what the shared expert answers, and weights.shared is "
            "None. Pass both, or none of them."
        )
    experts, shared = checks.routed("MoE.from_weights", weights), checks.shared("MoE.from_weights", weights)
    return {
        "hidden": experts.hidden,
        "intermediate": experts.intermediate,
        "num_experts": experts.num_experts,
        "gated": experts.w_up is not None,
        "biases": experts.b_down is not None,
        "router_bias": weights.router_bias is not None,
        "selection_bias": weights.selection_bias is not None,
        "shared_intermediate": None if shared is None else shared.intermediate,
        "shared_gate": weights.shared_gate is not None,
    }


def arrays_of(weights: MoEWeights, table: Mapping[str, Parameter], dtype: DTypeLike | None) -> dict[str, Any]:
    """Returns the arrays of a layer by name, those of the routed experts as they are, quantised or not;
    gate and up come apart.

    Args:
      weights: of the layer.
      table: the `parameters` of a layer with their `arguments_of`.
      dtype: of a shared expert that is quantised, and decoded here: it is one beside all others. `None` is bfloat16.

    Raises:
      ValueError: arrays are missing, too many or misshapen.
    """
    arrays: dict[str, Any] = {
        "router_kernel": weights.router_kernel,
        "router_bias": weights.router_bias,
        "shared_gate_kernel": weights.shared_gate,
    }
    experts = split(weights.experts)
    arrays |= {name: getattr(experts, name) for name in EXPERT_ARRAYS}
    if (shared := checks.shared("MoE.from_weights", weights)) is not None:
        if isinstance(shared.w_gate, QuantizedMatrix):
            shared = dequantize(shared, jnp.bfloat16 if dtype is None else dtype)
        alone = jax.tree.map(lambda array: array[0], shared)
        arrays |= {f"shared_{name}": getattr(alone, name) for name in EXPERT_ARRAYS}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if other := arrays.keys() ^ table.keys():
        raise ValueError(
            f"MoE.from_weights: {', '.join(sorted(other))} cannot be there, or missing, beside the other weights. All "
            "experts, the shared one included, have an up projection or none has, and biases on all projections or on "
            "none."
        )
    needed = {name: parameter.shape for name, parameter in table.items()}
    bias = {} if weights.selection_bias is None else {"selection_bias": weights.selection_bias}
    needed |= dict.fromkeys(bias, (experts.num_experts,))
    for name, array in (arrays | bias).items():
        if np.shape(array) != needed[name]:
            raise ValueError(
                f"MoE.from_weights: {name} has shape {np.shape(array)}; it must be {needed[name]} to go with w_gate of "
                f"shape {tuple(arrays['w_gate'].shape)}."
            )
    return {name: arrays[name] for name in table}
