"""Backward passes in the benchmark of the layer: what is timed, what is checked first, and what is counted."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from jaxmoe import native
from jaxmoe.bench import candidates, gradient_check, inputs, layer, passes, shapes, table, traffic
from jaxmoe.bench.backward_traffic import BackwardLinks, BackwardMemory, Kept, KeptMemory, of_backward, of_both
from jaxmoe.bench.options import BASELINE, MEASURED, Options, Sweep
from jaxmoe.bench.passes import Gradients, Results
from jaxmoe.bench.shapes import LayerShape
from jaxmoe.bench.traffic import MegakernelMemory, Routing
from jaxmoe.options import Arguments
from jaxmoe.plan import KernelPlan, Shape
from jaxmoe.testing import dense, make_ids, relative_error

TINY = shapes.Case("tiny", LayerShape(hidden=32, intermediate=80, num_experts=8, top_k=2), tokens=40)
RANKS = 4
ARRAYS = ("x", "topk_weights", "w_gate", "w_up", "w_down")


def options(**changes: Any) -> Options:
    quick: dict[str, Any] = {"tokens": (24,), "ranks": (RANKS,), "blocks": 2, "seconds": 0.0, "passes": ("backward",)}
    return Options((TINY,), **quick | changes)


def run(chosen: Options, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results of a run."""
    status = layer.run(dataclasses.replace(chosen, json=path))
    return status, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@functools.cache
def make_mesh(ranks: int = RANKS) -> jax.sharding.Mesh:
    return jax.make_mesh((ranks,), (inputs.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


@functools.cache
def make_inputs(tokens: int, routing: Any) -> inputs.Inputs:
    experts = inputs.random_experts(TINY.shape, make_mesh(), jnp.bfloat16)
    return inputs.make_inputs(TINY.shape, experts, tokens, routing, make_mesh(), sets=1)


@functools.cache
def make_gradient_inputs(tokens: int, routing: Any) -> gradient_check.GradientInputs:
    return gradient_check.make_gradient_inputs(make_inputs(tokens, routing), make_mesh())


def measure(pass_name: Any, routing: Any = "uniform") -> table.Result:
    """A line of `"xla"`."""
    candidate, gradients = candidates.Candidate("xla", pass_name=pass_name), make_gradient_inputs(24, routing)
    result, outputs = layer.measure(
        "tiny", candidate, make_inputs(24, routing), make_mesh(), options(), gradients=gradients
    )
    assert outputs == []
    return result


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_implementation_has_all_passes_and_they_pass_the_check(tmp_path):
    chosen = options(implementations=MEASURED, passes=("backward", "both", "frozen"))
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    names = ["xla", "megakernel", "reference", BASELINE]
    assert [(r["pass_name"], r["implementation"]) for r in results] == [
        (pass_name, name) for pass_name in ("backward", "both", "frozen") for name in names
    ]
    for result in results:
        assert result["checked"]
        assert result["relative_error"] <= result["allowed_error"]
        products = {"backward": 6, "both": 9, "frozen": 3}[result["pass_name"]]
        assert result["tflops"] == pytest.approx(2 * products * 40 * 2 * 32 * 80 / result["microseconds"] / 1e6)
        assert (result["hbm_bytes"] is None) == (result["implementation"] != "megakernel")
        assert result["memory_mib"] == pytest.approx(result["temporary_mib"] + (result["arena_mib"] or 0))
    # Compared within a pass.
    assert results[5]["times_faster"] == {"xla": results[4]["microseconds"] / results[5]["microseconds"]}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "routing"), [("f16", "zipf"), ("bf16", "one-hot")])
def test_gradients_of_uneven_routings_pass_the_check(dtype, routing, tmp_path):
    chosen = options(implementations=("megakernel", "xla"), dtype=dtype, routing=routing)
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    assert [result["checked"] for result in results] == [True, True]


def test_a_backward_pass_computes_no_output_and_both_computes_everything():
    made = make_inputs(24, "uniform")
    [arguments] = made.sets
    dy = jnp.ones_like(arguments.x)

    def calls(pass_name: Any) -> tuple[set[str], Results]:
        function, prepare = candidates.program(candidates.Candidate("megakernel"), make_mesh())
        full = arguments._replace(experts=prepare(made.experts))
        compiled = jax.jit(passes.function_of(pass_name, function)).lower(full, dy).compile()
        return set(re.findall(r"jaxmoe_(forward|backward)", str(compiled.as_text()))), compiled(full, dy)

    for pass_name, targets in (
        ("forward", {"forward"}),
        ("backward", {"backward"}),
        ("both", {"forward", "backward"}),
        ("frozen", {"backward"}),
    ):
        found, results = calls(pass_name)
        assert found == targets
        assert (results.y is not None) == ("forward" in targets)
        assert (results.gradients is not None) == ("backward" in targets)
        if results.gradients is not None:
            assert (results.gradients.experts is None) == (pass_name == "frozen")


@pytest.mark.slow
def test_a_backward_pass_shows_and_sweeps_its_own_plan(tmp_path, capsys):
    sweep = Sweep(unit_tiles=(1,), lag_units=(0, 2), segment_tiles=(1, 3))
    chosen = options(
        implementations=("megakernel",), sweep=sweep, routing="zipf", passes=("forward", "backward", "both")
    )
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    plans = [(r["pass_name"], *(r["plan"][n] for n in ("unit_tiles", "lag_units", "segment_tiles"))) for r in results]
    forward, backward = [plan for plan in plans if plan[0] == "forward"], [p for p in plans if p[0] == "backward"]
    assert forward == [("forward", 2, 1, 0), ("forward", 1, 0, 0), ("forward", 1, 2, 0)]
    assert backward == [
        ("backward", 2, 1, 3),
        ("backward", 1, 0, 1),
        ("backward", 1, 0, 3),
        ("backward", 1, 2, 1),
        ("backward", 1, 2, 3),
    ]
    # Other segments sum weight gradients in another order: they are checked like the default plan.
    assert [r["same_bits"] for r in results[3:8]] == [None, None, True, None, True]
    assert plans[8:] == [("both", 2, 1, 0)]
    assert results[8]["plan"]["backward"] == results[3]["plan"]
    out = capsys.readouterr().out
    assert re.search(r"tiny +40 +4 backward megakernel +1/2/\d+/4/1 ", out)
    assert re.search(r"tiny +40 +4 both +megakernel +recompute ", out)


@pytest.mark.slow
def test_gate_and_up_in_one_array_are_measured_beside_two(tmp_path, capsys):
    chosen = options(
        implementations=("megakernel", "xla"), fused=("halves", "interleaved"), passes=("forward", "backward")
    )
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    lines = [(r["pass_name"], r["implementation"], (r["plan"] or {}).get("fused")) for r in results]
    assert lines == [
        (pass_name, implementation, layout)
        for pass_name in ("forward", "backward")
        for implementation in ("xla", "megakernel")
        for layout in (None, "halves", "interleaved")
    ]
    assert all(r["checked"] for r in results)
    assert re.search(r"tiny +40 +4 backward megakernel +interleaved ", capsys.readouterr().out)


def test_what_cannot_be_fused_is_said():
    with pytest.raises(ValueError, match=r"--fused=columns is not one of halves, interleaved"):
        options(fused=("columns",))
    with pytest.raises(ValueError, match=r"--fused is of wide experts of moe_layer, and this is --dtype=fp8-block"):
        options(fused=("halves",), dtype="fp8-block")


def test_plans_of_a_backward_pass_have_the_ring_tiles_that_they_need():
    default = KernelPlan(2, 1, 11, 4, segment_tiles=3)
    assert Sweep(segment_tiles=(2, 20)).plans(default) == [
        default,
        KernelPlan(2, 1, 11, 4, segment_tiles=2),
        KernelPlan(2, 1, 24, 4, segment_tiles=20),
    ]
    assert Sweep(segment_tiles=(2,)).plans(KernelPlan(2, 1, 11)) == [KernelPlan(2, 1, 11)]


def test_memory_is_that_of_the_pass():
    made, mesh = make_inputs(24, "uniform"), make_mesh()
    found = {name: candidates.candidates("megakernel", made, mesh, Sweep(), name)[0] for name in passes.PASSES}
    arenas = {name: candidates.arena_bytes(candidate, made, mesh) for name, candidate in found.items()}
    told = candidates.explain(found["forward"], made, mesh)
    assert arenas["forward"] == sum(told.memory_bytes.values())
    assert arenas["backward"] == sum(told.backward_memory_bytes.values())
    assert arenas["both"] == arenas["backward"]
    of_trained = sum(told.backward_memory_bytes[name] for name in ("arena: weight_sums", "arena: h"))
    assert of_trained > 0
    assert arenas["frozen"] == sum(told.backward_memory_bytes.values()) - of_trained
    assert candidates.arena_bytes(candidates.Candidate("xla", pass_name="backward"), made, mesh) is None


def test_a_baseline_without_derivative_says_so(monkeypatch, tmp_path, capsys):
    def program(candidate: Any, mesh: Any) -> Any:
        @jax.custom_jvp
        def function(arguments: Arguments) -> jax.Array:
            return arguments.x

        @function.defjvp
        def _(*_: Any) -> Any:
            raise NotImplementedError("no derivative")

        return function, lambda experts: experts

    monkeypatch.setattr(layer, "program", program)
    status, results = run(options(implementations=(BASELINE,)), tmp_path / "results")
    assert (status, results) == (1, [])
    assert "cannot run: it has no backward pass here: no derivative" in capsys.readouterr().out


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["uniform", "one-hot"])
def test_the_truth_of_a_sample_is_a_piece_of_all_gradients_in_float32(routing, monkeypatch):
    # A popular expert has several chunks, and the last one is not full.
    monkeypatch.setattr(gradient_check, "CHUNK_ROWS", 32)
    made, mesh = make_inputs(24, routing), make_mesh()
    gradients = gradient_check.make_gradient_inputs(made, mesh)
    [arguments], [sample], [dy] = made.sets, gradients.samples, gradients.cotangents

    def output(x: Any, weights: Any, experts: Any) -> jax.Array:
        return dense(Arguments(x, jnp.asarray(np.asarray(arguments.topk_ids)), weights, experts))

    wide = [np.asarray(arguments.x, np.float32), np.asarray(arguments.topk_weights)]
    experts = jax.tree.map(lambda array: np.asarray(array, np.float32), made.experts)
    dx, dweights, dexperts = jax.vjp(output, *map(jnp.asarray, wide), experts)[1](np.asarray(dy, np.float32))
    pieces = {piece.name: piece for piece in (*sample.of_tokens, *(p for e in sample.of_experts for p in e))}
    assert relative_error(pieces["x"].truth, dx[sample.tokens]) < 1e-5
    assert relative_error(pieces["topk_weights"].truth, dweights[sample.tokens]) < 1e-5
    assert sorted(sample.experts) == list(range(8))
    assert len(sample.columns) == 64
    assert {0, 79} <= set(sample.columns.tolist())
    for number in range(8):
        for name in ("w_gate", "w_up", "w_down"):
            full, piece = np.asarray(getattr(dexperts, name)[number]), pieces[f"{name} of expert {number}"]
            want = full[sample.columns] if name == "w_down" else full[:, sample.columns]
            assert relative_error(piece.truth, want) < 1e-5
            has_rows = bool((np.asarray(arguments.topk_ids) == number).any())
            assert piece.truth.any() == has_rows
            assert has_rows or piece.allowed == float(jnp.finfo(jnp.bfloat16).eps) / 4


def change_gradients(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Changes the gradients that every backward pass returned, so that none of them is another program to compile."""
    right = layer.compare

    def compare(results: Results, *rest: Any) -> Any:
        return right(results._replace(gradients=change(results.gradients)), *rest)

    monkeypatch.setattr(layer, "compare", compare)


def planted(name: str, change: Any) -> Any:
    """A change of one gradient."""

    def of(gradients: Gradients) -> Gradients:
        if name in ("x", "topk_weights"):
            return gradients._replace(**{name: change(getattr(gradients, name))})
        experts = dataclasses.replace(gradients.experts, **{name: change(getattr(gradients.experts, name))})
        return gradients._replace(experts=experts)

    return of


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    "change",
    [lambda array: array * array.dtype.type(1.03125), lambda array: array.at[-1].set(jnp.nan)],
    ids=["all of it", "the last token or expert"],
)
def test_a_wrong_gradient_is_not_timed(name, change, monkeypatch):
    change_gradients(monkeypatch, planted(name, change))
    result = measure("backward")
    assert not result.checked
    assert result.microseconds is None
    assert result.worst_piece.startswith(name)
    assert re.search(rf"above the allowed error of \S+ in {name}.*: not timed", table.line(result))


def test_a_right_gradient_is_timed():
    result = measure("backward")
    assert result.checked
    assert result.microseconds is not None


def test_a_gradient_of_an_expert_without_rows_has_to_be_zero(monkeypatch):
    change_gradients(monkeypatch, planted("w_up", lambda array: array.at[5, 3, 0].add(0.25)))
    result = measure("backward", "one-hot")
    assert (result.checked, result.worst_piece) == (False, "w_up of expert 5")


@pytest.mark.slow
def test_both_is_refused_for_a_wrong_output_too(monkeypatch):
    right = candidates.program

    def program(candidate: Any, mesh: Any) -> Any:
        function, prepare = right(candidate, mesh)
        # Right gradients of a wrong output.
        return lambda arguments: function(arguments) + jnp.bfloat16(0.25), prepare

    monkeypatch.setattr(layer, "program", program)
    assert measure("backward").checked
    result = measure("both")
    assert (result.checked, result.worst_piece) == (False, "y")


# --- what is counted --------------------------------------------------------------------------------------------------


def test_operations_are_those_of_the_products():
    sizes: dict[str, Any] = {"tokens": 3, "top_k": 2, "hidden": 5, "intermediate": 7}
    row = 3 * 2 * 5 * 7
    assert [passes.flops(name, **sizes) for name in passes.PASSES] == [6 * row, 12 * row, 18 * row, 6 * row]
    assert [passes.flops(name, **sizes, gated=False) for name in passes.PASSES] == [4 * row, 8 * row, 12 * row, 4 * row]


# Two ranks of two tokens. Rank 0 owns the experts 0 and 1, rank 1 owns 2 and 3, and nobody asks for expert 3.
SMALL = Shape(tokens=2, hidden=10, intermediate=7, num_experts=4, top_k=2, ranks=2)
IDS = np.array([[0, 2], [1, -1], [2, 2], [1, 2]], np.int32)
TOKEN, H, MATRIX = 10 * 2, 7 * 2, 10 * 7 * 2
# Two column tiles of gradients, and segments of two rows: expert 2, with four, has two.
TILE = native.schedule().TileSizes(2, 4, 4)
PLAN = KernelPlan(1, 0, 4, segment_tiles=1)


def test_the_memory_terms_of_a_backward_pass_equal_a_count_by_hand():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    # Rank 1 has the rows of slots 0:1, 2:0, 2:1 and 3:1; its tokens use four slots.
    assert BackwardMemory.of_rank(routing, SMALL, 1, PLAN, TILE) == BackwardMemory(
        weights_decoded=0,
        weights_of_gate_up=2 * MATRIX,
        weights_of_h_gradient=MATRIX,
        weights_of_token_gradient=2 * MATRIX,
        tokens_staged=2 * 2 * 2 * TOKEN,
        weights_staged=2 * 2 * 4 + 4 * 4,
        tokens_pulled=4 * 2 * TOKEN,
        tokens_kept=0,
        rows_written=4 * 2 * TOKEN,
        rows_read=4 * (3 + 2) * TOKEN,
        projections_written=4 * 4 * H,
        projections_read=4 * 6 * H,
        h_written=4 * H,
        hidden_read=4 * H,
        row_numbers_written=4 * (1 + 2) * 4,
        row_numbers_read=4 * (1 + 2) * 4,
        weight_gradients_written=2 * 3 * MATRIX,  # of expert 3 too
        weight_sums=2 * 3 * 10 * 7 * 4,  # of expert 2, written once and read once
        answers_written=4 * (TOKEN + 4),
        answers_read=4 * (TOKEN + 4),
        gradients_written=2 * (TOKEN + 2 * 4),
        routing_read=2 * 2 * 4 * 4,
        lists_written=4 * 8,
        lists_read=4 * 8,
    )
    kept = BackwardMemory.of_rank(routing, SMALL, 1, dataclasses.replace(PLAN, keep_tokens=True), TILE)
    assert kept.tokens_kept == 2 * TOKEN  # the row of slot 0:1
    assert kept.tokens_pulled == 4 * 2 * TOKEN
    one_segment = BackwardMemory.of_rank(routing, SMALL, 1, KernelPlan(1, 0, 4, segment_tiles=2), TILE)
    assert one_segment.weight_sums == 0
    trained = BackwardMemory.of_rank(routing, SMALL, 1, PLAN, TILE)
    assert BackwardMemory.of_rank(routing, SMALL, 1, PLAN, TILE, frozen=True) == dataclasses.replace(
        trained,
        rows_read=4 * 2 * TOKEN,
        projections_read=4 * 4 * H,
        h_written=0,
        hidden_read=0,
        weight_gradients_written=0,
        weight_sums=0,
    )


def test_the_link_terms_of_a_backward_pass_equal_a_count_by_hand():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    # Over the link go slot 0:1, of rank 0, and slot 3:0, of rank 1.
    both = BackwardLinks(rows_received=2 * TOKEN, weights_received=4, answers_received=TOKEN + 4, lists_received=4)
    assert [BackwardLinks.of_rank(routing, SMALL, rank, keep_tokens=False) for rank in (0, 1)] == [both, both]


def counted_slot_by_slot(ids: np.ndarray, shape: Shape, keep_tokens: bool) -> list[dict[str, int]]:
    """What every rank moves for its tokens and rows, in a walk over the slots as the kernel sees them."""
    kept = set()
    pair, token, h = (
        2 * shape.token_bytes,
        shape.token_bytes,
        shape.h_bytes,
    )
    ranks: list[dict[str, int]] = [{} for _ in range(shape.ranks)]

    def add(rank: int, **sizes: int) -> None:
        for name, size in sizes.items():
            ranks[rank][name] = ranks[rank].get(name, 0) + size

    for number, chosen in enumerate(ids):
        home = number // shape.tokens
        add(home, tokens_staged=pair + pair, gradients_written=token)
        for expert in chosen:
            add(home, routing_read=3 * 4 + 4, weights_staged=4, gradients_written=4)
            if expert < 0:
                continue
            owner = int(expert) // shape.local_experts
            again = keep_tokens and (owner, number) in kept
            kept.add((owner, number))
            if keep_tokens and owner != home:
                add(owner, tokens_kept=pair)
            if owner == home or not again:
                add(home, tokens_pulled=pair)
            add(home, weights_staged=4, answers_written=token + 4, answers_read=token + 4)
            add(owner, rows_written=pair, lists_written=8, lists_read=8)
            # gate_up, h_gradient, token_gradient; then the gradients of w_gate, w_up, w_down
            add(owner, rows_read=token, projections_written=2 * h)
            add(owner, rows_read=token, projections_read=2 * h, projections_written=2 * h, h_written=h)
            add(owner, projections_read=2 * h)
            add(owner, rows_read=token, projections_read=h)
            add(owner, rows_read=token, projections_read=h)
            add(owner, rows_read=token, hidden_read=h)
            if owner != home:
                add(owner, rows_received=0 if again else pair, weights_received=4, lists_received=4)
                add(home, answers_received=token + 4)
    return ranks


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.sampled_from([1, 2, 4]),
    local_experts=st.integers(1, 4),
    tokens=st.integers(1, 12),
    kind=st.sampled_from(["uniform", "zipf", "one-hot", "unused-slots", "all-unused", "repeated"]),
    keep_tokens=st.booleans(),
)
def test_the_terms_equal_a_count_slot_by_slot_for_every_routing(seed, ranks, local_experts, tokens, kind, keep_tokens):
    num_experts = ranks * local_experts
    top_k = min(3, num_experts)
    shape = Shape(tokens, 6, 5, num_experts, top_k, ranks=ranks)
    ids = make_ids(np.random.default_rng(seed), tokens * ranks, num_experts, top_k, kind)
    routing, plan = Routing.of(ids, ranks, num_experts), dataclasses.replace(PLAN, keep_tokens=keep_tokens)
    for rank, counts in enumerate(counted_slot_by_slot(ids, shape, keep_tokens)):
        memory = BackwardMemory.of_rank(routing, shape, rank, plan, TILE).items()
        links = BackwardLinks.of_rank(routing, shape, rank, keep_tokens).items()
        by_slot = {
            name: size for name, size in (memory | links).items() if not name.startswith(("weights_of", "row_n"))
        }
        del by_slot["weight_gradients_written"], by_slot["weight_sums"]
        assert {name: size for name, size in by_slot.items() if size} == {n: size for n, size in counts.items() if size}


def test_both_passes_move_the_bytes_of_each():
    routings = [Routing.of(IDS, ranks=2, num_experts=4)]
    backward = of_backward(routings, SMALL, PLAN, TILE)
    both = of_both(routings, SMALL, KernelPlan(1, 0, 4), PLAN, TILE)
    assert both.complete
    assert both.memory.rank == backward.memory.rank == 1
    forward = MegakernelMemory.of_rank(routings[0], SMALL, 1, keep_tokens=False)
    assert both.memory.terms.total == forward.total + backward.memory.terms.total
    assert both.memory.terms.items()["forward_weights"] == forward.weights
    assert both.links.terms.total == backward.links.terms.total + (
        traffic.of_megakernel(routings, SMALL, keep_tokens=False).links.terms.total
    )


def test_gate_and_up_that_are_kept_are_written_once_and_not_computed_again():
    routing = Routing.of(IDS, ranks=2, num_experts=4)
    nothing = BackwardMemory.of_rank(routing, SMALL, 1, PLAN, TILE)
    # Expert 2 of rank 1 has two row tiles of two rows, here each a unit of its own.
    for tiles, kept, again in ((1, 2, 2), (2, 4, 0), (5, 4, 0)):
        found = Kept.of_rank(routing, 1, PLAN, TILE, tiles)
        assert found == Kept(rows=kept, empty_rows=2 * tiles - kept, rows_again=again, experts_again=min(again, 1))
        assert KeptMemory.of(found, SMALL) == KeptMemory(2 * kept * H, 2 * (2 * tiles - kept) * H)
        assert BackwardMemory.of_rank(routing, SMALL, 1, PLAN, TILE, kept_tiles=tiles) == dataclasses.replace(
            nothing,
            weights_of_gate_up=2 * MATRIX if again else 0,
            rows_read=nothing.rows_read - kept * TOKEN,
            projections_written=nothing.projections_written - 2 * kept * H,
        )
    # A unit that is not kept whole is computed again whole.
    of_two = KernelPlan(2, 0, 4, segment_tiles=2)
    assert Kept.of_rank(routing, 1, of_two, TILE, 1) == Kept(rows=2, empty_rows=0, rows_again=4, experts_again=1)
    assert Kept.of_rank(routing, 1, PLAN, TILE, 0) == Kept(rows=0, empty_rows=0, rows_again=4, experts_again=1)


@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    unit_tiles=st.integers(1, 3),
    segment_tiles=st.integers(3, 5),
    tiles=st.integers(0, 12),
)
def test_what_is_not_kept_is_what_the_schedule_computes_again(rows, unit_tiles, segment_tiles, tiles):
    steps, experts = native.schedule(), len(rows)
    shape = steps.Shape(ranks=1, tokens=64, hidden=8, intermediate=8, num_experts=experts, top_k=1)
    parts = {"keep_tokens": 0, "segment_tiles": segment_tiles, "saved_tiles": tiles}
    schedule = steps.Schedule(TILE, unit_tiles, 0, 12, 1, 1, 1, 0, **parts)
    tasks = [task for task in steps.tasks(shape, schedule, rows, 0) if task.gemm == steps.Gemm.gate_up]
    of_tiles = {(task.expert, task.row_tile): task.rows for task in tasks}
    routing = Routing(slots=np.array([rows]), tokens=np.zeros((1, 1), int))
    kept = Kept.of_rank(routing, 0, KernelPlan(unit_tiles, 0, 12, segment_tiles=segment_tiles), TILE, tiles)
    assert kept.rows_again == sum(of_tiles.values())
    assert kept.experts_again == len({expert for expert, _ in of_tiles})


def test_both_passes_with_residuals_saved_count_what_is_kept_and_sums_at_experts():
    made, mesh = make_inputs(24, "uniform"), make_mesh()

    def terms(**plan: bool) -> list[dict[str, Any]]:
        found = []
        for residuals in ("recompute", "save"):
            [candidate] = candidates.candidates("megakernel", made, mesh, Sweep(), "both", residuals)
            assert candidate.plan is not None
            candidate = dataclasses.replace(candidate, plan=dataclasses.replace(candidate.plan, **plan))
            moved = candidates.moved(candidate, made, mesh)
            assert moved is not None
            found.append(moved.memory.terms.items())
        return found

    again, saved = terms()
    rows = made.routings[0].rows(int(np.argmax([made.routings[0].rows(rank) for rank in range(RANKS)])))
    shape = made.shape
    # All tiles have room here, so nothing is computed again.
    assert again["kept_projections_written"] == again["kept_zeros_written"] == 0
    assert saved["kept_projections_written"] == rows * 2 * shape.h_bytes
    assert saved["backward_weights_of_gate_up"] == 0
    assert again["backward_weights_of_gate_up"] == again["backward_weights_of_token_gradient"]
    assert again["backward_rows_read"] - saved["backward_rows_read"] == rows * shape.token_bytes
    written = again["backward_projections_written"] - saved["backward_projections_written"]
    assert written == rows * 2 * shape.h_bytes
    same = [name for name in again if again[name] == saved[name]]
    assert len(again) - len(same) == 5
    assert terms(sum_at_experts=True)[0]["forward_sums_written"] > again["forward_sums_written"] == 0


def test_terms_of_a_backward_pass_are_printed(capsys):
    assert layer.run(options(implementations=("megakernel", "xla"), terms=True)) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +[\d.]+ MB   weight gradients written$", out, re.M)
    assert "HBM: not counted for xla, pass backward" in out


# --- the command line -------------------------------------------------------------------------------------------------


def test_options_that_cannot_be_say_why():
    with pytest.raises(ValueError, match=r"--segment-tiles is of the plan of a backward pass.*Add backward"):
        options(implementations=("megakernel",), passes=("forward",), sweep=Sweep(segment_tiles=(1,)))
    for name in ("share_columns", "sum_at_experts"):
        sweep = Sweep(**{name: (True,)})
        text = rf"--{name.replace('_', '-')} is of the plan of a forward pass.*Add forward"
        with pytest.raises(ValueError, match=text):
            options(implementations=("megakernel",), passes=("backward",), sweep=sweep)
    with pytest.raises(ValueError, match=r"--pass=both takes the default plans"):
        options(implementations=("megakernel",), passes=("both",), sweep=Sweep(unit_tiles=(1,)))
    with pytest.raises(ValueError, match=r"--segment-tiles=0: a segment has at least one row tile"):
        Sweep(segment_tiles=(0,))


def test_plans_of_the_table_say_their_pass():
    plan: dict[str, Any] = {"unit_tiles": 5, "lag_units": 2, "ring_tiles": 41, "chunk_rows": 8, "keep_tokens": True}
    assert table.plan_text(plan | {"segment_tiles": 0}) == "5/2/41/8k"
    assert table.plan_text(plan | {"segment_tiles": 5}) == "5/2/41/8k/5"
    assert table.plan_text(plan | {"sum_at_experts": True}) == "5/2/41/8k+"
    both = plan | {"segment_tiles": 0, "backward": plan, "residuals": "save"}
    assert table.plan_text(both) == "save"


@pytest.mark.slow
def test_the_program_prints_a_line_for_each_pass(tmp_path):
    path = tmp_path / "results"
    command = [sys.executable, "-m", "jaxmoe.bench", "layer", "--shape=24,16,24,4,2", "--ep=2", "--blocks=2"]
    flags = ["--implementation=megakernel", "--pass=forward,backward,both", "--segment-tiles=1", "--seconds=0"]
    done = subprocess.run(
        [*command, *flags, f"--json={path}"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[3:]
    expected = ["forward", "backward", "backward", "both"]
    assert [line.split()[3] for line in lines] == expected
    assert [json.loads(line)["pass_name"] for line in path.read_text().splitlines()] == expected
    done = subprocess.run([*command, "--pass=sideways"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "jaxmoe bench: --pass=sideways is not one of forward, backward, both, frozen" in done.stderr
