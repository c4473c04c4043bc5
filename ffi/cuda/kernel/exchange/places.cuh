// Where the products of the rows that dispatch pulls go, in an array of the caller's (common/exchange.h): each row's
// place, which the owner of its slot is told, and zeros where there is none. By the warps of dispatch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/chunks.h"
#include "common/exchange.h"
#include "common/layout.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::places {

// Of one dispatch warp, which goes through the experts in order.
template <class Variant>
class Places {
 public:
  explicit __device__ Places(const Cta<Variant>& cta)
      : cta_(cta), walk_(cta.params.room, cta.params.schedule.tile, cta.shared.rows_per_expert) {}

  // For a lane's row of an expert, which comes from a slot; `counts` are those of each source. Returns the row of the
  // array, RowTarget::kNone where there is no room. Lanes without a slot call it too.
  __device__ __forceinline__ uint32_t place(int32_t expert, const int32_t* counts, RowSource from, int32_t slot) {
    walk_.move_to(expert);
    if (slot < 0) return RowTarget::kNone;
    const auto& p = cta_.params;
    int32_t row = walk_.first_row() + from.position;
    for (int32_t source = 0; source < from.source; ++source) row += counts[source];
    if (row >= walk_.end()) return RowTarget::kNone;
    p.made_row_sources[row] = static_cast<int32_t>(RowTarget::of(from.source, slot).packed);
    cta_.peers.template at<int32_t>(from.source, p.layout.slot_rows.offset)[slot] = row;
    return row;
  }

  // By the whole warp, after the last of its rows: tells the caller how many rows each expert has, and clears its share
  // of those that are nobody's.
  __device__ __forceinline__ void finish(int dispatch_warp, int lane) {
    const auto& p = cta_.params;
    const int32_t warps = cta_.shared.crew.dispatchers, local = p.shape.local_experts();
    const int32_t warp = cta_.block() * Roles::kDispatchWarps + dispatch_warp;
    RoomWalk walk(p.room, p.schedule.tile, cta_.shared.rows_per_expert);
#pragma unroll 1
    for (int32_t expert = 0; expert <= local; ++expert) {
      const int32_t sent = expert < local ? walk.rows_of(expert) : 0;
      const int32_t kept = expert < local ? at_most(sent, walk.end() - walk.first_row()) : 0;
      if (warp == 0 && lane == 0 && expert < local) {
        p.rows_per_expert[expert] = kept;
        p.dropped_rows[expert] = sent - kept;
      }
      const int32_t begin = walk.first_row() + kept;
      if (expert < local) walk.move_to(expert + 1);
      clear(begin, expert < local ? walk.first_row() : p.room.rows, warp, warps, lane);
    }
  }

 private:
  // Of rows `begin` to `end` those that are this warp's: dealt by their number, so that all warps have some.
  __device__ __forceinline__ void clear(int32_t begin, int32_t end, int32_t warp, int32_t warps, int lane) {
    const auto& p = cta_.params;
    constexpr auto kElementBytes = static_cast<int32_t>(sizeof(typename Cta<Variant>::Element));
    const int32_t vectors = p.shape.intermediate * kElementBytes / kVectorBytes;
#pragma unroll 1
    for (int32_t row = begin + (warp + warps - begin % warps) % warps; row < end; row += warps) {
      if (lane == 0) p.made_row_sources[row] = static_cast<int32_t>(RowTarget::kNone);
      uint4* const target = static_cast<uint4*>(p.rows) + int64_t{row} * vectors;
      for (int32_t v = lane; v < vectors; v += 32) target[v] = uint4{0, 0, 0, 0};
    }
  }

  const Cta<Variant>& cta_;
  RoomWalk walk_;
};

}  // namespace jaxmoe::places
