"""`python -m jaxmoe.bench beside`: the layer in programs that do other work too, and what that costs.

One line for each number of tokens and each of the programs in `beside_programs.py`. Before a program is timed, what it
returns is compared with what its two parts return when each runs for itself: the layer alone, and the program with the
layer's answers given, its other work alone. Both are timed as the program is. What the layer returns has to be the same
bit for bit (of `"megakernel"`), also in the last call that was timed. What it returns alone was compared with the
reference in float32, once for each pass: its output at sampled tokens, and where the pass has gradients those at the
samples of `gradient_check.py`. Without that no time is printed. Where a program takes longer than its parts it is timed
once more in rounds inside one jit (`beside_rounds.py`), which tells the devices' time from the hosts'.

A program that hangs ends through the layer's own limit, `JAXMOE_TIMEOUT_SECONDS`, which the command sets to 10 s where
the user has not. No layer of that group can run after it, so the programs that come next are told as not run.
"""

import concurrent.futures
import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe
from jaxmoe.bench.beside_checks import compare_with_layer, compare_with_work
from jaxmoe.bench.beside_inputs import make_tokens, make_weights, shapes_of_experts
from jaxmoe.bench.beside_layer import Inputs, Outcome, Seen
from jaxmoe.bench.beside_prefetch import Prefetching
from jaxmoe.bench.beside_programs import DATA_AXIS, PROGRAMS, where
from jaxmoe.bench.beside_rounds import in_rounds, time_rounds
from jaxmoe.bench.beside_table import Result, header, is_longer, line
from jaxmoe.bench.gradient_check import errors_of, gradient_sample_of, of_unit_scale
from jaxmoe.bench.inputs import AXIS, error_of, sample_of, whole
from jaxmoe.bench.layer import make_mesh
from jaxmoe.bench.options import BesideOptions
from jaxmoe.bench.passes import Pass, Results, function_of
from jaxmoe.bench.report import append, say
from jaxmoe.bench.shapes import SHAPES, LayerShape
from jaxmoe.bench.windows import time_again_after_a_pause, time_calls
from jaxmoe.options import Arguments

WIDTHS = "qwen3-30b-a3b"
EXPERTS_PER_RANK = 32
# Of `JAXMOE_TIMEOUT_SECONDS` where the user has not set it: far above any call, and a hang is told soon.
TIMEOUT_SECONDS = 10
# Programs are compiled so many at once. With several processes one after the other: XLA lets processes share the tuning
# of one program, and they should come to it in one order.
COMPILED_AT_ONCE = 8
PROGRESS_SECONDS = 10


def run(options: BesideOptions) -> int:
    """Prints the table; returns the exit status, which is 1 where a line has no figures.

    Raises:
      ValueError: sizes or numbers of ranks that cannot be.
    """
    mesh = _make_meshes(options)[False]
    shape, implementation = _shape_of(options, mesh), _implementation(options, mesh)
    say(
        f"{mesh.devices.flat[0].device_kind} x {mesh.size}, {jax.process_count()} process(es), jax {jax.__version__}, "
        f"{options.precision or options.dtype}, {implementation}{_hosts_of(options)}, hidden {shape.hidden}, "
        f"intermediate {shape.intermediate}, {shape.num_experts} experts, top_k {shape.top_k}. Tokens per rank; us per "
        f"call over {options.seconds:g} s."
    )
    say(
        "Checked: the layer returns what it returns alone (megakernel: bit for bit); the rest is equal to that of the "
        "work alone, or as near as this. Layer alone: routing given. Work alone: the layer's results given, its router "
        "included."
    )
    say(header())
    failed = False
    for result in measure(options, progress=say):
        say(line(result))
        failed |= result.failure is not None
        append(options.json, result.to_json())
    return int(failed)


def measure(options: BesideOptions, progress: Callable[[str], None] = lambda _: None) -> Iterator[Result]:
    """Checks and times the programs of the options, for each number of tokens in turn, and yields a line for each.

    With several processes all call it alike, and the failure of a program is raised: the others wait in a collective.

    Args:
      options: what to run.
      progress: is told what happens between lines.

    Raises:
      ValueError: sizes or numbers of ranks that cannot be.
    """
    meshes = _make_meshes(options)
    mesh, of_weights = meshes[False], (options.wide, options.block)
    shape, implementation = _shape_of(options, mesh), _implementation(options, mesh)
    # As many experts per rank in two groups as in one.
    of_groups = dataclasses.replace(shape, num_experts=shape.num_experts // 2)
    weights = {
        groups: make_weights(
            each, of_groups if groups else shape, *of_weights, through_e4m3=options.narrow.through_e4m3
        )
        for groups, each in meshes.items()
    }
    blank = Result(
        program="",
        tokens=0,
        ranks=mesh.size,
        processes=jax.process_count(),
        implementation=implementation,
        device=mesh.devices.flat[0].device_kind,
        jax=jax.__version__,
    )
    config = jaxmoe.RouterConfig.qwen3_moe(top_k=shape.top_k)
    stopped_by = ""
    for tokens in options.tokens:
        benches: dict[bool, _Bench] = {}
        for name in options.programs:
            result = dataclasses.replace(blank, program=name, tokens=tokens)
            groups = PROGRAMS[name].groups
            if stopped_by:
                yield dataclasses.replace(result, failure=f"not run: the layer gave up in {stopped_by}")
                continue
            if groups not in meshes:
                text = f"cannot run: {mesh.size} ranks are not two equal groups. Take an even number, such as --ep=2."
                yield dataclasses.replace(result, failure=text)
                continue
            if not benches:  # all programs at once, so that nothing is compiled between two that are timed
                for of_groups, each in meshes.items():
                    benches[of_groups] = _Bench(each, weights[of_groups], tokens, config, implementation, options)
                    benches[of_groups].compile(progress)
            try:
                result = benches[groups].measure(result)
            except Exception as error:  # whatever a program fails with is its line
                if jax.process_count() > 1:
                    raise
                result = dataclasses.replace(result, failure=f"failed: {_first_line(error)}")
                if _gave_up(error):
                    stopped_by = f"{name} with {tokens} tokens"
            yield result
            gc.collect()  # a failure's frames hold its arrays


class _Bench:
    """What the programs of one mesh and one number of tokens share: inputs, and the layer alone with its time."""

    def __init__(
        self,
        mesh: Mesh,
        weights: Callable[..., Inputs],
        tokens: int,
        config: jaxmoe.RouterConfig,
        implementation: str,
        options: BesideOptions,
    ) -> None:
        self.mesh, self.config, self.implementation, self.options = mesh, config, implementation, options
        self.of_layer: dict[str, Any] = {"implementation": implementation, **options.of_layer}
        self.names = [name for name in options.programs if PROGRAMS[name].groups == (DATA_AXIS in mesh.axis_names)]
        self.split = NamedSharding(mesh, P(mesh.axis_names))
        hidden = weights.keywords["router"].shape[0]  # pyright: ignore[reportFunctionMemberAccess]
        self.inputs = weights(x=make_tokens(self.split, (tokens * mesh.size, hidden), options.wide))
        self.compiled: dict[tuple[str, str], Any] = {}  # or why that could not be compiled
        self.layer_times: dict[tuple[Pass, bool], float] = {}  # and whether the host waits for each call
        self.right: set[Pass] = set()  # those of the layer alone that agree with the reference

    def compile(self, progress: Callable[[str], None]) -> None:
        """Compiles the programs, their other work, and the layer alone."""
        started = told = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(COMPILED_AT_ONCE if jax.process_count() == 1 else 1) as pool:
            futures: dict[tuple[str, str], concurrent.futures.Future[Any]] = {}
            for name in self.names:
                try:
                    lowered = self._lower(name)
                except Exception as error:
                    self.compiled["program", name] = error
                    continue
                for key, each in lowered.items():
                    if key not in futures:
                        options = {} if key[0] == "layer" else dict(PROGRAMS[name].compiler_options)
                        futures[key] = pool.submit(each.compile, compiler_options=options)
            for number, (key, future) in enumerate(futures.items(), 1):
                self.compiled[key] = future.exception() or future.result()
                now = time.perf_counter()
                if number == len(futures) or now - told > PROGRESS_SECONDS:
                    told = now
                    progress(f"    {number} of {len(futures)} functions compiled after {now - started:.0f} s")

    def _lower(self, name: str) -> dict[tuple[str, str], Any]:
        jitted = jax.jit(self._program(name), out_shardings=self._shardings(name))
        traced = jitted.trace(self.inputs, None)
        first: Seen = traced.out_info.calls[0]
        arguments = first.arguments(self.inputs, 0)
        arguments = self._as_split(arguments._replace(experts=None))._replace(experts=arguments.experts)
        alone = jax.jit(self._layer(first.pass_name), out_shardings=self.split)
        traced_alone = alone.trace(arguments, self._as_split(first.dy))
        answers = (self._as_split(traced_alone.out_info),) * len(traced.out_info.calls)
        return {
            ("program", name): traced.lower(),
            ("work", name): jitted.trace(self.inputs, answers).lower(),
            ("layer", first.pass_name): traced_alone.lower(),
        }

    def _program(self, name: str) -> Callable[..., Outcome]:
        return PROGRAMS[name].on(self.mesh, self.config, self.of_layer)

    def _shardings(self, name: str) -> Any:
        # Where a program sees whole arrays, results of its other work are small and wanted everywhere.
        of_results: Any = None if PROGRAMS[name].per_rank else NamedSharding(self.mesh, P())
        of_calls: Any = self.split
        return Outcome(of_calls, of_results)

    def _layer(self, pass_name: Pass) -> Callable[..., Results]:
        """The layer alone."""

        def layer(arguments: Arguments) -> jax.Array:
            return jaxmoe.moe_layer(*arguments[:4], **self.of_layer, **where(self.mesh))

        return function_of(pass_name, layer, with_output=True)

    def _as_split(self, tree: Any) -> Any:
        """Shapes of arrays that are split over all ranks."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.split), tree)

    def measure(self, result: Result) -> Result:
        """Checks the program of a line and times it; returns the line with figures, or why there are none.

        Raises:
          Exception: what compiling or running it has raised.
        """
        program, work = (self._compiled(kind, result.program) for kind in ("program", "work"))
        self._meet()
        outcome: Outcome = jax.block_until_ready(program(self.inputs, None))
        pass_name = outcome.calls[0].pass_name
        alone = self._compiled("layer", pass_name)
        self._meet()
        of_calls = self._calls_of(outcome)
        answers = tuple(alone(*of_call) for of_call in of_calls)
        error, work_wrong = compare_with_work(outcome, work(self.inputs, answers), self.mesh)
        wrong = (
            self._compare_with_reference(pass_name, *of_calls[0], answers[0])
            or compare_with_layer(outcome, answers, self.implementation, self.mesh)
            or work_wrong
        )
        if wrong:
            jax.block_until_ready(program(self.inputs, None))  # says what the layer has to say of a call that failed
            return dataclasses.replace(result, failure=f"not timed: {wrong}")

        layer = self._layer_time(pass_name, PROGRAMS[result.program].asks_host, lambda: alone(*of_calls[0]))
        with self._caller(result.program, work, answers) as call:
            of_work, _ = time_calls(call, self.options.seconds / 2)
            work_slowest = of_work.slowest
        with self._caller(result.program, program, None) as call:
            timed, paused, last = time_again_after_a_pause(call, self.options.seconds)
        if paused:  # as long as both runs, to see whether the host pauses without the layer too
            with self._caller(result.program, work, answers) as call:
                work_slowest = max(work_slowest, time_calls(call, 2 * self.options.seconds)[0].slowest)
        if wrong := compare_with_layer(last, answers, self.implementation, self.mesh):
            jax.block_until_ready(program(self.inputs, None))
            return dataclasses.replace(result, failure=f"no figures, the last call is wrong: {wrong}")
        result = dataclasses.replace(
            result,
            error=error,
            microseconds=timed.median,
            slowest=timed.slowest,
            paused=paused,
            layer=len(outcome.calls) * layer,
            work=of_work.median,
            work_slowest=work_slowest,
        )
        longer = self.options.rounds or is_longer(timed.median, len(of_calls) * layer, of_work.median)
        if PROGRAMS[result.program].is_of_host or not longer:
            return result
        return self._in_rounds(result, pass_name, of_calls, answers)

    def _in_rounds(
        self, result: Result, pass_name: Pass, of_calls: list[tuple[Arguments, Any]], answers: tuple[Results, ...]
    ) -> Result:
        """Returns the line with the times of rounds inside one jit, or why it has no figures at all."""
        function, inputs, name = self._program(result.program), self.inputs, result.program

        def program(x: jax.Array, inputs: Inputs, answers: Any) -> Outcome:
            return function(inputs._replace(x=x), answers)

        def layer(x: jax.Array, arguments: Arguments, dy: Any) -> Results:
            return self._layer(pass_name)(arguments._replace(x=x), dy)

        rounds = in_rounds(program, lambda outcome: outcome.calls[0].topk_weights, self.mesh)
        in_one_jit = jax.jit(rounds, out_shardings=self._shardings(name))
        layer_alone = jax.jit(in_rounds(layer, lambda results: results.y, self.mesh), out_shardings=self.split)
        options, (first, dy) = dict(PROGRAMS[name].compiler_options), of_calls[0]
        calls = (
            (in_one_jit, (inputs.x, inputs, None), options),
            (layer_alone, (first.x, first, dy), {}),
            (in_one_jit, (inputs.x, inputs, answers), options),
        )
        compiled = [jitted.lower(*arguments).compile(compiler_options=of) for jitted, arguments, of in calls]
        self._meet()
        timed = [time_rounds(each, call[1], self.options.seconds) for each, call in zip(compiled, calls, strict=True)]
        (of_program, last), (of_layer, _), (of_work, _) = timed
        # Rounds are compiled anew: what the program gives its later layers may have been rounded in other places.
        of_last = tuple(self._compiled("layer", pass_name)(*of_call) for of_call in self._calls_of(last))
        if wrong := compare_with_layer(last, of_last, self.implementation, self.mesh):
            jax.block_until_ready(self._compiled("program", name)(inputs, None))
            return dataclasses.replace(result, failure=f"no figures, the last round is wrong: {wrong}")
        return dataclasses.replace(result, rounds=(of_program, len(of_calls) * of_layer, of_work))

    def _calls_of(self, outcome: Outcome) -> list[tuple[Arguments, jax.Array | None]]:
        """What the layer alone is given for the answers of a program's calls."""
        return [(call.arguments(self.inputs, number), call.dy) for number, call in enumerate(outcome.calls)]

    def _layer_time(self, pass_name: Pass, host_waits: bool, call: Callable[[], Any]) -> float:
        key = pass_name, host_waits
        if key not in self.layer_times:
            of_call = (lambda _: jax.block_until_ready(call())) if host_waits else lambda _: call()
            self.layer_times[key] = time_calls(of_call, self.options.seconds)[0].median
        return self.layer_times[key]

    def _compiled(self, kind: str, name: str) -> Any:
        found = self.compiled[kind, name]
        if isinstance(found, BaseException):
            raise found
        return found

    def _meet(self) -> None:
        """Processes come together: a rank waits for late ones in a first call, but not for ever."""
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxmoe.bench beside")

    @contextlib.contextmanager
    def _caller(self, name: str, compiled: Any, answers: Any) -> Iterator[Callable[[int], Outcome]]:
        if not PROGRAMS[name].prefetches:
            yield lambda _: compiled(self.inputs, answers)
            return
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            yield Prefetching(compiled, self.inputs, answers, pool, whole(self.inputs.x, self.mesh))

    def _compare_with_reference(
        self, pass_name: Pass, arguments: Arguments, dy: jax.Array | None, answer: Results
    ) -> str:
        """Of the layer alone, once for each mesh, number of tokens and pass; returns what is wrong."""
        if pass_name in self.right:
            return ""
        sample = sample_of(arguments, whole(arguments.topk_ids, self.mesh), self.mesh, self.of_layer["precision"])
        assert answer.y is not None
        error = error_of(answer.y, sample, self.mesh)
        if not error <= sample.allowed:
            return f"the layer alone has an error of {error:.1e}, above {sample.allowed:.1e}"
        if dy is not None:
            dy, _ = of_unit_scale(dy)
            gradients = self._compiled("layer", pass_name)(arguments, dy).gradients
            trained = pass_name != "frozen"
            of_gradients = gradient_sample_of(arguments, dy, sample.tokens, self.mesh, trained=trained)
            for name, error, allowed in errors_of(gradients, of_gradients, self.mesh):
                if not error <= allowed:
                    return f"the layer alone has a gradient of {name} with an error of {error:.1e}, above {allowed:.1e}"
        self.right.add(pass_name)
        return ""


def _hosts_of(options: BesideOptions) -> str:
    if options.network is None:
        return ""
    return f", {options.network.ranks_per_host} rank(s) to a host, way {options.network.way or 'as chosen'}"


def _make_meshes(options: BesideOptions) -> dict[bool, Mesh]:
    """Returns the mesh of one group of all ranks under False and, where a program needs it, that of two under True."""
    mesh = make_mesh(options.ranks or jax.device_count())
    meshes = {False: mesh}
    if mesh.size % 2 == 0 and any(PROGRAMS[name].groups for name in options.programs):
        names, kinds = (DATA_AXIS, AXIS), (AxisType.Auto,) * 2
        meshes[True] = jax.make_mesh((2, mesh.size // 2), names, axis_types=kinds, devices=mesh.devices.tolist())
    return meshes


def _shape_of(options: BesideOptions, mesh: Mesh) -> LayerShape:
    return options.shape or dataclasses.replace(SHAPES[WIDTHS], num_experts=EXPERTS_PER_RANK * mesh.size)


def _implementation(options: BesideOptions, mesh: Mesh) -> str:
    """Returns the implementation that runs.

    Raises:
      ValueError: it cannot.
    """
    shape, dtype, tokens = _shape_of(options, mesh), options.wide, max(options.tokens) * mesh.size
    slots = (tokens, shape.top_k)
    try:
        return jaxmoe.explain(
            jax.ShapeDtypeStruct((tokens, shape.hidden), dtype),
            jax.ShapeDtypeStruct(slots, jnp.int32),
            jax.ShapeDtypeStruct(slots, jnp.float32),
            shapes_of_experts(shape, dtype, options.block, through_e4m3=options.narrow.through_e4m3),
            implementation=options.implementation,  # pyright: ignore[reportArgumentType]
            **options.of_layer,
            **where(mesh),
        ).call.implementation
    except NotImplementedError as error:
        raise ValueError(f"cannot run: {error}") from error


def _gave_up(error: Exception) -> bool:
    """Whether the layer has waited for a peer too long, which condemns the memory of the group (ffi/kernel.md)."""
    return any(text in str(error) for text in (" waited ", "Restart all processes", "cannot be used again"))


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
