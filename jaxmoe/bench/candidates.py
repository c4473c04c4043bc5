"""What the benchmark can measure: the implementations of `moe_layer`, plans of the megakernel, and the baseline.

`layer.py` asks here for what to measure, for the program of each, and for what that moves and drops.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.api import Arguments
from jaxmoe.bench import baselines, traffic
from jaxmoe.bench.inputs import AXIS, Inputs
from jaxmoe.bench.options import BASELINE, Sweep
from jaxmoe.plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What one line measures.

    Args:
      implementation: of `moe_layer`, or the baseline.
      plan: of the megakernel, which alone is swept.
      is_default: whether that is its default plan.
    """

    implementation: str
    plan: KernelPlan | None = None
    is_default: bool = True

    @property
    def plan_fields(self) -> dict[str, int] | None:
        """The numbers of the plan by name."""
        if self.plan is None:
            return None
        fields = dataclasses.asdict(self.plan)
        del fields["reasons"]
        return fields


def candidates(implementation: str, inputs: Inputs, mesh: Mesh, sweep: Sweep) -> list[Candidate]:
    """Returns what to measure of an implementation, its default plan first.

    Raises:
      ValueError: it cannot run these inputs.
      TypeError: so.
      NotImplementedError: so.
    """
    if implementation == BASELINE:
        return [Candidate(implementation)]
    plan = explain(Candidate(implementation), inputs, mesh).call.plan
    if not isinstance(plan, KernelPlan):
        return [Candidate(implementation)]
    return [Candidate(implementation, each, is_default=i == 0) for i, each in enumerate(sweep.plans(plan))]


def explain(candidate: Candidate, inputs: Inputs, mesh: Mesh) -> jaxmoe.Explanation:
    """Returns `jaxmoe.explain` of the call. Raises as it does where the candidate cannot run these inputs."""
    return jaxmoe.explain(
        *inputs.sets[0][:3],
        inputs.experts,
        mesh=mesh,
        implementation=candidate.implementation,  # pyright: ignore[reportArgumentType]
        plan=candidate.plan,
    )


def program(
    candidate: Candidate, mesh: Mesh
) -> tuple[Callable[[Arguments], jax.Array], Callable[[jaxmoe.Experts], Any]]:
    """Returns the layer as a function of a call's arrays, and a function that makes the weights it wants in them."""
    if candidate.implementation == BASELINE:
        return _baseline(mesh)
    layer = functools.partial(
        jaxmoe.moe_layer,
        mesh=mesh,
        implementation=candidate.implementation,  # pyright: ignore[reportArgumentType]
        plan=candidate.plan,
    )
    return lambda arguments: layer(*arguments[:4]), lambda experts: experts


def _baseline(mesh: Mesh) -> tuple[Callable[[Arguments], jax.Array], Callable[[jaxmoe.Experts], Any]]:
    grouped_dot = jax.lax.ragged_dot
    if mesh.devices.flat[0].platform == "gpu":
        grouped_dot = functools.partial(importlib.import_module("tokamax").ragged_dot, implementation="mosaic")

    def in_dtype(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return grouped_dot(rows, weights, sizes, preferred_element_type=weights.dtype)

    baseline = functools.partial(baselines.all_gather_with_capacity, grouped_dot=in_dtype, axis_name=AXIS)
    sharded = jax.shard_map(baseline, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    fuse = jax.jit(lambda experts: (jnp.concatenate([experts.w_gate, experts.w_up], axis=-1), experts.w_down))

    def function(arguments: Any) -> jax.Array:
        x, topk_ids, topk_weights, (w_gate_up, w_down), _ = arguments
        return sharded(x, topk_ids, topk_weights, w_gate_up, w_down)

    return function, fuse


def moved(candidate: Candidate, inputs: Inputs) -> traffic.Traffic | None:
    """Returns what a forward pass moves; `None` for the reference, which applies every expert to every token."""
    if candidate.implementation == "reference":
        return None
    if candidate.plan is not None:
        return traffic.of_megakernel(inputs.routings, inputs.shape, candidate.plan.keep_tokens)
    return traffic.of_gathering(inputs.routings, inputs.shape)


def dropped_rows(implementation: str, inputs: Inputs) -> int:
    """Returns the rows beyond the baseline's capacity, over all sets of inputs.

    `moe_layer` drops none, and its check, with the tokens that would be the first to go, would see it.
    """
    if implementation != BASELINE:
        return 0
    capacity = baselines.capacity_rows(inputs.shape.tokens, inputs.shape.top_k, inputs.shape.ranks)
    rows = np.array([routing.by_owner.sum(0) for routing in inputs.routings])
    return int(np.maximum(rows - capacity, 0).sum())
