// The math warpgroups in a backward pass: the products of every task of this block, and what becomes of the sums.
//
//   gate_up          + biases                      -> projections ring
//   h_gradient  activation and its slopes     -> over gate and up in that ring: their gradients; h times weight
//   token_gradient                                 -> the rank that owns the token, with the gradient of its weight
//   weight gradients                               -> results of the layer
//
// The formulas are those of host/backward_rank.h. gradient_producer.cuh has the half that fills the stages.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/h_gradient.cuh"
#include "cuda/kernel/gemm/epilogues/routing_weight.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/epilogues/weight_gradient.cuh"
#include "cuda/kernel/gemm/multiply.cuh"
#include "cuda/kernel/gemm/task_queue.cuh"

namespace jaxmoe::gradient_math {

// Stages that a task multiplies.
__device__ __forceinline__ int32_t depth_steps(const BackwardParams& p, const Task& task, int32_t depth) {
  if (is_weight_gradient(task.gemm)) return ceil_div(task.rows, depth);
  if (task.gemm == Gemm::kTokenGradient) return p.shape.projections * ceil_div(p.shape.intermediate, depth);
  return ceil_div(p.shape.hidden, depth);
}

// Rows of the tile, counted from the first of this warpgroup; none or negative: it has nothing to compute.
template <class Variant>
__device__ __forceinline__ int32_t rows_left(const Cta<Variant>& cta, const Task& task, const MathThread& thread) {
  const Shape& shape = cta.params.shape;
  int32_t rows = task.rows;
  if (is_weight_gradient(task.gemm)) {
    const int32_t of_matrix = task.gemm == Gemm::kDownGradient ? shape.intermediate : shape.hidden;
    rows = of_matrix - first_weight_row(cta, task);
  }
  return rows - Roles::kWarpgroupRows * thread.warpgroup;
}

// Where this thread's row of a token gradient goes. Null where the row is one of zeros, or there is none.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* answer_of(const Cta<Variant>& cta, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  const BackwardParams& p = cta.params;
  if (target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return nullptr;
  return cta.peers.template at<Element>(target.source(), p.layout.answers.offset) +
         int64_t{target.slot()} * p.shape.hidden;
}

template <class Variant>
__device__ __forceinline__ RowTarget target_of(const Cta<Variant>& cta, const Task& task, int32_t tile_row) {
  if (task.gemm != Gemm::kTokenGradient || tile_row >= task.rows) return {RowTarget::kNone};
  return {__ldcg(cta.template at<uint32_t>(cta.params.layout.row_targets) + ring_row_of<Variant>(task, tile_row))};
}

// All of a tile but h_gradient's.
template <class Variant>
__device__ __forceinline__ void finish_tile(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                            RowTarget target, ptx::Accumulators& sums) {
  using Element = typename Cta<Variant>::Element;
  const BackwardParams& p = cta.params;
  std::byte* staging = cta.shared.gemm.staging.of_warp(thread.warp);
  if (task.gemm == Gemm::kTokenGradient) {
    const TileColumns columns{task.column_tile * p.schedule.tile.columns, p.shape.hidden};
    store_plain_tile<Variant>(sums, thread, staging, columns, answer_of(cta, target));
    return;
  }
  if (task.gemm != Gemm::kGateUp) {
    store_weight_gradient(cta, task, thread, sums);
    return;
  }
  const int32_t width = p.shape.intermediate;
  const TileColumns columns{task.column_tile * p.schedule.tile.h_columns, width};
  const auto bias_of = [&](const void* bias) {
    return static_cast<const Element*>(bias) + int64_t{task.expert} * width;
  };
  Element* row = nullptr;
  if (thread.tile_row() < task.rows) {
    row = cta.template at<Element>(p.layout.projections) +
          ring_row_of<Variant>(task, thread.tile_row()) * p.shape.projections * width;
  }
  if (p.gated) {
    if (p.b_gate != nullptr) add_bias<Variant, 0, Tiling::kColumns / 2>(sums, thread, columns, bias_of(p.b_gate));
    if (p.b_up != nullptr) add_bias<Variant, Tiling::kColumns / 2, Tiling::kColumns / 2>(sums, thread, columns, bias_of(p.b_up));
    store_projections<Variant>(sums, thread, staging, columns, row, task.rows);
  } else {
    if (p.b_gate != nullptr) add_bias<Variant, 0, Tiling::kColumns>(sums, thread, columns, bias_of(p.b_gate));
    store_plain_tile<Variant>(sums, thread, staging, columns, row);
  }
}

template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  using ptx::Major;
  const BackwardParams& p = cta.params;
  const MathThread thread = MathThread::of_this_thread();
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;

  const auto track = cta.timeline.template track<128>(TrackRole::kMath, thread.warpgroup);
  track.start();

  // Recording leaves no register for what the epilogues could keep from one task to the next.
  const auto in_epilogue = [&] { return Variant::config.timeline ? thread.anew() : thread; };
  TaskQueue<Variant> queue(cta, thread);
  for (;;) {
    const Task& task = queue.next(ring, position);
    if (task.rows == kNoMoreTasks) break;
    track.mark(EventKind::kWaitStages, task);
    const int32_t steps = depth_steps(p, task, Tiling::kDepth);
    const int32_t rows = rows_left(cta, task, thread);
    const auto meanwhile = [&](int32_t step) { queue.announce_meanwhile(step, steps); };
    ptx::Accumulators sums;
    bool computed;
    if (task.gemm == Gemm::kGateUp) {
      computed = multiply<Variant, Major::kDepth, Major::kWidth, Direct>(ring, position, thread, rows, steps, sums, meanwhile,
                                                                   track);
    } else if (is_weight_gradient(task.gemm)) {
      computed = multiply<Variant, Major::kWidth, Major::kWidth, Direct>(ring, position, thread, rows, steps, sums, meanwhile,
                                                                   track);
    } else {
      computed = multiply<Variant, Major::kDepth, Major::kDepth, Direct>(ring, position, thread, rows, steps, sums, meanwhile,
                                                                   track);
    }
    track.mark(computed ? event_of(task.gemm) : EventKind::kNoRows, task);
    const RowTarget target = target_of(cta, task, thread.tile_row());
    if (task.gemm == Gemm::kHGradient) {
      finish_h_gradient(cta, ring, position, task, in_epilogue(), computed, sums);
    } else if (computed) {
      if (task.gemm == Gemm::kTokenGradient) answers_track(cta, thread).start();
      finish_tile(cta, task, in_epilogue(), target, sums);
    }
    // What is not a tile: gradients of routing weights and biases, by the tasks of the first column or row of tiles.
    if (task.gemm == Gemm::kTokenGradient && task.column_tile == 0) {
      answer_routing_weights(cta, task, in_epilogue(), target);
    }
    if (is_weight_gradient(task.gemm)) store_bias_gradient(cta, task, in_epilogue());
    track.mark(EventKind::kEpilogue, task);  // also without rows: stages and biases are left
    queue.stored();
  }
  queue.finish(ring, position);
}

}  // namespace jaxmoe::gradient_math
