// The order of all work of one rank, as integers: which row goes where, and which worker computes which tile when.
// Every role of the kernel, every thread of the host executor and the property tests in tests/unit/test_schedule.py
// walk this same stream. Nothing here waits or touches memory other than the row counts it is given.
//
// The rows of a local expert are cut into row tiles, numbered over all experts; up to `unit_tiles` of one expert form a
// unit. The stream of units u0, u1, ... with a lag of two:
//
//   gate_up(u0)  gate_up(u1)  gate_up(u2) down(u0)  gate_up(u3) down(u1)  ...  down(last - 1)  down(last)
//
// The lag keeps the pull of rows, which feeds gate_up, ahead of the push of results, which follows down: both use the
// same NVLink. Within a unit the row tile varies fastest, so that workers side by side share a tile of weights. A
// worker that is free takes the next task of the stream.
//
// The last tile of an expert may have few rows. Where two thread blocks share a task, each taking half of the rows, the
// second one would have none: such a narrow tile is computed two column tiles at a time instead, one for each block. In
// every pair of columns it comes behind the wide tiles, whose weights it uses.
//
// Deadlock freedom: whatever an item waits for stands before it in the stream (protocol.h, wait_before), and every
// worker and dispatcher takes its items in stream order, so the first unfinished item can always go on. Which worker
// takes which task depends on timing; no bit of the result does.
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

enum class Gemm : int32_t { kGateUp = 0, kDown = 1 };

// One output tile: `tile.rows` rows of one expert times one tile of columns.
struct Task {
  Gemm gemm;
  int32_t expert;       // local
  int32_t row_tile;     // over all local experts
  int32_t ring_slot;    // where the tile's rows lie in both rings
  int32_t rows;         // 1 .. tile.rows
  int32_t column_tile;  // of h or of the output
  int32_t column_tiles;  // from that one on: 1, or 2 of a narrow tile (1 where it is the last of an odd number)
};

// Rows that one dispatcher pulls at a time, of one row tile.
struct Chunk {
  int32_t expert;       // local
  int32_t row_tile;     // over all local experts
  int32_t ring_slot;
  int32_t first_row;    // in the expert
  int32_t tile_row;     // of the first row, in its tile
  int32_t rows;         // 1 .. chunk_rows
};

// Row tiles of one expert that are worked on together.
struct Unit {
  int32_t expert;
  int32_t first_tile;       // over all local experts
  int32_t tiles;
  int32_t tile_of_expert;   // the first tile, counted within its expert
  int32_t rows_of_expert;

  JAXMOE_ANY constexpr int32_t rows_of_tile(int32_t tile, int32_t tile_rows) const {
    return at_most(rows_of_expert - (tile_of_expert + tile) * tile_rows, tile_rows);
  }
};

// The units of a rank, in order. The tiles of an expert are spread evenly over as few units as hold them, since a unit
// of one or two tiles reads as many weights as a full one.
class UnitWalk {
 public:
  // The schedule and the rows have to outlive the walk.
  JAXMOE_ANY UnitWalk(const Schedule& schedule, const int32_t* rows_per_expert, int32_t num_experts)
      : schedule_(schedule), rows_per_expert_(rows_per_expert), num_experts_(num_experts) {}

  JAXMOE_ANY bool next(Unit& unit) {
    while (tiles_left_ == 0) {
      if (++expert_ >= num_experts_) return false;
      tiles_left_ = ceil_div(rows_per_expert_[expert_], schedule_.tile.rows);
      units_left_ = ceil_div(tiles_left_, schedule_.unit_tiles);
      tile_of_expert_ = 0;
    }
    const int32_t tiles = ceil_div(tiles_left_, units_left_);
    unit = {expert_, first_tile_, tiles, tile_of_expert_, rows_per_expert_[expert_]};
    first_tile_ += tiles;
    tile_of_expert_ += tiles;
    tiles_left_ -= tiles;
    --units_left_;
    return true;
  }

 private:
  const Schedule& schedule_;
  const int32_t* rows_per_expert_;
  int32_t num_experts_;
  int32_t expert_ = -1;
  int32_t first_tile_ = 0;
  int32_t tile_of_expert_ = 0;
  int32_t tiles_left_ = 0;
  int32_t units_left_ = 0;
};

// The tasks of a rank, numbered in stream order. The arguments have to outlive the walk.
class TaskWalk {
 public:
  JAXMOE_ANY TaskWalk(const Shape& shape, const Schedule& schedule, const int32_t* rows_per_expert)
      : shape_(shape), schedule_(schedule), ahead_(schedule, rows_per_expert, shape.local_experts()),
        behind_(schedule, rows_per_expert, shape.local_experts()) {}

  // The task with that number; false behind the last. The numbers asked of one walk must not fall.
  JAXMOE_ANY bool seek(int32_t number, Task& task) {
    while (number - passed_tasks_ >= segment_tasks_) {
      passed_tasks_ += segment_tasks_;
      if (!next_segment()) return false;
    }
    const int32_t position = number - passed_tasks_;
    // Columns go in pairs: in each, the wide tiles of the first column, those of the second, and the narrow tile.
    const int32_t wide = unit_.tiles - narrow_;
    const int32_t pair = position / (2 * wide + narrow_);
    const int32_t in_pair = position % (2 * wide + narrow_);
    const int32_t columns = at_most(columns_ - 2 * pair, 2);
    const bool is_narrow = in_pair >= wide * columns;
    const int32_t tile = is_narrow ? wide : in_pair % wide;
    const int32_t row_tile = unit_.first_tile + tile;
    task = {gemm_,
            unit_.expert,
            row_tile,
            row_tile % schedule_.ring_tiles,
            unit_.rows_of_tile(tile, schedule_.tile.rows),
            2 * pair + (is_narrow ? 0 : in_pair / wide),
            is_narrow ? columns : 1};
    return true;
  }

 private:
  // A segment is one GEMM of one unit. Moves to the next one; false behind the last.
  JAXMOE_ANY bool next_segment() {
    segment_tasks_ = 0;
    if (gemm_ == Gemm::kDown) {  // also before the first segment
      ++step_;
      gemm_ = Gemm::kGateUp;
      if (ahead_.next(unit_)) {
        begin_segment(hidden_tiles(shape_, schedule_.tile));
        return true;
      }
    }
    gemm_ = Gemm::kDown;
    if (step_ < schedule_.lag_units) return true;  // an empty segment
    if (!behind_.next(unit_)) return false;
    begin_segment(output_tiles(shape_, schedule_.tile));
    return true;
  }

  JAXMOE_ANY void begin_segment(int32_t columns) {
    columns_ = columns;
    // Counted to the end of the expert: a unit that others of its expert follow has no narrow tile.
    const int32_t rows_left = unit_.rows_of_expert - (unit_.tile_of_expert + unit_.tiles - 1) * schedule_.tile.rows;
    narrow_ = rows_left <= schedule_.narrow_rows ? 1 : 0;
    segment_tasks_ = (unit_.tiles - narrow_) * columns + narrow_ * ceil_div(columns, 2);
  }

  const Shape& shape_;
  const Schedule& schedule_;
  UnitWalk ahead_;   // of the gate/up GEMM
  UnitWalk behind_;  // of the down GEMM
  Unit unit_{};
  int32_t step_ = -1;
  Gemm gemm_ = Gemm::kDown;
  int32_t columns_ = 0;  // column tiles of the segment's GEMM
  int32_t narrow_ = 0;   // narrow tiles of the unit: its last one, or none
  int32_t segment_tasks_ = 0;
  int32_t passed_tasks_ = 0;  // of the segments before
};

// The chunks of one dispatcher, in stream order: the row tiles in order, the rows of a tile in order.
class ChunkWalk {
 public:
  JAXMOE_ANY ChunkWalk(const Shape& shape, const Schedule& schedule, const int32_t* rows_per_expert,
                       int32_t dispatcher)
      : rows_per_expert_(rows_per_expert), num_experts_(shape.local_experts()), tile_rows_(schedule.tile.rows),
        chunk_rows_(schedule.chunk_rows), ring_tiles_(schedule.ring_tiles), dispatchers_(schedule.dispatchers),
        position_(dispatcher) {}

  JAXMOE_ANY bool next(Chunk& chunk) {
    // Chunks never straddle a tile, so every full tile has the same number of them.
    const int32_t chunks_per_tile = ceil_div(tile_rows_, chunk_rows_);
    for (;;) {
      if (expert_ >= 0) {
        const int32_t rows = rows_per_expert_[expert_];
        const int32_t tile = position_ / chunks_per_tile;
        const int32_t tile_row = position_ % chunks_per_tile * chunk_rows_;
        const int32_t first_row = tile * tile_rows_ + tile_row;
        if (tile < ceil_div(rows, tile_rows_)) {
          position_ += dispatchers_;
          if (first_row >= rows) continue;  // the last tile of the expert ends before this chunk
          const int32_t row_tile = first_tile_ + tile;
          const int32_t left = at_most(rows - first_row, tile_rows_ - tile_row);
          chunk = {expert_, row_tile, row_tile % ring_tiles_, first_row, tile_row, at_most(left, chunk_rows_)};
          return true;
        }
        const int32_t tiles = ceil_div(rows, tile_rows_);
        first_tile_ += tiles;
        position_ -= tiles * chunks_per_tile;
      }
      if (++expert_ >= num_experts_) return false;
    }
  }

 private:
  const int32_t* rows_per_expert_;
  int32_t num_experts_;
  int32_t tile_rows_;
  int32_t chunk_rows_;
  int32_t ring_tiles_;
  int32_t dispatchers_;
  int32_t expert_ = -1;
  int32_t first_tile_ = 0;
  int32_t position_;  // of this dispatcher's next chunk, from the first tile of the expert
};

// Where a row of a local expert comes from: the `position`-th slot of rank `source` among those that name the expert.
struct RowSource {
  int32_t source;
  int32_t position;
};

// The rows of an expert take one slot of each source in turn while the sources last, so that a pull of neighbouring
// rows spreads over all peers. `counts[source * stride]` is the number of slots of each source; the turns begin with
// `first_source`, which differs from rank to rank. At most `ranks` steps.
JAXMOE_ANY inline RowSource source_of_row(const int32_t* counts, int32_t stride, int32_t ranks, int32_t first_source,
                                          int32_t row) {
  int32_t taken = 0;  // slots taken of every source that has more
  for (;;) {
    int32_t active = 0;
    int32_t least = 0;
    for (int32_t source = 0; source < ranks; ++source) {
      const int32_t count = counts[source * stride];
      if (count <= taken) continue;
      least = active == 0 ? count : at_most(least, count);
      ++active;
    }
    if (active == 0) return {-1, -1};  // not a row of this expert
    const int32_t rows = (least - taken) * active;
    if (row < rows) {
      int32_t turn = row % active;
      for (int32_t i = 0; i < ranks; ++i) {
        const int32_t source = (first_source + i) % ranks;
        if (counts[source * stride] <= taken) continue;
        if (turn-- == 0) return {source, taken + row / active};
      }
    }
    row -= rows;
    taken = least;
  }
}

}  // namespace jaxmoe
