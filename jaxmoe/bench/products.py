"""`python -m jaxmoe.bench peaks --shape=...`: the products of a layer alone, as XLA multiplies them.

What a layer takes beyond that is for everything else: rows that are brought into order, answers that are moved and
added up. Gate and up, then down, are one call each over all experts of a rank, every expert with as many rows. So a
layer is set against products of its own sizes, which for small experts are far below those of a large square matrix.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.bench.shapes import Case, LayerShape
from jaxmoe.bench.timing import time_blocks

BLOCKS = 7
# Of a sum of BF16 numbers that is rounded to BF16 once: 2^-9 at most; doubled.
ALLOWED_ERROR = 2.0**-8
# Of each product, spread from the first to the last: what is compared.
SAMPLED_EXPERTS, SAMPLED_ROWS = 8, 16


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of one rank.

    Args:
      experts: of the rank.
      rows: of each expert.
      seconds: of both products together.
      tflops: their rate, of the operations that a layer counts: `6 * rows * hidden * intermediate` for each expert.
    """

    experts: int
    rows: int
    seconds: float
    tflops: float


def measure(shape: LayerShape, tokens: int, ranks: int, seconds: float = 0.3, rest: float = 0.0) -> Products:
    """Measures the products of one of `ranks` ranks on the first device, in BF16.

    Args:
      shape: sizes of the layer.
      tokens: per rank.
      ranks: over which the experts are spread.
      seconds: approximate length of a block, of which the median counts.
      rest: seconds of idleness before each block.

    Raises:
      ValueError: the ranks do not share the experts evenly, or the experts not the rows.
      RuntimeError: a product is wrong.

    >>> found = measure(LayerShape(hidden=32, intermediate=16, num_experts=4, top_k=2), tokens=8, ranks=2, seconds=0.01)
    >>> found.experts, found.rows
    (2, 8)
    """
    experts, rows = sizes_of_rank(shape, tokens, ranks)
    sizes = (rows, shape.hidden, 2 * shape.intermediate), (rows, shape.intermediate, shape.hidden)
    keys = jax.random.split(jax.random.key(0), (len(sizes), 2))
    operands = [
        (_normal(left, (experts, m, k)), _normal(right, (experts, k, n)))
        for (left, right), (m, k, n) in zip(keys, sizes, strict=True)
    ]
    product = jax.jit(_product)
    for a, b in operands:
        _check(a, b, product(a, b))
    times = time_blocks(lambda _: [product(a, b) for a, b in operands], BLOCKS, seconds, rest)
    median = statistics.median(times)
    return Products(experts, rows, median, 6 * experts * rows * shape.hidden * shape.intermediate / median / 1e12)


def sizes_of_rank(shape: LayerShape, tokens: int, ranks: int) -> tuple[int, int]:
    """Returns how many experts one of `ranks` ranks has, and how many rows each of them.

    Raises:
      ValueError: the ranks do not share the experts evenly, or the experts not the rows.

    >>> sizes_of_rank(LayerShape(hidden=32, intermediate=16, num_experts=4, top_k=2), tokens=8, ranks=2)
    (2, 8)
    """
    slots = tokens * shape.top_k
    if tokens < 1 or ranks < 1 or shape.num_experts % ranks or slots * ranks % shape.num_experts:
        raise ValueError(
            f"--tokens={tokens} --ep={ranks}: {shape.num_experts} experts with {shape.top_k} to a token; products are "
            "measured where all ranks have as many experts and all experts as many rows. Take a number of ranks that "
            f"divides the experts, and tokens so that tokens * {shape.top_k} * ranks is a multiple of them."
        )
    experts = shape.num_experts // ranks
    return experts, slots // experts


def check(cases: Sequence[Case], ranks: int) -> None:
    """Raises the `ValueError` of the first case that `main` could not measure, before anything is measured."""
    for case in cases:
        assert case.tokens is not None
        sizes_of_rank(case.shape, case.tokens, ranks or jax.device_count())


def main(cases: Sequence[Case], seconds: float, rest: float, ranks: int = 0) -> int:
    """Prints the products of layers, a line each; returns the exit status.

    Args:
      cases: shapes with their tokens per rank.
      seconds: as of `measure`.
      rest: likewise.
      ranks: likewise; 0 is as many as there are devices.
    """
    ranks = ranks or jax.device_count()
    for case in cases:
        assert case.tokens is not None
        found = measure(case.shape, case.tokens, ranks, seconds, rest)
        print(
            f"{case.name}, {case.tokens} tokens per rank, EP {ranks}: products alone, {found.experts} experts with "
            f"{found.rows} rows each, {1e6 * found.seconds:.1f} us, {found.tflops:.0f} TFLOP/s"
        )
    return 0


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))))


def _check(a: jax.Array, b: jax.Array, found: jax.Array) -> None:
    """Raises where a row of the sample is not that of the sums in float64. Experts are on the host one at a time."""
    experts, rows = (
        np.unique(np.linspace(0, size - 1, sampled).astype(int))
        for size, sampled in zip(a.shape[:2], (SAMPLED_EXPERTS, SAMPLED_ROWS), strict=True)
    )
    for expert in experts:
        of_rows, matrix, answers = (
            np.asarray(array, np.float64) for array in (a[expert, rows], b[expert], found[expert, rows])
        )
        exact = of_rows @ matrix
        errors = np.linalg.norm(answers - exact, axis=1) / np.linalg.norm(exact, axis=1)
        worst = int(np.argmax(errors))  # NaN is the worst to NumPy
        if not errors[worst] <= ALLOWED_ERROR:
            raise RuntimeError(
                f"products: XLA's product of {a.shape} and {b.shape} has an error of {errors[worst]:.1e} in row "
                f"{rows[worst]} of expert {expert}, above {ALLOWED_ERROR:.1e}: its rate is not printed."
            )
