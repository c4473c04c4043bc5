"""Times PyTorch's product in 8 bits with a scale for each block, on one GPU: a peak that JAX has no call for on Hopper.

Usage: python tools/block_scaled_peak.py [--size=8192] [--seconds=.3] [--rest=0]

It needs PyTorch with `torch.nn.functional.scaled_mm` (2.11 for CUDA 13 has it) and an H100 or H200; nothing else of
this project does. The product is `a @ b.T` of two square matrices of `float8_e4m3fn`: `a` has a float32 scale for
1 x 128, as tokens have, and `b` one for 128 x 128, as experts have. Beside it are the same product with one scale for
each matrix and that in BF16, since chips differ. Matrices are normal random numbers, and times are taken as
`python -m jaxmoe.bench peaks` takes them: calls enqueued back to back, `--rest` seconds of idleness before each block,
the median over blocks. Before a time is printed, a few rows are compared with float64 products of what was rounded.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

BLOCK = 128
LARGEST = 448.0
BLOCKS = 7
ROWS = 16  # that are checked
MOST_ERROR = 4e-3  # relative, of outputs rounded to BF16 (1.7e-3), and of sums that the tensor cores do not round well


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A matrix in 8 bits, and the float32 scales of its blocks `[rows / a block's, columns / a block's]`."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, rows: int, columns: int) -> "Rounded":
        """Rounds `matrix` with a scale for blocks of `rows` x `columns`."""
        blocks = matrix.float().reshape(matrix.shape[0] // rows, rows, matrix.shape[1] // columns, columns)
        scales = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
        return cls((blocks / scales).reshape(matrix.shape).to(torch.float8_e4m3fn), scales[:, 0, :, 0])

    def decode(self) -> torch.Tensor:
        """Returns it in float64."""
        rows, columns = (
            of_all // of_scales for of_all, of_scales in zip(self.values.shape, self.scales.shape, strict=True)
        )
        return self.values.double() * self.scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@dataclasses.dataclass(frozen=True)
class Product:
    """`a @ b.T` in BF16: what is called, and the operands that it has, in float64."""

    name: str
    call: Callable[[], torch.Tensor]
    a: torch.Tensor
    b: torch.Tensor


def in_bf16(a: torch.Tensor, b: torch.Tensor) -> Product:
    return Product("BF16", lambda: a @ b.T, a[:ROWS].double(), b.double())


def in_8_bits(name: str, a: Rounded, b: Rounded, a_recipe: object, b_recipe: object) -> Product:
    # PyTorch wants scales of 1 x 128 to lie along rows, and those of b transposed as b is.
    a_scales = a.scales.T.contiguous().T
    b_scales = b.scales.T

    def call() -> torch.Tensor:
        return functional.scaled_mm(
            a.values, b.values.T, a_scales, a_recipe, b_scales, b_recipe, output_dtype=torch.bfloat16
        )

    return Product(name, call, a.decode()[:ROWS], b.decode())


def products(size: int) -> list[Product]:
    """Returns those that are timed."""
    recipes = functional.ScalingType
    a, b = (torch.randn(size, size).to(torch.bfloat16) for _ in range(2))
    return [
        in_bf16(a, b),
        in_8_bits(
            "FP8, one scale each",
            Rounded.of(a, size, size),
            Rounded.of(b, size, size),
            recipes.TensorWise,
            recipes.TensorWise,
        ),
        in_8_bits(
            "FP8, scales of 1 x 128 and 128 x 128",
            Rounded.of(a, 1, BLOCK),
            Rounded.of(b, BLOCK, BLOCK),
            recipes.BlockWise1x128,
            recipes.BlockWise128x128,
        ),
    ]


def seconds_of(call: Callable[[], torch.Tensor], calls: int) -> float:
    """Returns the time of a call, of `calls` back to back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(product: Product, seconds: float, rest: float) -> str:
    """Returns the line of a product. Raises RuntimeError where its rows are wrong."""
    correct = product.a @ product.b.T
    error = ((product.call()[:ROWS].double() - correct).norm() / correct.norm()).item()
    if not error < MOST_ERROR:
        raise RuntimeError(f"{product.name}: relative error {error:.1e}, and {MOST_ERROR} is allowed.")
    calls = max(1, int(seconds / seconds_of(product.call, 4)))
    times = []
    for _ in range(BLOCKS):
        time.sleep(rest)
        times.append(seconds_of(product.call, calls))
    operations = 2 * product.b.shape[0] ** 2 * product.b.shape[1] / 1e12
    return (
        f"{product.name:<38} check {error:.1e}  {operations / statistics.median(times):6.0f} TFLOP/s "
        f"({operations / max(times):.0f} to {operations / min(times):.0f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=8192, help="rows and columns, a multiple of 512")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a block")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of idleness before each block")
    flags = parser.parse_args()
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, products of {flags.size}^3, "
        f"{BLOCKS} blocks of {flags.seconds} s, {flags.rest} s of rest before each",
        flush=True,
    )
    for product in products(flags.size):
        print(measure(product, flags.seconds, flags.rest), flush=True)


if __name__ == "__main__":
    main()
