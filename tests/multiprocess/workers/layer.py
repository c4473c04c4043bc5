"""Ranks that compare `moe_layer` over several processes with the dense reference, which each computes for itself.

    argument 1   the mesh over all devices, such as "expert 8" or "data 2 x expert 4"
    argument 2   the implementation
    argument 3   as if the experts were on several hosts: fields of `jaxmoe.NetworkPlan` as JSON; may be left out

In float32 on CPU and in bfloat16 on GPUs. Every rank checks the shards that it holds. It prints a digest of every
shard, so that the test can compare replicas of different processes. Everything that runs over the ranks is one
compiled program.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.options import Arguments
from jaxmoe.testing import ROUTING_KINDS, dense, make_inputs, relative_error, tolerance
from tests.layer_calls import widened
from tests.multiprocess.rank import join, step

SIZES: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 64, "hidden": 24, "intermediate": 40, "num_experts": 8, "top_k": 3},
    # Several row tiles of an expert in some routings.
    "gpu": {"tokens": 1024, "hidden": 264, "intermediate": 392, "num_experts": 16, "top_k": 3},
}
DTYPES: dict[str, Any] = {"cpu": jnp.float32, "gpu": jnp.bfloat16}
# Float32 against float32: only the order of sums differs.
ALLOWED_ERROR = 5e-6
# So few that ranks take several passes, a different number each: in a "one-hot" routing one rank all, the others none.
PLAN = jaxmoe.Plan(batch_rows=11)
CALLS = 30


def make_mesh(name: str) -> Mesh:
    """A mesh over all processes, whose every expert group has ranks in as many of them as it can.

    Processes alternate along both axes, like the colours of a chess board where there are two: each step along the
    expert axis leaves the process, and the replicas of an expert lie in different ones.
    """
    found = re.fullmatch(r"(?:data (\d+) x )?expert (\d+)", name)
    assert found, name
    groups, ranks = int(found[1] or 1), int(found[2])
    by_process = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    alternating = by_process.reshape(jax.process_count(), -1).T.reshape(groups, ranks)
    turned = np.stack([np.roll(group, -number) for number, group in enumerate(alternating)])
    mesh = Mesh(turned, ("data", "expert")) if found[1] else Mesh(turned[0], ("expert",))
    assert len(set(mesh.devices.flat)) == jax.device_count()
    for group in turned:
        assert len({device.process_index for device in group}) == min(ranks, jax.process_count())
    return mesh


def spread(arguments: Arguments, mesh: Mesh) -> Arguments:
    """Global arrays of which each process gives its part of `arguments`."""
    tokens, experts = NamedSharding(mesh, P(mesh.axis_names)), NamedSharding(mesh, P("expert"))

    def on(sharding: NamedSharding, tree: Any) -> Any:
        def put(array: jax.Array) -> jax.Array:
            return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

        return jax.tree.map(put, tree)

    everything = on(tokens, arguments._replace(experts=None))
    return everything._replace(experts=on(experts, arguments.experts))


def outputs_and_gradients(layer: Any) -> Any:
    """Returns a function to `(y, stats), (dx, dweights, dexperts)` for a fixed weighted sum of the outputs."""

    def loss(x: jax.Array, weights: jax.Array, experts: jaxmoe.Experts, rest: Arguments) -> Any:
        y, stats = layer(rest._replace(x=x, topk_weights=weights, experts=experts))
        valid = rest.token_valid
        slopes = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(jnp.where(valid[:, None], y, 0) * slopes), (y, stats)

    def run(arguments: Arguments) -> Any:
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        (_, aux), gradients = gradient(arguments.x, arguments.topk_weights, arguments.experts, arguments)
        return aux, gradients

    return run


def shards(tree: Any) -> Iterator[tuple[str, tuple[slice, ...], np.ndarray]]:
    """Name, place and value of every shard that this process holds."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            yield jax.tree_util.keystr(path), shard.index, np.asarray(shard.data)


def passes_of_ranks(ids: jax.Array, num_experts: int, mesh: Mesh) -> list[int]:
    """How often each rank goes through the loop over rows of `"xla"`."""
    groups, ranks = mesh.shape.get("data", 1), mesh.shape["expert"]
    by_group = np.asarray(ids).reshape(groups, -1)
    owners = np.where(by_group < 0, -1, by_group // (num_experts // ranks))
    rows = [int((owners[group] == rank).sum()) for group in range(groups) for rank in range(ranks)]
    return [-(-number // PLAN.batch_rows) for number in rows]


def as_dict(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def check(got: Any, truth: Any, rough: Any) -> int:
    """Compares the shards of this process with their parts of the truth and returns how many there are.

    `rough` is the same maths in 16 bits, of which they may have twice the error; None where they are in float32.
    """
    whole, narrow = as_dict(truth), None if rough is None else as_dict(rough)
    number = 0
    for name, place, value in shards(got):
        want = whole[name][place]
        allowed = ALLOWED_ERROR if narrow is None else tolerance(narrow[name][place], want, jnp.bfloat16)
        error = relative_error(value, want)
        assert error <= (allowed if want.any() else 0.0), f"{name}{place}: error {error:.2e} above {allowed:.2e}"
        number += 1
    return number


def check_routings(dtype: Any, local: list[Arguments], results: list[Any]) -> dict[str, int]:
    """Compares the first result of every routing with the reference; returns the number of this process's shards."""
    truth_of, rough_of = (
        jax.jit(outputs_and_gradients(lambda arguments, kind=kind: (dense(arguments, compute_dtype=kind), None)))
        for kind in (None, dtype)
    )
    numbers = {}
    for kind, arguments, result in zip(ROUTING_KINDS, local, results, strict=False):
        here = jax.tree.map(np.asarray, arguments)
        (y, _), gradients = truth_of(widened(here))
        stats = jaxmoe.load_stats(here.topk_ids, here.experts.num_experts, token_valid=here.token_valid)
        rough = None
        if dtype != jnp.float32:
            (rough_y, _), rough_gradients = rough_of(here)
            rough = ((rough_y, stats), rough_gradients)
        numbers[kind] = check(result, ((y, stats), gradients), rough)
        step(f"{kind}: compared")
    return numbers


def check_bits(results: list[Any], number_of_inputs: int) -> None:
    """Every call gave the bits of the first one with its inputs, which take turns."""
    for call, result in enumerate(results):
        first = results[call % number_of_inputs]
        for (where, place, value), (_, _, expected) in zip(shards(result), shards(first), strict=True):
            assert value.tobytes() == expected.tobytes(), f"call {call}: other bits in {where}{place}"
    step(f"{len(results)} calls gave the same bits")


def check_sums(mesh: Mesh) -> None:
    """Sums that lie with several processes are added up in compiled programs; read outside they would be waited for."""
    logits = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    aux_of = lambda logits: jaxmoe.router_aux(jaxmoe.route(logits, jaxmoe.RouterConfig(top_k=2)), logits)  # noqa: E731
    spread_logits = jax.make_array_from_callback(
        logits.shape, NamedSharding(mesh, P(mesh.axis_names)), logits.__getitem__
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wanted = aux_of(jnp.asarray(logits)).load_balancing_loss
    found = jax.jit(lambda logits: aux_of(logits).load_balancing_loss)(spread_logits)
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5)
    aux = jax.jit(aux_of)(spread_logits)
    if jax.process_index() == 0:
        try:
            raise AssertionError(f"{aux.stats} was read by one process")
        except RuntimeError as error:
            assert "inside of the jitted function" in str(error)  # noqa: PT017
    step("sums that lie with several processes are not read outside of a program")


def main() -> None:
    join()
    name, implementation, *of_network = sys.argv[1:]
    network = jaxmoe.NetworkPlan(**json.loads(of_network[0])) if of_network else None
    mesh, platform = make_mesh(name), jax.default_backend()
    sizes, dtype = SIZES[platform], DTYPES[platform]
    num_experts = sizes["num_experts"]

    def layer(arguments: Arguments) -> Any:
        x, ids, weights, experts, valid = arguments
        where: dict[str, Any] = {
            "mesh": mesh,
            "data_axes": mesh.axis_names[:-1],
            "token_valid": valid,
            "network": network,
        }
        options: dict[str, Any] = {"implementation": implementation, "plan": PLAN if implementation == "xla" else None}
        return jaxmoe.moe_layer(x, ids, weights, experts, return_stats=True, **where, **options)

    structure: dict[str, Any] = {"biases": True, "token_valid": True, "dtype": dtype}
    local = [make_inputs(seed, **sizes, **structure, routing=kind) for seed, kind in enumerate(ROUTING_KINDS)]
    inputs = [spread(arguments, mesh) for arguments in local]
    program = jax.jit(outputs_and_gradients(layer)).lower(inputs[0]).compile()
    step("compiled")

    # Started one after another with nothing waited for: calls of different routings are in flight at once.
    results = [program(inputs[call % len(inputs)]) for call in range(CALLS)]
    step(f"{CALLS} calls started")
    jax.block_until_ready(results)
    step(f"{CALLS} calls ended")

    # On a CPU of this process's own: the GPUs may be shared, and XLA's autotuner waits for its turns there.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        number_of_shards = check_routings(dtype, local, results)
    for (kind, number), arguments in zip(number_of_shards.items(), local, strict=True):
        used = jnp.where(arguments.token_valid[:, None], arguments.topk_ids, -1)
        passes = passes_of_ranks(used, num_experts, mesh)
        step(f"{kind}: {number} shards near the reference, passes of the ranks {passes}")

    check_bits(results, len(inputs))
    check_sums(mesh)

    # The program is waited for this time.
    for kind, arguments, first in zip(ROUTING_KINDS, inputs, results, strict=False):
        for (where, place, value), (_, _, expected) in zip(shards(program(arguments)), shards(first), strict=True):
            assert value.tobytes() == expected.tobytes(), f"{kind}: other bits in {where}{place} when it runs alone"
            bounds = [(part.start, part.stop) for part in place]
            step(f"digest {kind}{where}{bounds} {hashlib.sha256(value.tobytes()).hexdigest()}")


if __name__ == "__main__":
    main()
