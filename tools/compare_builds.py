"""Times builds of the kernels in turns, on the same GPUs and the same inputs, and checks and compares what they return.

Usage: python tools/compare_builds.py before=FILE after=FILE --case=mxfp4-a16:64,2880,2880,64,4 [--case=...]

A FILE is an extension module: jaxmoe/_cuda.*.so, or what tools/link_kernels.py makes (on CPUs it is _native). Without
"=FILE" a name stands for the installed one. A case is a --dtype and a --shape of `python -m jaxmoe.bench layer`: tokens
per rank, hidden width, intermediate width, experts in all, experts per token.

Every round runs each build in a process of its own: a program of some 32 calls one after the other, in turn with other
tokens, and other copies of the weights where few would stay in L2. An addition of tokens lies between two calls, as
between layers. A line is printed when a process ends: its medians, case by case, and how long it took. At last come
tables: microseconds of a call, the median over rounds and the medians of the fastest and the slowest round, the ratio
to the first build, the error of sampled tokens against sums in float32 (of the first round), and whether the output
has the bits of the first build's, or how far it is from them. The exit status is 1 where a build fails, or has a
larger error than the same maths in low precision may have.

With --results=FOLDER it is a program of one process, as Nsight Compute wants it (tools/warp_stalls.py).
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CALLS = 32  # of a program, or a few more
INSTALLED = ""
CACHES_EVERYTHING = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}


@dataclasses.dataclass(frozen=True)
class Build:
    """A name, and the file of its extension module; `INSTALLED` is that of the environment."""

    name: str
    file: str

    @classmethod
    def of(cls, text: str) -> "Build":
        """Reads NAME or NAME=FILE."""
        name, _, file = text.partition("=")
        return cls(name, file)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A build in one round.

    Args:
      microseconds: of a call, block by block.
      output: of the first set of tokens.
      error: of its sampled tokens; `None` where the round is not checked.
      allowed: the error that they may have.
    """

    microseconds: tuple[float, ...]
    output: np.ndarray
    error: float | None = None
    allowed: float | None = None

    @property
    def right(self) -> bool:
        """Whether nothing is known to be wrong with it; NaN is."""
        return bool(np.isfinite(self.output).all()) and (
            self.error is None or self.allowed is None or self.error <= self.allowed
        )


def parse_case(text: str) -> tuple[str, Any]:
    """Returns the dtype and the `shapes.Case` of a --case. Raises `ValueError` where it is none."""
    from jaxmoe.bench import shapes
    from jaxmoe.bench.options import DTYPES, NARROW, check_dtype

    dtype, colon, numbers = text.partition(":")
    needed = (
        f"--case={text} needs a --dtype, a colon and five numbers: tokens per rank, hidden width, intermediate width, "
        "experts, experts per token."
    )
    if not colon or numbers.count(",") != 4:
        raise ValueError(needed)
    try:
        check_dtype(dtype, (*DTYPES, *NARROW))
        case = shapes.parse(numbers)[0]
    except ValueError as error:
        raise ValueError(f"--case={text}: {error}") from None
    if case.tokens is None:  # names
        raise ValueError(needed)
    return dtype, case


# ---------------------------------------------------------------- in the process of a build


def put_in_place(file: str) -> None:
    """Makes `file` the extension module that its name says, before jaxmoe loads the installed one."""
    name = f"jaxmoe.{Path(file).name.split('.')[0]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no extension module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def measure(case: str, ranks: int, blocks: int, seconds: float, check: bool) -> Measured:
    """Times a case with what is loaded."""
    # Not before put_in_place().
    import jax
    import jax.numpy as jnp

    import jaxmoe
    from jaxmoe import native
    from jaxmoe import precision as precisions
    from jaxmoe.bench import inputs
    from jaxmoe.bench.layer import make_mesh
    from jaxmoe.bench.options import narrow_of, wide_dtype_of
    from jaxmoe.bench.timing import time_blocks

    dtype, parsed = parse_case(case)
    shape, narrow, wide = parsed.shape, narrow_of(dtype), wide_dtype_of(dtype)
    mesh = make_mesh(ranks or jax.device_count())
    experts = inputs.random_experts(shape, mesh, wide, narrow.block, through_e4m3=narrow.through_e4m3)
    precision = precisions.resolve(narrow.precision, experts, wide)
    made = [inputs.random_arguments(shape, parsed.tokens, "uniform", mesh, wide, seed) for seed in range(inputs.SETS)]
    sets = [arguments[:3] for arguments, _ in made]
    of_rank = sum(array.nbytes for array in jax.tree.leaves(experts)) // mesh.size
    copies = inputs.copies_of(experts, inputs.weight_copies(of_rank))
    layer = functools.partial(
        jaxmoe.moe_layer,
        mesh=mesh,
        implementation="megakernel",
        precision=precision,
        accumulation=narrow.accumulation,
    )
    of_turn = max(len(sets), len(copies))  # calls until every set and every copy has come
    turns = -(-CALLS // of_turn)

    @jax.jit
    def program(sets, copies):
        def turn(_, y):
            for call in range(of_turn):
                x, ids, weights = sets[call % len(sets)]
                # Each call needs the one before, as layers do. A barrier is not enough: XLA left out all but the last.
                y = layer(x + 0 * y, ids, weights, copies[call % len(copies)])
            return y

        return jax.lax.fori_loop(0, turns, turn, jnp.zeros_like(sets[0][0]))

    compiled = program.lower(sets, copies).compile()
    in_program = (compiled.as_text() or "").count(f'"{native.FORWARD}"')
    if in_program < of_turn:
        raise ValueError(f"XLA has made {in_program} calls of {of_turn}.")
    first, ids = made[0][0]._replace(experts=experts), made[0][1]
    y = jax.jit(layer)(*first[:4])
    error = allowed = None
    if check:
        sample = inputs.sample_of(first, ids, mesh, precision)
        error, allowed = inputs.error_of(y, sample, mesh), sample.allowed
    times = time_blocks(lambda _: compiled(sets, copies), blocks, seconds)
    of_calls = tuple(1e6 * each / (turns * of_turn) for each in times)
    return Measured(of_calls, np.asarray(y, np.float32), error, allowed)


def run_here(arguments: argparse.Namespace) -> None:
    """Measures one build; its results go to the folder that the caller has named."""
    (build,) = arguments.builds
    if build.file != INSTALLED:
        put_in_place(build.file)
    for nth, case in enumerate(arguments.case):
        found = measure(case, arguments.ep, arguments.blocks, arguments.seconds, arguments.check)
        np.save(arguments.results / f"{nth}.npy", found.output)
        of_json = {"microseconds": found.microseconds, "error": found.error, "allowed": found.allowed}
        (arguments.results / f"{nth}.json").write_text(json.dumps(of_json))


# ---------------------------------------------------------------- in the process that compares


def run_apart(build: Build, arguments: argparse.Namespace, check: bool, compiled: str) -> list[Measured] | str:
    """Measures all cases with a build in a process of its own; returns what is wrong where it fails.

    `compiled` is a folder for compiled programs. They call kernels by name, so those of one build serve the others: a
    process after the first takes seconds instead of half a minute.
    """
    with tempfile.TemporaryDirectory() as results:
        options = [f"--{name}={getattr(arguments, name)}" for name in ("ep", "blocks", "seconds")]
        options += [f"--case={case}" for case in arguments.case] + [f"--results={results}"] + ["--check"] * check
        command = [sys.executable, __file__, f"{build.name}={build.file}", *options]
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=arguments.timeout,
                check=False,
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": compiled} | CACHES_EVERYTHING,
            )
        except subprocess.TimeoutExpired:
            return f"it ran for more than {arguments.timeout:g} s"
        if ended.returncode != 0:
            said = ended.stderr.strip().splitlines()
            return said[-1] if said else f"it ended with status {ended.returncode}"

        def read(nth: int) -> Measured:
            of_json = json.loads((Path(results) / f"{nth}.json").read_text())
            return Measured(
                tuple(of_json["microseconds"]),
                np.load(Path(results) / f"{nth}.npy"),
                of_json["error"],
                of_json["allowed"],
            )

        return [read(nth) for nth in range(len(arguments.case))]


def describe(found: Measured, first: Measured) -> str:
    """What to say of an output, and of it beside that of the first build."""
    if not np.isfinite(found.output).all():
        return "not all of it are numbers"
    error = "not checked" if found.error is None else f"error {found.error:.1e}"
    if not found.right:
        return f"{error}, above {found.allowed:.1e}"
    if np.array_equal(found.output, first.output):
        return f"{error}, same bits"
    difference = np.linalg.norm(found.output - first.output) / np.linalg.norm(first.output)
    return f"{error}, differs by {difference:.1e}"


def table(case: str, rounds: Sequence[dict[str, Measured]]) -> Iterator[str]:
    """The lines of a case; each round has all builds, in the order of the table."""
    names = list(rounds[0])
    medians = {name: [statistics.median(each[name].microseconds) for each in rounds] for name in names}
    of_first = statistics.median(medians[names[0]])
    yield f"{case}, {len(rounds)} rounds"
    for name, found in rounds[0].items():
        median, fastest, slowest = statistics.median(medians[name]), min(medians[name]), max(medians[name])
        times = f"{median:9.1f} us  ({fastest:.1f} to {slowest:.1f})  {median / of_first:6.3f} x"
        yield f"  {name:12} {times}  {describe(found, rounds[0][names[0]])}"


def compare(arguments: argparse.Namespace, compiled: str) -> int:
    """Prints the tables; returns the exit status. `compiled` is what `run_apart` wants."""
    rounds: list[dict[str, list[Measured]]] = []
    for nth in range(arguments.rounds):
        found: dict[str, list[Measured]] = {}
        for build in arguments.builds:
            start = time.perf_counter()
            measured = run_apart(build, arguments, nth == 0, compiled)
            if isinstance(measured, str):
                print(f"{build.name} failed: {measured}")
                return 1
            found[build.name] = measured
            # At once: a comparison that is killed has said what it found.
            times = " ".join(f"{statistics.median(each.microseconds):.1f}" for each in measured)
            print(f"round {nth + 1}  {build.name:12} {times} us  ({time.perf_counter() - start:.0f} s)", flush=True)
        rounds.append(found)
    for nth, case in enumerate(arguments.case):
        print(*table(case, [{name: cases[nth] for name, cases in each.items()} for each in rounds]), sep="\n")
    return 0 if all(each.right for of_round in rounds for cases in of_round.values() for each in cases) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", type=Build.of, metavar="NAME[=FILE]", help="the first is compared with")
    parser.add_argument("--case", action="append", required=True, metavar="DTYPE:SHAPE")
    parser.add_argument("--ep", type=int, default=0, help="ranks; 0 for all devices")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=5, help="of a build in a round, whose median counts")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a block")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a process of a build is killed")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="measure the one build here, and leave there what is found"
    )
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.results:
        arguments.results.mkdir(parents=True, exist_ok=True)
        run_here(arguments)
        return
    if len({build.name for build in arguments.builds}) != len(arguments.builds):
        parser.error("two builds have the same name")
    for name in ("rounds", "blocks"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}={getattr(arguments, name)}: at least one is measured")
    for case in arguments.case:
        try:
            parse_case(case)
        except ValueError as error:
            parser.error(str(error))
    with tempfile.TemporaryDirectory() as compiled:
        status = compare(arguments, compiled)
    sys.exit(status)


if __name__ == "__main__":
    main()
