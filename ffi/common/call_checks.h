// What must hold of a call on any platform. Python has checked the same before: this keeps a call that does not come
// from jaxmoe from reading or writing out of bounds. What arrays hold is not known here: ids that name no expert are
// slots nobody uses (Shape::has_expert), and the rank in `place`, which only a CPU reads, is checked there.
// Callers: host/layer_handler.cc, cuda/host/call_checks.h. All return what is wrong, empty where nothing is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "common/group_attributes.h"
#include "common/layer_call.h"
#include "common/layout.h"

namespace jaxmoe {

inline std::string attributes_error(const LayerAttributes& a) { return group_error(a); }

inline std::string schedule_error(const Schedule& s) {
  if (s.tile.rows < 1 || s.tile.h_columns < 1 || s.tile.columns < 1 || s.unit_tiles < 1 || s.lag_units < 0 ||
      s.ring_tiles < 1 || s.workers < 0 || s.chunk_rows < 1 || s.dispatchers < s.workers || s.narrow_rows < 0 ||
      s.segment_tiles < 0 || s.saved_tiles < 0 || s.weight_slots < 0 || s.half != 0 ||
      s.frozen < 0 || s.frozen > 1 || s.share_columns < 0 || s.share_columns > 1 || s.summed_tiles < 0) {
    return "jaxmoe: tile sizes, unit_tiles, ring_tiles and chunk_rows must be positive, each worker has to have a "
           "dispatcher, nothing of a schedule can be negative, a layer has no half, and frozen and share_columns are 0 "
           "or 1.";
  }
  if (s.sums_at_experts() && s.backward()) {
    return "jaxmoe: a backward pass makes no sums at experts; summed_tiles=" + std::to_string(s.summed_tiles) +
           " needs to be 0.";
  }
  return "";
}

// The arrays that a call of its pass has, for the experts that it has.
inline std::string names_error(const LayerCall& call, const Schedule& schedule) {
  using Name = ArrayName;
  std::string missing, odd;
  const auto expect = [&](Name name, bool expected) {
    if (call.has(name) == expected) return;
    std::string& text = expected ? missing : odd;
    text += std::string(text.empty() ? "" : ", ") + kArrayNames[static_cast<std::size_t>(name)];
  };
  const bool backward = call.backward();
  for (Name name : {Name::kPlace, Name::kX, Name::kTopkIds, Name::kTopkWeights, Name::kWDown}) expect(name, true);
  expect(Name::kWGate, !is_fused(call));
  for (Name name : {Name::kWUp, Name::kBGate, Name::kBUp, Name::kWGateScales}) {
    if (is_fused(call)) expect(name, false);
  }
  if (!is_fused(call)) expect(Name::kBGateUp, false);
  expect(Name::kY, !backward);
  expect(Name::kDX, backward);
  expect(Name::kDTopkWeights, backward);
  constexpr std::pair<Name, Name> kScales[] = {
      {Name::kWGate, Name::kWGateScales}, {Name::kWUp, Name::kWUpScales}, {Name::kWDown, Name::kWDownScales}};
  for (const auto& [matrix, scales] : kScales) expect(scales, has_scaled_weights(call) && call.has(matrix));
  // Gradients are those of 16-bit products: of weights with scales only a pass that decodes them has some, and none of
  // the weights. Gate and up of rounded tokens are not those of a backward pass, and not kept.
  const bool scaled = has_scaled_weights(call);
  if (scaled && !schedule.decodes()) {
    for (Name name : {Name::kDy, Name::kGateUp}) expect(name, false);
  }
  // Weights in 4 bits are decoded, ahead of the tasks that multiply them or by these.
  constexpr std::pair<Name, Name> kGroupScales[] = {{Name::kWGate, Name::kWGateGroupScales},
                                                    {Name::kWUp, Name::kWUpGroupScales},
                                                    {Name::kWDown, Name::kWDownGroupScales}};
  const bool four_bit = scaled && call.has(Name::kWGateGroupScales);
  for (const auto& [matrix, scales] : kGroupScales) expect(scales, four_bit && call.has(matrix));
  if (!scaled || four_bit || schedule.decodes()) expect(Name::kRowScales, false);
  constexpr std::pair<Name, Name> kGradients[] = {{Name::kWGate, Name::kDWGate}, {Name::kWUp, Name::kDWUp},
                                                  {Name::kWDown, Name::kDWDown}, {Name::kBGate, Name::kDBGate},
                                                  {Name::kBUp, Name::kDBUp},     {Name::kBDown, Name::kDBDown},
                                                  {Name::kWGateUp, Name::kDWGateUp}, {Name::kBGateUp, Name::kDBGateUp}};
  for (const auto& [array, gradient] : kGradients) {
    expect(gradient, schedule.has_weight_gradients() && call.has(array));
  }
  if (missing.empty() && odd.empty()) return "";
  return std::string("jaxmoe: a ") + (backward ? "backward" : "forward") + " pass" +
         (missing.empty() ? "" : " without " + missing) + (odd.empty() ? "" : " with " + odd) +
         ". See ArrayName in ffi/common/layer_arrays.h.";
}

inline std::string dimensions_error(const LayerCall& call, const LayerAttributes& a) {
  using Name = ArrayName;
  const auto rank = [&](Name name) { return call[name]->dimensions().size(); };
  const bool scaled = has_scaled_weights(call), four_bit = call.has(Name::kWGateGroupScales);
  if (call[Name::kPlace]->element_count() != 2 || rank(Name::kX) != 2 || rank(Name::kTopkIds) != 2 ||
      rank(is_fused(call) ? Name::kWGateUp : Name::kWGate) != 3 || (scaled && rank(Name::kWGateScales) != 3)) {
    return "jaxmoe: place must be [2], x [tokens, hidden], topk_ids [tokens, top_k], w_gate [experts, hidden, "
           "intermediate], w_gate_up [experts, hidden, 2 * intermediate], or in 8 bits [experts, intermediate, hidden] "
           "with scales [experts, blocks, blocks].";
  }
  const Schedule schedule = schedule_of(a);
  const int64_t tokens = call.extent(Name::kX, 0), hidden = call.extent(Name::kX, 1);
  const int64_t top_k = call.extent(Name::kTopkIds, 1);
  const int64_t experts = a.num_experts / a.ranks, intermediate = intermediate_of(call);
  const int64_t projections = is_fused(call) || call.has(Name::kWUp) ? 2 : 1;
  const int64_t matrix = experts * hidden * intermediate;
  const int64_t saved = int64_t{schedule.saved_tiles} * schedule.tile.rows * projections * intermediate;
  bool fit = call.has(Name::kGateUp) == (schedule.saved_tiles > 0);
  const auto expect = [&](std::initializer_list<Name> names, int64_t elements) {
    for (Name name : names) {
      if (call.has(name)) fit = fit && static_cast<int64_t>(call[name]->element_count()) == elements;
    }
  };
  expect({Name::kDy, Name::kY, Name::kDX}, tokens * hidden);
  expect({Name::kTopkIds, Name::kTopkWeights, Name::kDTopkWeights}, tokens * top_k);
  const int64_t together = !four_bit ? 1 : weight_format_of(call).repacked != 0 ? 8 : 2;
  expect({Name::kWGate, Name::kWUp, Name::kWDown}, matrix / together);
  expect({Name::kDWGate, Name::kDWUp, Name::kDWDown}, matrix);
  expect({Name::kBGate, Name::kBUp, Name::kDBGate, Name::kDBUp}, experts * intermediate);
  expect({Name::kBDown, Name::kDBDown}, experts * hidden);
  expect({Name::kWGateUp, Name::kDWGateUp}, 2 * matrix);
  expect({Name::kBGateUp, Name::kDBGateUp}, 2 * experts * intermediate);
  expect({Name::kGateUp}, saved);
  expect({Name::kRowScales}, 2);
  if (scaled) {
    const Format weights = weight_format_of(call);
    const auto blocks = [](int64_t extent, int32_t of) { return ceil_div(extent, int64_t{of}); };
    expect({Name::kWGateScales, Name::kWUpScales},
           experts * blocks(intermediate, weights.scale_rows) * blocks(hidden, weights.scale_columns));
    expect({Name::kWDownScales},
           experts * blocks(hidden, weights.scale_rows) * blocks(intermediate, weights.scale_columns));
    // Decoding takes 16 bytes at a time, or whole groups.
    const int64_t multiple = a.rounds_rows != 0   ? kScaleColumns
                             : !four_bit          ? 16
                             : schedule.decodes() ? weights.group_columns
                                                  : kDepthInRegisters;
    fit = fit && hidden % multiple == 0 && intermediate % multiple == 0;
    if (four_bit) {
      expect({Name::kWGateGroupScales, Name::kWUpGroupScales, Name::kWDownGroupScales}, matrix / weights.group_columns);
    }
  }
  if (!fit) {
    return "jaxmoe: shapes do not go together: x [" + std::to_string(tokens) + ", " + std::to_string(hidden) +
           "], top_k " + std::to_string(top_k) + ", " + std::to_string(experts) + " local experts, intermediate " +
           std::to_string(intermediate) + ", saved tiles " + std::to_string(schedule.saved_tiles) + ".";
  }
  const int64_t waiting = int64_t{schedule.summed_tiles} * schedule.tile.rows;
  if (tokens * top_k + waiting >= kMaxSlots) {
    return "jaxmoe: " + std::to_string(tokens) + " tokens x " + std::to_string(top_k) + " slots and " +
           std::to_string(waiting) + " rows to add up; a rank can number " + std::to_string(kMaxSlots - 1) + ".";
  }
  return "";
}

inline std::string types_error(const LayerCall& call) {
  using Name = ArrayName;
  const auto element = element_of(call.type(Name::kX));
  if (!element || info_of(*element).bits < 16) return "jaxmoe: x must be float32, float64, bfloat16 or float16.";
  if (has_scaled_weights(call) && *element == Element::kF64) {
    return "jaxmoe: x is float64; with weights that have scales it must be float32, bfloat16 or float16.";
  }
  bool agree = true;
  const auto expect = [&](std::initializer_list<Name> names, auto is_right) {
    for (Name name : names) {
      if (call.has(name)) agree = agree && is_right(element_of(call.type(name)));
    }
  };
  const Formats formats = Formats::of(*element);
  const bool scaled = has_scaled_weights(call), four_bit = call.has(Name::kWGateGroupScales);
  const Element weight = four_bit ? Element::kE2M1 : scaled ? Element::kE4M3 : *element;
  const auto is_weight = [&](auto type) { return type == weight; };
  const auto is_of_x = [&](auto type) { return type == element; };
  expect({Name::kWGate, Name::kWUp, Name::kWDown, Name::kWGateUp}, is_weight);
  expect({Name::kWGateScales, Name::kWUpScales, Name::kWDownScales, Name::kRowScales},
         [](auto type) { return type == Element::kF32; });
  if (four_bit) {
    for (Name name : {Name::kWUp, Name::kWDown}) {
      agree = agree && (!call.has(name) || call.type(name) == call.type(Name::kWGate));
    }
    const auto groups = element_of(call.type(Name::kWGateGroupScales));
    agree = agree && (groups == Element::kE8M0 || groups == Element::kE4M3);
    expect({Name::kWUpGroupScales, Name::kWDownGroupScales}, [&](auto type) { return type == groups; });
  }
  expect({Name::kBGate, Name::kBUp, Name::kBDown, Name::kBGateUp, Name::kDy, Name::kGateUp, Name::kY, Name::kDX},
         is_of_x);
  expect({Name::kTopkWeights, Name::kDTopkWeights}, [&](auto type) { return type == formats.sums.element; });
  if (call.has(Name::kDWDown)) {
    const auto gradients = element_of(call.type(Name::kDWDown));
    agree = agree && (gradients == element || gradients == formats.sums.element);
    expect({Name::kDWGate, Name::kDWUp, Name::kDBGate, Name::kDBUp, Name::kDBDown, Name::kDWGateUp, Name::kDBGateUp},
           [&](auto type) { return type == gradients; });
  }
  if (!agree || call.type(Name::kTopkIds) != xla::ffi::S32 || call.type(Name::kPlace) != xla::ffi::S32) {
    return "jaxmoe: place and topk_ids must be int32, topk_weights and their gradients " +
           std::string(info_of(formats.sums.element).name) + "; weights, biases, y, dy, dx and what is saved of the "
           "type of x, the other gradients all of that type or all " + info_of(formats.sums.element).name +
           "; weights with scales float8_e4m3fn, and the scales float32, also of rows; weights in 4 bits all uint8, "
           "or all uint32, and the scales of their groups float8_e8m0fnu or float8_e4m3fn.";
  }
  return "";
}

// Rows in 8 bits go with weights in 8 bits, or in 4 that something decodes; others with weights that something decodes.
inline std::string rounding_error(const LayerCall& call, const LayerAttributes& a, const Schedule& schedule) {
  const bool four_bit = call.has(ArrayName::kWGateGroupScales);
  const std::string given = "jaxmoe: rounds_rows=" + std::to_string(a.rounds_rows);
  if (a.rounds_rows != 0 && a.rounds_rows != 1) return given + ". It must be 0 or 1.";
  if (a.rounds_rows == 1 && (!has_scaled_weights(call) || (schedule.decodes() && !four_bit) || call.backward())) {
    return given + ". Rows in 8 bits are those of a forward pass with weights that have scales, and no weight_slots "
                   "where those are in 8 bits.";
  }
  if (a.rounds_rows == 1 && four_bit && !schedule.decodes() &&
      call.type(ArrayName::kWGateGroupScales) != xla::ffi::F8E8M0FNU) {
    return given + ". Weights in 4 bits beside rows in 8 must have weight_slots, or scales of groups that are powers "
                   "of two.";
  }
  if (a.rounds_rows == 1 && four_bit && weight_format_of(call).repacked != 0) {
    return given + " and weights in 4 bits that are repacked (uint32). These are for rows in 16 bits.";
  }
  if (a.rounds_rows == 0 && has_scaled_weights(call) && !four_bit && !schedule.decodes()) {
    return given + ", weights in 8 bits and no weight_slots. They are decoded ahead, or multiplied with rows in 8 "
                   "bits.";
  }
  return "";
}

// Sums that are scaled once need scales that hold for the whole depth.
inline std::string accumulation_error(const LayerCall& call, const LayerAttributes& a, bool rounds_rows) {
  const auto accumulation = static_cast<Accumulation>(a.accumulation);
  if (accumulation == Accumulation::kPromoted) return "";
  const std::string given = "jaxmoe: accumulation=" + std::to_string(a.accumulation);
  if (accumulation != Accumulation::kFast) return given + ". It must be 0 for promoted sums, 1 for fast ones.";
  const int64_t depth = std::max(intermediate_of(call), call.extent(ArrayName::kX, 1));
  const bool one_scale = rounds_rows && call.has(ArrayName::kRowScales) &&
                         (weight_format_of(call).scale_columns == kAllOfThem || depth <= kScaleColumns);
  if (one_scale) return "";
  return given + ". Sums by the tensor cores alone are scaled once: they need row_scales, and weights in 8 bits with a "
                 "scale for each output channel or each matrix.";
}

inline std::string call_error(const LayerCall& call, const LayerAttributes& a) {
  if (std::string error = attributes_error(a); !error.empty()) return error;
  const Schedule schedule = schedule_of(a);
  if (std::string error = schedule_error(schedule); !error.empty()) return error;
  if (std::string error = names_error(call, schedule); !error.empty()) return error;
  const auto layout = static_cast<GateUpLayout>(a.gate_up_layout);
  const bool known = layout == GateUpLayout::kApart || layout == GateUpLayout::kHalves ||
                     layout == GateUpLayout::kInterleaved;
  if (!known || is_fused(call) != (layout != GateUpLayout::kApart)) {
    return "jaxmoe: gate_up_layout=" + std::to_string(a.gate_up_layout) + (is_fused(call) ? " with" : " without") +
           " w_gate_up. It must be 0 for gate and up in two arrays, 1 for halves of one, 2 for columns in turn.";
  }
  if (call.backward() != schedule.backward()) {
    return "jaxmoe: segment_tiles=" + std::to_string(schedule.segment_tiles) +
           "; it must be positive for jaxmoe_backward and 0 for jaxmoe_forward.";
  }
  if (std::string error = dimensions_error(call, a); !error.empty()) return error;
  if (std::string error = types_error(call); !error.empty()) return error;
  if (schedule.decodes() && !has_scaled_weights(call)) {
    return "jaxmoe: weight_slots=" + std::to_string(schedule.weight_slots) +
           " and weights without scales, which need no decoding. It must be 0.";
  }
  if (std::string error = rounding_error(call, a, schedule); !error.empty()) return error;
  const bool rounds_rows = a.rounds_rows != 0;
  if (std::string error = accumulation_error(call, a, rounds_rows); !error.empty()) return error;
  if (rounds_rows && schedule.tile.h_columns % kScaleColumns != 0) {
    return "jaxmoe: h_columns=" + std::to_string(schedule.tile.h_columns) +
           " of a tile; with weights in 8 bits it must be a multiple of " + std::to_string(kScaleColumns) +
           ", so that the columns of a scale are in one tile.";
  }
  if (schedule.ring_tiles < schedule.min_ring_tiles() &&
      schedule.ring_tiles < max_row_tiles(shape_of(call, a), schedule.tile)) {
    return "jaxmoe: ring_tiles=" + std::to_string(schedule.ring_tiles) + " is less than the " +
           std::to_string(schedule.min_ring_tiles()) + " that unit_tiles, lag_units and segment_tiles need.";
  }
  if (schedule.decodes() && schedule.weight_slots < schedule.min_weight_slots() &&
      schedule.weight_slots < a.num_experts / a.ranks) {
    return "jaxmoe: weight_slots=" + std::to_string(schedule.weight_slots) + " is less than the " +
           std::to_string(schedule.min_weight_slots()) + " that lag_units needs.";
  }
  return "";
}

}  // namespace jaxmoe
