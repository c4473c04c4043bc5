"""Sums at experts on GPUs: right, and the same bits however often and whatever the timing."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import machine
from jaxmoe.testing import dense, make_inputs, relative_error, tolerance
from tests.layer_calls import SUMS, layer, widened
from tests.sums_at_experts_suite import SumsInEightBitsSuite, SumsSuite, scanned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]


class TestSums(SumsSuite):
    platform = "gpu"
    dtype = jnp.bfloat16
    larger: ClassVar[dict[str, Any]] = {"tokens": 4096, "hidden": 512, "num_experts": 32, "top_k": 8}


class TestSumsInEightBits(SumsInEightBitsSuite):
    dtype = jnp.bfloat16


# More tokens of all ranks than blocks have bits for; few; and as models have them.
REPEATED: dict[str, dict[str, Any]] = {
    "many experts": {"tokens": 4096, "hidden": 512, "intermediate": 256, "num_experts": 128, "top_k": 8},
    "several tokens a bit": {"tokens": 160_000, "hidden": 64, "intermediate": 64, "num_experts": 64, "top_k": 2},
    "few tokens": {"tokens": 16, "hidden": 1024, "intermediate": 512, "num_experts": 16, "top_k": 4},
    "a model's": {"tokens": 8192, "hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8},
}


@pytest.mark.parametrize("routing", ["uniform", "one-hot", "unused-slots"])
@pytest.mark.parametrize("size", REPEATED)
def test_a_thousand_calls_are_right_and_have_the_same_bits(size, routing):
    given = make_inputs(7, **REPEATED[size], routing=routing, dtype=jnp.bfloat16)
    function = jax.jit(layer("all devices", implementation="megakernel", plan=SUMS))
    expected = function(given)
    truth, rough = dense(widened(given)), dense(given, compute_dtype=jnp.bfloat16)
    assert relative_error(expected, truth) <= tolerance(rough, truth, jnp.bfloat16)
    differences = jax.jit(lambda wrong, got, want: wrong + jnp.sum(got != want))
    wrong = jnp.zeros((), jnp.int32)
    for number in range(1000):
        wrong = differences(wrong, function(given), expected)
        if number % 100 == 99:
            jax.block_until_ready(wrong)
    assert int(wrong) == 0


def test_two_hundred_layers_back_to_back_give_the_same_bits_in_every_run():
    arguments = make_inputs(3, tokens=2048, hidden=256, intermediate=384, num_experts=16, top_k=4, dtype=jnp.bfloat16)
    run = jax.jit(lambda a: scanned(a, 200))
    first = np.asarray(run(arguments))
    assert np.isfinite(first.astype(np.float32)).all()
    for _ in range(5):
        assert np.asarray(run(arguments)).tobytes() == first.tobytes()
