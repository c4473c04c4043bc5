// What a thread can ask the hardware: the time, and where it runs.
#pragma once

#include <cstdint>

namespace jaxmoe::ptx {

// The timer that all multiprocessors share.
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}
// Blocks of the launch, asked anew: nothing that follows from it is kept in a register.
__device__ __forceinline__ int32_t read_blocks() {
  int32_t blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int32_t sm_index() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(value));
  return static_cast<int32_t>(value);
}

// The clock of the multiprocessor, and its low half.
__device__ __forceinline__ uint64_t clock_ticks() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(value)::"memory");
  return value;
}
__device__ __forceinline__ uint32_t clock_ticks_low() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(value)::"memory");
  return value;
}

// The number of this block in its cluster, asked anew likewise.
__device__ __forceinline__ int32_t read_cluster_rank() {
  int32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace jaxmoe::ptx
