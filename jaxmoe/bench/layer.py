"""`python -m jaxmoe.bench layer`: time of one forward pass of `moe_layer`, for inputs that were checked just before.

One line for each shape, number of tokens, implementation and plan. The call is measured as a user makes it: jitted,
enqueued many times, with inputs that are not in the caches already (`inputs.py`), until the slowest rank has ended
(`timing.py`). Without a passed check no time is printed. What the figures are is said in `table.Result`.
"""

import gc
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxmoe.bench import kernels, peaks, table
from jaxmoe.bench.candidates import Candidate, candidates, dropped_rows, explain, moved, program
from jaxmoe.bench.inputs import AXIS, Inputs, arguments_of_call, copies_of, error_of, make_inputs, random_experts
from jaxmoe.bench.options import BASELINE, DTYPES, Options
from jaxmoe.bench.table import Result
from jaxmoe.bench.timing import over_processes, time_blocks


def run(options: Options) -> int:
    """Measures and prints what the options ask for; returns the exit status.

    With several processes all call it alike and the first one prints.

    Raises:
      ValueError: more ranks than devices, or processes without a rank.
    """
    mesh = _make_mesh(options)
    device = mesh.devices.flat[0]
    known = peaks.known(device.device_kind)
    _print(
        f"{device.device_kind} x {mesh.size}, {jax.process_count()} process(es), jax {jax.__version__}, "
        f"{options.dtype}, {options.routing} routing. Tokens and figures per rank; us per call, the maximum over ranks "
        f"of the median of {options.blocks} blocks of {options.seconds:g} s, {options.rest:g} s of rest before each."
    )
    peak = f" Peak {known.tflops:.0f} TFLOP/s, copy {known.copy_gbs:.0f} GB/s." if known else ""
    _print(
        "Plan: unit tiles/lag units/ring tiles/rows of a chunk. HBM and NVLink: the busiest rank; > leaves out what "
        f"only the compiler knows.{peak}"
    )
    _print(table.header())
    failed = False
    for case in options.cases:
        experts = None
        for tokens in (case.tokens,) if case.tokens else options.tokens:
            lines = _Lines(case.name, tokens, mesh, options)
            inputs = None  # what was measured before is free when the next inputs are made
            gc.collect()
            try:
                if experts is None:
                    experts = random_experts(case.shape, mesh, DTYPES[options.dtype])
                inputs = make_inputs(case.shape, experts, tokens, options.routing, mesh)
            except ValueError as error:
                lines.fail(Candidate("inputs"), f"cannot run: {error}")
            except jax.errors.JaxRuntimeError as error:
                lines.fail(Candidate("inputs"), _failure(error))
            else:
                lines.measure_all(inputs)
            failed |= lines.failed
    return int(failed)


class _Lines:
    """The lines of one shape and number of tokens, which are compared with each other."""

    def __init__(self, name: str, tokens: int, mesh: Mesh, options: Options) -> None:
        self.name, self.tokens, self.mesh, self.options = name, tokens, mesh, options
        self.failed = False
        self.microseconds: dict[str, float] = {}  # of implementations measured so far
        self.default_outputs: list[jax.Array] | None = None  # of the megakernel's default plan, while others are tried

    def measure_all(self, inputs: Inputs) -> None:
        """Prints a line for every candidate. A failure, out of memory most often, is the line of that candidate."""
        # First, so that the others can be compared with it.
        for implementation in sorted(self.options.implementations, key=lambda name: name != "xla"):
            try:
                found = candidates(implementation, inputs, self.mesh, self.options.sweep)
            except (ValueError, NotImplementedError, TypeError) as error:
                self.fail(Candidate(implementation), f"cannot run: {error}")
                continue
            for candidate in found:
                self._measure(candidate, inputs, keep_outputs=candidate.is_default and len(found) > 1)
            self.default_outputs = None

    def fail(self, candidate: Candidate, text: str) -> None:
        """Prints why there are no figures."""
        self.failed = True
        plan = table.plan_text(candidate.plan_fields)
        _print(table.failure(self.name, self.tokens, candidate.implementation, plan, text))

    def _measure(self, candidate: Candidate, inputs: Inputs, keep_outputs: bool) -> None:
        if not candidate.is_default:
            if self.default_outputs is None:
                self.fail(candidate, "not run: the default plan has no checked outputs to compare with")
                return
            try:
                explain(candidate, inputs, self.mesh)
            except ValueError as error:
                self.fail(candidate, f"cannot run: {error}")
                return
        reference = None if candidate.is_default else self.default_outputs
        try:
            result, outputs = measure(
                self.name,
                candidate,
                inputs,
                self.mesh,
                self.options,
                default_outputs=reference,
                keep_outputs=keep_outputs,
            )
        except jax.errors.JaxRuntimeError as error:
            self.fail(candidate, _failure(error))
        else:
            self.failed |= not result.checked
            if result.checked and keep_outputs:
                self.default_outputs = outputs
            self._report(result, candidate)
        gc.collect()  # a failure's frames hold its arrays

    def _report(self, result: Result, candidate: Candidate) -> None:
        result = result.compared(self.microseconds)
        if result.microseconds is not None and candidate.is_default:
            self.microseconds[candidate.implementation] = result.microseconds
        _print(table.line(result))
        if self.options.terms and candidate.is_default:
            _print(table.terms(result))
        if self.options.json and jax.process_index() == 0:
            with self.options.json.open("a") as file:
                file.write(result.to_json() + "\n")


def measure(
    name: str,
    candidate: Candidate,
    inputs: Inputs,
    mesh: Mesh,
    options: Options,
    *,
    default_outputs: Sequence[jax.Array] | None = None,
    keep_outputs: bool = False,
) -> tuple[Result, list[jax.Array]]:
    """Checks one candidate on the inputs and times it on the same inputs.

    Args:
      name: of the shape.
      candidate: implementation and plan.
      inputs: of the shape.
      mesh: of one axis.
      options: how long to measure, and what else to print.
      default_outputs: of the megakernel's default plan, which those of another plan have to equal bit for bit.
      keep_outputs: whether to return outputs.

    Returns:
      The result, compared with no other yet, and the output for each set of inputs, none unless they are to be kept.
    """
    shape = inputs.shape
    function, prepare = program(candidate, mesh)
    weights = copies_of(prepare(inputs.experts), inputs.weight_copies)
    compiled = jax.jit(function).lower(inputs.sets[0]._replace(experts=weights[0])).compile()
    outputs = [compiled(arguments._replace(experts=weights[0])) for arguments in inputs.sets]
    dropped = dropped_rows(candidate.implementation, inputs)
    error, allowed, is_right = _worst_error(outputs, inputs, mesh)
    same_bits = None if default_outputs is None else _equal_bits(outputs, default_outputs)
    # The baseline is compared on what it computes; rows it drops show in `dropped`, not as a failed check.
    is_right |= candidate.implementation == BASELINE and dropped > 0
    outputs = outputs if keep_outputs else []  # memory for what is timed

    device = mesh.devices.flat[0].device_kind
    traffic = moved(candidate, inputs)
    memory = compiled.memory_analysis()
    arena = explain(candidate, inputs, mesh).memory_bytes if candidate.plan else None
    result = Result(
        shape=name,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        tokens=shape.tokens,
        ranks=shape.ranks,
        processes=jax.process_count(),
        dtype=options.dtype,
        routing=options.routing,
        implementation=candidate.implementation,
        plan=candidate.plan_fields,
        device=device,
        jax=jax.__version__,
        relative_error=error,
        allowed_error=allowed,
        same_bits=same_bits,
        checked=is_right and same_bits is not False,
        hbm_complete=traffic.complete if traffic else None,
        hbm_rank=traffic.memory.rank if traffic else None,
        hbm_bytes=traffic.memory.terms.items() if traffic else None,
        nvlink_rank=traffic.links.rank if traffic else None,
        nvlink_bytes=traffic.links.terms.items() if traffic else None,
        weight_copies=len(weights),
        arena_mib=None if arena is None else sum(arena.values()) / 2**20,
        temporary_mib=memory.temp_size_in_bytes / 2**20 if memory else None,
        dropped_rows=dropped,
    )
    if not result.checked:
        return result, outputs

    def call(i: int) -> jax.Array:
        return compiled(arguments_of_call(inputs.sets, weights, i))

    blocks = time_blocks(call, options.blocks, options.seconds, options.rest)
    if options.kernels:
        _print_kernels(lambda: call(0), options.kernels)
    return result.timed(blocks, peaks.known(device)), outputs


def _worst_error(outputs: Sequence[jax.Array], inputs: Inputs, mesh: Mesh) -> tuple[float, float, bool]:
    """Returns error and allowed error of the set of inputs where their ratio is worst, and whether all are allowed."""
    pairs = [(error_of(y, sample, mesh), sample.allowed) for y, sample in zip(outputs, inputs.samples, strict=True)]
    # NaN compares as neither larger nor smaller: it counts as infinitely wrong. And all processes decide alike, or
    # they would wait for each other.
    shares = np.nan_to_num(np.array([error / allowed for error, allowed in pairs]), nan=np.inf)
    worst = over_processes(shares).max(0)
    return (*pairs[int(worst.argmax())], bool(worst.max() <= 1))


@jax.jit
def _bits_differ(a: jax.Array, b: jax.Array) -> jax.Array:
    words = (jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (a, b))
    return jnp.any(operator.ne(*words))


def _equal_bits(outputs: Sequence[jax.Array], expected: Sequence[jax.Array]) -> bool:
    return not any(bool(_bits_differ(a, b)) for a, b in zip(outputs, expected, strict=True))


def _make_mesh(options: Options) -> Mesh:
    devices, processes = jax.devices(), jax.process_count()
    ranks = options.ranks or len(devices)
    if ranks > len(devices):
        raise ValueError(f"--ep={ranks}: JAX has {len(devices)} devices.")
    if processes > 1 and ranks != len(devices):
        raise ValueError(
            f"--ep={ranks}: with {processes} processes all {len(devices)} devices take part. Leave --ep out, or start "
            "fewer processes."
        )
    return jax.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:ranks])


def _print(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def _print_kernels(call: Callable[[], Any], count: int) -> None:
    for kernel, microseconds, launches in kernels.kernel_times(call)[:count]:
        _print(f"    {microseconds:10.1f} us in {launches:4.1f} launches  {kernel[:100]}")


def _failure(error: Exception) -> str:
    """Returns what a line says of an error. With several processes raises it: the others wait in a collective."""
    if jax.process_count() > 1:
        raise error
    return f"failed: {str(error).splitlines()[0][:150]}"
