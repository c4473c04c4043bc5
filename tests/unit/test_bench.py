"""The benchmark of the layer: what it prints, and when it prints no time."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import threading
import time
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxmoe.bench import candidates, inputs, layer, shapes, table, timing
from jaxmoe.bench.copies import CompetingCopies
from jaxmoe.bench.options import BASELINE, MEASURED, Options, Sweep
from jaxmoe.bench.peaks import Peaks
from jaxmoe.bench.shapes import LayerShape
from jaxmoe.plan import KernelPlan

TINY = shapes.Case("tiny", LayerShape(hidden=32, intermediate=48, num_experts=8, top_k=2), tokens=40)
OTHER = shapes.Case("other", LayerShape(hidden=16, intermediate=24, num_experts=4, top_k=1))
RANKS = 4


def options(*cases: shapes.Case, **changes: Any) -> Options:
    quick: dict[str, Any] = {"tokens": (24,), "ranks": (RANKS,), "blocks": 3, "seconds": 0.0}
    return Options(cases or (TINY,), **quick | changes)


def run(chosen: Options, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results of a run."""
    status = layer.run(dataclasses.replace(chosen, json=path))
    return status, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def make_mesh(ranks: int = RANKS) -> jax.sharding.Mesh:
    return jax.make_mesh((ranks,), (inputs.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "routing"), [("bf16", "uniform"), ("f16", "uniform"), ("f16", "zipf"), ("bf16", "one-hot")]
)
def test_every_implementation_passes_the_check(dtype, routing, tmp_path):
    status, results = run(options(implementations=MEASURED, dtype=dtype, routing=routing), tmp_path / "results")
    assert status == 0
    # "xla" comes first, so that the others can be compared with it.
    assert [result["implementation"] for result in results] == ["xla", "megakernel", "reference", BASELINE]
    for result in results:
        assert result["checked"]
        is_dropping = result["implementation"] == BASELINE and routing != "uniform"
        assert is_dropping or result["relative_error"] <= result["allowed_error"]
        assert result["dropped_rows"] == 0 or is_dropping
        assert result["fastest"] <= result["microseconds"] <= result["slowest"]
        flops = 6 * 40 * 2 * 32 * 48
        assert result["tflops"] == pytest.approx(flops / result["microseconds"] / 1e6)
        if result["implementation"] != "reference":
            for name in ("hbm", "nvlink"):
                moved = sum(result[f"{name}_bytes"].values())
                assert result[f"{name}_gbs"] == pytest.approx(moved / result["microseconds"] / 1e3)
        assert (result["arena_mib"] is not None) == (result["implementation"] == "megakernel")
    assert results[1]["times_faster"] == {"xla": results[0]["microseconds"] / results[1]["microseconds"]}
    assert set(results[3]["times_faster"]) == {"xla", "megakernel", "reference"}


@pytest.mark.slow
def test_all_shapes_and_token_counts_of_a_list_are_measured_in_one_run(tmp_path, capsys):
    status, results = run(options(OTHER, TINY, tokens=(8, 16)), tmp_path / "results")
    assert status == 0
    assert [(result["shape"], result["tokens"]) for result in results] == [("other", 8), ("other", 16), ("tiny", 40)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-3:]] == [["other", "8"], ["other", "16"], ["tiny", "40"]]
    assert max(map(len, lines[2:])) <= 186


@pytest.mark.slow
def test_all_numbers_of_ranks_of_a_list_are_measured_in_its_order_and_compared_from_two_ranks_on(tmp_path, capsys):
    chosen = options(TINY, ranks=(1, 2, 4), implementations=("megakernel", "xla"))
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    assert [(r["ranks"], r["implementation"]) for r in results] == [
        (ranks, implementation) for ranks in (1, 2, 4) for implementation in ("xla", "megakernel")
    ]
    on_one, on_two, on_four = results[:2], results[2:4], results[4:]
    for result in (*on_one, *on_two):
        assert (result["scaling"], result["scaling_ranks"]) == (None, None)
    for reference, result in zip(on_two, on_four, strict=True):
        assert result["scaling"] == reference["microseconds"] / result["microseconds"]
        assert result["scaling_ranks"] == 2
    cells = [None] * 4 + [f"{result['scaling']:.2f} of EP 2" for result in on_four]
    # Other implementations are compared on as many ranks.
    xla, megakernel = on_four
    assert megakernel["times_faster"]["xla"] == xla["microseconds"] / megakernel["microseconds"]
    header, *lines = capsys.readouterr().out.splitlines()[2:]
    assert header.split()[:4] == ["shape", "tokens", "EP", "pass"]
    assert header.endswith(" scaling")
    assert [int(line.split()[2]) for line in lines] == [r["ranks"] for r in results]
    found = [re.search(r" (\S+ of EP \d+)$", line) for line in lines]
    assert [match and match[1] for match in found] == cells


@pytest.mark.slow
def test_a_number_of_ranks_that_comes_twice_is_measured_once(tmp_path):
    status, results = run(options(ranks=(2, 0, 2, jax.device_count())), tmp_path / "results")
    assert status == 0
    assert [result["ranks"] for result in results] == [2, jax.device_count()]


@pytest.mark.slow
def test_a_scaling_is_of_default_plans_and_of_one_shape(tmp_path):
    chosen = options(OTHER, TINY, ranks=(2, 4), implementations=("megakernel",), sweep=Sweep(lag_units=(0, 2)))
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    assert [(r["shape"], r["ranks"]) for r in results[::3]] == [("other", 2), ("other", 4), ("tiny", 2), ("tiny", 4)]
    assert [result["scaling_ranks"] for result in results] == [None, None, None, 2, None, None] * 2
    for on_two, on_four in ((results[0], results[3]), (results[6], results[9])):
        assert on_four["scaling"] == on_two["microseconds"] / on_four["microseconds"]


@pytest.mark.slow
def test_a_number_of_ranks_that_a_shape_cannot_have_fails_alone(tmp_path, capsys):
    status, results = run(options(OTHER, ranks=(8, 2, 4, 1)), tmp_path / "results")
    assert status == 1
    # Nothing stands in for the line on eight ranks.
    assert [(result["ranks"], result["scaling"]) for result in results] == [(2, None), (4, None), (1, None)]
    out = capsys.readouterr().out
    assert re.search(
        r"^other +24 +8 forward +inputs +- +cannot run: 4 experts cannot be spread over 8 ranks", out, re.M
    )


@pytest.mark.slow
def test_every_plan_of_a_sweep_has_a_line_and_the_bits_of_the_default_plan(tmp_path, capsys):
    sweep = Sweep(unit_tiles=(1, 3), lag_units=(0, 2), keep_tokens=(True,), share_columns=(True,))
    status, results = run(options(implementations=("megakernel",), sweep=sweep, routing="zipf"), tmp_path / "results")
    assert status == 0
    choices = itemgetter("unit_tiles", "lag_units", "ring_tiles", "chunk_rows", "keep_tokens", "share_columns")
    assert [choices(result["plan"]) for result in results] == [
        (2, 1, 18, 4, False, False),
        (1, 0, 18, 4, True, True),
        (1, 2, 18, 4, True, True),
        (3, 0, 18, 4, True, True),
        (3, 2, 18, 4, True, True),
    ]
    assert [result["same_bits"] for result in results] == [None, True, True, True, True]
    assert capsys.readouterr().out.count("same bits") == 4


@pytest.mark.slow
def test_copies_from_each_device_to_the_next_one_run_while_a_layer_is_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(layer, "CompetingCopies", functools.partial(CompetingCopies, size=2**16))
    status, results = run(options(copies=True, seconds=0.3), tmp_path / "results")
    assert status == 0
    assert results[0]["copies_gbs"] > 0
    found = re.search(
        r"^  beside copies from each device to the next one, ([\d.e+-]+) GB/s$", capsys.readouterr().out, re.M
    )
    assert found
    assert float(found[1]) == pytest.approx(results[0]["copies_gbs"], rel=0.01)
    _, results = run(options(), tmp_path / "others")
    assert results[0]["copies_gbs"] is None


def test_copies_need_another_device():
    with pytest.raises(ValueError, match=r"--copies: with one device there is no other one.*Pass --ep=2"):
        layer.run(options(ranks=(1,), copies=True))


def test_competing_copies_count_what_has_arrived_until_they_are_stopped():
    before = threading.active_count()
    with CompetingCopies(jax.devices()[:3], size=2**16) as copies:
        time.sleep(0.3)
    first = copies.gbs
    assert first > 0
    time.sleep(0.05)
    assert copies.gbs == first
    assert threading.active_count() == before


def test_a_swept_ring_that_is_not_named_has_the_tiles_that_a_plan_needs():
    default = KernelPlan(unit_tiles=2, lag_units=1, ring_tiles=18)
    plans = Sweep(lag_units=(1, 20)).plans(default)
    assert plans == [default, default, KernelPlan(2, 20, 42)]
    assert Sweep(ring_tiles=(5, 7)).plans(default) == [default, KernelPlan(2, 1, 5), KernelPlan(2, 1, 7)]
    assert Sweep().plans(default) == [default]


def test_a_sweep_of_both_passes_tries_in_each_what_that_pass_has():
    forward, backward = KernelPlan(1, 1, 2), KernelPlan(1, 1, 4, segment_tiles=2)
    sweep = Sweep(share_columns=(True,), sum_at_experts=(True,), segment_tiles=(1,))
    assert sweep.plans(forward) == [forward, KernelPlan(1, 1, 2, share_columns=True, sum_at_experts=True)]
    assert sweep.plans(backward) == [backward, KernelPlan(1, 1, 4, segment_tiles=1)]


def test_swept_plans_decode_ahead_where_the_default_plan_does_with_the_slots_that_they_need():
    ahead, registers = KernelPlan(1, 1, 4, weight_slots=3), KernelPlan(1, 1, 4)
    assert Sweep(lag_units=(4,)).plans(ahead)[1:] == [KernelPlan(1, 4, 5, weight_slots=5)]
    assert Sweep(lag_units=(4,)).plans(registers)[1:] == [KernelPlan(1, 4, 5)]
    assert Sweep(weight_slots=(0, 9)).plans(ahead)[1:] == [registers, KernelPlan(1, 1, 4, weight_slots=9)]


def test_a_plan_that_cannot_run_says_why_and_the_next_one_is_measured(tmp_path, capsys):
    sweep = Sweep(lag_units=(5,), ring_tiles=(3, 14))
    status, results = run(options(implementations=("megakernel",), sweep=sweep), tmp_path / "results")
    assert status == 1
    assert [result["plan"]["ring_tiles"] for result in results] == [18, 14]
    assert "2/5/3/4 cannot run: moe_layer: plan has ring_tiles=3" in capsys.readouterr().out


def test_terms_are_printed_with_their_sum(capsys):
    assert layer.run(options(implementations=("megakernel", "reference"), terms=True)) == 0
    out = capsys.readouterr().out
    hbm, nvlink = out.split(" MB HBM of rank ")[1].split(" MB NVLink of rank ")
    for part, total in ((hbm, out.split(" MB HBM")[0].split()[-1]), (nvlink, hbm.split()[-1])):
        sizes = [float(size) for size in re.findall(r"^ +([\d.]+) MB   ", part, re.M)]
        assert sum(sizes) == pytest.approx(float(total), abs=0.001 * len(sizes))
    assert "weights" in hbm
    assert "answers received" in nvlink
    assert "HBM: not counted for reference" in out


# --- when no time is printed ------------------------------------------------------------------------------------------


def change_outputs(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Makes every program return `change(candidate, y)`."""
    right = candidates.program

    def program(candidate: Any, mesh: Any) -> Any:
        function, prepare = right(candidate, mesh)
        return lambda arguments: change(candidate, function(arguments)), prepare

    monkeypatch.setattr(layer, "program", program)


@pytest.mark.parametrize(
    "change",
    [
        lambda _, y: y * jnp.bfloat16(1.03125),
        lambda _, y: y.at[-1].set(0),
        lambda _, y: y.at[-1].set(jnp.nan),
    ],
    ids=["all tokens", "one token", "not a number"],
)
def test_a_wrong_output_is_not_timed(change, monkeypatch, tmp_path, capsys):
    change_outputs(monkeypatch, change)
    status, [result] = run(options(), tmp_path / "results")
    assert status == 1
    assert not result["checked"]
    assert result["microseconds"] is None
    assert "above the allowed error" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_is_compared_with_a_number_of_ranks_whose_output_is_wrong(monkeypatch, tmp_path):
    right = candidates.program

    def program(candidate: Any, mesh: Any) -> Any:
        function, prepare = right(candidate, mesh)
        wrong = candidate.implementation == "xla" and mesh.size == 2
        return lambda arguments: function(arguments) * jnp.bfloat16(1 + wrong), prepare

    monkeypatch.setattr(layer, "program", program)
    status, results = run(options(ranks=(2, 4), implementations=("xla", "reference")), tmp_path / "results")
    assert status == 1
    assert [(r["ranks"], r["implementation"], r["checked"], r["scaling_ranks"]) for r in results] == [
        (2, "xla", False, None),
        (2, "reference", True, None),
        (4, "xla", True, None),
        (4, "reference", True, 2),
    ]


def test_a_plan_with_other_bits_is_not_timed(monkeypatch, tmp_path, capsys):
    def one_bit(candidate: Any, y: jax.Array) -> jax.Array:
        words = jax.lax.bitcast_convert_type(y, jnp.uint16)
        other = words.at[3, 5].set(words[3, 5] ^ 1)
        return y if candidate.is_default else jax.lax.bitcast_convert_type(other, y.dtype)

    change_outputs(monkeypatch, one_bit)
    status, results = run(options(implementations=("megakernel",), sweep=Sweep(unit_tiles=(1,))), tmp_path / "results")
    assert status == 1
    assert [result["same_bits"] for result in results] == [None, False]
    assert [result["microseconds"] is None for result in results] == [False, True]
    assert "other bits than with the default plan: not timed" in capsys.readouterr().out


def test_the_checked_tokens_are_those_that_a_capacity_would_drop_first():
    mesh = make_mesh(1)
    experts = inputs.random_experts(TINY.shape, mesh, jnp.bfloat16)
    made = inputs.make_inputs(TINY.shape, experts, 1000, "zipf", mesh, sets=1)
    ids = np.asarray(made.sets[0].topk_ids)
    popular = np.bincount(ids.ravel()).argmax()
    last = np.flatnonzero((ids == popular).any(-1))[-inputs.LAST_TOKENS :]
    assert set(last) <= set(made.samples[0].tokens)


def test_a_case_without_memory_fails_alone(monkeypatch, tmp_path, capsys):
    right = layer.measure

    def measure(name: str, candidate: Any, *rest: Any, **named: Any) -> Any:
        if (name, candidate.implementation) == ("tiny", "xla"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore about it")
        return right(name, candidate, *rest, **named)

    monkeypatch.setattr(layer, "measure", measure)
    status, results = run(options(TINY, OTHER, implementations=("xla", BASELINE)), tmp_path / "results")
    assert status == 1
    assert [(result["shape"], result["implementation"]) for result in results] == [
        ("tiny", BASELINE),
        ("other", "xla"),
        ("other", BASELINE),
    ]
    out = capsys.readouterr().out
    assert re.search(r"^tiny +40 +4 forward +xla +- +failed: RESOURCE_EXHAUSTED: out of memory$", out, re.M)


@pytest.mark.slow
def test_a_shape_that_an_implementation_cannot_run_fails_alone(tmp_path, capsys):
    many = shapes.Case("many", LayerShape(hidden=16, intermediate=16, num_experts=4100, top_k=2))
    odd = shapes.Case("odd", LayerShape(hidden=16, intermediate=16, num_experts=6, top_k=2))
    status, results = run(options(many, odd, OTHER, implementations=("megakernel",)), tmp_path / "results")
    assert status == 1
    assert [result["shape"] for result in results] == ["other"]
    out = capsys.readouterr().out
    assert re.search(r"^many +24 +4 forward +megakernel +- +cannot run: moe_layer: .*4100", out, re.M)
    assert re.search(r"^odd +24 +4 forward +inputs +- +cannot run: 6 experts cannot be spread over 4 ranks", out, re.M)


# --- weights that L2 would keep ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read_bytes", [1, 10**6, 49_999_999, 50_000_000, 99_999_999, 100_000_000, 10**9])
def test_copies_of_the_weights_are_more_than_twice_the_cache_and_no_more_than_that_takes(read_bytes):
    copies = inputs.weight_copies(read_bytes)
    assert copies * read_bytes > 2 * inputs.L2_BYTES
    assert (copies - 1) * read_bytes <= 2 * inputs.L2_BYTES


def test_copies_hold_the_same_numbers_at_other_addresses():
    weights = {"w": jnp.arange(1000.0), "none": None}
    copies = inputs.copies_of(weights, 3)
    assert len({copy["w"].unsafe_buffer_pointer() for copy in copies}) == 3
    for copy in copies:
        np.testing.assert_array_equal(copy["w"], weights["w"])


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_block_lasts_about_as_long_as_asked_for():
    import time

    calls: list[int] = []

    def call(i: int) -> jax.Array:
        calls.append(i)
        time.sleep(0.002)
        return jnp.zeros(())

    start = time.perf_counter()
    times = timing.time_blocks(call, blocks=3, seconds=0.04, rest=0.1)
    assert len(times) == 3
    assert 0.002 <= min(times) <= max(times) < 0.1, "the rest does not count"
    assert time.perf_counter() - start >= 3 * (0.1 + 4 * 0.002)
    per_block = (len(calls) - timing.WARM_UP_CALLS) / 3
    assert 4 <= per_block <= 20
    assert calls[-1] == per_block - 1


def test_shares_are_of_the_measured_peaks():
    result = _result()
    peak = Peaks(tflops=10.0, copy_gbs=1000.0, fp8_tflops=20.0)
    timed = result.timed([4e-6, 2e-6, 3e-6], peak)
    assert (timed.microseconds, timed.fastest, timed.slowest) == pytest.approx((3.0, 2.0, 4.0))
    flops = 6 * 100 * 2 * 10 * 20
    assert timed.tflops == pytest.approx(flops / 3e-6 / 1e12)
    assert timed.share_of_peak == pytest.approx(flops / 3e-6 / 1e12 / 10)
    assert timed.hbm_gbs == pytest.approx(1)
    assert timed.share_of_copy == pytest.approx(0.001)
    assert result.timed([1.0], None).share_of_peak is None
    # Of products in the format of the operands, which are decoded first where only the experts have 8 bits.
    assert result.timed([3e-6], peak, "fp8").share_of_peak == pytest.approx(flops / 3e-6 / 1e12 / 20)
    assert result.timed([3e-6], peak, "w8a16").share_of_peak == timed.share_of_peak


def test_bytes_that_are_not_all_there_are_are_marked_in_the_line():
    timed = _result().timed([1e-6], None)
    assert " 3 " in table.line(timed)
    assert " >3 " in table.line(dataclasses.replace(timed, hbm_complete=False))


def test_scaling_is_the_time_on_fewer_ranks_over_the_time():
    untimed = _result()
    on_two, on_eight = untimed.timed([4e-6], None), dataclasses.replace(untimed, ranks=8).timed([5e-6], None)
    scaled = on_eight.scaled(on_two)
    assert (scaled.scaling, scaled.scaling_ranks) == (pytest.approx(0.8), 2)
    assert table.line(scaled).endswith(" 0.80 of EP 2")
    assert json.loads(scaled.to_json())["scaling"] == scaled.scaling
    assert "of EP" not in table.line(on_eight)
    assert on_eight.scaled(untimed) == on_eight
    assert untimed.scaled(on_eight) == untimed


def _result() -> table.Result:
    return table.Result(
        shape="a",
        hidden=10,
        intermediate=20,
        num_experts=4,
        top_k=2,
        tokens=100,
        ranks=2,
        processes=1,
        dtype="bf16",
        routing="uniform",
        implementation="megakernel",
        plan={"unit_tiles": 1, "lag_units": 2, "ring_tiles": 3, "chunk_rows": 4, "keep_tokens": True},
        device="a",
        jax="a",
        relative_error=0.0,
        allowed_error=1.0,
        same_bits=None,
        checked=True,
        hbm_complete=True,
        hbm_rank=0,
        hbm_bytes={"weights": 1000, "rows": 2000},
        nvlink_rank=1,
        nvlink_bytes={"rows": 30},
        weight_copies=1,
        arena_mib=1.0,
        temporary_mib=1.0,
        dropped_rows=0,
    )


# --- the command line -------------------------------------------------------------------------------------------------


def test_a_shape_is_names_or_five_numbers_or_four():
    assert [case.name for case in shapes.parse("flashdmoe-8,flashdmoe-128")] == ["flashdmoe-8", "flashdmoe-128"]
    assert shapes.parse("flashdmoe-64")[0].shape == LayerShape(2048, 2048, 64, 2)
    with_tokens, without = shapes.parse("8192,7168,2048,256,8"), shapes.parse("7168,2048,256,8")
    assert (with_tokens[0].tokens, without[0].tokens) == (8192, None)
    assert with_tokens[0].shape == without[0].shape == shapes.SHAPES["deepseek-v3"]
    assert with_tokens[0].name == without[0].name == "7168,2048,256,8"


@pytest.mark.parametrize("text", ["mixtral", "1,2,3", "1,2,3,4,5,6", "deepseek-v3,64", "64,0,48,8,2", "", "1.5,2,3,4"])
def test_other_shapes_say_what_a_shape_is(text):
    with pytest.raises(ValueError, match=r"is neither names, any of mixtral-8x7b.* nor the five numbers tokens,hidden"):
        shapes.parse(text)


def test_options_that_cannot_be_say_why():
    with pytest.raises(ValueError, match=r"--implementation=mega is not one of megakernel"):
        options(implementations=("mega",))
    with pytest.raises(ValueError, match=r"at least one token"):
        options(tokens=(8, 0))
    with pytest.raises(ValueError, match=r"Add megakernel, or leave them out"):
        options(sweep=Sweep(lag_units=(1,)))
    with pytest.raises(ValueError, match=r"KernelPlan: unit_tiles=0 must be"):
        Sweep(unit_tiles=(0,))
    with pytest.raises(ValueError, match=r"--ep=2,-1: a number of ranks is at least 1, or 0 for all devices"):
        options(ranks=(2, -1))
    with pytest.raises(ValueError, match=r"--ep=: a number of ranks is at least 1"):
        options(ranks=())
    for ranks in (9,), (2, 9):
        with pytest.raises(ValueError, match=r"^--ep=9: JAX has 8 devices"):
            layer.run(options(ranks=ranks))
    with pytest.raises(ValueError, match=r"top_k=9 is more than the 8 experts"):
        shapes.parse("32,48,8,9")


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxmoe.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.mark.slow
def test_the_program_measures_what_its_flags_say_and_makes_as_many_devices_as_the_largest_number_of_ranks(tmp_path):
    path = tmp_path / "results"
    done = program(
        "layer",
        "--shape=24,16,24,4,2",
        "--shape=16,24,8,2",
        "--tokens=8",
        "--ep=2,1",
        "--dtype=f16",
        "--implementation=megakernel,reference",
        "--routing=zipf",
        "--unit-tiles=1",
        "--ring-tiles=8,9",
        "--blocks=2",
        "--seconds=0",
        f"--json={path}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cpu x 2/1, 1 process(es)")
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(r["dtype"], r["routing"], r["processes"]) for r in results} == {("f16", "zipf", 1)}
    assert [(r["tokens"], r["ranks"]) for r in results[::4]] == [(24, 2), (24, 1), (8, 2), (8, 1)]
    for of_case in (results[i : i + 4] for i in range(0, 16, 4)):
        assert [r["implementation"] for r in of_case] == [*["megakernel"] * 3, "reference"]
        assert [r["plan"]["ring_tiles"] for r in of_case[1:3]] == [8, 9]


# Several runs of the program as a user starts it, in one interpreter: starting one takes seconds.
RUNS = """
import json, sys
from absl import flags
from jaxmoe.bench import __main__ as program

for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        program.main()
    except SystemExit as end:
        print(f"ended with {end.code}", flush=True)
    flags.FLAGS.unparse_flags()
    for name in ("shape", "tokens", "ep", "share-columns", "keep-tokens", "sum-at-experts", "routing", "dtype"):
        flags.FLAGS[name].unparse()
"""


@pytest.mark.slow
def test_the_program_says_what_is_wrong_with_its_flags():
    wrong = (
        (["layer", "--shape=nothing"], "ended with jaxmoe bench: --shape=nothing is neither"),
        (["layer", "--tokens=a"], "ended with jaxmoe bench: --tokens=a must be whole numbers"),
        (["layer", "--ep=2,4.5"], "ended with jaxmoe bench: --ep=2,4.5 must be whole numbers with commas between"),
        (["layer", "--ep=2,-4"], "ended with jaxmoe bench: --ep=2,-4: a number of ranks is at least 1, or 0 for all"),
        (["layer", "--share-columns=2"], "ended with jaxmoe bench: --share-columns=2: 0, 1 or both with a comma"),
        (["layer", "--keep-tokens=0,-1"], "ended with jaxmoe bench: --keep-tokens=0,-1: 0, 1 or both with a comma"),
        (["layer", "--sum-at-experts=3"], "ended with jaxmoe bench: --sum-at-experts=3: 0, 1 or both with a comma"),
        *(
            ([name, "--routing=zipf"], "ended with jaxmoe bench: --routing=zipf is of layer: scan and exchange measure")
            for name in ("scan", "exchange", "beside")
        ),
        (["peaks", "--shape=8,4,4,2,1", "--routing=zipf"], "ended with jaxmoe bench: --routing=zipf is of layer: scan"),
        (["peaks", "--shape=nothing"], "ended with jaxmoe bench: --shape=nothing is neither"),
        (["peaks", "--shape=8,4,4,2,1", "--dtype=fp8-block"], "ended with jaxmoe bench: --dtype=fp8-block: peaks mea"),
        (
            ["peaks", "--shape=8,4,4,2,1", "--shape=9,4,4,2,1", "--ep=1"],
            "ended with jaxmoe bench: --tokens=9 --ep=1: 2",
        ),
        (["peaks", "--shape=8,4,4,2,1", "--ep=1,2"], "ended with jaxmoe bench: --ep: peaks, beside, scan and exchange"),
        ([], "ended with 1"),
        (["layer", "--json=/nonexistent/x"], "ended with jaxmoe bench: --json=/nonexistent/x: No such file or dir"),
    )
    command = [sys.executable, "-c", RUNS, json.dumps([arguments for arguments, _ in wrong])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert len(told) == len(wrong)
    for line, (_, message) in zip(told, wrong, strict=True):
        assert line.startswith(message)
    assert "name what to measure" in done.stdout + done.stderr
    assert "us per call" not in done.stdout  # nothing has begun
    assert "BF16 product" not in done.stdout


@pytest.mark.slow
def test_the_program_ends_with_status_1_and_a_line_where_a_flag_is_wrong():
    done = program("layer", "--shape=nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("jaxmoe bench: --shape=nothing is neither")
