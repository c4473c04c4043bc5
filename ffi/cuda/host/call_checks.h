// What a call must be for the CUDA kernels, beyond what it must be on any platform (common/call_checks.h): alike on all
// devices, so that XLA may hear of it at once. Caller: cuda/host/layer_handler.cc.
#pragma once

#include <string>

#include "common/call_checks.h"
#include "common/exchange_call.h"
#include "common/layout.h"
#include "cuda/device/rank_params.cuh"

namespace jaxmoe {

// Elements of 16 bits in the 16 bytes that are copied at once; slots of a token, one to a lane.
inline constexpr int64_t kRowMultiple = 8;
inline constexpr int32_t kMostSlotsOfToken = 32;

// Pairs of multiprocessors that an exchange may take beside other work: so that kernels which wait for their peers find
// some, whatever it waits for itself (ffi/kernel.md, "Beside other work").
inline constexpr int32_t kMostWorkersBeside = 32;

// What this kernel cannot do, beyond what no part of jaxmoe can.
template <class Attributes>
std::string limits_error(const Attributes& a) {
  if (a.ranks <= kMaxPeers && a.num_experts <= kMaxExperts && a.num_experts / a.ranks <= kMaxLocalExperts) return "";
  return "jaxmoe: " + std::to_string(a.num_experts) + " experts over " + std::to_string(a.ranks) +
         " ranks; on GPUs there can be " + std::to_string(kMaxExperts) + " experts, " +
         std::to_string(kMaxLocalExperts) + " per rank, and " + std::to_string(kMaxPeers) + " ranks.";
}

inline std::string element_error(Element of_tokens) {
  if (of_tokens == Element::kBf16 || of_tokens == Element::kF16) return "";
  return std::string("jaxmoe: tokens are ") + info_of(of_tokens).name + "; on GPUs they must be bfloat16 or float16.";
}

// Answers are added up at experts by kernels of their own, which not all formats have. A lane has each of what is added
// up for a token: the sums of ranks, and answers that travelled on their own.
inline std::string sums_error(const LayerCall& call, const LayerAttributes& attributes, const Formats& formats) {
  const Schedule schedule = schedule_of(attributes);
  if (!schedule.sums_at_experts()) return "";
  const int64_t top_k = call.extent(ArrayName::kTopkIds, 1);
  const bool has_kernel = !formats.decodes() && (!formats.tokens.is_scaled() ||
                                                 (formats.answers.element == Element::kBf16 &&
                                                  formats.accumulation == Accumulation::kPromoted));
  if (has_kernel && attributes.ranks + top_k <= kMostSlotsOfToken) return "";
  return "jaxmoe: summed_tiles=" + std::to_string(schedule.summed_tiles) + " beside " +
         std::to_string(attributes.ranks) + " ranks and top_k=" + std::to_string(top_k) + "; on GPUs both can be " +
         std::to_string(kMostSlotsOfToken) + " together where answers are added up at experts, of layers in 16 bits or "
         "with tokens in 8 bits, x in bfloat16 and promoted sums.";
}

// What is wrong with a call on any device; empty where nothing is.
inline std::string gpu_call_error(const LayerCall& call, const LayerAttributes& attributes) {
  for (const std::string& error : {call_error(call, attributes), limits_error(attributes)}) {
    if (!error.empty()) return error;
  }
  const Element element = *element_of(call.type(ArrayName::kX));
  if (std::string error = element_error(element); !error.empty()) return error;
  const Formats formats = formats_of(call, attributes);
  if (formats.decodes() && !schedule_of(attributes).decodes() && element != Element::kBf16) {
    return std::string("jaxmoe: weight_slots=0, weights in 4 bits and x in ") + info_of(element).name +
           "; without slots for decoded weights it must be bfloat16.";
  }
  if (formats.decodes() && formats.tokens.is_scaled() && element != Element::kBf16) {
    return "jaxmoe: rounds_rows=" + std::to_string(attributes.rounds_rows) + ", weights in 4 bits and x in " +
           info_of(element).name + "; beside rows in 8 bits it must be bfloat16.";
  }
  return sums_error(call, attributes, formats);
}

inline std::string gpu_call_error(const ExchangeCall& call, const ExchangeAttributes& attributes) {
  for (const std::string& error : {call_error(call, attributes), limits_error(attributes)}) {
    if (!error.empty()) return error;
  }
  const int64_t hidden = call.extent(tokens_of(call), 1), width = call.extent(rows_of(call), 1);
  if (hidden % kRowMultiple != 0 || width % kRowMultiple != 0 || attributes.top_k > kMostSlotsOfToken) {
    return "jaxmoe: hidden=" + std::to_string(hidden) + ", width=" + std::to_string(width) +
           ", top_k=" + std::to_string(attributes.top_k) +
           "; on GPUs rows are copied in pieces of " + std::to_string(kRowMultiple) +
           " elements, and a token can have " + std::to_string(kMostSlotsOfToken) + " slots.";
  }
  if (const int32_t workers = schedule_of(attributes).workers; workers > (call.multiplies() ? 0 : kMostWorkersBeside)) {
    return "jaxmoe: workers=" + std::to_string(workers) + "; an exchange beside other work can have " +
           std::to_string(kMostWorkersBeside) + " pairs of multiprocessors, one with a product has all.";
  }
  return element_error(*element_of(call.type(tokens_of(call))));
}

}  // namespace jaxmoe
