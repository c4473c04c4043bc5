// How a math warp gets its tasks from the producer and announces what it has stored of them.
//
// What a warp has stored of a tile is announced while it multiplies the next one: waiting for it at once would leave
// the tensor cores idle for as long as a store to a peer takes.
//
// The last warp to announce a task releases it for all of its block. A release waits for a fence of the whole GPU, in which the
// warp's products end and no others begin: when every warp released its own part, both warpgroups lost that time in every
// task (docs/performance/forward.md).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/protocol.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"
#include "cuda/kernel/gemm/rehearsal.cuh"
#include "cuda/kernel/gemm/releaser.cuh"

namespace jaxmoe {

// Where the timeline shows answers on their way, beside what the warpgroup does meanwhile.
template <class Variant>
__device__ __forceinline__ auto answers_track(const Cta<Variant>& cta, const MathThread& thread) {
  return cta.timeline.template track<128>(TrackRole::kAnswers, thread.warpgroup);
}

// There is no register left for what is needed once a task. So it is counted in shared memory how many tasks this warp
// has begun, from below zero on where it rehearses some (rehearsal.cuh), and both the one in hand and the one before it are looked up in the queue, where they stay long enough
// (KernelStorage::tasks). All lanes of the warp call everything here.
template <class Variant>
class TaskQueue {
  using Ring = typename GemmShape<Variant>::Ring;

 public:
  __device__ TaskQueue(const Cta<Variant>& cta, const MathThread& thread) : cta_(cta), thread_(thread) {
    begun() = -rehearsal::kTasks<Variant>;
  }

  // The next task, once its first stage is there; before the first one those that are rehearsed, which have no stages. Valid
  // until the one after it has been taken and begun. Its rows are kNoMoreTasks after the last.
  __device__ __forceinline__ const Task& next(const Ring& ring, typename Ring::Position position) {
    if (rehearsal::kTasks<Variant> == 0 || begun() >= 0) {
      // Where the next task is not there yet, it may be waiting for this very release.
      if (!announced_ && !ring.is_full(position)) announce_stored(1);
      ring.wait(position);
    }
    const Task& task = in_queue(0);
    const int32_t next = begun() + 1;
    __syncwarp();
    begun() = next;
    __syncwarp();
    return task;
  }

  // In a step of the next task in which something is due (steps.cuh).
  __device__ __forceinline__ void announce_meanwhile() {
    if (!announced_) announce_stored(2);
  }

  // Everything of the task in hand has been computed, and its stores are under way.
  __device__ __forceinline__ void stored() { announced_ = false; }

  // After the end mark, which has a stage too. What this warp has stored may lie at peers: all of it comes before what
  // is announced after it.
  __device__ __forceinline__ void finish(const Ring& ring, typename Ring::Position position) {
    if (!announced_) announce_stored(2);
    ring.release(position, thread_.lane);
    if constexpr (kHasReleaser<Variant>) releaser::tell(cta_, begun() - 1, thread_.lane);
    if (thread_.lane == 0) {
      ptx::fence_system();
      cta_.signals.release({Signal::kTasksDone, 0, 1});
    }
  }

 private:
  __device__ volatile int32_t& begun() const { return cta_.shared.tasks_begun[thread_.warp]; }

  // The task that was begun that many before the next one.
  __device__ const Task& in_queue(int32_t back) const {
    return cta_.shared.tasks[static_cast<uint32_t>(begun() - back) % kQueuedTasks];
  }

  __device__ __forceinline__ void announce_stored(int32_t back) {
    wait_rows_stored();
    const Task& before = in_queue(back);
    if constexpr (kHasReleaser<Variant>) {
      releaser::tell(cta_, begun() - back, thread_.lane);
    } else if constexpr (!Cta<Variant>::kSecondHalf) {  // without a ring nobody waits for a tile
      if (thread_.lane == 0 && is_last_to_store(begun() - back)) {
        cta_.signals.release_parts(release_after(before), Roles::kMathWarps);
      }
    }
    answers_track(cta_, thread_).finish(EventKind::kAnswers, {-1, before.row_tile, -1});
    announced_ = true;
  }

  // By one lane of a warp, once for each task: whether all math warps have now stored what they have of the nth task. Orders
  // what the warps have stored before what the last one releases. A count has 4 bits at the place of the task in the queue,
  // and is back at zero when the last warp has come. No warp comes for another task with that place before: each task has a
  // stage at least, so none is a whole queue ahead of another. tests/unit/test_task_queue.py is a model of it.
  __device__ __forceinline__ bool is_last_to_store(uint32_t nth) {
    constexpr uint32_t kBits = 4, kAll = Roles::kMathWarps;
    static_assert(kAll < 1u << kBits && kQueuedTasks * kBits <= 32);
    const uint32_t place = nth % kQueuedTasks * kBits;
    uint32_t* const stored = &cta_.shared.stored_tasks.warps;
    const uint32_t before = ptx::add_acquire_release_block(stored, 1u << place);
    if ((before >> place) % (1u << kBits) != kAll - 1) return false;
    ptx::add_acquire_release_block(stored, 0u - (kAll << place));
    return true;
  }

  const Cta<Variant>& cta_;
  const MathThread& thread_;
  bool announced_ = true;  // or there is nothing to announce
};

}  // namespace jaxmoe
