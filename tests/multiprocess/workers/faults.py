"""Ranks to which something happens in the middle of their work, and what the others are told.

argument 1   "absent": the last rank does not take part in the second call
             "silent": the same, and that is the last call of the others
             "away": the last rank does not take part in a call that needs more memory
             "killed": the last rank is killed while launches follow each other
             "raises": the last rank ends with an exception between two layers
             "short": the GPU of the last rank has no memory for a larger call
             "late": of three processes with two ranks each, whose groups are pairs of processes, the last one is late
             "late host": each rank is a host, and the last one comes late to the second call
             "lost host": each rank is a host, and the last one is killed before the second call
             "full": one process, groups of one rank, and one GPU without memory
             "busy": memory grows behind work that takes longer than the limit
             "one is busy": the same of one process with groups of one rank, on its last GPU alone
"""

import ctypes
import functools
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.testing import dense, make_inputs, relative_error
from tests.multiprocess.rank import join, step
from tests.multiprocess.workers.megakernel import ALLOWED_ERROR, SIZES


class Group:
    """All ranks as one group, and its layer, which has run once."""

    def __init__(self, network: jaxmoe.NetworkPlan | None = None, **sizes: Any) -> None:
        kinds = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((jax.device_count(),), ("expert",), axis_types=kinds)
        self.arrays = self.inputs(**sizes)[1]
        options: Any = {"implementation": "megakernel", "network": network}
        self.layer = jax.jit(lambda *a: jaxmoe.moe_layer(*a, mesh=self.mesh, **options))
        jax.block_until_ready(self.layer(*self.arrays))
        jaxmoe.raise_if_failed()
        step("first call ended")

    def inputs(self, **sizes: Any) -> tuple[Any, Any]:
        """The arguments of a call, whole and spread over the group."""
        arguments = make_inputs(1, **SIZES | sizes, dtype=jnp.bfloat16, routing="zipf")
        split = NamedSharding(self.mesh, P("expert"))

        def put(array: jax.Array) -> jax.Array:
            return jax.make_array_from_callback(array.shape, split, np.asarray(array).__getitem__)

        return arguments, jax.tree.map(put, tuple(arguments[:4]))

    def own(self, y: jax.Array) -> np.ndarray:
        """The rows of this rank; raises what the call has to say."""
        [shard] = jax.block_until_ready(y).addressable_shards
        return np.asarray(shard.data, np.float32)

    def failing_call(self, name: str, arrays: Any, layer: Any = None) -> None:
        started = time.monotonic()
        try:
            self.own((layer or self.layer)(*arrays))
            step(f"{name}: no error")
        except jax.errors.JaxRuntimeError as error:
            step(f"{name} after {time.monotonic() - started:.1f} s: {error}".replace("\n", " "))


def is_last_rank() -> bool:
    return jax.process_index() == jax.process_count() - 1


def stay_away() -> None:
    time.sleep(20)
    step("stayed away")


def assert_is_nan(y: np.ndarray) -> None:
    assert np.isnan(y).all(), "the output of a launch that failed is not NaN"
    step("the output is NaN")


def absent(is_silent: bool = False) -> None:
    group = Group()
    if is_last_rank():
        return stay_away()
    assert_is_nan(group.own(group.layer(*group.arrays)))
    if is_silent:
        return
    try:
        jaxmoe.raise_if_failed()
    except jaxmoe.LayerFailedError as error:
        step(f"asked: {error}".replace("\n", " "))
    group.failing_call("next call", group.arrays)


def away() -> None:
    group = Group()
    _, larger = group.inputs(top_k=8)
    layer = group.layer.lower(
        *larger
    ).compile()  # by all: processes share what XLA tunes, and wait for it without limit
    step("compiled")
    if is_last_rank():
        return stay_away()
    group.failing_call("first call", larger, layer)
    group.failing_call("next call", larger, layer)
    step(f"failures: {jaxmoe.failures()}".replace("\n", " "))
    os._exit(0)  # not through XLA's goodbye, which would wait for the collective that never ends


def killed() -> None:
    """Many calls are in flight, each long enough that the signal finds the GPU in the middle of one."""
    group = Group(tokens=32768, hidden=1024)
    if is_last_rank():
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in itertools.count():
        started = time.monotonic()
        try:
            *_, y = [group.layer(*group.arrays) for _ in range(8)]
            if np.isnan(group.own(y)).any():
                step(f"NaN after {time.monotonic() - started:.1f} s")
                break
        except jax.errors.JaxRuntimeError as error:
            step(f"error after {time.monotonic() - started:.1f} s: {error}".replace("\n", " "))
            break
    group.failing_call("next call", group.arrays)
    step(f"failures: {jaxmoe.failures()}".replace("\n", " "))
    # The CUDA context lives: what needs no peer still runs.
    assert float(jnp.arange(1000.0).sum()) == 499500
    step("the GPU still computes")
    os._exit(0)  # JAX's goodbye waits for all ranks


def raises() -> None:
    group = Group()
    for number in range(10):
        if is_last_rank() and number == 5:
            raise RuntimeError("between two layers")
        if np.isnan(group.own(group.layer(*group.arrays))).any():
            step(f"call {number}: NaN")
            break
    group.failing_call("next call", group.arrays)
    os._exit(0)  # JAX's goodbye waits for all ranks


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


def short() -> None:
    """All ranks are told of the memory that one of them lacks. Smaller calls run, and later this one."""
    group = Group()

    def check(name: str, arguments: Any, arrays: Any) -> None:
        y = group.layer(*arrays)
        own = group.own(y)
        [shard] = y.addressable_shards
        error = relative_error(own, np.asarray(dense(arguments))[shard.index])
        assert error <= ALLOWED_ERROR, f"{name}: error {error:.2e}"
        step(f"right: {name}")

    arguments, arrays = group.inputs(tokens=65536)
    xla = jax.jit(lambda *a: jaxmoe.moe_layer(*a, mesh=group.mesh, implementation="xla"))
    jax.block_until_ready(xla(*arrays))  # so that XLA's own memory has grown
    memory = FullGpu(jax.local_devices()[0].local_hardware_id, left_bytes=32 << 20) if is_last_rank() else None
    for number in range(2):
        group.failing_call(f"call {number}", arrays)
    check("small again", *group.inputs())
    if memory is not None:
        memory.release()
    check("large at last", arguments, arrays)
    jaxmoe.raise_if_failed()


def late_host() -> None:
    """The others wait for it, say for whom, and go on when it comes."""
    group = Group(jaxmoe.NetworkPlan(ranks_per_host=1))
    expected = group.own(group.layer(*group.arrays))
    if is_last_rank():
        stay_away()
    started = time.monotonic()
    np.testing.assert_array_equal(group.own(group.layer(*group.arrays)), expected)
    step(f"the same bits after {time.monotonic() - started:.1f} s")
    step(f"failures: {jaxmoe.failures()}".replace("\n", " "))


def lost_host() -> None:
    """The others say whom they wait for. JAX's own service ends them later, when it has missed the process for long."""
    group = Group(jaxmoe.NetworkPlan(ranks_per_host=1))
    if is_last_rank():
        step("ends")
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    group.layer(*group.arrays)
    while not jaxmoe.failures() and time.monotonic() < started + 60:
        time.sleep(0.1)
    step(f"after {time.monotonic() - started:.1f} s: {jaxmoe.failures()}".replace("\n", " "))
    os._exit(0)  # the collective never ends


def occupied(device: Any, seconds: float, width: int = 24_576, turns: int = 20) -> Any:
    """What a device computes for so long from now on.

    The host must not wait for it. So the loop has a number of turns that the program knows, since XLA asks the device
    in every turn otherwise; and launches are few and long (products of `width`): only so many can be on their way.
    """
    work = jax.jit(lambda array: jax.lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a @ a), array))
    array = jax.device_put(jnp.ones((width, width), jnp.bfloat16), device)
    took = 0.0
    for _ in range(2):  # the first call also compiles
        started = time.monotonic()
        jax.block_until_ready(work(array))
        took = time.monotonic() - started
    for _ in range(math.ceil(seconds / took)):
        array = work(array)
    return array


def busy() -> None:
    """What is wrong with no rank is no failure, however long it takes."""
    group = Group()
    arguments, larger = group.inputs(top_k=8)
    layer = group.layer.lower(*larger).compile()
    step("compiled")
    [device] = jax.local_devices()
    work = occupied(device, 10)
    assert not work.is_ready(), "the host has waited for what occupies the device"
    started = time.monotonic()
    y = layer(*larger)
    error = relative_error(group.own(y), np.asarray(dense(arguments))[y.addressable_shards[0].index])
    assert error <= ALLOWED_ERROR, f"error {error:.2e}"
    assert work.is_ready()
    step(f"right after {time.monotonic() - started:.1f} s, failures: {jaxmoe.failures()}")


def one_is_busy() -> None:
    """The other devices of the process wait for the one that waits for its own work."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    where: dict[str, Any] = {"mesh": mesh, "axis_name": None, "data_axes": "data"}
    layer = jax.jit(lambda *a: jaxmoe.moe_layer(*a, **where, implementation="megakernel"))

    def call(count: int) -> tuple[np.ndarray, Any, Any]:
        arguments = make_inputs(1, **{**SIZES, "tokens": count}, dtype=jnp.bfloat16)
        arrays = (*jax.device_put(arguments[:3], split), jax.device_put(arguments.experts, whole))
        return np.asarray(dense(arguments)), layer.lower(*arrays).compile(), arrays

    _, small, few = call(256)
    truth, large, many = call(32768)
    jax.block_until_ready((small(*few), many))
    step("first call ended")
    work = occupied(jax.local_devices()[-1], 25)  # longer than others wait for a device that gives no sign
    assert not work.is_ready(), "the host has waited for what occupies the device"
    started = time.monotonic()
    error = relative_error(np.asarray(large(*many)), truth)
    assert error <= ALLOWED_ERROR, f"error {error:.2e}"
    assert work.is_ready()
    step(f"right after {time.monotonic() - started:.1f} s, failures: {jaxmoe.failures()}")


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


MODES: dict[str, Callable[[], None]] = {
    "absent": absent,
    "silent": functools.partial(absent, is_silent=True),
    "away": away,
    "killed": killed,
    "raises": raises,
    "short": short,
    "late": late,
    "late host": late_host,
    "lost host": lost_host,
    "full": full,
    "busy": busy,
    "one is busy": one_is_busy,
}

if __name__ == "__main__":
    join()
    MODES[sys.argv[1]]()
