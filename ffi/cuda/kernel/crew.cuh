// The crew of a launch: the workers (clusters of blocks) among which its work is dealt. It is the workers that have a
// multiprocessor when the launch begins, and a launch does not wait for more: other kernels may hold some for as long
// as they wait for their peers, which may in turn wait for this launch. So a launch goes on with whatever it gets,
// which is why it cannot be part of a circle of waits (ffi/kernel.md, "Beside other work").
//
//   crew         numbered in the order in which they start, from 0 on; block b of a launch is here block b of the crew
//   latecomers   workers that start after that: they take GEMM tasks while there are any, and nothing that was dealt
//
// Behind a launch that has given up a wait all workers are latecomers without tasks: peers may still be in that launch, and
// read what it has sent them or what it lets them pull.
//
// The result has the same bits for every crew, as for every number of workers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/ptx/special_registers.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

// In shared memory of every block.
struct Crew {
  int32_t workers;    // of the crew
  int32_t worker;     // this one's number; from `workers` on that of a latecomer
  int32_t tasks_left;  // 0: a latecomer that has nothing left to do
  int32_t dispatchers;  // warps of the crew that pull rows
};

namespace crew {

// How long the first worker waits for the others: short next to any launch, long next to the start of blocks. Who is
// later is only a latecomer.
inline constexpr uint64_t kMusterNs = 20'000;
// Of a launch beside the program, whose multiprocessors may be taken when it begins: as long as blocks of a product
// keep theirs.
inline constexpr uint64_t kMusterBesideNs = 300'000;
// Added to Control::workers_started once the crew is complete; the bits below count workers.
inline constexpr uint32_t kComplete = 1u << 16;

// What the first thread of a worker keeps between enlist() and muster().
struct Enlisted {
  uint64_t begin_ns;
  uint32_t started;  // workers before this one, and kComplete
  bool given_up;     // the arena is of no use any more
};

// By one thread of the first block of a worker, as early as can be: what it does until muster() passes the time in
// which the others start.
__device__ inline Enlisted enlist(Control* control, uint32_t launched) {
  const uint64_t begin_ns = ptx::nanoseconds();
  // Before it counts, when no wait of this launch has begun: all of the crew see what earlier launches have left.
  const bool given_up = ptx::load_relaxed_gpu(&control->given_up) != 0;
  const uint32_t started = atomicAdd(&control->workers_started, 1u);
  if (started == launched - 1) ptx::store_release_gpu(&control->crew, launched);
  return {begin_ns, started, given_up};
}

// By the same thread: waits until the crew is known.
__device__ inline Crew await_crew(Control* control, const Enlisted& self, uint64_t muster_ns) {
  const uint32_t started = self.started;
  uint32_t size = 0;
  // Pairs with the store in enlist() and the one below. It ends, since the first worker has a multiprocessor.
  while ((size = ptx::load_acquire_gpu(&control->crew)) == 0) {
    if (started != 0 || ptx::nanoseconds() - self.begin_ns < muster_ns) continue;
    size = atomicAdd(&control->workers_started, kComplete) % kComplete;
    ptx::store_release_gpu(&control->crew, size);
    break;
  }
  const int32_t worker = static_cast<int32_t>(started % kComplete);
  int32_t tasks_left = 1;
  if (started >= kComplete) {
    // The count comes before any task that this worker takes: announce() relies on it.
    __threadfence();
    tasks_left = ptx::load_relaxed_gpu(&control->tasks_ended) == 0;
  }
  if (self.given_up) return {static_cast<int32_t>(size), static_cast<int32_t>(size), 0, 0};
  return {static_cast<int32_t>(size), worker, tasks_left, 0};
}

// All threads of all blocks of a worker: after it every block knows the crew. `self` is that of the first thread.
template <uint32_t kClusterSize, class Signals>
__device__ __forceinline__ void muster(Crew& shared, const Signals& signals, uint32_t cta_rank, const Enlisted& self,
                                       uint64_t muster_ns) {
  if (threadIdx.x == 0 && cta_rank == 0) shared = await_crew(signals.control(), self, muster_ns);
  if constexpr (kClusterSize > 1) {
    ptx::cluster_sync();
    if (cta_rank != 0 && threadIdx.x == 0) {
      shared = {ptx::load_cluster(&shared.workers, 0), ptx::load_cluster(&shared.worker, 0),
                ptx::load_cluster(&shared.tasks_left, 0), 0};
    }
  }
  if (threadIdx.x == 0) {
    shared.dispatchers = shared.workers * static_cast<int32_t>(kClusterSize) * Roles::kDispatchWarps;
  }
  __syncthreads();
}

// By one thread, once it has seen tasks_done of the whole crew, so that no task is left to be taken: how many workers have
// started so far, latecomers among them. Each of them counts in tasks_done when it is done, whether it had tasks or not.
__device__ inline uint32_t workers_started(Control* control) {
  return ptx::load_acquire_gpu(&control->workers_started) % kComplete;
}

}  // namespace crew
}  // namespace jaxmoe
