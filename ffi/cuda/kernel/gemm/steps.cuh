// The steps of a tile in which something is due beside products, and the loop over all steps for policies that have them in
// one call (accumulate.cuh).
#pragma once

#include <cstdint>

namespace jaxmoe {

// Of a tile what the one before it has stored is announced (task_queue.cuh) while this step is multiplied, about half a
// microsecond after its first one: by then the stores are likely complete.
inline constexpr int32_t kAnnounceStep = 5;

// Whether something is due in a step of `steps`: that, or what has to be known behind the last one.
__device__ __forceinline__ bool is_due(int32_t step, int32_t steps) {
  return step == kAnnounceStep || step == steps - 1;
}

// Calls body(step) for each, and before it meanwhile(step) where something is due. The loop ends there and begins again:
// a branch around code that is nearly never run costs every step time, since what is behind it is not in the instruction
// cache. kInOne: the loop asks in every step instead, which takes a register less.
template <bool kInOne = false, class Meanwhile, class Body>
__device__ __forceinline__ void for_each_step(int32_t steps, const Meanwhile& meanwhile, const Body& body) {
  int32_t step = 0;
  if constexpr (kInOne) {
#pragma unroll 1
    for (; step < steps; ++step) {
      if (is_due(step, steps)) meanwhile(step);
      body(step);
    }
    return;
  }
  int32_t end = kAnnounceStep < steps ? kAnnounceStep : steps - 1;  // of the steps before anything is due
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (; step < end; ++step) body(step);
    if (step == steps) return;
    meanwhile(step);
    end = step < steps - 1 ? steps - 1 : steps;
  }
}

}  // namespace jaxmoe
