// The math warpgroups: both GEMMs of every task of this block, and what becomes of the sums: h into its ring, answers
// of experts straight to the rank that owns the token.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm_math.cuh"

namespace jaxmoe::math {

// The target of this thread's row of a down tile, to be turned into an address by row_of(). It was written before
// rows_arrived was released, which the producer has acquired on the way to this task.
template <class Variant>
__device__ __forceinline__ RowTarget target_of(const Cta<Variant>& cta, const Task& task, int32_t tile_row) {
  if (task.gemm == Gemm::kGateUp || tile_row >= task.rows) return {~0u};
  const int64_t ring_row = int64_t{task.ring_slot} * Variant::config.tile_rows + tile_row;
  return {__ldcg(cta.template at<uint32_t>(cta.params.layout.row_targets) + ring_row)};
}

// Where this thread's row of the tile goes: its row of h, or of the partials of the rank that owns the token. Null
// where there is no such row.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* row_of(const Cta<Variant>& cta, const Task& task,
                                                                   int32_t tile_row, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  const auto& p = cta.params;
  if (tile_row >= task.rows) return nullptr;
  if (task.gemm == Gemm::kGateUp) {
    const int64_t ring_row = int64_t{task.ring_slot} * Variant::config.tile_rows + tile_row;
    return cta.template at<Element>(p.layout.hidden) + ring_row * p.shape.intermediate;
  }
  // Out of range only where a wait was given up.
  if (target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return nullptr;
  return cta.template at<Element>(target.source(), p.layout.partials.offset) +
         int64_t{target.slot()} * p.shape.hidden;
}

// Adds biases, applies the activation and stores the tile.
template <class Variant>
__device__ __forceinline__ void finish_tile(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                            RowTarget target, ptx::Accumulators& sums) {
  using Element = typename Cta<Variant>::Element;
  const auto& p = cta.params;
  auto& staging = cta.shared.gemm.staging[thread.warp];
  Element* row = row_of(cta, task, thread.tile_row(), target);
  const auto bias_of = [&](const void* bias, int32_t width) {
    return static_cast<const Element*>(bias) + int64_t{task.expert} * width;
  };
  if (task.gemm == Gemm::kDown) {
    const TileColumns columns{task.column_tile * p.schedule.tile.output_columns, p.shape.hidden};
    if (p.b_down != nullptr) add_bias<Variant, 0, 256>(sums, thread, columns, bias_of(p.b_down, p.shape.hidden));
    store_plain_tile<Variant>(sums, thread, staging, columns, row);
    return;
  }
  const TileColumns columns{task.column_tile * p.schedule.tile.hidden_columns, p.shape.intermediate};
  if (p.gated) {
    if (p.b_gate != nullptr) add_bias<Variant, 0, 128>(sums, thread, columns, bias_of(p.b_gate, p.shape.intermediate));
    if (p.b_up != nullptr) add_bias<Variant, 128, 128>(sums, thread, columns, bias_of(p.b_up, p.shape.intermediate));
    store_gated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
  } else {
    if (p.b_gate != nullptr) add_bias<Variant, 0, 256>(sums, thread, columns, bias_of(p.b_gate, p.shape.intermediate));
    store_activated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
  }
}

// Where the timeline shows answers on their way, beside what the warpgroup does meanwhile.
template <class Variant>
__device__ __forceinline__ auto answers_lane(const Cta<Variant>& cta, const MathThread& thread) {
  return cta.timeline.template lane<128>(LaneRole::kAnswers, thread.warpgroup);
}

// Steps of a tile, of about half a microsecond, after which the stores of the tile before are likely complete.
inline constexpr int32_t kAnnounceStep = 5;

template <class Variant>
__device__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  const auto& p = cta.params;
  const MathThread thread = MathThread::of_this_thread();
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;
  const int32_t gate_up_steps = ceil_div(p.shape.hidden, Variant::config.tile_depth);
  const int32_t down_steps = ceil_div(p.shape.intermediate, Variant::config.tile_depth);

  const auto lane = cta.timeline.template lane<128>(LaneRole::kMath, thread.warpgroup);
  lane.start();

  // What this warp has stored of a tile is announced while it multiplies the next one: waiting for it at once would
  // leave the tensor cores idle for as long as a store to a peer takes.
  Release stored{};
  bool announced = true;
  const auto announce_stored = [&] {
    wait_rows_stored();
    answers_lane(cta, thread).finish(EventKind::kAnswers, {-1, stored.index, -1});
    if (thread.lane == 0) cta.signals.release(stored);
    announced = true;
  };
  for (int taken = 0;; ++taken) {
    // Where the next task is not there yet, it may be waiting for this very release.
    if (!announced && !ring.is_full(position)) announce_stored();
    ring.wait(position);  // the task's first stage, and with it the task
    const Task task = cta.shared.tasks[taken % kQueuedTasks];
    if (task.rows == kNoMoreTasks) break;
    lane.mark(EventKind::kWaitStages, task);
    const int32_t depth_steps = task.gemm == Gemm::kGateUp ? gate_up_steps : down_steps;
    const RowTarget target = target_of(cta, task, thread.tile_row());
    const auto meanwhile = [&](int32_t step) {
      if (!announced && (step == kAnnounceStep || step == depth_steps - 1)) announce_stored();
    };
    ptx::Accumulators sums;
    const bool computed = multiply_tile<Variant>(ring, position, thread, task.rows - 64 * thread.warpgroup, depth_steps,
                                                 sums, meanwhile, lane);
    lane.mark(computed ? event_of(task.gemm) : EventKind::kNoRows, task);
    if (computed) {
      if (task.gemm == Gemm::kDown) answers_lane(cta, thread).start();
      finish_tile(cta, task, thread, target, sums);
      lane.mark(EventKind::kEpilogue, task);
    }
    stored = release_after(task);
    announced = false;
  }
  if (!announced) announce_stored();
  ring.release(position, thread.lane);
  // Partials may lie at peers: everything this warp has stored comes before what is announced after it.
  if (thread.lane == 0) {
    ptx::fence_system();
    cta.signals.release({Signal::kTasksDone, 0, 1});
  }
}

}  // namespace jaxmoe::math
