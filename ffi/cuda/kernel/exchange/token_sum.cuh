// The sum of a token: its answers times their routing weights, in float32 and in the order of its slots, rounded once.
// By one warp, or by several that share its columns. Callers: combine.cuh and early_sums.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::combine {

// A lane loads 4 slots of kGroups vectors at a time. With the 4 that math warps have registers for, 256 bytes, their
// block has enough in flight to use what memory can deliver, whatever top_k is.
inline constexpr int kSlotsAtOnce = 4;
template <int kRegisters>
inline constexpr int kGroupsFor = kRegisters >= 160 ? 4 : kRegisters >= 96 ? 2 : 1;

// Vectors of a token that a warp adds up at a time.
template <int kGroups>
inline constexpr int32_t kVectorsAtOnce = 32 * kGroups;

// Whether the sum of a token is rehearsed before answers are there, as if it had no columns (combine.cuh): beside weights that
// math warps decode, whose launches are short.
template <class Variant>
inline constexpr bool kRehearsesSums = Variant::kPass == Pass::kForward && Variant::Precision::kPacked;

// Which rows are added up, by number: one behind the other, or those that lanes have. All lanes ask for one together.
struct RowsInOrder {
  __device__ __forceinline__ int32_t operator()(int32_t number) const { return number; }
};
struct RowsOfLanes {
  int32_t row;  // of this lane

  __device__ __forceinline__ int32_t operator()(int32_t number) const {
    return __shfl_sync(0xffffffff, row, number);
  }
};

// y = sum over `count` rows of weight * row, every `stride` vectors the kVectorsAtOnce from `begin` on. Rows are numbered
// from `first_row` on; `weight` is that of the row of each lane, `used` has a bit for each row that is there. Where
// that is rehearsed a row of no vectors goes through the loops too, once.
template <int kGroups, class Variant, class Rows>
__device__ __forceinline__ void add_up(const uint4* first_row, const Rows& rows, uint4* y, int32_t begin,
                                       int32_t stride, int32_t vectors, int32_t count, float weight, uint32_t used,
                                       int lane) {
  using Precision = typename Variant::Precision::Wide;
  constexpr bool kOnce = kRehearsesSums<Variant>;
  for (int32_t start = begin; kOnce || start < vectors;) {
    const int32_t first = start + lane;
    float sums[kGroups][8];
#pragma unroll
    for (auto& group : sums) {
#pragma unroll
      for (float& sum : group) sum = 0.0f;
    }
#pragma unroll 1
    for (int32_t number = 0; number < count; number += kSlotsAtOnce) {
      uint4 values[kGroups][kSlotsAtOnce];
      int32_t row[kSlotsAtOnce];
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) row[i] = rows(number + i);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kSlotsAtOnce; ++i) {
          if (first + 32 * g < vectors && (used >> (number + i) & 1)) {
            values[g][i] = ptx::load_once(first_row + int64_t{row[i]} * vectors + first + 32 * g);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) {
        const float w = __shfl_sync(0xffffffff, weight, number + i);
        if (!(used >> (number + i) & 1)) continue;
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
    start += stride;
    if (kOnce && start >= vectors) break;
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

// What a lane knows of its slot of a token, which is there before any answer.
struct SlotOfLane {
  float routing_weight;  // in a backward pass the answers have it in them
  bool is_used;

  template <class Variant>
  static __device__ __forceinline__ SlotOfLane of(const Cta<Variant>& cta, int32_t token, int lane) {
    const auto& p = cta.params;
    const int64_t slot = int64_t{token} * p.shape.top_k + lane;
    if (token >= p.shape.tokens || lane >= p.shape.top_k) return {0.0f, false};
    return {Cta<Variant>::kBackward ? 1.0f : routing_weight_of(p, slot), is_used_slot(p, slot)};
  }
};

// Part `part` of `parts` of the columns of a token, or of none where it `rehearses`. All lanes of a warp.
template <int kGroups, class Variant>
__device__ __forceinline__ void sum_token(const Cta<Variant>& cta, int32_t token, const SlotOfLane& of_lane,
                                          int32_t part, int32_t parts, int lane, bool rehearses = false) {
  const auto& p = cta.params;
  const int32_t vectors = rehearses ? 0 : p.shape.hidden / 8;
  const int32_t top_k = p.shape.top_k;
  const uint32_t used = __ballot_sync(0xffffffff, of_lane.is_used);
  if constexpr (Cta<Variant>::kBackward) {
    const int64_t slot = int64_t{token} * top_k + lane;
    const float* gradients = cta.template at<float>(p.layout.routing_weight_gradients);
    if (lane < top_k && part == 0) p.dtopk_weights[slot] = of_lane.is_used ? __ldcg(gradients + slot) : 0.0f;
  }
  const uint4* answers = cta.template at<uint4>(p.layout.answers) + int64_t{token} * top_k * vectors;
  uint4* y = static_cast<uint4*>(result_of(p)) + int64_t{token} * vectors;
  add_up<kGroups, Variant>(answers, RowsInOrder{}, y, part * kVectorsAtOnce<kGroups>,
                           parts * kVectorsAtOnce<kGroups>, vectors, top_k, of_lane.routing_weight, used, lane);
}

// Several warps share a token where there are more warps than tokens, on as many multiprocessors as there are. So many
// can, before columns are taken into account.
template <class Variant>
__device__ __forceinline__ int32_t warps_for_a_token(const Cta<Variant>& cta) {
  const int32_t warps = cta.blocks() * Roles::kMathWarps, tokens = cta.params.shape.tokens;
  return tokens > 0 && tokens < warps ? warps / tokens : 1;
}

}  // namespace jaxmoe::combine
