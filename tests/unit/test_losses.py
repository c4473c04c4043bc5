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


def softmax(rows):
    return np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)


def maxtext(ids, probabilities):
    """`load_balance_loss` of MaxText 0.2.5, without its weight."""
    density = np.eye(EXPERTS)[ids].sum(2).mean(1) / TOP_K
    return float(np.mean(density * probabilities.mean(1)) * EXPERTS**2)


def best(scores):
    return np.argsort(-scores, -1)[..., :TOP_K]


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def megatron(logits):
    scores = sigmoid(logits)
    return maxtext(best(scores), scores / scores.sum(-1, keepdims=True))


def easydel_standard(logits):
    counts, means = counted(logits)
    return float((counts * EXPERTS / TOP_K * means).sum())


FORMULAS = {
    "of_sequences": lambda logits: per_sequence(logits) / TOP_K,
    "hugging_face": per_token,
    "maxtext": lambda logits: maxtext(best(logits), softmax(logits.astype(np.float64))),
    "levanter_grug": per_token,
    "levanter_mixtral": levanter_mixtral,
    "transformer_engine": transformer_engine,
    "easydel_standard": easydel_standard,
    "easydel_switch": per_token,
    "easydel_empty_choice": lambda logits: float(np.var(counted(logits)[0])),
}
# Those that are given more than a routing.
OF_SIGMOIDS = {"maxtext_of_scores", "maxtext_megatron"}


def routing_of(logits):
    return jaxmoe.route(jnp.asarray(logits), jaxmoe.RouterConfig(top_k=TOP_K))


@pytest.mark.parametrize("name", FORMULAS)
def test_the_function_of_the_page_is_the_formula(losses, name):
    logits = logits_of(0)
    np.testing.assert_allclose(float(losses[name](routing_of(logits))), FORMULAS[name](logits), rtol=1e-5)


def routed_by_sigmoids(logits):
    """As DeepSeek-V3 routes: with a bias and groups, which change the choice."""
    router = jaxmoe.RouterConfig(top_k=TOP_K, score="sigmoid", num_groups=4, top_groups=2)
    return jaxmoe.route(jnp.asarray(logits), router, selection_bias=jnp.linspace(0.3, 0, EXPERTS))


def test_maxtext_takes_a_softmax_of_scores(losses):
    logits = logits_of(0)
    routing, scores = routed_by_sigmoids(logits), sigmoid(logits)
    wanted = maxtext(np.asarray(routing.topk_ids), softmax(scores))
    np.testing.assert_allclose(float(losses["maxtext_of_scores"](routing, jnp.asarray(scores))), wanted, rtol=1e-5)
    assert abs(float(losses["maxtext"](routing)) - wanted) > 1e-2


def test_megatron_s_loss_in_maxtext_is_of_a_choice_without_bias_and_groups(losses):
    logits = logits_of(0)
    wanted = megatron(logits)
    np.testing.assert_allclose(float(losses["maxtext_megatron"](jnp.asarray(logits), TOP_K)), wanted, rtol=1e-5)
    assert abs(float(losses["of_sequences"](routed_by_sigmoids(logits))) - wanted) > 1e-2


def test_hugging_face_takes_all_layers_for_one_batch(losses):
    layers = [logits_of(seed) * (1 + seed) for seed in range(2)]
    of_layers = [per_token(logits) for logits in layers]
    together = float(losses["hugging_face"]([routing_of(logits) for logits in layers]))
    np.testing.assert_allclose(together, per_token(np.stack(layers)), rtol=1e-5)
    assert abs(together - np.mean(of_layers)) > 1e-3


def test_every_function_of_the_page_is_tested(losses):
    code = {name: getattr(value, "__code__", None) for name, value in losses.items()}
    assert {name for name, each in code.items() if each and each.co_filename == "docs/losses.md"} == {
        *FORMULAS,
        *OF_SIGMOIDS,
    }
