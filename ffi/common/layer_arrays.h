// The arrays of a layer on one rank: their names, which Python shares, and where they lie. Null or left out where a
// layer has no such array: plain experts have no up projection, many have no biases.
#pragma once

#include <cstdint>

#include "common/shape.h"

namespace jaxmoe {

// In the order of operands, then of results, of a call. A call names those that it has as the bits of a number.
enum class ArrayName : int32_t {
  kPlace = 0,    // int32[2]: rank in the group, number of the group; GPUs ask the communicator
  kX,            // [tokens, hidden]
  kTopkIds,      // [tokens, top_k] int32 in [0, num_experts), or any other for a slot nobody uses
  kTopkWeights,  // [tokens, top_k], as wide as sums
  kWGate,        // [local_experts, hidden, intermediate]
  kWUp,          // the same
  kWDown,        // [local_experts, intermediate, hidden]
  kBGate,        // [local_experts, intermediate]
  kBUp,          // the same
  kBDown,        // [local_experts, hidden]
  // In the place of both of gate and up, in one array: GateUpLayout.
  kWGateUp,      // [local_experts, hidden, 2 * intermediate]
  kBGateUp,      // [local_experts, 2 * intermediate]
  // float32 of weights in 8 bits or fewer, whose matrices then lie the other way round: [local_experts, columns,
  // rows]. The scales have a row for each block of columns of a matrix, and a column for each block of its rows.
  kWGateScales,
  kWUpScales,
  kWDownScales,
  // Of weights in 4 bits, which lie the same way with two in a byte, the even row of the matrix in its lower half: a
  // float8_e8m0fnu for 32 rows of a matrix (MXFP4), or a float8_e4m3fn for 16 (NVFP4): [local_experts, columns,
  // groups]. Of MXFP4 the float32 scales have to be one: kernels do not read them all.
  kWGateGroupScales,
  kWUpGroupScales,
  kWDownGroupScales,
  // float32[2], of rows in 8 bits: the scale of all tokens and that of all h. Without it every 128 columns have one of
  // their own.
  kRowScales,
  kDy,           // [tokens, hidden], of a backward pass
  // [saved_tiles * tile rows, projections * intermediate]: gate and up, which a forward pass may write and the backward
  // pass then reads; how they lie is between the two.
  kGateUp,
  // Results: y of a forward pass; the gradients of the arrays above, of their shapes, of a backward pass.
  kY,
  kDX,
  kDTopkWeights,
  kDWGate,
  kDWUp,
  kDWDown,
  kDBGate,
  kDBUp,
  kDBDown,
  kDWGateUp,
  kDBGateUp,
  kCount
};
inline constexpr int32_t kNumArrays = static_cast<int32_t>(ArrayName::kCount);
inline constexpr const char* kArrayNames[kNumArrays] = {
    "place",         "x",            "topk_ids",     "topk_weights", "w_gate",  "w_up",  "w_down", "b_gate",
    "b_up",          "b_down",       "w_gate_up",     "b_gate_up",    "w_gate_scales", "w_up_scales", "w_down_scales",
    "w_gate_group_scales", "w_up_group_scales", "w_down_group_scales", "row_scales", "dy", "gate_up", "y",
    "dx",            "dtopk_weights", "dw_gate",      "dw_up",        "dw_down", "db_gate", "db_up", "db_down",
    "dw_gate_up",    "db_gate_up"};

// How gate and up lie, in matrices, in biases and in the gradients of both: in two arrays, or in one whose rows have
// those of gate first and those of up in their second half, or a column of gate and one of up in turn.
enum class GateUpLayout : int32_t { kApart = 0, kHalves, kInterleaved };

// Of what gate, up and down each have, that of matrix number `which`; of experts without up, down is the second one.
template <class Each>
JAXMOE_ANY constexpr Each of_matrix(int32_t which, int32_t projections, Each gate, Each up, Each down) {
  return which == projections ? down : which == 0 ? gate : up;
}

// `T` is how an element is stored, `Sum` what sums are, `W` how an element of a weight matrix is stored. Where gate and
// up are one array, that of gate is where it begins, and that of up where the second half of its first row does, also
// of one whose columns take turns.
template <class T, class Sum, class W = T>
struct LayerArrays {
  GateUpLayout gate_up_layout = GateUpLayout::kApart;
  const T* x = nullptr;
  const int32_t* topk_ids = nullptr;
  const Sum* topk_weights = nullptr;
  const W* w_gate = nullptr;
  const W* w_up = nullptr;
  const W* w_down = nullptr;
  const T* b_gate = nullptr;
  const T* b_up = nullptr;
  const T* b_down = nullptr;
  const float* w_gate_scales = nullptr;
  const float* w_up_scales = nullptr;
  const float* w_down_scales = nullptr;
  const uint8_t* w_gate_group_scales = nullptr;
  const uint8_t* w_up_group_scales = nullptr;
  const uint8_t* w_down_group_scales = nullptr;
  const float* row_scales = nullptr;  // of all tokens, then of all h
  const T* dy = nullptr;
  T* gate_up = nullptr;
  T* y = nullptr;
  T* dx = nullptr;
  Sum* dtopk_weights = nullptr;
  bool wide_gradients = false;  // those below are Sum, else T
  void* dw_gate = nullptr;
  void* dw_up = nullptr;
  void* dw_down = nullptr;
  void* db_gate = nullptr;
  void* db_up = nullptr;
  void* db_down = nullptr;

  // What all tokens and all h are divided by before they are rounded, or null where each 128 columns have their own.
  JAXMOE_ANY const float* scale_of_tokens() const { return row_scales; }
  JAXMOE_ANY const float* scale_of_h() const { return row_scales == nullptr ? nullptr : row_scales + 1; }
  JAXMOE_ANY bool fused() const { return gate_up_layout != GateUpLayout::kApart; }
  JAXMOE_ANY bool interleaved() const { return gate_up_layout == GateUpLayout::kInterleaved; }
  // Columns from a row of gate or of up to the next one, each of so many columns.
  JAXMOE_ANY int32_t gate_up_pitch(int32_t intermediate) const { return fused() ? 2 * intermediate : intermediate; }
};

}  // namespace jaxmoe
