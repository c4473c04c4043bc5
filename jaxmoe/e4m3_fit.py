"""Whether experts in MXFP4 are exact in E4M3: asked when weights are made."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmoe.block_scaled import BLOCK
from jaxmoe.experts import AnyExperts, present
from jaxmoe.four_bit import MXFP4

# E2M1 times 2^s is a number of E4M3 for s from -8 to 6.
MOST_STEPS = 14


def fits_e4m3(experts: AnyExperts) -> dict[str, Bool[Array, "experts"]]:
    """Returns for each matrix which experts are exact as E4M3 with one scale for each block of 128 x 128.

    A weight of MXFP4 is an E2M1 value times a power of two. As E4M3 it is exact for 15 powers of two in a row (all
    fit: 6 x 2^6 is below 448, 0.5 x 2^-8 is the smallest number). So a block is exact where the exponents of its groups
    differ by at most 14; groups of zeros do not count, and a scale that is NaN does not fit. It is for those who store
    them so. `moe_layer` with tokens in 8 bits (`precision="fp8"`) multiplies the weights exactly whatever this returns,
    in all implementations. Works under `jax.jit`, on experts that are split.

    Args:
      experts: whose matrices are `jaxmoe.MXFP4`.

    Returns:
      For each matrix that they have, `[experts]`, `True` where it is exact.

    Raises:
      TypeError: a matrix is of another type. Products of `jaxmoe.NVFP4` have more bits than E4M3.
      ValueError: shapes that do not go together.

    >>> import jax, jaxmoe
    >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> fits = fits_e4m3(jaxmoe.quantize(experts, "mxfp4"))
    >>> {name: jnp.flatnonzero(~of_expert).tolist() for name, of_expert in fits.items()}
    {'w_gate': [], 'w_up': [], 'w_down': []}
    """
    matrices = {name: matrix for name, matrix in present(experts).items() if name.startswith("w_")}
    for name, matrix in matrices.items():
        if not isinstance(matrix, MXFP4):
            raise TypeError(
                f"fits_e4m3: experts.{name} is {type(matrix).__name__}; it must be MXFP4, whose scales are powers of "
                "two. Pass jaxmoe.quantize(experts, 'mxfp4') of wide experts."
            )
    return {name: _fits(matrix) for name, matrix in matrices.items()}


def _fits(matrix: MXFP4) -> Bool[Array, "experts"]:
    packed = matrix.packed
    pairs = packed.reshape(*packed.shape[:-1], packed.shape[-1] * 2 // matrix.group, matrix.group // 2)
    counts = ((pairs & 0x77) != 0).any(-1)  # [experts, out, groups], zeros of either sign left out
    exponents = jax.lax.bitcast_convert_type(jnp.asarray(matrix.scales), jnp.uint8).astype(jnp.int32)
    largest = _of_blocks(jnp.where(counts, exponents, -1), -1).max((2, 4))
    smallest = _of_blocks(jnp.where(counts, exponents, 256), 256).min((2, 4))
    return (largest - smallest <= MOST_STEPS).all((1, 2)) & (exponents < 255).all((1, 2))


def _of_blocks(of_groups: jax.Array, padding: int) -> jax.Array:
    """Returns what groups have, `[experts, out, groups]`, as `[experts, blocks, 128, blocks, groups of a block]`."""
    columns = BLOCK // MXFP4.group
    experts, out, groups = of_groups.shape
    padded = jnp.pad(of_groups, ((0, 0), (0, -out % BLOCK), (0, -groups % columns)), constant_values=padding)
    # One dimension at a time: JAX knows how experts of Explicit axes are split after each step.
    rows = padded.reshape(experts, padded.shape[1] // BLOCK, BLOCK, padded.shape[2])
    return rows.reshape(*rows.shape[:3], rows.shape[3] // columns, columns)
