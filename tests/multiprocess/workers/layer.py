"""Ranks that compare `moe_layer` over two processes with the dense reference, which each of them computes for itself.

    argument 1   the mesh, one of `MESHES`
    argument 2   the implementation

Every rank checks the shards that it holds. It prints a digest of every shard, so that the test can compare replicas of
different processes. Everything that runs over the ranks is one compiled program.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.api import Arguments
from jaxmoe.testing import ROUTING_KINDS, dense, make_inputs, relative_error
from tests.multiprocess.rank import join, step

TOKENS, EXPERTS, TOP_K = 64, 8, 3
SIZES: dict[str, Any] = {"tokens": TOKENS, "hidden": 24, "intermediate": 40, "num_experts": EXPERTS, "top_k": TOP_K}
# Float32 against float32: only the order of sums differs.
ALLOWED_ERROR = 5e-6
# So few that ranks take several passes, a different number each: in a "one-hot" routing one rank all, the others none.
PLAN = jaxmoe.Plan(chunk_rows=11)
CALLS = 30
MESHES = ("data 2 x expert 4", "expert 8")


def make_mesh(name: str) -> Mesh:
    """A mesh over both processes, whose every expert group has ranks in both.

    In "data 2 x expert 4" processes alternate along both axes, like the colours of a chess board: each step along the
    expert axis leaves the process, and the replicas of an expert lie in different ones. In "expert 8" each has a half.
    """
    by_process = np.array(sorted(jax.devices(), key=lambda device: (device.process_index, device.id))).reshape(2, 4)
    if name == "expert 8":
        return Mesh(by_process.reshape(8), ("expert",))
    assert name == "data 2 x expert 4", name
    data, expert = np.indices((2, 4))
    mesh = Mesh(by_process[(data + expert) % 2, 2 * data + expert // 2], ("data", "expert"))
    assert len(set(mesh.devices.flat)) == 8
    assert all({device.process_index for device in group} == {0, 1} for group in mesh.devices)
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


def passes_of_ranks(ids: jax.Array, mesh: Mesh) -> list[int]:
    """How often each rank goes through the loop over rows."""
    groups, ranks = mesh.shape.get("data", 1), mesh.shape["expert"]
    by_group = np.asarray(ids).reshape(groups, -1)
    owners = np.where(by_group < 0, -1, by_group // (EXPERTS // ranks))
    rows = [int((owners[group] == rank).sum()) for group in range(groups) for rank in range(ranks)]
    return [-(-number // PLAN.chunk_rows) for number in rows]


def check(got: Any, truth: Any) -> int:
    """Compares the shards of this process with their parts of the truth and returns how many there are."""
    whole = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(truth)}
    number = 0
    for name, place, value in shards(got):
        want = whole[name][place]
        error = relative_error(value, want)
        allowed = ALLOWED_ERROR if want.any() else 0.0
        assert error <= allowed, f"{name}{place}: error {error:.2e} above {allowed:.2e}"
        number += 1
    return number


def main() -> None:
    join()
    name, implementation = sys.argv[1:]
    mesh = make_mesh(name)

    def layer(arguments: Arguments) -> Any:
        x, ids, weights, experts, valid = arguments
        where: dict[str, Any] = {"mesh": mesh, "data_axes": mesh.axis_names[:-1], "token_valid": valid}
        options: dict[str, Any] = {"implementation": implementation, "plan": PLAN if implementation == "xla" else None}
        return jaxmoe.moe_layer(x, ids, weights, experts, return_stats=True, **where, **options)

    structure: dict[str, Any] = {"biases": True, "token_valid": True}
    local = [make_inputs(seed, **SIZES, **structure, routing=kind) for seed, kind in enumerate(ROUTING_KINDS)]
    inputs = [spread(arguments, mesh) for arguments in local]
    program = jax.jit(outputs_and_gradients(layer)).lower(inputs[0]).compile()
    step("compiled")

    # Started one after another with nothing waited for: calls of different routings are in flight at once.
    results = [program(inputs[call % len(inputs)]) for call in range(CALLS)]
    step(f"{CALLS} calls started")
    jax.block_until_ready(results)
    step(f"{CALLS} calls ended")

    truth_of = jax.jit(outputs_and_gradients(lambda arguments: (dense(arguments), None)))
    for kind, arguments, result in zip(ROUTING_KINDS, local, results, strict=False):
        truth = truth_of(arguments)
        stats = jaxmoe.load_stats(arguments.topk_ids, EXPERTS, token_valid=arguments.token_valid)
        number = check(result, ((truth[0][0], stats), truth[1]))
        used = jnp.where(arguments.token_valid[:, None], arguments.topk_ids, -1)
        step(f"{kind}: {number} shards near the reference, passes of the ranks {passes_of_ranks(used, mesh)}")

    for call, result in enumerate(results):
        first = results[call % len(inputs)]
        for (where, place, value), (_, _, expected) in zip(shards(result), shards(first), strict=True):
            assert value.tobytes() == expected.tobytes(), f"call {call}: other bits in {where}{place}"
    step(f"{CALLS} calls gave the same bits")

    # The program is waited for this time.
    for kind, arguments, first in zip(ROUTING_KINDS, inputs, results, strict=False):
        for (where, place, value), (_, _, expected) in zip(shards(program(arguments)), shards(first), strict=True):
            assert value.tobytes() == expected.tobytes(), f"{kind}: other bits in {where}{place} when it runs alone"
            bounds = [(part.start, part.stop) for part in place]
            step(f"digest {kind}{where}{bounds} {hashlib.sha256(value.tobytes()).hexdigest()}")


if __name__ == "__main__":
    main()
