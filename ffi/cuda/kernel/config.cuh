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
  using PackedStage = std::conditional_t<Variant::Precision::kTokens.is_scaled(),
                                         ScaledStage<RowsOfPacked, Packed, Tiling::kRows>,
                                         jaxmoe::Stage<RowsOfPacked, Packed>>;
  using Columns = OperandTile<Element, Tiling::kColumns>;
  using Stage = std::conditional_t<Variant::Precision::kPacked, PackedStage, jaxmoe::Stage<Rows, Columns>>;
  using Ring = Pipeline<Stage, config.stages, kMathWarps, Tiling::kBlocks>;

  // Weights that are decoded in stages (stage_decoder.cuh) go through a ring of packed columns, from the producer to the
  // stage decoder, and one of decoded columns, to the math warps; rows have a third one. All three take the same steps, so
  // that one position is enough for a role. Packed columns have the most stages, since they come from memory.
  struct InStages {
    using Packed = PackedTile<Tiling::kColumns, Rows::kLine>;
    static constexpr int kPackedStages = sizeof(Packed) > 8192 ? 4 : 8, kRowStages = 2, kColumnStages = 2;
    using PackedRing = Pipeline<StageOfColumns<Packed>, kPackedStages, Roles::kStageDecoderWarps, Tiling::kBlocks>;
    using RowRing = Pipeline<StageOfRows<Rows>, kRowStages, kMathWarps, 1>;
    using ColumnRing = Pipeline<StageOfColumns<Columns>, kColumnStages, kMathWarps, 1, Roles::kStageDecoderWarps>;

    struct Storage {
      typename ColumnRing::Stage columns[kColumnStages];  // what is aligned comes first
      typename RowRing::Stage rows[kRowStages];
      typename PackedRing::Stage packed[kPackedStages];
      alignas(128) float row_scales[kRowStages][Tiling::kRows];
      float column_scales[kColumnStages][2];  // of each half of the columns
      float factors[2];                       // of the matrices of the task that is decoded, likewise
      typename PackedRing::Barriers of_packed;
      typename RowRing::Barriers of_rows;
      typename ColumnRing::Barriers of_columns;
      // The largest scale of a group in each half, by each warp that decodes; of a step and the one before it.
      uint8_t largest[2][2][Roles::kStageDecoderWarps];

      __device__ __forceinline__ PackedRing packed_ring() { return {packed, of_packed}; }
      __device__ __forceinline__ RowRing row_ring() { return {rows, of_rows}; }
      __device__ __forceinline__ ColumnRing column_ring() { return {columns, of_columns}; }
    };

    using Position = typename ColumnRing::Position;
    template <class Ring>
    static __device__ __forceinline__ typename Ring::Position in(Position position) {
      return {position.steps};
    }

    // Rows and decoded columns as the math warps use them, with the calls of one ring.
    class MathRing {
     public:
      using Position = InStages::Position;
      explicit __device__ MathRing(Storage& storage) : storage_(storage) {}

      __device__ __forceinline__ bool is_full(Position position) const {
        return storage_.column_ring().is_full(position);
      }
      // Pairs with the commits of the producer and of the stage decoder.
      __device__ __forceinline__ void wait(Position position) const {
        storage_.row_ring().wait(in<RowRing>(position));
        storage_.column_ring().wait(position);
      }
      __device__ __forceinline__ StageInTwo<Rows, Columns> stage(Position position) const {
        const auto of_rows = in<RowRing>(position);
        return {storage_.row_ring().stage(of_rows).a, storage_.column_ring().stage(position).b,
                storage_.row_scales[of_rows.stage()], storage_.column_scales[position.stage()]};
      }
      __device__ __forceinline__ void release(Position position, int lane) const {
        storage_.row_ring().release(in<RowRing>(position), lane);
        storage_.column_ring().release(position, lane);
      }

     private:
      Storage& storage_;
    };
  };
  static constexpr bool kInStages = Variant::Precision::kInStages;

  // Where each math warp turns 8 rows x 256 columns (or 16 x 128) of accumulators into rows in memory order. The first
  // lines of all warps come first, then their second ones: so 16 bytes behind every eighth line suffice for the 8 lines
  // that a store touches at once to lie in 8 different groups of banks.
  struct Staging {
    static constexpr int kLines = 8;  // of a warp
    static constexpr int kLineBytes = Tiling::kColumns * sizeof(Wide);
    static constexpr int kLineStride = kMathWarps * kLineBytes + 16;  // from a line of a warp to its next
    alignas(16) std::byte bytes[kLines * kLineStride - 16];

    // The first line.
    __device__ __forceinline__ std::byte* of_warp(int warp) { return bytes + warp * kLineBytes; }

    // All of it in halves, for warpgroups whose warps fill lines together (epilogues/across.cuh).
    __device__ __forceinline__ std::byte* of_warpgroup(int warpgroup) {
      return bytes + warpgroup * (kLines * kMathWarps * kLineBytes / Roles::kMathWarpgroups);
    }
  };

  // At the start of dynamic shared memory, which has to be aligned to 1024 bytes.
  struct Storage {
    std::conditional_t<kInStages, typename InStages::Storage, typename Ring::Storage> ring;
    Staging staging;
  };

  // What the producer fills with B, and what math warps multiply: one ring, but in stages.
  using LoadedRing = std::conditional_t<kInStages, typename InStages::PackedRing, Ring>;
  using MathRing = std::conditional_t<kInStages, typename InStages::MathRing, Ring>;
  static __device__ __forceinline__ LoadedRing loaded_ring(Storage& storage) {
    if constexpr (kInStages) {
      return storage.ring.packed_ring();
    } else {
      return LoadedRing(storage.ring);
    }
  }
  static __device__ __forceinline__ void init_rings(Storage& storage) {
    if constexpr (kInStages) {
      InStages::PackedRing::init(storage.ring.of_packed);
      InStages::RowRing::init(storage.ring.of_rows);
      InStages::ColumnRing::init(storage.ring.of_columns);
    } else {
      Ring::init(storage.ring.barriers);
    }
  }
  // Steps that the producer may be ahead of the math warps.
  static constexpr int kMostAhead = kInStages ? InStages::kPackedStages + InStages::kColumnStages : config.stages;
  static_assert(sizeof(Storage) + 2816 <= kMaxSharedBytes, "2.75 KiB are left for the other roles");
};

}  // namespace jaxmoe
