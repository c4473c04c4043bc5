// The FFI target jaxmoe_forward as it arrives from jaxmoe/megakernel.py: buffers, attributes, and what must hold of
// them. The same on both platforms; host/forward.cc and cuda/forward_handler.cu decode their calls with it.
#pragma once

#include <cstdint>
#include <string>

#include "common/activation.h"
#include "common/layout.h"
#include "common/shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

inline constexpr char kForwardTarget[] = "jaxmoe_forward";

struct ForwardBuffers {
  xla::ffi::AnyBuffer place;         // int32[2]: rank in the group, number of the group
  xla::ffi::AnyBuffer x;             // [tokens, hidden]
  xla::ffi::AnyBuffer topk_ids;      // [tokens, top_k] int32 in [0, num_experts), or -1
  xla::ffi::AnyBuffer topk_weights;  // [tokens, top_k] float32 (float64 with float64 tokens)
  xla::ffi::AnyBuffer w_gate;        // [local_experts, hidden, intermediate]
  xla::ffi::AnyBuffer w_up;          // the same, or no elements for plain experts
  xla::ffi::AnyBuffer w_down;        // [local_experts, intermediate, hidden]
  xla::ffi::AnyBuffer b_gate;        // [local_experts, intermediate], or no elements
  xla::ffi::AnyBuffer b_up;          // the same
  xla::ffi::AnyBuffer b_down;        // [local_experts, hidden], or no elements
  xla::ffi::AnyBuffer y;             // [tokens, hidden], the result
};

struct ForwardAttributes {
  int32_t ranks;
  int32_t num_experts;
  int32_t activation;  // ActivationKind
  float limit;
  float alpha;
  float up_offset;
  int32_t tile_rows;
  int32_t hidden_columns;
  int32_t output_columns;
  int32_t unit_tiles;
  int32_t lag_units;
  int32_t ring_tiles;
  int32_t chunk_rows;
  int32_t workers;  // 0: all that the device has
  int32_t dispatchers_per_worker;
  int32_t keep_tokens;
  float timeout_seconds;
  xla::ffi::Span<const int64_t> groups;  // devices of every group as XLA numbers them, rank 0 first; a CPU needs none
};

inline Shape shape_of(const ForwardBuffers& b, const ForwardAttributes& a) {
  const auto size = [](int64_t dimension) { return static_cast<int32_t>(dimension); };
  return {.ranks = a.ranks,
          .tokens = size(b.x.dimensions()[0]),
          .hidden = size(b.x.dimensions()[1]),
          .intermediate = size(b.w_gate.dimensions()[2]),
          .num_experts = a.num_experts,
          .top_k = size(b.topk_ids.dimensions()[1])};
}

inline Schedule schedule_of(const ForwardAttributes& a, int32_t workers) {
  return {.tile = {a.tile_rows, a.hidden_columns, a.output_columns},
          .unit_tiles = a.unit_tiles,
          .lag_units = a.lag_units,
          .ring_tiles = a.ring_tiles,
          .workers = workers,
          .chunk_rows = a.chunk_rows,
          .dispatchers = workers * a.dispatchers_per_worker,
          .narrow_rows = a.tile_rows / 2,
          .keep_tokens = a.keep_tokens};
}

inline Activation activation_of(const ForwardAttributes& a) {
  return {static_cast<ActivationKind>(a.activation), a.limit, a.alpha, a.up_offset};
}

// What is wrong with the attributes alone; empty where nothing is.
inline std::string attributes_error(const ForwardAttributes& a) {
  if (a.ranks < 1 || a.ranks > kMaxRanks || a.num_experts < 1 || a.num_experts % a.ranks != 0) {
    return "jaxmoe_forward: num_experts=" + std::to_string(a.num_experts) + " over ranks=" + std::to_string(a.ranks) +
           " is no whole number of experts per rank, or more than " + std::to_string(kMaxRanks) + " ranks.";
  }
  if (a.groups.size() == 0 || a.groups.size() % a.ranks != 0) {
    return "jaxmoe_forward: groups names " + std::to_string(a.groups.size()) + " devices, ranks is " +
           std::to_string(a.ranks) + ". It has to name all devices of the mesh, group by group.";
  }
  return "";
}

// What makes a call impossible; empty where nothing does. Python has checked the same before: this keeps a call that
// does not come from megakernel.py from reading or writing out of bounds.
inline std::string forward_error(const ForwardBuffers& b, const ForwardAttributes& a) {
  const auto rank = [](const xla::ffi::AnyBuffer& buffer) { return buffer.dimensions().size(); };
  if (b.place.element_count() != 2 || rank(b.x) != 2 || rank(b.topk_ids) != 2 || rank(b.w_gate) != 3) {
    return "jaxmoe_forward: place must be [2], x [tokens, hidden], topk_ids [tokens, top_k], w_gate [experts, hidden, "
           "intermediate].";
  }
  if (const std::string error = attributes_error(a); !error.empty()) return error;
  const int64_t tokens = b.x.dimensions()[0], hidden = b.x.dimensions()[1], top_k = b.topk_ids.dimensions()[1];
  const int64_t experts = a.num_experts / a.ranks, intermediate = b.w_gate.dimensions()[2];
  const int64_t matrix = experts * hidden * intermediate;
  const auto is = [](const xla::ffi::AnyBuffer& buffer, int64_t count) {
    return static_cast<int64_t>(buffer.element_count()) == count;
  };
  const auto is_or_none = [&](const xla::ffi::AnyBuffer& buffer, int64_t count) {
    return buffer.element_count() == 0 || is(buffer, count);
  };
  if (!is(b.topk_ids, tokens * top_k) || !is(b.topk_weights, tokens * top_k) || !is(b.w_gate, matrix) ||
      !is_or_none(b.w_up, matrix) || !is(b.w_down, matrix) || !is_or_none(b.b_gate, experts * intermediate) ||
      !is_or_none(b.b_up, experts * intermediate) || !is_or_none(b.b_down, experts * hidden) ||
      !is(b.y, tokens * hidden)) {
    return "jaxmoe_forward: shapes do not go together: x [" + std::to_string(tokens) + ", " + std::to_string(hidden) +
           "], top_k " + std::to_string(top_k) + ", " + std::to_string(experts) + " local experts, intermediate " +
           std::to_string(intermediate) + ".";
  }
  if (tokens * top_k >= kMaxSlots) {
    return "jaxmoe_forward: " + std::to_string(tokens) + " tokens x " + std::to_string(top_k) +
           " slots; a rank can number " + std::to_string(kMaxSlots - 1) + ".";
  }
  const Shape shape = shape_of(b, a);
  const Schedule schedule = schedule_of(a, a.workers);
  if (a.tile_rows < 1 || a.hidden_columns < 1 || a.output_columns < 1 || a.unit_tiles < 1 || a.lag_units < 0 ||
      a.chunk_rows < 1 || a.workers < 0 || a.dispatchers_per_worker < 1 || !(a.timeout_seconds > 0)) {
    return "jaxmoe_forward: tile sizes, unit_tiles, chunk_rows, dispatchers_per_worker and timeout_seconds must be "
           "positive, lag_units and workers not negative.";
  }
  if (a.ring_tiles < schedule.min_ring_tiles() && a.ring_tiles < max_row_tiles(shape, schedule.tile)) {
    return "jaxmoe_forward: ring_tiles=" + std::to_string(a.ring_tiles) +
           " is less than (lag_units + 1) * unit_tiles = " +
           std::to_string(schedule.min_ring_tiles()) + ".";
  }
  return "";
}

}  // namespace jaxmoe

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jaxmoe::ForwardAttributes, xla::ffi::StructMember<int32_t>("ranks"), xla::ffi::StructMember<int32_t>("num_experts"),
    xla::ffi::StructMember<int32_t>("activation"), xla::ffi::StructMember<float>("limit"),
    xla::ffi::StructMember<float>("alpha"), xla::ffi::StructMember<float>("up_offset"),
    xla::ffi::StructMember<int32_t>("tile_rows"), xla::ffi::StructMember<int32_t>("hidden_columns"),
    xla::ffi::StructMember<int32_t>("output_columns"), xla::ffi::StructMember<int32_t>("unit_tiles"),
    xla::ffi::StructMember<int32_t>("lag_units"), xla::ffi::StructMember<int32_t>("ring_tiles"),
    xla::ffi::StructMember<int32_t>("chunk_rows"), xla::ffi::StructMember<int32_t>("workers"),
    xla::ffi::StructMember<int32_t>("dispatchers_per_worker"), xla::ffi::StructMember<int32_t>("keep_tokens"),
    xla::ffi::StructMember<float>("timeout_seconds"),
    xla::ffi::StructMember<xla::ffi::Span<const int64_t>>("groups"));
