"""E2M1, the numbers of 4 bits that `four_bit.py` scales: a sign, two bits of exponent, one of fraction.

Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, and 8 to 15 the same below zero; there is no NaN and no infinity. Two of
them lie in a byte, the one of the even index in the lower half, as in checkpoints and as XLA packs `float4_e2m1fn`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt32

ELEMENT = jnp.float4_e2m1fn
LARGEST = 6.0
# Of the magnitudes from one code to the next: halfway, and whether what lies there goes up, to an even code.
_BORDERS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))

NUMBERS_OF_WORD = 8  # of a repacked one
# Of a number of a half of a word, the places of its bits in a half of a repacked one, the lowest bit first: as
# ffi/common/repacked.h says. Number 3 is in the other half.
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11))
_BOTH_HALVES = 0x00010001


def pack(elements: Float[Array, "*rows columns"]) -> UInt8[Array, "*rows bytes"]:
    """Returns the bytes of an array of `float4_e2m1fn`; copies nothing on a device that packs them.

    >>> pack(jnp.asarray([0.5, 1.0, -6.0, 0.0], jnp.float4_e2m1fn)).tolist()
    [33, 15]
    """
    pairs = elements.reshape(*elements.shape[:-1], elements.shape[-1] // 2, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint8)


def unpack(packed: UInt8[Array, "*rows bytes"]) -> Float[Array, "*rows columns"]:
    """Returns bytes as an array of `float4_e2m1fn`.

    >>> unpack(jnp.asarray([33, 15], jnp.uint8)).tolist()
    [0.5, 1.0, -6.0, 0.0]
    """
    pairs = jax.lax.bitcast_convert_type(packed, ELEMENT)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode(packed: UInt8[Array, "*rows bytes"]) -> Float[Array, "*rows columns"]:
    """Returns the numbers in float32.

    Integer operations, which every backend has: not all of them convert from `float4_e2m1fn`.

    >>> decode(jnp.asarray([33, 143], jnp.uint8)).tolist()
    [0.5, 1.0, -6.0, -0.0]
    """
    codes = jnp.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    exponent, fraction = (codes >> 1) & 3, codes & 1
    halves = jnp.where(exponent == 0, fraction, (2 + fraction) << (jnp.maximum(exponent, 1) - 1))
    magnitude = halves.astype(jnp.float32) / 2
    return jnp.where(codes >= 8, -magnitude, magnitude)


def encode(numbers: Float[Array, "*rows columns"]) -> UInt8[Array, "*rows bytes"]:
    """Returns bytes of the nearest numbers, the even code where two are as near; 6 for all above, 0 for NaN.

    >>> encode(jnp.asarray([0.25, 0.75, -7.0, 1.25])).tolist()
    [32, 47]
    """
    magnitude = jnp.abs(numbers)
    steps = [magnitude >= border if up else magnitude > border for border, up in _BORDERS]
    codes = sum(step.astype(jnp.uint8) for step in steps) + 8 * jnp.signbit(numbers).astype(jnp.uint8)
    pairs = codes.reshape(*numbers.shape[:-1], numbers.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


@jax.jit
def repack(packed: UInt8[Array, "*rows bytes"]) -> UInt32[Array, "*rows words"]:
    """Returns words of eight numbers each whose bits lie as registers take them; `bytes` is a multiple of 4.

    >>> word = repack(jnp.asarray([0x10, 0x32, 0x54, 0x76], jnp.uint8))
    >>> hex(word[0]), [hex(byte) for byte in unrepack(word)]
    ('0x612e640a', ['0x10', '0x32', '0x54', '0x76'])
    """
    words = jax.lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4), jnp.uint32)
    repacked = jnp.zeros_like(words)
    for number, places in enumerate(_PLACES):
        source = _halves_swapped(words) if number == 3 else words
        for bit, place in enumerate(places):
            repacked |= ((source >> (4 * number + bit)) & _BOTH_HALVES) << place
    return repacked


@jax.jit
def unrepack(words: UInt32[Array, "*rows words"]) -> UInt8[Array, "*rows bytes"]:
    """Returns the bytes of which `repack` made such words."""
    packed = jnp.zeros_like(words)
    for number, places in enumerate(_PLACES):
        source = _halves_swapped(words) if number == 3 else words
        for bit, place in enumerate(places):
            packed |= ((source >> place) & _BOTH_HALVES) << (4 * number + bit)
    return jax.lax.bitcast_convert_type(packed, jnp.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])


def _halves_swapped(words: UInt32[Array, "*rows words"]) -> UInt32[Array, "*rows words"]:
    return words << 16 | words >> 16
