"""Programs with layers and exchanges that are stored, or lowered for other platforms than they were traced for."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe import native
from jaxmoe.implementations.megakernel import lowering
from jaxmoe.testing import make_inputs
from tests.documents import ROOT

ARGUMENTS = make_inputs(0)

# A process that makes no layer of its own.
RUN = """
import sys, jax, numpy as np, jaxmoe
jaxmoe.load_kernels()
with open(sys.argv[1] + "/program", "rb") as file:
    program = jax.export.deserialize(file.read())
given = np.load(sys.argv[1] + "/given.npz")
leaves = [given[str(number)] for number in range(len(given))]
y = program.call(*jax.tree.unflatten(program.in_tree, leaves)[0])
np.save(sys.argv[1] + "/y.npy", np.asarray(y))
"""


def store(function: Any, given: tuple[Any, ...], folder: Path, **options: Any) -> None:
    exported = jax.export.export(jax.jit(function), **options)(*given)
    folder.joinpath("program").write_bytes(exported.serialize())
    leaves: Any = {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(given))}
    np.savez(folder / "given.npz", **leaves)


def one_rank(x, ids, weights, experts):
    return jaxmoe.moe_layer(x, ids, weights, experts, axis_name=None, implementation="megakernel")


def test_a_stored_program_gives_the_same_bits_in_a_process_that_has_loaded_kernels_alone(tmp_path):
    given = ARGUMENTS[:4]
    store(one_rank, given, tmp_path, disabled_checks=jaxmoe.export_checks())
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), one_rank(*given))


def test_without_its_checks_left_out_such_a_program_is_not_stored(tmp_path):
    with pytest.raises(ValueError, match="jaxmoe_forward"):
        store(one_rank, ARGUMENTS[:4], tmp_path)


def exchanged(x, ids, weights, experts):
    arrived = jaxmoe.dispatch(x, ids, num_experts=experts.num_experts, axis_name=None, implementation="megakernel")
    return jaxmoe.combine(arrived.rows, weights, arrived.handle)


@pytest.mark.parametrize("function", [one_rank, exchanged, jax.grad(lambda *given: jnp.sum(one_rank(*given)))])
def test_what_another_version_stored_is_refused_with_both_versions(monkeypatch, function):
    given = make_inputs(0, tokens=72)[:4]  # a size that no other test has: what was traced for one is kept
    with monkeypatch.context() as patch:
        patch.setattr(native, "version", lambda: "0.0.7")
        exported = jax.export.export(jax.jit(function), disabled_checks=jaxmoe.export_checks())(*given)
    told = rf"was made by jaxmoe 0\.0\.7 and is run by jaxmoe {re.escape(jaxmoe.__version__)}, which"
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(exported.call(*given))


@pytest.mark.parametrize("function", [one_rank, exchanged])
def test_gradients_of_layers_and_exchanges_are_stored_with_them(function):
    given = ARGUMENTS[:4]
    exported = jax.export.export(jax.jit(function), disabled_checks=jaxmoe.export_checks())(*given)
    again: Any = jax.export.deserialize(exported.serialize(vjp_order=1))
    got, want = (
        jax.grad(lambda x, run=run: jnp.sum(run(x, *given[1:]) ** 2))(given[0]) for run in (again.call, function)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"], ["tpu"]], ids=" and ".join)
@pytest.mark.parametrize("function", [one_rank, exchanged, jax.grad(lambda *given: jnp.sum(one_rank(*given)))])
def test_what_was_traced_for_cpus_is_lowered_for_nothing_else(function, platforms):
    given = ARGUMENTS[:4]
    others = [platform for platform in platforms if platform != "cpu"]
    with pytest.raises(NotImplementedError, match=rf"was traced for cpu and is lowered for {others[0]}, .*'xla'"):
        jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=jaxmoe.export_checks())(*given)
    with pytest.raises(NotImplementedError, match="was traced for cpu and is lowered for"):
        jax.jit(function).trace(*given).lower(lowering_platforms=tuple(platforms))


def test_what_was_traced_for_gpus_is_lowered_for_cuda_alone():
    traced = jax.jit(lambda array: lowering.only_for("gpu", array)).trace(ARGUMENTS.x)
    assert traced.lower(lowering_platforms=("cuda",)).as_text()
    for platform in ("cpu", "rocm", "tpu"):
        with pytest.raises(NotImplementedError, match=f"was traced for gpu and is lowered for {platform}, "):
            traced.lower(lowering_platforms=(platform,))


def test_a_program_for_all_platforms_is_made_on_a_cpu_with_xla():
    run: Any = jax.jit(lambda *given: jaxmoe.moe_layer(*given, axis_name=None, implementation="xla"))
    exported = jax.export.export(run, platforms=["cpu", "cuda"])(*ARGUMENTS[:4])
    np.testing.assert_array_equal(exported.call(*ARGUMENTS[:4]), run(*ARGUMENTS[:4]))
