"""`python -m jaxmoe.bench layer`: time of one forward pass of `moe_layer`, for inputs that were checked just before.

One line for each implementation and number of tokens: microseconds per call as a user sees them (a jitted call on all
devices of one process, so the slowest rank counts), TFLOP/s per GPU, bytes. Without a passed check no time is printed.
"""

import dataclasses
import functools
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.activation import resolve
from jaxmoe.api import Arguments
from jaxmoe.bench import baselines, kernels, shapes
from jaxmoe.call import IMPLEMENTATIONS
from jaxmoe.reference import reference
from jaxmoe.sharding import ExpertGroup
from jaxmoe.testing import make_ids, relative_error, tolerance

BASELINE = "baseline-drops-rows"
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
# Measured on one H200: a BF16 product of 8192^3 random numbers. The share of it is printed for 16-bit types on that
# GPU.
H200_BF16_TFLOPS = 782.0
CHECKED_TOKENS = 64

_SHAPE = flags.DEFINE_list("shape", ["mixtral-8x7b"], "Names in jaxmoe/bench/shapes.py; one of your own with --sizes.")
_SIZES = flags.DEFINE_string("sizes", None, "hidden,intermediate,experts,top_k instead of --shape.")
_TOKENS = flags.DEFINE_list("tokens", ["8192"], "Tokens per rank.")
_EP = flags.DEFINE_integer("ep", 0, "Ranks over which the experts are spread; 0 is all devices.", lower_bound=0)
_DTYPE = flags.DEFINE_enum("dtype", "bf16", list(DTYPES), "Of tokens and weights.")
_IMPLEMENTATION = flags.DEFINE_list(
    "implementation", ["xla"], f"Any of {', '.join(IMPLEMENTATIONS)} (of moe_layer) and {BASELINE}."
)
_ROUTING = flags.DEFINE_enum("routing", "uniform", ["uniform", "zipf", "one-hot"], "How tokens choose experts.")
_BLOCKS = flags.DEFINE_integer("blocks", 7, "Timed blocks, of which the median counts.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.3, "Approximate length of a block.", lower_bound=0.0)
_KERNELS = flags.DEFINE_integer("kernels", 0, "Also print that many of the longest GPU kernels.", lower_bound=0)
_JSON = flags.DEFINE_string("json", None, "File for the results, one JSON object a line.")


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured line; times in microseconds per call."""

    shape: str
    implementation: str
    tokens: int
    ranks: int
    dtype: str
    routing: str
    device: str
    relative_error: float
    allowed_error: float
    checked: bool
    microseconds: float
    fastest: float
    slowest: float
    tflops: float
    share_of_peak: float | None
    weights_gbs: float
    wire_gbs: float
    temporary_mib: float
    dropped_rows: int


def main() -> int:
    """Runs what the flags ask for; returns the exit status."""
    ranks = _EP.value or jax.device_count()
    mesh = jax.make_mesh((ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    named = {_SIZES.value: shapes.parse(_SIZES.value)} if _SIZES.value else {n: shapes.parse(n) for n in _SHAPE.value}
    print(
        f"{jax.devices()[0].device_kind} x {ranks}, jax {jax.__version__}, {_DTYPE.value}, {_ROUTING.value} routing; "
        "tokens and TFLOP/s per rank, us per call: median (fastest - slowest of the blocks)"
    )
    print(_header())
    failed = False
    for name, shape in named.items():
        experts = _random_experts(shape, mesh, DTYPES[_DTYPE.value])
        for tokens in map(int, _TOKENS.value):
            for implementation in _IMPLEMENTATION.value:
                try:
                    result = measure(name, shape, experts, tokens, implementation, mesh)
                except jax.errors.JaxRuntimeError as error:  # out of memory, most often
                    print(f"{name:16s} {tokens:6d} {implementation:20s} failed: {str(error).splitlines()[0][:150]}")
                    failed = True
                    continue
                print(_line(result), flush=True)
                failed |= not result.checked
                if _JSON.value:
                    with Path(_JSON.value).open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    return int(failed)


def measure(
    name: str, shape: shapes.LayerShape, experts: jaxmoe.Experts, tokens: int, implementation: str, mesh: Mesh
) -> Result:
    """Checks one implementation on random inputs and times it on the same inputs."""
    ranks, dtype = mesh.size, experts.w_down.dtype
    inputs = [_random_tokens(seed, shape, tokens, mesh, dtype) for seed in range(4)]
    function, weights = _function(implementation, experts, mesh)
    compiled = jax.jit(function).lower(inputs[0]._replace(experts=weights)).compile()
    outputs = [compiled(arguments._replace(experts=weights)) for arguments in inputs]
    dropped = _dropped_rows(implementation, inputs, shape, tokens, ranks)
    errors = [_check(arguments, experts, y, mesh) for arguments, y in zip(inputs, outputs, strict=True)]
    error, allowed = max(errors, key=lambda pair: pair[0] / pair[1])
    # The baseline is compared on what it computes; rows it drops show in `dropped`, not as a failed check.
    checked = error <= allowed or (implementation == BASELINE and dropped > 0)
    del outputs

    blocks = _time(lambda i: compiled(inputs[i % 4]._replace(experts=weights))) if checked else [float("nan")]
    seconds = float(np.median(blocks))
    if _KERNELS.value and checked:
        times = kernels.kernel_times(lambda: compiled(inputs[0]._replace(experts=weights)))
        for kernel, microseconds, launches in times[: _KERNELS.value]:
            print(f"    {microseconds:10.1f} us in {launches:4.1f} launches  {kernel[:100]}")
    device = jax.devices()[0].device_kind
    tflops = 6 * tokens * shape.top_k * shape.hidden * shape.intermediate / seconds / 1e12
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / ranks
    token_bytes = tokens * shape.hidden * jnp.dtype(dtype).itemsize
    memory = compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes if memory else float("nan")
    wire_bytes = 2 * (ranks - 1) * token_bytes  # all ranks' tokens in and their sums back
    if implementation == "megakernel":  # the compiler does not know of its arena, and rows go to their expert alone
        told = jaxmoe.explain(*inputs[0][:3], experts, mesh=mesh, implementation=implementation)
        temporary, wire_bytes = temporary + sum(told.memory_bytes.values()), told.wire_bytes
    return Result(
        shape=name,
        implementation=implementation,
        tokens=tokens,
        ranks=ranks,
        dtype=_DTYPE.value,
        routing=_ROUTING.value,
        device=device,
        relative_error=error,
        allowed_error=allowed,
        checked=checked,
        microseconds=seconds * 1e6,
        fastest=min(blocks) * 1e6,
        slowest=max(blocks) * 1e6,
        tflops=tflops,
        share_of_peak=tflops / H200_BF16_TFLOPS if "H200" in device and dtype != jnp.float32 else None,
        # Every local expert's weights once.
        weights_gbs=weight_bytes / seconds / 1e9,
        wire_gbs=wire_bytes / seconds / 1e9,
        temporary_mib=temporary / 2**20,
        dropped_rows=dropped,
    )


def _function(implementation: str, experts: jaxmoe.Experts, mesh: Mesh) -> tuple[Callable[[Arguments], jax.Array], Any]:
    """Returns the layer as a function of a call's arrays, and the weights it wants in them."""
    if implementation != BASELINE:
        layer = functools.partial(jaxmoe.moe_layer, mesh=mesh, implementation=implementation)  # pyright: ignore
        return lambda arguments: layer(*arguments[:4]), experts

    grouped_dot = functools.partial(jax.lax.ragged_dot, preferred_element_type=experts.w_down.dtype)
    if mesh.devices.flat[0].platform == "gpu":
        grouped_dot = functools.partial(
            importlib.import_module("tokamax").ragged_dot,
            preferred_element_type=experts.w_down.dtype,
            implementation="mosaic",
        )
    baseline = functools.partial(baselines.all_gather_with_capacity, grouped_dot=grouped_dot, axis_name="expert")
    sharded = jax.shard_map(baseline, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    fuse = jax.jit(lambda e: jnp.concatenate([e.w_gate, e.w_up], axis=-1))
    weights = (fuse(experts), experts.w_down)

    def function(arguments: Any) -> jax.Array:
        x, topk_ids, topk_weights, (w_gate_up, w_down), _ = arguments
        return sharded(x, topk_ids, topk_weights, w_gate_up, w_down)

    return function, weights


def _random_experts(shape: shapes.LayerShape, mesh: Mesh, dtype: Any) -> jaxmoe.Experts:
    make = functools.partial(
        jaxmoe.Experts.init,
        num_experts=shape.num_experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        dtype=dtype,
    )
    return jax.jit(make, out_shardings=NamedSharding(mesh, P("expert")))(jax.random.key(0))


def _random_tokens(seed: int, shape: shapes.LayerShape, tokens: int, mesh: Mesh, dtype: Any) -> Arguments:
    split = NamedSharding(mesh, P("expert"))
    all_tokens = tokens * mesh.size
    normal = jax.jit(
        lambda key: jax.random.normal(key, (all_tokens, shape.hidden), jnp.float32).astype(dtype), out_shardings=split
    )
    rng = np.random.default_rng(seed)
    ids = make_ids(rng, all_tokens, shape.num_experts, shape.top_k, _ROUTING.value)  # pyright: ignore[reportArgumentType]
    raw = rng.random(ids.shape, np.float32) + 0.1
    weights = raw / raw.sum(-1, keepdims=True)
    return Arguments(
        normal(jax.random.key(seed)),
        jax.device_put(ids, split),
        jax.device_put(weights, split),
        experts=None,  # pyright: ignore
    )


def _check(arguments: Arguments, experts: jaxmoe.Experts, y: jax.Array, mesh: Mesh) -> tuple[float, float]:
    """Returns the relative error of sampled tokens, and twice that of the same maths in low precision."""
    total = arguments.x.shape[0]
    sample = np.unique(np.linspace(0, total - 1, CHECKED_TOKENS).astype(int))
    take = jax.jit(lambda tree: jax.tree.map(lambda a: a[sample], tree), out_shardings=NamedSharding(mesh, P()))
    x, ids, weights, got = take((arguments.x, arguments.topk_ids, arguments.topk_weights, y))
    truth, rough = (
        _dense_by_expert(x, ids, weights, experts, mesh, compute_dtype)
        for compute_dtype in (None, experts.w_down.dtype)
    )
    return relative_error(got.astype(jnp.float32), truth), tolerance(rough, truth, experts.w_down.dtype)


def _dense_by_expert(x: Any, ids: Any, weights: Any, experts: Any, mesh: Mesh, compute_dtype: Any) -> jax.Array:
    """The reference of a few tokens, with the experts left where they are."""

    def on_rank(experts: jaxmoe.Experts) -> jax.Array:
        local = ids - jax.lax.axis_index("expert") * experts.num_experts
        local = jnp.where((local >= 0) & (local < experts.num_experts), local, -1)
        y = reference(
            x.astype(jnp.float32),
            local,
            jnp.where(local >= 0, weights, 0),
            experts,
            activation=resolve("silu"),
            group=ExpertGroup(),
            compute_dtype=compute_dtype,
        )
        return jax.lax.psum(y, "expert")

    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=(P("expert"),), out_specs=P()))(experts)


def _dropped_rows(implementation: str, inputs: list[Arguments], shape: Any, tokens: int, ranks: int) -> int:
    """Rows beyond the capacity of the baseline, over all inputs; `moe_layer` drops none, and its check would see it."""
    if implementation != BASELINE:
        return 0
    capacity = int(tokens * shape.top_k * baselines.CAPACITY_FACTOR)
    owners = [np.asarray(a.topk_ids).reshape(-1) // (shape.num_experts // ranks) for a in inputs]
    return int(sum(np.maximum(np.bincount(owner, minlength=ranks) - capacity, 0).sum() for owner in owners))


def _time(call: Callable[[int], jax.Array]) -> list[float]:
    """Returns seconds per call of each block; calls of a block are enqueued without waiting in between."""
    start = time.perf_counter()
    for i in range(3):
        jax.block_until_ready(call(i))
    calls = int(np.clip(_SECONDS.value / ((time.perf_counter() - start) / 3), 4, 400))
    blocks = []
    for _ in range(_BLOCKS.value):
        start = time.perf_counter()
        y = None
        for i in range(calls):
            y = call(i)
        jax.block_until_ready(y)
        blocks.append((time.perf_counter() - start) / calls)
    return blocks


def _header() -> str:
    columns = f"{'shape':16s} {'tokens':>6s} {'implementation':20s} {'error':>8s} {'us':>10s} {'':>19s} {'TFLOP/s':>8s}"
    return f"{columns} {'of peak':>8s} {'weights GB/s':>12s} {'wire GB/s':>10s} {'temp MiB':>9s} {'dropped':>8s}"


def _line(r: Result) -> str:
    left = f"{r.shape:16s} {r.tokens:6d} {r.implementation:20s} {r.relative_error:8.1e}"
    if not r.checked:
        return f"{left} above the allowed {r.allowed_error:.1e}: not timed"
    peak = f"{100 * r.share_of_peak:7.1f}%" if r.share_of_peak else f"{'-':>8s}"
    spread = f"({r.fastest:.0f} - {r.slowest:.0f})"
    return (
        f"{left} {r.microseconds:10.1f} {spread:>19s} {r.tflops:8.1f} {peak} {r.weights_gbs:12.0f} {r.wire_gbs:10.0f} "
        f"{r.temporary_mib:9.0f} {r.dropped_rows:8d}"
    )
