// The host executor: one rank's part of one layer or of its gradients, with CPU threads in the place of thread blocks.
// It walks the same task stream (common/scheduler.h), in the same arena (common/layout.h), with the same signals
// (common/protocol.h) as the GPU kernel, so that what goes wrong there can be found here, under ThreadSanitizer and
// with delays at every signal.
//
// Callers: host/layer_handler.cc (XLA:CPU) and host/executor_bindings.cc (tests).
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

  const Storage* x = nullptr;             // [tokens, hidden]
  const int32_t* topk_ids = nullptr;      // [tokens, top_k], -1 for an unused slot
  const Number* topk_weights = nullptr;   // [tokens, top_k]
  const Storage* w_gate = nullptr;        // [local_experts, hidden, intermediate]
  const Storage* w_up = nullptr;          // the same
  const Storage* w_down = nullptr;        // [local_experts, intermediate, hidden]
  const Storage* b_gate = nullptr;        // [local_experts, intermediate]
  const Storage* b_up = nullptr;          // the same
  const Storage* b_down = nullptr;        // [local_experts, hidden]
  Storage* y = nullptr;                   // [tokens, hidden]; of a forward pass
  // [saved_tiles, tile rows, projections, intermediate]: gate and up, written by a forward and read by a backward pass.
  Storage* saved = nullptr;

  // Of a backward pass: the gradient of the outputs, and those of everything above, of the same shapes.
  const Storage* dy = nullptr;
  Storage* dx = nullptr;
  Number* dtopk_weights = nullptr;
  bool wide_gradients = false;  // those below are Number, else Storage
  void* dw_gate = nullptr;
  void* dw_up = nullptr;
  void* dw_down = nullptr;
  void* db_gate = nullptr;
  void* db_up = nullptr;
  void* db_down = nullptr;
};

// Computes the results in `arrays` for rank `rank`, of the pass that the schedule is for; blocks until it is done.
// Returns what went wrong, empty where nothing did. What happened when is written to `timeline`, which may be null.
template <class Format>
std::string run_rank(const Launch& launch, int32_t rank, const LayerArrays<Format>& arrays,
                     LaunchTimeline* timeline = nullptr);

extern template std::string run_rank<F32>(const Launch&, int32_t, const LayerArrays<F32>&, LaunchTimeline*);
extern template std::string run_rank<F64>(const Launch&, int32_t, const LayerArrays<F64>&, LaunchTimeline*);
extern template std::string run_rank<Bf16>(const Launch&, int32_t, const LayerArrays<Bf16>&, LaunchTimeline*);
extern template std::string run_rank<F16>(const Launch&, int32_t, const LayerArrays<F16>&, LaunchTimeline*);

}  // namespace jaxmoe::host
