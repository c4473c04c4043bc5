// Precision policies of 8-bit weights: tokens and h are rounded to e4m3 too, with a float32 scale for each row and 128
// columns (kTokens); tokens before they are published, h by the epilogue of gate_up. x, biases and answers have 16 bits
// (Wide). What a policy offers: see sixteen_bit.cuh, and here multiply_half() on slices of 32 along K.
//
// The tensor cores add 8-bit products with some 13 bits behind the binary point. So sums of 128 products are taken out
// and added up in float32, each times the scales of its rows and columns (promoted.cuh). Who wants it, and has
// one scale for a row and one for a column, gets sums of the tensor cores (ScaledAtEnd).
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "common/formats.h"
#include "cuda/device/ptx/wgmma.cuh"

namespace jaxmoe {

template <class Wide_, Accumulation kAccumulation_ = Accumulation::kPromoted>
struct E4M3 {
  using Element = __nv_fp8_storage_t;
  using Wide = Wide_;
  static constexpr Accumulation kAccumulation = kAccumulation_;
  static constexpr Format kTokens = kEightBitRows;
  static constexpr bool kDecodes = false;
  static constexpr bool kPacked = false;

  template <ptx::Major kA, ptx::Major kB>
  static __device__ __forceinline__ void multiply(ptx::Accumulators& sums, uint64_t a, uint64_t b) {
    static_assert(kA == ptx::Major::kDepth && kB == ptx::Major::kDepth);
    ptx::multiply_e4m3(sums, a, b);
  }
  static __device__ __forceinline__ void multiply_half(ptx::HalfAccumulators& sums, uint64_t a, uint64_t b, bool add) {
    ptx::multiply_e4m3(sums, a, b, add);
  }
  // Two elements in memory order, `first` at the lower address; to the nearest, ties to even, NaN stays NaN.
  static __device__ __forceinline__ uint16_t pack(float first, float second) {
    return __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, __NV_E4M3);
  }
};

// The scale of elements of which `bits` are those of the largest magnitude, as a float; or, of numbers that are all
// finite, the one that is `given`, where that is not null. A scale of numbers that are not all finite is NaN, and with
// it all of them; so is one that is given and can be none.
struct RowScale {
  float scale, inverse;

  static __device__ __forceinline__ RowScale of_largest(uint32_t bits, bool power_of_two, const float* given) {
    constexpr uint32_t kInfinity = 0x7f800000, kMantissa = 0x7fffff;
    constexpr float kLargest = 448.0f;       // of e4m3, 1.75 * 2^8
    constexpr float kSmallest = 0x1p-100f;   // of a largest magnitude: below it the scale would not be a normal number
    constexpr uint32_t kNaN = 0x7fffffff;
    if (bits >= kInfinity) return {__uint_as_float(kNaN), __uint_as_float(kNaN)};
    const float largest = fmaxf(__uint_as_float(bits), kSmallest);
    float scale;
    if (given != nullptr) {
      scale = __ldg(given);
      if (!is_row_scale(scale)) scale = __uint_as_float(kNaN);
    } else if (!power_of_two) {
      scale = largest / kLargest;
    } else {
      // The least power with which nothing is above 1.75 * 2^8.
      const uint32_t word = __float_as_uint(largest);
      const uint32_t exponent = (word >> 23) - 8 + ((word & kMantissa) > 0x600000 ? 1 : 0);
      scale = __uint_as_float(exponent << 23);
    }
    return {scale, 1.0f / scale};
  }
};

}  // namespace jaxmoe
