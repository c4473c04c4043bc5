// A call of the FFI targets jaxmoe_forward and jaxmoe_backward as it arrives from
// jaxmoe/implementations/megakernel/layer.py: its attributes, its arrays by name, and the sizes that follow from both.
// The same on both platforms, one handler for both targets: host/layer_handler.cc, cuda/host/layer_handler.cu. What
// must hold of a call is in call_checks.h.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>

#include "common/activation.h"
#include "common/call_arrays.h"
#include "common/formats.h"
#include "common/layer_arrays.h"
#include "common/shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

inline constexpr char kForwardTarget[] = "jaxmoe_forward";
inline constexpr char kBackwardTarget[] = "jaxmoe_backward";

struct LayerAttributes {
  int32_t ranks;
  int32_t num_experts;
  int32_t arrays;      // bits of ArrayName: the operands and results that the call has
  int32_t activation;  // ActivationKind
  float limit;
  float alpha;
  float up_offset;
  int32_t power_of_two_scales;  // 1: scales of tokens and of h are rounded up to powers of two
  // The fields of Schedule in their order; 0 workers and dispatchers: as many as the device has room for.
  xla::ffi::Span<const int32_t> schedule;
  float timeout_seconds;                 // at most kLongestTimeoutSeconds (common/group_attributes.h)
  xla::ffi::Span<const int64_t> groups;  // devices of every group as XLA numbers them, rank 0 first; a CPU needs none
  // The same devices as all processes know them (jaxmoe/implementations/megakernel/lowering.py); -1 alone where Python
  // could not tell.
  xla::ffi::Span<const int64_t> devices;
};

// Of a schedule of the right length.
inline Schedule schedule_of(const LayerAttributes& a) {
  std::array<int32_t, sizeof(Schedule) / sizeof(int32_t)> numbers{};
  std::copy(a.schedule.begin(), a.schedule.end(), numbers.begin());
  return std::bit_cast<Schedule>(numbers);
}

inline Activation activation_of(const LayerAttributes& a) {
  return {static_cast<ActivationKind>(a.activation), a.limit, a.alpha, a.up_offset};
}

class LayerCall : public CallArrays<ArrayName> {
 public:
  // `error` is set where there are not as many operands and results as the attribute names.
  LayerCall(const xla::ffi::RemainingArgs& operands, xla::ffi::RemainingRets results,
            const LayerAttributes& attributes, std::string* error) {
    const uint32_t named = static_cast<uint32_t>(attributes.arrays) & (bit_of(ArrayName::kCount) - 1);
    // Gate and up are a result of a forward pass, which has no dy.
    uint32_t of_results = ~(bit_of(ArrayName::kY) - 1);
    if ((named & bit_of(ArrayName::kDy)) == 0) of_results |= bit_of(ArrayName::kGateUp);
    take(operands, results, named, of_results, error);
  }

  bool backward() const { return has(ArrayName::kDy); }
};

// Of a call that has passed its checks, as all below.
inline bool has_scaled_weights(const LayerCall& call) { return call.has(ArrayName::kWGateScales); }

// Width between the two GEMMs, by how the matrices lie.
inline int64_t intermediate_of(const LayerCall& call) {
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
          .projections = call.has(ArrayName::kWUp) ? 2 : 1};
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
  }
  return format;
}

// Of a schedule that decodes weights, rows stay as wide as x; and beside weights in 4 bits, which one without slots for
// decoded ones decodes as well.
inline Formats formats_of(const LayerCall& call, const Schedule& schedule) {
  const Element wide = *element_of(call.type(ArrayName::kX));
  if (!has_scaled_weights(call)) return Formats::of(wide);
  const Format weights = weight_format_of(call);
  const bool decodes = schedule.decodes() || weights.element == Element::kE2M1;
  return decodes ? Formats::decoded(wide, weights) : Formats::eight_bit(wide, weights);
}

template <class T, class Sum, class W = T>
LayerArrays<T, Sum, W> arrays_of(const LayerCall& call) {
  const bool wide = call.has(ArrayName::kDWGate) && call.type(ArrayName::kDWGate) != call.type(ArrayName::kX);
  return {.x = call.data<const T>(ArrayName::kX),
          .topk_ids = call.data<const int32_t>(ArrayName::kTopkIds),
          .topk_weights = call.data<const Sum>(ArrayName::kTopkWeights),
          .w_gate = call.data<const W>(ArrayName::kWGate),
          .w_up = call.data<const W>(ArrayName::kWUp),
          .w_down = call.data<const W>(ArrayName::kWDown),
          .b_gate = call.data<const T>(ArrayName::kBGate),
          .b_up = call.data<const T>(ArrayName::kBUp),
          .b_down = call.data<const T>(ArrayName::kBDown),
          .w_gate_scales = call.data<const float>(ArrayName::kWGateScales),
          .w_up_scales = call.data<const float>(ArrayName::kWUpScales),
          .w_down_scales = call.data<const float>(ArrayName::kWDownScales),
          .w_gate_group_scales = call.data<const uint8_t>(ArrayName::kWGateGroupScales),
          .w_up_group_scales = call.data<const uint8_t>(ArrayName::kWUpGroupScales),
          .w_down_group_scales = call.data<const uint8_t>(ArrayName::kWDownGroupScales),
          .dy = call.data<const T>(ArrayName::kDy),
          .gate_up = call.data<T>(ArrayName::kGateUp),
          .y = call.data<T>(ArrayName::kY),
          .dx = call.data<T>(ArrayName::kDX),
          .dtopk_weights = call.data<Sum>(ArrayName::kDTopkWeights),
          .wide_gradients = wide,
          .dw_gate = call.data(ArrayName::kDWGate),
          .dw_up = call.data(ArrayName::kDWUp),
          .dw_down = call.data(ArrayName::kDWDown),
          .db_gate = call.data(ArrayName::kDBGate),
          .db_up = call.data(ArrayName::kDBUp),
          .db_down = call.data(ArrayName::kDBDown)};
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmoe::LayerAttributes, xla::ffi::StructMember<int32_t>("ranks"), xla::ffi::StructMember<int32_t>("num_experts"),
    xla::ffi::StructMember<int32_t>("arrays"), xla::ffi::StructMember<int32_t>("activation"),
    xla::ffi::StructMember<float>("limit"), xla::ffi::StructMember<float>("alpha"),
    xla::ffi::StructMember<float>("up_offset"), xla::ffi::StructMember<int32_t>("power_of_two_scales"),
    xla::ffi::StructMember<xla::ffi::Span<const int32_t>>("schedule"),
    xla::ffi::StructMember<float>("timeout_seconds"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"));
