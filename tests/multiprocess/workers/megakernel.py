"""Ranks that run the fused kernel: right in many calls, with many programs, and told by name of a peer that stays away.

argument 1   "layer"
             "absent": the last rank does not take part in the second call
             "silent": the same, and that is the last call of the others
             "away": the last rank does not take part in a call that needs more memory
             "forgetful": the first rank forgets what it has compiled, the others do not
             "late": of three processes with two ranks each, whose groups are pairs of processes, the last one is late
             "full": one process, groups of one rank, and one GPU without memory
             "threads": two Python threads call two layers at the same time
             "programs": groups of half the devices, in programs that have other collectives and in some that do not
"""

import ctypes
import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import dense, make_inputs, relative_error
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


LATE_S = 50  # longer than XLA lets the devices of a process wait for each other


def late() -> None:
    """A device whose group has met does not wait, where XLA counts the seconds, for one whose group has not."""
    pairs = np.array(jax.devices())[[[0, 2], [1, 4], [3, 5]]]
    mesh = jax.sharding.Mesh(pairs, ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tokens, split = NamedSharding(mesh, P(("data", "expert"))), NamedSharding(mesh, P("expert"))

    def put(array: jax.Array, where: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, where, np.asarray(array).__getitem__)

    layer = jax.jit(lambda *arrays: jaxmoe.moe_layer(*arrays, mesh=mesh, data_axes="data", implementation="megakernel"))
    for count in (768, 6144):
        inputs = make_inputs(1, **{**SIZES, "tokens": count}, dtype=jnp.bfloat16)
        arrays = [put(array, tokens) for array in inputs[:3]]
        experts = jax.tree.map(lambda array: put(array, split), inputs.experts)
        if count > 768 and jax.process_index() == jax.process_count() - 1:
            time.sleep(LATE_S)
        y = jax.block_until_ready(layer(*arrays, experts))
        truth = np.asarray(dense(inputs))
        error = max(relative_error(np.asarray(s.data), truth[s.index]) for s in y.addressable_shards)
        assert error <= ALLOWED_ERROR, f"{count} tokens: error {error:.2e}"
        step(f"{count} tokens: right")


class FullGpu:
    """Holds all free memory of a GPU but for some."""

    def __init__(self, device: int, left_bytes: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self.pointer = ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self._call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(free.value - left_bytes))

    def release(self) -> None:
        self._call("cuMemFree_v2", self.pointer)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.driver, name)(*arguments)
        assert status == 0, f"{name}: {status}"


def full() -> None:
    """The error of one GPU is that of the call, not the end of the process. Smaller calls run, and later this one."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    @functools.partial(jax.jit, static_argnames="implementation")
    def layer(x: Any, ids: Any, weights: Any, experts: Any, implementation: str = "megakernel") -> Any:
        options: Any = {"mesh": mesh, "axis_name": None, "data_axes": "data", "implementation": implementation}
        y = jaxmoe.moe_layer(x, ids, weights, experts, **options)
        return y, jnp.mean(y.astype(jnp.float32))  # a sum over devices, which all have to come to

    def inputs(count: int) -> tuple[Any, Any]:
        arguments = make_inputs(1, **{**SIZES, "tokens": count}, dtype=jnp.bfloat16)
        return arguments, (*jax.device_put(arguments[:3], split), jax.device_put(arguments.experts, whole))

    def check(name: str, count: int) -> None:
        arguments, arrays = inputs(count)
        y = jax.block_until_ready(layer(*arrays))[0]
        error = relative_error(np.asarray(y), np.asarray(dense(arguments)))
        assert error <= ALLOWED_ERROR, f"{name}: error {error:.2e}"
        step(f"right: {name}")

    small, large = 256, 32768 * jax.device_count()
    _, arrays = inputs(large)
    check("small", small)
    jax.block_until_ready(layer(*arrays, implementation="xla"))  # so that XLA's own memory has grown
    memory = FullGpu(jax.local_devices()[-1].local_hardware_id, left_bytes=64 << 20)
    for number in range(2):
        results = layer(*arrays)
        for leaf in jax.tree.leaves(results):
            for shard in leaf.addressable_shards:
                try:
                    jax.block_until_ready(shard.data)
                    step(f"call {number}: no error on {shard.device}")
                except jax.errors.JaxRuntimeError as error:
                    step(f"call {number}: {error}".replace("\n", " "))
    check("small again", small)
    memory.release()
    check("large at last", large)
    jaxmoe.raise_if_failed()


def main() -> None:
    join()
    alone = {"programs": programs, "threads": threads, "late": late, "full": full}
    if sys.argv[1] in alone:
        alone[sys.argv[1]]()
        return
    arguments = make_inputs(1, **SIZES, dtype=jnp.bfloat16, routing="zipf")
    mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("expert"))

    def put(array: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

    spread = jax.tree.map(put, (arguments.x, arguments.topk_ids, arguments.topk_weights, arguments.experts))
    layer = jax.jit(lambda *arrays: jaxmoe.moe_layer(*arrays, mesh=mesh, implementation="megakernel"))
    first = jax.block_until_ready(layer(*spread))
    step("first call ended")
    jaxmoe.raise_if_failed()

    def digest(y: jax.Array) -> bytes:
        [shard] = jax.block_until_ready(y).addressable_shards
        return np.asarray(shard.data).tobytes()

    def failing_call(name: str) -> None:
        started = time.monotonic()
        try:
            digest(layer(*spread))
            step(f"{name}: no error")
        except jax.errors.JaxRuntimeError as error:
            step(f"{name} after {time.monotonic() - started:.1f} s: {error}".replace("\n", " "))

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

    if sys.argv[1] in ("absent", "silent", "away"):
        if jax.process_index() == jax.process_count() - 1:
            time.sleep(20)
            step("stayed away")
            return
        if sys.argv[1] == "away":
            larger = make_inputs(1, **{**SIZES, "top_k": 8}, dtype=jnp.bfloat16)
            spread = jax.tree.map(put, (larger.x, larger.topk_ids, larger.topk_weights, larger.experts))
            failing_call("first call")
            failing_call("next call")
            step(f"failures: {jaxmoe.failures()}".replace("\n", " "))
            os._exit(0)  # not through XLA's goodbye, which would wait for the collective that never ends
        y = layer(*spread)
        [shard] = y.addressable_shards
        assert np.isnan(np.asarray(shard.data, np.float32)).all(), "the output of a launch that failed is not NaN"
        step("the output is NaN")
        if sys.argv[1] == "silent":
            return
        try:
            jaxmoe.raise_if_failed()
        except jaxmoe.LayerFailedError as error:
            step(f"asked: {error}".replace("\n", " "))
        failing_call("next call")
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
