// A call of the FFI targets jaxmoe_dispatch and jaxmoe_combine, with a product or without, as it arrives from
// jaxmoe/exchange/kernel.py: its attributes, its arrays by name, the sizes that follow, and what must hold of it. Python
// has checked the same before: this keeps a call that does not come from jaxmoe from reading or writing out of bounds.
// What routes hold is not known here; the kernels pass over those that name no slot.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "common/call_arrays.h"
#include "common/exchange.h"
#include "common/formats.h"
#include "common/group_attributes.h"
#include "common/layout.h"
#include "common/shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

inline constexpr char kDispatchTarget[] = "jaxmoe_dispatch";
inline constexpr char kCombineTarget[] = "jaxmoe_combine";
// Of GPUs: waits for a call of either that runs beside the program.
inline constexpr char kFinishTarget[] = "jaxmoe_finish";

// Rows of the array, and of an expert, are numbered in 31 bits.
inline constexpr int32_t kMostAlignment = 1 << 30;

struct ExchangeAttributes {
  std::string_view version;     // as that of a layer
  int32_t ranks;
  int32_t num_experts;
  int32_t top_k;
  int32_t arrays;  // bits of ExchangeArray: the operands and results that the call has
  int32_t alignment;            // of Room
  int32_t capacity_per_expert;  // the same
  int32_t power_of_two_scales;  // 1: of rows in 8 bits
  // As that of a layer; of a call without a product exchange_schedule().
  xla::ffi::Span<const int32_t> schedule;
  float timeout_seconds;        // as those of a layer, and all below
  xla::ffi::Span<const int64_t> groups;
  xla::ffi::Span<const int64_t> devices;
};

class ExchangeCall : public CallArrays<ExchangeArray> {
 public:
  ExchangeCall(const xla::ffi::RemainingArgs& operands, xla::ffi::RemainingRets results,
               const ExchangeAttributes& attributes, std::string* error) {
    const uint32_t named = static_cast<uint32_t>(attributes.arrays) & bits_before(ExchangeArray::kCount);
    take(operands, results, named, ~bits_before(ExchangeArray::kRows), error);
  }

  bool combines() const { return has(ExchangeArray::kY); }
  bool multiplies() const { return has(ExchangeArray::kMatrices); }
  Pass pass() const {
    if (multiplies()) return combines() ? Pass::kMatmulCombine : Pass::kDispatchMatmul;
    return combines() ? Pass::kCombine : Pass::kDispatch;
  }
};

// Of a call that has passed its checks, as all below.
inline ExchangeArray tokens_of(const ExchangeCall& call) {
  return call.combines() ? ExchangeArray::kY : ExchangeArray::kX;
}
inline ExchangeArray rows_of(const ExchangeCall& call) {
  return call.combines() ? ExchangeArray::kOutputs : ExchangeArray::kRows;
}

// Columns of the caller's array, which has the other side of the product.
inline int32_t width_of(const ExchangeCall& call) {
  return call.multiplies() ? static_cast<int32_t>(call.extent(rows_of(call), 1)) : 0;
}

inline Shape shape_of(const ExchangeCall& call, const ExchangeAttributes& a) {
  return {.ranks = a.ranks,
          .tokens = static_cast<int32_t>(call.extent(tokens_of(call), 0)),
          .hidden = static_cast<int32_t>(call.extent(tokens_of(call), 1)),
          .intermediate = width_of(call),
          .num_experts = a.num_experts,
          .top_k = a.top_k,
          .projections = 1};
}

inline Room room_of(const ExchangeCall& call, const ExchangeAttributes& a) {
  return {static_cast<int32_t>(call.extent(rows_of(call), 0)), a.alignment, a.capacity_per_expert};
}

inline Formats formats_of(const ExchangeCall& call) {
  const Element wide = *element_of(call.type(tokens_of(call)));
  if (!call.has(ExchangeArray::kScales)) return Formats::of(wide);
  return Formats::eight_bit(wide, {Element::kE4M3});
}

template <class Sum>
ExchangeArrays<Sum> arrays_of(const ExchangeCall& call) {
  using Name = ExchangeArray;
  return {.matrices = call.data(Name::kMatrices),
          .x = call.data(Name::kX),
          .topk_ids = call.data<const int32_t>(Name::kTopkIds),
          .outputs = call.data(Name::kOutputs),
          .rows = call.data(Name::kRows),
          .scales = call.data<float>(Name::kScales),
          .made_row_sources = call.data<int32_t>(Name::kMadeRowSources),
          .made_slot_rows = call.data<int32_t>(Name::kMadeSlotRows),
          .rows_per_expert = call.data<int32_t>(Name::kRowsPerExpert),
          .dropped_rows = call.data<int32_t>(Name::kDroppedRows),
          .weight_gradients = call.data<Sum>(Name::kWeightGradients),
          .slot_rows = call.data<const int32_t>(Name::kSlotRows),
          .known_rows_per_expert = call.data<const int32_t>(Name::kKnownRowsPerExpert),
          .y = call.data(Name::kY),
          .row_sources = call.data<const int32_t>(Name::kRowSources),
          .weights = call.data<const Sum>(Name::kWeights)};
}

namespace exchange_checks {

// The arrays that a call of its kind has.
inline std::string names_error(const ExchangeCall& call) {
  using Name = ExchangeArray;
  std::string wrong;
  const auto expect = [&](Name name, bool expected) {
    if (call.has(name) == expected) return;
    wrong += std::string(wrong.empty() ? "" : ", ") + (expected ? "without " : "with ") +
             kExchangeArrayNames[static_cast<std::size_t>(name)];
  };
  const bool combines = call.combines(), sorts = call.has(Name::kTopkIds);
  const bool differentiates = call.has(Name::kWeightGradients);
  expect(Name::kPlace, true);
  expect(Name::kX, !combines);
  expect(Name::kRows, !combines);
  expect(Name::kOutputs, combines || differentiates);
  expect(Name::kSlotRows, combines);
  expect(Name::kRowSources, !sorts);
  for (Name made : {Name::kMadeRowSources, Name::kMadeSlotRows, Name::kRowsPerExpert, Name::kDroppedRows}) {
    expect(made, sorts);
  }
  if (combines) {
    for (Name name : {Name::kTopkIds, Name::kScales, Name::kWeightGradients}) expect(name, false);
  } else {
    expect(Name::kWeights, differentiates);
    if (!sorts) expect(Name::kScales, false);
  }
  if (sorts) expect(Name::kWeights, false);
  // A product is of what this call sorts, or of rows that are combined.
  const bool multiplies = call.multiplies();
  expect(Name::kKnownRowsPerExpert, multiplies && combines);
  if (multiplies) expect(Name::kTopkIds, !combines);
  if (multiplies) expect(Name::kScales, false);
  if (wrong.empty()) return "";
  return std::string("jaxmoe: a ") + (combines ? "combine " : "dispatch ") + wrong +
         ". See ExchangeArray in ffi/common/exchange_call.h.";
}

inline std::string dimensions_error(const ExchangeCall& call, const ExchangeAttributes& a) {
  using Name = ExchangeArray;
  const auto dimensions = [&](Name name) { return call[name]->dimensions().size(); };
  if (call[Name::kPlace]->element_count() != 2 || dimensions(tokens_of(call)) != 2 || dimensions(rows_of(call)) != 2) {
    return "jaxmoe: place must be [2], x and y [tokens, hidden], rows and outputs [rows, hidden].";
  }
  const int64_t tokens = call.extent(tokens_of(call), 0), hidden = call.extent(tokens_of(call), 1);
  const int64_t rows = call.extent(rows_of(call), 0), local = a.num_experts / a.ranks;
  const int64_t width = call.extent(rows_of(call), 1);
  bool fit = (width == hidden || call.multiplies()) && rows < std::numeric_limits<int32_t>::max() / 2;
  const auto expect = [&](std::initializer_list<Name> names, int64_t elements) {
    for (Name name : names) {
      if (call.has(name)) fit = fit && static_cast<int64_t>(call[name]->element_count()) == elements;
    }
  };
  expect({Name::kTopkIds, Name::kSlotRows, Name::kWeights, Name::kMadeSlotRows, Name::kWeightGradients},
         tokens * a.top_k);
  expect({Name::kOutputs}, rows * width);
  expect({Name::kMatrices}, local * hidden * width);
  expect({Name::kRowSources, Name::kMadeRowSources}, rows);
  expect({Name::kScales}, rows * ceil_div(hidden, int64_t{kScaleColumns}));
  expect({Name::kRowsPerExpert, Name::kDroppedRows, Name::kKnownRowsPerExpert}, local);
  if (a.capacity_per_expert > 0) fit = fit && rows == local * a.capacity_per_expert;
  if (call.has(Name::kScales)) fit = fit && hidden % kScaleColumns == 0;
  if (!fit) {
    return "jaxmoe: shapes do not go together: tokens [" + std::to_string(tokens) + ", " + std::to_string(hidden) +
           "], top_k " + std::to_string(a.top_k) + ", " + std::to_string(rows) + " rows of " + std::to_string(width) +
           ", " + std::to_string(local) +
           " local experts, capacity_per_expert " + std::to_string(a.capacity_per_expert) + ".";
  }
  // XLA may have no address for an array without elements: ids would be taken for none, and routes for known.
  if (call.has(Name::kTopkIds) && tokens * a.top_k == 0) {
    return "jaxmoe: " + std::to_string(tokens) + " tokens x " + std::to_string(a.top_k) +
           " slots; a dispatch that sorts needs one at least.";
  }
  if (tokens * a.top_k >= kMaxSlots) {
    return "jaxmoe: " + std::to_string(tokens) + " tokens x " + std::to_string(a.top_k) +
           " slots; a rank can number " + std::to_string(kMaxSlots - 1) + ".";
  }
  return "";
}

inline std::string types_error(const ExchangeCall& call) {
  using Name = ExchangeArray;
  const auto element = element_of(call.type(tokens_of(call)));
  if (!element || info_of(*element).bits < 16) return "jaxmoe: tokens must be float32, float64, bfloat16 or float16.";
  bool agree = true;
  const auto expect = [&](std::initializer_list<Name> names, xla::ffi::DataType type) {
    for (Name name : names) agree = agree && (!call.has(name) || call.type(name) == type);
  };
  const auto of_rows = element_of(call.type(rows_of(call)));
  agree = of_rows == (call.has(Name::kScales) ? Element::kE4M3 : *element);
  for (Name name : {Name::kOutputs, Name::kMatrices}) {
    if (call.has(name)) agree = agree && element_of(call.type(name)) == element;
  }
  const auto sum = info_of(*element).bits == 64 ? xla::ffi::F64 : xla::ffi::F32;
  expect({Name::kPlace, Name::kTopkIds, Name::kSlotRows, Name::kRowSources, Name::kMadeRowSources, Name::kMadeSlotRows,
          Name::kRowsPerExpert, Name::kDroppedRows, Name::kKnownRowsPerExpert},
         xla::ffi::S32);
  expect({Name::kScales}, xla::ffi::F32);
  expect({Name::kWeights, Name::kWeightGradients}, sum);
  if (agree) return "";
  return "jaxmoe: rows, outputs, matrices and tokens must have one type, or rows be float8_e4m3fn where there are "
         "scales; place, ids, routes and counts int32, scales float32, weights and their gradients as wide as sums.";
}

// Of a product: with fewer ring tiles a pull would wait for a tile that waits for it.
inline std::string schedule_error(const ExchangeCall& call, const ExchangeAttributes& a) {
  const Schedule s = schedule_of(a);
  const int32_t half = !call.multiplies() ? 0 : call.combines() ? kSecondHalf : kFirstHalf;
  const bool has_ring = half == kFirstHalf;
  if (s.half == half && s.tile.rows >= 1 && s.tile.h_columns >= 1 && s.tile.columns >= 1 && s.unit_tiles >= 1 &&
      s.lag_units == 0 && s.workers >= 0 && s.chunk_rows >= 1 && s.dispatchers >= s.workers && s.narrow_rows >= 0 &&
      s.segment_tiles == 0 && s.saved_tiles == 0 && s.weight_slots == 0 && s.frozen == 0 && s.share_columns == 0 &&
      s.summed_tiles == 0 &&
      (s.ring_tiles > 0) == has_ring &&
      (!has_ring || s.ring_tiles >= at_most(int64_t{s.unit_tiles}, max_row_tiles(shape_of(call, a), s.tile)))) {
    return "";
  }
  return "jaxmoe: half=" + std::to_string(s.half) + ", lag_units=" + std::to_string(s.lag_units) + ", unit_tiles=" +
         std::to_string(s.unit_tiles) + ", ring_tiles=" + std::to_string(s.ring_tiles) + ", share_columns=" +
         std::to_string(s.share_columns) + ", summed_tiles=" + std::to_string(s.summed_tiles) +
         " of a schedule; this call needs half=" + std::to_string(half) +
         ", no lag, no gradients, no shared columns, no sums at experts, positive sizes and " +
         (has_ring ? "a ring of at least unit_tiles." : "no ring.");
}

}  // namespace exchange_checks

// What is wrong with the attributes of a call; empty where nothing is.
inline std::string attributes_error(const ExchangeAttributes& a) {
  if (std::string error = group_error(a); !error.empty()) return error;
  if (a.top_k < 0 || a.alignment < 1 || a.alignment > kMostAlignment || a.capacity_per_expert < 0) {
    return "jaxmoe: top_k=" + std::to_string(a.top_k) + ", alignment=" + std::to_string(a.alignment) +
           ", capacity_per_expert=" + std::to_string(a.capacity_per_expert) +
           ". The alignment has to be positive and at most " + std::to_string(kMostAlignment) +
           ", and nothing can be negative.";
  }
  return "";
}

// What is wrong with a call on any platform; empty where nothing is.
inline std::string call_error(const ExchangeCall& call, const ExchangeAttributes& a) {
  if (std::string error = attributes_error(a); !error.empty()) return error;
  if (std::string error = exchange_checks::names_error(call); !error.empty()) return error;
  if (std::string error = exchange_checks::dimensions_error(call, a); !error.empty()) return error;
  if (std::string error = exchange_checks::types_error(call); !error.empty()) return error;
  return exchange_checks::schedule_error(call, a);
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmoe::ExchangeAttributes, xla::ffi::StructMember<std::string_view>("version"),
    xla::ffi::StructMember<int32_t>("ranks"), xla::ffi::StructMember<int32_t>("num_experts"),
    xla::ffi::StructMember<int32_t>("top_k"), xla::ffi::StructMember<int32_t>("arrays"),
    xla::ffi::StructMember<int32_t>("alignment"), xla::ffi::StructMember<int32_t>("capacity_per_expert"),
    xla::ffi::StructMember<int32_t>("power_of_two_scales"),
    xla::ffi::StructMember<xla::ffi::Span<const int32_t>>("schedule"),
    xla::ffi::StructMember<float>("timeout_seconds"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"));
