// Weights in 4 bits as jaxmoe.repacked() has them: a word of 8 numbers (E2M1), whose bits lie so that few instructions
// make BF16 of them (cuda/kernel/gemm/packed.cuh; ahead of rows exchange/decode.cuh, on a CPU host/decode.h). jaxmoe/e2m1.py
// has the same places and makes the words; tests/fp4_suite.py compares the two.
//
// Halves have numbers 0 to 3 and 4 to 7. The sign, the exponent's two bits and the fraction of a half's number 0 lie at bits
// 15, 8, 7, 6 of that half, as BF16 has them; those of number 1 three below, those of number 2 six below. Number 3 has what
// is left of the other half: 11, 10, 14, 13.
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

// Where BF16 has these bits, in both halves. What they stand for there is 2^126 times smaller.
inline constexpr uint32_t kBitsOfNumbers = 0x81c081c0;

// What words are multiplied with: for number 1, and for the bits of number 3 behind the turn. A GPU takes them from memory,
// so that its compiler makes no shifts of them.
struct RepackedFactors {
  uint32_t second, last;
};
inline constexpr RepackedFactors kRepackedFactors{1 << 3, (1 << 14) + (1 << 8) + (1 << 3)};

// Numbers i and i + 4 of a word become the halves of bits[i].
JAXMOE_ANY constexpr void spread_repacked(uint32_t (&bits)[4], uint32_t word, const RepackedFactors& factors) {
  constexpr uint32_t kLast = 0x001b001b;
  const uint32_t turned = word << 6 | word >> 26;
  bits[0] = word & kBitsOfNumbers;
  bits[1] = word * factors.second & kBitsOfNumbers;
  bits[2] = turned & kBitsOfNumbers;
  bits[3] = (turned & kLast) * factors.last & kBitsOfNumbers;
}

}  // namespace jaxmoe
