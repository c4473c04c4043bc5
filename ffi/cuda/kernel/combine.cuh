// Combine: announces that this rank's experts have answered, waits for the experts of all ranks, and adds up the
// answers to each token with its routing weights, in float32 and in the order of its slots.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/dispatch.cuh"

namespace jaxmoe::combine {

// One thread of the rank.
template <class Variant>
__device__ void announce(const Cta<Variant>& cta) {
  const uint32_t workers = cta.params.schedule.workers;
  // Pairs with the last release of every math warp in math::run().
  cta.signals.wait({Signal::kTasksDone, 0, workers}, Site::kAnnounce, Cta<Variant>::kTaskParts);
  cta.signals.release_to_all(Signal::kPartialsWritten);
}

// All lanes of every math warp.
template <class Variant>
__device__ void run(const Cta<Variant>& cta, int math_warp, int lane) {
  using Precision = typename Variant::Precision;
  constexpr int kMathWarps = 4 * Variant::config.math_warpgroups;
  constexpr int kSlotsAtOnce = 8;
  const ForwardParams& p = cta.params;
  if (math_warp == 0 && lane < p.shape.ranks) {
    // Pairs with release_to_all(kPartialsWritten) in announce() of that source.
    cta.signals.wait({Signal::kPartialsWritten, lane, cta.signals.epoch()}, Site::kCombine, 1, Signals::kLongNapNs);
  }
  ptx::named_barrier<1, 32 * kMathWarps>();
  const float poison = cta.signals.given_up() ? __uint_as_float(0x7fffffffu) : 0.0f;  // NaN: what follows is rubbish
  const uint4* partials = cta.template at<uint4>(p.layout.partials);
  uint4* y = static_cast<uint4*>(p.y);
  const int32_t vectors = p.shape.hidden / 8;
  const int32_t top_k = p.shape.top_k;
  for (int32_t token = blockIdx.x * kMathWarps + math_warp; token < p.shape.tokens; token += gridDim.x * kMathWarps) {
    const bool has_slot = lane < top_k;
    const float weight = has_slot ? p.topk_weights[int64_t{token} * top_k + lane] : 0.0f;
    const uint32_t used = __ballot_sync(0xffffffff, has_slot && p.topk_ids[int64_t{token} * top_k + lane] >= 0);
    const uint4* of_token = partials + int64_t{token} * top_k * vectors;
    for (int32_t first = 0; first < vectors; first += 32) {
      const int32_t vector = first + lane;
      const bool inside = vector < vectors;
      float sums[8];
#pragma unroll
      for (float& sum : sums) sum = poison;
#pragma unroll 1
      for (int32_t slot = 0; slot < top_k; slot += kSlotsAtOnce) {
        uint4 values[kSlotsAtOnce];
#pragma unroll
        for (int i = 0; i < kSlotsAtOnce; ++i) {
          if (inside && (used >> (slot + i) & 1)) {
            values[i] = dispatch::load_once(of_token + int64_t{slot + i} * vectors + vector);
          }
        }
#pragma unroll
        for (int i = 0; i < kSlotsAtOnce; ++i) {
          const float w = __shfl_sync(0xffffffff, weight, slot + i);
          if (inside && (used >> (slot + i) & 1)) {
            const uint32_t words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const float2 pair = Precision::unpack(words[j]);
              sums[2 * j] += w * pair.x;
              sums[2 * j + 1] += w * pair.y;
            }
          }
        }
      }
      if (inside) {
        y[int64_t{token} * vectors + vector] = {Precision::pack(sums[0], sums[1]), Precision::pack(sums[2], sums[3]),
                                                Precision::pack(sums[4], sums[5]), Precision::pack(sums[6], sums[7])};
      }
    }
  }
}

}  // namespace jaxmoe::combine
