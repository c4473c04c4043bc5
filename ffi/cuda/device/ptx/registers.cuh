// Registers: how many a warpgroup owns, and moving 8 x 8 tiles from them to shared memory.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/mbarrier.cuh"

namespace jaxmoe::ptx {

// Gives registers back, or waits until that many can be had. All four warps of a warpgroup, once each, in the branch of
// its role; kCount is a multiple of 8. The launch gives every thread the same number, so what some take others release.
template <int kCount>
__device__ __forceinline__ void release_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Four 8 x 8 tiles of 16-bit elements. Register i of a lane holds row lane / 4, columns 2 (lane % 4) and the next, of
// tile i; lane l names the address of the 16 bytes of row l % 8 of tile l / 8.
__device__ __forceinline__ void store_tiles(void* row, const uint32_t (&tiles)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
               : "memory");
}

// The same, turned: row l % 8 in memory is column l % 8 of a tile.
__device__ __forceinline__ void store_turned_tiles(void* row, const uint32_t (&tiles)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
               : "memory");
}

__device__ __forceinline__ void store_turned_tiles(void* row, const uint32_t (&tiles)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
               "r"(tiles[0]), "r"(tiles[1])
               : "memory");
}

// The way back, as they lie.
__device__ __forceinline__ void load_tiles(uint32_t (&tiles)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"(shared_address(row))
               : "memory");
}

// Of 8 columns lane l of every four has l and l + 4, packed in 16 bits each; returns 2 l and 2 l + 1 of them.
__device__ __forceinline__ uint32_t as_neighbours(uint32_t apart, int lane) {
  const int even = lane % 2 * 2;
  const uint32_t first = __shfl_sync(0xffffffff, apart, even, 4);
  const uint32_t second = __shfl_sync(0xffffffff, apart, even + 1, 4);
  return __byte_perm(first, second, lane % 4 < 2 ? 0x5410 : 0x7632);
}

// Byte i of the result is the byte of the eight of `first` and `second` that nibble i of the selector names; with its
// highest bit set, the highest bit of that byte eight times.
__device__ __forceinline__ uint32_t permute(uint32_t first, uint32_t second, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(first), "r"(second), "r"(selector));
  return bytes;
}

// A value that is the same in all lanes, as the compiler then knows: what is computed with it has no part in the registers
// of lanes. Descriptors (wgmma.cuh) have to lie in those of the warp; of a value that may differ each is made in two of a
// lane and moved.
__device__ __forceinline__ uint32_t as_uniform(uint32_t value) { return __reduce_or_sync(0xffffffff, value); }

// True in one lane of a warp whose lanes are all here; the compiler then knows that a single thread runs the branch.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// The lane in its warp, asked of the hardware each time.
__device__ __forceinline__ int read_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace jaxmoe::ptx
