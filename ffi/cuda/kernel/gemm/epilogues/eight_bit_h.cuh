// What becomes of the sums of gate_up where rows are multiplied in 8 bits: h, rounded to e4m3 with a scale for each row
// and 128 columns. A tile has whole groups of these: 128 columns of h, or 256 of experts without an up projection. The
// four lanes that hold a row find its scale among themselves.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/h.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/scales.cuh"

namespace jaxmoe::epilogue {

struct EightBitH {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    const TileColumns columns = h_columns_of(cta, task);
    multiply_channels(cta, sums, thread);
    add_gate_up_biases(cta, task, thread, sums);
    with_activation_kind(p.activation.kind, [&](auto kind) {
      constexpr ActivationKind kKind = decltype(kind)::value;
      if (p.gated) {
        activate_all<64>(p.shape, [&](int i) {
          sums.values[i] = activate_as<kKind>(p.activation, sums.values[i], sums.values[64 + i]);
        });
      } else {
        activate_all<128>(p.shape, [&](int i) {
          sums.values[i] = activate_as<kKind>(p.activation, sums.values[i], 1.0f);
        });
      }
    });
    store_group<0>(cta, task, thread, columns, sums);
    if (!p.gated && columns.first + kScaleColumns < columns.count) {
      store_group<1>(cta, task, thread, {columns.first + kScaleColumns, columns.count}, sums);
    }
  }

 private:
  // Calls activate() for every sum, a few at a time: ptxas would interleave all of them, for which there are no
  // registers. A branch that is always taken, which it cannot know, keeps the few apart.
  template <int kSums, class Activate>
  static __device__ __forceinline__ void activate_all(const Shape& shape, const Activate& activate) {
    constexpr int kAtOnce = 8;
    static_assert(kSums <= kScaleColumns);
#pragma unroll
    for (int first = 0; first < kSums; first += kAtOnce) {
      if (shape.intermediate <= first) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) activate(first + i);
    }
  }

  // 128 columns of all 16 rows of the warp: row r and row r + 8 in the two halves of line r of the staging.
  template <int kGroup, class Variant>
  static __device__ __forceinline__ void store_group(const Cta<Variant>& cta, const Task& task,
                                                     const MathThread& thread, TileColumns columns,
                                                     const ptx::Accumulators& sums) {
    using Precision = typename Variant::Precision;
    using Staging = typename GemmShape<Variant>::Staging;
    const auto& p = cta.params;
    const int32_t block = columns.first / kScaleColumns;
    const int32_t blocks = scale_blocks(p.shape.intermediate);
    float* const scales = ring_scales(cta, p.layout.h, p.shape.intermediate);
    std::byte* const staging = cta.shared.gemm.staging.of_warp(thread.warp);
    acquire_staging();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t largest = 0;  // as bits, in whose order NaN is above all numbers
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float* pair = sums.values + 64 * kGroup + 4 * i + 2 * half;
        largest = max(largest, max(__float_as_uint(fabsf(pair[0])), __float_as_uint(fabsf(pair[1]))));
      }
      largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 2));
      const RowScale scale = RowScale::of_largest(largest, p.power_of_two_scales, p.scale_of_h());
      const int32_t tile_row = Roles::kWarpRows * thread.warp + thread.lane / 4 + 8 * half;
      if (thread.lane % 4 == 0 && tile_row < task.rows) {
        scales[ring_scale(Tiling::kRows, ring_row_of<Variant>(task, tile_row), blocks, block)] = scale.scale;
      }
      std::byte* const line =
          staging + thread.lane / 4 * Staging::kLineStride + half * kScaleColumns + 2 * (thread.lane % 4);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float* pair = sums.values + 64 * kGroup + 4 * i + 2 * half;
        *reinterpret_cast<uint16_t*>(line + 8 * i) =
            Precision::pack(pair[0] * scale.inverse, pair[1] * scale.inverse);
      }
    }
    using Element = typename Precision::Element;
    Element* const rows = cta.template at<Element>(p.layout.h);
    Element* const row = thread.tile_row() < task.rows
                             ? rows + ring_row_of<Variant>(task, thread.tile_row()) * p.shape.intermediate
                             : nullptr;
    send_lines<Variant>(staging, thread.lane, columns, row);
  }
};

}  // namespace jaxmoe::epilogue
