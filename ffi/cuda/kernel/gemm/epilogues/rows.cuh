// What both passes do with accumulators: they become 16-bit rows, which the copy engine stores wherever the caller
// says. The role file around it signals what was written.
//
//   add_bias          accumulators += bias of a column
//   store_*           activation, rounding, rows to global memory
//   wait_rows_stored  they are there: a signal may be released
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
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe {

// Which columns of the result a tile holds.
struct TileColumns {
  int32_t first;  // of the tile
  int32_t count;  // of the whole result, a multiple of 8; those of the tile beyond it are not stored
};

// Adds a bias to the accumulators of the tile's columns: kSums of them, from accumulator column kFirstSum. `biases` are
// `columns.count` elements of each expert; null where there are none.
template <class Variant, int kFirstSum, int kSums>
__device__ __forceinline__ void add_bias(ptx::Accumulators& sums, const MathThread& thread, TileColumns columns,
                                         const void* biases, int32_t expert) {
  if (biases == nullptr) return;
  const auto* bias = static_cast<const typename Variant::Precision::Element*>(biases) + int64_t{expert} * columns.count;
#pragma unroll
  for (int block = 0; block < kSums / 8; ++block) {
    const int32_t column = columns.first + 8 * block + 2 * (thread.lane % 4);
    if (column >= columns.count) continue;
    const float2 pair = Variant::Precision::unpack(*reinterpret_cast<const uint32_t*>(bias + column));
    float* of_block = sums.values + 4 * (kFirstSum / 8 + block);
    of_block[0] += pair.x;
    of_block[1] += pair.y;
    of_block[2] += pair.x;
    of_block[3] += pair.y;
  }
}

namespace epilogue {

// This warp's staging can be written again. Pairs with the end of store_lines().
__device__ __forceinline__ void acquire_staging() {
  ptx::wait_stores_read<0>();
  __syncwarp();
}

// Sends the 8 lines of the staging to global memory. Line l holds row first_row + l of the warp, or, with two rows to a
// line, row l in its first half and row l + 8 in its second. `row` is that of tile_row() of each lane.
template <class Variant, int kRowsPerLine>
__device__ __forceinline__ void store_lines(std::byte* staging, int lane, TileColumns columns,
                                            typename GemmShape<Variant>::Element* row, int first_row) {
  using Shape = GemmShape<Variant>;
  using Element = typename Shape::Element;
  constexpr int kLines = Shape::Staging::kLines;
  constexpr int kLineStride = Shape::Staging::kLineStride;
  constexpr int kColumns = Shape::kTileColumns / kRowsPerLine;
  constexpr int kStores = kLines * kRowsPerLine;
  ptx::fence_proxy_async_shared();
  // Also where all lanes meet, after their fences.
  auto* target = reinterpret_cast<Element*>(
      __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(row), first_row + lane % kStores));
  if (lane < kStores && target != nullptr) {
    const std::byte* source = staging + lane % kLines * kLineStride + lane / kLines * kColumns * sizeof(Element);
    ptx::store_bytes(target + columns.first, source,
                     at_most(columns.count - columns.first, kColumns) * sizeof(Element));
  }
  ptx::commit_stores();
}

// 256 columns of transform(sum, half), 8 rows of the warp at a time: the half is which.
template <class Variant, class Transform>
__device__ __forceinline__ void store_wide(const ptx::Accumulators& sums, const MathThread& thread, std::byte* staging,
                                           TileColumns columns, typename GemmShape<Variant>::Element* row,
                                           const Transform& transform) {
  using Shape = GemmShape<Variant>;
  using Precision = typename Variant::Precision;
  std::byte* line = staging + thread.lane % 8 * Shape::Staging::kLineStride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    acquire_staging();
#pragma unroll
    for (int block = 0; block < Shape::kTileColumns / 8; block += 4) {
      uint32_t tiles[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums.values + 4 * (block + i) + 2 * half;
        tiles[i] = Precision::pack(transform(pair[0], half), transform(pair[1], half));
      }
      ptx::store_tiles(line + 16 * (block + thread.lane / 8), tiles);
    }
    store_lines<Variant, 1>(staging, thread.lane, columns, row, 8 * half);
  }
}

}  // namespace epilogue

// The epilogues. `row` is where this thread's row, thread.tile_row(), begins: column 0 of the result, anywhere in
// global memory, a multiple of 16; null where that row is not to be stored (task.rows and beyond). Look it up before
// multiply(), which then hides how long that takes.

// h = activation(gate, up): 128 columns, gate of a column in accumulator column j and up in j + 128. All 16 rows of the
// warp are staged at once, row r and row r + 8 in the two halves of line r.
template <class Variant>
__device__ __forceinline__ void store_gated_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                 std::byte* staging, TileColumns columns,
                                                 typename GemmShape<Variant>::Element* row,
                                                 const Activation& activation) {
  using Shape = GemmShape<Variant>;
  using Precision = typename Variant::Precision;
  constexpr int kColumns = Shape::kTileColumns / 2;
  constexpr int kHalfLine = kColumns * sizeof(typename Shape::Element);
  std::byte* line = staging + thread.lane % 8 * Shape::Staging::kLineStride;
  std::byte* tile_of_lane = line + thread.lane / 8 % 2 * kHalfLine + 16 * (thread.lane / 16);
  epilogue::acquire_staging();
  with_activation_kind(activation.kind, [&](auto kind) {
#pragma unroll
    for (int block = 0; block < kColumns / 8; block += 2) {
      uint32_t tiles[4];  // of rows r and r + 8 of one block of columns, then of the next
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* gate = sums.values + 4 * (block + i / 2) + 2 * (i % 2);
        const float* up = gate + 4 * (kColumns / 8);
        tiles[i] = Precision::pack(activate_as<decltype(kind)::value>(activation, gate[0], up[0]),
                                   activate_as<decltype(kind)::value>(activation, gate[1], up[1]));
      }
      ptx::store_tiles(tile_of_lane + 16 * block, tiles);
    }
  });
  epilogue::store_lines<Variant, 2>(staging, thread.lane, columns, row, 0);
}

// Gate and up before the activation, for a backward pass: 128 columns of each, side by side in the accumulators and in
// every line of the staging. `row` is where the gate of this thread's row begins; up follows it. Rows of the tile from
// `rows` on are stored as zeros.
template <class Variant>
__device__ __forceinline__ void store_projections(const ptx::Accumulators& sums, const MathThread& thread,
                                                  std::byte* staging, TileColumns columns,
                                                  typename GemmShape<Variant>::Element* row, int32_t rows) {
  using Shape = GemmShape<Variant>;
  using Element = typename Shape::Element;
  using Precision = typename Variant::Precision;
  constexpr int kColumns = Shape::kTileColumns / 2;
  constexpr int kLines = Shape::Staging::kLines;
  std::byte* line = staging + thread.lane % 8 * Shape::Staging::kLineStride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool is_row = Roles::kWarpRows * thread.warp + 8 * half + thread.lane / 4 < rows;
    epilogue::acquire_staging();
#pragma unroll
    for (int block = 0; block < Shape::kTileColumns / 8; block += 4) {
      uint32_t tiles[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = sums.values + 4 * (block + i) + 2 * half;
        tiles[i] = is_row ? Precision::pack(pair[0], pair[1]) : 0;
      }
      ptx::store_tiles(line + 16 * (block + thread.lane / 8), tiles);
    }
    ptx::fence_proxy_async_shared();
    // Also where all lanes meet, after their fences.
    auto* target = reinterpret_cast<Element*>(
        __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(row), 8 * half + thread.lane % kLines));
    if (thread.lane < 2 * kLines && target != nullptr) {
      const int part = thread.lane / kLines;
      ptx::store_bytes(target + part * columns.count + columns.first,
                       staging + thread.lane % kLines * Shape::Staging::kLineStride + part * kColumns * sizeof(Element),
                       at_most(columns.count - columns.first, kColumns) * sizeof(Element));
    }
    ptx::commit_stores();
  }
}

// The same of experts without an up projection, 256 columns.
template <class Variant>
__device__ __forceinline__ void store_gate(const ptx::Accumulators& sums, const MathThread& thread, std::byte* staging,
                                           TileColumns columns, typename GemmShape<Variant>::Element* row,
                                           int32_t rows) {
  const int32_t first = Roles::kWarpRows * thread.warp + thread.lane / 4;
  const bool is_row[2] = {first < rows, first + 8 < rows};
  const auto masked = [&](float sum, int half) { return is_row[half] ? sum : 0.0f; };
  epilogue::store_wide<Variant>(sums, thread, staging, columns, row, masked);
}

// h = activation(gate) of experts without an up projection: 256 columns.
template <class Variant>
__device__ __forceinline__ void store_activated_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                     std::byte* staging, TileColumns columns,
                                                     typename GemmShape<Variant>::Element* row,
                                                     const Activation& activation) {
  with_activation_kind(activation.kind, [&](auto kind) {
    const auto transform = [&](float gate, int) { return activate_as<decltype(kind)::value>(activation, gate, 1.0f); };
    epilogue::store_wide<Variant>(sums, thread, staging, columns, row, transform);
  });
}

// The down GEMM: 256 columns as they are.
template <class Variant>
__device__ __forceinline__ void store_plain_tile(const ptx::Accumulators& sums, const MathThread& thread,
                                                 std::byte* staging, TileColumns columns,
                                                 typename GemmShape<Variant>::Element* row) {
  const auto unchanged = [](float sum, int) { return sum; };
  epilogue::store_wide<Variant>(sums, thread, staging, columns, row, unchanged);
}

// All rows that this warp has stored are in memory and visible to the lanes that stored them. A release by one lane
// after this orders them before whatever acquires it; readers by bulk copy put ptx::fence_proxy_async_global() after
// their acquire.
__device__ __forceinline__ void wait_rows_stored() {
  ptx::wait_stores_complete<0>();
  ptx::fence_proxy_async_global();
  __syncwarp();
}

}  // namespace jaxmoe
