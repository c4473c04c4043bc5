"""`explain`: what `moe_layer` would do with the same arguments, why, and what it costs. Runs nothing."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxmoe import call as calls
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.implementations.explanation import Explanation
from jaxmoe.network import explain as across_hosts
from jaxmoe.network.choice import call_on_host
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import Accumulation, Arguments, CallOptions, ImplementationName, Precision, Residuals

__all__ = ["Explanation", "explain"]


def explain(
    x: Any,
    topk_ids: Any,
    topk_weights: Any = None,
    experts: Any = None,
    *,
    activation: Any = "silu",
    axis_name: str | Sequence[str] | None = "expert",
    data_axes: str | Sequence[str] | PartitionSpec | None = None,
    hidden_axis: str | Sequence[str] | None = None,
    intermediate_axis: str | Sequence[str] | None = None,
    token_valid: Any = None,
    mesh: Any = None,
    implementation: ImplementationName | None = None,
    plan: Any = None,
    residuals: Residuals | None = None,
    precision: Precision | None = None,
    accumulation: Accumulation = "promoted",
    network: NetworkPlan | None = None,
    return_stats: bool = False,
) -> Explanation:
    """Says what `moe_layer` does with these arguments: the implementation and plan it takes, why, and the bytes.

    Args:
      x: as for `moe_layer`, or a `jax.ShapeDtypeStruct`; so are the other arrays.
      topk_ids: as for `moe_layer`.
      topk_weights: as for `moe_layer`.
      experts: as for `moe_layer`.
      activation: as for `moe_layer`.
      axis_name: as for `moe_layer`.
      data_axes: as for `moe_layer`.
      hidden_axis: as for `moe_layer`.
      intermediate_axis: as for `moe_layer`.
      token_valid: as for `moe_layer`.
      mesh: as for `moe_layer`.
      implementation: as for `moe_layer`.
      plan: as for `moe_layer`.
      residuals: as for `moe_layer`.
      precision: as for `moe_layer`.
      accumulation: as for `moe_layer`.
      network: as for `moe_layer`.
      return_stats: as for `moe_layer`; it changes nothing of what is said.

    Raises:
      ValueError: as `moe_layer` would.
      TypeError: as `moe_layer` would.
      NotImplementedError: as `moe_layer` would.

    >>> import jax, jax.numpy as jnp, jaxmoe
    >>> experts = jax.eval_shape(lambda: jaxmoe.Experts.init(jax.random.key(0), 8, 4096, 14336, dtype=jnp.bfloat16))
    >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    >>> slots = jax.ShapeDtypeStruct((8192, 2), jnp.int32), jax.ShapeDtypeStruct((8192, 2), jnp.float32)
    >>> jaxmoe.explain(x, *slots, experts, axis_name=None).implementation
    'xla'
    >>> in_8_bits = jax.eval_shape(jaxmoe.quantize, experts)
    >>> jaxmoe.explain(x, *slots, in_8_bits, axis_name=None).call.precision
    'fp8'
    """
    arguments, routed_experts = Arguments.given(x, topk_ids, topk_weights, experts, token_valid)
    options = CallOptions(
        activation,
        axis_name,
        data_axes,
        mesh,
        implementation,
        plan,
        residuals,
        precision,
        accumulation,
        network,
        hidden_axis,
        intermediate_axis,
    )
    call = calls.check(arguments, options, routed_experts)
    of_launch = IMPLEMENTATIONS[call.implementation].explain(call_on_host(call))
    return across_hosts.explain(call, of_launch)
