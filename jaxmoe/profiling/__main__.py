"""`python -m jaxmoe.profiling timeline [flags]`: runs a layer, or reads a recording, and shows where the time goes."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench import shapes
from jaxmoe.profiling import summary, timeline
from jaxmoe.testing import make_ids, relative_error, use_virtual_devices

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}

_SHAPE = flags.DEFINE_string(
    "shape", "deepseek-v3", "A name in jaxmoe/bench/shapes.py, or hidden,intermediate,experts,top_k."
)
_TOKENS = flags.DEFINE_integer("tokens", 1024, "Tokens per rank.", lower_bound=1)
_EP = flags.DEFINE_integer("ep", 0, "Ranks over which the experts are spread; 0 is all devices.", lower_bound=0)
_DTYPE = flags.DEFINE_enum("dtype", "bf16", list(DTYPES), "Of tokens and weights.")
_ROUTING = flags.DEFINE_enum("routing", "uniform", ["uniform", "zipf", "one-hot"], "How tokens choose experts.")
_RUNS = flags.DEFINE_integer("runs", 10, "Calls back to back; the last one is shown.", lower_bound=1)
_CHECK = flags.DEFINE_bool("check", True, "Compare the output with that of 'xla'; nothing is shown where they differ.")
_SAVE = flags.DEFINE_string("save", None, "Write the recording to this .npz file.")
_READ = flags.DEFINE_string("read", None, "Read such a file instead of running a layer.")
_PERFETTO = flags.DEFINE_string("perfetto", None, "Write a trace for https://ui.perfetto.dev (.json or .json.gz).")
_BLOCKS = flags.DEFINE_integer("blocks", None, "Thread blocks of each rank in the trace; all where not set.")
_PICTURE = flags.DEFINE_string("picture", None, "Write a picture of one rank (.png or .svg); needs matplotlib.")
_RANK = flags.DEFINE_integer("rank", 0, "Which rank the picture shows.", lower_bound=0)
_TITLE = flags.DEFINE_string("title", None, "Title of the picture; what was run where not set.")


def main(argv: list[str]) -> int:
    """Runs what the flags ask for; returns the exit status."""
    if argv[1:] != ["timeline"]:
        raise app.UsageError(f"name what to show: python -m jaxmoe.profiling timeline [flags]; got {argv[1:]}")
    if _READ.value:
        recorded, title = timeline.load(_READ.value), _READ.value
    else:
        recorded, title = _record()
    print(title)
    for each in recorded:
        print(summary.summarize(each))
        low, high = each.clock_ghz.min(), each.clock_ghz.max()
        print(f"  {len(each.events)} events of {len(each.sms)} blocks; clocks {low:.3f} to {high:.3f} GHz")
    if _SAVE.value:
        timeline.save(recorded, _SAVE.value)
    if _PERFETTO.value:
        timeline.write_perfetto(recorded, _PERFETTO.value, blocks=_BLOCKS.value)
    if _PICTURE.value:
        from jaxmoe.profiling import picture  # the one part that needs matplotlib

        chosen = [each for each in recorded if each.rank == _RANK.value]
        if not chosen:
            raise app.UsageError(f"--rank={_RANK.value}: recorded are {[each.rank for each in recorded]}.")
        picture.draw(chosen[0], _PICTURE.value, title=title if _TITLE.value is None else _TITLE.value)
    return 0


def _record() -> tuple[list[timeline.Timeline], str]:
    use_virtual_devices(max(_EP.value, 1))  # where JAX finds no GPU
    shape, tokens, dtype = shapes.parse(_SHAPE.value), _TOKENS.value, DTYPES[_DTYPE.value]
    ranks = _EP.value or jax.device_count()
    mesh = jax.make_mesh((ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    split = NamedSharding(mesh, P("expert"))

    def init(key: jax.Array) -> tuple[jaxmoe.Experts, jax.Array]:
        experts = jaxmoe.Experts.init(key, shape.num_experts, shape.hidden, shape.intermediate, dtype=dtype)
        x = jax.random.normal(jax.random.key(1), (tokens * ranks, shape.hidden), jnp.float32)
        return experts, x.astype(dtype)

    experts, x = jax.jit(init, out_shardings=split)(jax.random.key(0))
    rng = np.random.default_rng(0)
    numbers = make_ids(rng, tokens * ranks, shape.num_experts, shape.top_k, _ROUTING.value)  # pyright: ignore
    raw = rng.random(numbers.shape, np.float32) + 0.1
    ids, weights = jax.device_put((numbers, raw / raw.sum(-1, keepdims=True)), split)

    def layer(implementation: Literal["megakernel", "xla"]) -> Callable[[], jax.Array]:
        call = functools.partial(jaxmoe.moe_layer, mesh=mesh, implementation=implementation)
        compiled = jax.jit(call).lower(x, ids, weights, experts).compile()
        return functools.partial(compiled, x, ids, weights, experts)

    run = layer("megakernel")
    y = run()
    recorded = timeline.record(lambda: [run() for _ in range(_RUNS.value)])
    checked = "not checked"
    if _CHECK.value:
        # They round at different places and add up in different orders.
        error = relative_error(y, layer("xla")())
        allowed = max(2 * float(jnp.finfo(dtype).eps), 1e-5)
        if not error <= allowed:
            raise SystemExit(f"relative error against 'xla' is {error:.1e}, more than {allowed:.1e}: nothing is shown")
        checked = f"relative error against 'xla' {error:.1e}"
    device = jax.devices()[0].device_kind
    what = f"{_SHAPE.value}, {tokens} tokens per rank, {ranks} x {device}, {_DTYPE.value}, {_ROUTING.value} routing"
    return recorded, f"{what}, {checked}"


if __name__ == "__main__":
    app.run(main)
