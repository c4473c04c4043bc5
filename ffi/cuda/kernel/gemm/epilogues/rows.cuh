// What both passes do with accumulators: they become 16-bit rows, which go wherever the caller says. The role file around
// it signals what was written.
//
//   add_bias          accumulators += bias of a column
//   store_*           activation, rounding, rows to global memory
//   wait_rows_stored  a signal may be released
//
// There is no barrier: a warp stages, stores and waits for its own 16 rows. While one warpgroup is in here, the other
// multiplies what the stages still hold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/activation.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/config.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe {

// Which columns of the result a tile holds.
struct TileColumns {
  int32_t first;  // of the tile
  // Up to the end of the result, or of the half that a block has: a multiple of 8. None beyond are stored.
  int32_t count;
};

// Adds a bias to the accumulators of the tile's columns: kSums of them, from accumulator column kFirstSum. That of the
// expert begins at element `first` of `biases`, which are null where there are none.
template <class Variant, int kFirstSum, int kSums>
__device__ __forceinline__ void add_bias(ptx::Accumulators& sums, const MathThread& thread, TileColumns columns,
                                         const void* biases, int64_t first) {
  if (biases == nullptr) return;
  using Wide = typename Variant::Precision::Wide;
  const auto* bias = static_cast<const typename Wide::Element*>(biases) + first;
#pragma unroll
  for (int block = 0; block < kSums / 8; ++block) {
    const int32_t column = columns.first + 8 * block + 2 * (thread.lane % 4);
    if (column >= columns.count) continue;
    const float2 pair = Wide::unpack(*reinterpret_cast<const uint32_t*>(bias + column));
    float* of_block = sums.values + 4 * (kFirstSum / 8 + block);
    of_block[0] += pair.x;
    of_block[1] += pair.y;
    of_block[2] += pair.x;
    of_block[3] += pair.y;
  }
}

namespace epilogue {

// Whether every block of columns of an activation stands behind a branch of its own, which also leaves out columns that
// the result does not have. The compiler computes those of one stretch of code all at once, and of GELU, which is long,
// it had no registers for that.
template <class Kind>
inline constexpr bool kBlocksApart = Kind::value == ActivationKind::kGelu;

// This warp's staging can be written again. Pairs with the end of send_lines().
__device__ __forceinline__ void acquire_staging() {
  ptx::wait_stores_read<0>();
  __syncwarp();
}

// `row` of lane number `tile_row` of the warp.
template <class Element>
__device__ __forceinline__ Element* row_of_lane(Element* row, int tile_row) {
  return reinterpret_cast<Element*>(__shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(row), tile_row));
}

// Sends the 8 lines of the staging to global memory by the copy engine: line l holds row l of the warp in its first half and
// row l + 8 in its second. `row` is that of tile_row() of each lane.
template <class Variant, class Element>
__device__ __forceinline__ void send_lines(std::byte* staging, int lane, TileColumns columns, Element* row) {
  using Shape = GemmShape<Variant>;
  constexpr int kLines = Shape::Staging::kLines;
  constexpr int kColumns = Tiling::kColumns / 2;
  constexpr int kStores = 2 * kLines;
  ptx::fence_proxy_async_shared();
  __syncwarp();  // the shuffle below is no fence of memory
  auto* const target = row_of_lane(row, lane % kStores);
  if (lane < kStores && target != nullptr) {
    ptx::store_bytes(
        target + columns.first,
        staging + lane % kLines * Shape::Staging::kLineStride + lane / kLines * kColumns * sizeof(Element),
        at_most(columns.count - columns.first, kColumns) * sizeof(Element));
  }
  ptx::commit_stores();
}

// Copies the 8 lines of the staging to global memory by ordinary stores, after which they can be written again. Line l holds
// row first_row + l of the warp, or kParts pieces of it that lie columns.count apart.
//
// The other half of the tile would wait until the copy engine has read them, which took longer (docs/performance.md):
// presumably it has the boxes to load first that the producer has asked for by then, a whole ring of stages.
template <class Variant, int kParts, class Element>
__device__ __forceinline__ void copy_lines(const std::byte* staging, int lane, TileColumns columns, Element* row,
                                           int first_row) {
  using Staging = typename GemmShape<Variant>::Staging;
  constexpr int kColumns = Tiling::kColumns / kParts, kOfLane = sizeof(uint4) / sizeof(Element);
  static_assert(Roles::kWarpThreads * sizeof(uint4) == Staging::kLineBytes);
  const int part = lane * kOfLane / kColumns;
  const int column = columns.first + lane * kOfLane % kColumns;
  __syncwarp();
#pragma unroll 4
  for (int line = 0; line < Staging::kLines; ++line) {  // all at once would take more registers than there are
    auto* const target = row_of_lane(row, first_row + line);
    if (target == nullptr || column >= columns.count) continue;
    *reinterpret_cast<uint4*>(target + part * columns.count + column) =
        *reinterpret_cast<const uint4*>(staging + line * Staging::kLineStride + lane * sizeof(uint4));
  }
  __syncwarp();
}

// 256 columns of transform(two sums, half), packed, 8 rows of the warp at a time: the half is which. kParts as above,
// kApart: kBlocksApart.
template <class Variant, int kParts = 1, bool kApart = false, class Transform>
__device__ __forceinline__ void store_wide(const ptx::Accumulators& sums, const MathThread& thread, std::byte* staging,
                                           TileColumns columns, typename GemmShape<Variant>::Wide* row,
                                           const Transform& transform) {
  std::byte* line = staging + thread.lane % 8 * GemmShape<Variant>::Staging::kLineStride;
  acquire_staging();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < Tiling::kColumns / 8; block += 4) {
      if (kApart && columns.first + 8 * block >= columns.count) break;
      uint32_t tiles[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums.values + 4 * (block + i) + 2 * half;
        tiles[i] = transform(pair[0], pair[1], half);
      }
      ptx::store_tiles(line + 16 * (block + thread.lane / 8), tiles);
    }
    copy_lines<Variant, kParts>(staging, thread.lane, columns, row, 8 * half);
  }
}

}  // namespace epilogue

// Scales of output channels, where weights have such: those of the tile's columns come to the warp's staging while the
// last step is multiplied, 128 to a line. Line by line, as the accumulators have them: gate and up, or 256 columns.
// Both come at once, since the way to L2 and back is as long as the products of half a step. What the warp had staged
// is stored by then (TaskQueue::announce_meanwhile()).
template <class Variant>
__device__ __forceinline__ void stage_channels(const Cta<Variant>& cta, const Task& task, const MathThread& thread) {
  const auto& p = cta.params;
  if (Cta<Variant>::kDecodes || p.weight_scale_rows != 1) return;
  using Staging = typename GemmShape<Variant>::Staging;
  static_assert(kScaleColumns * sizeof(float) <= Staging::kLineBytes);
  const bool down = task.gemm == Gemm::kDown, halves = p.gated && !down;
  const int32_t width = down ? p.shape.hidden : p.shape.intermediate;
  const int32_t first = down     ? cta.first_answer_column(task)
                        : halves ? task.column_tile * kScaleColumns
                                 : task.column_tile * Tiling::kColumns;
  const int64_t offset = int64_t{task.expert} * width + first;
  const float* const scales = (down ? p.w_down_scales : p.w_gate_scales) + offset;
  const float* const second = halves ? p.w_up_scales + offset : scales + kScaleColumns;
  std::byte* const staged = cta.shared.gemm.staging.of_warp(thread.warp) + 16 * thread.lane;
  ptx::copy_vector(staged, scales + 4 * thread.lane);
  if (halves || first + kScaleColumns < width) {
    ptx::copy_vector(staged + Staging::kLineStride, second + 4 * thread.lane);
  }
}

// Multiplies the accumulators with them.
template <class Variant>
__device__ __forceinline__ void multiply_channels(const Cta<Variant>& cta, ptx::Accumulators& sums,
                                                  const MathThread& thread) {
  if (Cta<Variant>::kDecodes || cta.params.weight_scale_rows != 1) return;
  using Staging = typename GemmShape<Variant>::Staging;
  const std::byte* const staging = cta.shared.gemm.staging.of_warp(thread.warp);
  ptx::wait_copies();
  __syncwarp();
#pragma unroll
  for (int block = 0; block < Tiling::kColumns / 8; ++block) {
    const int line = 8 * block / kScaleColumns;
    const auto* const staged = reinterpret_cast<const float2*>(staging + line * Staging::kLineStride);
    const float2 pair = staged[4 * block % (kScaleColumns / 2) + thread.lane % 4];
    float* of_block = sums.values + 4 * block;
    of_block[0] *= pair.x;
    of_block[1] *= pair.y;
    of_block[2] *= pair.x;
    of_block[3] *= pair.y;
  }
}

// The epilogues. `row` is where this thread's row, thread.tile_row(), begins: column 0 of the result, anywhere in
// global memory, a multiple of 16; null where that row is not to be stored (task.rows and beyond). Look it up before
// multiply(), which then hides how long that takes.

namespace epilogue {

// Stages 128 columns of h of all 16 rows of the warp, row r and row r + 8 in the two halves of line r.
// packed_h(block, half) is what this lane has of rows r (half 0) or r + 8 (1) in 8 columns: two neighbours. kApart
// (kBlocksApart): only of the first `columns`.
template <class Variant, bool kApart = false, class PackedH>
__device__ __forceinline__ void stage_h(std::byte* staging, int lane, const PackedH& packed_h, int32_t columns = 0) {
  using Shape = GemmShape<Variant>;
  constexpr int kColumns = Tiling::kColumns / 2;
  constexpr int kHalfLine = kColumns * sizeof(typename Shape::Wide);
  std::byte* line = staging + lane % 8 * Shape::Staging::kLineStride;
  std::byte* tile_of_lane = line + lane / 8 % 2 * kHalfLine + 16 * (lane / 16);
#pragma unroll
  for (int block = 0; block < kColumns / 8; block += 2) {
    if (kApart && 8 * block >= columns) break;
    uint32_t tiles[4];  // of rows r and r + 8 of one block of columns, then of the next
#pragma unroll
    for (int i = 0; i < 4; ++i) tiles[i] = packed_h(block + i / 2, i % 2);
    ptx::store_tiles(tile_of_lane + 16 * block, tiles);
  }
}

}  // namespace epilogue

// h = activation(gate, up): gate of a column in accumulator column j and up in j + 128.
template <class Variant>
__device__ __forceinline__ void store_gated_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                 std::byte* staging, TileColumns columns,
                                                 typename GemmShape<Variant>::Wide* row,
                                                 const Activation& activation) {
  epilogue::acquire_staging();
  with_activation_kind(activation.kind, [&](auto kind) {
    const auto packed_h = [&](int block, int half) {
      const float* gate = sums.values + 4 * block + 2 * half;
      const float* up = gate + 4 * (Tiling::kColumns / 2 / 8);
      return Variant::Precision::Wide::pack(activate_as<decltype(kind)::value>(activation, gate[0], up[0]),
                                            activate_as<decltype(kind)::value>(activation, gate[1], up[1]));
    };
    epilogue::stage_h<Variant, epilogue::kBlocksApart<decltype(kind)>>(staging, thread.lane, packed_h,
                                                                       columns.count - columns.first);
  });
  epilogue::send_lines<Variant>(staging, thread.lane, columns, row);
}

// The same of columns of gate and up in turn: of every 8 accumulator columns a lane has gate and up of one column of h,
// of 16 two that are 4 apart, and four lanes trade those for neighbours. 64 shuffles of a thread, all of them after the
// last activation: between them the compiler computed many activations at once, for which there were no registers.
template <class Variant>
__device__ __forceinline__ void store_paired_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                  std::byte* staging, TileColumns columns,
                                                  typename GemmShape<Variant>::Wide* row,
                                                  const Activation& activation) {
  constexpr int kBlocks = Tiling::kColumns / 2 / 8;
  uint32_t apart[kBlocks][2] = {};
  with_activation_kind(activation.kind, [&](auto kind) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (epilogue::kBlocksApart<decltype(kind)> && columns.first + 8 * block >= columns.count) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* first = sums.values + 4 * 2 * block + 2 * half;
        const float* fourth_after = first + 4;
        apart[block][half] = Variant::Precision::Wide::pack(
            activate_as<decltype(kind)::value>(activation, first[0], first[1]),
            activate_as<decltype(kind)::value>(activation, fourth_after[0], fourth_after[1]));
      }
    }
  });
  epilogue::acquire_staging();
  epilogue::stage_h<Variant>(staging, thread.lane, [&](int block, int half) {
    return ptx::as_neighbours(apart[block][half], thread.lane);
  });
  epilogue::send_lines<Variant>(staging, thread.lane, columns, row);
}

// Gate and up before the activation, for a backward pass: kParts = 2, 128 columns of each, side by side in the
// accumulators and in every line of the staging; or 256 of gate, or of both in turn. `row` is where the gate of this
// thread's row begins; up follows it. Rows of the tile from `rows` on are stored as zeros.
template <class Variant, int kParts>
__device__ __forceinline__ void store_projections(const ptx::Accumulators& sums, const MathThread& thread,
                                                  std::byte* staging, TileColumns columns,
                                                  typename GemmShape<Variant>::Wide* row, int32_t rows) {
  const int32_t first = Roles::kWarpRows * thread.warp + thread.lane / 4;
  const bool is_row[2] = {first < rows, first + 8 < rows};
  const auto masked = [&](float a, float b, int half) {
    using Precision = typename Variant::Precision::Wide;
    // The same; but so the compiler has multiply() find addresses while it waits for a stage, and not after.
    if constexpr (kParts == 1) return Precision::pack(is_row[half] ? a : 0.0f, is_row[half] ? b : 0.0f);
    return is_row[half] ? Precision::pack(a, b) : 0;
  };
  epilogue::store_wide<Variant, kParts>(sums, thread, staging, columns, row, masked);
}

// h = activation(gate) of experts without an up projection: 256 columns.
template <class Variant>
__device__ __forceinline__ void store_activated_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                     std::byte* staging, TileColumns columns,
                                                     typename GemmShape<Variant>::Wide* row,
                                                     const Activation& activation) {
  with_activation_kind(activation.kind, [&](auto kind) {
    const auto activate = [&](float gate) { return activate_as<decltype(kind)::value>(activation, gate, 1.0f); };
    using Precision = typename Variant::Precision::Wide;
    const auto transform = [&](float a, float b, int) { return Precision::pack(activate(a), activate(b)); };
    epilogue::store_wide<Variant, 1, epilogue::kBlocksApart<decltype(kind)>>(sums, thread, staging, columns, row,
                                                                             transform);
  });
}

// The down GEMM: 256 columns as they are.
template <class Variant>
__device__ __forceinline__ void store_plain_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                 std::byte* staging, TileColumns columns,
                                                 typename GemmShape<Variant>::Wide* row) {
  const auto unchanged = [](float a, float b, int) { return Variant::Precision::Wide::pack(a, b); };
  epilogue::store_wide<Variant>(sums, thread, staging, columns, row, unchanged);
}

// What the copy engine has stored of this warp's rows is in memory and visible to the lanes that asked for it. A release by
// one lane after this orders all rows of the warp, those of ordinary stores as well, before whatever acquires it; readers
// by bulk copy put ptx::fence_proxy_async_global() after their acquire.
__device__ __forceinline__ void wait_rows_stored() {
  ptx::wait_stores_complete<0>();
  ptx::fence_proxy_async_global();
  __syncwarp();
}

}  // namespace jaxmoe
