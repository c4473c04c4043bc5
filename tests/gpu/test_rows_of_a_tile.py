"""Experts with every number of rows of which a tile is loaded in another way (`load_tile` in gemm/load.cuh)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import machine
from jaxmoe.testing import Arguments
from tests.layer_calls import LayerChecks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not machine.cuda_status().available, reason=machine.cuda_status().reason or "the CUDA part runs"
    ),
]
# Of an expert each: around multiples of 8, 16 and 64, of tiles of one block and of both, and behind whole tiles.
ROWS = [*range(26), *range(47, 67), *range(79, 83), *range(103, 145), 159, 161, 176, 191, 192, 193, 255, 257, 386, 520]
RANKS = jax.device_count()


class Checks(LayerChecks):
    implementation = "megakernel"
    dtype = jnp.bfloat16


CHECKS = Checks()


def inputs(seed: int, **sizes: Any) -> Arguments:
    """One expert to a token, so that experts have ROWS; on several ranks experts and tokens without rows fill up."""
    experts = -(-len(ROWS) // RANKS) * RANKS
    rows = np.random.default_rng(seed).permutation(ROWS + [0] * (experts - len(ROWS)))
    ids = np.repeat(np.arange(experts), rows)
    ids = np.concatenate([ids, np.full(-len(ids) % RANKS, -1)])
    np.random.default_rng(seed).shuffle(ids)
    arguments = CHECKS.inputs(seed, **{"tokens": len(ids), "num_experts": experts, "top_k": 1} | sizes)
    return arguments._replace(topk_ids=jnp.asarray(ids[:, None], jnp.int32))


def run(arguments: Arguments, **options: Any) -> jax.Array:
    return CHECKS.run(arguments, "all devices", plan=None, **options)


@pytest.mark.parametrize("widths", [(256, 128), (200, 136), (1032, 264), (64, 8)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_experts_with_any_number_of_rows_have_the_output_of_the_reference(dtype, widths):
    hidden, intermediate = widths
    arguments = inputs(51, hidden=hidden, intermediate=intermediate, biases=True, dtype=dtype)
    truth, value = run(arguments, implementation="reference"), run(arguments)
    got, want = (np.asarray(y, np.float64) for y in (value, truth))
    # Row by row: a fault in one would drown in the others.
    wrong = np.linalg.norm(got - want, axis=1) > 4 * float(jnp.finfo(dtype).eps) * np.linalg.norm(want, axis=1)
    assert not wrong.any(), f"rows of experts {np.unique(np.asarray(arguments.topk_ids)[wrong, 0])}"


def test_what_an_earlier_call_left_behind_the_rows_reaches_no_output():
    arguments = inputs(52, hidden=256, intermediate=128)
    expected = np.asarray(run(arguments))
    assert np.isfinite(expected.astype(np.float32)).all()
    others = np.random.default_rng(52).integers(0, len(ROWS), arguments.topk_ids.shape)
    spoiled = arguments._replace(x=jnp.full_like(arguments.x, jnp.nan), topk_ids=jnp.asarray(others, jnp.int32))
    assert np.isnan(np.asarray(run(spoiled), np.float32)).all()
    np.testing.assert_array_equal(np.asarray(run(arguments)), expected)


def test_a_thousand_calls_have_the_same_bits():
    arguments = inputs(53, hidden=256, intermediate=384)
    expected = run(arguments)
    differ = jax.jit(lambda a, b: jnp.any(a != b).astype(jnp.int32))
    different = jnp.zeros((), jnp.int32)
    for _ in range(1000):
        different += differ(run(arguments), expected)
    assert int(different) == 0
