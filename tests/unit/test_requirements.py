"""The versions that the extras allow: on GPUs those that were run there, on CPUs any."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def requirements(extras: str, python: str) -> list[Requirement]:
    """What pip is asked for under a Python."""
    program = [sys.executable, str(ROOT / "tools/requirements.py"), extras]
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    asked = map(Requirement, lines)
    return [one for one in asked if one.marker is None or one.marker.evaluate({"python_version": python})]


def allowed(name: str, version: str, extras: str, python: str) -> bool:
    """Whether every requirement of a package allows a version; there has to be one."""
    of_package = [one for one in requirements(extras, python) if one.name == name]
    assert of_package, name
    return all(one.specifier.contains(version) for one in of_package)


def measured(name: str) -> str:
    """The version that docs/performance.md states for all its figures."""
    found = re.search(rf"^All figures: .*\b{name} ([\d.]+),", PERFORMANCE, re.M)
    assert found, name
    return found[1]


@pytest.mark.parametrize("python", PYTHONS[1:])
def test_on_gpus_those_versions_are_installed_that_all_figures_are_of(python):
    extras = "demo,test,cuda13,tokamax"
    assert allowed("jax", measured("jax"), extras, python)
    assert allowed("nvidia-nccl-cu13", measured("NCCL"), extras, python)
    assert allowed("tokamax", measured("tokamax"), extras, python)


@pytest.mark.parametrize("python", PYTHONS)
def test_on_gpus_no_newer_release_of_jax_or_nccl_is_taken_before_it_was_run_there(python):
    for name, stated in (("jax", "jax"), ("nvidia-nccl-cu13", "NCCL")):
        major, minor, *_ = map(int, measured(stated).split("."))
        assert not allowed(name, f"{major}.{minor + 1}.0", "cuda13", python)
        assert not allowed(name, f"{major + 1}.0.0", "cuda13", python)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_python_gets_one_jax_with_the_cuda_plugin(python):
    with_plugin = [one for one in requirements("cuda13", python) if one.name == "jax" and "cuda13" in one.extras]
    assert len(with_plugin) == 1
    assert allowed("jax", "0.10.2", "cuda13", python) == (python == "3.11")


@pytest.mark.parametrize("python", PYTHONS)
def test_wheels_are_built_with_the_jax_that_runs_them_on_gpus(python):
    for version in ("0.10.2", measured("jax"), "0.12.0", "0.12.0.1"):
        assert allowed("jax", version, "wheel", python) == allowed("jax", version, "cuda13", python)
    assert {"nvidia-cuda-nvcc"} <= {one.name for one in requirements("wheel", python)}
    assert "nvidia-cuda-nvcc" not in {one.name for one in requirements("cuda13", python)}


@pytest.mark.parametrize("extras", ["", "demo,test", "demo,test,lint,nvcc"])
def test_without_the_extra_the_newest_jax_is_taken_and_the_oldest_will_do(extras):
    for name in ("jax", "jaxlib"):
        assert allowed(name, "99.0", extras, "3.12")
        assert allowed(name, "0.10.2", extras, "3.11")
