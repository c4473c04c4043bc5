"""`python -m jaxmoe.bench layer`: time of one call of `moe_layer`, for inputs that were checked just before.

One line for each shape, number of tokens, number of ranks, pass, implementation and plan. The call is measured as a
user makes it: jitted, enqueued many times, with inputs that are not in the caches already (`inputs.py`), until the
slowest rank has ended (`timing.py`). What a pass is, is said in `passes.py`. Without a passed check no time is printed.
What the figures are is said in `table.Result`.
"""

import contextlib
import dataclasses
import gc
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxmoe.bench import kernels, peaks, table
from jaxmoe.bench.candidates import Candidate, arena_bytes, candidates, dropped_rows, explain, moved, program
from jaxmoe.bench.check import compare, worst_of
from jaxmoe.bench.copies import CompetingCopies, check_ring
from jaxmoe.bench.gradient_check import GradientInputs, make_gradient_inputs
from jaxmoe.bench.inputs import (
    AXIS,
    Inputs,
    arguments_of_call,
    copies_of,
    make_inputs,
    random_experts,
    unrounded_error_of,
)
from jaxmoe.bench.options import BASELINE, Options, narrow_of, wide_dtype_of
from jaxmoe.bench.passes import UNTRAINED, Pass, Results, function_of
from jaxmoe.bench.report import append, say
from jaxmoe.bench.table import Result
from jaxmoe.bench.timing import time_blocks


def run(options: Options) -> int:
    """Measures and prints what the options ask for; returns the exit status.

    With several processes all call it alike and the first one prints.

    Raises:
      ValueError: more ranks than devices, processes without a rank, or devices that arrays cannot be copied between.
    """
    meshes = _make_meshes(options)
    for mesh in meshes if options.copies else ():
        check_ring(mesh.devices.flatten().tolist())
    # One rank sends nothing: what the ranks of a group keep of their speed in a larger one is told from two ranks on.
    reference_ranks = next((mesh.size for mesh in meshes if mesh.size > 1), meshes[0].size)
    device = meshes[0].devices.flat[0]
    known = peaks.known(device.device_kind)
    block, precision, accumulation, through_e4m3 = narrow_of(options.dtype)
    say(
        f"{device.device_kind} x {'/'.join(str(mesh.size) for mesh in meshes)}, {jax.process_count()} process(es), "
        f"jax {jax.__version__}, {options.dtype}, {options.routing} routing. Tokens and figures per rank; us per call, "
        f"the maximum over ranks of the median of {options.blocks} blocks of {options.seconds:g} s, {options.rest:g} s "
        "of rest before each."
    )
    peak = f" Peak {known.product(precision):.0f} TFLOP/s, copy {known.copy_gbs:.0f} GB/s." if known else ""
    say(
        "Plan: unit tiles/lag units/ring tiles/rows of a chunk, of a backward pass /segment tiles. HBM and NVLink: the "
        f"busiest rank; > leaves out what only the compiler knows.{peak}"
    )
    if block:
        say(
            "check: against the layer that rounds the same numbers, with sums in float32; unrounded: against "
            "the layer that rounds nothing."
        )
    say(table.header(block is not None))
    failed = False
    for case in options.cases:
        experts, scaling = None, _Scaling(reference_ranks)
        all_tokens = (case.tokens,) if case.tokens else options.tokens
        for tokens, mesh in itertools.product(all_tokens, meshes):
            lines = [_Lines(case.name, tokens, pass_name, mesh, options, scaling) for pass_name in options.passes]
            inputs = gradients = None  # what was measured before is free when the next inputs are made
            if len(meshes) > 1:
                experts = None  # those of before are split over other ranks
            gc.collect()
            try:
                if experts is None:
                    dtype = wide_dtype_of(options.dtype)
                    experts = random_experts(case.shape, mesh, dtype, block, through_e4m3=through_e4m3)
                inputs = make_inputs(
                    case.shape, experts, tokens, options.routing, mesh, precision=precision, accumulation=accumulation
                )
                if options.passes != ("forward",):
                    gradients = make_gradient_inputs(inputs, mesh, trained=bool({*options.passes} - UNTRAINED))
            except ValueError as error:
                lines[0].fail(Candidate("inputs"), f"cannot run: {error}")
            except jax.errors.JaxRuntimeError as error:
                lines[0].fail(Candidate("inputs"), _failure(error))
            else:
                for of_pass in lines:
                    of_pass.measure_all(inputs, gradients)
            failed |= any(of_pass.failed for of_pass in lines)
    return int(failed)


class _Scaling:
    """Of one shape the results on one number of ranks, with which those on other numbers are compared."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.references: dict[tuple[int, Pass, str], Result] = {}

    def of(self, result: Result) -> Result:
        """Returns a result that was timed with its default plan, with its scaling if its reference was timed before."""
        key = (result.tokens, result.pass_name, result.implementation)
        if result.ranks == self.ranks:
            self.references[key] = result
            return result
        return result.scaled(self.references[key]) if key in self.references else result


class _Lines:
    """The lines of one shape, number of tokens, number of ranks and pass, which are compared with each other."""

    def __init__(
        self, name: str, tokens: int, pass_name: Pass, mesh: Mesh, options: Options, scaling: _Scaling
    ) -> None:
        self.name, self.tokens, self.mesh, self.options = name, tokens, mesh, options
        self.pass_name: Pass = pass_name
        self.scaling = scaling
        self.failed = False
        self.microseconds: dict[str, float] = {}  # of implementations measured so far
        self.default_outputs: list[Results] | None = None  # of the megakernel's default plan, while others are tried

    def measure_all(self, inputs: Inputs, gradients: GradientInputs | None) -> None:
        """Prints a line for every candidate. A failure, out of memory most often, is the line of that candidate."""
        # First, so that the others can be compared with it.
        for implementation in sorted(self.options.implementations, key=lambda name: name != "xla"):
            try:
                found = candidates(
                    implementation,
                    inputs,
                    self.mesh,
                    self.options.sweep,
                    self.pass_name,
                    self.options.residuals,
                    self.options.networks,
                    self.options.fused,
                )
            except (ValueError, NotImplementedError, TypeError) as error:
                self.fail(Candidate(implementation), f"cannot run: {error}")
                continue
            for candidate in found:
                keep_outputs = candidate.is_default and any(other.has_default_bits for other in found[1:])
                self._measure(candidate, inputs, gradients, keep_outputs=keep_outputs)
            self.default_outputs = None

    def fail(self, candidate: Candidate, text: str) -> None:
        """Prints why there are no figures."""
        self.failed = True
        plan = table.plan_text(candidate.plan_fields)
        case = (self.name, self.tokens, self.mesh.size, self.pass_name, candidate.implementation, plan)
        say(table.failure(*case, text))

    def _measure(
        self, candidate: Candidate, inputs: Inputs, gradients: GradientInputs | None, keep_outputs: bool
    ) -> None:
        if not candidate.is_default and candidate.network is None:
            if self.default_outputs is None and candidate.has_default_bits:
                self.fail(candidate, "not run: the default plan has no checked outputs to compare with")
                return
            try:
                explain(candidate, inputs, self.mesh)
            except ValueError as error:
                self.fail(candidate, f"cannot run: {error}")
                return
        is_compared = candidate.has_default_bits and not candidate.is_default
        try:
            result, outputs = measure(
                self.name,
                candidate,
                inputs,
                self.mesh,
                self.options,
                gradients=gradients,
                default_outputs=self.default_outputs if is_compared else None,
                keep_outputs=keep_outputs,
            )
        except jax.errors.JaxRuntimeError as error:
            self.fail(candidate, _failure(error))
        except (NotImplementedError, TypeError, ValueError) as error:
            # Its grouped GEMM is another library's, which may have no derivative.
            if candidate.implementation != BASELINE or self.pass_name == "forward":
                raise
            self.fail(candidate, f"cannot run: it has no backward pass here: {str(error).splitlines()[0][:150]}")
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
            result = self.scaling.of(result)
        if candidate.network is not None:
            result = result.over_one_level(self.microseconds.get(candidate.implementation))
        say(table.line(result))
        if result.copies_gbs is not None:
            say(f"  beside copies from each device to the next one, {result.copies_gbs:.3g} GB/s")
        if self.options.terms and candidate.is_default:
            say(table.terms(result))
        append(self.options.json, result.to_json())


def measure(
    name: str,
    candidate: Candidate,
    inputs: Inputs,
    mesh: Mesh,
    options: Options,
    *,
    gradients: GradientInputs | None = None,
    default_outputs: Sequence[Results] | None = None,
    keep_outputs: bool = False,
) -> tuple[Result, list[Results]]:
    """Checks one candidate on the inputs and times it on the same inputs.

    Args:
      name: of the shape.
      candidate: implementation, plan and pass.
      inputs: of the shape.
      mesh: of one axis.
      options: how long to measure, and what else to print.
      gradients: what a backward pass needs, beside the inputs.
      default_outputs: of the megakernel's default plan, which those of another plan have to equal bit for bit.
      keep_outputs: whether to return outputs.

    Returns:
      The result, compared with no other yet, and the results for each set of inputs, none unless they are to be kept.
    """
    shape = inputs.shape
    layer, prepare = program(candidate, mesh)
    weights = copies_of(prepare(inputs.experts), inputs.weight_copies)
    cotangents: Sequence[jax.Array | None] = (None,) * len(inputs.sets)
    if candidate.pass_name != "forward":
        assert gradients is not None
        cotangents = gradients.cotangents
    function = jax.jit(function_of(candidate.pass_name, layer))
    compiled = function.lower(inputs.sets[0]._replace(experts=weights[0]), cotangents[0]).compile()

    outputs: list[Results] = []
    errors: list[list[tuple[str, float, float]]] = []
    unrounded_errors: list[float] = []
    same_bits = None if default_outputs is None else True
    for number, (arguments, dy) in enumerate(zip(inputs.sets, cotangents, strict=True)):
        found = compiled(arguments._replace(experts=weights[0]), dy)
        errors.append(compare(found, number, inputs, gradients, mesh))
        if inputs.precision is not None and found.y is not None:
            unrounded_errors.append(unrounded_error_of(found.y, inputs.samples[number], mesh))
        if default_outputs is not None:
            same_bits = same_bits and _equal_bits(found, default_outputs[number])
        if keep_outputs:
            outputs.append(found)
        del found  # memory for the next ones, and for what is timed
    dropped = dropped_rows(candidate.implementation, inputs)
    piece, error, allowed, is_right = worst_of(errors)
    # The baseline is compared on what it computes; rows it drops show in `dropped`, not as a failed check.
    is_right |= candidate.implementation == BASELINE and dropped > 0

    device = mesh.devices.flat[0].device_kind
    traffic = moved(candidate, inputs, mesh)
    memory = compiled.memory_analysis()
    arena = arena_bytes(candidate, inputs, mesh)
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
        arena_mib=None if arena is None else arena / 2**20,
        temporary_mib=memory.temp_size_in_bytes / 2**20 if memory else None,
        dropped_rows=dropped,
        pass_name=candidate.pass_name,
        worst_piece=piece,
        memory_mib=(memory.temp_size_in_bytes + (arena or 0)) / 2**20 if memory else None,
        unrounded_error=float(np.max(unrounded_errors)) if unrounded_errors else None,  # NaN where one is
    )
    if not result.checked:
        return result, outputs

    def call(i: int) -> Results:
        return compiled(arguments_of_call(inputs.sets, weights, i), cotangents[i % len(cotangents)])

    with CompetingCopies(mesh.devices.flatten().tolist()) if options.copies else contextlib.nullcontext() as copies:
        blocks = time_blocks(call, options.blocks, options.seconds, options.rest)
    if copies is not None:
        result = dataclasses.replace(result, copies_gbs=copies.gbs)
    if options.kernels:
        _print_kernels(lambda: call(0), options.kernels)
    # Gradients are those of products in the dtype of x.
    precision = inputs.precision if candidate.pass_name == "forward" else None
    return result.timed(blocks, peaks.known(device), precision), outputs


@jax.jit
def _bits_differ(a: jax.Array, b: jax.Array) -> jax.Array:
    words = (jax.lax.bitcast_convert_type(array, jnp.uint16) for array in (a, b))
    return jnp.any(operator.ne(*words))


def _equal_bits(results: Results, expected: Results) -> bool:
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return not any(bool(_bits_differ(a, b)) for a, b in pairs)


def _make_meshes(options: Options) -> list[Mesh]:
    numbers = (ranks or jax.device_count() for ranks in options.ranks)
    return [make_mesh(ranks) for ranks in dict.fromkeys(numbers)]


def make_mesh(ranks: int) -> Mesh:
    """Returns a mesh of so many ranks of one group.

    Raises:
      ValueError: more ranks than devices, or processes without a rank.
    """
    devices, processes = jax.devices(), jax.process_count()
    if ranks > len(devices):
        raise ValueError(f"--ep={ranks}: JAX has {len(devices)} devices.")
    if processes > 1 and ranks != len(devices):
        raise ValueError(
            f"--ep={ranks}: with {processes} processes all {len(devices)} devices take part. Leave --ep out, or start "
            "fewer processes."
        )
    return jax.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:ranks])


def _print_kernels(call: Callable[[], Any], count: int) -> None:
    for kernel in kernels.kernel_times(call)[:count]:
        beside = f"{kernel.beside_layer:10.1f} us beside the layer"
        say(f"    {kernel.microseconds:10.1f} us in {kernel.launches:4.1f} launches, {beside}  {kernel.name[:100]}")


def _failure(error: Exception) -> str:
    """Returns what a line says of an error. With several processes raises it: the others wait in a collective."""
    if jax.process_count() > 1:
        raise error
    return f"failed: {str(error).splitlines()[0][:150]}"
