// What becomes of the sums of gate_up of packed weights beside rows in 8 bits: h, rounded to e4m3 with a scale for each
// row and 128 columns, in the order that gemm/packed_eight_bit.cuh wants. As AcrossH (across.cuh), but that warps find the
// largest number of a row together first.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/activation.h"
#include "common/layout.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/gemm/epilogues/across.cuh"
#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/turned.cuh"

namespace jaxmoe::epilogue {

// All math warps. Barriers 1 to 3: combine's, and those of warpgroups.
__device__ __forceinline__ void meet_math_warps() {
  __syncwarp();
  ptx::named_barrier<4, Roles::kMathThreads>();
}

// The largest magnitude of each row of a pass, as bits, among the columns of each math warp.
struct LargestOfWarps {
  uint32_t of[Roles::kMathWarps][Lines::kRows];
};

struct AcrossEightBitH {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    with_activation_kind(cta.params.activation.kind, [&](auto kind) {
      constexpr ActivationKind kKind = decltype(kind)::value;
      if (cta.params.gated) {
        activate_all<Variant, kKind, true>(cta, task, thread, sums);
      } else {
        activate_all<Variant, kKind, false>(cta, task, thread, sums);
      }
    });
    if (cta.params.gated) {
      store<Variant, true>(cta, task, thread, sums);
    } else {
      store<Variant, false>(cta, task, thread, sums);
    }
  }

 private:
  // Sums become h, in the place of the first block of columns where gate and up are two of the same.
  template <class Variant, ActivationKind kKind, bool kGated>
  static __device__ __forceinline__ void activate_all(const Cta<Variant>& cta, const Task& task,
                                                      const MathThread& thread, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    const TileColumns tile = h_columns_of(cta, task);
    const int32_t first_of_thread = tile.first + (kGated ? 16 : 32) * thread.warp + thread.lane / 4;
    const ColumnTerms first = ColumnTerms::of(cta, p.b_gate, p.w_gate_scales, task.expert, first_of_thread, tile.count);
    const ColumnTerms second =
        kGated ? ColumnTerms::of(cta, p.b_up, p.w_up_scales, task.expert, first_of_thread, tile.count)
               : ColumnTerms::of(cta, p.b_gate, p.w_gate_scales, task.expert, first_of_thread + 16, tile.count);
#pragma unroll
    for (int i = 0; i < Tiling::kRows / 8; ++i) {
      if (8 * i >= task.rows) break;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float& own = sums.values[4 * i + n];
        float& other = sums.values[64 + 4 * i + n];
        const float number = first.complete(own, n), second_number = second.complete(other, n);
        own = activate_as<kKind>(p.activation, number, kGated ? second_number : 1.0f);
        if constexpr (!kGated) other = activate_as<kKind>(p.activation, second_number, 1.0f);
      }
    }
  }

  // Of experts with an up projection both warpgroups together have the 128 columns that share a scale, of others each
  // has 128 of its own.
  template <class Variant, bool kGated>
  static __device__ __forceinline__ void store(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                               const ptx::Accumulators& h) {
    using Precision = typename Variant::Precision;
    using Element = typename Precision::Element;
    using Staging = typename GemmShape<Variant>::Staging;
    constexpr int kBlocks = kGated ? 1 : 2;  // of 16 columns of h, of a warp
    constexpr int32_t kColumns = Roles::kWarpgroupWarps * 16 * kBlocks;              // of a warpgroup
    constexpr int kSharing = kGated ? Roles::kMathWarps : Roles::kWarpgroupWarps;  // warps whose columns share a scale
    constexpr int32_t kLinesBytes = Lines::kRows * Lines::kStride;
    static_assert(2 * (kLinesBytes + sizeof(LargestOfWarps)) <= sizeof(Staging));
    const auto& p = cta.params;
    const TileColumns tile = h_columns_of(cta, task);
    const int32_t first_column = tile.first + kColumns * thread.warpgroup;
    const int32_t columns = at_most(tile.count - first_column, kColumns);
    std::byte* const lines = cta.shared.gemm.staging.of_warpgroup(thread.warpgroup);
    auto& largest = *reinterpret_cast<LargestOfWarps*>(cta.shared.gemm.staging.of_warpgroup(0) + kLinesBytes);
    const int first_sharing = kGated ? 0 : Roles::kWarpgroupWarps * thread.warpgroup;
    const bool notes = thread.warp == first_sharing && columns > 0;
    const bool even_first = turned::has_even_first(task.rows);
    const int t = thread.lane % 4;
#pragma unroll
    for (int pass = 0; pass < Tiling::kRows / Lines::kRows; ++pass) {
      const int32_t first_row = pass * Lines::kRows;
      if (first_row >= task.rows) break;
      ptx::wait_stores_read<0>();
      meet_math_warps();  // nobody reads lines or the largest of the pass before
#pragma unroll
      for (int i = 0; i < Lines::kRows / 8; ++i) {
        if (first_row + 8 * i >= task.rows) break;
        const float* const numbers = h.values + 4 * (pass * Lines::kRows / 8 + i);
        const uint2 of_rows{largest_of_row<kBlocks>(numbers), largest_of_row<kBlocks>(numbers + 1)};
        if (thread.lane < 4) *reinterpret_cast<uint2*>(&largest.of[thread.warp][8 * i + 2 * t]) = of_rows;
      }
      meet_math_warps();
      // Each warp finds the scales of all rows, a lane that of one, and hands them round: two divisions are much of the code.
      uint32_t of_row = 0;
#pragma unroll
      for (int warp = 0; warp < kSharing; ++warp) of_row = max(of_row, largest.of[first_sharing + warp][thread.lane]);
      const RowScale scale = RowScale::of_largest(of_row, p.power_of_two_scales, p.scale_of_h());
#pragma unroll
      for (int i = 0; i < Lines::kRows / 8; ++i) {
        if (first_row + 8 * i >= task.rows) break;
        const float* const numbers = h.values + 4 * (pass * Lines::kRows / 8 + i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int32_t in_pass = 8 * i + 2 * t + j;
          const float inverse = __shfl_sync(0xffffffff, scale.inverse, in_pass);
          std::byte* const line = lines + in_pass * Lines::kStride;
#pragma unroll
          for (int n = 0; n < 2 * kBlocks; ++n) {
            const int32_t column = 16 * kBlocks * (thread.warp % Roles::kWarpgroupWarps) + 8 * n + thread.lane / 4;
            const float number = numbers[64 * (n / 2) + 2 * (n % 2) + j] * inverse;
            line[turned::place_of_byte(column, even_first)] = static_cast<std::byte>(Precision::pack(number, 0.0f));
          }
        }
      }
      if (notes && first_row + thread.lane < task.rows) {
        const int64_t ring_row = ring_row_of<Variant>(task, first_row + thread.lane);
        ring_scales(cta, p.layout.h, p.shape.intermediate)[ring_scale(
            Tiling::kRows, ring_row, scale_blocks(p.shape.intermediate), first_column / kScaleColumns)] = scale.scale;
      }
      ptx::fence_proxy_async_shared();
      meet_warpgroup(thread);
      store_lines_of_warp(task, thread, lines, first_row, first_column, columns, [&](int32_t row) {
        return cta.template at<Element>(p.layout.h) + ring_row_of<Variant>(task, row) * p.shape.intermediate;
      });
    }
  }

  // Of a row that this thread has numbers of, among all columns of the warp, as bits: in their order NaN is above all
  // numbers.
  template <int kBlocks>
  static __device__ __forceinline__ uint32_t largest_of_row(const float* numbers) {
    uint32_t largest = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      largest = max(largest, max(__float_as_uint(fabsf(numbers[64 * block])),
                                 __float_as_uint(fabsf(numbers[64 * block + 2]))));
    }
#pragma unroll
    for (int other = 4; other < Roles::kWarpThreads; other *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffff, largest, other));
    }
    return largest;
  }
};

}  // namespace jaxmoe::epilogue
