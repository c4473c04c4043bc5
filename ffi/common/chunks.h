// The order of the pulls of one rank, as integers: which dispatcher brings which rows, and where each row comes from.
// The row tiles of scheduler.h are cut into chunks, which are dealt to the dispatchers in turn; each takes its own in
// stream order. Callers: dispatch of the kernel and of the host executor, and the property tests in
// tests/unit/test_schedule.py.
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

// Rows that one dispatcher pulls at a time, of one row tile.
struct Chunk {
  int32_t expert;       // local
  int32_t row_tile;     // over all local experts
  int32_t ring_slot;
  int32_t first_row;    // in the expert
  int32_t tile_row;     // of the first row, in its tile
  int32_t rows;         // 1 .. chunk_rows
};

// The chunks of one dispatcher, in stream order: the row tiles in order, the rows of a tile in order.
class ChunkWalk {
 public:
  // `dispatchers` share the chunks: on a GPU those of the crew of the launch, which may be fewer than were planned. The
  // number stays where it is, since a register for it makes others spill there.
  JAXMOE_ANY ChunkWalk(const Shape& shape, const Schedule& schedule, const int32_t* rows_per_expert,
                       int32_t dispatcher, const int32_t& dispatchers)
      : rows_per_expert_(rows_per_expert), num_experts_(shape.local_experts()), tile_rows_(schedule.tile.rows),
        chunk_rows_(schedule.chunk_rows), chunks_per_tile_(ceil_div(schedule.tile.rows, schedule.chunk_rows)),
        ring_tiles_(schedule.ring_tiles), dispatchers_(dispatchers), position_(dispatcher) {}

  JAXMOE_ANY ChunkWalk(const Shape& shape, const Schedule& schedule, const int32_t* rows_per_expert,
                       int32_t dispatcher)
      : ChunkWalk(shape, schedule, rows_per_expert, dispatcher, schedule.dispatchers) {}

  // Chunks and row tiles of an expert that has any number of rows, or a mark (mark_experts_without_rows()).
  struct Parts {
    int32_t chunks, tiles;
  };
  JAXMOE_ANY Parts parts_of(int32_t expert) const {
    const int32_t tiles = few_parts(rows_per_expert_[expert], tile_rows_);
    if (tiles == 0) return {0, 0};
    const int32_t in_last = few_parts(rows_per_expert_[expert] - (tiles - 1) * tile_rows_, chunk_rows_);
    return {(tiles - 1) * chunks_per_tile_ + in_last, tiles};
  }
  // Experts that next() would pass on its way to the next chunk, from the first one on that it has not begun. Before
  // any chunk was asked for, whoever can count chunks of many experts at once takes them off the way.
  JAXMOE_ANY int32_t first_expert() const { return expert_ + 1; }
  JAXMOE_ANY int32_t chunks_ahead() const { return position_; }
  JAXMOE_ANY void pass_experts(int32_t experts, const Parts& all) {
    expert_ += experts;
    first_tile_ += all.tiles;
    position_ -= all.chunks;
  }

  // Chunks never straddle a tile, so every full tile has the same number of them, and the chunks of a rank can be dealt
  // to the dispatchers in turn.
  JAXMOE_ANY bool next(Chunk& chunk) {
    if (!seek()) return false;
    chunk = take();
    return true;
  }
  // The same in two parts: whether there is one, and which. Its expert is known in between.
  JAXMOE_ANY bool seek() {
    while (position_ >= chunks_) {
      position_ -= chunks_;
      first_tile_ += tiles_;
      if (++expert_ >= num_experts_) return false;
      const Parts parts = parts_of(expert_);
      const int32_t rows = rows_per_expert_[expert_];
      if (rows < 0) expert_ -= rows;
      tiles_ = parts.tiles;
      chunks_ = parts.chunks;
    }
    return true;
  }
  JAXMOE_ANY int32_t expert() const { return expert_; }
  JAXMOE_ANY Chunk take() {
    const int32_t tile = position_ / chunks_per_tile_;
    const int32_t tile_row = position_ % chunks_per_tile_ * chunk_rows_;
    const int32_t first_row = tile * tile_rows_ + tile_row;
    const int32_t row_tile = first_tile_ + tile;
    const int32_t left = at_most(rows_per_expert_[expert_] - first_row, tile_rows_ - tile_row);
    position_ += dispatchers_;
    return {expert_, row_tile, row_tile % ring_tiles_, first_row, tile_row, at_most(left, chunk_rows_)};
  }

 private:
  const int32_t* rows_per_expert_;
  int32_t num_experts_;
  int32_t tile_rows_;
  int32_t chunk_rows_;
  int32_t chunks_per_tile_;  // of a full one
  int32_t ring_tiles_;
  const int32_t& dispatchers_;
  int32_t expert_ = -1;
  int32_t first_tile_ = 0;  // of the expert
  int32_t tiles_ = 0;
  int32_t chunks_ = 0;
  int32_t position_;  // of this dispatcher's next chunk, among those of the expert
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
