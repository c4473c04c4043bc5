// Into what pieces the work is cut: the tiles that the GPU kernels are compiled for, and those of a CPU. What kernels,
// the host that checks a schedule against them, and Python, which makes schedules, have to agree on. Plain C++20.
#pragma once

#include <bit>
#include <cstdint>

#include "common/formats.h"
#include "common/shape.h"

namespace jaxmoe {

struct Tiling {
  static constexpr int32_t kRows = 128;     // of a block: 64 for each math warpgroup
  static constexpr int32_t kColumns = 256;  // of accumulators: 256 of a result, or 128 of gate and the same 128 of up
  static constexpr int32_t kDepth = 64;     // of K, for each stage: 128 bytes, the width of the swizzle
  // Blocks of a cluster, 1 or 2, which take neighbouring row tiles and share their loads of weights. A single block
  // loads 48 KiB a step through L2, which then is the limit.
  static constexpr int32_t kBlocks = 2;
  static constexpr int32_t kDispatchers = 3;  // warps of a block that pull rows
};
static_assert(std::has_single_bit(uint32_t{Tiling::kRows * Tiling::kBlocks}) &&
              std::has_single_bit(uint32_t{Tiling::kColumns}));  // tiles_over()

// The tiles of a schedule for these kernels.
constexpr TileSizes kernel_tiles(bool gated) {
  return {Tiling::kRows * Tiling::kBlocks, gated ? Tiling::kColumns / 2 : Tiling::kColumns, Tiling::kColumns};
}

// The pieces of a platform, and among how many they are dealt.
struct Granularity {
  TileSizes tile;
  int32_t workers;  // pairs of thread blocks of a GPU, 0 for as many as it has room for; threads of a CPU, per rank
  int32_t dispatchers_per_worker;  // warps of such a pair, or threads of a CPU, that pull rows
};
constexpr Granularity granularity_of_gpu(bool gated) {
  return {kernel_tiles(gated), 0, Tiling::kBlocks * Tiling::kDispatchers};
}
// Small, so that a test of a few rows has many tiles. Columns of h that share a scale share a tile.
constexpr Granularity granularity_of_cpu(bool gated, bool scaled) {
  return {{16, scaled ? kScaleColumns : gated ? 32 : 64, 64}, 2, 1};
}

// The schedule of a dispatch or a combine, which have no GEMMs.
constexpr Schedule exchange_schedule(const Granularity& pieces, int32_t workers) {
  Schedule schedule{};
  schedule.tile = pieces.tile;
  schedule.unit_tiles = schedule.chunk_rows = 1;
  schedule.workers = workers;
  schedule.dispatchers = workers * pieces.dispatchers_per_worker;
  return schedule;
}

// The schedule of a call: what was chosen for it, with what follows from its sizes and the platform.
constexpr Schedule complete(Schedule chosen, const Shape& shape, const Granularity& pieces) {
  chosen.tile = pieces.tile;
  chosen.workers = pieces.workers;
  chosen.dispatchers = pieces.workers * pieces.dispatchers_per_worker;
  chosen.narrow_rows = pieces.tile.rows / 2;
  chosen.ring_tiles = static_cast<int32_t>(at_most(int64_t{chosen.ring_tiles}, max_row_tiles(shape, pieces.tile)));
  return chosen;
}

// That of one half of a layer, as if of experts without up: there is no other GEMM to lag behind, and where the rows
// lie in the caller's array no ring. Its blocks share no columns, and its answers travel each on its own: no kernel of
// a half has code for it.
constexpr Schedule half_of(Schedule schedule, int32_t half) {
  schedule.half = half;
  schedule.lag_units = 0;
  schedule.share_columns = 0;
  schedule.summed_tiles = 0;
  if (schedule.is_second_half()) schedule.ring_tiles = 0;
  return schedule;
}

}  // namespace jaxmoe
