"""`python -m jaxmoe.bench peaks`: what a chip reaches at best, against which the layer's figures are set.

Measured, not taken from a data sheet: a product and a copy that are as simple as they can be.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmoe.bench.timing import time_blocks

PRODUCT_SIZE = 8192
COPY_BYTES = 2**32
BLOCKS = 7


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What one chip reaches.

    Args:
      tflops: of a product of two square BF16 matrices of random numbers.
      copy_gbs: of a copy, bytes read and bytes written.
    """

    tflops: float
    copy_gbs: float


# By a part of the device's name: a product of 8192^3 in a short burst and a copy of 4 GiB, both measured with PyTorch.
# Repeated for seconds the product is slower, since the chip's power is limited: this command prints that.
MEASURED = {"H200": Peaks(tflops=782.0, copy_gbs=4090.0)}


def known(device_kind: str) -> Peaks | None:
    """Returns the peaks of a kind of device that has been measured.

    >>> known("NVIDIA H200").copy_gbs
    4090.0
    """
    return next((peaks for name, peaks in MEASURED.items() if name in device_kind), None)


def measure(
    product_size: int = PRODUCT_SIZE, copy_bytes: int = COPY_BYTES, seconds: float = 0.3, rest: float = 0.0
) -> Peaks:
    """Measures the first device.

    Args:
      product_size: rows and columns of the matrices.
      copy_bytes: size of the array that is copied.
      seconds: approximate length of a block, of which the median counts.
      rest: seconds of idleness before each block.
    """

    def median(call: Callable[[int], jax.Array]) -> float:
        return statistics.median(time_blocks(call, BLOCKS, seconds, rest))

    square = (product_size, product_size)
    a, b = (jax.random.normal(jax.random.key(seed), square, jnp.bfloat16) for seed in (0, 1))
    product = jax.jit(jnp.matmul)
    tflops = 2 * product_size**3 / median(lambda _: product(a, b)) / 1e12
    del a, b
    source = jnp.zeros(copy_bytes // 4, jnp.uint32)
    # An addition, since a bare copy may be left to the compiler to remove.
    copy = jax.jit(functools.partial(jnp.add, 1))
    return Peaks(tflops, 2 * copy_bytes / median(lambda _: copy(source)) / 1e9)


def main(seconds: float, rest: float) -> int:
    """Prints the peaks of the first device; returns the exit status."""
    found = measure(seconds=seconds, rest=rest)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: BF16 product of {PRODUCT_SIZE}^3 {found.tflops:.0f} "
        f"TFLOP/s, copy of {COPY_BYTES / 2**30:.0f} GiB {found.copy_gbs:.0f} GB/s read and written"
    )
    return 0
