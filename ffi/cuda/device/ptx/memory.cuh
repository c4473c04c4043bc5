// Loads, stores and atomics in global memory whose order or caching is not the ordinary one ("gpu": seen by all blocks
// of this device; "system": by peers as well), and copies from there to shared memory that a thread need not wait for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx/mbarrier.cuh"

namespace jaxmoe::ptx {

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void add_release_gpu(uint32_t* word, uint32_t amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(amount) : "memory");
}
__device__ __forceinline__ void store_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// A word in shared memory, for the threads of the block. Returns what was there before.
__device__ __forceinline__ uint32_t add_acquire_release_block(uint32_t* word, uint32_t amount) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(word)), "r"(amount)
               : "memory");
  return before;
}
// Returns what was there before.
__device__ __forceinline__ uint32_t compare_and_swap_acquire_gpu(uint32_t* word, uint32_t expected, uint32_t value) {
  uint32_t seen;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(seen)
               : "l"(word), "r"(expected), "r"(value)
               : "memory");
  return seen;
}
__device__ __forceinline__ void store_relaxed_system(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed_system(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Read once, by one warp alone: no use to keep it in L1.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// 16 bytes of global memory into shared memory, on their way until wait_copies(); no register holds them meanwhile.
__device__ __forceinline__ void copy_vector(void* shared, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(source))
               : "memory");
}
// What this thread has copied is there, for itself; for other lanes after a __syncwarp().
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Brings what lies at an address into L2, where it is `there`.
__device__ __forceinline__ void prefetch_if(bool there, const void* address) {
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %1, 0;\n@there prefetch.global.L2 [%0];\n}" ::"l"(address),
               "r"(static_cast<int>(there)));
}

// Nothing that the launch writes; values stay as they are where `there` is not set. Without a branch, after which the
// compiler would wait for what was loaded.
__device__ __forceinline__ void load_if(bool there, uint32_t& value, const uint32_t* address) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n@there ld.global.nc.u32 %0, [%1];\n}"
      : "+r"(value)
      : "l"(address), "r"(static_cast<int>(there)));
}
__device__ __forceinline__ void load_if(bool there, uint32_t* values, const uint4* address) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n@there ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(values[0]), "+r"(values[1]), "+r"(values[2]), "+r"(values[3])
      : "l"(address), "r"(static_cast<int>(there)));
}

// What is read once; nothing where it is not `there`. The compiler keeps these loads in order.
__device__ __forceinline__ void load_once_if(bool there, uint4& value, const uint4* address) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n@there ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address), "r"(static_cast<int>(there)));
}

}  // namespace jaxmoe::ptx
