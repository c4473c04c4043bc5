// What becomes of the sums of gate_up of packed weights beside rows in 8 bits: h, rounded to e4m3 with a scale for each
// row and 128 columns, in the order that gemm/packed_eight_bit.cuh wants. As AcrossH (across.cuh), but that warps find the
// largest number of a row together first, and each stores what it has by itself: 8 or 4 bytes of a row at a time.
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

// Behind the lines of a warpgroup: the largest magnitude of each row among the columns of each of its warps, as bits, and
// where its warps turn numbers of 16 rows.
struct BehindLines {
  static constexpr int kRowsAtOnce = 16;

  uint32_t largest[Roles::kWarpgroupWarps][Tiling::kRows];
  uint4 turned[Roles::kWarpgroupWarps][kRowsAtOnce];

  template <class Variant>
  static __device__ __forceinline__ BehindLines& of(const Cta<Variant>& cta, int warpgroup) {
    using Staging = typename GemmShape<Variant>::Staging;
    constexpr int kLinesBytes = Lines::kRows * Lines::kStride;
    static_assert(kLinesBytes + sizeof(BehindLines) <= Staging::kHalfBytes && kLinesBytes % alignof(BehindLines) == 0);
    return *reinterpret_cast<BehindLines*>(cta.shared.gemm.staging.of_warpgroup(warpgroup) + kLinesBytes);
  }
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
    const auto [first, second] = GateUpTerms::of(cta, task, thread, h_columns_of(cta, task), kGated);
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
    constexpr int kBlocks = kGated ? 1 : 2;  // of 16 columns of h, of a warp
    constexpr int32_t kColumns = Roles::kWarpgroupWarps * 16 * kBlocks;  // of a warpgroup
    constexpr int kRowsAtOnce = BehindLines::kRowsAtOnce;
    const auto& p = cta.params;
    const TileColumns tile = h_columns_of(cta, task);
    const int32_t first_column = tile.first + kColumns * thread.warpgroup;
    const int warp = thread.warp % Roles::kWarpgroupWarps;
    const bool has_columns = first_column < tile.count;
    // A rehearsal (rehearsal.cuh) has no columns and notes nothing: behind the last scale of a row lie those of other rows,
    // which may be multiplied by now, if this block came late.
    const bool notes = has_columns && (kGated ? thread.warp : warp) == 0;
    const bool even_first = turned::has_even_first(task.rows);
    const int t = thread.lane % 4;
    auto& own = BehindLines::of(cta, thread.warpgroup);

    meet_math_warps();  // nobody reads the largest of the task before
#pragma unroll
    for (int i = 0; i < Tiling::kRows / 8; ++i) {
      if (8 * i >= task.rows) break;
      const uint2 of_rows{largest_of_row<kBlocks>(h.values + 4 * i), largest_of_row<kBlocks>(h.values + 4 * i + 1)};
      if (thread.lane < 4) *reinterpret_cast<uint2*>(&own.largest[warp][8 * i + 2 * t]) = of_rows;
    }
    meet_math_warps();
#pragma unroll
    for (int pass = 0; pass < Tiling::kRows / Roles::kWarpThreads; ++pass) {
      const int32_t first_row = pass * Roles::kWarpThreads;
      if (first_row >= task.rows) break;
      // Each warp finds the scales of all rows, a lane that of one, and hands them round: two divisions are much of the code.
      uint32_t of_row = 0;
#pragma unroll
      for (int other = 0; other < Roles::kWarpgroupWarps; ++other) {
        const uint32_t of_own = own.largest[other][first_row + thread.lane];
        of_row = max(of_row, of_own);
        if constexpr (kGated) {
          of_row = max(of_row, BehindLines::of(cta, 1 - thread.warpgroup).largest[other][first_row + thread.lane]);
        }
      }
      const RowScale scale = RowScale::of_largest(of_row, p.power_of_two_scales, p.scale_of_h());
      if (notes && first_row + thread.lane < task.rows) {
        const int64_t ring_row = ring_row_of<Variant>(task, first_row + thread.lane);
        ring_scales(cta, p.layout.h, p.shape.intermediate)[ring_scale(
            Tiling::kRows, ring_row, scale_blocks(p.shape.intermediate), first_column / kScaleColumns)] = scale.scale;
      }
#pragma unroll
      for (int in_pass = 0; in_pass < Roles::kWarpThreads; in_pass += kRowsAtOnce) {
        if (first_row + in_pass >= task.rows) break;
        const int32_t row = first_row + in_pass + thread.lane;
        const bool stores = thread.lane < kRowsAtOnce && row < task.rows && has_columns;
        auto* const of_row_in_ring =
            cta.template at<Element>(p.layout.h) + ring_row_of<Variant>(task, row) * p.shape.intermediate;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          uint32_t tiles[kRowsAtOnce / 8];  // columns g and g + 8 of a row, and those of the next one
#pragma unroll
          for (int i = 0; i < kRowsAtOnce / 8; ++i) {
            const float* const numbers = h.values + 64 * block + 4 * ((first_row + in_pass) / 8 + i);
            const float first = __shfl_sync(0xffffffff, scale.inverse, in_pass + 8 * i + 2 * t);
            const float second = __shfl_sync(0xffffffff, scale.inverse, in_pass + 8 * i + 2 * t + 1);
            tiles[i] = __byte_perm(Precision::pack(numbers[0] * first, numbers[2] * first),
                                   Precision::pack(numbers[1] * second, numbers[3] * second), 0x5410);
          }
          __syncwarp();  // all lanes have what lay there
          ptx::store_turned_tiles(&own.turned[warp][thread.lane % kRowsAtOnce], tiles);
          __syncwarp();
          if (stores) {
            const int32_t column = first_column + 16 * (kBlocks * warp + block);
            store_columns(own.turned[warp][thread.lane], even_first, of_row_in_ring, column);
          }
        }
      }
    }
  }

  // Stores the 16 columns of a row from `column` on, of which `pairs` has g and g + 8 as neighbours, at their places
  // (gemm/turned.cuh).
  template <class Element>
  static __device__ __forceinline__ void store_columns(const uint4& pairs, bool even_first, Element* row, int32_t column) {
    static_assert(sizeof(Element) == 1);
    if (even_first) {
      Element* const first_half = row + column / 32 * 32 + column % 32 / 2;
      const uint2 even{__byte_perm(pairs.x, pairs.y, 0x5140), __byte_perm(pairs.z, pairs.w, 0x5140)};
      const uint2 odd{__byte_perm(pairs.x, pairs.y, 0x7362), __byte_perm(pairs.z, pairs.w, 0x7362)};
      *reinterpret_cast<uint2*>(first_half) = {__byte_perm(even.x, even.y, 0x5410), __byte_perm(even.x, even.y, 0x7632)};
      *reinterpret_cast<uint2*>(first_half + 16) = {__byte_perm(odd.x, odd.y, 0x5410), __byte_perm(odd.x, odd.y, 0x7632)};
    } else {
      const uint32_t words[4] = {__byte_perm(pairs.x, pairs.y, 0x6420), __byte_perm(pairs.z, pairs.w, 0x6420),
                                 __byte_perm(pairs.x, pairs.y, 0x7531), __byte_perm(pairs.z, pairs.w, 0x7531)};
      Element* const first_word = row + column / 128 * 128 + column % 32 * 4 + column % 128 / 32 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(first_word + 16 * i) = words[i];
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
