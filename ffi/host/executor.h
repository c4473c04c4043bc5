// The host executor: one rank's part of one layer or of its gradients, with CPU threads in the place of thread blocks.
// It walks the same task stream (common/scheduler.h), in the same arena (common/layout.h), with the same signals
// (common/protocol.h) as the GPU kernel, so that what goes wrong there can be found here, under ThreadSanitizer and
// with delays at every signal.
//
// Callers: host/layer_handler.cc (XLA:CPU) and host/executor_bindings.cc (tests).
#pragma once

#include <cstdint>
#include <string>

#include "common/layer_arrays.h"
#include "common/timeline.h"
#include "host/launch.h"
#include "host/precision.h"

namespace jaxmoe::host {

template <class Precision>
using ArraysOf =
    LayerArrays<typename Precision::Storage, typename Precision::Number, typename Precision::Weight::Storage>;

// Computes the results in `arrays` for rank `rank`, of the pass that the schedule is for; blocks until it is done. A
// precision with scales has forward passes only.
// Returns what went wrong, empty where nothing did. What happened when is written to `timeline`, which may be null.
template <class Precision>
std::string run_rank(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays,
                     LaunchTimeline* timeline = nullptr);

extern template std::string run_rank<F32>(const Launch&, int32_t, const ArraysOf<F32>&, LaunchTimeline*);
extern template std::string run_rank<F64>(const Launch&, int32_t, const ArraysOf<F64>&, LaunchTimeline*);
extern template std::string run_rank<Bf16>(const Launch&, int32_t, const ArraysOf<Bf16>&, LaunchTimeline*);
extern template std::string run_rank<F16>(const Launch&, int32_t, const ArraysOf<F16>&, LaunchTimeline*);
extern template std::string run_rank<EightBit<F32>>(const Launch&, int32_t, const ArraysOf<EightBit<F32>>&,
                                                    LaunchTimeline*);
extern template std::string run_rank<EightBit<Bf16>>(const Launch&, int32_t, const ArraysOf<EightBit<Bf16>>&,
                                                     LaunchTimeline*);
extern template std::string run_rank<EightBit<F16>>(const Launch&, int32_t, const ArraysOf<EightBit<F16>>&,
                                                    LaunchTimeline*);
extern template std::string run_rank<Decoded<F32>>(const Launch&, int32_t, const ArraysOf<Decoded<F32>>&,
                                                   LaunchTimeline*);
extern template std::string run_rank<Decoded<Bf16>>(const Launch&, int32_t, const ArraysOf<Decoded<Bf16>>&,
                                                    LaunchTimeline*);
extern template std::string run_rank<Decoded<F16>>(const Launch&, int32_t, const ArraysOf<Decoded<F16>>&,
                                                   LaunchTimeline*);

}  // namespace jaxmoe::host
