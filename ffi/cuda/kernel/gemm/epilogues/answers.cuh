// What becomes of the sums of down and of token_gradient: rows of the rank that owns the token, at the place of their
// slot.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/routing_weight.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe::epilogue {

// Which columns of an answer the tile has.
template <class Variant>
__device__ __forceinline__ TileColumns answer_columns_of(const Cta<Variant>& cta, const Task& task) {
  return {task.column_tile * cta.params.schedule.tile.columns, cta.params.shape.hidden};
}

// Where this thread's row goes. Null where there is no row, it is one of zeros, or a wait was given up.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* answer_of(const Cta<Variant>& cta, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  const auto& p = cta.params;
  if (target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return nullptr;
  return cta.peers.template at<Element>(target.source(), p.layout.answers.offset) +
         int64_t{target.slot()} * p.shape.hidden;
}

struct Answers {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget target, ptx::Accumulators& sums) {
    typename Cta<Variant>::Element* row = answer_of(cta, target);
    const TileColumns columns = answer_columns_of(cta, task);
    add_bias<Variant, 0, Tiling::kColumns>(sums, thread, columns, cta.params.b_down, task.expert);
    store_plain_tile<Variant>(sums, thread, cta.shared.gemm.staging.of_warp(thread.warp), columns, row);
  }
};

struct TokenGradients {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget target, ptx::Accumulators& sums) {
    store_plain_tile<Variant>(sums, thread, cta.shared.gemm.staging.of_warp(thread.warp),
                              answer_columns_of(cta, task), answer_of(cta, target));
  }

  // Also by a warpgroup without rows.
  template <class Variant>
  static __device__ __forceinline__ void run_beside(const Cta<Variant>& cta, const Task& task,
                                                    const MathThread& thread, RowTarget target) {
    if (task.column_tile == 0) answer_routing_weights(cta, task, thread, target);
  }
};

}  // namespace jaxmoe::epilogue
