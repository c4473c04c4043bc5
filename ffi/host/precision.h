// Precision policies of the host executor: how one element is stored, and what it is computed in, as those of the GPU
// kernels say it of theirs (cuda/kernel/gemm/precision/).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "common/formats.h"

namespace jaxmoe::host {

struct F32 {
  static constexpr Element kElement = Element::kF32;
  using Storage = float;
  using Number = float;
  static Number load(Storage value) { return value; }
  static Storage store(Number value) { return value; }
};

struct F64 {
  static constexpr Element kElement = Element::kF64;
  using Storage = double;
  using Number = double;
  static Number load(Storage value) { return value; }
  static Storage store(Number value) { return value; }
};

struct Bf16 {
  static constexpr Element kElement = Element::kBf16;
  using Storage = uint16_t;
  using Number = float;
  static Number load(Storage value) { return std::bit_cast<float>(uint32_t{value} << 16); }
  // To the nearest, ties to even; NaN stays NaN.
  static Storage store(Number value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) return static_cast<Storage>(bits >> 16 | 0x40);
    return static_cast<Storage>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct F16 {
  static constexpr Element kElement = Element::kF16;
  using Storage = uint16_t;
  using Number = float;
  static Number load(Storage value) {
    const uint32_t sign = uint32_t{value & 0x8000u} << 16;
    const uint32_t magnitude = value & 0x7fff;
    if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // Not by bits: XLA's threads flush subnormal float32 numbers to zero, and these would pass through one.
    if (magnitude < 0x400) return static_cast<float>(magnitude) * (sign ? -0x1p-24f : 0x1p-24f);
    return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));  // the bias goes from 15 to 127
  }
  // To the nearest, ties to even; NaN stays NaN; too large becomes infinity.
  static Storage store(Number value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return static_cast<Storage>(sign | 0x7e00);
    if (magnitude >= 65520.0f) return static_cast<Storage>(sign | 0x7c00);
    if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24 in the low mantissa bits
      return static_cast<Storage>(sign | (std::bit_cast<uint32_t>(magnitude + 0.5f) - 0x3f000000u));
    }
    const uint32_t rebiased = (bits & 0x7fffffff) - (112u << 23);
    return static_cast<Storage>(sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);
  }
};

}  // namespace jaxmoe::host
