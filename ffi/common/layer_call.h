// The FFI targets jaxmoe_forward and jaxmoe_backward as they arrive from jaxmoe/implementations/megakernel/layer.py:
// buffers, attributes, and what must hold of them. The same on both platforms; host/layer_handler.cc and
// cuda/host/layer_handler.cu decode their calls with it, one handler for both targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/activation.h"
#include "common/layout.h"
#include "common/shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

inline constexpr char kForwardTarget[] = "jaxmoe_forward";
inline constexpr char kBackwardTarget[] = "jaxmoe_backward";

// Operands and results of a call, in their order.
class LayerBuffers {
 public:
  enum Operand {
    kPlace = 0,    // int32[2]: rank in the group, number of the group; GPUs ask the communicator
    kX,            // [tokens, hidden]
    kTopkIds,      // [tokens, top_k] int32 in [0, num_experts), or any other for a slot nobody uses
    kTopkWeights,  // [tokens, top_k] float32 (float64 with float64 tokens)
    kWGate,        // [local_experts, hidden, intermediate]
    kWUp,          // the same, or no elements for plain experts
    kWDown,        // [local_experts, intermediate, hidden]
    kBGate,        // [local_experts, intermediate], or no elements
    kBUp,          // the same
    kBDown,        // [local_experts, hidden], or no elements
    kDy,           // [tokens, hidden], of jaxmoe_backward alone
    kSaved,        // [saved_tiles * tile_rows, projections, intermediate]; the same, where saved_tiles is not 0
    kOperands
  };
  // Of jaxmoe_backward: gradients of the operands from x on but for the ids, of their shapes and types.
  enum Gradient { kDX = 0, kDTopkWeights, kDWGate, kDWUp, kDWDown, kDBGate, kDBUp, kDBDown, kGradients };

  // `error` is set where the numbers of operands and results are those of neither target. A forward pass that saves has
  // a second result, which is an operand of the backward pass.
  LayerBuffers(xla::ffi::RemainingArgs operands, xla::ffi::RemainingRets results, std::string* error) {
    const bool forward = operands.size() == kDy && (results.size() == 1 || results.size() == 2);
    const bool backward =
        (operands.size() == kSaved || operands.size() == kOperands) && results.size() == kGradients;
    if (!forward && !backward) {
      *error = "jaxmoe: " + std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) +
               " results; jaxmoe_forward has " + std::to_string(kDy) + " and 1 or 2, jaxmoe_backward " +
               std::to_string(kSaved) + " or " + std::to_string(kOperands) + " and " + std::to_string(kGradients) + ".";
      return;
    }
    for (std::size_t i = 0; i < operands.size(); ++i) operands_.push_back(*operands.get<xla::ffi::AnyBuffer>(i));
    for (std::size_t i = 0; i < results.size(); ++i) results_.push_back(**results.get<xla::ffi::AnyBuffer>(i));
  }

  bool backward() const { return operands_.size() > kDy; }
  // Gate and up for the backward pass; null where nothing is saved.
  const xla::ffi::AnyBuffer* saved() const {
    if (backward()) return operands_.size() == kOperands ? &operands_[kSaved] : nullptr;
    return results_.size() == 2 ? &results_[1] : nullptr;
  }
  const xla::ffi::AnyBuffer& operator[](Operand operand) const { return operands_[operand]; }
  const xla::ffi::AnyBuffer& y() const { return results_[0]; }
  const xla::ffi::AnyBuffer& operator[](Gradient gradient) const { return results_[gradient]; }

 private:
  std::vector<xla::ffi::AnyBuffer> operands_;
  std::vector<xla::ffi::AnyBuffer> results_;
};

// The data of a buffer; null where it has no elements.
template <class T = void>
T* data_of(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : static_cast<T*>(buffer.untyped_data());
}

// 31 years. Waits count nanoseconds in 64 bits, beside those since the machine has started.
inline constexpr float kLongestTimeoutSeconds = 1e9f;

struct LayerAttributes {
  int32_t ranks;
  int32_t num_experts;
  int32_t activation;  // ActivationKind
  float limit;
  float alpha;
  float up_offset;
  int32_t tile_rows;
  int32_t tile_h_columns;
  int32_t tile_columns;
  int32_t unit_tiles;
  int32_t lag_units;
  int32_t ring_tiles;
  int32_t chunk_rows;
  int32_t workers;  // 0: all that the device has
  int32_t dispatchers_per_worker;
  int32_t keep_tokens;
  int32_t segment_tiles;  // 0 of jaxmoe_forward
  int32_t saved_tiles;
  float timeout_seconds;  // at most kLongestTimeoutSeconds
  xla::ffi::Span<const int64_t> groups;  // devices of every group as XLA numbers them, rank 0 first; a CPU needs none
  // The same devices as all processes know them (jaxmoe/implementations/megakernel/lowering.py); -1 alone where Python
  // could not tell.
  xla::ffi::Span<const int64_t> devices;
};

inline Shape shape_of(const LayerBuffers& b, const LayerAttributes& a) {
  const auto size = [](int64_t dimension) { return static_cast<int32_t>(dimension); };
  return {.ranks = a.ranks,
          .tokens = size(b[LayerBuffers::kX].dimensions()[0]),
          .hidden = size(b[LayerBuffers::kX].dimensions()[1]),
          .intermediate = size(b[LayerBuffers::kWGate].dimensions()[2]),
          .num_experts = a.num_experts,
          .top_k = size(b[LayerBuffers::kTopkIds].dimensions()[1]),
          .projections = b[LayerBuffers::kWUp].element_count() > 0 ? 2 : 1};
}

inline Schedule schedule_of(const LayerAttributes& a, int32_t workers) {
  return {.tile = {a.tile_rows, a.tile_h_columns, a.tile_columns},
          .unit_tiles = a.unit_tiles,
          .lag_units = a.lag_units,
          .ring_tiles = a.ring_tiles,
          .workers = workers,
          .chunk_rows = a.chunk_rows,
          .dispatchers = workers * a.dispatchers_per_worker,
          .narrow_rows = a.tile_rows / 2,
          .keep_tokens = a.keep_tokens,
          .segment_tiles = a.segment_tiles,
          .saved_tiles = a.saved_tiles};
}

inline Activation activation_of(const LayerAttributes& a) {
  return {static_cast<ActivationKind>(a.activation), a.limit, a.alpha, a.up_offset};
}

// What is wrong with the attributes alone; empty where nothing is.
inline std::string attributes_error(const LayerAttributes& a) {
  if (a.ranks < 1 || a.ranks > kMaxRanks || a.num_experts < 1 || a.num_experts % a.ranks != 0) {
    return "jaxmoe: num_experts=" + std::to_string(a.num_experts) + " over ranks=" + std::to_string(a.ranks) +
           " is no whole number of experts per rank, or more than " + std::to_string(kMaxRanks) + " ranks.";
  }
  if (a.groups.size() == 0 || a.groups.size() % a.ranks != 0) {
    return "jaxmoe: groups names " + std::to_string(a.groups.size()) + " devices, ranks is " +
           std::to_string(a.ranks) + ". It has to name all devices of the mesh, group by group.";
  }
  if (a.devices.size() != a.groups.size() && a.devices.size() != 1) {
    return "jaxmoe: devices names " + std::to_string(a.devices.size()) + " devices, groups " +
           std::to_string(a.groups.size()) + ". It has to name the same ones, or be -1 alone.";
  }
  return "";
}

// What makes a call impossible; empty where nothing does. Python has checked the same before: this keeps a call that
// does not come from megakernel.py from reading or writing out of bounds. What buffers hold is not known here: ids that
// name no expert are slots nobody uses (Shape::has_expert), and the rank in `place`, which only a CPU reads, is checked
// in host/layer_handler.cc.
inline std::string layer_error(const LayerBuffers& b, const LayerAttributes& a) {
  using Buffers = LayerBuffers;
  const auto rank = [&](Buffers::Operand operand) { return b[operand].dimensions().size(); };
  if (b[Buffers::kPlace].element_count() != 2 || rank(Buffers::kX) != 2 || rank(Buffers::kTopkIds) != 2 ||
      rank(Buffers::kWGate) != 3) {
    return "jaxmoe: place must be [2], x [tokens, hidden], topk_ids [tokens, top_k], w_gate [experts, hidden, "
           "intermediate].";
  }
  if (b.backward() != (a.segment_tiles > 0)) {
    return "jaxmoe: segment_tiles=" + std::to_string(a.segment_tiles) +
           "; it must be positive for jaxmoe_backward and 0 for jaxmoe_forward.";
  }
  if (const std::string error = attributes_error(a); !error.empty()) return error;
  const int64_t tokens = b[Buffers::kX].dimensions()[0], hidden = b[Buffers::kX].dimensions()[1];
  const int64_t top_k = b[Buffers::kTopkIds].dimensions()[1];
  const int64_t experts = a.num_experts / a.ranks, intermediate = b[Buffers::kWGate].dimensions()[2];
  const int64_t matrix = experts * hidden * intermediate;
  const auto is = [](const xla::ffi::AnyBuffer& buffer, int64_t count) {
    return static_cast<int64_t>(buffer.element_count()) == count;
  };
  const auto is_or_none = [&](Buffers::Operand operand, int64_t count) {
    return b[operand].element_count() == 0 || is(b[operand], count);
  };
  bool fit = is(b[Buffers::kTopkIds], tokens * top_k) && is(b[Buffers::kTopkWeights], tokens * top_k) &&
             is(b[Buffers::kWGate], matrix) && is_or_none(Buffers::kWUp, matrix) && is(b[Buffers::kWDown], matrix) &&
             is_or_none(Buffers::kBGate, experts * intermediate) && is_or_none(Buffers::kBUp, experts * intermediate) &&
             is_or_none(Buffers::kBDown, experts * hidden);
  if (b.backward()) {
    fit = fit && is(b[Buffers::kDy], tokens * hidden) && is(b[Buffers::kDX], tokens * hidden);
    for (int i = Buffers::kDTopkWeights; i < Buffers::kGradients; ++i) {
      const auto operand = static_cast<Buffers::Operand>(Buffers::kTopkWeights + i - Buffers::kDTopkWeights);
      fit = fit && b[static_cast<Buffers::Gradient>(i)].element_count() == b[operand].element_count();
    }
  } else {
    fit = fit && is(b.y(), tokens * hidden);
  }
  const int64_t projections = b[Buffers::kWUp].element_count() > 0 ? 2 : 1;
  const int64_t saved = int64_t{a.saved_tiles} * a.tile_rows * projections * intermediate;
  fit = fit && (b.saved() == nullptr ? a.saved_tiles == 0 : a.saved_tiles > 0 && is(*b.saved(), saved));
  if (!fit) {
    return "jaxmoe: shapes do not go together: x [" + std::to_string(tokens) + ", " + std::to_string(hidden) +
           "], top_k " + std::to_string(top_k) + ", " + std::to_string(experts) + " local experts, intermediate " +
           std::to_string(intermediate) + ".";
  }
  if (tokens * top_k >= kMaxSlots) {
    return "jaxmoe: " + std::to_string(tokens) + " tokens x " + std::to_string(top_k) +
           " slots; a rank can number " + std::to_string(kMaxSlots - 1) + ".";
  }
  const Shape shape = shape_of(b, a);
  const Schedule schedule = schedule_of(a, a.workers);
  if (a.tile_rows < 1 || a.tile_h_columns < 1 || a.tile_columns < 1 || a.unit_tiles < 1 || a.lag_units < 0 ||
      a.chunk_rows < 1 || a.segment_tiles < 0 || a.saved_tiles < 0 || a.workers < 0 || a.dispatchers_per_worker < 1 ||
      !(a.timeout_seconds > 0 && a.timeout_seconds <= kLongestTimeoutSeconds)) {
    return "jaxmoe: tile sizes, unit_tiles, chunk_rows, dispatchers_per_worker and timeout_seconds must be "
           "positive, timeout_seconds at most 1e9, lag_units and workers not negative.";
  }
  if (a.ring_tiles < schedule.min_ring_tiles() && a.ring_tiles < max_row_tiles(shape, schedule.tile)) {
    return "jaxmoe: ring_tiles=" + std::to_string(a.ring_tiles) +
           " is less than the " + std::to_string(schedule.min_ring_tiles()) +
           " that unit_tiles, lag_units and segment_tiles need.";
  }
  return "";
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmoe::LayerAttributes, xla::ffi::StructMember<int32_t>("ranks"), xla::ffi::StructMember<int32_t>("num_experts"),
    xla::ffi::StructMember<int32_t>("activation"), xla::ffi::StructMember<float>("limit"),
    xla::ffi::StructMember<float>("alpha"), xla::ffi::StructMember<float>("up_offset"),
    xla::ffi::StructMember<int32_t>("tile_rows"), xla::ffi::StructMember<int32_t>("tile_h_columns"),
    xla::ffi::StructMember<int32_t>("tile_columns"), xla::ffi::StructMember<int32_t>("unit_tiles"),
    xla::ffi::StructMember<int32_t>("lag_units"), xla::ffi::StructMember<int32_t>("ring_tiles"),
    xla::ffi::StructMember<int32_t>("chunk_rows"), xla::ffi::StructMember<int32_t>("workers"),
    xla::ffi::StructMember<int32_t>("dispatchers_per_worker"), xla::ffi::StructMember<int32_t>("keep_tokens"),
    xla::ffi::StructMember<int32_t>("segment_tiles"), xla::ffi::StructMember<int32_t>("saved_tiles"),
    xla::ffi::StructMember<float>("timeout_seconds"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("devices"));
