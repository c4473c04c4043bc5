"""The benchmark of the layer in 8 bits: what its check accepts and refuses, and the bytes that it counts."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.bench import candidates, inputs, layer, shapes
from jaxmoe.bench.beside_programs import PROGRAMS
from jaxmoe.bench.candidates import Candidate
from jaxmoe.bench.options import BASELINE, BesideOptions, Options
from jaxmoe.bench.shapes import LayerShape
from jaxmoe.block_scaled import BlockScaled
from jaxmoe.options import Arguments
from jaxmoe.testing import dense, relative_error
from tests.layer_calls import mesh_of

SHAPE = LayerShape(hidden=256, intermediate=128, num_experts=4, top_k=2)
RANKS, TOKENS = 2, 24


def options(dtype: str, *implementations: str, **changes: Any) -> Options:
    quick: dict[str, Any] = {"tokens": (TOKENS,), "ranks": (RANKS,), "blocks": 1, "seconds": 0.0}
    case = shapes.Case("small", SHAPE)
    return Options((case,), dtype=dtype, implementations=implementations or ("xla",), **quick | changes)


def run(chosen: Options, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results of a run."""
    status = layer.run(dataclasses.replace(chosen, json=path))
    return status, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8-block", "fp8-channel", "fp8-static", "fp8-static-fast"])
def test_a_layer_in_8_bits_has_its_error_beside_that_of_rounding(dtype, tmp_path, capsys):
    status, results = run(options(dtype, "megakernel", "xla"), tmp_path / "results")
    assert status == 0
    assert [(r["implementation"], r["dtype"]) for r in results] == [("xla", dtype), ("megakernel", dtype)]
    for result in results:
        assert result["checked"]
        # Rounding to 8 bits is nothing that an implementation does wrong.
        assert 1e-4 < result["relative_error"] <= result["allowed_error"] < 0.05 < result["unrounded_error"] < 0.1
    # Sums in float32 are nearer to the truth than decoded operands in BF16.
    assert results[1]["relative_error"] < results[0]["relative_error"] / 2
    header, *lines = capsys.readouterr().out.splitlines()[3:]
    assert header.split()[6:9] == ["check", "unrounded", "us"]
    assert [line.split()[7] for line in lines] == [f"{result['unrounded_error']:.1e}" for result in results]


@pytest.mark.slow
def test_bytes_are_those_of_8_bits_and_their_scales(tmp_path):
    _, (result,) = run(options("fp8-block", "megakernel"), tmp_path / "results")
    # Of each expert three matrices with a scale for 128 x 128; of each row one for 128.
    assert result["hbm_bytes"]["weights"] == SHAPE.num_experts // RANKS * 3 * (256 * 128 + 2 * 4)
    rows = result["hbm_bytes"]["h_written"] / (128 + 4)  # in the mean over the sets of inputs
    assert rows >= TOKENS
    assert result["hbm_bytes"]["rows_written"] == rows * (256 + 2 * 4)
    assert result["hbm_bytes"]["tokens_staged"] == TOKENS * (2 * 256 + 256 + 2 * 4)
    assert result["hbm_bytes"]["y_written"] == TOKENS * 2 * 256


@pytest.mark.slow
def test_what_an_implementation_cannot_do_in_8_bits_is_its_line(tmp_path, capsys):
    status, [result] = run(options("w8a16", "xla", BASELINE), tmp_path / "results")
    assert status == 1
    assert result["implementation"] == "xla"
    out = capsys.readouterr().out
    assert f" {BASELINE} - cannot run: {BASELINE} has no experts in 8 bits" in out


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rounding"), [("w8a16", 0.03), ("mxfp4-a16", 0.2), ("nvfp4-a16", 0.17)])
def test_where_weights_alone_are_rounded_the_error_beside_it_is_theirs(dtype, rounding, tmp_path):
    status, [result] = run(options(dtype, "megakernel"), tmp_path / "results")
    assert status == 0
    assert result["checked"]
    assert result["relative_error"] <= result["allowed_error"] < 0.015
    assert rounding / 2 < result["unrounded_error"] < 2 * rounding
    experts = SHAPE.num_experts // RANKS
    # Read once in few bits, and where they are decoded ahead written and read in 16.
    ahead = 2 * experts * 3 * 256 * 128 * 2 if dtype == "w8a16" else 0
    assert result["hbm_bytes"]["weights_decoded"] == ahead
    bits = {"w8a16": 8 + 32 / 128**2, "mxfp4-a16": 4.25, "nvfp4-a16": 4.5 + 32 / (256 * 128)}[dtype]
    assert result["hbm_bytes"]["weights"] == experts * 3 * 256 * 128 * bits / 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mxfp4-a8", "mxfp4-a8-registers", "nvfp4-a8"])
def test_4_bits_beside_rows_in_8_have_the_error_of_sums_in_float32(dtype, tmp_path):
    status, [result] = run(options(dtype, "megakernel"), tmp_path / "results")
    assert status == 0
    assert result["checked"]
    assert result["relative_error"] <= result["allowed_error"] < 0.05 < result["unrounded_error"] < 0.4
    experts = SHAPE.num_experts // RANKS
    # Of NVFP4 a block of 128 x 128 becomes bytes with a scale; experts with few rows of MXFP4 are decoded in registers.
    ahead = 2 * experts * 3 * (256 * 128 + 2 * 4) if dtype == "nvfp4-a8" else 0
    assert result["hbm_bytes"]["weights_decoded"] == ahead
    bits = 4.5 + 32 / (256 * 128) if dtype == "nvfp4-a8" else 4.25
    assert result["hbm_bytes"]["weights"] == experts * 3 * 256 * 128 * bits / 8
    assert result["hbm_bytes"]["tokens_staged"] == TOKENS * (2 * 256 + 256 + 2 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp8-block", "fp8-channel", "w8a16", "mxfp4-a16", "nvfp4-a16"])
def test_gradients_of_tokens_beside_frozen_experts_are_checked_and_timed(dtype, tmp_path):
    chosen = dataclasses.replace(options(dtype, "xla", "megakernel"), passes=("frozen",))
    status, results = run(chosen, tmp_path / "results")
    assert status == 0
    for result in results:
        assert result["checked"]
        assert result["worst_piece"] in ("x", "topk_weights")
        assert result["unrounded_error"] is None
    experts, matrices = SHAPE.num_experts // RANKS, 3 * 256 * 128
    bits = {"mxfp4-a16": 4.25, "nvfp4-a16": 4.5 + 32 / (256 * 128)}.get(dtype, 8 + 32 / 128**2)
    bits = 8 + 32 * (2 / 256 + 1 / 128) / 3 if dtype == "fp8-channel" else bits  # a scale for each output
    terms = results[1]["hbm_bytes"]
    assert terms["weights_decoded"] == pytest.approx(experts * matrices * (bits / 8 + 2))
    assert terms["weight_gradients_written"] == terms["h_written"] == 0


@pytest.mark.slow
def test_wrong_gradients_beside_frozen_experts_get_no_time(monkeypatch, tmp_path):
    right = layer.program

    def program(candidate: Any, mesh: Any) -> Any:
        function, prepare = right(candidate, mesh)
        # Right as an output, with gradients 3 % too large.
        return lambda arguments: (y := function(arguments)) + 0.03 * (y - jax.lax.stop_gradient(y)), prepare

    monkeypatch.setattr(layer, "program", program)
    chosen = dataclasses.replace(options("fp8-block", "megakernel"), passes=("frozen",))
    status, [result] = run(chosen, tmp_path / "results")
    assert status == 1
    assert not result["checked"]
    assert result["microseconds"] is None


@pytest.mark.slow
def test_experts_are_the_same_in_every_format_and_on_every_number_of_ranks():
    mesh = mesh_of("expert")
    shape = dataclasses.replace(SHAPE, num_experts=mesh.size)
    [wide, alone] = [inputs.random_experts(shape, each, jnp.bfloat16) for each in (mesh, layer.make_mesh(1))]
    narrow = inputs.random_experts(shape, mesh, jnp.bfloat16, "128x128")
    assert not np.array_equal(wide.w_gate[0], wide.w_gate[1])
    for found, expected in ((wide, alone), (narrow, jax.jit(jaxmoe.quantize)(alone))):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert {len(array.addressable_shards) for array in jax.tree.leaves(found)} == {mesh.size}


def test_experts_in_8_bits_are_made_without_wide_ones_of_all():
    shape = dataclasses.replace(SHAPE, num_experts=64)
    make = inputs.make_experts(shape, layer.make_mesh(1), jnp.bfloat16, "128x128")
    memory: Any = make.lower().compile().memory_analysis()
    wide_bytes = 3 * SHAPE.hidden * SHAPE.intermediate * 4
    assert memory.output_size_in_bytes >= 64 * wide_bytes / 4
    assert memory.temp_size_in_bytes < 8 * wide_bytes


def test_the_truth_rounds_as_the_layer_does_and_what_stands_beside_it_does_not():
    mesh = layer.make_mesh(RANKS)
    wide, narrow = (inputs.random_experts(SHAPE, mesh, jnp.bfloat16, block) for block in (None, "128x128"))
    made = inputs.make_inputs(SHAPE, narrow, TOKENS, "uniform", mesh, sets=1)
    assert made.precision == "fp8"
    [arguments], [sample] = made.sets, made.samples
    x, ids, weights = np.asarray(arguments.x, np.float32), *map(np.asarray, arguments[1:3])

    def of(experts: jaxmoe.Experts, **precision: Any) -> np.ndarray:
        on_one_device = Arguments(x, ids, weights, jax.tree.map(np.asarray, experts))
        return np.asarray(jax.jit(lambda inputs: dense(inputs, **precision))(on_one_device))[sample.tokens]

    assert sample.unrounded is not None
    assert relative_error(sample.unrounded, of(wide)) < 1e-6
    # A number of h may lie between two of 8 bits, where sums in another order count.
    assert relative_error(sample.truth, of(narrow, precision="fp8")) < 3e-3


# --- when no time is printed ------------------------------------------------------------------------------------------


def experts_with(change: Callable[[BlockScaled], BlockScaled]) -> Callable[[jaxmoe.Experts], jaxmoe.Experts]:
    def changed(experts: jaxmoe.Experts) -> jaxmoe.Experts:
        return jax.tree.map(change, experts, is_leaf=lambda leaf: isinstance(leaf, BlockScaled))

    return jax.jit(changed)


WRONG_EXPERTS: dict[str, Callable[[BlockScaled], BlockScaled]] = {
    "scales of the next expert": lambda m: BlockScaled(m.values, jnp.roll(m.scales, 1, 0)),
    "scales of the next block": lambda m: BlockScaled(m.values, jnp.roll(m.scales, 1, (1, 2))),
    "one scale of an expert": lambda m: BlockScaled(m.values, m.scales.at[1, 0, 0].multiply(1.25)),
    "scales that are powers of two": lambda m: BlockScaled(m.values, jnp.exp2(jnp.round(jnp.log2(m.scales)))),
    "a scale that is not a number": lambda m: BlockScaled(m.values, m.scales.at[3, 0, 0].set(jnp.nan)),
}


@pytest.mark.parametrize("wrong", WRONG_EXPERTS)
def test_a_layer_with_wrong_scales_is_not_timed(wrong, monkeypatch, tmp_path, capsys):
    right = candidates.program

    def program(candidate: Candidate, mesh: Any) -> Any:
        return right(candidate, mesh)[0], experts_with(WRONG_EXPERTS[wrong])

    monkeypatch.setattr(layer, "program", program)
    status, [result] = run(options("fp8-block"), tmp_path / "results")
    assert status == 1
    assert not result["checked"]
    assert result["microseconds"] is None
    assert (result["unrounded_error"] is None) == (wrong == "a scale that is not a number")
    assert "above the allowed error" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["w8a16", "fp8-e8m0"])
def test_a_layer_that_rounds_tokens_otherwise_is_not_timed(precision, monkeypatch, tmp_path):
    right = candidates.program
    monkeypatch.setattr(
        layer, "program", lambda candidate, mesh: right(dataclasses.replace(candidate, precision=precision), mesh)
    )
    status, [result] = run(options("fp8-block"), tmp_path / "results")
    assert status == 1
    assert not result["checked"]


def test_options_in_8_bits_that_cannot_be_say_why():
    for passes in (("backward",), ("forward", "both")):
        with pytest.raises(ValueError, match=r"--dtype=fp8-block is of experts that are not trained, and --pass="):
            options("fp8-block", passes=passes)
    with pytest.raises(
        ValueError,
        match=r"--dtype=fp4 is not one of bf16, f16, fp8-block, fp8-channel, fp8-static, fp8-static-fast, w8a16",
    ):
        options("fp4")
    with pytest.raises(ValueError, match=r"--precision=fp8 and --dtype=w8a16, which has one"):
        BesideOptions(dtype="w8a16", precision="fp8")
    with pytest.raises(ValueError, match=r"--programs=train differentiates experts, which --dtype=w8a16 cannot be"):
        BesideOptions(("plain", "train"), dtype="w8a16")
    assert set(BesideOptions(dtype="w8a16").programs) == {name for name in PROGRAMS if not PROGRAMS[name].trains}
