// The producer: one thread of warp 0 walks this block's tasks, waits until what a task reads is there, and has the copy
// engine load it stage by stage. math.cuh uses the stages.
#pragma once

#include <cuda_runtime.h>

#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/load.cuh"

namespace jaxmoe::producer {

// By value and field by field: a choice between two structs would put both into local memory.
template <class Variant>
__device__ __forceinline__ GemmSource source_of(const ForwardParams& p, bool is_gate_up) {
  constexpr int32_t kDepth = Tiling::kDepth;
  return {.rows = is_gate_up ? &p.rows : &p.h,
          .few_rows = is_gate_up ? &p.few_rows : &p.few_h,
          .weights = is_gate_up ? &p.w_gate_map : &p.w_down_map,
          .second_weights = is_gate_up ? &p.w_up_map : &p.w_down_map,
          .depth_steps = ceil_div(is_gate_up ? p.shape.hidden : p.shape.intermediate, kDepth),
          .gated = is_gate_up && p.gated};
}

// The number of the cluster's next task, the nth it takes. Its first block draws it and hands it on; since numbers
// rise, one that is not above `last` is an old one that still lies there.
template <class Variant>
__device__ __forceinline__ int32_t next_number(const Cta<Variant>& cta, int nth, int32_t last) {
  if (cta.cta_rank == 0) {
    uint32_t* const taken = &cta.signals.control()->tasks_taken[cta.signals.launch_number() & 1];
    const int32_t number = static_cast<int32_t>(atomicAdd(taken, 1u));
    for (uint32_t other = 1; other < Tiling::kBlocks; ++other) {
      ptx::store_cluster(&cta.shared.task_numbers[nth % kQueuedTasks], other, number);
    }
    return number;
  }
  int32_t number = last;
  while (number <= last) number = ptx::load_cluster(&cta.shared.task_numbers[nth % kQueuedTasks]);
  return number;
}

// After the last task, the `queued`th. The end takes a stage too, of no bytes.
template <class Variant>
__device__ __forceinline__ void end_tasks(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                          typename GemmShape<Variant>::Ring::Position position, int queued) {
  if (cta.cta_rank == 0) {
    // After the draw of a number that no task has. With the fence of a latecomer between its count and its first draw:
    // who has seen the end of all tasks has seen every worker that took one.
    __threadfence();
    *const_cast<volatile uint32_t*>(&cta.signals.control()->tasks_ended) = 1;
  }
  ring.acquire(position);
  cta.shared.tasks[queued % kQueuedTasks].rows = kNoMoreTasks;
  ring.commit(position, 0);
  position.advance();
  if constexpr (Tiling::kBlocks > 1) drain_stages<Variant>(ring, position);
}

template <class Variant>
__device__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  const auto& p = cta.params;
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;
  const uint64_t keep = ptx::evict_normal_policy();
  const uint64_t once = ptx::evict_first_policy();
  const auto track = cta.timeline.template track<1>(TrackRole::kProducer);
  track.start();
  TaskWalk<Pass::kForward> walk(p.shape, p.schedule, cta.shared.rows_per_expert);
  int queued = 0;
  int32_t number = -1;
  for (Task task;;) {
    // By now the math warps still have stages to multiply, which hides the way to L2 and back.
    number = next_number(cta, queued, number);
    if (!walk.seek(number, task)) break;
    const bool is_gate_up = task.gemm == Gemm::kGateUp;
    track.mark(EventKind::kTakeTask, task);
    // Gate/up pairs with the release at the end of a chunk in dispatch::run(), down with those after gate/up tasks in
    // TaskQueue::announce_stored(). Rows and h were written by ordinary stores and by bulk stores; the fence orders
    // both before the loads.
    cta.signals.wait_before_task(wait_before(p.shape, p.schedule, task), site_of(task.gemm), is_gate_up);
    ptx::fence_proxy_async_global();
    track.mark(wait_event_of(task.gemm), task);
    const Task own = cta.own_part(task);
    cta.shared.tasks[queued++ % kQueuedTasks] = own;
    // Weights that only one row tile needs are read once: then they take no room in L2 from rows and h.
    const bool one_tile = cta.shared.rows_per_expert[task.expert] <= p.schedule.tile.rows;
    load_tile<Variant>(ring, position, source_of<Variant>(p, is_gate_up), own, cta.cta_rank,
                       Tiling::kBlocks == 1 || cta.is_narrow(task),
                       one_tile ? once : keep, keep, track);
    track.mark(load_event_of(task.gemm), own);
  }
  end_tasks(cta, ring, position, queued);
}

}  // namespace jaxmoe::producer
