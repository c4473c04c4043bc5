"""A layer with weights in 8 bits in NumPy, in the order of compiled code: the same bits where its numbers are the same.

Sums over 128 of K are added up in float32, k ascending; each is scaled and added to the others with one rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxmoe
from jaxmoe.block_scaled import BlockScaled

E4M3 = ml_dtypes.float8_e4m3fn
GROUP, LARGEST, SMALLEST = 128, np.float32(448), np.float32(2.0**-100)
Array = np.ndarray


class Rows(NamedTuple):
    """Values of 8 bits as float32 `[rows, columns]`, and a scale for each 128 columns."""

    values: Array
    scales: Array


def rounded(rows: Array, power_of_two: bool = False, given: float | None = None) -> Rows:
    """Rounds every 128 numbers of a row as tokens and h are rounded, with a scale that is given or one for them."""
    groups = rows.astype(np.float32).reshape(len(rows), -1, GROUP)
    largest = np.maximum(np.abs(groups).max(-1), SMALLEST)
    if given is not None:
        scales = np.full(largest.shape, given, np.float32)
    elif power_of_two:
        mantissa, exponent = np.frexp(largest)  # 448 is 0.875 * 2^9
        scales = np.ldexp(np.float32(1), exponent - np.where(mantissa <= 0.875, 9, 8)).astype(np.float32)
    else:
        scales = largest / LARGEST
    finite = np.isfinite(groups).all(-1)
    scales = np.where(finite, scales, np.float32(np.nan))
    scaled = np.clip(groups * (np.float32(1) / scales)[..., None], -LARGEST, LARGEST)  # clip() leaves NaN
    return Rows(scaled.astype(E4M3).astype(np.float32).reshape(rows.shape), scales)


def _added(product: Array, factor: Array, total: Array) -> Array:
    """`total + product * factor` in float32, rounded once."""
    return (product.astype(np.float64) * factor + total).astype(np.float32)


def multiplied(rows: Rows, matrix: BlockScaled, expert: int) -> Array:
    """Rows times an expert's matrix, promoted every 128 of K; one scale per output channel comes last."""
    values, scales, blocks = _of_expert(matrix, expert, step=GROUP)
    of_channels = matrix.block[0] == 1
    of_blocks = np.ones_like(blocks) if of_channels else blocks
    totals = np.zeros((len(rows.values), len(values)), np.float32)
    for block in range(blocks.shape[1]):
        part = np.zeros_like(totals)
        for k in range(block * GROUP, (block + 1) * GROUP):
            part += np.multiply.outer(rows.values[:, k], values[:, k])
        totals = _added(part, np.multiply.outer(rows.scales[:, block], of_blocks[:, block]), totals)
    return totals * scales[:, 0] if of_channels else totals


def in_float64(rows: Rows, matrix: BlockScaled, expert: int) -> Array:
    """The same product with exact sums."""
    values, _, scales = _of_expert(matrix, expert, step=1)
    wide_rows = rows.values.astype(np.float64) * np.repeat(rows.scales, GROUP, 1)
    return wide_rows @ (values.astype(np.float64) * scales).T


def _of_expert(matrix: BlockScaled, expert: int, step: int) -> tuple[Array, Array, Array]:
    """The values `[out, in]`, the scales, and the scale of each output and every `step`-th input."""
    values = np.asarray(matrix.values)[expert].astype(np.float32)
    scales = np.asarray(matrix.scales)[expert]
    (out, depth), (rows, columns) = values.shape, matrix.block
    return values, scales, scales[np.arange(out)[:, None] // rows, np.arange(0, depth, step)[None] // columns]


def relu(gate: Array, up: Array) -> Array:
    return np.where(gate <= 0, gate.dtype.type(0), gate) * up


def silu(gate: Array, up: Array) -> Array:
    one, power = gate.dtype.type(1), np.exp(-gate.astype(np.float64)).astype(gate.dtype)
    return gate * (one / (one + power)) * up


def layer(
    x: Array,
    topk_ids: Array,
    topk_weights: Array,
    experts: jaxmoe.Experts,
    *,
    activation: Callable[[Array, Array], Array] = relu,
    power_of_two: bool = False,
    given: tuple[float, float] | tuple[None, None] = (None, None),
    multiply: Callable[[Rows, BlockScaled, int], Array] = multiplied,
) -> Array:
    """The output of a layer, in the type of `x`.

    Args:
      x: `[tokens, hidden]`.
      topk_ids: `[tokens, top_k]`.
      topk_weights: `[tokens, top_k]`, float32.
      experts: whose matrices are `BlockScaled`.
      activation: of gate and up.
      power_of_two: whether scales of rows are.
      given: the scale of all tokens, and that of all h.
      multiply: how products are summed: as compiled code does, or `in_float64`.
    """
    tokens = rounded(x, power_of_two, given[0])
    y = np.zeros(x.shape, np.float32)
    answers = np.zeros((*topk_ids.shape, x.shape[1]), np.float32)
    for expert in range(experts.num_experts):
        rows, slots = np.nonzero(topk_ids == expert)
        if not len(rows):
            continue
        of_expert = Rows(tokens.values[rows], tokens.scales[rows])
        gate = _projected(of_expert, experts, "gate", expert, multiply)
        up = np.ones_like(gate)
        if experts.w_up is not None:
            up = _projected(of_expert, experts, "up", expert, multiply)
        h = rounded(activation(gate, up).astype(np.float32), power_of_two, given[1])
        answers[rows, slots] = _projected(h, experts, "down", expert, multiply).astype(x.dtype)
    for slot in range(topk_ids.shape[1]):
        used = (topk_ids[:, slot] >= 0)[:, None]
        y += np.where(used, topk_weights[:, slot, None] * answers[:, slot], np.float32(0))
    return y.astype(x.dtype)


def _projected(rows: Rows, experts: jaxmoe.Experts, name: str, expert: int, multiply: Any) -> Array:
    products, bias = multiply(rows, getattr(experts, f"w_{name}"), expert), getattr(experts, f"b_{name}")
    return products if bias is None else products + np.asarray(bias)[expert].astype(np.float32)


def quantized(experts: jaxmoe.Experts, block: str) -> jaxmoe.Experts:
    """Experts in 8 bits whose scales are powers of two in float32: products with them are exact."""

    def with_float32(matrix: BlockScaled) -> BlockScaled:
        return BlockScaled(matrix.values, matrix.scales.astype(jnp.float32))

    made = jaxmoe.quantize(experts, block, scale_dtype=jnp.float8_e8m0fnu)
    is_scaled = lambda leaf: isinstance(leaf, BlockScaled)  # noqa: E731
    return jax.tree.map(lambda leaf: with_float32(leaf) if is_scaled(leaf) else leaf, made, is_leaf=is_scaled)
