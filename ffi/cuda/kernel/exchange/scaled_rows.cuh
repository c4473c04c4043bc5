// Rows of tokens in 8 bits: rounded by their owner before peers read them, pulled with their scales. Publish and dispatch
// call these where the variant's tokens have scales.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/formats.h"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/gemm/precision/eight_bit.cuh"

namespace jaxmoe {

// Columns that a warp rounds at a time, four loads of a lane.
inline constexpr int32_t kRoundedAtOnce = 1024;

// By a warp: up to kRoundedAtOnce columns of a row on their way to 8 bits. Half a warp takes the 128 columns of a scale,
// 16 bytes a lane.
template <class Precision>
class ColumnsToRound {
 public:
  __device__ __forceinline__ void load(const void* columns, int32_t count, int lane) {
    const auto* const source = static_cast<const uint4*>(columns);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t vector = 32 * i + lane;
      loaded_[i] = vector < count / kVectorColumns ? source[vector] : uint4{0, 0, 0, 0};
    }
  }

  // With the scale that is `given` where that is not null.
  __device__ __forceinline__ void round(typename Precision::Element* values, float* scales, int32_t count,
                                        bool power_of_two, const float* given, int lane) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t vector = 32 * i + lane;
      const uint32_t words[4] = {loaded_[i].x, loaded_[i].y, loaded_[i].z, loaded_[i].w};
      float2 pairs[4];
      uint32_t largest = 0;  // as bits, in whose order NaN is above all numbers
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = Precision::Wide::unpack(words[j]);
        largest = max(largest, max(__float_as_uint(fabsf(pairs[j].x)), __float_as_uint(fabsf(pairs[j].y))));
      }
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, other));
      }
      const RowScale scale = RowScale::of_largest(largest, power_of_two, given);
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        packed[j] = Precision::pack(pairs[j].x * scale.inverse, pairs[j].y * scale.inverse);
      }
      if (vector < count / kVectorColumns) {
        reinterpret_cast<uint2*>(values)[vector] = {packed[0] | packed[1] << 16, packed[2] | packed[3] << 16};
        if (lane % kLanes == 0) scales[vector / kLanes] = scale.scale;
      }
    }
  }

 private:
  static constexpr int kVectorColumns = 8;  // of 16 bits
  static constexpr int kLanes = kScaleColumns / kVectorColumns;
  static constexpr int kLoads = kRoundedAtOnce / (32 * kVectorColumns);

  uint4 loaded_[kLoads];
};

// By a warp: the scales of a row on their way to the ring. They are asked for before the row's elements and stored after
// them, so that their way over NVLink is not waited for twice.
class PulledScales {
 public:
  __device__ __forceinline__ PulledScales(const float* source, int32_t blocks, int lane)
      : source_(source), blocks_(blocks) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (lane + 32 * i < blocks) scales_[i] = __ldcg(source + lane + 32 * i);
    }
  }

  // Those of neighbouring steps lie `stride` apart; to `kept` too unless that is null.
  __device__ __forceinline__ void store(float* target, int32_t stride, float* kept) const {
    const int lane = ptx::read_lane();  // anew: no register is held for it while elements are copied
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (lane + 32 * i < blocks_) store_one(target, stride, kept, lane + 32 * i, scales_[i]);
    }
    for (int32_t block = lane + 32 * kInFlight; block < blocks_; block += 32) {
      store_one(target, stride, kept, block, __ldcg(source_ + block));
    }
  }

 private:
  static constexpr int kInFlight = 2;  // of rows of up to 8192 columns all

  static __device__ __forceinline__ void store_one(float* target, int32_t stride, float* kept, int32_t block,
                                                   float scale) {
    target[int64_t{block} * stride] = scale;
    if (kept != nullptr) kept[block] = scale;
  }

  const float* const source_;
  const int32_t blocks_;
  float scales_[kInFlight];
};

}  // namespace jaxmoe
