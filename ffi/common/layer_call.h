// A call of the FFI targets jaxmoe_forward and jaxmoe_backward as it arrives from
// jaxmoe/implementations/megakernel/layer.py: its attributes, its arrays by name, and the sizes that follow from both.
// The same on both platforms, one handler for both targets: host/layer_handler.cc, cuda/host/layer_handler.cc. What
// must hold of a call is in call_checks.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "common/activation.h"
#include "common/call_arrays.h"
#include "common/formats.h"
#include "common/group_attributes.h"
#include "common/layer_arrays.h"
#include "common/shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

inline constexpr char kForwardTarget[] = "jaxmoe_forward";
inline constexpr char kBackwardTarget[] = "jaxmoe_backward";

struct LayerAttributes {
  std::string_view version;  // of the jaxmoe that made the call (common/group_attributes.h)
  int32_t ranks;
  int32_t num_experts;
  int32_t arrays;      // 32 bits of ArrayName: the operands and results that the call has
  int32_t activation;  // ActivationKind
  float limit;
  float alpha;
  float up_offset;
  int32_t rounds_rows;          // 1: tokens and h are rounded to 8 bits; weights have 8 or 4
  int32_t power_of_two_scales;  // 1: scales of tokens and of h are rounded up to powers of two
  int32_t accumulation;         // Accumulation
  int32_t gate_up_layout;       // GateUpLayout
  // The fields of Schedule in their order; 0 workers and dispatchers: as many as the device has room for.
  xla::ffi::Span<const int32_t> schedule;
  float timeout_seconds;                 // at most kLongestTimeoutSeconds (common/group_attributes.h)
  xla::ffi::Span<const int64_t> groups;  // devices of every group as XLA numbers them, rank 0 first; a CPU needs none
  // The same devices as all processes know them (jaxmoe/implementations/megakernel/lowering.py); -1 alone where Python
  // could not tell.
  xla::ffi::Span<const int64_t> devices;
};

inline Activation activation_of(const LayerAttributes& a) {
  return {static_cast<ActivationKind>(a.activation), a.limit, a.alpha, a.up_offset};
}

class LayerCall : public CallArrays<ArrayName> {
 public:
  // `error` is set where there are not as many operands and results as the attribute names.
  LayerCall(const xla::ffi::RemainingArgs& operands, xla::ffi::RemainingRets results,
            const LayerAttributes& attributes, std::string* error) {
    const uint32_t named = static_cast<uint32_t>(attributes.arrays) & bits_before(ArrayName::kCount);
    // Gate and up are a result of a forward pass, which has no dy.
    uint32_t of_results = ~bits_before(ArrayName::kY);
    if ((named & bit_of(ArrayName::kDy)) == 0) of_results |= bit_of(ArrayName::kGateUp);
    take(operands, results, named, of_results, error);
  }

  bool backward() const { return has(ArrayName::kDy); }
};

// Of a call that has passed its checks, as all below.
inline bool has_scaled_weights(const LayerCall& call) { return call.has(ArrayName::kWGateScales); }

// Whether gate and up are one array.
inline bool is_fused(const LayerCall& call) { return call.has(ArrayName::kWGateUp); }

// Width between the two GEMMs, by how the matrices lie.
inline int64_t intermediate_of(const LayerCall& call) {
  if (is_fused(call)) return call.extent(ArrayName::kWGateUp, 2) / 2;
  return call.extent(ArrayName::kWGate, has_scaled_weights(call) ? 1 : 2);
}

inline Shape shape_of(const LayerCall& call, const LayerAttributes& a) {
  const auto size = [&](ArrayName name, std::size_t dimension) {
    return static_cast<int32_t>(call.extent(name, dimension));
  };
  return {.ranks = a.ranks,
          .tokens = size(ArrayName::kX, 0),
          .hidden = size(ArrayName::kX, 1),
          .intermediate = static_cast<int32_t>(intermediate_of(call)),
          .num_experts = a.num_experts,
          .top_k = size(ArrayName::kTopkIds, 1),
          .projections = is_fused(call) || call.has(ArrayName::kWUp) ? 2 : 1};
}

// Of weights with scales. Where a dimension is no longer than a block the blocks of several kinds are the same ones.
inline Format weight_format_of(const LayerCall& call) {
  const int64_t columns = call.extent(ArrayName::kWGateScales, 1), rows = call.extent(ArrayName::kWGateScales, 2);
  const auto blocks = [](int64_t extent) { return ceil_div(extent, int64_t{kScaleColumns}); };
  Format format{Element::kE4M3, columns == 1 ? kAllOfThem : 1, kAllOfThem};
  if (columns == blocks(intermediate_of(call)) && rows == blocks(call.extent(ArrayName::kX, 1))) {
    format = {Element::kE4M3, kScaleColumns, kScaleColumns};
  }
  if (call.has(ArrayName::kWGateGroupScales)) {
    format.element = Element::kE2M1;
    format.group_scale = *element_of(call.type(ArrayName::kWGateGroupScales));
    format.group_columns = group_columns_of(format.group_scale);
    format.repacked = call.type(ArrayName::kWGate) == xla::ffi::U32 ? 1 : 0;
  }
  return format;
}

// Weights with scales are multiplied with rows in 8 bits, or decoded to what x has.
inline Formats formats_of(const LayerCall& call, const LayerAttributes& a) {
  const Element wide = *element_of(call.type(ArrayName::kX));
  if (!has_scaled_weights(call)) return Formats::of(wide);
  const Format weights = weight_format_of(call);
  if (a.rounds_rows == 0) return Formats::decoded(wide, weights);
  return Formats::eight_bit(wide, weights, static_cast<Accumulation>(a.accumulation));
}

// Gate and up, by the names of their own arrays or of the one of both; null where there are none.
template <class T>
std::pair<T*, T*> gate_and_up(const LayerCall& call, ArrayName gate, ArrayName up, ArrayName both) {
  if (!is_fused(call)) return {call.data<T>(gate), call.data<T>(up)};
  T* const first = call.data<T>(both);
  if (first == nullptr) return {};
  const int64_t bytes = intermediate_of(call) * info_of(*element_of(call.type(both))).bits / 8;
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return {first, reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + bytes)};
}

template <class T, class Sum, class W = T>
LayerArrays<T, Sum, W> arrays_of(const LayerCall& call, const LayerAttributes& a) {
  using Name = ArrayName;
  const bool wide = call.has(Name::kDWDown) && call.type(Name::kDWDown) != call.type(Name::kX);
  const auto [w_gate, w_up] = gate_and_up<const W>(call, Name::kWGate, Name::kWUp, Name::kWGateUp);
  const auto [b_gate, b_up] = gate_and_up<const T>(call, Name::kBGate, Name::kBUp, Name::kBGateUp);
  const auto [dw_gate, dw_up] = gate_and_up<void>(call, Name::kDWGate, Name::kDWUp, Name::kDWGateUp);
  const auto [db_gate, db_up] = gate_and_up<void>(call, Name::kDBGate, Name::kDBUp, Name::kDBGateUp);
  return {.gate_up_layout = static_cast<GateUpLayout>(a.gate_up_layout),
          .x = call.data<const T>(Name::kX),
          .topk_ids = call.data<const int32_t>(Name::kTopkIds),
          .topk_weights = call.data<const Sum>(Name::kTopkWeights),
          .w_gate = w_gate,
          .w_up = w_up,
          .w_down = call.data<const W>(Name::kWDown),
          .b_gate = b_gate,
          .b_up = b_up,
          .b_down = call.data<const T>(Name::kBDown),
          .w_gate_scales = call.data<const float>(Name::kWGateScales),
          .w_up_scales = call.data<const float>(Name::kWUpScales),
          .w_down_scales = call.data<const float>(Name::kWDownScales),
          .w_gate_group_scales = call.data<const uint8_t>(Name::kWGateGroupScales),
          .w_up_group_scales = call.data<const uint8_t>(Name::kWUpGroupScales),
          .w_down_group_scales = call.data<const uint8_t>(Name::kWDownGroupScales),
          .row_scales = call.data<const float>(Name::kRowScales),
          .dy = call.data<const T>(Name::kDy),
          .gate_up = call.data<T>(Name::kGateUp),
          .y = call.data<T>(Name::kY),
          .dx = call.data<T>(Name::kDX),
          .dtopk_weights = call.data<Sum>(Name::kDTopkWeights),
          .wide_gradients = wide,
          .dw_gate = dw_gate,
          .dw_up = dw_up,
          .dw_down = call.data(Name::kDWDown),
          .db_gate = db_gate,
          .db_up = db_up,
          .db_down = call.data(Name::kDBDown)};
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmoe::LayerAttributes, xla::ffi::StructMember<std::string_view>("version"),
    xla::ffi::StructMember<int32_t>("ranks"), xla::ffi::StructMember<int32_t>("num_experts"),
    xla::ffi::StructMember<int32_t>("arrays"), xla::ffi::StructMember<int32_t>("activation"),
    xla::ffi::StructMember<float>("limit"), xla::ffi::StructMember<float>("alpha"),
    xla::ffi::StructMember<float>("up_offset"), xla::ffi::StructMember<int32_t>("rounds_rows"),
    xla::ffi::StructMember<int32_t>("power_of_two_scales"),
    xla::ffi::StructMember<int32_t>("accumulation"), xla::ffi::StructMember<int32_t>("gate_up_layout"),
    xla::ffi::StructMember<xla::ffi::Span<const int32_t>>("schedule"),
    xla::ffi::StructMember<float>("timeout_seconds"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"));
