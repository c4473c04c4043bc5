"""The examples of the README and of the pages run as they stand, and their links lead somewhere."""

import re

import jax
import numpy as np
import pytest

from tests.documents import ROOT, python_blocks, run_page

PAGES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/*.md"))]


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(python_blocks("README.md")) == 4
    names = run_page("README.md")
    assert names["y"].shape == (1024, 256)
    assert bool(np.isfinite(np.asarray(names["y"])).all())
    assert abs(float(names["error"]) - 0.06) < 0.01
    assert names["mesh"].size == jax.device_count() == 8


def dense(x, router, w_gate, w_up, w_down, top_k):
    """The layer of every page: a softmax over the best logits, SwiGLU experts, in float64 and one token at a time."""
    x, router, w_gate, w_up, w_down = (np.asarray(array, np.float64) for array in (x, router, w_gate, w_up, w_down))
    tokens = x.reshape(-1, x.shape[-1])
    outputs = np.zeros_like(tokens)
    for output, token in zip(outputs, tokens, strict=True):
        logits = token @ router
        ids = np.argsort(-logits)[:top_k]
        weights = np.exp(logits[ids]) / np.exp(logits[ids]).sum()
        for expert, weight in zip(ids, weights, strict=True):
            gate = token @ w_gate[expert]
            output += weight * (gate / (1 + np.exp(-gate)) * (token @ w_up[expert])) @ w_down[expert]
    return outputs.reshape(x.shape)


def close(page, x, *arrays, top_k):
    names = run_page(page)
    given = [names[name] if isinstance(name, str) else name(names) for name in (x, *arrays)]
    np.testing.assert_allclose(np.asarray(names["y"]), dense(*given, top_k=top_k), rtol=1e-4, atol=1e-5)
    assert names["mesh"].size == 8
    return names


def maxtext_loss(names):
    """`load_balance_loss` of MaxText 0.2.5, without its weight, for two experts per token."""
    logits = np.asarray(names["inputs"] @ names["params"]["gate"]["kernel"], np.float64)
    num_experts = logits.shape[-1]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    density = np.eye(num_experts)[np.argsort(-logits, -1)[..., :2]].sum(2).mean(1) / 2
    return np.mean(density * probabilities.mean(1)) * num_experts**2


def test_the_layer_with_maxtext_s_parameters_is_the_dense_one():
    of = [lambda names, key=key: names["params"][key] for key in ("wi_0", "wi_1", "wo")]
    router = lambda names: names["params"]["gate"]["kernel"]  # noqa: E731
    names = close("docs/use_in_maxtext.md", "inputs", router, *of, top_k=2)
    np.testing.assert_allclose(float(names["lb_loss"]), maxtext_loss(names), rtol=1e-5)


def test_the_layer_with_levanter_s_arguments_is_the_dense_one():
    gate, up = (lambda names, half=half: np.split(names["w_gate_up"], 2, -1)[half] for half in (0, 1))
    names = close("docs/use_in_levanter.md", "x", "router", gate, up, "w_down", top_k=4)
    with jax.set_mesh(names["mesh"]):
        program = jax.jit(names["moe_mlp"]).lower(*names["routed"], *names["weights"]).as_text()
    # Of a rank: 8 of 16 experts, the whole hidden dimension, and its half of the intermediate one.
    assert "tensor<8x64x48xf32>" in program
    assert "tensor<8x64x96xf32>" not in program
    assert names["y"].sharding.is_equivalent_to(names["routed"][0].sharding, 2)


def test_the_layer_with_easydel_s_kernels_is_the_dense_one():
    kernels = ("wi_kernel", "wu_kernel", "wd_kernel")
    names = close("docs/use_in_easydel.md", "hidden_state", "gate_kernel", *kernels, top_k=4)
    assert int(names["aux"].stats.rows_per_expert.sum()) == 8 * 32 * 4


def test_the_layer_with_transformer_engine_s_arguments_is_the_dense_one():
    gate, up = (lambda names, half=half: np.split(names["wi"], 2, -1)[half] for half in (0, 1))
    names = close("docs/beside_transformer_engine.md", "x", "gate_kernel", gate, up, "wo", top_k=4)
    assert int(names["rows_per_expert"].sum()) == 8 * 32 * 4


@pytest.mark.slow
def test_the_recipe_s_gradients_and_what_it_restores_lie_as_its_parameters_do():
    names = run_page("docs/recipe.md")
    assert names["mesh"].size == 8
    assert np.all(names["rows"].sum(-1) == 8 * 16 * 2)
    gate = names["gradients"]["w_gate"].get_value()
    assert gate.shape == (2, 8, 64, 96)
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 4, 32, 48)}
    assert np.any(gate)
    restored, made = (names[each]["w_gate"].get_value() for each in ("at", "parameters"))
    assert (restored.shape, restored.dtype, restored.sharding) == (made.shape, made.dtype, made.sharding)


@pytest.mark.parametrize(
    "document", ["README.md", *PAGES, *(f"ffi/{page}.md" for page in ("README", "kernel", "memory", "build"))]
)
def test_every_relative_link_leads_to_a_file(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{document}: {target}"
