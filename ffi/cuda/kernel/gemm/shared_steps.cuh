// Where a tile of 8-bit factors has the rows of one warpgroup, both multiply them, every second step each (promoted.cuh):
// one alone cannot hide what lies between its products (docs/performance/eight_bits.md, "Few rows in 8 bits"). Then
// the second warpgroup hands its sums to the first one, which has the epilogue. math.cuh calls it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe {

// Whether they do. A kernel that records what it does has no register for it.
template <class Variant, class Accumulate>
__device__ __forceinline__ bool shares_steps(int32_t rows_of_tile) {
  if constexpr (kCanShareSteps<Accumulate> && !Variant::config.timeline) {
    return rows_of_tile > 0 && rows_of_tile <= Roles::kWarpgroupRows;
  }
  return false;
}

// Adds the sums of a warp of the second warpgroup to those of the warp of the first one that has the same rows, through its
// staging, in which it stores nothing of such a tile. Called by all threads of both; warps without rows do nothing.
template <class Variant>
__device__ __forceinline__ void unite_sums(const Cta<Variant>& cta, const MathThread& thread, int32_t rows_of_tile,
                                           ptx::Accumulators& sums) {
  using Staging = typename GemmShape<Variant>::Staging;
  constexpr int kNumbers = 4, kThreads = 2 * Roles::kWarpThreads;  // of a vector; of a pair of warps
  constexpr int kVectors = Staging::kLines;                        // of a thread in the staging: one to a line
  static_assert(Roles::kWarpThreads * sizeof(float4) == Staging::kLineBytes);
  const int warp_of_rows = thread.warp % Roles::kWarpgroupWarps;
  if (Roles::kWarpRows * warp_of_rows >= rows_of_tile) return;
  const bool gives = thread.warpgroup > 0;
  std::byte* const staging = cta.shared.gemm.staging.of_warp(warp_of_rows + Roles::kWarpgroupWarps) +
                             ptx::read_lane() * sizeof(float4);
  if (gives) epilogue::acquire_staging();
#pragma unroll
  for (int first = 0; first < 128; first += kNumbers * kVectors) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float* const own = sums.values + first + kNumbers * i;
      if (gives) *reinterpret_cast<float4*>(staging + i * Staging::kLineStride) = {own[0], own[1], own[2], own[3]};
    }
    ptx::named_barrier_of_pair<kThreads>(warp_of_rows);  // these are there
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float* const own = sums.values + first + kNumbers * i;
      if (!gives) {
        const float4 others = *reinterpret_cast<const float4*>(staging + i * Staging::kLineStride);
        own[0] += others.x;
        own[1] += others.y;
        own[2] += others.z;
        own[3] += others.w;
      }
    }
    ptx::named_barrier_of_pair<kThreads>(warp_of_rows);  // they are read: the next ones, or an epilogue, may come
  }
}

}  // namespace jaxmoe
