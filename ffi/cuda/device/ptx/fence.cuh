// Fences between the generic proxy (ordinary loads and stores) and the async proxy (bulk copies, tensor cores), and the
// barrier of all threads of a cluster.
#pragma once

#include <cstdint>

namespace jaxmoe::ptx {

// Makes initialised mbarriers visible to the async proxy and to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's ordinary accesses to shared memory of its block before asynchronous ones that follow, its own or
// those of a thread that it then meets at a barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory: between the acquire of a signal and bulk loads of what it announced, and between bulk
// stores that have completed and the release of the signal that announces them.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// A barrier of kThreads threads of the block, whole warps; 0 is that of __syncthreads().
template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier() {
  static_assert(kBarrier > 0 && kBarrier < 16 && kThreads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The same of two warps, one of up to four such pairs of the block.
template <int kThreads>
__device__ __forceinline__ void named_barrier_of_pair(int pair) {
  constexpr int kFirst = 5;  // behind those of named_barrier()
  asm volatile("bar.sync %0, %1;" ::"r"(kFirst + pair), "n"(kThreads) : "memory");
}

// Whether something holds in all kThreads threads that meet here, one of two such barriers of the block.
template <int kThreads>
__device__ __forceinline__ bool all_at_barrier(int which, bool holds) {
  constexpr int kFirst = 9;  // behind those of named_barrier_of_pair()
  uint32_t in_all;
  asm volatile(
      "{\n.reg .pred holds, all;\nsetp.ne.u32 holds, %1, 0;\n"
      "barrier.cta.red.and.pred all, %2, %3, holds;\nselp.u32 %0, 1, 0, all;\n}"
      : "=r"(in_all)
      : "r"(static_cast<uint32_t>(holds)), "r"(kFirst + which), "n"(kThreads)
      : "memory");
  return in_all != 0;
}

// One word to the same place in the shared memory of block `cta_rank` of the cluster, and a look at what came that way.
// Ordered with nothing else.
__device__ __forceinline__ void store_cluster(int32_t* word, uint32_t cta_rank, int32_t value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.relaxed.cluster.shared::cluster.s32 [remote], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(word))),
      "r"(cta_rank), "r"(value)
      : "memory");
}
__device__ __forceinline__ int32_t load_cluster(const int32_t* word) {
  int32_t value;
  asm volatile("ld.relaxed.cluster.shared::cta.s32 %0, [%1];"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(word)))
               : "memory");
  return value;
}

// The word at the same place in the shared memory of block `cta_rank` of the cluster, after a barrier that orders its
// write before.
__device__ __forceinline__ int32_t load_cluster(const int32_t* word, uint32_t cta_rank) {
  int32_t value;
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.relaxed.cluster.shared::cluster.s32 %0, [remote];\n}"
      : "=r"(value)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(word))), "r"(cta_rank)
      : "memory");
  return value;
}

// Every thread of every block of the cluster; release before, acquire after. The instruction wants the lanes of a warp
// to come together, which a branch on the lane before it does not promise.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace jaxmoe::ptx
