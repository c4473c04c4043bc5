// The tiles that the GPU kernels are compiled for: what the kernels, the host that checks a schedule against them, and
// Python, which makes schedules, have to agree on. Plain C++20, no CUDA.
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

struct Tiling {
  static constexpr int32_t kRows = 128;     // of a block: 64 for each math warpgroup
  static constexpr int32_t kColumns = 256;  // of accumulators: 256 of a result, or 128 of gate and the same 128 of up
  static constexpr int32_t kDepth = 64;     // of K, for each stage: 128 bytes, the width of the swizzle
  // Blocks of a cluster, 1 or 2, which take neighbouring row tiles and share their loads of weights. A single block
  // loads 48 KiB a step through L2, which then is the limit.
  static constexpr int32_t kBlocks = 2;
};

// The tiles of a schedule for these kernels.
constexpr TileSizes kernel_tiles(bool gated) {
  return {Tiling::kRows * Tiling::kBlocks, gated ? Tiling::kColumns / 2 : Tiling::kColumns, Tiling::kColumns};
}

}  // namespace jaxmoe
