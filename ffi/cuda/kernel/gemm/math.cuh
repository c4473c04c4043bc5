// The math warpgroups: both GEMMs of every task of this block, and what becomes of the sums: h into its ring, answers
// of experts straight to the rank that owns the token.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"
#include "cuda/kernel/gemm/task_queue.cuh"

namespace jaxmoe::math {

// The target of this thread's row of a down tile, to be turned into an address by row_of(). It was written before
// rows_arrived was released, which the producer has acquired on the way to this task.
template <class Variant>
__device__ __forceinline__ RowTarget target_of(const Cta<Variant>& cta, const Task& task, int32_t tile_row) {
  if (task.gemm == Gemm::kGateUp || tile_row >= task.rows) return {~0u};
  const int64_t ring_row = int64_t{task.ring_slot} * Tiling::kRows + tile_row;
  return {__ldcg(cta.template at<uint32_t>(cta.params.layout.row_targets) + ring_row)};
}

// Where this thread's row of the tile goes: its row of h, or of the answers of the rank that owns the token. Null
// where there is no such row.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* row_of(const Cta<Variant>& cta, const Task& task,
                                                                   int32_t tile_row, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  const auto& p = cta.params;
  if (tile_row >= task.rows) return nullptr;
  if (task.gemm == Gemm::kGateUp) {
    const int64_t ring_row = int64_t{task.ring_slot} * Tiling::kRows + tile_row;
    return cta.template at<Element>(p.layout.h) + ring_row * p.shape.intermediate;
  }
  // Out of range only where a wait was given up.
  if (target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return nullptr;
  return cta.peers.template at<Element>(target.source(), p.layout.answers.offset) +
         int64_t{target.slot()} * p.shape.hidden;
}

// Whether gate and up of the task's tile are left to the backward pass.
template <class Variant>
__device__ __forceinline__ bool is_saved(const Cta<Variant>& cta, const Task& task) {
  return task.row_tile < cta.params.schedule.saved_tiles;
}

// Where they go for this thread's row; rows behind the last one, up to the multiple that the backward pass counts,
// belong to it as well. Null beyond.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* saved_row_of(const Cta<Variant>& cta, const Task& task,
                                                                         int32_t tile_row) {
  using Element = typename Cta<Variant>::Element;
  constexpr int32_t kParts = Tiling::kBlocks;
  const auto& p = cta.params;
  if (tile_row >= padded_rows(task.rows, p.schedule.gradient_row_multiple())) return nullptr;
  const int64_t row = int64_t{task.row_tile} * p.schedule.tile.rows +
                      task.ring_slot % kParts * Tiling::kRows + tile_row;
  return static_cast<Element*>(p.saved) + row * p.shape.projections * p.shape.intermediate;
}

// Adds biases, applies the activation and stores the tile.
template <class Variant>
__device__ __forceinline__ void finish_tile(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                            RowTarget target, ptx::Accumulators& sums) {
  using Element = typename Cta<Variant>::Element;
  const auto& p = cta.params;
  std::byte* staging = cta.shared.gemm.staging.of_warp(thread.warp);
  Element* row = row_of(cta, task, thread.tile_row(), target);
  const auto bias_of = [&](const void* bias, int32_t width) {
    return static_cast<const Element*>(bias) + int64_t{task.expert} * width;
  };
  if (task.gemm == Gemm::kDown) {
    const TileColumns columns{task.column_tile * p.schedule.tile.columns, p.shape.hidden};
    if (p.b_down != nullptr) add_bias<Variant, 0, Tiling::kColumns>(sums, thread, columns, bias_of(p.b_down, p.shape.hidden));
    store_plain_tile<Variant>(sums, thread, staging, columns, row);
    return;
  }
  const TileColumns columns{task.column_tile * p.schedule.tile.h_columns, p.shape.intermediate};
  if (p.gated) {
    if (p.b_gate != nullptr) add_bias<Variant, 0, Tiling::kColumns / 2>(sums, thread, columns, bias_of(p.b_gate, p.shape.intermediate));
    if (p.b_up != nullptr) add_bias<Variant, Tiling::kColumns / 2, Tiling::kColumns / 2>(sums, thread, columns, bias_of(p.b_up, p.shape.intermediate));
    if (is_saved(cta, task)) {
      store_projections<Variant>(sums, thread, staging, columns, saved_row_of(cta, task, thread.tile_row()), task.rows);
    }
    store_gated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
  } else {
    if (p.b_gate != nullptr) add_bias<Variant, 0, Tiling::kColumns>(sums, thread, columns, bias_of(p.b_gate, p.shape.intermediate));
    if (is_saved(cta, task)) {
      store_gate<Variant>(sums, thread, staging, columns, saved_row_of(cta, task, thread.tile_row()), task.rows);
    }
    store_activated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
  }
}

template <class Variant>
__device__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  const auto& p = cta.params;
  const MathThread thread = MathThread::of_this_thread();
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;
  const int32_t gate_up_steps = ceil_div(p.shape.hidden, Tiling::kDepth);
  const int32_t down_steps = ceil_div(p.shape.intermediate, Tiling::kDepth);

  const auto track = cta.timeline.template track<128>(TrackRole::kMath, thread.warpgroup);
  track.start();

  TaskQueue<Variant> queue(cta, thread);
  for (;;) {
    const Task& task = queue.next(ring, position);
    if (task.rows == kNoMoreTasks) break;
    track.mark(EventKind::kWaitStages, task);
    const int32_t depth_steps = task.gemm == Gemm::kGateUp ? gate_up_steps : down_steps;
    const RowTarget target = target_of(cta, task, thread.tile_row());
    const auto meanwhile = [&](int32_t step) { queue.announce_meanwhile(step, depth_steps); };
    ptx::Accumulators sums;
    const bool computed = multiply<Variant, ptx::Major::kDepth, ptx::Major::kWidth, Direct>(
        ring, position, thread, task.rows - Roles::kWarpgroupRows * thread.warpgroup, depth_steps, sums, meanwhile, track);
    track.mark(computed ? event_of(task.gemm) : EventKind::kNoRows, task);
    if (computed) {
      if (task.gemm == Gemm::kDown) answers_track(cta, thread).start();
      finish_tile(cta, task, thread, target, sums);
      track.mark(EventKind::kEpilogue, task);
    }
    queue.stored();
  }
  queue.finish(ring, position);
}

}  // namespace jaxmoe::math
