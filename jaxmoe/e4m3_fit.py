"""Whether experts in MXFP4 are exact in E4M3, asked when weights are made; and experts that may be decoded to it."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool

from jaxmoe.e4m3_blocks import of_blocks
from jaxmoe.experts import AnyExperts, present
from jaxmoe.four_bit import MXFP4, NVFP4, FourBit, marked
from jaxmoe.wording import a_type

SomeExperts = TypeVar("SomeExperts", bound=AnyExperts)
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
    matrices = _matrices("fits_e4m3", experts, MXFP4, "MXFP4, whose scales are powers of two")
    return {name: _fits(matrix) for name, matrix in matrices.items()}


def through_e4m3(experts: SomeExperts) -> SomeExperts:
    """Returns experts in 4 bits that `moe_layer` may multiply as E4M3 beside tokens in 8 bits (`precision="fp8"`).

    They stay in 4 bits. Where an expert has many rows the kernel decodes it, ahead of its rows, to E4M3 with a power of
    two for each block of 128 x 128, and multiplies as it does experts in 8 bits, which is faster than to decode weights
    for every tile of rows.

    * `MXFP4`: the weights are exact so, or this raises. A block is exact where its scales, those of groups that are
      zeros included, are at most 2^14 above that of any group that is not; NaN is none. Experts that fail stay as
      they are: without this the layer multiplies them exactly too, and decodes them in registers however many rows
      they have.
    * `NVFP4`: calling this asks for the rounding. Products of E2M1 values with E4M3 scales have more bits than E4M3,
      and are rounded to the nearest: an error of 1.7 % RMS of a weight, 2.2 % of the norm of a matrix of normal
      numbers. `precision="w4a16"`, and gradients, stay exact.

    Call it where weights are made or loaded, not under `jax.jit`: it looks at the numbers of MXFP4.

    Args:
      experts: whose matrices are `jaxmoe.MXFP4` or `jaxmoe.NVFP4`.

    Raises:
      TypeError: matrices of another type; MXFP4 under a transformation.
      ValueError: MXFP4 that is not exact, with the experts by number; shapes that do not go together.

    >>> import jax, jaxmoe
    >>> experts = jaxmoe.Experts.init(jax.random.key(0), num_experts=4, hidden=256, intermediate=384)
    >>> jaxmoe.through_e4m3(jaxmoe.quantize(experts, "mxfp4")).w_gate.through_e4m3
    True
    """
    matrices = _matrices("through_e4m3", experts, FourBit, "MXFP4 or NVFP4")
    for matrix in matrices.values():
        matrix.check()
    misfits = {name: _misfits(name, matrix) for name, matrix in matrices.items() if not isinstance(matrix, NVFP4)}
    if named := [f"experts.{name}: {', '.join(map(str, numbers))}" for name, numbers in misfits.items() if numbers]:
        raise ValueError(
            "through_e4m3: blocks of 128 x 128 have scales of more than 2^14 times each other, or that are NaN, so "
            f"that E4M3 does not hold their weights ({'; '.join(named)}). Leave these experts as they are: moe_layer "
            "decodes them exactly in registers; or quantise them anew."
        )
    return marked(experts, through_e4m3=True)


def _misfits(name: str, matrix: MXFP4) -> list[int]:
    """The experts that are not exact."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(matrix)):
        raise TypeError(
            f"through_e4m3: experts.{name} is traced (jax.jit, jax.grad or the like), and its numbers decide. Call it "
            "where weights are made or loaded, before that."
        )
    fits = _fits_with_zeros(matrix)
    whole = fits if fits.is_fully_addressable else multihost_utils.process_allgather(fits, tiled=True)
    return np.flatnonzero(~np.asarray(whole)).tolist()


def _matrices(caller: str, experts: AnyExperts, kind: type[FourBit], wanted: str) -> dict[str, Any]:
    """The matrices by name; raises where one is of another type, or what has them is."""
    if not isinstance(experts, AnyExperts):
        raise TypeError(
            f"{caller}: experts is {a_type(experts)}; it must be jaxmoe.Experts, whose matrices are {wanted}. Pass "
            "jaxmoe.quantize(experts, 'mxfp4') of wide ones."
        )
    matrices = {name: matrix for name, matrix in present(experts).items() if name.startswith("w_")}
    for name, matrix in matrices.items():
        if not isinstance(matrix, kind):
            raise TypeError(
                f"{caller}: experts.{name} is {type(matrix).__name__}; it must be {wanted}. Pass "
                "jaxmoe.quantize(experts, 'mxfp4') of wide experts."
            )
    return matrices


def _fits(matrix: MXFP4, zeros_count: bool = False) -> Bool[Array, "experts"]:
    """Returns which experts are exact; `zeros_count`: a group of zeros can be what a block's scale is made for."""
    packed = matrix.packed
    pairs = packed.reshape(*packed.shape[:-1], packed.shape[-1] * 2 // matrix.group, matrix.group // 2)
    counts = ((pairs & 0x77) != 0).any(-1)  # [experts, out, groups], zeros of either sign left out
    exponents = jax.lax.bitcast_convert_type(jnp.asarray(matrix.scales), jnp.uint8).astype(jnp.int32)
    largest = of_blocks(jnp.where(counts | zeros_count, exponents, -1), matrix.group, -1).max((2, 4))
    smallest = of_blocks(jnp.where(counts, exponents, 256), matrix.group, 256).min((2, 4))
    return (largest - smallest <= MOST_STEPS).all((1, 2)) & (exponents < 255).all((1, 2))


_fits_with_zeros = jax.jit(functools.partial(_fits, zeros_count=True))
