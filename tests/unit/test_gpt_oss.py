"""Experts from the arrays of gpt-oss' checkpoints: against its layer, decoded and computed by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmoe
from jaxmoe.testing import make_inputs, relative_error
from tests.other_arrays import tensor
from tests.quantized_layer import NUMBERS_IN_4_BITS, exact_matrices

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 64, 96, 24, 3
LIMIT, ALPHA = 7.0, 1.702
PARTS = (("blocks", 4), ("scales", 3))  # and how many dimensions they have


def checkpoint(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for name, out, inner in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
        arrays[f"{name}_blocks"] = rng.integers(0, 256, (EXPERTS, out, inner // 32, 16)).astype(np.uint8)
        arrays[f"{name}_scales"] = rng.integers(121, 125, (EXPERTS, out, inner // 32)).astype(np.uint8)
        arrays[f"{name}_bias"] = rng.standard_normal((EXPERTS, out)).astype(np.float32)
    return arrays


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns weights `[experts, out, in]`, one after the other as the format says."""
    experts, out, groups, _ = blocks.shape
    weights = np.zeros((experts, out, groups * 32))
    for column in range(groups * 32):
        byte = blocks[:, :, column // 32, column % 32 // 2]
        code = byte % 16 if column % 2 == 0 else byte // 16
        weights[:, :, column] = NUMBERS_IN_4_BITS[code] * 2.0 ** (scales[:, :, column // 32].astype(int) - 127)
    return weights


def layer_of_gpt_oss(x: np.ndarray, ids: np.ndarray, weights: np.ndarray, arrays: dict[str, Any]) -> np.ndarray:
    into = decoded(arrays["gate_up_proj_blocks"], arrays["gate_up_proj_scales"])
    back = decoded(arrays["down_proj_blocks"], arrays["down_proj_scales"])
    y = np.zeros_like(x)
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        rows = into[expert] @ x[token] + arrays["gate_up_proj_bias"][expert]
        gate, up = np.minimum(rows[0::2], LIMIT), np.clip(rows[1::2], -LIMIT, LIMIT)
        h = (up + 1) * gate / (1 + np.exp(-ALPHA * gate))
        y[token] += weights[token, slot] * (back[expert] @ h + arrays["down_proj_bias"][expert])
    return y


def test_experts_have_the_weights_of_the_checkpoint_without_a_copy():
    arrays = checkpoint()
    experts: Any = jaxmoe.experts_from_gpt_oss(**arrays)
    into = decoded(arrays["gate_up_proj_blocks"], arrays["gate_up_proj_scales"])
    np.testing.assert_array_equal(exact_matrices(experts.w_gate), into[:, 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(exact_matrices(experts.w_up), into[:, 1::2].swapaxes(1, 2))
    back = decoded(arrays["down_proj_blocks"], arrays["down_proj_scales"])
    np.testing.assert_array_equal(exact_matrices(experts.w_down), back.swapaxes(1, 2))
    assert np.shares_memory(experts.w_up.values, arrays["gate_up_proj_blocks"])
    assert np.shares_memory(experts.w_gate.scales, arrays["gate_up_proj_scales"])
    on_device = jax.tree.map(jnp.asarray, arrays)
    again = jax.jit(lambda arrays: jaxmoe.experts_from_gpt_oss(**arrays))(on_device)
    for found, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(experts), strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_the_layer_is_that_of_gpt_oss(implementation):
    arrays = checkpoint(1)
    x, ids, weights, _, _ = make_inputs(2, tokens=TOKENS, hidden=HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    y = jaxmoe.moe_layer(
        x,
        ids,
        weights,
        jaxmoe.experts_from_gpt_oss(**arrays),
        activation=jaxmoe.SwiGLU(limit=LIMIT, alpha=ALPHA, up_offset=1.0),
        axis_name=None,
        implementation=implementation,
    )
    wanted = layer_of_gpt_oss(np.asarray(x, np.float64), np.asarray(ids), np.asarray(weights, np.float64), arrays)
    assert relative_error(y, wanted) < 1e-6


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        (
            {"gate_up_proj_blocks": tensor(4, 192, 2, 16, dtype="torch.uint8")},
            TypeError,
            "gate_up_proj_blocks is a Tensor; it must be an array of NumPy or",
        ),
        ({"down_proj_bias": None}, TypeError, "down_proj_bias is a NoneType; it must be an array of NumPy or JAX"),
        ({"down_proj_scales": np.ones((4, 64, 3), np.float32)}, TypeError, "down_proj_scales float32; both must be"),
        ({"gate_up_proj_blocks": np.zeros((4, 192, 32), np.uint8)}, ValueError, r"\(4, 192, 32\).*in / 32, 16\]"),
        ({"gate_up_proj_bias": np.zeros((4, 96), np.float32)}, ValueError, r"and \(4, 96\); they must be"),
        (
            {
                "down_proj_blocks": np.zeros((4, 64, 2, 16), np.uint8),
                "down_proj_scales": np.zeros((4, 64, 2), np.uint8),
            },
            ValueError,
            r"gate_up_proj_blocks \(4, 192, 2, 16\) and down_proj_blocks \(4, 64, 2, 16\) do not go together",
        ),
    ],
)
def test_arrays_of_no_checkpoint_are_errors_that_say_what_they_must_be(changes, error, told):
    with pytest.raises(error, match=told):
        jaxmoe.experts_from_gpt_oss(**checkpoint() | changes)
