"""Ranks that run the fused kernel: right in many calls and with many programs. What goes wrong is in `faults.py`.

argument 1   "layer"
             "sums": a layer whose answers are added up at experts before they travel
             "forgetful": the first rank forgets what it has compiled, the others do not
             "threads": two Python threads call two layers at the same time
             "programs": groups of half the devices, in programs that have other collectives and in some that do not
             "sizes": groups of each of the sizes that follow, over the same devices
             "progress": a thread that has used no GPU asks how far the launches of this rank are
"""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe import native
from jaxmoe.testing import dense, make_inputs, relative_error
from tests.layer_calls import SUMS
from tests.multiprocess.rank import join, step

CALLS = 1000
SIZES: dict[str, Any] = {"tokens": 1024, "hidden": 512, "intermediate": 768, "num_experts": 16, "top_k": 4}
ALLOWED_ERROR = 8e-3  # twice the error of the same maths in BF16


def programs() -> None:
    """XLA takes other communicators for a group when a program needs larger groups too, and destroys the first ones."""
    arguments = make_inputs(2, **SIZES, dtype=jnp.bfloat16)
    larger = make_inputs(3, **{**SIZES, "tokens": 2 * SIZES["tokens"], "top_k": 8}, dtype=jnp.bfloat16)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, jax.device_count() // 2), ("data", "expert"), axis_types=kinds)

    def put(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(axes)), np.asarray(array).__getitem__)

    def layer(x: Any, topk_ids: Any, topk_weights: Any, experts: Any) -> tuple[jax.Array, jax.Array]:
        y = jaxmoe.moe_layer(x, topk_ids, topk_weights, experts, implementation="megakernel")
        return y, jnp.float32(0)

    def layer_and_sum(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        y, _ = layer(*arrays)
        return y, jax.lax.psum(jnp.sum(y.astype(jnp.float32)), ("data", "expert"))

    tokens, split = P(("data", "expert")), P("expert")
    alone, beside = (
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(tokens, tokens, tokens, split), out_specs=(tokens, P())))
        for f in (layer, layer_and_sum)
    )
    for name, program, inputs in (
        ("alone", alone, arguments),
        ("beside a larger group", beside, arguments),
        ("alone again", alone, arguments),
        ("larger", alone, larger),
        ("beside a larger group again", beside, arguments),
    ):
        arrays = [put(a, ("data", "expert")) for a in (inputs.x, inputs.topk_ids, inputs.topk_weights)]
        y, _ = program(*arrays, jax.tree.map(lambda a: put(a, ("expert",)), inputs.experts))
        truth = np.asarray(dense(inputs))
        errors = [
            relative_error(np.asarray(s.data), truth[s.index]) for s in jax.block_until_ready(y).addressable_shards
        ]
        assert max(errors) <= ALLOWED_ERROR, f"{name}: errors {errors}"
        step(f"right: {name}")


def sizes() -> None:
    """Each size of a group is one of its own, whatever was called before with the same devices."""
    arguments = make_inputs(4, **SIZES, dtype=jnp.bfloat16)
    truth = np.asarray(dense(arguments))
    ranks_of_calls = [int(ranks) for ranks in sys.argv[2:]]
    for ranks in ranks_of_calls * 2:
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((jax.device_count() // ranks, ranks), ("data", "expert"), axis_types=kinds)
        tokens, split = NamedSharding(mesh, P(("data", "expert"))), NamedSharding(mesh, P("expert"))

        def put(array: jax.Array, where: NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(array.shape, where, np.asarray(array).__getitem__)

        where: dict[str, Any] = {"mesh": mesh, "axis_name": "expert", "data_axes": "data"}
        layer = jax.jit(lambda *a, where=where: jaxmoe.moe_layer(*a, **where, implementation="megakernel"))
        arrays = [put(array, tokens) for array in arguments[:3]]
        y = jax.block_until_ready(layer(*arrays, jax.tree.map(lambda a, to=split: put(a, to), arguments.experts)))
        errors = [relative_error(np.asarray(s.data), truth[s.index]) for s in y.addressable_shards]
        assert max(errors) <= ALLOWED_ERROR, f"groups of {ranks}: errors {errors}"
        jaxmoe.raise_if_failed()
        step(f"groups of {ranks}: right")


def progress() -> None:
    """A context on a GPU that is not this rank's would take memory there as long as the process lives."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    arguments = make_inputs(5, **{**SIZES, "tokens": 8192 * jax.device_count()}, dtype=jnp.bfloat16)

    def put(array: jax.Array, where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, where, np.asarray(array).__getitem__)

    arrays = [put(array, split) for array in arguments[:3]]
    experts = jax.tree.map(lambda array: put(array, whole), arguments.experts)
    where: dict[str, Any] = {"mesh": mesh, "axis_name": None, "data_axes": "data"}
    layer = jax.jit(lambda *a: jaxmoe.moe_layer(*a, **where, implementation="megakernel"))
    jax.block_until_ready(layer(*arrays, experts))
    driver, module = ctypes.CDLL("libcuda.so.1"), native.extension("gpu")
    assert module is not None
    [own] = [device.local_hardware_id for device in jax.local_devices()]

    def other_contexts() -> list[int]:
        count, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        found = []
        for device in range(count.value):
            assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active)) == 0
            if is_active.value and device != own:
                found.append(device)
        return found

    before = other_contexts()
    results = [layer(*arrays, experts) for _ in range(200)]
    with ThreadPoolExecutor(1) as pool:
        told = [pool.submit(module.progress).result() for _ in range(100)]
    jax.block_until_ready(results)
    waited = sum(each.waiting != 0 for [each] in told)
    step(f"contexts elsewhere before {before}, after {other_contexts()}; a launch was on its way {waited} times")


def threads() -> None:
    """Ranks may see the calls of two threads in different orders. Each call is right or says why not; none hangs."""
    mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("expert"))
    layer = jax.jit(lambda *arrays: jaxmoe.moe_layer(*arrays, mesh=mesh, implementation="megakernel"))

    def call(seed: int) -> str:
        arguments = make_inputs(seed, **{**SIZES, "top_k": 2 + seed}, dtype=jnp.bfloat16)
        x, ids, weights, experts = jax.device_put(arguments[:4], split)
        truth = np.asarray(dense(arguments))
        for number in range(100):
            try:
                y = np.asarray(layer(x, ids, weights, experts))
            except jax.errors.JaxRuntimeError as error:
                return f"call {number}: {error}".replace("\n", " ")
            error = relative_error(y, truth)
            assert error <= ALLOWED_ERROR, f"call {number}: error {error:.2e}"
        return "100 calls were right"

    with ThreadPoolExecutor(2) as pool:
        for told in pool.map(call, (0, 1)):
            step(f"thread: {told}")


def main() -> None:
    join()
    alone = {"programs": programs, "threads": threads, "sizes": sizes, "progress": progress}
    if sys.argv[1] in alone:
        alone[sys.argv[1]]()
        return
    arguments = make_inputs(1, **SIZES, dtype=jnp.bfloat16, routing="zipf")
    mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("expert"))

    def put(array: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

    spread = jax.tree.map(put, (arguments.x, arguments.topk_ids, arguments.topk_weights, arguments.experts))
    plan = SUMS if sys.argv[1] == "sums" else None
    layer = jax.jit(lambda *arrays: jaxmoe.moe_layer(*arrays, mesh=mesh, implementation="megakernel", plan=plan))
    first = jax.block_until_ready(layer(*spread))
    step("first call ended")
    jaxmoe.raise_if_failed()

    def digest(y: jax.Array) -> bytes:
        [shard] = jax.block_until_ready(y).addressable_shards
        return np.asarray(shard.data).tobytes()

    if sys.argv[1] == "forgetful":
        larger = make_inputs(1, **{**SIZES, "top_k": 8}, dtype=jnp.bfloat16)
        spread_larger = jax.tree.map(put, (larger.x, larger.topk_ids, larger.topk_weights, larger.experts))
        expected = digest(layer(*spread_larger))
        for _ in range(3):
            if jax.process_index() == 0:
                jax.clear_caches()
            assert digest(layer(*spread)) == digest(first)
            assert digest(layer(*spread_larger)) == expected
        step("the same bits whoever has forgotten")
        return

    y = first
    for _ in range(CALLS):
        y = layer(*spread)
    assert digest(y) == digest(first), "other bits in another call"
    [shard] = y.addressable_shards
    error = relative_error(np.asarray(shard.data), np.asarray(dense(arguments))[shard.index])
    assert error <= ALLOWED_ERROR, f"error {error:.2e}"
    step(f"{CALLS} calls gave the same bits")


if __name__ == "__main__":
    main()
