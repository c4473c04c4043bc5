"""What the benchmark can measure: the implementations of `moe_layer`, plans of the megakernel, and the baseline.

`layer.py` asks here for what to measure, for the program of each, and for what that moves, takes and drops.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench import backward_traffic, baselines, traffic
from jaxmoe.bench.inputs import AXIS, Inputs
from jaxmoe.bench.options import BASELINE, Sweep
from jaxmoe.bench.passes import BACKWARD_ALONE, Pass
from jaxmoe.implementations.megakernel.plan_defaults import backward_plan
from jaxmoe.implementations.megakernel.schedule import roomy_row_tiles, tile_sizes, weight_slots
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.options import Accumulation, Arguments, Precision
from jaxmoe.plan import KernelPlan


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What one line measures.

    Args:
      implementation: of `moe_layer`, or the baseline.
      plan: of the megakernel, which alone is swept; in backward passes with the plan of that pass.
      is_default: whether that is its default plan.
      has_default_bits: whether its results are those of the default plan, bit for bit: what `KernelPlan` says of its
        fields.
      pass_name: what is timed.
      residuals: of `moe_layer`; `None` for its default. Of `"both"` alone, the one that has a forward pass to keep
        something of.
      precision: of `moe_layer`; `None` for its default.
      accumulation: of `moe_layer`.
      network: of `moe_layer`; `None` for its default, which on one host is one level.
      fused: how gate and up lie in one array; `None` for two.
    """

    implementation: str
    plan: KernelPlan | None = None
    is_default: bool = True
    has_default_bits: bool = True
    pass_name: Pass = "forward"
    residuals: str | None = None
    precision: Precision | None = None
    accumulation: Accumulation = "promoted"
    network: NetworkPlan | None = None
    fused: str | None = None

    @property
    def plan_fields(self) -> dict[str, Any] | None:
        """The numbers of the plan of its pass by name; `"both"` has those of the backward pass as `"backward"`."""
        if self.network is not None:
            return {"network": {name: getattr(self.network, name) for name in NETWORK_FIELDS}}
        if self.fused is not None:
            return {"fused": self.fused}
        if self.plan is None:
            return None
        if self.pass_name in BACKWARD_ALONE:
            assert self.plan.backward is not None
            return _numbers(self.plan.backward)
        if self.pass_name == "forward" or self.plan.backward is None:
            return _numbers(self.plan)
        return _numbers(self.plan) | {
            "backward": _numbers(self.plan.backward),
            "residuals": self.residuals or "recompute",
        }


# What of a plan between hosts a line names.
NETWORK_FIELDS = ("ranks_per_host", "way", "chunks", "round_tokens")
# What the arena of a backward pass has for gradients of experts alone.
OF_TRAINED = ("arena: weight_sums", "arena: h")


def _numbers(plan: KernelPlan) -> dict[str, Any]:
    fields = dataclasses.asdict(plan)
    del fields["reasons"], fields["backward"]
    return fields


def candidates(
    implementation: str,
    inputs: Inputs,
    mesh: Mesh,
    sweep: Sweep,
    pass_name: Pass = "forward",
    residuals: str | None = None,
    networks: Sequence[NetworkPlan] = (),
    fused: Sequence[str] = (),
) -> list[Candidate]:
    """Returns what to measure of an implementation, its default plan first, plans between hosts last.

    Raises:
      ValueError: it cannot run these inputs.
      TypeError: so.
      NotImplementedError: so.
    """
    residuals = residuals if pass_name == "both" else None
    alone = [
        Candidate(
            implementation,
            pass_name=pass_name,
            residuals=residuals,
            precision=inputs.precision,
            accumulation=inputs.accumulation,
        )
    ]
    if implementation == BASELINE:
        if inputs.precision is not None:
            raise NotImplementedError(f"{BASELINE} has no experts in 8 bits. Measure it with --dtype=bf16.")
        return alone
    others = [_with_network(alone[0], network, inputs, mesh) for network in networks]
    with_fused = lambda candidate: [  # noqa: E731
        dataclasses.replace(candidate, fused=layout, is_default=False, has_default_bits=False) for layout in fused
    ]
    plan = explain(alone[0], inputs, mesh).call.plan
    if not isinstance(plan, KernelPlan):
        return alone + with_fused(alone[0]) + others
    if pass_name == "forward":
        default, with_plan = plan, lambda swept: swept
    else:
        default = backward_plan(plan, inputs.shape.decoded, _platform(mesh))
        with_plan = lambda swept: dataclasses.replace(plan, backward=swept)  # noqa: E731
    swept_plans = [
        Candidate(
            implementation,
            with_plan(swept),
            is_default=i == 0,
            has_default_bits=_has_bits_of(swept, default),
            pass_name=pass_name,
            residuals=residuals,
            precision=inputs.precision,
            accumulation=inputs.accumulation,
        )
        for i, swept in enumerate([default] if pass_name == "both" else sweep.plans(default))
    ]
    return swept_plans + with_fused(swept_plans[0]) + others


def _with_network(candidate: Candidate, network: NetworkPlan, inputs: Inputs, mesh: Mesh) -> Candidate:
    """Returns the candidate with a plan between hosts, with what that leaves open chosen."""
    candidate = dataclasses.replace(candidate, network=network, is_default=False, has_default_bits=False)
    levels = explain(candidate, inputs, mesh).call.levels
    if levels is None:
        ranks = inputs.shape.ranks
        raise ValueError(f"--ranks-per-host={network.ranks_per_host}: {ranks} ranks are one host. Take fewer.")
    return dataclasses.replace(candidate, network=levels.plan)


def _has_bits_of(swept: KernelPlan, default: KernelPlan) -> bool:
    """Whether two plans of a pass give the same bits."""
    return (
        swept.segment_tiles == default.segment_tiles
        and bool(swept.weight_slots) == bool(default.weight_slots)
        and swept.sum_at_experts == default.sum_at_experts
    )


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def explain(candidate: Candidate, inputs: Inputs, mesh: Mesh) -> jaxmoe.Explanation:
    """Returns `jaxmoe.explain` of the call. Raises as it does where the candidate cannot run these inputs."""
    return jaxmoe.explain(
        *inputs.sets[0][:3],
        inputs.experts,
        mesh=mesh,
        implementation=candidate.implementation,  # pyright: ignore[reportArgumentType]
        plan=candidate.plan,
        precision=candidate.precision,
        accumulation=candidate.accumulation,
        network=candidate.network,
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
        residuals=candidate.residuals,  # pyright: ignore[reportArgumentType]
        precision=candidate.precision,
        accumulation=candidate.accumulation,
        network=candidate.network,
    )
    prepare = lambda experts: experts if candidate.fused is None else _fused(mesh, candidate.fused)(experts)  # noqa: E731
    return lambda arguments: layer(*arguments[:4]), prepare


@functools.lru_cache(maxsize=2)
def _fused(mesh: Mesh, layout: Any) -> Callable[[jaxmoe.Experts], jaxmoe.FusedExperts]:
    return jax.jit(lambda experts: experts.fuse(layout), out_shardings=NamedSharding(mesh, P(AXIS)))


def _baseline(mesh: Mesh) -> tuple[Callable[[Arguments], jax.Array], Callable[[jaxmoe.Experts], Any]]:
    grouped_dot = jax.lax.ragged_dot
    if _platform(mesh) == "gpu":
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


def moved(candidate: Candidate, inputs: Inputs, mesh: Mesh) -> traffic.Traffic | None:
    """Returns what a call moves, `None` where that is for the compiler to say.

    So it is of the reference, which applies every expert to every token, of all gradients but the megakernel's, and of
    what XLA's collectives move between hosts.
    """
    if candidate.network is not None:
        return None
    if candidate.plan is None:
        if candidate.implementation == "reference" or candidate.pass_name != "forward":
            return None
        return traffic.of_gathering(inputs.routings, inputs.shape)
    plan, backward = candidate.plan, candidate.plan.backward
    if candidate.pass_name == "forward":
        ahead = weight_slots(inputs.shape, _platform(mesh), plan) > 0
        return traffic.of_megakernel(inputs.routings, inputs.shape, plan.keep_tokens, ahead, plan.sum_at_experts)
    assert backward is not None
    tile = tile_sizes(inputs.shape, _platform(mesh))
    if candidate.pass_name in BACKWARD_ALONE:
        frozen = candidate.pass_name == "frozen"
        return backward_traffic.of_backward(inputs.routings, inputs.shape, backward, tile, frozen)
    kept_tiles = roomy_row_tiles(inputs.shape, _platform(mesh)) if candidate.residuals == "save" else 0
    return backward_traffic.of_both(inputs.routings, inputs.shape, plan, backward, tile, kept_tiles)


def arena_bytes(candidate: Candidate, inputs: Inputs, mesh: Mesh) -> int | None:
    """Returns the bytes per rank of the megakernel's arena; `None` for other implementations, which have none.

    Both passes use the same memory, one after the other: of both it is that of the larger one.
    """
    if candidate.plan is None and (candidate.network is None or candidate.implementation != "megakernel"):
        return None
    told = explain(candidate, inputs, mesh)
    forward, backward = _arena(told.memory_bytes), _arena(told.backward_memory_bytes)
    sizes = {"forward": forward, "backward": backward, "both": max(forward, backward)}
    # Experts that came in fewer bits are always frozen, and have none of these.
    trained = sum(told.backward_memory_bytes.get(name, 0) for name in OF_TRAINED)
    return (sizes | {"frozen": backward - trained})[candidate.pass_name]


def _arena(memory_bytes: Mapping[str, int]) -> int:
    return sum(size for name, size in memory_bytes.items() if name.startswith("arena: "))


def dropped_rows(implementation: str, inputs: Inputs) -> int:
    """Returns the rows beyond the baseline's capacity, over all sets of inputs.

    `moe_layer` drops none, and its check, with the tokens that would be the first to go, would see it.
    """
    if implementation != BASELINE:
        return 0
    capacity = baselines.capacity_rows(inputs.shape.tokens, inputs.shape.top_k, inputs.shape.ranks)
    rows = np.array([routing.by_owner.sum(0) for routing in inputs.routings])
    return int(np.maximum(rows - capacity, 0).sum())
