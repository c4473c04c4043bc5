"""Programs that run the layer beside other work: on CPUs, with small sizes, and what the table does with wrong ones."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxmoe
from jaxmoe.bench import beside, beside_checks, beside_rounds, beside_table, windows
from jaxmoe.bench.beside_layer import Inputs, Layer, Outcome
from jaxmoe.bench.beside_programs import PROGRAMS, Program
from jaxmoe.bench.beside_table import Result
from jaxmoe.bench.options import BesideOptions
from jaxmoe.bench.shapes import LayerShape
from jaxmoe.network.plan import NetworkPlan
from jaxmoe.testing import relative_error

SHAPE = LayerShape(hidden=32, intermediate=48, num_experts=8, top_k=2)
IN_8_BITS = dataclasses.replace(SHAPE, hidden=128, intermediate=128)
ROOT = Path(__file__).parents[2]
CONFIG = jaxmoe.RouterConfig(top_k=SHAPE.top_k)
# Where it makes no difference: it compiles soonest.
IMPLEMENTATION = "reference"


def options(*programs: str, **changes: Any) -> BesideOptions:
    fields: dict[str, Any] = {"tokens": (16,), "ranks": 2, "shape": SHAPE, "seconds": 0.0}
    fields |= {"implementation": IMPLEMENTATION}
    return BesideOptions(programs, **fields | changes)


def measured(*programs: str, **changes: Any) -> list[Result]:
    return list(beside.measure(options(*programs, **changes)))


@pytest.fixture
def add(monkeypatch):
    """Adds a program that only this test knows."""

    def add_program(name: str, function: Callable[[Layer, Inputs], Outcome], **fields: Any) -> str:
        monkeypatch.setitem(PROGRAMS, name, Program("something wrong", function, **fields))
        return name

    return add_program


# --- the programs -----------------------------------------------------------------------------------------------------


# Not those that are part of another one, nor those that differ from another one in what they tell the compiler of GPUs.
PARTS = {"plain", "stats", "loss", "norm_before", "train", "gathers"}
DIFFERENT = [name for name in PROGRAMS if not name.endswith("_parallel") and name not in PARTS]


def assert_equal_to_their_parts(results: list[Result]) -> None:
    for result in results:
        assert result.failure is None, result
        assert result.error is not None
        assert result.error <= beside_checks.ALLOWED_EPS * jnp.finfo(jnp.bfloat16).eps
        times = (result.microseconds, result.slowest, result.layer, result.work, result.work_slowest)
        assert all(value is not None and value > 0 for value in times)


@pytest.mark.slow
def test_with_the_megakernel_programs_of_every_kind_return_what_layer_and_other_work_return_alone():
    """On four ranks, so that the two groups have peers."""
    results = measured(*DIFFERENT, ranks=4, implementation="megakernel")
    assert [result.program for result in results] == DIFFERENT
    assert_equal_to_their_parts(results)


@pytest.mark.slow
def test_experts_that_are_rounded_in_every_call_return_what_layer_and_other_work_return_alone():
    assert_equal_to_their_parts(
        measured("plain", "train", implementation="megakernel", precision="fp8", shape=IN_8_BITS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8-static", "fp8-static-fast"])
def test_experts_with_given_scales_return_what_layer_and_other_work_return_alone(dtype):
    results = measured("loss", "train_router", dtype=dtype, shape=IN_8_BITS, implementation="megakernel")
    assert_equal_to_their_parts(results)


@pytest.mark.slow
def test_with_xla_programs_return_what_layer_and_other_work_return_alone():
    assert_equal_to_their_parts(measured("train_norm", implementation="xla"))


@pytest.mark.slow
def test_with_experts_in_4_bits_programs_return_what_layer_and_other_work_return_alone():
    shape = LayerShape(64, 64, 8, 2)
    results = measured("train_router", "two_layers", dtype="mxfp4-a16", shape=shape, implementation="megakernel")
    assert_equal_to_their_parts(results)


@pytest.mark.slow
def test_over_hosts_programs_return_what_layer_and_other_work_return_alone():
    network = NetworkPlan(1, "send", 1, 8)
    assert_equal_to_their_parts(measured("train", "gathers", implementation="megakernel", network=network))


def inputs_on(mesh: jax.sharding.Mesh) -> Inputs:
    split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    weights = beside.make_weights(mesh, SHAPE, jnp.float32, None)
    return weights(x=jax.device_put(jax.random.normal(jax.random.key(7), (32, SHAPE.hidden)), split))


def outcome_of(name: str, ranks: int = 2) -> tuple[Inputs, Outcome]:
    mesh = beside.make_mesh(ranks)
    inputs = inputs_on(mesh)
    return inputs, jax.jit(PROGRAMS[name].on(mesh, CONFIG, {"implementation": IMPLEMENTATION}))(inputs, None)


@pytest.mark.slow
def test_sums_and_losses_are_those_of_all_tokens():
    inputs, outcome = outcome_of("norm_after")
    [call] = outcome.calls
    assert float(outcome.results["norm"]) == pytest.approx(float((np.asarray(call.y) ** 2).sum()), rel=1e-5)
    inputs, outcome = outcome_of("both")
    routing = jaxmoe.route(jnp.asarray(np.asarray(inputs.x) @ np.asarray(inputs.router)), CONFIG)
    rows = np.bincount(np.asarray(routing.topk_ids).reshape(-1), minlength=SHAPE.num_experts)
    np.testing.assert_array_equal(outcome.results["stats"].rows_per_expert, rows)
    assert float(outcome.results["loss"]) == pytest.approx(float(jaxmoe.load_balancing_loss(routing)), rel=1e-5)


def test_what_travels_arrives_where_it_should():
    _, outcome = outcome_of("permute")
    first, second = outcome.calls
    np.testing.assert_array_equal(outcome.results["passed on"], np.roll(np.asarray(first.y), 16, axis=0))
    assert (np.asarray(first.y) != np.asarray(second.y)).mean() > 0.9
    inputs, outcome = outcome_of("all_to_all")
    x = np.asarray(inputs.x)
    halves = np.concatenate([x[:, : SHAPE.hidden // 2], x[:, SHAPE.hidden // 2 :]])
    np.testing.assert_array_equal(outcome.results["exchanged"], halves)
    inputs, outcome = outcome_of("callback")
    norms = np.linalg.norm(np.asarray(inputs.x).reshape(2, -1), axis=1)
    np.testing.assert_allclose(outcome.results["before"], norms, rtol=1e-5)


@pytest.mark.slow
def test_gradients_are_those_of_the_same_program_on_one_device():
    inputs, outcome = outcome_of("scatters")
    on_one = Inputs(*jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, tuple(inputs))))
    mesh = beside.make_mesh(1)
    alone = jax.jit(PROGRAMS["scatters"].on(mesh, CONFIG, {"implementation": IMPLEMENTATION}))(on_one, None)
    # The mean over all tokens is the mean of the ranks' means; each rank differentiates its own.
    assert float(outcome.results["loss"].mean()) == pytest.approx(float(alone.results["loss"][0]), rel=1e-4)
    for got, want in zip(
        jax.tree.leaves((outcome.results["ddense"], [call.dexperts for call in outcome.calls])),
        jax.tree.leaves((alone.results["ddense"], [call.dexperts for call in alone.calls])),
        strict=True,
    ):
        assert relative_error(got / 2, want) < 1e-4


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("gathers", {"all_gather": 6}),
        ("scatters", {"all_gather": 4, "reduce_scatter": 4}),
        ("permute", {"collective_permute": 1}),
        ("all_to_all", {"all_to_all": 1}),
    ],
)
def test_a_program_holds_the_collectives_that_it_is_there_for(name, collectives):
    mesh = beside.make_mesh(2)
    function = PROGRAMS[name].on(mesh, CONFIG, {"implementation": "megakernel"})
    text = jax.jit(function).lower(inputs_on(mesh), None).as_text()
    kinds = re.findall(r"stablehlo\.(all_gather|reduce_scatter|collective_permute|all_to_all)\"", text)
    assert {kind: kinds.count(kind) for kind in kinds} == collectives


def test_xla_knows_the_options_of_every_program():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    named = [dict(program.compiler_options) for program in PROGRAMS.values() if program.compiler_options]
    assert len(named) >= 6
    for each in named:
        lowered.compile(compiler_options=each)
    with pytest.raises(jax.errors.JaxRuntimeError):
        lowered.compile(compiler_options={"xla_gpu_no_such_option": True})


# --- what the table does with wrong ones ------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_time_is_printed_where_the_layer_returns_something_else_than_alone(add):
    def function(layer: Layer, inputs: Inputs) -> Outcome:
        call, y, *_ = layer(inputs)
        return Outcome((call._replace(y=y.at[3, 5].set(9)),), {})

    wrong, right = measured(add("one number", function), "plain", implementation="megakernel")
    assert wrong.failure is not None
    assert re.match(r"not timed: y of call 0 of the layer is not that of the layer alone: \d", wrong.failure)
    assert wrong.microseconds is wrong.layer is wrong.work is None
    assert right.failure is None


def test_no_time_is_printed_where_the_other_work_returns_something_else_than_alone(add):
    def function(layer: Layer, inputs: Inputs) -> Outcome:
        call, y, *_ = layer(inputs)
        return Outcome((call,), {"sum": jnp.sum(y.astype(jnp.float32) ** 2) * (1.01 if layer.answers is None else 1.0)})

    [wrong] = measured(add("a hundredth", function))
    assert wrong.failure is not None
    assert re.match(r"not timed: .*sum is not that of the other work alone: .* relative error 1", wrong.failure)


def test_no_time_is_printed_where_the_layer_alone_is_wrong(monkeypatch):
    monkeypatch.setattr(beside, "error_of", lambda *_: float("nan"))
    [wrong] = measured("plain")
    assert wrong.failure is not None
    assert wrong.failure.startswith("not timed: the layer alone has an error of nan, above ")


@pytest.mark.slow
def test_no_time_is_printed_where_the_layer_is_wrong_in_one_pass_alone(monkeypatch):
    """Where it is differentiated, of all that there is."""
    right = jaxmoe.moe_layer

    @jax.custom_vjp
    def larger(y: jax.Array) -> jax.Array:
        return y

    larger.defvjp(lambda y: (1.5 * y, None), lambda _, dy: (1.5 * dy,))
    monkeypatch.setattr(jaxmoe, "moe_layer", lambda *arguments, **options: larger(right(*arguments, **options)))
    plain, wrong = measured("plain", "train_router")
    assert plain.failure is None
    assert wrong.failure is not None
    assert wrong.failure.startswith("not timed: the layer alone has an error of 5.0e-01, above ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "program"), [("w_down", "train"), ("x", "train_router"), ("topk_weights", "train_router")]
)
def test_no_time_is_printed_where_a_gradient_of_the_layer_alone_is_wrong(monkeypatch, name, program):
    """By a twentieth, in the program as in the layer alone."""
    right = jaxmoe.moe_layer

    @jax.custom_vjp
    def same(array: jax.Array) -> jax.Array:
        return array

    same.defvjp(lambda array: (array, None), lambda _, gradient: (1.05 * gradient,))

    def wrong(x: Any, ids: Any, weights: Any, experts: Any, **of_layer: Any) -> Any:
        if name == "w_down":
            experts = dataclasses.replace(experts, w_down=same(experts.w_down))
        x, weights = same(x) if name == "x" else x, same(weights) if name == "topk_weights" else weights
        return right(x, ids, weights, experts, **of_layer)

    monkeypatch.setattr(jaxmoe, "moe_layer", wrong)
    plain, result = measured("plain", program)
    assert plain.failure is None
    assert result.failure is not None
    assert result.failure.startswith(f"not timed: the layer alone has a gradient of {name} ")


def test_no_time_is_printed_where_a_later_call_returns_something_else(add):
    calls = []

    def count(_: Any) -> np.ndarray:
        calls.append(None)
        return np.array(len(calls) > 4, np.float32)

    def function(layer: Layer, inputs: Inputs) -> Outcome:
        call, y, *_ = layer(inputs)
        late = io_callback(count, jax.ShapeDtypeStruct((), jnp.float32), jnp.sum(y, dtype=jnp.float32))
        return Outcome((call._replace(y=jnp.where(late > 0, jnp.nan, y)),), {})

    [wrong] = measured(add("later", function))
    assert len(calls) > 4
    assert wrong.failure is not None
    assert wrong.failure.startswith("no figures, the last call is wrong: y of call 0")


def test_a_program_that_fails_does_not_stop_the_others(add):
    def function(layer: Layer, inputs: Inputs) -> Outcome:
        raise TypeError("of this program alone\nand more")

    wrong, right = measured(add("raises", function), "plain")
    assert wrong.failure == "failed: of this program alone"
    assert right.failure is None


def test_nothing_runs_after_the_layer_has_given_up(add):
    def function(layer: Layer, inputs: Inputs) -> Outcome:
        raise jax.errors.JaxRuntimeError("jaxmoe: rank 0 sm 3 producer waited 10 s for rows_arrived[7]: seen 1 of 2")

    hung, *rest = measured(add("hangs", function), "plain", tokens=(16, 8))
    assert hung.failure is not None
    assert hung.failure.startswith("failed: jaxmoe: rank 0 sm 3 producer waited 10 s")
    assert [(result.program, result.tokens) for result in rest] == [("plain", 16), ("hangs", 8), ("plain", 8)]
    assert {result.failure for result in rest} == {"not run: the layer gave up in hangs with 16 tokens"}


def test_an_odd_number_of_ranks_has_no_two_groups_and_says_so():
    [groups] = measured("groups", ranks=1)
    assert groups.failure is not None
    assert groups.failure.startswith("cannot run: 1 ranks are not two equal groups")


# --- times ------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes in calls alone: `seconds_of(number)` in each."""

    def __init__(self, seconds_of: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.numbers, self.seconds_of = 0.0, [], seconds_of
        monkeypatch.setattr(windows, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self, number: int) -> np.ndarray:
        self.numbers.append(number)
        self.now += self.seconds_of(number)
        return np.zeros(())


def test_the_slowest_window_shows_a_call_that_stands_still(monkeypatch):
    clock = Clock(lambda number: 0.1 if number == 40 else 0.003, monkeypatch)  # longer than a window, which is one call
    times, _ = windows.time_calls(clock.call, seconds=0.5)
    assert times.median == pytest.approx(3_000)
    assert times.slowest == pytest.approx(100_000)
    assert clock.numbers == list(range(len(clock.numbers)))
    assert 0.5 <= clock.now <= 0.8


def test_a_window_of_short_calls_shows_one_that_takes_as_long_as_many(monkeypatch):
    clock = Clock(lambda number: 0.02 if number == 400 else 0.0004, monkeypatch)
    times, _ = windows.time_calls(clock.call, seconds=0.5)
    assert times.median == pytest.approx(400)
    assert times.slowest == pytest.approx((4 * 400 + 20_000) / 5)  # windows of 2 ms


def test_a_pause_that_does_not_come_again_is_told_and_does_not_count(monkeypatch):
    clock = Clock(lambda _: 0.1 if len(clock.numbers) == 40 else 0.003, monkeypatch)
    times, paused, _ = windows.time_again_after_a_pause(clock.call, seconds=0.5)
    assert times.slowest == pytest.approx(3_000)
    assert paused == pytest.approx(100_000)


def test_a_pause_that_comes_again_counts(monkeypatch):
    clock = Clock(lambda number: 0.1 if number == 40 else 0.003, monkeypatch)
    times, paused, _ = windows.time_again_after_a_pause(clock.call, seconds=0.5)
    assert (times.slowest, paused) == pytest.approx((100_000, 100_000))


def test_steady_calls_are_timed_once(monkeypatch):
    clock = Clock(lambda number: 0.003, monkeypatch)
    times, paused, _ = windows.time_again_after_a_pause(clock.call, seconds=0.5)
    assert times.slowest == pytest.approx(3_000)
    assert paused is None
    assert clock.now <= 0.8


def test_calls_that_have_become_slow_end_in_time(monkeypatch):
    clock = Clock(lambda number: 0.0001 if number < 3 else 0.3, monkeypatch)
    times, _ = windows.time_calls(clock.call, seconds=1.0)
    assert times.median == pytest.approx(300_000)
    assert len(clock.numbers) == 3 + 3 * windows.MOST_WINDOW_CALLS


@pytest.mark.slow
def test_a_program_longer_than_its_parts_is_timed_in_rounds_inside_one_jit_too(monkeypatch):
    monkeypatch.setattr(beside, "is_longer", lambda *_: True)
    results = measured("train", "groups", "callback")
    assert_equal_to_their_parts(results)
    *of_devices, of_host = results
    for result in of_devices:
        assert result.rounds is not None
        assert all(each > 0 for each in result.rounds)
        assert "; in rounds inside one jit " in beside_table.line(result)
    assert of_host.rounds is None  # in which the host takes part


def test_no_time_is_printed_where_a_later_round_returns_something_else(add, monkeypatch):
    is_in_rounds = []
    monkeypatch.setattr(beside, "in_rounds", lambda *of: is_in_rounds.append(True) or beside_rounds.in_rounds(*of))

    def function(layer: Layer, inputs: Inputs) -> Outcome:
        call, y, *_ = layer(inputs)
        return Outcome((call._replace(y=y + len(is_in_rounds)),), {})

    [wrong] = measured(add("other in rounds", function), rounds=True)
    assert wrong.failure is not None
    assert wrong.failure.startswith("no figures, the last round is wrong: y of call 0")


def test_a_round_follows_another_and_the_results_are_those_of_the_last():
    seen = []

    def note(x: Any) -> np.ndarray:
        seen.append(np.asarray(x))
        return np.array(len(seen), np.float32)

    def function(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * weight, io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True)

    rounds = beside_rounds.in_rounds(function, lambda results: results[0], beside.make_mesh(1))
    x = jnp.arange(6.0).reshape(3, 2)
    y, number = jax.jit(rounds)(x, jnp.float32(3))
    np.testing.assert_array_equal(y, 3 * x)
    assert float(number) == len(seen) == beside_rounds.ROUNDS
    np.testing.assert_array_equal(seen, np.broadcast_to(x, (beside_rounds.ROUNDS, 3, 2)))


# --- the command ------------------------------------------------------------------------------------------------------


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxmoe.bench", "beside", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        timeout=240,
    )


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_number_of_tokens_and_program(tmp_path):
    path = tmp_path / "results"
    arguments = ("--ep=2", "--shape=32,48,8,2", "--tokens=8,16", "--programs=loss,groups", "--seconds=0.01")
    done = program(*arguments, "--rounds", f"--implementation={IMPLEMENTATION}", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu x 2, 1 process(es), jax ")
    lines = re.findall(r"^(loss|groups) +(8|16) +(?:equal|\de-\d\d) +\d+\.\d .* \d+\.\d{3} [a-z]", done.stdout, re.M)
    assert lines == [("loss", "8"), ("groups", "8"), ("loss", "16"), ("groups", "16")]
    results = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(result["program"], str(result["tokens"])) for result in results] == lines
    for result in results:
        assert result["ratio"] == pytest.approx(result["microseconds"] / (result["layer"] + result["work"]))
        assert len(result["rounds"]) == 3


@pytest.mark.slow
def test_the_command_says_what_is_wrong_with_its_flags():
    done = program("--programs=plain,nothing")
    assert done.returncode == 1
    assert "jaxmoe bench: --programs=nothing is not one of plain, stats, loss" in done.stderr


def test_options_say_what_is_wrong_with_them():
    for changes, message in (
        ({"tokens": (8, 0)}, r"--tokens=8,0: a rank needs at least one token"),
        ({"ranks": -1}, r"--ep=-1: a number of ranks is at least 1"),
        ({"precision": "w8a16"}, r"--precision=w8a16 is not one of fp8, fp8-e8m0, which take wide experts"),
        ({"implementation": "fast"}, r"--implementation=fast is not one of megakernel"),
    ):
        with pytest.raises(ValueError, match=message):
            options("plain", **changes)
    assert options().programs == tuple(PROGRAMS)
    with pytest.raises(ValueError, match=r"num_experts=9 cannot be spread over the 2 ranks"):
        measured("plain", shape=dataclasses.replace(SHAPE, num_experts=9))
    with pytest.raises(ValueError, match=r"hidden=33, by which .*, cannot be spread over 2 ranks"):
        measured("plain", shape=dataclasses.replace(SHAPE, hidden=33))


def test_without_a_shape_it_has_the_widths_of_qwen3_and_32_experts_for_each_rank():
    mesh = beside.make_mesh(4)
    assert beside._shape_of(BesideOptions(), mesh) == LayerShape(2048, 768, 128, 8)
