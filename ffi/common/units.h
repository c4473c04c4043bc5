// How the rows of one rank are cut before anything is said of GEMMs: the row tiles of each expert into segments and
// units, in the order in which they are worked on, and the experts whose weights are decoded for them. scheduler.h makes
// tasks of units. Property tests: tests/unit/test_schedule_units.py.
#pragma once

#include <bit>
#include <cstdint>

#include "common/shape.h"
#include "common/tiling.h"

namespace jaxmoe {

// Row tiles of an expert with so many rows; none where that is no number of rows (mark_experts_without_rows()).
JAXMOE_ANY constexpr int32_t row_tiles_of(int32_t rows, const TileSizes& tile) {
#if defined(__CUDA_ARCH__)
  // All kernels have these tiles, and whoever walks past experts asks for each.
  constexpr uint32_t kRows = Tiling::kRows * Tiling::kBlocks;
  return rows > 0 ? static_cast<int32_t>((static_cast<uint32_t>(rows) + kRows - 1) / kRows) : 0;
#else
  return few_parts(rows, tile.rows);
#endif
}

// What a segment contributes to the weight gradients of its expert. The only segment of one is both.
inline constexpr int32_t kFirstPart = 1;  // there are no sums of earlier segments to add to
inline constexpr int32_t kLastPart = 2;   // the sums are complete
// Row tiles of one expert whose weight gradients are summed at once; in a forward pass all tiles of the expert.
struct Segment {
  int32_t expert;
  int32_t first_tile;       // over all local experts
  int32_t tiles;
  int32_t tile_of_expert;   // the first tile, counted within its expert
  int32_t rows_of_expert;
  int32_t nth;              // of the experts that have rows
  int32_t part;             // kFirstPart | kLastPart
  // First tile of the segment before it that left sums behind for a next one or took them up: experts with several
  // segments use the same memory for them, one after the other. None: -1.
  int32_t sums_tile;
};

// Size of the first of some parts over which `count` is spread evenly.
JAXMOE_ANY constexpr int32_t first_of_parts(int32_t count, int32_t parts) {
  return parts == 1 ? count : ceil_div(count, parts);
}

// Of hundreds of experts the tokens of a decode batch name few. For walks to pass the others in few steps, an expert
// without rows may have a mark in the place of 0 rows: minus the number of experts right behind it that have none
// either. Marks all of them.
JAXMOE_ANY constexpr void mark_experts_without_rows(int32_t* rows_per_expert, int32_t num_experts) {
  int32_t behind = 0;
  for (int32_t expert = num_experts - 1; expert >= 0; --expert) {
    int32_t& rows = rows_per_expert[expert];
    behind = rows > 0 ? 0 : behind + 1;
    if (rows <= 0) rows = 1 - behind;
  }
}

// The experts that have rows, where each of them has one narrow tile and no more, as in a decode batch. There tasks follow
// from their numbers (scheduler.h).
class NarrowExperts {
 public:
  static constexpr int32_t kOfWord = 32;  // experts, the first one at the lowest bit
  JAXMOE_ANY static constexpr int32_t words(int32_t num_experts) { return ceil_div(num_experts, kOfWord); }
  // Experts that a word names.
  JAXMOE_ANY static constexpr int32_t bits_of(uint32_t word) {
#if defined(__CUDA_ARCH__)
    return __popc(word);
#else
    return std::popcount(word);
#endif
  }

  // None are known.
  constexpr NarrowExperts() = default;
  // Their number, and a bit for each. Both stay where they are, and have to outlive this: copies take registers that a
  // kernel does not have.
  JAXMOE_ANY constexpr NarrowExperts(const int32_t& count, const uint32_t* bits) : count_(&count), bits_(bits) {}

  // 0: some have more than a narrow tile, or nothing is known.
  JAXMOE_ANY constexpr int32_t count() const { return count_ == nullptr ? 0 : *count_; }
  // The nth of them.
  JAXMOE_ANY constexpr int32_t expert(int32_t nth) const {
    int32_t expert = 0;
    const uint32_t* word = bits_;
    for (int32_t here = bits_of(*word); nth >= here; here = bits_of(*++word)) {
      nth -= here;
      expert += kOfWord;
    }
    uint32_t left = *word;
    for (int32_t half = kOfWord / 2; half > 0; half /= 2) {
      const uint32_t lower = left & ((1u << half) - 1);
      const int32_t here = bits_of(lower);
      const bool above = nth >= here;
      nth -= above ? here : 0;
      expert += above ? half : 0;
      left = above ? left >> half : lower;
    }
    return expert;
  }

 private:
  const int32_t* count_ = nullptr;
  const uint32_t* bits_ = nullptr;
};

// The segments of a rank, in order. The tiles of an expert are spread evenly over as few segments as hold them.
class SegmentWalk {
 public:
  // The schedule and the rows have to outlive the walk.
  JAXMOE_ANY SegmentWalk(const Schedule& schedule, const int32_t* rows_per_expert, int32_t num_experts)
      : schedule_(schedule), rows_per_expert_(rows_per_expert), num_experts_(num_experts) {}

  JAXMOE_ANY bool next(Segment& segment) {
    const bool first = tiles_left_ == 0;
    while (tiles_left_ == 0) {
      if (++expert_ >= num_experts_) return false;
      const int32_t rows = rows_per_expert_[expert_];
      tiles_left_ = row_tiles_of(rows, schedule_.tile);
      tile_of_expert_ = 0;
      if (tiles_left_ > 0) ++nth_;
      if (rows < 0) expert_ -= rows;
    }
    const int32_t segments = schedule_.backward() ? few_parts(tiles_left_, schedule_.segment_tiles) : 1;
    const int32_t tiles = first_of_parts(tiles_left_, segments);
    const int32_t part = (first ? kFirstPart : 0) | (segments == 1 ? kLastPart : 0);
    segment = {expert_, first_tile_, tiles, tile_of_expert_, rows_per_expert_[expert_], nth_, part, sums_tile_};
    if (part != (kFirstPart | kLastPart)) sums_tile_ = first_tile_;
    first_tile_ += tiles;
    tile_of_expert_ += tiles;
    tiles_left_ -= tiles;
    return true;
  }

  // Rows of the next expert, where no segment of this one is left and that one has rows; else 0.
  JAXMOE_ANY int32_t rows_of_next_expert() const {
    if (tiles_left_ > 0 || expert_ + 1 >= num_experts_) return 0;
    const int32_t rows = rows_per_expert_[expert_ + 1];
    return rows > 0 ? rows : 0;
  }
  // What next() does with such an expert, whose only segment it is, of so many tiles.
  JAXMOE_ANY void pass_expert(int32_t tiles) {
    ++expert_;
    ++nth_;
    first_tile_ += tiles;
  }
  // That segment.
  JAXMOE_ANY Segment last_expert() const {
    const int32_t rows = rows_per_expert_[expert_], tiles = row_tiles_of(rows, schedule_.tile);
    return {expert_, first_tile_ - tiles, tiles, 0, rows, nth_, kFirstPart | kLastPart, sums_tile_};
  }
  // The row tile behind those of the segments that have come.
  JAXMOE_ANY int32_t end_tile() const { return first_tile_; }

 private:
  const Schedule& schedule_;
  const int32_t* rows_per_expert_;
  int32_t num_experts_;
  int32_t expert_ = -1;
  int32_t nth_ = -1;
  int32_t first_tile_ = 0;
  int32_t tile_of_expert_ = 0;
  int32_t tiles_left_ = 0;  // of the expert
  int32_t sums_tile_ = -1;
};

// Row tiles of one segment that are worked on together.
struct Unit {
  int32_t expert;
  int32_t first_tile;       // over all local experts
  int32_t tiles;
  int32_t tile_of_expert;   // the first tile, counted within its expert
  int32_t rows_of_expert;
  int32_t nth;              // its expert is, of those that have rows

  JAXMOE_ANY constexpr int32_t rows_of_tile(int32_t tile, int32_t tile_rows) const {
    return at_most(rows_of_expert - (tile_of_expert + tile) * tile_rows, tile_rows);
  }
};

// The units of a rank, in order. The tiles of a segment are spread evenly over as few units as hold them, since a unit
// of one or two tiles reads as many weights as a full one.
class UnitWalk {
 public:
  JAXMOE_ANY UnitWalk(const Schedule& schedule, const int32_t* rows_per_expert, int32_t num_experts)
      : schedule_(schedule), segments_(schedule, rows_per_expert, num_experts) {}

  JAXMOE_ANY bool next(Unit& unit) {
    if (tiles_left_ == 0) {
      if (!segments_.next(segment_)) return false;
      tiles_left_ = segment_.tiles;
    }
    const int32_t tiles = first_of_parts(tiles_left_, few_parts(tiles_left_, schedule_.unit_tiles));
    const int32_t passed = segment_.tiles - tiles_left_;
    unit = {segment_.expert, segment_.first_tile + passed, tiles, segment_.tile_of_expert + passed,
            segment_.rows_of_expert, segment_.nth};
    tiles_left_ -= tiles;
    return true;
  }

  // Rows of the next expert, where its tiles are the next unit, all of them; else 0.
  JAXMOE_ANY int32_t rows_of_one_unit() const {
    const int32_t rows = tiles_left_ > 0 ? 0 : segments_.rows_of_next_expert();
    const int32_t most =
        schedule_.backward() ? at_most(schedule_.unit_tiles, schedule_.segment_tiles) : schedule_.unit_tiles;
    return rows <= most * schedule_.tile.rows ? rows : 0;
  }
  // What next() does with such a unit, in parts: several may be passed before the last is asked for.
  JAXMOE_ANY void pass_one_unit(int32_t rows) { segments_.pass_expert(row_tiles_of(rows, schedule_.tile)); }
  JAXMOE_ANY Unit last_expert() const {
    const Segment only = segments_.last_expert();
    return {only.expert, only.first_tile, only.tiles, 0, only.rows_of_expert, only.nth};
  }
  JAXMOE_ANY void end_segment() { segment_ = segments_.last_expert(); }
  // Whether it ends among the first so many row tiles of all experts.
  JAXMOE_ANY bool ends_within(int32_t rows, int32_t tiles) const {
    return segments_.end_tile() + row_tiles_of(rows, schedule_.tile) <= tiles;
  }

  // Of the unit that came last.
  JAXMOE_ANY const Segment& segment() const { return segment_; }
  JAXMOE_ANY bool segment_ends() const { return tiles_left_ == 0; }

 private:
  const Schedule& schedule_;
  SegmentWalk segments_;
  Segment segment_{};
  int32_t tiles_left_ = 0;  // of the segment
};

// Decoded weights: those of an expert with rows, in a slot of their ring from before the first task of its rows until
// after the last one. Experts are decoded in order, each by all dispatchers.
struct DecodedExpert {
  int32_t expert = -1;
  int32_t nth = -1;         // of the experts that have rows
  int32_t first_tile = 0;   // over all local experts; it stands for the expert in signals
  int32_t tiles = 0;

  JAXMOE_ANY constexpr int32_t weight_slot(const Schedule& schedule) const { return nth % schedule.weight_slots; }

  // Goes on to the next one: from before the first, as it is made, to behind the last. False there.
  JAXMOE_ANY bool advance(const Schedule& schedule, const int32_t* rows_per_expert, int32_t num_experts) {
    first_tile += tiles;
    for (tiles = 0; tiles == 0;) {
      if (++expert >= num_experts) return false;
      const int32_t rows = rows_per_expert[expert];
      tiles = row_tiles_of(rows, schedule.tile);
      if (rows < 0) expert -= rows;
    }
    ++nth;
    return true;
  }

  // The one whose slot this one takes. There is one: nth >= weight_slots.
  JAXMOE_ANY DecodedExpert before_in_slot(const Schedule& schedule, const int32_t* rows_per_expert) const {
    DecodedExpert had = *this;
    while (had.nth > nth - schedule.weight_slots) {
      do {
        had.tiles = row_tiles_of(rows_per_expert[--had.expert], schedule.tile);
      } while (had.tiles == 0);
      had.first_tile -= had.tiles;
      --had.nth;
    }
    return had;
  }
};

}  // namespace jaxmoe
