// The host executor: one rank's part of one layer, with CPU threads in the place of thread blocks. It walks the same
// task stream (common/scheduler.h), in the same arena (common/layout.h), with the same signals (common/protocol.h) as
// the GPU kernel, so that what goes wrong there can be found here, under ThreadSanitizer and with delays at every
// signal.
//
// Callers: host/forward.cc (XLA:CPU) and host/executor_bindings.cc (tests).
#pragma once

#include <cstdint>
#include <string>

#include "common/timeline.h"
#include "host/launch.h"
#include "host/precision.h"

namespace jaxmoe::host {

// The arrays of one rank. Null where there is no such array (plain experts, no biases).
template <class Format>
struct LayerArrays {
  using Storage = typename Format::Storage;
  using Number = typename Format::Number;

  const Storage* x;             // [tokens, hidden]
  const int32_t* topk_ids;      // [tokens, top_k], -1 for an unused slot
  const Number* topk_weights;   // [tokens, top_k]
  const Storage* w_gate;        // [local_experts, hidden, intermediate]
  const Storage* w_up;          // the same
  const Storage* w_down;        // [local_experts, intermediate, hidden]
  const Storage* b_gate;        // [local_experts, intermediate]
  const Storage* b_up;          // the same
  const Storage* b_down;        // [local_experts, hidden]
  Storage* y;                   // [tokens, hidden]
};

// Computes `arrays.y` for rank `rank`; blocks until it is done. Returns what went wrong, empty where nothing did. What
// happened when is written to `timeline`, which may be null.
template <class Format>
std::string run_rank(const Launch& launch, int32_t rank, const LayerArrays<Format>& arrays,
                     LaunchTimeline* timeline = nullptr);

extern template std::string run_rank<F32>(const Launch&, int32_t, const LayerArrays<F32>&, LaunchTimeline*);
extern template std::string run_rank<F64>(const Launch&, int32_t, const LayerArrays<F64>&, LaunchTimeline*);
extern template std::string run_rank<Bf16>(const Launch&, int32_t, const LayerArrays<Bf16>&, LaunchTimeline*);
extern template std::string run_rank<F16>(const Launch&, int32_t, const LayerArrays<F16>&, LaunchTimeline*);

}  // namespace jaxmoe::host
