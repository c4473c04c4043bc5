// The releaser: one thread that releases what tasks release, once every math warp has told it that what it has of a task is
// stored. A release takes long, and no math warp multiplied meanwhile, which is much of a task with few rows
// (docs/performance/four_bits.md, "Releases"). kernel.cuh gives it the last dispatch warp of kernels whose math warps decode
// weights; in the others the last math warp releases (task_queue.cuh).
//
// Waits here have no time limit, like those for stages: what they wait for is at most one bounded wait of the producer away.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/protocol.h"
#include "cuda/device/ptx/mbarrier.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/storage.cuh"

namespace jaxmoe::releaser {

// By one thread; followed by fence_mbarrier_init() and a barrier of the block.
template <class Variant>
__device__ __forceinline__ void prepare(const Cta<Variant>& cta) {
  if constexpr (kHasReleaser<Variant>) {
    for (uint64_t& stored : cta.shared.stored_tasks.stored) ptx::mbarrier_init(&stored, Roles::kMathWarps);
    cta.shared.stored_tasks.released = 0;
  } else {
    cta.shared.stored_tasks.warps = 0;
  }
}

// By all lanes of a math warp after wait_rows_stored(): what it has of the nth task is stored; or, after the last task, there
// is no nth one. Pairs with the wait in run().
//
// First all tasks before the one before it have to be released; they are, long since. So the places of the queue that the
// producer may write are none that run() has still to read: to write that of task n it has loaded task n - 1, of at least one
// stage, so every math warp is done with task n - 1 - kStages, has told of the one before, and task n - kQueuedTasks is
// released. And no phase of `stored` is over before run() has seen the one before. tests/unit/test_task_queue.py is a model of
// it. Also ptxas needs the branch: without one it decodes weights further ahead than there are registers.
template <class Variant>
__device__ __forceinline__ void tell(const Cta<Variant>& cta, int32_t nth, int lane) {
  const volatile int32_t& released = cta.shared.stored_tasks.released;
  while (released < nth - 1) {}  // pairs with the store in run()
  if (lane == 0) ptx::mbarrier_arrive(&cta.shared.stored_tasks.stored[static_cast<uint32_t>(nth) % kQueuedTasks]);
}

// The amounts are those of all math warps (device/signals.cuh).
template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta) {
  auto& tasks = cta.shared.stored_tasks;
  for (uint32_t nth = 0;; ++nth) {
    const uint32_t place = nth % kQueuedTasks;
    while (!ptx::mbarrier_try_wait(&tasks.stored[place], nth / kQueuedTasks % 2)) {}
    const Task& task = cta.shared.tasks[place];
    if (task.rows == kNoMoreTasks) break;
    cta.signals.release_parts(release_after(task), Roles::kMathWarps);
    __threadfence_block();  // after the reads of the task
    *const_cast<volatile int32_t*>(&tasks.released) = static_cast<int32_t>(nth + 1);
  }
}

}  // namespace jaxmoe::releaser
