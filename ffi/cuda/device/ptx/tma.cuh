// The bulk copy engine: boxes of a tensor map into shared memory, rows of shared memory to any global address (a peer's
// mapped memory too), and its groups. One thread issues a copy; nothing here waits but the wait_* functions.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/ptx/mbarrier.cuh"

namespace jaxmoe::ptx {

// How L2 treats the lines of a copy. A policy is an opaque word, made once per role.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One box into this block's shared memory. Coordinates are those of its first element, innermost dimension first; what
// lies outside the tensor arrives as zeros and counts as bytes of the barrier all the same.
__device__ __forceinline__ void load_box(void* target, const CUtensorMap* map, uint64_t* barrier, uint64_t policy,
                                         int32_t x, int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "l"(policy), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void load_box(void* target, const CUtensorMap* map, uint64_t* barrier, uint64_t policy,
                                         int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "l"(policy), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same box into every block of the cluster whose bit is set in `cta_mask`, at the same offset of its shared memory;
// the bytes count at the barrier at the same offset there.
__device__ __forceinline__ void load_box_multicast(void* target, const CUtensorMap* map, uint64_t* barrier,
                                                   uint64_t policy, uint16_t cta_mask, int32_t x, int32_t y,
                                                   int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%5, %6, %7}], [%2], %4, %3;" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "l"(policy), "h"(cta_mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// `bytes` bytes of global memory, a peer's mapped memory too, into this block's shared memory; both addresses and the
// size are multiples of 16.
__device__ __forceinline__ void load_bytes(void* target, const void* source, uint64_t* barrier, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// `bytes` bytes of shared memory to global memory; both addresses and the size are multiples of 16.
__device__ __forceinline__ void store_bytes(void* target, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(target)),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}

// Brings `bytes` bytes of global memory into L2, no more; both the address and the size are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(source)), "r"(bytes)
               : "memory");
}

// A box of shared memory, swizzled as loads leave it, to a tensor; what lies outside the tensor is not written.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* source, int32_t x, int32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(source)), "r"(x), "r"(y)
               : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* source, int32_t x, int32_t y,
                                          int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(source)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// Stores since the last commit of this thread become one group.
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups have yet to read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most kPending of this thread's groups are not complete; the writes of the others are visible to it.
template <int kPending>
__device__ __forceinline__ void wait_stores_complete() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jaxmoe::ptx
