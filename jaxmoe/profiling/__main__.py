"""`python -m jaxmoe.profiling timeline [flags]`, `ends [flags]`, or `budget [flags]`: where the time of a layer goes.

`timeline` runs a layer or reads a recording and shows all of it, `ends` when blocks were through the steps of its two
ends; `budget` prints a row for each shape and number of tokens, microseconds that add up to the length of the launch.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags

import jaxmoe
from jaxmoe.bench import peaks, shapes
from jaxmoe.bench.check import compare, worst_of
from jaxmoe.bench.gradient_check import make_gradient_inputs
from jaxmoe.bench.inputs import arguments_of_call, copies_of, make_inputs, random_experts
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.options import DTYPES, NARROW, ROUTINGS, narrow_of, wide_dtype_of
from jaxmoe.bench.passes import Results, function_of
from jaxmoe.options import Arguments
from jaxmoe.profiling import budget, ends, summary, timeline
from jaxmoe.testing import RoutingKind, use_virtual_devices

_SHAPE = flags.DEFINE_multi_string(
    "shape",
    ["deepseek-v3"],
    "A name in jaxmoe/bench/shapes.py, or [tokens per rank,]hidden width,intermediate width,experts,experts per token. "
    "Several of budget, by names with commas between or by repeating the flag.",
)
_TOKENS = flags.DEFINE_list("tokens", ["1024"], "Tokens per rank; not for shapes that name them. Several of budget.")
_PLAIN = flags.DEFINE_float(
    "plain",
    None,
    "Of budget: TFLOP/s of a plain product, what `python -m jaxmoe.bench peaks` sustains. Where not set, its burst.",
)
_EP = flags.DEFINE_integer("ep", 0, "Ranks over which the experts are spread; 0 is all devices.", lower_bound=0)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "bf16",
    [*DTYPES, *NARROW],
    "Of tokens and weights, or BF16 tokens beside experts in 8 or 4 bits, as the benchmark's --dtype. On a GPU kernels "
    "that decode experts ahead of their rows record nothing.",
)
_ROUTING = flags.DEFINE_enum("routing", "uniform", ROUTINGS, "How tokens choose experts.")
_PASS = flags.DEFINE_enum(
    "pass",
    "forward",
    ["forward", "backward"],
    "What runs: the layer, or all its gradients from the inputs and the gradient of the output alone, as the "
    "benchmark's --pass. A recording that is read says itself of which pass it is.",
)
_RUNS = flags.DEFINE_integer("runs", 10, "Calls back to back; the last one is shown.", lower_bound=1)
_SAVE = flags.DEFINE_string("save", None, "Write the recording to this .npz file.")
_READ = flags.DEFINE_string("read", None, "Read such a file instead of running a layer.")
_PERFETTO = flags.DEFINE_string("perfetto", None, "Write a trace for https://ui.perfetto.dev (.json or .json.gz).")
_BLOCKS = flags.DEFINE_integer("blocks", None, "Thread blocks of each rank in the trace; all where not set.")
_PICTURE = flags.DEFINE_string("picture", None, "Write a picture of one rank (.png or .svg); needs matplotlib.")
_RANK = flags.DEFINE_integer("rank", 0, "Which rank the picture shows.", lower_bound=0)
_TITLE = flags.DEFINE_string("title", None, "Title of the picture; what was run where not set.")


# Flags of one recording, of which a table of budgets has many, and of the table alone.
_OF_A_RECORDING = ("save", "read", "perfetto", "blocks", "picture", "rank", "title")
_OF_BUDGETS = ("plain",)


def main(argv: list[str]) -> int:
    """Runs what the flags ask for; returns the exit status."""
    if argv[1:] not in (["timeline"], ["ends"], ["budget"]):
        raise app.UsageError(
            f"name what to show: python -m jaxmoe.profiling timeline [flags], ends or budget; got {argv[1:]}"
        )
    (name,) = argv[1:]
    for flag in _OF_A_RECORDING if name == "budget" else _OF_BUDGETS:
        if flags.FLAGS[flag].present:
            others = "timeline and ends" if name == "budget" else "budget"
            raise app.UsageError(f"--{flag} is of {others}, and {name} makes nothing of it. Leave it out.")
    try:
        if name == "budget":
            return _print_budgets()
        return _show(name)
    except (ValueError, NotImplementedError, OSError) as error:
        sys.exit(f"jaxmoe profiling: {error}")


def _show(name: str) -> int:
    """Prints `timeline` or `ends` of a recording, and writes the files that the flags name."""
    for flag in (_SAVE, _PERFETTO, _PICTURE):
        if flag.value and not (folder := Path(flag.value).absolute().parent).is_dir():
            raise ValueError(f"--{flag.name}={flag.value}: there is no folder {folder}. Make it, or name another one.")
    if _READ.value:
        recorded = timeline.load(_READ.value)
        title = f"{_READ.value}, {recorded[0].pass_name} pass"
    else:
        recorded, title, _ = _record(*_one_case())
    print(title)
    for each in recorded:
        if name == "ends":
            print("", *ends.table(each), sep="\n")
            continue
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
            raise ValueError(f"--rank={_RANK.value}: recorded are {[each.rank for each in recorded]}.")
        picture.draw(chosen[0], _PICTURE.value, title=title if _TITLE.value is None else _TITLE.value)
    return 0


def _print_budgets() -> int:
    cases, all_tokens = _cases(), _tokens()
    print(budget.header(), flush=True)
    for case in cases:
        for tokens in (case.tokens,) if case.tokens else all_tokens:
            recorded, _, rank_flops = _record(case, tokens)
            known = peaks.known(jax.devices()[0].device_kind)
            precision = narrow_of(_DTYPE.value).precision
            rate = _PLAIN.value or (known.product(precision) if known else None)
            found = [budget.budget(each, rank_flops[each.rank], rate) for each in recorded]
            print(budget.line(case.name, tokens, found), flush=True)
    return 0


def _tokens() -> list[int]:
    given = f"--tokens={','.join(_TOKENS.value)}"
    try:
        numbers = [int(text) for text in _TOKENS.value]
    except ValueError:
        raise ValueError(f"{given} must be whole numbers with commas between.") from None
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{given}: a rank needs at least one token.")
    return numbers


def _cases() -> list[shapes.Case]:
    return [case for text in _SHAPE.value for case in shapes.parse(text)]


def _one_case() -> tuple[shapes.Case, int]:
    cases, tokens = _cases(), _tokens()
    if len(cases) != 1 or len(tokens) != 1:
        raise ValueError(f"--shape={_SHAPE.value} --tokens={_TOKENS.value}: a timeline is of one of each.")
    return cases[0], cases[0].tokens or tokens[0]


def _record(case: shapes.Case, tokens: int) -> tuple[list[timeline.Timeline], str, list[float]]:
    """Returns the launches of all ranks of this process, what was run, and the operations of each rank's rows."""
    block, precision, accumulation, through_e4m3 = narrow_of(_DTYPE.value)
    if block is not None and _PASS.value != "forward":
        raise ValueError(f"--dtype={_DTYPE.value} has no gradients of experts: --pass=forward, or --dtype=bf16.")
    use_virtual_devices(max(_EP.value, 1))  # where JAX finds no GPU
    mesh = make_mesh(_EP.value or jax.device_count())
    ranks = mesh.size
    dtype = wide_dtype_of(_DTYPE.value)
    experts = random_experts(case.shape, mesh, dtype, block, through_e4m3=through_e4m3)
    routing_kind: RoutingKind = _ROUTING.value  # pyright: ignore[reportAssignmentType]
    inputs = make_inputs(
        case.shape, experts, tokens, routing_kind, mesh, precision=precision, accumulation=accumulation
    )
    gradients = make_gradient_inputs(inputs, mesh) if _PASS.value == "backward" else None
    cotangents = (None,) * len(inputs.sets) if gradients is None else gradients.cotangents

    def layer(arguments: Arguments) -> jax.Array:
        return jaxmoe.moe_layer(
            *arguments[:4], mesh=mesh, implementation="megakernel", precision=precision, accumulation=accumulation
        )

    function = jax.jit(function_of(_PASS.value, layer))  # pyright: ignore[reportArgumentType]
    compiled = function.lower(inputs.sets[0]._replace(experts=experts), cotangents[0]).compile()
    copies = copies_of(experts, inputs.weight_copies)

    def call(number: int) -> Results:
        return compiled(arguments_of_call(inputs.sets, copies, number), cotangents[number % len(cotangents)])

    def calls() -> Results:
        results = Results()
        for number in range(_RUNS.value):
            results = call(number)  # alone: gradients take as much memory as the weights
        return results

    # One set after the other, for the same reason.
    errors = [compare(call(number), number, inputs, gradients, mesh) for number in range(len(inputs.sets))]
    piece, error, allowed, is_right = worst_of(errors)
    if not is_right:
        raise SystemExit(f"relative error {error:.1e} of {piece} is more than the allowed {allowed:.1e}: nothing shown")
    recorded = timeline.record(calls, pass_name=_PASS.value)
    device = jax.devices()[0].device_kind
    what = f"{case.name}, {_PASS.value} pass, {tokens} tokens per rank, {ranks} x {device}, {_DTYPE.value}"
    # The last call is the one that is shown.
    routing = inputs.routings[(_RUNS.value - 1) % len(inputs.routings)]
    projections = inputs.shape.projections
    # Backward: those into h again, gradients of h and of the tokens, and of all matrices.
    products = projections + 1 if _PASS.value == "forward" else 3 * projections + 2
    of_row = 2.0 * products * inputs.shape.hidden * inputs.shape.intermediate
    rank_flops = [of_row * routing.rows(rank) for rank in range(ranks)]
    return recorded, f"{what}, {_ROUTING.value} routing, relative error {error:.1e}", rank_flops


if __name__ == "__main__":
    app.run(main)
