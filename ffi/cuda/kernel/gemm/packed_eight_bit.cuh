// Products of rows in 8 bits with weights in 4 bits, decoded to E4M3 in the registers of the warps that multiply them. As
// packed.cuh, whose first lines say why, the factors change places; here warpgroups multiply them, since a warp alone has
// no product of 8 bits (docs/performance.md). Scales of groups are powers of two: what becomes of them depends on how many
// rows a tile has.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/deep_stages.cuh"
#include "cuda/kernel/gemm/packed_few_rows.cuh"
#include "cuda/kernel/gemm/packed_many_rows.cuh"
#include "cuda/kernel/gemm/packed_rows_in_turn.cuh"
#include "cuda/kernel/gemm/turned.cuh"

namespace jaxmoe {

// An Accumulate policy of the kind of FromPacked, with sums in the same places. A step is 128 along the depth.
class EightBitFromPacked {
 public:
  using Scales = PackedPart;
  static constexpr bool kTakesTiles = true;
  static constexpr bool kBeginsWithZeros = false;  // but the sums of rows that a tile has
  static constexpr float kToSums = 0x1p6f;  // of a sum

  __device__ EightBitFromPacked(const Scales& part, int) : part_(part) {}

  __device__ __forceinline__ void begin(ptx::Accumulators&) const {}

  // All steps of a tile: how many rows it has, and the groups of the warpgroup's columns, decide once which code runs.
  template <class Precision, class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_tile(ptx::Accumulators& sums, const Steps& ring,
                                                typename Steps::Position& position, int first_row, int32_t steps,
                                                const Meanwhile& meanwhile, const Track& track) const {
    // Inlined whatever their size: of a call, sums would lie in memory.
    if (part_.row_blocks <= kFewBlocks) {
      const auto few = [&](auto columns, auto rows) __attribute__((always_inline)) {
        FewPackedRows<decltype(columns)::value, decltype(rows)::value>(part_).multiply(sums, ring, position, steps,
                                                                                       meanwhile, track);
      };
      if constexpr (Steps::kHalf) {
        part_.template with_row_blocks<1, 1, kFewBlocks>(few);
      } else if constexpr (Steps::kDeep) {
        part_.template with_row_blocks<2, 1, kFewBlocks>(few);
      } else {
        part_.template with_row_blocks<2, kFewBlocks>(few);  // what is left of a larger tile, and all of a recording
      }
      return;
    }
    // With more rows there are no registers for that.
    if (part_.row_blocks <= kMostInTurn) {
      // Looked at in one place for all numbers of rows: with a copy of this for each of them math warps spilled.
      const OneBase base(part_);
      const bool takes = (!part_.one_block || steps % 2 == 0) && base.fits();
      constexpr int kThreads = Roles::kWarpgroupWarps * Roles::kWarpThreads;
      if (ptx::all_at_barrier<kThreads>(first_row / Roles::kWarpgroupRows, takes)) {
        const auto in_turn = [&](auto columns, auto rows) __attribute__((always_inline)) {
          PackedRowsInTurn<decltype(columns)::value, decltype(rows)::value, Steps::kLineBytes>(part_, base)
              .multiply(sums, ring, position, steps, meanwhile, track);
        };
        if constexpr (Steps::kHalf) {
          part_.template with_row_blocks<1, 4, 6, 8>(in_turn);
        } else if constexpr (Steps::kDeep) {
          part_.template with_row_blocks<2, 4>(in_turn);
        } else if (part_.one_block) {
          part_.template with_row_blocks<1, kMostInTurn>(in_turn);  // fewer are in stages of halves, but in a recording
        } else {
          part_.template with_row_blocks<2, 6, 8, kMostInTurn>(in_turn);
        }
        return;
      }
    }
    const auto many = [&](auto columns, auto rows) __attribute__((always_inline)) {
      ManyPackedRows<decltype(columns)::value, decltype(rows)::value, Steps::kLineBytes>(part_).multiply(
          sums, ring, position, steps, meanwhile, track);
    };
    if constexpr (Steps::kHalf) {
      part_.template with_row_blocks<1, 8>(many);
    } else if constexpr (Steps::kDeep) {
      part_.template with_row_blocks<2, 4>(many);
    } else if (part_.one_block) {
      part_.template with_row_blocks<1, 12, 16>(many);
    } else {
      part_.template with_row_blocks<2, 8, 12, 16>(many);
    }
  }

 private:
  static constexpr int kFewBlocks = 2, kMostInTurn = 10;  // of rows
  static_assert(turned::has_even_first(8 * kFewBlocks) && !turned::has_even_first(8 * kFewBlocks + 1));

  const Scales& part_;
};

}  // namespace jaxmoe
