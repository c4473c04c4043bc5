"""The recipe: on a mesh of four axes it trains what it trains on one device, and experts lie whole on no rank."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_on_a_mesh as recipe

ROOT = Path(__file__).parents[2]
# Float32, so that nothing but the order of sums differs between meshes.
TINY = recipe.Config(hidden=32, heads=2, intermediate=48, batch=8, length=16, dtype=jnp.float32)
# fsdp, context, tensor, expert, and who says where arrays lie.
ONE_DEVICE = (1, 1, 1, 1), "auto"
AUTO = (2, 1, 2, 2), "auto"
EXPLICIT = (2, 1, 2, 2), "explicit"
WITH_CONTEXT = (1, 2, 2, 2), "explicit"
STEPS = 4


@functools.cache
def trainer_on(sizes: tuple[int, ...], axis_types: str) -> Any:
    """A trainer whose step is compiled."""
    mesh = recipe.mesh_of(sizes, axis_types)
    with jax.set_mesh(mesh):
        trainer: Any = recipe.Trainer(TINY, mesh)
        trainer.step = trainer.step.lower(trainer.shapes, *trainer.batch(0)).compile()
        return trainer


def go_on(trainer: Any, state: Any, steps: range) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the state, `[steps]` losses and `[steps, layers, experts]` rows."""
    losses, rows = [], []
    for step in steps:
        state, (loss, _, of_experts) = trainer.step(state, *trainer.batch(step))
        losses.append(float(loss))
        rows.append(np.asarray(of_experts))
    return state, np.array(losses), np.array(rows)


@functools.cache
def untrained() -> Any:
    """The state before the first step, as NumPy has it."""
    trainer = trainer_on(*ONE_DEVICE)
    with jax.set_mesh(trainer.mesh):
        return jax.device_get(trainer.create())


def placed(trainer: Any) -> Any:
    """The same on the mesh of a trainer."""
    return jax.tree.map(lambda array, at: jax.device_put(array, at.sharding), untrained(), trainer.shapes)


@functools.cache
def trained(sizes: tuple[int, ...], axis_types: str) -> tuple[Any, np.ndarray, np.ndarray]:
    trainer = trainer_on(sizes, axis_types)
    with jax.set_mesh(trainer.mesh):
        return go_on(trainer, placed(trainer), range(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("where", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_on_four_axes_its_losses_are_those_on_one_device(where):
    _, losses, rows = trained(*where)
    _, wanted, rows_wanted = trained(*ONE_DEVICE)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_array_equal(rows, rows_wanted)
    assert losses[-1] < losses[0]
    assert np.all(rows.sum(-1) == TINY.batch * TINY.length * TINY.top_k)


@pytest.mark.slow
def test_auto_and_explicit_axes_agree():
    auto, explicit = (jax.tree.leaves(trained(*where)[0][0]) for where in (AUTO, EXPLICIT))
    for one, other in zip(auto, explicit, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("where", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_parameters_and_moments_stay_split_as_declared(where):
    state, _, _ = trained(*where)
    for array, declared in zip(jax.tree.leaves(state), jax.tree.leaves(trainer_on(*where).shapes), strict=True):
        assert array.sharding.is_equivalent_to(declared.sharding, array.ndim)
    parameters, moments = state
    for tree in (parameters, moments[0].mu, moments[0].nu):
        for name in ("w_gate", "w_up", "w_down"):
            experts = tree["blocks"]["moe"][name].get_value()
            assert {shard.data.size for shard in experts.addressable_shards} == {experts.size // 8}, name
        for kernel in jax.tree.leaves(tree["blocks"]["attention"]):
            assert {shard.data.size for shard in kernel.addressable_shards} == {kernel.size // 4}


@pytest.mark.slow
@pytest.mark.parametrize("where", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_no_device_ever_has_a_whole_matrix_of_all_experts_neither_as_weight_nor_as_gradient(where):
    text = trainer_on(*where).step.as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\bf32\[([\d,]+)\]", text)}
    of_experts = [shape for shape in shapes if sorted(shape[-2:]) == [TINY.hidden, TINY.intermediate]]
    assert not of_experts, of_experts
    # What a rank gathers: its experts, with its part of the intermediate dimension.
    assert (TINY.experts // 2, TINY.hidden, TINY.intermediate // 2) in shapes


@pytest.mark.parametrize("where", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_experts_are_gathered_once_in_each_pass_and_their_gradients_scattered(where):
    text = trainer_on(*where).step.as_text()
    lines = [line for line in text.splitlines() if f"[{TINY.experts // 2}," in line and "shard_map" in line]
    gathers = [line for line in lines if re.search(r" all-gather(-start)?\(", line)]
    again = [line for line in gathers if "rematted" in line]
    scatters = [line for line in lines if re.search(r" reduce-scatter(-start)?\(", line)]
    # One for each of the three matrices, or fewer where XLA joins them.
    assert 1 <= len(gathers) - len(again) <= 3
    assert 1 <= len(again) <= 3
    assert 1 <= len(scatters) <= 3


@pytest.mark.slow
def test_restored_onto_another_mesh_it_goes_on_with_the_same_losses(tmp_path):
    here, there = trainer_on(*AUTO), trainer_on(*WITH_CONTEXT)
    with jax.set_mesh(here.mesh):
        state, _, _ = go_on(here, placed(here), range(2))
        recipe.save(tmp_path, 2, state)
    with jax.set_mesh(there.mesh):
        first, state = recipe.restore(tmp_path, there)
        assert first == 2
        for array, declared in zip(jax.tree.leaves(state), jax.tree.leaves(there.shapes), strict=True):
            assert array.sharding == declared.sharding
        _, losses, rows = go_on(there, state, range(2, STEPS))
    _, wanted, rows_wanted = trained(*ONE_DEVICE)
    np.testing.assert_allclose(losses, wanted[2:], rtol=1e-5)
    np.testing.assert_array_equal(rows, rows_wanted[2:])


@pytest.mark.slow
def test_the_command_prints_a_table_in_which_the_loss_falls_and_leaves_a_checkpoint(tmp_path):
    options = ["--fsdp=1", "--tensor=1", "--axis-types=explicit", "--steps=6", f"--checkpoint={tmp_path}"]
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "train_on_a_mesh.py"), *options]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    head, *lines = told.stdout.splitlines()
    assert head.split()[:3] == ["step", "loss", "balance"]
    steps, losses, balances, fullest = np.array([line.split() for line in lines], float).T
    assert [*steps] == [0, 5]
    assert losses[1] < losses[0] - 0.5
    assert np.all((balances >= 1) & (balances < 1.5))
    assert np.all((fullest >= 128) & (fullest < 16 * 32))  # of 16 x 32 tokens with 2 of 8 experts each
    assert (tmp_path / "6").is_dir()
