// Precision policies of the host executor: how elements are stored, and what they are computed in, as those of the GPU
// kernels say it of theirs (cuda/kernel/gemm/precision/). `Storage`, load() and store() are those of x, biases, answers
// and results; `Row` has those of rows of tokens and of h, which have scales where `kScaled` (host/scaled_rows.h), and
// of what they are multiplied with; `Weight` those of weights as the caller has them.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace jaxmoe::host {

// Of a policy by which all arrays have the same elements.
template <class Self>
struct OneType {
  using Row = Self;
  using Weight = Self;
  static constexpr bool kScaled = false;
};

struct F32 : OneType<F32> {
  using Storage = float;
  using Number = float;
  static Number load(Storage value) { return value; }
  static Storage store(Number value) { return value; }
};

struct F64 : OneType<F64> {
  using Storage = double;
  using Number = double;
  static Number load(Storage value) { return value; }
  static Storage store(Number value) { return value; }
};

struct Bf16 : OneType<Bf16> {
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

struct F16 : OneType<F16> {
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

// float8_e4m3fn: no infinity, one NaN of each sign, 448 at most.
struct E4M3 {
  using Storage = uint8_t;
  using Number = float;
  static constexpr float kLargest = 448.0f;
  static constexpr Storage kNaN = 0x7f;

  static Number load(Storage value) { return kNumbers[value]; }
  // To the nearest, ties to even; too large becomes the largest; NaN is the positive one.
  static Storage store(Number value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 24 & 0x80;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return kNaN;
    if (magnitude >= kLargest) return static_cast<Storage>(sign | 0x7e);
    if (magnitude < 0x1p-6f) {  // subnormal: adding 2^14 rounds to a multiple of 2^-9 in the low mantissa bits
      return static_cast<Storage>(sign | (std::bit_cast<uint32_t>(magnitude + 0x1p14f) - 0x46800000u));
    }
    const uint32_t rebiased = (bits & 0x7fffffff) - (120u << 23);  // the bias goes from 127 to 7
    return static_cast<Storage>(sign | (rebiased + 0x7ffff + (rebiased >> 20 & 1)) >> 20);
  }

 private:
  static constexpr Number number_of(uint32_t code) {
    const uint32_t sign = (code & 0x80) << 24;
    const uint32_t magnitude = code & 0x7f;
    if (magnitude == kNaN) return std::bit_cast<float>(sign | 0x7fc00000);
    if (magnitude < 0x08) return static_cast<float>(magnitude) * (sign ? -0x1p-9f : 0x1p-9f);
    return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  }
  static constexpr std::array<Number, 256> numbers() {
    std::array<Number, 256> all{};
    for (uint32_t code = 0; code < all.size(); ++code) all[code] = number_of(code);
    return all;
  }
  static const std::array<Number, 256> kNumbers;
};
inline constexpr std::array<E4M3::Number, 256> E4M3::kNumbers = E4M3::numbers();

// float4_e2m1fn, the lower half of a byte.
inline float load_4_bits(uint32_t byte) {
  constexpr float kMagnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return byte & 8 ? -kMagnitudes[byte & 7] : kMagnitudes[byte & 7];
}

// float8_e8m0fnu: 2^(byte - 127), and one NaN.
inline float load_power_of_two(uint8_t byte) {
  const uint32_t bits = uint32_t{byte} << 23;
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : bits);
}

// Rows and weights in 8 bits with scales, all else as `Wide` has it. Forward passes only.
template <class Wide>
struct EightBit : Wide {
  using Row = E4M3;
  using Weight = E4M3;
  static constexpr bool kScaled = true;
};

// Weights in 8 or 4 bits with scales, decoded before they are multiplied (host/decode.h); all else as `Wide` has it.
template <class Wide>
struct Decoded : Wide {
  using Weight = E4M3;
};
// Whether a policy does so.
template <class Precision>
inline constexpr bool kDecodes = !Precision::kScaled && !std::is_same_v<typename Precision::Weight, typename Precision::Row>;

}  // namespace jaxmoe::host
