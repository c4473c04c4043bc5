// How the rows of one rank are cut before anything is said of GEMMs: the row tiles of each expert into segments and
// units, in the order in which they are worked on, and the experts whose weights are decoded for them. scheduler.h makes
// tasks of units. Property tests: tests/unit/test_schedule_units.py.
#pragma once

#include <bit>
#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

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
      tiles_left_ = few_parts(rows, schedule_.tile.rows);
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

  // Rows of the next segment, where that is the next expert and has a single tile; else 0.
  JAXMOE_ANY int32_t rows_of_one_tile() const {
    if (tiles_left_ > 0 || expert_ + 1 >= num_experts_) return 0;
    const int32_t rows = rows_per_expert_[expert_ + 1];
    return rows > 0 && rows <= schedule_.tile.rows ? rows : 0;
  }
  // What next() does with such a segment.
  JAXMOE_ANY void pass_one_tile() {
    ++expert_;
    ++nth_;
    ++first_tile_;
  }
  // The number of the expert, of those with rows, and of its tile, that came last: of one with a single tile.
  JAXMOE_ANY int32_t expert() const { return expert_; }
  JAXMOE_ANY int32_t nth() const { return nth_; }
  JAXMOE_ANY int32_t last_tile() const { return first_tile_ - 1; }

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

  // Rows of the next unit, where that is the next expert and has a single tile; else 0.
  JAXMOE_ANY int32_t rows_of_one_tile() const { return tiles_left_ > 0 ? 0 : segments_.rows_of_one_tile(); }
  // What next() does with such a unit, in two parts: several may be passed before the last is asked for.
  JAXMOE_ANY void pass_one_tile() { segments_.pass_one_tile(); }
  JAXMOE_ANY Unit unit_of_one_tile(int32_t rows) const {
    return {segments_.expert(), segments_.last_tile(), 1, 0, rows, segments_.nth()};
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
      tiles = few_parts(rows, schedule.tile.rows);
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
        had.tiles = few_parts(rows_per_expert[--had.expert], schedule.tile.rows);
      } while (had.tiles == 0);
      had.first_tile -= had.tiles;
      --had.nth;
    }
    return had;
  }
};

}  // namespace jaxmoe
