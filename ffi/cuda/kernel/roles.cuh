// Who does what in a block: the warps of each role, and the registers of their threads. The first warpgroup loads and
// pulls, the others multiply.
#pragma once

#include <cstdint>

#include "common/tiling.h"
#include "common/timeline.h"

namespace jaxmoe {

struct Roles {
  static constexpr int kWarpThreads = 32;
  static constexpr int kWarpgroupWarps = 4;  // setmaxnreg and wgmma take warpgroups

  static constexpr int kProducerWarp = 0;  // one thread of it
  static constexpr int kFirstDispatchWarp = 1;
  static constexpr int kDispatchWarps = Tiling::kDispatchers;
  static constexpr int kFirstMathWarp = 4;
  static constexpr int kMathWarpgroups = 2;
  static constexpr int kMathWarps = kMathWarpgroups * kWarpgroupWarps;
  static constexpr int kMathThreads = kMathWarps * kWarpThreads;  // behind the first warpgroup
  // Of a tile: the products of the tensor cores have 64 rows, those of a warp lie in its own registers.
  static constexpr int kWarpgroupRows = Tiling::kRows / kMathWarpgroups;
  static constexpr int kWarpRows = kWarpgroupRows / kWarpgroupWarps;

  static constexpr int kWarps = kFirstMathWarp + kMathWarps;
  static constexpr int kThreads = kWarps * kWarpThreads;

  static_assert(kWarpgroupRows == 64 && kWarpRows == 16);
  static_assert(kFirstDispatchWarp + kDispatchWarps == kFirstMathWarp && kFirstMathWarp % kWarpgroupWarps == 0);
  static_assert(kTracksOfRole[static_cast<int>(TrackRole::kDispatch)] == kDispatchWarps);
  static_assert(kTracksOfRole[static_cast<int>(TrackRole::kMath)] == kMathWarpgroups);

  // Of this thread, the same number for the compiler in all lanes.
  static __device__ __forceinline__ int warp() {
    return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpThreads, 0);
  }
};

// Of a thread. A kernel is compiled for 168 (65536 over 384 threads); all together stay within that. With fewer for the
// first warpgroup the walk over the schedule spills, with fewer for the others the epilogues do.
struct RoleRegisters {
  int control = 104;  // producer, dispatch
  int math = 200;

  // A block is started with 168 for each thread; what math warps take beyond that others have given back. If it is not
  // enough they wait for ever.
  constexpr bool fit() const { return control + Roles::kMathWarpgroups * math <= 168 * (1 + Roles::kMathWarpgroups); }
};

}  // namespace jaxmoe
