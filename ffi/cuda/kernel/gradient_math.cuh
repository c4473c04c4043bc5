// The math warpgroups in a backward pass: the products of every task of this block, and what becomes of the sums.
//
//   gate_up          + biases                      -> projections ring
//   hidden_gradient  activation and its slopes     -> over gate and up in that ring: their gradients; h times weight
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
#include "cuda/kernel/gemm_math.cuh"
#include "cuda/kernel/gradient_epilogues.cuh"
#include "cuda/kernel/math.cuh"

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
  return rows - 64 * thread.warpgroup;
}

// Where this thread's row of a token gradient goes. Null where the row is one of zeros, or there is none.
template <class Variant>
__device__ __forceinline__ typename Cta<Variant>::Element* answer_of(const Cta<Variant>& cta, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  const BackwardParams& p = cta.params;
  if (target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return nullptr;
  return cta.template at<Element>(target.source(), p.layout.partials.offset) +
         int64_t{target.slot()} * p.shape.hidden;
}

template <class Variant>
__device__ __forceinline__ RowTarget target_of(const Cta<Variant>& cta, const Task& task, int32_t tile_row) {
  if (task.gemm != Gemm::kTokenGradient || tile_row >= task.rows) return {RowTarget::kNone};
  return {__ldcg(cta.template at<uint32_t>(cta.params.layout.row_targets) + ring_row_of<Variant>(task, tile_row))};
}

// All of a tile but hidden_gradient's.
template <class Variant>
__device__ __forceinline__ void finish_tile(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                            RowTarget target, ptx::Accumulators& sums) {
  using Element = typename Cta<Variant>::Element;
  const BackwardParams& p = cta.params;
  auto& staging = cta.shared.gemm.staging[thread.warp];
  if (task.gemm == Gemm::kTokenGradient) {
    const TileColumns columns{task.column_tile * p.schedule.tile.output_columns, p.shape.hidden};
    store_plain_tile<Variant>(sums, thread, staging, columns, answer_of(cta, target));
    return;
  }
  if (task.gemm != Gemm::kGateUp) {
    store_weight_gradient(cta, task, thread, sums);
    return;
  }
  const int32_t width = p.shape.intermediate;
  const TileColumns columns{task.column_tile * p.schedule.tile.hidden_columns, width};
  const auto bias_of = [&](const void* bias) { return static_cast<const Element*>(bias) + int64_t{task.expert} * width; };
  Element* row = nullptr;
  if (thread.tile_row() < task.rows) {
    row = cta.template at<Element>(p.layout.projections) +
          ring_row_of<Variant>(task, thread.tile_row()) * p.shape.projections * width;
  }
  if (p.gated) {
    if (p.b_gate != nullptr) add_bias<Variant, 0, 128>(sums, thread, columns, bias_of(p.b_gate));
    if (p.b_up != nullptr) add_bias<Variant, 128, 128>(sums, thread, columns, bias_of(p.b_up));
    store_projections(cta, sums, thread, columns, row);
  } else {
    if (p.b_gate != nullptr) add_bias<Variant, 0, 256>(sums, thread, columns, bias_of(p.b_gate));
    store_plain_tile<Variant>(sums, thread, staging, columns, row);
  }
}

// Steps of a tile after which the stores of the tile before are likely complete, as in math.cuh.
inline constexpr int32_t kAnnounceStep = 5;

template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  using ptx::Major;
  const BackwardParams& p = cta.params;
  const MathThread thread = MathThread::of_this_thread();
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;

  const auto lane = cta.timeline.template lane<128>(LaneRole::kMath, thread.warpgroup);
  lane.start();

  // There is no register left for what is needed once a task: it is counted in shared memory how many tasks this warp
  // has begun, and both the one in hand and the one before it are looked up in the queue, of which the producer uses
  // fewer places than there are.
  volatile int32_t& begun = cta.shared.tasks_begun[thread.warp];
  begun = 0;
  const auto task_before = [&](int32_t back) -> const Task& {
    return cta.shared.tasks[static_cast<uint32_t>(begun - back) % kQueuedTasks];
  };

  // As in math::run(): what this warp has stored of a tile is announced while it multiplies the next one, which by then
  // has begun.
  bool announced = true;
  const auto announce_stored = [&](int32_t back) {
    wait_rows_stored();
    const Task& before = task_before(back);
    math::answers_lane(cta, thread).finish(EventKind::kAnswers, {-1, before.row_tile, -1});
    if (thread.lane == 0) cta.signals.release(release_after(before));
    announced = true;
  };
  for (;;) {
    // Where the next task is not there yet, it may be waiting for this very release.
    if (!announced && !ring.is_full(position)) announce_stored(1);
    ring.wait(position);  // the task's first stage, and with it the task
    const Task& task = task_before(0);
    if (task.rows == kNoMoreTasks) break;
    const int32_t next = begun + 1;
    __syncwarp();
    begun = next;
    __syncwarp();
    lane.mark(EventKind::kWaitStages, task);
    const int32_t steps = depth_steps(p, task, Variant::config.tile_depth);
    const int32_t rows = rows_left(cta, task, thread);
    const auto meanwhile = [&](int32_t step) {
      if (!announced && (step == kAnnounceStep || step == steps - 1)) announce_stored(2);
    };
    ptx::Accumulators sums;
    bool computed;
    if (task.gemm == Gemm::kGateUp) {
      computed = multiply_tile<Variant, Major::kDepth, Major::kWidth>(ring, position, thread, rows, steps, sums,
                                                                      meanwhile, lane);
    } else if (is_weight_gradient(task.gemm)) {
      computed = multiply_tile<Variant, Major::kWidth, Major::kWidth>(ring, position, thread, rows, steps, sums,
                                                                      meanwhile, lane);
    } else {
      computed = multiply_tile<Variant, Major::kDepth, Major::kDepth>(ring, position, thread, rows, steps, sums,
                                                                      meanwhile, lane);
    }
    lane.mark(computed ? event_of(task.gemm) : EventKind::kNoRows, task);
    const RowTarget target = target_of(cta, task, thread.tile_row());
    if (task.gemm == Gemm::kHiddenGradient) {
      finish_hidden_gradient(cta, ring, position, task, thread, computed, sums);
    } else if (computed) {
      if (task.gemm == Gemm::kTokenGradient) math::answers_lane(cta, thread).start();
      finish_tile(cta, task, thread, target, sums);
    }
    // What is not a tile: gradients of routing weights and biases, by the tasks of the first column or row of tiles.
    if (task.gemm == Gemm::kTokenGradient && task.column_tile == 0) answer_weights(cta, task, thread, target);
    if (is_weight_gradient(task.gemm)) store_bias_gradient(cta, task, thread);
    if (computed) lane.mark(EventKind::kEpilogue, task);
    announced = false;
  }
  if (!announced) announce_stored(1);
  ring.release(position, thread.lane);
  // Answers may lie at peers: everything this warp has stored comes before what is announced after it.
  if (thread.lane == 0) {
    ptx::fence_system();
    cta.signals.release({Signal::kTasksDone, 0, 1});
  }
}

}  // namespace jaxmoe::gradient_math
