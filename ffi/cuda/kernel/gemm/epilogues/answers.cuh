// What becomes of the sums of down and of token_gradient: rows of the rank that owns the token, at the place of their
// slot. With a token_gradient goes the gradient of the routing weight.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe::epilogue {

// Which columns of an answer this block's part of the task has.
template <class Variant>
__device__ __forceinline__ TileColumns answer_columns_of(const Cta<Variant>& cta, const Task& task) {
  const int32_t first = cta.first_answer_column(task), hidden = cta.params.shape.hidden;
  return {first, cta.shares_columns(task) ? at_most(hidden, first + Tiling::kColumns / 2) : hidden};
}

// Where this thread's row goes. Null where there is no row, it is one of zeros, or a wait was given up.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* answer_of(const Cta<Variant>& cta, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  const auto& p = cta.params;
  const int64_t rows = Cta<Variant>::kSumsAtExperts ? p.layout.answer_rows : p.shape.slots();
  if (target.source() >= p.shape.ranks || target.slot() >= rows) return nullptr;
  return cta.peers.template at<Element>(target.source(), p.layout.answers.offset) +
         int64_t{target.slot()} * p.shape.hidden;
}

template <class Variant>
__device__ __forceinline__ void store_answers(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                              RowTarget target, const ptx::Accumulators& sums) {
  store_plain_tile<Variant>(sums, thread, cta.shared.gemm.staging.of_warp(thread.warp), answer_columns_of(cta, task),
                            answer_of(cta, target));
}

// Null where there is none.
__device__ __forceinline__ const void* answer_bias(const LaunchParams& params) { return params.b_down; }
__device__ __forceinline__ const void* answer_bias(const MatmulParams&) { return nullptr; }

struct Answers {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget target, ptx::Accumulators& sums) {
    const TileColumns columns = answer_columns_of(cta, task);
    if constexpr (Variant::Precision::kTokens.is_scaled()) {
      multiply_channels(cta, sums, thread);
    }
    add_bias<Variant, 0, Tiling::kColumns>(sums, thread, columns, answer_bias(cta.params),
                                           int64_t{task.expert} * cta.params.shape.hidden);
    store_answers(cta, task, thread, target, sums);
  }
};

struct TokenGradients {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget target, ptx::Accumulators& sums) {
    store_answers(cta, task, thread, target, sums);
  }

  // With the first tile of a row, also by a warpgroup without rows: the gradient of its routing weight, which is h
  // times its gradient, summed tile by tile in order, and the gradient of the output times the bias that was added to
  // it.
  template <class Variant>
  static __device__ __forceinline__ void run_beside(const Cta<Variant>& cta, const Task& task,
                                                    const MathThread& thread, RowTarget target) {
    using Element = typename Cta<Variant>::Element;
    using Precision = typename Variant::Precision::Wide;
    const BackwardParams& p = cta.params;
    if (task.column_tile != 0) return;
    const int32_t first_row = Roles::kWarpRows * thread.warp;
    float answer = 0.0f;
    if (p.b_down != nullptr) {
      const auto* bias = reinterpret_cast<const uint32_t*>(static_cast<const Element*>(p.b_down) +
                                                           int64_t{task.expert} * p.shape.hidden);
      const int32_t pairs = p.shape.hidden / 2;
      const auto* rows = reinterpret_cast<const uint32_t*>(cta.template at<Element>(p.layout.rows));
      for (int32_t i = 0; i < Roles::kWarpRows && first_row + i < task.rows; ++i) {
        // Behind the token of the row lies the gradient of its output.
        const uint32_t* row = rows + (ring_row_of<Variant>(task, first_row + i) * 2 + 1) * pairs;
        float sum = 0.0f;
#pragma unroll 8
        for (int32_t pair = thread.lane; pair < pairs; pair += Roles::kWarpThreads) {
          const float2 gradient = Precision::unpack(__ldcg(row + pair));
          const float2 value = Precision::unpack(__ldg(bias + pair));
          sum += gradient.x * value.x + gradient.y * value.y;
        }
#pragma unroll
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
        if (thread.lane == i) answer = sum;
      }
    }
    if (thread.lane >= Roles::kWarpRows || target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return;
    const int32_t tiles = gradient_tiles(p.shape, p.schedule.tile);
    const float* products =
        cta.template at<float>(p.layout.row_products) + ring_row_of<Variant>(task, thread.tile_row()) * tiles;
#pragma unroll 8
    for (int32_t tile = 0; tile < tiles; ++tile) answer += __ldcg(products + tile);
    cta.peers.template at<float>(target.source(), p.layout.routing_weight_gradients.offset)[target.slot()] = answer;
  }
};

}  // namespace jaxmoe::epilogue
