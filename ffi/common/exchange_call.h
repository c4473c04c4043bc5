// A call of the FFI targets jaxmoe_dispatch and jaxmoe_combine as it arrives from jaxmoe/exchange/kernel.py: its
// attributes, its arrays by name, the sizes that follow, and what must hold of it. Python has checked the same before:
// this keeps a call that does not come from jaxmoe from reading or writing out of bounds. What routes hold is not known
// here; the kernels pass over those that name no slot.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

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

struct ExchangeAttributes {
  int32_t ranks;
  int32_t num_experts;
  int32_t top_k;
  int32_t arrays;  // bits of ExchangeArray: the operands and results that the call has
  int32_t alignment;            // of Room
  int32_t capacity_per_expert;  // the same
  int32_t power_of_two_scales;  // 1: of rows in 8 bits
  int32_t workers;              // pairs of multiprocessors that it takes; 0: as many as the device has room for
  float timeout_seconds;        // as those of a layer, and all below
  xla::ffi::Span<const int64_t> groups;
  xla::ffi::Span<const int64_t> devices;
};

class ExchangeCall : public CallArrays<ExchangeArray> {
 public:
  ExchangeCall(const xla::ffi::RemainingArgs& operands, xla::ffi::RemainingRets results,
               const ExchangeAttributes& attributes, std::string* error) {
    const auto first_of = [](ExchangeArray name) { return (uint32_t{1} << static_cast<int32_t>(name)) - 1; };
    const uint32_t named = static_cast<uint32_t>(attributes.arrays) & first_of(ExchangeArray::kCount);
    take(operands, results, named, ~first_of(ExchangeArray::kRows), error);
  }

  bool combines() const { return has(ExchangeArray::kY); }
};

// Of a call that has passed its checks, as all below.
inline ExchangeArray tokens_of(const ExchangeCall& call) {
  return call.combines() ? ExchangeArray::kY : ExchangeArray::kX;
}
inline ExchangeArray rows_of(const ExchangeCall& call) {
  return call.combines() ? ExchangeArray::kOutputs : ExchangeArray::kRows;
}

inline Shape shape_of(const ExchangeCall& call, const ExchangeAttributes& a) {
  return {.ranks = a.ranks,
          .tokens = static_cast<int32_t>(call.extent(tokens_of(call), 0)),
          .hidden = static_cast<int32_t>(call.extent(tokens_of(call), 1)),
          .intermediate = 0,
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
  return {.x = call.data(Name::kX),
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
  bool fit = call.extent(rows_of(call), 1) == hidden && rows < std::numeric_limits<int32_t>::max() / 2;
  const auto expect = [&](std::initializer_list<Name> names, int64_t elements) {
    for (Name name : names) {
      if (call.has(name)) fit = fit && static_cast<int64_t>(call[name]->element_count()) == elements;
    }
  };
  expect({Name::kTopkIds, Name::kSlotRows, Name::kWeights, Name::kMadeSlotRows, Name::kWeightGradients},
         tokens * a.top_k);
  expect({Name::kOutputs}, rows * hidden);
  expect({Name::kRowSources, Name::kMadeRowSources}, rows);
  expect({Name::kScales}, rows * ceil_div(hidden, int64_t{kScaleColumns}));
  expect({Name::kRowsPerExpert, Name::kDroppedRows}, local);
  if (a.capacity_per_expert > 0) fit = fit && rows == local * a.capacity_per_expert;
  if (call.has(Name::kScales)) fit = fit && hidden % kScaleColumns == 0;
  if (!fit) {
    return "jaxmoe: shapes do not go together: tokens [" + std::to_string(tokens) + ", " + std::to_string(hidden) +
           "], top_k " + std::to_string(a.top_k) + ", " + std::to_string(rows) + " rows, " + std::to_string(local) +
           " local experts, capacity_per_expert " + std::to_string(a.capacity_per_expert) + ".";
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
  if (call.has(Name::kOutputs)) agree = agree && element_of(call.type(Name::kOutputs)) == element;
  const auto sum = info_of(*element).bits == 64 ? xla::ffi::F64 : xla::ffi::F32;
  expect({Name::kTopkIds, Name::kSlotRows, Name::kRowSources, Name::kMadeRowSources, Name::kMadeSlotRows,
          Name::kRowsPerExpert, Name::kDroppedRows},
         xla::ffi::S32);
  expect({Name::kScales}, xla::ffi::F32);
  expect({Name::kWeights, Name::kWeightGradients}, sum);
  if (agree) return "";
  return "jaxmoe: rows, outputs and tokens must have one type, or rows be float8_e4m3fn where there are scales; ids, "
         "routes and counts int32, scales float32, weights and their gradients as wide as sums.";
}

}  // namespace exchange_checks

// What is wrong with the attributes of a call; empty where nothing is.
inline std::string attributes_error(const ExchangeAttributes& a) {
  if (std::string error = group_error(a); !error.empty()) return error;
  if (a.top_k < 0 || a.alignment < 1 || a.capacity_per_expert < 0 || a.workers < 0) {
    return "jaxmoe: top_k=" + std::to_string(a.top_k) + ", alignment=" + std::to_string(a.alignment) +
           ", capacity_per_expert=" + std::to_string(a.capacity_per_expert) + ", workers=" +
           std::to_string(a.workers) + ". The alignment has to be positive, and nothing can be negative.";
  }
  return "";
}

// What is wrong with a call on any platform; empty where nothing is.
inline std::string call_error(const ExchangeCall& call, const ExchangeAttributes& a) {
  if (std::string error = attributes_error(a); !error.empty()) return error;
  if (std::string error = exchange_checks::names_error(call); !error.empty()) return error;
  if (std::string error = exchange_checks::dimensions_error(call, a); !error.empty()) return error;
  return exchange_checks::types_error(call);
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmoe::ExchangeAttributes, xla::ffi::StructMember<int32_t>("ranks"),
    xla::ffi::StructMember<int32_t>("num_experts"), xla::ffi::StructMember<int32_t>("top_k"),
    xla::ffi::StructMember<int32_t>("arrays"), xla::ffi::StructMember<int32_t>("alignment"),
    xla::ffi::StructMember<int32_t>("capacity_per_expert"), xla::ffi::StructMember<int32_t>("power_of_two_scales"),
    xla::ffi::StructMember<int32_t>("workers"), xla::ffi::StructMember<float>("timeout_seconds"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"));
