"""What users see of the package before they call anything."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp

import jaxmoe
import jaxmoe.convert
import jaxmoe.linen
import jaxmoe.nnx
from tests.documents import ROOT


def test_what_the_package_lists_is_what_users_need():
    assert set(dir(jaxmoe)) == {*jaxmoe.__all__, "__version__"}
    assert all(getattr(jaxmoe, name) is not None for name in dir(jaxmoe))


def test_modules_that_not_all_need_are_there_without_an_import_of_their_own():
    program = (
        "import jaxmoe; print([getattr(jaxmoe, name).__name__ for name in ('convert', 'linen', 'nnx', 'testing')])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["['jaxmoe.convert',", "'jaxmoe.linen',", "'jaxmoe.nnx',", "'jaxmoe.testing']"]


def test_the_reference_has_what_the_package_lists():
    documented: dict[str, set[str]] = {}
    for page in ROOT.glob("docs/api/*.md"):
        module = ""
        for kind, name in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.M):
            if kind in ("module", "currentmodule"):
                module = name
            else:
                documented.setdefault(module, set()).add(name)
    assert documented["jaxmoe"] >= {*jaxmoe.__all__} - {"convert"}
    for layers in (jaxmoe.nnx, jaxmoe.linen):
        assert documented[layers.__name__] == {*layers.__all__} - {"MoEAux"}
    assert documented["jaxmoe.convert"] == {*jaxmoe.convert.__all__}


def test_experts_can_be_compared_whatever_their_arrays_hold():
    experts = jaxmoe.Experts.init(jax.random.key(0), 2, 32, 64)
    assert experts == jax.tree.map(lambda array: array, experts)  # the same arrays
    assert experts != jax.tree.map(jnp.copy, experts)
    assert experts != jaxmoe.quantize(experts, "mxfp4")
    assert experts != None  # noqa: E711
    sizes = [jax.tree.map(jnp.shape, each) for each in (experts, jax.eval_shape(lambda: experts))]
    assert sizes[0] == sizes[1]
    assert jax.jit(lambda e: jnp.where(e == e, 1, 0))(experts) == 1
