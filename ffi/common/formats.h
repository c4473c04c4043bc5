// The number formats of a layer: what the elements of each of its arrays are, and how many bytes they take. The one
// place where an element type is named for layout, launch, tensor maps and checks. What a kernel does with elements is
// a policy of its own (cuda/kernel/gemm/precision/, host/precision.h).
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

enum class Element : int32_t { kF64 = 0, kF32, kBf16, kF16, kE4M3, kE8M0, kE2M1, kCount };
inline constexpr int32_t kNumElements = static_cast<int32_t>(Element::kCount);

struct ElementInfo {
  const char* name;  // as NumPy has it
  int32_t bits;
};
inline constexpr ElementInfo kElements[kNumElements] = {
    {"float64", 64}, {"float32", 32}, {"bfloat16", 16}, {"float16", 16},
    {"float8_e4m3fn", 8}, {"float8_e8m0fnu", 8}, {"float4_e2m1fn", 4}};

constexpr const ElementInfo& info_of(Element element) { return kElements[static_cast<int32_t>(element)]; }

// Of an array of rows and columns: its elements, and behind them one scale for each block of `scale_rows` x
// `scale_columns` elements. An element stands for its value times all of its scales.
struct Format {
  Element element;
  int32_t scale_rows = 0;  // 0, both: no scales
  int32_t scale_columns = 0;
  Element scale = Element::kF32;
  // A second scale for each `group_columns` elements of a row, in an array of its own. 0: none.
  int32_t group_columns = 0;
  Element group_scale = Element::kF32;
  int32_t repacked = 0;  // 1: E2M1, in words as common/repacked.h has them; no bool, since ranks compare all bytes

  JAXMOE_ANY constexpr bool is_scaled() const { return scale_rows > 0; }
  // A row's elements end at a whole byte.
  constexpr int64_t row_bytes(int64_t columns) const { return ceil_div(columns * info_of(element).bits, int64_t{8}); }
  constexpr int64_t scale_bytes(int64_t rows, int64_t columns) const {
    if (!is_scaled()) return 0;
    const int64_t blocks = ceil_div(rows, int64_t{scale_rows}) * ceil_div(columns, int64_t{scale_columns});
    const int64_t groups = group_columns > 0 ? rows * ceil_div(columns, int64_t{group_columns}) : 0;
    return (blocks * info_of(scale).bits + groups * info_of(group_scale).bits) / 8;
  }
  constexpr int64_t bytes(int64_t rows, int64_t columns) const {
    return rows * row_bytes(columns) + scale_bytes(rows, columns);
  }
};

// Blocks of a matrix that has one scale for all of its rows, or columns.
inline constexpr int32_t kAllOfThem = INT32_MAX;
// Columns of a row of tokens or of h that share a scale, and rows and columns of a block of weights that do.
inline constexpr int32_t kScaleColumns = 128;
// Elements of a row of weights in 4 bits that share a scale, by what that is: those of MXFP4 and of NVFP4.
JAXMOE_ANY constexpr int32_t group_columns_of(Element group_scale) { return group_scale == Element::kE8M0 ? 32 : 16; }
// Weights in 4 bits that are decoded where they are multiplied: the depth of all matrices is a multiple of this.
inline constexpr int32_t kDepthInRegisters = 64;
inline constexpr Format kEightBitRows{Element::kE4M3, 1, kScaleColumns};

// Weights in 4 bits that are decoded ahead beside rows in 8 bits: E4M3 with a power of two for each block of
// kScaleColumns x kScaleColumns, times the scale of their matrix.
inline constexpr Format kDecodedBlocks{Element::kE4M3, kScaleColumns, kScaleColumns};
// The exponent of that power of two, for the largest scale of the block's groups without its sign, as a byte. With it no
// weight is above 384: E2M1 up to 6, times a scale that is at most 2^6 beside it (E8M0), or less than that (E4M3). So
// MXFP4 is exact where the scales of a block are within 2^14 of each other, and NVFP4 is rounded.
JAXMOE_ANY constexpr int32_t decoded_block_exponent(Element group_scale, int32_t largest) {
  if (group_scale == Element::kE8M0) return (largest > 7 ? largest - 6 : 1) - 127;  // its scale is a normal number
  const int32_t exponent = largest >> 3;
  return (exponent > 1 ? exponent : 1) - 7 - 5;
}

// Whether a scale that rows are given can be one: no number that 8 bits tell from zero is subnormal beside it, nor is
// its inverse. Any other, zero, negative ones and NaN among them, makes all of its rows NaN.
JAXMOE_ANY constexpr bool is_row_scale(float scale) { return scale >= 0x1p-100f && scale <= 0x1p100f; }

// How products of 8-bit factors become sums: those of 128 along the depth at a time, scaled and added up in float32; or
// the whole depth by the tensor cores, whose sums keep some 13 bits behind the binary point, scaled once at the end.
enum class Accumulation : int32_t { kPromoted = 0, kFast };

// Of a layer.
struct Formats {
  Format tokens;   // x, and the gradients of outputs beside it: as published, pulled and multiplied
  Format h;        // between the GEMMs; gate and up, and the gradients of all three
  Format answers;  // what experts make of rows, y and dx
  Format weights;  // of the experts
  Format sums;     // routing weights, and sums that are not rounded in between
  Accumulation accumulation = Accumulation::kPromoted;  // of rows in 8 bits

  // Whether weights have fewer bits than the rows that they are multiplied with.
  constexpr bool decodes() const { return weights.element != tokens.element; }

  // Everything in one type but for the sums, which have at least 32 bits.
  static constexpr Formats of(Element element) {
    const Format plain{element};
    return {plain, plain, plain, plain, {info_of(element).bits < 32 ? Element::kF32 : element}};
  }
  // Weights in those that are given, decoded before they are multiplied.
  static constexpr Formats decoded(Element wide, const Format& weights) {
    Formats all = of(wide);
    all.weights = weights;
    return all;
  }
  // Rows in 8 bits, weights in those that are given; the layer takes and returns `wide`.
  static constexpr Formats eight_bit(Element wide, const Format& weights,
                                     Accumulation accumulation = Accumulation::kPromoted) {
    Formats all = of(wide);
    all.accumulation = accumulation;
    all.tokens = all.h = kEightBitRows;
    all.weights = weights;
    return all;
  }
};

}  // namespace jaxmoe
