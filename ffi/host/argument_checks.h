// What Python may pass to the integer code of common/, which divides by it. Callers: host/schedule_bindings.cc,
// host/layout_bindings.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "common/layout.h"
#include "common/shape.h"

namespace jaxmoe {

using Rows = std::vector<int32_t>;  // of each local expert

inline void require(bool holds, const std::string& complaint) {
  if (!holds) throw pybind11::value_error("schedule: " + complaint);
}

inline void require_range(const char* name, int64_t value, int64_t first, int64_t end) {
  require(value >= first && value < end, std::string(name) + "=" + std::to_string(value) + ". It needs to be " +
                                             std::to_string(first) + " to " + std::to_string(end - 1) + ".");
}

inline void require_at_least(const char* name, int64_t value, int64_t least) {
  require(value >= least,
          std::string(name) + "=" + std::to_string(value) + ". It needs to be at least " + std::to_string(least) + ".");
}

inline void check(const Shape& shape) {
  require_range("ranks", shape.ranks, 1, kMaxRanks + 1);
  require_at_least("tokens", shape.tokens, 0);
  require_at_least("hidden", shape.hidden, 1);
  require_at_least("intermediate", shape.intermediate, 1);
  require_at_least("num_experts", shape.num_experts, 1);
  require_at_least("top_k", shape.top_k, 1);
  require_range("projections", shape.projections, 1, 3);
  require(shape.num_experts % shape.ranks == 0, "num_experts=" + std::to_string(shape.num_experts) +
                                                    " cannot be spread over ranks=" + std::to_string(shape.ranks) +
                                                    ". It needs to be a multiple of it.");
  const int64_t slots = int64_t{shape.tokens} * shape.top_k;
  require_range("tokens * top_k", slots, 0, int64_t{kMaxSlots} + 1);
}

// Without ring tiles: that of a dispatch or a combine, which nothing walks.
inline void check(const Schedule& schedule, int32_t fewest_ring_tiles = 1) {
  require_at_least("tile.rows", schedule.tile.rows, 1);
  require_at_least("tile.h_columns", schedule.tile.h_columns, 1);
  require_at_least("tile.columns", schedule.tile.columns, 1);
  require_at_least("unit_tiles", schedule.unit_tiles, 1);
  require_at_least("lag_units", schedule.lag_units, 0);
  require_range("half", schedule.half, 0, kSecondHalf + 1);
  require_at_least("ring_tiles", schedule.ring_tiles, schedule.is_second_half() ? 0 : fewest_ring_tiles);
  require_at_least("workers", schedule.workers, 0);  // 0: as many as a device has room for
  require_at_least("chunk_rows", schedule.chunk_rows, 1);
  require_at_least("dispatchers", schedule.dispatchers, 0);
  require_range("narrow_rows", schedule.narrow_rows, 0, int64_t{schedule.tile.rows} + 1);
  require_range("keep_tokens", schedule.keep_tokens, 0, 2);
  require_range("share_columns", schedule.share_columns, 0, 2);
  require_at_least("segment_tiles", schedule.segment_tiles, 0);
  require_at_least("saved_tiles", schedule.saved_tiles, 0);
  require_at_least("summed_tiles", schedule.summed_tiles, 0);
}

// Less than zero is a mark, see mark_experts_without_rows() in common/units.h.
inline void check(const Rows& rows_per_expert) {
  int64_t behind = 0;  // experts without rows right behind
  for (auto rows = rows_per_expert.rbegin(); rows != rows_per_expert.rend(); ++rows) {
    require_at_least("rows_per_expert", *rows, -behind);
    behind = *rows > 0 ? 0 : behind + 1;
  }
}

inline void check(const Shape& shape, const Schedule& schedule) {
  check(shape);
  check(schedule);
}

inline void check(const Shape& shape, const Schedule& schedule, const Rows& rows_per_expert) {
  check(shape, schedule);
  check(rows_per_expert);
  require(rows_per_expert.size() == static_cast<size_t>(shape.local_experts()),
          "rows_per_expert has " + std::to_string(rows_per_expert.size()) + " numbers. It needs one for each of the " +
              std::to_string(shape.local_experts()) + " local experts.");
}

inline void check(const HeadCapacity& head) {
  require_range("ranks", head.ranks, 1, kMaxRanks + 1);
  require_at_least("local_experts", head.local_experts, 0);
  require_at_least("row_tiles", head.row_tiles, 0);
  require_at_least("slots", head.slots, 0);
}

}  // namespace jaxmoe
