// Everything about a kernel that is fixed when it is compiled. A kernel takes it as a type,
//
//   struct Variant {
//     using Precision = Bf16;                                  // kernel/gemm/precision/
//     using Params = ForwardParams;                            // kernel/params.cuh
//     static constexpr Pass kPass = Pass::kForward;
//     static constexpr KernelConfig config{};
//   };
//
// because a struct as a non-type template argument of a __global__ function does not compile with nvcc 13.0 and g++ 12.
#pragma once

#include <cstddef>
#include <type_traits>

#include "common/tiling.h"
#include "cuda/device/pipeline.cuh"
#include "cuda/kernel/gemm/stage.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

struct KernelConfig {
  int stages = 4;
  RoleRegisters registers{};
  bool timeline = false;  // records what every role does when, see device/timeline.cuh
};

// Most dynamic shared memory of a block on sm_90.
inline constexpr std::size_t kMaxSharedBytes = 227 * 1024;

// The shared memory of the GEMM roles, and the numbers that follow from a config.
template <class Variant>
struct GemmShape {
  static constexpr KernelConfig config = Variant::config;
  using Element = typename Variant::Precision::Element;     // of what is multiplied
  using Wide = typename Variant::Precision::Wide::Element;  // of x, biases and answers

  static constexpr int kMathWarps = Roles::kMathWarps;

  static_assert(Tiling::kColumns == 256, "one 64 x 256 product per warpgroup");
  static_assert(Tiling::kBlocks == 1 || Tiling::kBlocks == 2);

  using Rows = OperandTile<Element, Tiling::kRows>;
  // Packed weights come 128 along the depth at a time.
  using RowsOfPacked = std::conditional_t<Rows::kLine == PackedTile<Tiling::kColumns>::kLine, Rows, TwoPanels<Rows>>;
  using Packed = PackedTile<Tiling::kColumns>;
  // Of 16 bits two steps of so many rows take the room of one with all rows; of 8 bits they take more, and there shared
  // memory has room for them. With 48 rows of 8 bits math warps spill.
  static constexpr bool kScaledRows = Variant::Precision::kTokens.is_scaled();
  static constexpr int kDeepRows = 32;
  // A kernel that records what it does has no register for them beside rows in 8 bits.
  static constexpr bool kTakesDeepSteps = Variant::Precision::kPacked && !(kScaledRows && config.timeline);
  using FewRows = OperandTile<Element, kDeepRows>;
  using DeepRows = std::conditional_t<Rows::kLine == Packed::kLine, FewRows, TwoPanels<FewRows>>;
  using DeepPacked = DeepPackedTile<Tiling::kColumns>;
  // Where blocks share the columns of a tile each has half of them, and room for more rows. Beside rows of 16 bits that has
  // not been tried.
  static constexpr int kDeepRowsOfHalf = kScaledRows ? 64 : kDeepRows;
  using MoreRows = OperandTile<Element, kDeepRowsOfHalf>;
  using DeepHalf = ScaledDeepStage<MoreRows, DeepPackedTile<Tiling::kColumns / 2>, kDeepRowsOfHalf>;
  using PackedStage =
      std::conditional_t<kScaledRows,
                         StageOfEither<ScaledStage<RowsOfPacked, Packed, Tiling::kRows>,
                                       ScaledDeepStage<DeepRows, DeepPacked, kDeepRows>, DeepHalf>,
                         StageOfEither<jaxmoe::Stage<RowsOfPacked, Packed>, DeepStage<DeepRows, DeepPacked>>>;
  using Stage = std::conditional_t<Variant::Precision::kPacked, PackedStage,
                                   jaxmoe::Stage<Rows, OperandTile<Element, Tiling::kColumns>>>;
  using Ring = Pipeline<Stage, config.stages, kMathWarps, Tiling::kBlocks>;

  // Where each math warp turns 8 rows x 256 columns (or 16 x 128) of accumulators into rows in memory order. The first
  // lines of all warps come first, then their second ones: so 16 bytes behind every eighth line suffice for the 8 lines
  // that a store touches at once to lie in 8 different groups of banks.
  struct Staging {
    // Of a warp. Packed weights want less (epilogues/across.cuh), and have other uses for the room.
    static constexpr int kLines = Variant::Precision::kPacked ? 6 : 8;
    static constexpr int kLineBytes = Tiling::kColumns * sizeof(Wide);
    static constexpr int kLineStride = kMathWarps * kLineBytes + 16;  // from a line of a warp to its next
    static constexpr int kHalfBytes = kLines * kMathWarps * kLineBytes / Roles::kMathWarpgroups;
    alignas(16) std::byte bytes[kLines * kLineStride - 16];

    // The first line.
    __device__ __forceinline__ std::byte* of_warp(int warp) { return bytes + warp * kLineBytes; }

    // All of it in halves, for warpgroups whose warps fill lines together (epilogues/across.cuh).
    __device__ __forceinline__ std::byte* of_warpgroup(int warpgroup) {
      return bytes + warpgroup * kHalfBytes;
    }
  };

  // At the start of dynamic shared memory, which has to be aligned to 1024 bytes.
  struct Storage {
    typename Ring::Storage ring;
    Staging staging;
  };
  static_assert(sizeof(Storage) + 2816 <= kMaxSharedBytes, "2.75 KiB are left for the other roles");
};

}  // namespace jaxmoe
