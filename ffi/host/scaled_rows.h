// Rows of tokens and of h in 8 bits, with a scale for each kScaleColumns columns: how they are rounded, and their
// products with weights in 8 bits. Callers: host/rank.h, host/products.h.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/formats.h"
#include "host/precision.h"

namespace jaxmoe::host {

// Columns whose largest magnitude is less are scaled as if it were this: both their scale and its inverse are then
// normal numbers, also of columns of zeros.
inline constexpr float kSmallestLargest = 0x1p-100f;

// What brings numbers of at most `largest` under the largest number of 8 bits: their quotient, or the least power of
// two that does.
inline float scale_for(float largest, bool power_of_two) {
  largest = std::max(largest, kSmallestLargest);
  if (!power_of_two) return largest / E4M3::kLargest;
  // largest = mantissa * 2^n; 448 = 1.75 * 2^8.
  const uint32_t bits = std::bit_cast<uint32_t>(largest);
  const uint32_t above = (bits & 0x7fffff) > 0x600000 ? 1 : 0;
  return std::bit_cast<float>(((bits >> 23) - 8 + above) << 23);
}

// Rounds kScaleColumns numbers of a row to 8 bits, and returns their scale: the one that is `given`, with which larger
// numbers become the largest of 8 bits, or where that is null one for them. Where a number is not finite, or the given
// scale can be none, it is NaN, and so are all of them.
template <class Precision>
float round_columns(const typename Precision::Storage* numbers, bool power_of_two, const float* given,
                    E4M3::Storage* rounded) {
  float largest = 0;
  bool finite = true;
  for (int32_t c = 0; c < kScaleColumns; ++c) {
    const float magnitude = std::fabs(Precision::load(numbers[c]));
    largest = std::max(largest, magnitude);
    finite = finite && std::isfinite(magnitude);
  }
  if (!finite || (given != nullptr && !is_row_scale(*given))) {
    std::fill_n(rounded, kScaleColumns, E4M3::kNaN);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = given != nullptr ? *given : scale_for(largest, power_of_two);
  const float inverse = 1.0f / scale;
  for (int32_t c = 0; c < kScaleColumns; ++c) rounded[c] = E4M3::store(Precision::load(numbers[c]) * inverse);
  return scale;
}

// The matrix of an expert, [width, depth], and its scales, which have a row for each block of its width.
struct ScaledMatrix {
  const E4M3::Storage* elements;
  const float* scales;
  Format format;
  int32_t width, depth;

  // Of the expert `number` of those that have their matrices and scales one after the other.
  static ScaledMatrix of_expert(const E4M3::Storage* elements, const float* scales, const Format& format,
                                int32_t number, int32_t width, int32_t depth) {
    const int64_t scales_of_each =
        ceil_div(int64_t{width}, int64_t{format.scale_rows}) * ceil_div(int64_t{depth}, int64_t{format.scale_columns});
    return {elements + int64_t{number} * width * depth, scales + number * scales_of_each, format, width, depth};
  }

  // Elements of column `column` of the results, kScaleColumns from a depth on.
  void load(int32_t column, int32_t first, float* numbers) const {
    const E4M3::Storage* const line = elements + int64_t{column} * depth + first;
    for (int32_t k = 0; k < kScaleColumns; ++k) numbers[k] = E4M3::load(line[k]);
  }
  bool scales_are_of_columns() const { return format.scale_rows == 1; }
  // Of the block that has this column of results, and depths from `first` on.
  float scale_of(int32_t column, int32_t first) const {
    const int64_t blocks = ceil_div(int64_t{depth}, int64_t{format.scale_columns});
    return scales[column / format.scale_rows * blocks + first / format.scale_columns];
  }
};

// kScaleColumns columns of a row, and their scale.
struct ScaledColumns {
  const E4M3::Storage* elements;
  float scale;
};

// Products of rows: sums[row, c] of column first + c of the results, of a ScaledMatrix or a PackedMatrix (host/decode.h)
// of `total_depth`, promoted as in the GPU kernel. Those of kScaleColumns depths are summed, and each such sum is scaled
// and added to the others, rounded once. Scales of columns come last, once. Fast ones are those of all depths, scaled
// once; in float32, as a CPU adds up. row_of(i, first depth) gives the ScaledColumns of row i.
template <class Matrix, class RowOf>
std::vector<float> multiply_scaled(const Matrix& matrix, int32_t total_depth, Accumulation accumulation, int32_t rows,
                                   int32_t first, int32_t columns, const RowOf& row_of) {
  std::vector<float> sums(static_cast<size_t>(rows) * columns, 0.0f);
  std::vector<float> parts(sums.size(), 0.0f);  // not scaled yet
  std::vector<float> weights(static_cast<size_t>(kScaleColumns) * columns);  // [depths, columns]
  std::array<float, kScaleColumns> line;
  for (int32_t depth = 0; depth < total_depth; depth += kScaleColumns) {
    for (int32_t c = 0; c < columns; ++c) {
      matrix.load(first + c, depth, line.data());
      for (int32_t k = 0; k < kScaleColumns; ++k) weights[int64_t{k} * columns + c] = line[k];
    }
    for (int32_t i = 0; i < rows; ++i) {
      const ScaledColumns row = row_of(i, depth);
      float* const part = parts.data() + int64_t{i} * columns;
      for (int32_t k = 0; k < kScaleColumns; ++k) {
        const float factor = E4M3::load(row.elements[k]);
        for (int32_t c = 0; c < columns; ++c) part[c] += factor * weights[int64_t{k} * columns + c];
      }
      if (accumulation == Accumulation::kFast && depth + kScaleColumns < total_depth) continue;
      float* of_row = sums.data() + int64_t{i} * columns;
      for (int32_t c = 0; c < columns; ++c) {
        const float weight_scale = matrix.scales_are_of_columns() ? 1.0f : matrix.scale_of(first + c, depth);
        of_row[c] = std::fma(part[c], row.scale * weight_scale, of_row[c]);
        part[c] = 0.0f;
      }
    }
  }
  if (matrix.scales_are_of_columns()) {
    for (int32_t i = 0; i < rows; ++i) {
      for (int32_t c = 0; c < columns; ++c) sums[int64_t{i} * columns + c] *= matrix.scale_of(first + c, 0);
    }
  }
  return sums;
}

}  // namespace jaxmoe::host
