"""The flags of `python -m jaxmoe.bench`, and the options that each of its commands makes of them."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from absl import flags

from jaxmoe.bench import shapes
from jaxmoe.bench.exchange import ExchangeOptions
from jaxmoe.bench.options import BASELINE, DTYPES, NARROW, ROUNDED, ROUTINGS, BesideOptions, Options, Sweep
from jaxmoe.bench.passes import PASSES, Pass
from jaxmoe.bench.scan import ScanOptions
from jaxmoe.exchange.check import check_multiprocessors
from jaxmoe.experts import LAYOUTS
from jaxmoe.implementations import IMPLEMENTATIONS
from jaxmoe.network.plan import WAYS, NetworkPlan

Value = TypeVar("Value")

_SHAPE = flags.DEFINE_multi_string(
    "shape",
    ["mixtral-8x7b"],
    f"Shapes: NAME[,NAME...] with names of {', '.join(shapes.SHAPES)}; or T,D,F,E,K, the numbers of tokens per rank, "
    "hidden width, intermediate width, experts and experts per token; or D,F,E,K with the tokens of --tokens. May be "
    "repeated.",
)
_TOKENS = flags.DEFINE_list("tokens", ["8192"], "Tokens per rank; not for shapes T,D,F,E,K.")
_EP = flags.DEFINE_list(
    "ep",
    ["0"],
    "Ranks over which the experts are spread; 0 is all devices. Of several numbers each has its lines, in this order, "
    "and those behind the first number above 1 say how time scales from there. On CPUs as many devices as the largest "
    "are made.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "bf16",
    [*DTYPES, *NARROW],
    "Of tokens and weights. Of layer also BF16 tokens with experts in 8 or 4 bits: fp8-block, a float32 scale for "
    "128 x 128 of them, and fp8-channel, one for each output, where tokens and h are rounded to 8 bits too; "
    "fp8-static, one for each matrix, for all tokens and for all h, and fp8-static-fast, the same with sums of the "
    "tensor cores; w8a16, 128 x 128 decoded to BF16; mxfp4-a16 and "
    "nvfp4-a16, 4 bits decoded to BF16; mxfp4-a8 and nvfp4-a8, 4 bits beside tokens and h in 8, through E4M3 where "
    "experts have many rows (NVFP4 always), and mxfp4-a8-registers never. In 8 or 4 bits --pass=forward and frozen are "
    "measured.",
)
_IMPLEMENTATION = flags.DEFINE_list(
    "implementation", ["xla"], f"Any of {', '.join(IMPLEMENTATIONS)} (of moe_layer) and {BASELINE}."
)
_PASS = flags.DEFINE_list(
    "pass",
    ["forward"],
    "What is timed, any of forward; backward: all gradients, from the inputs and the gradient of the output alone; "
    "both: output and gradients in one call; frozen: as backward, but of tokens and routing weights alone, as where "
    "adapters or a router are trained. Plans are swept of forward passes, KernelPlan, and of backward passes, "
    "KernelPlan.backward.",
)
_ROUTING = flags.DEFINE_enum(
    "routing",
    "uniform",
    ROUTINGS,
    "Of layer: how tokens choose experts; even: by chance as well, but so that all have as many rows.",
)
_UNIT_TILES = flags.DEFINE_list("unit-tiles", [], "Plans to sweep: KernelPlan.unit_tiles, in all combinations.")
_LAG_UNITS = flags.DEFINE_list("lag-units", [], "Plans to sweep: KernelPlan.lag_units, in all combinations.")
_RING_TILES = flags.DEFINE_list(
    "ring-tiles",
    [],
    "Plans to sweep: KernelPlan.ring_tiles. Without it the default plan's, or the fewest that a plan needs.",
)
_CHUNK_ROWS = flags.DEFINE_list("chunk-rows", [], "Plans to sweep: KernelPlan.chunk_rows, in all combinations.")
_KEEP_TOKENS = flags.DEFINE_list("keep-tokens", [], "Plans to sweep: KernelPlan.keep_tokens, of 0 and 1.")
_SHARE_COLUMNS = flags.DEFINE_list("share-columns", [], "Plans to sweep: KernelPlan.share_columns, of 0 and 1.")
_SUM_AT_EXPERTS = flags.DEFINE_list("sum-at-experts", [], "Plans to sweep: KernelPlan.sum_at_experts, of 0 and 1.")
_WEIGHT_SLOTS = flags.DEFINE_list(
    "weight-slots", [], "Plans to sweep: KernelPlan.weight_slots, in all combinations; 0 is decoding in registers."
)
_SEGMENT_TILES = flags.DEFINE_list(
    "segment-tiles", [], "Plans to sweep: KernelPlan.segment_tiles of a backward pass, in all combinations."
)
_RESIDUALS = flags.DEFINE_enum(
    "residuals", None, ["recompute", "save"], "Of moe_layer in --pass=both: what is kept for the backward pass."
)
_RANKS_PER_HOST = flags.DEFINE_integer(
    "ranks-per-host",
    None,
    "Also measure the layer as if so many of the ranks were on one host: XLA's collectives move tokens between those. "
    "Of beside the layer is run so alone, with one plan.",
    lower_bound=1,
)
_WAY = flags.DEFINE_multi_enum("way", [], WAYS, "Of --ranks-per-host: NetworkPlan.way; may be repeated.")
_CHUNKS = flags.DEFINE_list("chunks", [], "Of --ranks-per-host: NetworkPlan.chunks, in all combinations.")
_ROUND_TOKENS = flags.DEFINE_list("round-tokens", [], "Of --ranks-per-host: NetworkPlan.round_tokens, likewise.")
_FUSED = flags.DEFINE_list(
    "fused", [], f"Also measure experts whose gate and up are one array, any of {', '.join(LAYOUTS)}."
)
_BLOCKS = flags.DEFINE_integer("blocks", 7, "Timed blocks, of which the median counts.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 0.3, "Approximate length of a block.", lower_bound=0.0)
REST = flags.DEFINE_float(
    "rest",
    0.0,
    "Seconds of idleness before each block: short blocks with a rest show what a cool chip does, as many published "
    "figures do; without it a block is like a stretch of training.",
    lower_bound=0.0,
)
_COPIES = flags.DEFINE_boolean(
    "copies", False, "Arrays are copied from each device to the next one while a layer is timed, over the same links."
)
_TERMS = flags.DEFINE_boolean("terms", False, "Also print the bytes behind HBM and NVLink GB/s, term by term.")
_KERNELS = flags.DEFINE_integer("kernels", 0, "Also print that many of the longest GPU kernels.", lower_bound=0)
_PROGRAMS = flags.DEFINE_list(
    "programs",
    [],
    "Of beside: what the layer runs beside, everything where it is not given. --tokens is then 64,1024,8192 and "
    "--shape the widths of qwen3-30b-a3b with 32 experts per rank where they are not given, --implementation what "
    "moe_layer chooses; one --ep and one shape.",
)
_PRECISION = flags.DEFINE_enum(
    "precision",
    None,
    ROUNDED,
    "Of beside: that of moe_layer, which rounds the wide experts in every call.",
)
_LAYERS = flags.DEFINE_integer(
    "layers",
    16,
    "Of scan: how many layers, each with weights of its own. It takes --shape, --tokens (64,1024,8192 where it is not "
    "given), one --ep, --dtype, one --implementation and --seconds.",
    lower_bound=1,
)
_WITH_EXPERTS = flags.DEFINE_boolean(
    "with_experts", False, "exchange: halves of the layer, and micro-batches in turn, with experts in between."
)
_MULTIPROCESSORS = flags.DEFINE_integer(
    "multiprocessors", None, "exchange --with_experts: of what runs beside experts, an even number of 2 to 64."
)
_ROUNDS = flags.DEFINE_boolean(
    "rounds", False, "beside: times every program in rounds inside one jit too, where no host stands in between."
)
_JSON = flags.DEFINE_string("json", None, "File to which the results are added, one JSON object a line.")


def from_flags() -> Options:
    """Returns the options of the command line.

    Raises:
      ValueError: shapes, implementations or numbers that cannot be.
    """
    return Options(
        cases=tuple(case for text in _SHAPE.value for case in shapes.parse(text)),
        tokens=_integers("tokens", _TOKENS.value),
        ranks=_integers("ep", _EP.value),
        dtype=_DTYPE.value,
        implementations=tuple(_IMPLEMENTATION.value),
        passes=_passes(_PASS.value),
        residuals=_RESIDUALS.value,
        routing=_ROUTING.value,  # pyright: ignore[reportArgumentType]
        sweep=Sweep(
            _integers("unit-tiles", _UNIT_TILES.value),
            _integers("lag-units", _LAG_UNITS.value),
            _integers("ring-tiles", _RING_TILES.value),
            _integers("chunk-rows", _CHUNK_ROWS.value),
            _booleans("keep-tokens", _KEEP_TOKENS.value),
            _booleans("share-columns", _SHARE_COLUMNS.value),
            _booleans("sum-at-experts", _SUM_AT_EXPERTS.value),
            _integers("segment-tiles", _SEGMENT_TILES.value),
            _integers("weight-slots", _WEIGHT_SLOTS.value),
        ),
        blocks=_BLOCKS.value,
        seconds=SECONDS.value,
        rest=REST.value,
        copies=_COPIES.value,
        terms=_TERMS.value,
        kernels=_KERNELS.value,
        networks=_networks(),
        fused=tuple(_FUSED.value),
        json=Path(_JSON.value) if _JSON.value else None,
    )


def _networks() -> tuple[NetworkPlan, ...]:
    ways, chunks, rounds = (
        _WAY.value,
        _integers("chunks", _CHUNKS.value),
        _integers("round-tokens", _ROUND_TOKENS.value),
    )
    if _RANKS_PER_HOST.value is None:
        if ways or chunks or rounds:
            raise ValueError(
                "--way, --chunks and --round-tokens are of several hosts. Add --ranks-per-host, or leave them out."
            )
        return ()
    values = itertools.product(ways or (None,), chunks or (None,), rounds or (None,))
    return tuple(NetworkPlan(_RANKS_PER_HOST.value, *value) for value in values)  # pyright: ignore[reportArgumentType]


def beside_from_flags() -> BesideOptions:
    """Returns the options of `beside` on the command line; flags whose defaults are for `layer` count where given.

    Raises:
      ValueError: programs, sizes or numbers that cannot be, or several of what one is taken of.
    """
    _check_uniform()
    default = BesideOptions()
    return BesideOptions(
        programs=tuple(_PROGRAMS.value),
        tokens=_integers("tokens", _TOKENS.value) if _TOKENS.present else default.tokens,
        ranks=_one("ep", _integers("ep", _EP.value)),
        shape=_one("shape", [case for text in _SHAPE.value for case in shapes.parse(text)]).shape
        if _SHAPE.present
        else None,
        dtype=_DTYPE.value,
        precision=_PRECISION.value,  # pyright: ignore[reportArgumentType]
        implementation=_one("implementation", _IMPLEMENTATION.value) if _IMPLEMENTATION.present else None,
        network=_one("way, --chunks, --round-tokens", networks) if (networks := _networks()) else None,
        seconds=SECONDS.value,
        rounds=_ROUNDS.value,
        json=Path(_JSON.value) if _JSON.value else None,
    )


def scan_from_flags() -> ScanOptions:
    """Returns the options of `scan` on the command line; flags whose defaults are for `layer` count where given.

    Raises:
      ValueError: shapes or numbers that cannot be, or several of what one is taken of.
    """
    return ScanOptions(**_in_a_scan(ScanOptions.tokens), dtype=_DTYPE.value, layers=_LAYERS.value)


def exchange_from_flags() -> ExchangeOptions:
    """Returns the options of `exchange` on the command line, as `scan_from_flags` does."""
    check_multiprocessors("--multiprocessors", _MULTIPROCESSORS.value)
    if _DTYPE.value not in DTYPES:
        raise ValueError(f"--dtype={_DTYPE.value}: exchange takes {' or '.join(DTYPES)}.")
    return ExchangeOptions(
        **_in_a_scan(ExchangeOptions.tokens),
        dtype=DTYPES[_DTYPE.value],
        with_experts=_WITH_EXPERTS.value,
        multiprocessors=_MULTIPROCESSORS.value,
    )


def products_from_flags() -> tuple[tuple[shapes.Case, ...], int]:
    """Returns the layers of which `peaks` measures the products too, with their tokens, and over how many ranks.

    No layers where no shape is given.
    """
    if not _SHAPE.present:
        return (), 0
    _check_uniform()
    if _DTYPE.value != "bf16":
        raise ValueError(f"--dtype={_DTYPE.value}: peaks measures the products of a layer in bf16. Leave it out.")
    tokens = _integers("tokens", _TOKENS.value)
    cases = [case for text in _SHAPE.value for case in shapes.parse(text)]
    return tuple(
        dataclasses.replace(case, tokens=number)
        for case in cases
        for number in ((case.tokens,) if case.tokens else tokens)
    ), _one("ep", _integers("ep", _EP.value))


def _in_a_scan(tokens: tuple[int, ...]) -> dict[str, Any]:
    """Returns the options that `scan` and `exchange` share, with so many tokens where none are given."""
    _check_uniform()
    tokens = _integers("tokens", _TOKENS.value) if _TOKENS.present else tokens
    ranks = _one("ep", _integers("ep", _EP.value))
    if not tokens or min(tokens) < 1 or ranks < 0:
        raise ValueError(
            f"--tokens={','.join(map(str, tokens))} --ep={ranks}: numbers of at least 1, or --ep=0 for all."
        )
    return {
        "cases": tuple(case for text in _SHAPE.value for case in shapes.parse(text)),
        "tokens": tokens,
        "ranks": ranks,
        "implementation": _one("implementation", _IMPLEMENTATION.value) if _IMPLEMENTATION.present else None,
        "seconds": SECONDS.value,
        "json": Path(_JSON.value) if _JSON.value else None,
    }


def _check_uniform() -> None:
    if _ROUTING.value != "uniform":
        raise ValueError(
            f"--routing={_ROUTING.value} is of layer: scan and exchange measure uniform ids, beside those of a router, "
            "and peaks as many rows of every expert. Leave it out."
        )


def _one(flag: str, values: Sequence[Value]) -> Value:
    if len(values) != 1:
        raise ValueError(f"--{flag}: peaks, beside, scan and exchange take one, and {len(values)} are given.")
    return values[0]


def _passes(values: list[str]) -> tuple[Pass, ...]:
    known: dict[str, Pass] = {name: name for name in PASSES}
    for value in values or [""]:
        if value not in known:
            raise ValueError(f"--pass={value} is not one of {', '.join(PASSES)}.")
    return tuple(known[value] for value in values)


def _booleans(flag: str, values: list[str]) -> tuple[bool, ...]:
    numbers = _integers(flag, values)
    if not {*numbers} <= {0, 1}:
        raise ValueError(f"--{flag}={','.join(values)}: 0, 1 or both with a comma between.")
    return tuple(map(bool, numbers))


def _integers(flag: str, values: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in values)
    except ValueError:
        raise ValueError(f"--{flag}={','.join(values)} must be whole numbers with commas between.") from None
