// What math warps do before their first stage is there: they go through the epilogues once, without results. Code that runs
// for the first time in a launch comes from L2, presumably, a line at a time, and an epilogue is a long stretch of it: the
// first one took several times as long as the others (docs/performance.md), at a time when all multiprocessors wait for
// it. It has to be the same code and not a copy, so these are tasks like any other, but for products, stores, and
// signals. Callers: ends.cuh, task_queue.cuh, math.cuh.
//
// Of a forward pass; a backward one has not been tried with it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::rehearsal {

// They lie in the last places of the queue of tasks, which the producer comes to when math warps have long left them.
template <class Variant>
inline constexpr int kTasks = Variant::kPass == Pass::kForward ? 2 : 0;

template <class Variant>
__device__ __forceinline__ bool is_one(const Task& task) {
  return kTasks<Variant> > 0 && task.column_tiles == 0;
}

// By one thread of the block, before the roles part. Wide epilogues store nothing of rows that a tile does not have, so
// theirs has none. Those of packed weights would end where rows do: theirs have columns behind the last one.
template <class Variant>
__device__ __forceinline__ void prepare(const Cta<Variant>& cta) {
  static_assert(Variant::config.stages + 1 + kTasks<Variant> <= kQueuedTasks, "as far ahead as the producer is");
  constexpr Gemm kGemms[] = {Gemm::kGateUp, Gemm::kDown};
  constexpr bool kPacked = Variant::Precision::kPacked;
  const auto& p = cta.params;
#pragma unroll
  for (int i = 0; i < kTasks<Variant>; ++i) {
    const bool down = kGemms[i] == Gemm::kDown;
    const int32_t behind = down ? answer_tiles(p.shape, p.schedule.tile) : h_tiles(p.shape, p.schedule.tile);
    Task& task = cta.shared.tasks[kQueuedTasks - kTasks<Variant> + i];
    task = {.gemm = kGemms[i], .rows = kPacked ? Roles::kWarpThreads : 0, .column_tile = kPacked ? behind : 0};
  }
}

}  // namespace jaxmoe::rehearsal
