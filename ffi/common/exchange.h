// Dispatch and combine on their own, or each with a product: the array in which the rows of a rank arrive, and what
// both passes work with. What is in between is the caller's (jaxmoe/exchange/).
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

// The array of a rank: its rows by local expert, those of one expert by the rank that they come from, then by slot.
// Rows that are nobody's are zero.
struct Room {
  int32_t rows;                 // of the array
  int32_t alignment;            // an expert begins at a multiple of it
  int32_t capacity_per_expert;  // rows that each expert has room for; 0: experts follow each other

  // Where the expert behind one begins that begins at `start` and is sent `rows`. What lies behind the array's end has
  // no place.
  JAXMOE_ANY constexpr int32_t start_behind(int32_t start, int32_t rows) const {
    if (capacity_per_expert > 0) return start + capacity_per_expert;
    // None of these has more than 30 bits.
    const uint32_t multiple = alignment, of_array = this->rows;
    return static_cast<int32_t>(at_most(start + ceil_div(static_cast<uint32_t>(rows), multiple) * multiple, of_array));
  }
  // Where the room of an expert ends that begins at `start`.
  JAXMOE_ANY constexpr int32_t end_from(int32_t start) const {
    return capacity_per_expert > 0 ? start + capacity_per_expert : rows;
  }
};

// Leaves of each expert the rows that there is room for, of what the caller says that it has.
JAXMOE_ANY constexpr void keep_rows_with_room(const Room& room, int32_t* rows_per_expert, int32_t num_experts) {
  int32_t start = 0;
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    int32_t& rows = rows_per_expert[expert];
    rows = at_most(rows > 0 ? rows : 0, room.end_from(start) - start);
    start = room.start_behind(start, rows);
  }
}

// The experts of a rank in order: with which row of the array those of each begin, and with which row tile.
class RoomWalk {
 public:
  // All three have to outlive the walk. `rows_per_expert` are those that are sent, or those that have found room; an
  // expert without rows may be marked (mark_experts_without_rows() in units.h).
  JAXMOE_ANY RoomWalk(const Room& room, const TileSizes& tile, const int32_t* rows_per_expert)
      : room_(room), tile_(tile), rows_per_expert_(rows_per_expert) {}

  // Goes on to an expert, which is not before the one it is at; to the end of the last one with the number of experts.
  JAXMOE_ANY void move_to(int32_t expert) {
    for (; expert_ < expert; ++expert_) {
      const int32_t rows = rows_of(expert_);
      first_row_ = room_.start_behind(first_row_, rows);
      first_tile_ += few_parts(rows, tile_.rows);
    }
  }

  JAXMOE_ANY int32_t rows_of(int32_t expert) const {
    return rows_per_expert_[expert] > 0 ? rows_per_expert_[expert] : 0;
  }
  JAXMOE_ANY int32_t first_row() const { return first_row_; }
  // Behind the last row that the expert has room for.
  JAXMOE_ANY int32_t end() const { return room_.end_from(first_row_); }
  // The row with which a row tile of the expert begins.
  JAXMOE_ANY int32_t row_of_tile(int32_t row_tile) const {
    return first_row_ + (row_tile - first_tile_) * tile_.rows;
  }

 private:
  const Room& room_;
  const TileSizes& tile_;
  const int32_t* rows_per_expert_;
  int32_t expert_ = 0;
  int32_t first_row_ = 0;
  int32_t first_tile_ = 0;
};

// The arrays of a call on one rank. Null where it has none. `Sum` is as wide as sums are. With a product the rows of a
// dispatch are [rows, columns], the outputs of a combine what is multiplied, [rows, depth], and their matrices
// [local_experts, hidden, columns] or [local_experts, depth, hidden].
template <class Sum>
struct ExchangeArrays {
  const void* matrices = nullptr;
  // Dispatch.
  const void* x = nullptr;              // [tokens, hidden]
  const int32_t* topk_ids = nullptr;    // [tokens, top_k]; null where row_sources says where each row comes from
  const void* outputs = nullptr;        // [rows, hidden]: each row's product with what arrives is a gradient; see below
  void* rows = nullptr;                 // [rows, hidden]
  float* scales = nullptr;              // [rows, blocks of 128 columns], of rows in 8 bits
  int32_t* made_row_sources = nullptr;  // [rows] RowTarget, -1 of a row of zeros
  int32_t* made_slot_rows = nullptr;    // [tokens, top_k] the row of each slot at the owner of its expert, or -1
  int32_t* rows_per_expert = nullptr;   // [local_experts] that have found room
  int32_t* dropped_rows = nullptr;      // [local_experts] that have not
  Sum* weight_gradients = nullptr;      // [tokens, top_k] of each slot's row the product of x and outputs
  // Combine.
  const int32_t* slot_rows = nullptr;   // [tokens, top_k]
  const int32_t* known_rows_per_expert = nullptr;  // [local_experts], as a dispatch returned them; of a product alone
  void* y = nullptr;                    // [tokens, hidden]
  // Either, by known routes. With weights a dispatched row is multiplied with that of its slot, as its answer is.
  const int32_t* row_sources = nullptr;  // [rows]
  const Sum* weights = nullptr;          // [tokens, top_k]; null: ones
};

// Their names, which Python shares: operands, then results, in the order of a call, which names those that it has as the
// bits of a number.
enum class ExchangeArray : int32_t {
  kPlace = 0,  // as that of a layer
  kX,
  kTopkIds,
  kOutputs,
  kSlotRows,
  kRowSources,
  kWeights,
  kMatrices,
  kKnownRowsPerExpert,
  // Results. The first one is of every dispatch, the last one of every combine.
  kRows,
  kScales,
  kMadeRowSources,
  kMadeSlotRows,
  kRowsPerExpert,
  kDroppedRows,
  kWeightGradients,
  kY,
  kCount
};
inline constexpr const char* kExchangeArrayNames[static_cast<int32_t>(ExchangeArray::kCount)] = {
    "place",           "x",         "topk_ids", "outputs",          "slot_rows",      "row_sources",     "weights",
    "matrices", "known_rows_per_expert", "rows", "scales", "made_row_sources", "made_slot_rows", "rows_per_expert",
    "dropped_rows", "weight_gradients", "y"};

}  // namespace jaxmoe
