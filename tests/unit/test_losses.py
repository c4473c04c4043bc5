"""The functions of docs/losses.md give the losses of other libraries: their formulas, in NumPy and token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from tests.documents import run_page

SEQUENCES, TOKENS, EXPERTS, TOP_K = 3, 20, 8, 3


@pytest.fixture(scope="module")
def losses():
    return run_page("docs/losses.md")


def logits_of(seed):
    """Logits that prefer some experts, so that no two losses are alike by chance."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((SEQUENCES, TOKENS, EXPERTS)) + np.linspace(0, 2, EXPERTS)).astype(np.float32)


def counted(logits):
    """Returns the counts of every expert and the mean probabilities, of the tokens `[..., experts]`."""
    rows = logits.reshape(-1, EXPERTS).astype(np.float64)
    probabilities = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    counts = np.zeros(EXPERTS)
    for row in rows:
        counts[np.argsort(-row)[:TOP_K]] += 1
    return counts, probabilities.mean(0)


def per_token(logits):
    """`E * sum_e c_e / T * P_e` over the tokens of all leading dimensions."""
    counts, means = counted(logits)
    return EXPERTS * float((counts / (logits.size / EXPERTS) * means).sum())


def per_sequence(logits):
    """The same of each sequence, and the mean of those."""
    return float(np.mean([per_token(sequence) for sequence in logits]))


def transformer_engine(logits):
    counts, means = counted(logits)
    tokens = logits.size / EXPERTS
    return EXPERTS / (TOP_K * tokens * tokens) * float((counts * means * tokens).sum())


def levanter_mixtral(logits):
    counts, means = counted(logits)
    return float((counts / counts.sum() * EXPERTS / TOP_K * means).sum())


def easydel_standard(logits):
    counts, means = counted(logits)
    return float((counts * EXPERTS / TOP_K * means).sum())


FORMULAS = {
    "of_sequences": lambda logits: per_sequence(logits) / TOP_K,
    "hugging_face": per_token,
    "maxtext": per_sequence,
    "levanter_grug": per_token,
    "levanter_mixtral": levanter_mixtral,
    "transformer_engine": transformer_engine,
    "easydel_standard": easydel_standard,
    "easydel_switch": per_token,
    "easydel_empty_choice": lambda logits: float(np.var(counted(logits)[0])),
}


def routing_of(logits):
    return jaxmoe.route(jnp.asarray(logits), jaxmoe.RouterConfig(top_k=TOP_K))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_function_of_the_page_is_the_formula(losses, name):
    logits = logits_of(0)
    np.testing.assert_allclose(float(losses[name](routing_of(logits))), FORMULAS[name](logits), rtol=1e-5)


def test_hugging_face_takes_all_layers_for_one_batch(losses):
    layers = [logits_of(seed) * (1 + seed) for seed in range(2)]
    of_layers = [per_token(logits) for logits in layers]
    together = float(losses["hugging_face"]([routing_of(logits) for logits in layers]))
    np.testing.assert_allclose(together, per_token(np.stack(layers)), rtol=1e-5)
    assert abs(together - np.mean(of_layers)) > 1e-3


def test_every_function_of_the_page_is_tested(losses):
    code = {name: getattr(value, "__code__", None) for name, value in losses.items()}
    assert {name for name, each in code.items() if each and each.co_filename == "docs/losses.md"} == set(FORMULAS)
