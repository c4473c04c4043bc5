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
  static constexpr float kToSums = 0x1p6f;  // of a sum

  __device__ EightBitFromPacked(const Scales& part, int) : part_(part) {}

  __device__ __forceinline__ void begin(ptx::Accumulators&) const {}

  // All steps of a tile: how many rows it has, and the groups of the warpgroup's columns, decide once which code runs.
  template <class Precision, class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_tile(ptx::Accumulators& sums, const Steps& ring,
                                                typename Steps::Position& position, int first_row, int32_t steps,
                                                const Meanwhile& meanwhile, const Track& track) const {
    constexpr int kLineBytes = Steps::kLineBytes;
    // Inlined whatever its size: of a call, sums would lie in memory.
    const auto multiply = [&](auto columns, auto rows) __attribute__((always_inline)) {
      constexpr int kColumnBlocks = decltype(columns)::value, kBlocks = decltype(rows)::value;
      if constexpr (turned::has_even_first(8 * kBlocks)) {
        FewPackedRows<kColumnBlocks, kBlocks>(part_).multiply(sums, ring, position, steps, meanwhile, track);
      } else {
        // With more rows there are no registers for that, and a recording takes some.
        if constexpr (kBlocks <= (Track::kRecords ? 4 : 8)) {
          using InTurn = PackedRowsInTurn<kColumnBlocks, kBlocks, kLineBytes>;
          if (InTurn::takes(steps)) {
            const OneBase base(part_);
            constexpr int kThreads = Roles::kWarpgroupWarps * Roles::kWarpThreads;
            if (ptx::all_at_barrier<kThreads>(first_row / Roles::kWarpgroupRows, base.fits())) {
              InTurn(part_, base).multiply(sums, ring, position, steps, meanwhile, track);
              return;
            }
          }
        }
        ManyPackedRows<kColumnBlocks, kBlocks, kLineBytes>(part_).multiply(sums, ring, position, steps, meanwhile, track);
      }
    };
    // A tile with as few rows as a deep stage has room for is in deep stages, but for what is left of a larger one, and where
    // a kernel records and has none.
    if constexpr (Steps::kHalf) {
      part_.template with_row_blocks<1, 1, 2, 4, 6, 8>(multiply);
    } else if constexpr (Steps::kDeep) {
      part_.template with_row_blocks<2, 1, 2, 4>(multiply);
    } else if constexpr (Track::kRecords) {
      part_.template with_blocks<1, 2, 4, 6, 8, 12, 16>(multiply);
    } else {
      part_.template with_blocks<2, 6, 8, 12, 16>(multiply);
    }
  }

 private:
  const Scales& part_;
};

}  // namespace jaxmoe
