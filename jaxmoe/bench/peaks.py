"""`python -m jaxmoe.bench peaks`: what a chip reaches at best, against which the layer's figures are set.

Measured, not taken from a data sheet: products and a copy that are as simple as they can be. Blocks of the usual length
show what the chip sustains; `--seconds=.05 --rest=2` what it does in a burst.

The product in 8 bits has one scale for each matrix. With a scale for each block, as the layer has them, JAX has none
for Hopper: `jax.nn.scaled_matmul` is for Blackwell, and elsewhere makes wide matrices of its operands (jax 0.12).
PyTorch has one, which `tools/block_scaled_peak.py` times.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmoe.bench.timing import time_blocks
from jaxmoe.block_scaled import VALUES
from jaxmoe.options import Precision
from jaxmoe.precision import rounds_rows
from jaxmoe.quantization import LARGEST

PRODUCT_SIZE = 8192
COPY_BYTES = 2**32
BLOCKS = 7
# What XLA calls on NVIDIA GPUs for a product in 8 bits, scale included. Without the option it may generate code of its
# own instead (jax 0.12, compiled for an H200).
FP8_CALL = "__cublas$lt$matmul$f8"
FP8_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What one chip reaches.

    Args:
      tflops: of a product of two square BF16 matrices of random numbers.
      copy_gbs: of a copy, bytes read and bytes written.
      fp8_tflops: of such matrices in `float8_e4m3fn` with one scale each.
    """

    tflops: float
    copy_gbs: float
    fp8_tflops: float

    def product(self, precision: Precision | None) -> float:
        """Returns the TFLOP/s of the products that a layer of this precision is made of."""
        return self.fp8_tflops if rounds_rows(precision) else self.tflops


# By the whole name of the device: a GH200 or an NVL has other rates. Products of 8192^3 and a copy of 4 GiB. Of the
# H200 in a short burst, measured with PyTorch; of the H100 with SXM what `--seconds=.3` prints. Repeated for seconds
# the products are slower, since the chip's power is limited: this command prints that too.
MEASURED = {
    "NVIDIA H200": Peaks(tflops=782.0, copy_gbs=4090.0, fp8_tflops=1480.0),
    "NVIDIA H100 80GB HBM3": Peaks(tflops=760.0, copy_gbs=2988.0, fp8_tflops=1477.0),
}


def known(device_kind: str) -> Peaks | None:
    """Returns the peaks of a kind of device that has been measured.

    >>> known("NVIDIA H200").copy_gbs
    4090.0
    """
    return MEASURED.get(device_kind)


def measure(
    product_size: int = PRODUCT_SIZE, copy_bytes: int = COPY_BYTES, seconds: float = 0.3, rest: float = 0.0
) -> Peaks:
    """Measures the first device. Raises where its product in 8 bits is none, see `fp8_product`.

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
    operations = 2 * product_size**3 / 1e12
    tflops = operations / median(lambda _: product(a, b))
    (a, a_scale), (b, b_scale) = (_one_scale(matrix) for matrix in (a, b))
    in_8_bits = fp8_product(a, b)
    fp8_tflops = operations / median(lambda _: in_8_bits(a, b, a_scale * b_scale))
    del a, b
    source = jnp.zeros(copy_bytes // 4, jnp.uint32)
    # An addition, since a bare copy may be left to the compiler to remove.
    copy = jax.jit(functools.partial(jnp.add, 1))
    copy_gbs = 2 * copy_bytes / median(lambda _: copy(source)) / 1e9
    return Peaks(tflops, copy_gbs, fp8_tflops)


def fp8_product(a: jax.Array, b: jax.Array) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns `(a @ b.T) * scale` in float32, compiled for `float8_e4m3fn` matrices like these.

    Both lie along the dimension that is summed over, as 8-bit products of Hopper need them.

    Raises:
      RuntimeError: XLA makes something else of it on this GPU than a product in 8 bits.
    """

    def product(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
        along = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, along, preferred_element_type=jnp.float32) * scale

    device = jax.devices()[0]
    is_gpu = device.platform == "gpu"
    lowered = jax.jit(product).lower(a, b, jax.ShapeDtypeStruct((), jnp.float32))
    compiled = lowered.compile(FP8_OPTIONS if is_gpu else None)
    if is_gpu and FP8_CALL not in (compiled.as_text() or ""):
        raise RuntimeError(
            f"peaks: jax {jax.__version__} compiles a product of float8_e4m3fn matrices for {device.device_kind} "
            f"without {FP8_CALL}: the rate would be that of other operands. It needs a GPU with products in 8 bits "
            "(H100, H200) and sizes that are multiples of 16."
        )
    return compiled


@jax.jit
def _one_scale(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = matrix.astype(jnp.float32)
    scale = jnp.abs(wide).max() / LARGEST
    return (wide / scale).astype(VALUES), scale


def main(seconds: float, rest: float) -> int:
    """Prints the peaks of the first device; returns the exit status."""
    found = measure(seconds=seconds, rest=rest)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: BF16 product of {PRODUCT_SIZE}^3 {found.tflops:.0f} "
        f"TFLOP/s, FP8 with one scale each {found.fp8_tflops:.0f} TFLOP/s, "
        f"copy of {COPY_BYTES / 2**30:.0f} GiB {found.copy_gbs:.0f} GB/s read and written"
    )
    return 0
