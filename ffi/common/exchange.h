// Dispatch and combine on their own: the array in which the rows of a rank arrive, and what both passes work with. The
// experts in between are the caller's (jaxmoe/exchange/).
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
    return static_cast<int32_t>(
        at_most(int64_t{start} + ceil_div(int64_t{rows}, int64_t{alignment}) * alignment, int64_t{this->rows}));
  }
  // Where the room of an expert ends that begins at `start`.
  JAXMOE_ANY constexpr int32_t end_from(int32_t start) const {
    return capacity_per_expert > 0 ? start + capacity_per_expert : rows;
  }
};

// The arrays of a call on one rank. Null where it has none. `Sum` is as wide as sums are.
template <class Sum>
struct ExchangeArrays {
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
    "place", "x",      "topk_ids",         "outputs",        "slot_rows",       "row_sources",  "weights",
    "rows",  "scales", "made_row_sources", "made_slot_rows", "rows_per_expert", "dropped_rows", "weight_gradients",
    "y"};

}  // namespace jaxmoe
