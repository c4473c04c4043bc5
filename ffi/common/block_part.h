// What one thread block of a worker computes of a task: the schedule's tiles are those of a whole cluster. Every role of
// the GPU kernels asks here; tests/unit/test_schedule_parts.py proves that the parts of all blocks are the results, each
// once. Plain C++20.
#pragma once

#include <cstdint>

#include "common/scheduler.h"
#include "common/tiling.h"

namespace jaxmoe {

// Whether the blocks multiply other columns of B; not of weight gradients, whose parts have no such bit. Where they do not,
// they share its loads.
JAXMOE_ANY constexpr bool has_own_columns(const Task& own) {
  return Tiling::kBlocks == 1 || (own.part & kOwnColumns) != 0;
}

// The part of block `rank` of a task of its cluster, which is not one of weight gradients. A wide tile of the schedule
// is one tile of rows of every block, one below the other; of a narrow one each block takes all rows and another column
// tile, or half of the only one; of one of row halves, one of these and another column tile. The part's rows may be
// none. It keeps the column tiles of the whole task, since that is what its release amounts to.
//
// kSharesColumns, kExchanges: whether the kernel has code for halves of columns, and wants halves of rows exchanged.
// kRing: rows lie in a ring, in slots; otherwise the task's ring_slot is a row of an array, and so is the part's.
template <bool kSharesColumns, bool kExchanges, bool kRing>
JAXMOE_ANY constexpr Task part_of_block(const Schedule& schedule, int32_t hidden, Task task, int32_t rank) {
  if constexpr (Tiling::kBlocks == 1) return task;
  const bool narrow = task.rows <= schedule.narrow_rows;
  const bool row_halves = kExchanges && (task.part & kRowHalves) != 0;
  const int32_t half = row_halves ? task.column_tile % Tiling::kBlocks : narrow ? 0 : rank;
  const bool shared = kSharesColumns && narrow && task.gemm == Gemm::kDown && task.column_tiles == 1;
  const bool has_columns =
      !narrow || (shared ? task.column_tile * Tiling::kColumns + rank * (Tiling::kColumns / 2) < hidden
                         : rank < task.column_tiles);
  const int32_t rows_above = half * Tiling::kRows;
  task.rows = has_columns ? at_most(task.rows - rows_above, static_cast<int32_t>(Tiling::kRows)) : 0;
  task.rows = task.rows < 0 ? 0 : task.rows;
  task.ring_slot = kRing ? task.ring_slot * Tiling::kBlocks + half : task.ring_slot + rows_above;
  if (row_halves) {
    task.column_tile += rank - half;
  } else if (narrow && !shared) {
    task.column_tile += rank;
  }
  if (shared) task.part |= kSharedColumns;
  if (narrow || row_halves) task.part |= kOwnColumns;
  return task;
}

}  // namespace jaxmoe
