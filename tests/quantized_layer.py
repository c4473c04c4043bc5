"""How tests call a layer with quantised experts, and the truth that they hold it to: of 8 bits and of 4.

The truth has the numbers that are multiplied, rounded as `jaxmoe.quantization` says, and sums in float64. A tolerance
is twice the error of the same maths with sums in float32 (or in the dtype of tokens), as for wide layers. Beside it a
few elements of h may be rounded to the neighbouring value, where it has 8 bits: sums in another order can fall on the
other side of the middle between two.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxmoe
from jaxmoe import MXFP4, NVFP4
from jaxmoe.four_bit import FourBit
from jaxmoe.options import Arguments
from jaxmoe.plan import AnyPlan
from jaxmoe.precision import row_scales
from jaxmoe.quantization import quantize_rows
from jaxmoe.testing import dense, make_inputs, relative_error
from tests import layer_calls
from tests.layer_calls import jitted, layer

# Wider than those of wide layers: columns that share a scale are 128.
HIDDEN, INTERMEDIATE = 256, 128
SIZES: dict[str, Any] = layer_calls.SIZES | {"hidden": HIDDEN, "intermediate": INTERMEDIATE}
# Of h, rounded to a neighbour: each changes by at most an eighth.
NEIGHBOURS = 4
ACTIVATIONS: dict[str, Any] = {"silu": lambda a: a / (1 + np.exp(-a)), "relu": lambda a: np.maximum(a, 0)}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Of the codes 0 to 15 of E2M1.
NUMBERS_IN_4_BITS = np.concatenate([MAGNITUDES, -MAGNITUDES])


jitted_quantize_rows = jax.jit(quantize_rows, static_argnums=1)


def as_multiplied(rows: np.ndarray, precision: str, scale: Any = None) -> np.ndarray:
    """Returns rows with the numbers that are multiplied, exactly; with the scale that they are given, if any."""
    if precision in ("w8a16", "w4a16"):
        return rows
    # Of few sizes, each of which is compiled.
    padded = jnp.asarray(np.pad(rows, ((0, -len(rows) % layer_calls.TOKENS), (0, 0))), jnp.float32)
    values, scales = jitted_quantize_rows(padded, precision == "fp8-e8m0", scale)
    groups = np.repeat(np.asarray(scales, np.float64), 128, axis=1)[:, : rows.shape[1]]
    return (np.asarray(values, np.float64) * groups)[: len(rows)]


def exact_matrices(matrices: Any) -> np.ndarray:
    """Returns quantised matrices as [experts, in, out] in float64, exactly, without arithmetic of JAX."""
    if isinstance(matrices, FourBit):
        return _exact_in_4_bits(matrices)
    rows, columns = matrices.block
    _, out, inner = matrices.values.shape
    scales = np.asarray(matrices.scales, np.float64)
    scales = np.repeat(np.repeat(scales, rows, axis=1)[:, :out], columns, axis=2)[:, :, :inner]
    return (np.asarray(matrices.values, np.float64) * scales).swapaxes(1, 2)


def multiplied_matrices(matrices: Any, precision: str) -> np.ndarray:
    """Returns the same with what a layer multiplies: NVFP4 that goes through E4M3 is rounded to it beside such rows."""
    if not (isinstance(matrices, NVFP4) and matrices.through_e4m3 and precision != "w4a16"):
        return exact_matrices(matrices)
    factors = np.asarray(matrices.global_scales, np.float64)[:, None, None]
    products = _exact_in_4_bits(matrices) / factors  # [experts, in, out]
    scales = np.abs(np.nan_to_num(np.asarray(matrices.scales).astype(np.float64))).swapaxes(1, 2)
    found = np.empty_like(products)
    for first in range(0, products.shape[1], 128):
        for column in range(0, products.shape[2], 128):
            block = np.s_[:, first : first + 128, column : column + 128]
            largest = scales[:, first // 16 : (first + 128) // 16, column : column + 128].max((1, 2))
            powers = np.exp2(np.floor(np.log2(np.maximum(largest, 2.0**-6))) - 5)[:, None, None]
            # E2M1 times E4M3 has few enough bits for float32, so it is rounded once.
            elements = (products[block] / powers).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            found[block] = elements.astype(np.float64) * powers
    return found * factors


def _exact_in_4_bits(matrices: Any) -> np.ndarray:
    codes = np.asarray(matrices.values)
    if codes.dtype == np.uint8:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    else:
        codes = codes.view(np.uint8) & 15
    scales = np.asarray(matrices.scales)
    if isinstance(matrices, MXFP4):
        byte = scales.view(np.uint8)
        numbers = np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127))
    else:
        numbers = scales.astype(np.float64) * np.asarray(matrices.global_scales, np.float64)[:, None, None]
    return (NUMBERS_IN_4_BITS[codes] * np.repeat(numbers, matrices.group, axis=2)).swapaxes(1, 2)


def activated(activation: Any, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """Returns h of an activation by name, or of a `jaxmoe.SwiGLU`."""
    if isinstance(activation, str):
        h = ACTIVATIONS[activation](gate)
        return h if up is None else h * up
    assert isinstance(activation, jaxmoe.SwiGLU)
    assert up is not None
    limit = np.inf if activation.limit is None else activation.limit
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + activation.up_offset) * gate / (1 + np.exp(-activation.alpha * gate))


def truth_of(
    arguments: Arguments, precision: str = "fp8", activation: Any = "silu", multiply: Any = np.matmul
) -> np.ndarray:
    """Returns the output with sums in float64, or with those of another product of matrices."""
    x, ids, weights = (np.asarray(array, np.float64) for array in arguments[:3])
    valid = np.ones(len(x), bool) if arguments.token_valid is None else np.asarray(arguments.token_valid)
    e = arguments.experts
    names = [name for name in ("w_gate", "w_up", "w_down") if getattr(e, name) is not None]
    matrices = {name: multiplied_matrices(getattr(e, name), precision) for name in names}
    biases = {name: getattr(e, name) for name in ("b_gate", "b_up", "b_down")}
    bias = {name: np.zeros(e.num_experts) if b is None else np.asarray(b, np.float64) for name, b in biases.items()}
    of_tokens, of_h = row_scales(e, precision)  # pyright: ignore[reportArgumentType]
    tokens = as_multiplied(np.where(valid[:, None], x, 0), precision, of_tokens)
    y = np.zeros_like(x)
    for expert in range(e.num_experts):
        chosen = (ids == expert) & valid[:, None]
        rows = np.nonzero(chosen.any(-1))[0]
        if not len(rows):
            continue

        def affine(name: str, factor: np.ndarray, expert: int = expert) -> np.ndarray:
            return multiply(factor, matrices[f"w_{name}"][expert]) + bias[f"b_{name}"][expert]

        up = affine("up", tokens[rows]) if "w_up" in matrices else None
        h = activated(activation, affine("gate", tokens[rows]), up)
        weight = np.where(chosen, weights, 0).sum(-1)[rows, None]
        y[rows] += weight * affine("down", as_multiplied(h, precision, of_h))
    return y


@functools.cache
def jitted_dense(activation: Any, precision: Any, compute_dtype: Any) -> Any:
    options: dict[str, Any] = {"activation": activation, "precision": precision, "compute_dtype": compute_dtype}
    return jax.jit(functools.partial(dense, **options))


def assert_as_exact(
    y: Any, arguments: Arguments, precision: Any = "fp8", activation: Any = "silu", truth: Any = None
) -> None:
    """Asserts that an output is as near to the truth as the same maths with sums in float32."""
    truth = truth_of(arguments, precision, activation) if truth is None else truth
    dtype = arguments.x.dtype
    rough = jitted_dense(activation, precision, None if dtype == jnp.float32 else dtype)(arguments)
    rows = int((np.asarray(arguments.topk_ids) >= 0).sum())
    neighbours = np.sqrt(NEIGHBOURS / max(rows * arguments.experts.intermediate, 1)) / 8
    allowed = 2 * relative_error(rough, truth) + float(jnp.finfo(dtype).eps) / 4
    allowed += 0 if precision in ("w8a16", "w4a16") else neighbours
    error = relative_error(y, truth)
    assert error <= allowed, f"error {error:.2e} above {allowed:.2e}"


def without_biases(experts: jaxmoe.Experts) -> jaxmoe.Experts:
    """Biases of zero, so that the program is that of experts with biases."""
    biases = {name: jnp.zeros_like(getattr(experts, name)) for name in ("b_gate", "b_up", "b_down")}
    return dataclasses.replace(experts, **biases)


class QuantizedChecks:
    """Calls of one implementation. A suite inherits it, and a test class that suite, and sets `implementation`."""

    implementation: ClassVar[str]
    # Of tokens and biases, where a test does not say otherwise.
    dtype: ClassVar[Any] = jnp.float32
    # Other dtypes that tokens may have.
    dtypes: ClassVar[tuple[Any, ...]] = (jnp.bfloat16,)
    # Plans that the suite must hold for; None is the default.
    plans: ClassVar[tuple[AnyPlan | None, ...]] = (None,)

    def options(self, **options: Any) -> dict[str, Any]:
        return {"implementation": self.implementation, "plan": self.plans[-1]} | options

    def run(self, arguments: Arguments, placement: str = "data x expert, Auto", **options: Any) -> Any:
        return jitted(placement, False, tuple(sorted(self.options(**options).items())))(arguments)

    def gradients(self, arguments: Arguments, placement: str = "data x expert, Auto", **options: Any) -> Any:
        return jitted(placement, True, tuple(sorted(self.options(**options).items())))(arguments)

    def small_run(self, arguments: Arguments, **options: Any) -> Any:
        """On one rank with the default plan: programs that compile fast."""
        return self.run(arguments, "one rank", **{"plan": None} | options)

    def inputs(self, seed: int, **options: Any) -> Arguments:
        return make_inputs(seed, **{"dtype": self.dtype} | SIZES | options)

    def assert_scan_equals_the_loop(self, layers: list[jaxmoe.Experts], arguments: Arguments, allowed: float) -> None:
        """Of layers one after the other, each added to its tokens; and the gradient of tokens goes through all."""
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
        run = layer("one rank", **self.options(plan=None))

        def summed(x):
            step = lambda x, experts: (x + run(arguments._replace(x=x, experts=experts)), None)  # noqa: E731
            y = jax.lax.scan(jax.checkpoint(step), x, stacked)[0]
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), dx = jax.jit(jax.value_and_grad(summed, has_aux=True))(arguments.x)
        x = arguments.x
        for experts in layers:
            x = x + self.small_run(arguments._replace(x=x, experts=experts))
        assert relative_error(y, x) < max(allowed, 4 * float(jnp.finfo(self.dtype).eps))
        assert np.isfinite(np.asarray(dx)).all()
        assert relative_error(dx, 2 * y) > 0.1
