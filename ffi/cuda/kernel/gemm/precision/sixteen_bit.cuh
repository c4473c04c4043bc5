// Precision policies of the 16-bit formats: inputs and results of 16 bits, products and sums in float32. What a policy
// offers: Element, that of what is multiplied; kTokens, how tokens are published and pulled; kDecodes, whether weights
// are decoded before they are loaded (decoded.cuh), and kPacked, whether after it (packed.cuh); Wide, the policy of x, biases and answers; multiply() on slices
// of 16 along K, pack() and unpack() of pairs. A policy that is its own Wide also has its element's name for the host
// (kElement).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/formats.h"
#include "cuda/device/ptx/wgmma.cuh"

namespace jaxmoe {

struct Bf16 {
  using Element = __nv_bfloat16;
  using Wide = Bf16;
  static constexpr jaxmoe::Element kElement = jaxmoe::Element::kBf16;
  static constexpr Format kTokens{kElement};
  static constexpr Accumulation kAccumulation{};  // 8 bits have a choice
  static constexpr bool kDecodes = false;
  static constexpr bool kPacked = false;

  template <ptx::Major kA, ptx::Major kB>
  static __device__ __forceinline__ void multiply(ptx::Accumulators& sums, uint64_t a, uint64_t b) {
    ptx::multiply_bf16<kA, kB>(sums, a, b);
  }
  // Two elements in memory order, `first` at the lower address; to the nearest, ties to even.
  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};

struct F16 {
  using Element = __half;
  using Wide = F16;
  static constexpr jaxmoe::Element kElement = jaxmoe::Element::kF16;
  static constexpr Format kTokens{kElement};
  static constexpr Accumulation kAccumulation{};  // 8 bits have a choice
  static constexpr bool kDecodes = false;
  static constexpr bool kPacked = false;

  template <ptx::Major kA, ptx::Major kB>
  static __device__ __forceinline__ void multiply(ptx::Accumulators& sums, uint64_t a, uint64_t b) {
    ptx::multiply_f16<kA, kB>(sums, a, b);
  }
  static __device__ __forceinline__ uint32_t pack(float first, float second) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
};

}  // namespace jaxmoe
