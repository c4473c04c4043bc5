// Words of 8 weights in 4 bits, and how they become the bits of BF16 numbers: in registers (packed.cuh) and ahead
// (exchange/decode.cuh). What such bits stand for is 2^126 times smaller than the weight.
#pragma once

#include <cstdint>

#include "common/repacked.h"

namespace jaxmoe {

// What nibbles 0 and 1 of halves of a word are multiplied with, to have their sign and their other bits where BF16 has
// them. The compiler does not know them: it would make shifts of them, which take the pipe that masks take already.
struct Spread {
  uint32_t first, second;
};
static __constant__ Spread kSpread{(1 << 12) + (1 << 6), (1 << 8) + (1 << 2)};
static __constant__ RepackedFactors kSpreadRepacked = kRepackedFactors;

// A word of weights as checkpoints have it: a number in each nibble, the first one in the lowest. Numbers i and i + 4
// become the halves of bits[i], in 13 instructions.
struct NibbleWord {
  static __device__ __forceinline__ void spread(uint32_t (&bits)[4], uint32_t word) {
    constexpr uint32_t kFirst = 0x000f000f, kSecond = 0x00f000f0;
    const uint32_t upper = word >> 8;
    bits[0] = (word & kFirst) * kSpread.first & kBitsOfNumbers;
    bits[1] = (word & kSecond) * kSpread.second & kBitsOfNumbers;
    bits[2] = (upper & kFirst) * kSpread.first & kBitsOfNumbers;
    bits[3] = (upper & kSecond) * kSpread.second & kBitsOfNumbers;
  }
};
// The same of repacked ones, in 8.
struct RepackedWord {
  static __device__ __forceinline__ void spread(uint32_t (&bits)[4], uint32_t word) {
    spread_repacked(bits, word, kSpreadRepacked);
  }
};

}  // namespace jaxmoe
