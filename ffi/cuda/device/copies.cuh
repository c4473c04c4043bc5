// Copies of rows between places in global memory, this rank's or a peer's, through registers: 16 bytes a thread with
// several loads in flight. Shared memory is all taken by the stages of the GEMMs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx/memory.cuh"

namespace jaxmoe {

inline constexpr int kVectorBytes = 16;

// By a warp: copies a row to `target`, and to `kept` unless that is null.
template <int kLoadsInFlight = 4>
__device__ __forceinline__ void copy_row(uint4* target, uint4* kept, const uint4* source, int32_t vectors, int lane) {
#pragma unroll 1
  for (int32_t first = lane; first < vectors; first += 32 * kLoadsInFlight) {
    uint4 values[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + 32 * i < vectors) values[i] = ptx::load_once(source + first + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + 32 * i < vectors) {
        target[first + 32 * i] = values[i];
        if (kept != nullptr) kept[first + 32 * i] = values[i];
      }
    }
  }
}

// Threads that share a piece of work, and this one's number.
struct Team {
  int64_t threads;
  int64_t thread;
};

// Copies `vectors` from one array to another, all of the team together.
__device__ inline void copy(Team team, uint4* target, const uint4* source, int64_t vectors) {
  const int64_t stride = team.threads;
  int64_t i = team.thread;
  for (; i + 3 * stride < vectors; i += 4 * stride) {
    const uint4 a = source[i], b = source[i + stride], c = source[i + 2 * stride], d = source[i + 3 * stride];
    target[i] = a;
    target[i + stride] = b;
    target[i + 2 * stride] = c;
    target[i + 3 * stride] = d;
  }
  for (; i < vectors; i += stride) target[i] = source[i];
}

}  // namespace jaxmoe
