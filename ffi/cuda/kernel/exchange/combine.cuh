// Combine: announces that this rank's experts have answered, waits for the experts of all ranks, and adds up the
// answers to each token with its routing weights, in float32 and in the order of its slots.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::combine {

// One thread of the rank.
template <class Variant>
__device__ void announce(const Cta<Variant>& cta) {
  const uint32_t workers = cta.shared.crew.workers;
  const auto track = cta.timeline.template track<32>(TrackRole::kDispatch);
  track.start();
  // Pairs with the release of every math warp in TaskQueue::finish().
  cta.signals.wait_for_tasks({Signal::kTasksDone, 0, workers}, Site::kAnnounce);
  // The same of latecomers, some of whose tasks may not be done.
  const uint32_t all_workers = crew::workers_with_tasks(cta.signals.control());
  if (all_workers > workers) {
    cta.signals.wait_for_tasks({Signal::kTasksDone, 0, all_workers}, Site::kAnnounce);
  }
  track.mark(EventKind::kWaitTasks);
  cta.signals.release_to_all(Signal::kAnswersReady);
}

// A lane loads 4 slots of 4 vectors at a time, 256 bytes: enough in flight to use what memory can deliver, whatever
// top_k is.
inline constexpr int kSlotsAtOnce = 4;
inline constexpr int kGroups = 4;

// Vectors of a token that a warp adds up at a time.
inline constexpr int32_t kVectorsAtOnce = 32 * kGroups;

// y[token] = sum over its slots of routing weight * answer, every `stride` vectors the kVectorsAtOnce from `begin` on.
// `routing_weight` is that of the slot of each lane, `used` has a bit for each slot that has an answer.
template <class Variant>
__device__ __forceinline__ void add_up(const uint4* answers, uint4* y, int32_t begin, int32_t stride, int32_t vectors,
                                       int32_t top_k, float routing_weight, uint32_t used, int lane) {
  using Precision = typename Variant::Precision::Wide;
  for (int32_t start = begin; start < vectors; start += stride) {
    const int32_t first = start + lane;
    float sums[kGroups][8];
#pragma unroll
    for (auto& group : sums) {
#pragma unroll
      for (float& sum : group) sum = 0.0f;
    }
#pragma unroll 1
    for (int32_t slot = 0; slot < top_k; slot += kSlotsAtOnce) {
      uint4 values[kGroups][kSlotsAtOnce];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kSlotsAtOnce; ++i) {
          if (first + 32 * g < vectors && (used >> (slot + i) & 1)) {
            values[g][i] = ptx::load_once(answers + int64_t{slot + i} * vectors + first + 32 * g);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) {
        const float w = __shfl_sync(0xffffffff, routing_weight, slot + i);
        if (!(used >> (slot + i) & 1)) continue;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint32_t words[4] = {values[g][i].x, values[g][i].y, values[g][i].z, values[g][i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 pair = Precision::unpack(words[j]);
            sums[g][2 * j] += w * pair.x;
            sums[g][2 * j + 1] += w * pair.y;
          }
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (first + 32 * g < vectors) {
        y[first + 32 * g] = {Precision::pack(sums[g][0], sums[g][1]), Precision::pack(sums[g][2], sums[g][3]),
                             Precision::pack(sums[g][4], sums[g][5]), Precision::pack(sums[g][6], sums[g][7])};
      }
    }
  }
}

__device__ __forceinline__ void* result_of(const ForwardParams& params) { return params.y; }
__device__ __forceinline__ void* result_of(const BackwardParams& params) { return params.dx; }
__device__ __forceinline__ void* result_of(const ExchangeParams& params) { return params.y; }
__device__ __forceinline__ void* result_of(const MatmulParams& params) { return params.y; }

// Whether a slot has an answer: one that names an expert, or whose row has found room.
__device__ __forceinline__ bool is_used_slot(const LaunchParams& params, int64_t slot) {
  return params.shape.has_expert(params.topk_ids[slot]);
}
__device__ __forceinline__ bool is_used_slot(const ExchangeArrays<float>& params, int64_t slot) {
  return params.slot_rows[slot] >= 0;
}
__device__ __forceinline__ float routing_weight_of(const LaunchParams& params, int64_t slot) {
  return params.topk_weights[slot];
}
__device__ __forceinline__ float routing_weight_of(const ExchangeArrays<float>& params, int64_t slot) {
  return params.weights == nullptr ? 1.0f : params.weights[slot];
}

// Until all ranks have announced. All lanes of every math warp of the crew.
template <class Variant>
__device__ __forceinline__ void wait_for_answers(const Cta<Variant>& cta, int math_warp, int lane) {
  if (math_warp == 0 && lane < cta.params.shape.ranks) {
    // Pairs with release_to_all(kAnswersReady) in announce() of that source.
    cta.signals.wait({Signal::kAnswersReady, lane, cta.signals.launch_number()}, Site::kCombine, kLongNapNs);
  }
  ptx::named_barrier<1, Roles::kMathThreads>();
}

// All lanes of every math warp.
template <class Variant>
__device__ void run(const Cta<Variant>& cta, int math_warp, int lane) {
  constexpr int kMathWarps = Roles::kMathWarps;
  if (cta.is_latecomer()) return;  // tokens are dealt in advance
  const auto& p = cta.params;
  const auto track = cta.timeline.template track<128>(TrackRole::kMath, math_warp / Roles::kWarpgroupWarps);
  wait_for_answers(cta, math_warp, lane);
  track.mark(EventKind::kWaitAnswers);
  const uint4* all_answers = cta.template at<uint4>(p.layout.answers);
  const int32_t vectors = p.shape.hidden / 8;
  const int32_t top_k = p.shape.top_k;
  // Where there are more warps than tokens, several share a token, on as many multiprocessors as there are.
  const int32_t warps = cta.blocks() * kMathWarps;
  const int32_t sharing = p.shape.tokens > 0 && p.shape.tokens < warps ? warps / p.shape.tokens : 1;
  const int32_t parts = at_most(ceil_div(vectors, kVectorsAtOnce), sharing);
  for (int32_t item = math_warp * cta.blocks() + cta.block(); item < p.shape.tokens * parts; item += warps) {
    const int32_t token = item / parts;
    const int32_t part = item % parts;
    const bool has_slot = lane < top_k;
    const int64_t slot = int64_t{token} * top_k + lane;
    const bool is_used = has_slot && is_used_slot(p, slot);
    const uint32_t used = __ballot_sync(0xffffffff, is_used);
    float routing_weight = 1.0f;  // in a backward pass the answers have it in them
    if constexpr (Cta<Variant>::kBackward) {
      const float* gradients = cta.template at<float>(p.layout.routing_weight_gradients);
      if (has_slot && part == 0) p.dtopk_weights[slot] = is_used ? __ldcg(gradients + slot) : 0.0f;
    } else {
      routing_weight = has_slot ? routing_weight_of(p, slot) : 0.0f;
    }
    const uint4* answers = all_answers + int64_t{token} * top_k * vectors;
    uint4* y = static_cast<uint4*>(result_of(p)) + int64_t{token} * vectors;
    add_up<Variant>(answers, y, part * kVectorsAtOnce, parts * kVectorsAtOnce, vectors, top_k, routing_weight, used,
                    lane);
  }
  track.mark(EventKind::kCombine);
}

}  // namespace jaxmoe::combine
