// What a call must be for the CUDA kernels, beyond what it must be on any platform (common/call_checks.h): alike on all
// devices, so that XLA may hear of it at once. Caller: cuda/host/layer_handler.cu.
#pragma once

#include <string>

#include "common/call_checks.h"
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

// What is wrong with a call on any device; empty where nothing is.
inline std::string gpu_call_error(const LayerCall& call, const LayerAttributes& attributes) {
  for (const std::string& error : {call_error(call, attributes), limits_error(attributes)}) {
    if (!error.empty()) return error;
  }
  const Element element = *element_of(call.type(ArrayName::kX));
  if (element != Element::kBf16 && element != Element::kF16) {
    return std::string("jaxmoe: x is ") + info_of(element).name + "; on GPUs it must be bfloat16 or float16.";
  }
  const Schedule schedule = schedule_of(attributes);
  if (formats_of(call, schedule).decodes() && !schedule.decodes() && element != Element::kBf16) {
    return std::string("jaxmoe: weight_slots=0, weights in 4 bits and x in ") + info_of(element).name +
           "; without slots for decoded weights it must be bfloat16.";
  }
  return "";
}

}  // namespace jaxmoe
