// What a call must be for the CUDA kernels, beyond what it must be on any platform (common/layer_call.h): alike on all
// devices, so that XLA may hear of it at once. Caller: cuda/host/layer_handler.cu.
#pragma once

#include <string>

#include "common/layer_call.h"
#include "common/layout.h"
#include "cuda/device/rank_params.cuh"

namespace jaxmoe {

// What this kernel cannot do, beyond what no part of jaxmoe can.
inline std::string limits_error(const LayerAttributes& a) {
  if (a.ranks <= kMaxPeers && a.num_experts <= kMaxExperts && a.num_experts / a.ranks <= kMaxLocalExperts) return "";
  return "jaxmoe: " + std::to_string(a.num_experts) + " experts over " + std::to_string(a.ranks) +
         " ranks; on GPUs there can be " + std::to_string(kMaxExperts) + " experts, " +
         std::to_string(kMaxLocalExperts) + " per rank, and " + std::to_string(kMaxPeers) + " ranks.";
}

inline std::string types_error(const LayerBuffers& b) {
  using Buffers = LayerBuffers;
  const xla::ffi::DataType type = b[Buffers::kX].element_type();
  if (type != xla::ffi::BF16 && type != xla::ffi::F16) return "jaxmoe: on GPUs x must be bfloat16 or float16.";
  bool agree = true;
  const auto check = [&](const xla::ffi::AnyBuffer& buffer) { agree = agree && buffer.element_type() == type; };
  for (int i = Buffers::kWGate; i <= Buffers::kBDown; ++i) check(b[static_cast<Buffers::Operand>(i)]);
  if (b.backward()) {
    check(b[Buffers::kDy]);
    check(b[Buffers::kDX]);
    const xla::ffi::DataType gradients = b[Buffers::kDWGate].element_type();
    agree = agree && (gradients == type || gradients == xla::ffi::F32);
    for (int i = Buffers::kDWGate; i < Buffers::kGradients; ++i) {
      agree = agree && b[static_cast<Buffers::Gradient>(i)].element_type() == gradients;
    }
  } else {
    check(b.y());
  }
  if (b.saved() != nullptr) check(*b.saved());
  if (!agree) return "jaxmoe: weights, biases, y, dx and what is saved must be of the type of x, the other "
           "gradients all of that type or all float32.";
  if (b[Buffers::kTopkIds].element_type() != xla::ffi::S32 ||
      b[Buffers::kTopkWeights].element_type() != xla::ffi::F32 ||
      (b.backward() && b[Buffers::kDTopkWeights].element_type() != xla::ffi::F32)) {
    return "jaxmoe: topk_ids must be int32, topk_weights and their gradients float32.";
  }
  return "";
}

// What is wrong with a call on any device.
inline std::string call_error(const LayerBuffers& buffers, const LayerAttributes& attributes) {
  for (const std::string& error : {layer_error(buffers, attributes), limits_error(attributes), types_error(buffers)}) {
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace jaxmoe
