// What becomes of the sums of gate_up where weights are packed and rows have 8 bits: h, rounded to e4m3 with a scale for
// each row and 128 columns, as in eight_bit_h.cuh. Here a thread has columns of several rows (packed.cuh), and the
// columns that share a scale are those of all math warps, or without an up projection those of a warpgroup. So warps
// tell each other the largest number that each has of a row.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/activation.h"
#include "common/layout.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/gemm/epilogues/across.cuh"
#include "cuda/kernel/gemm/epilogues/eight_bit_h.cuh"
#include "cuda/kernel/gemm/epilogues/h.cuh"
#include "cuda/kernel/gemm/precision/eight_bit.cuh"

namespace jaxmoe::epilogue {

struct AcrossEightBitH {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    const TileColumns tile = h_columns_of(cta, task);
    activate(cta, task, thread, tile, sums);
    find_largest(cta, task, thread, sums);
    const int32_t columns = p.gated ? Lines::kColumns / 2 : Lines::kColumns;  // of the warpgroup
    const int32_t first = tile.first + columns * thread.warpgroup;
    const auto target = [&](int32_t row) {
      return cta.template at<std::byte>(p.layout.h) + ring_row_of<Variant>(task, row) * p.shape.intermediate;
    };
    const auto fill = [&](std::byte* lines, int first_block, int32_t rows) {
      fill_rounded(cta, task, thread, sums, first / kScaleColumns, lines, first_block, rows);
    };
    store_across(cta, task, thread, first, at_most(tile.count - first, columns), fill, target);
  }

 private:
  // Sums become numbers of h: of gate in their places, or all of them.
  template <class Variant>
  static __device__ __forceinline__ void activate(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                                  TileColumns tile, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    const int32_t first = tile.first + (p.gated ? 16 : 32) * thread.warp + thread.lane / 4;
    const ColumnTerms gate = ColumnTerms::of(cta, p.b_gate, p.w_gate_scales, task.expert, first, tile.count);
    const ColumnTerms second =
        p.gated ? ColumnTerms::of(cta, p.b_up, p.w_up_scales, task.expert, first, tile.count)
                : ColumnTerms::of(cta, p.b_gate, p.w_gate_scales, task.expert, first + 16, tile.count);
    // At once: where both these and what they are made of were alive there would not be enough registers.
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      sums.values[i] = gate.complete(sums.values[i], i % 4);
      sums.values[64 + i] = second.complete(sums.values[64 + i], i % 4);
    }
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
  }
  // The largest magnitude of each row among this warp's columns, for all math warps to read: as bits, in whose order NaN
  // is above all numbers. They meet before it, when all have read those of the task before, and after it.
  template <class Variant>
  static __device__ __forceinline__ void find_largest(const Cta<Variant>& cta, const Task& task,
                                                      const MathThread& thread, const ptx::Accumulators& sums) {
    const bool gated = cta.params.gated;
    meet_math_warps();
#pragma unroll
    for (int i = 0; i < Tiling::kRows / 8; ++i) {
      if (8 * i >= task.rows) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float* const of_row = sums.values + 4 * i + j;
        uint32_t largest = max(__float_as_uint(fabsf(of_row[0])), __float_as_uint(fabsf(of_row[2])));
        if (!gated) {
          largest = max(largest, max(__float_as_uint(fabsf(of_row[64])), __float_as_uint(fabsf(of_row[66]))));
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        }
        if (thread.lane < 4) cta.shared.largest_of_rows.of_warp[thread.warp][8 * i + 2 * thread.lane + j] = largest;
      }
    }
    meet_math_warps();
  }
  // Barriers 1 to 3 are others'.
  static __device__ __forceinline__ void meet_math_warps() {
    __syncwarp();
    ptx::named_barrier<4, Roles::kMathThreads>();
  }

  template <class Variant>
  static __device__ __forceinline__ RowScale scale_of_row(const Cta<Variant>& cta, const MathThread& thread,
                                                          int32_t row) {
    const auto& p = cta.params;
    const auto& of_warp = cta.shared.largest_of_rows.of_warp;
    const int first = p.gated ? 0 : Roles::kWarpgroupWarps * thread.warpgroup;
    uint32_t largest = 0;
#pragma unroll
    for (int warp = 0; warp < Roles::kWarpgroupWarps; ++warp) largest = max(largest, of_warp[first + warp][row]);
    if (p.gated) {
#pragma unroll
      for (int warp = Roles::kWarpgroupWarps; warp < Roles::kMathWarps; ++warp) {
        largest = max(largest, of_warp[warp][row]);
      }
    }
    return RowScale::of_largest(largest, p.power_of_two_scales, p.scale_of_h());
  }

  // Fills `rows` lines, 32 at most, and stores their scales, for block `scale_block` of columns, once.
  template <class Variant>
  static __device__ __forceinline__ void fill_rounded(const Cta<Variant>& cta, const Task& task,
                                                      const MathThread& thread, const ptx::Accumulators& sums,
                                                      int32_t scale_block, std::byte* lines, int first_block,
                                                      int32_t rows) {
    using Precision = typename Variant::Precision;
    const auto& p = cta.params;
    const int g = thread.lane / 4, t = thread.lane % 4, warp = thread.warp % Roles::kWarpgroupWarps;
    const int32_t blocks = scale_blocks(p.shape.intermediate);
    float* const scales = ring_scales(cta, p.layout.h, p.shape.intermediate);
    // Of the warps that share a scale, the first one stores it.
    const bool stores = g == 0 && warp == 0 && (!p.gated || thread.warpgroup == 0) && scale_block < blocks;
#pragma unroll
    for (int i = 0; i < Lines::kRows / 8; ++i) {
      if (8 * i >= rows) break;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int32_t in_pass = 8 * i + 2 * t + j, row = 8 * first_block + in_pass;
        const RowScale scale = scale_of_row(cta, thread, row);
        if (stores && in_pass < rows) {
          scales[ring_scale(Tiling::kRows, ring_row_of<Variant>(task, row), blocks, scale_block)] = scale.scale;
        }
        std::byte* const line = lines + in_pass * Lines::kStride + (p.gated ? 16 : 32) * warp + g;
        const float* const of_row = sums.values + 4 * (first_block + i) + j;
        store_pair<Precision>(line, of_row[0] * scale.inverse, of_row[2] * scale.inverse);
        if (!p.gated) store_pair<Precision>(line + 16, of_row[64] * scale.inverse, of_row[66] * scale.inverse);
      }
    }
  }

  // Columns g and g + 8.
  template <class Precision>
  static __device__ __forceinline__ void store_pair(std::byte* line, float first, float second) {
    const uint16_t pair = Precision::pack(first, second);
    line[0] = static_cast<std::byte>(pair);
    line[8] = static_cast<std::byte>(pair >> 8);
  }
};

}  // namespace jaxmoe::epilogue
