// wgmma: one warpgroup multiplies a 64 x 16 slice of A with a 16 x 256 slice of B, both in shared memory, and adds the
// product to its float32 accumulators. Each factor may lie either way round (Major). Of 8-bit elements slices are 64 x
// 32 and, of half a tile, 32 x 128, and both lie along the depth. Used by kernel/gemm/ through the precision policies.
//
// Order of calls: wgmma_fence() before the first product of a group, commit_products() after the last,
// wait_products<n>() until at most n groups are unfinished. All 128 threads of the warpgroup make every call.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/mbarrier.cuh"
#include "cuda/device/ptx/wgmma_lists.cuh"

namespace jaxmoe::ptx {

// A thread's share of a 64 x 256 product. values[4 b + 2 h + i] is row 16 w + 8 h + lane / 4, column
// 8 b + 2 (lane % 4) + i, for warp w of the warpgroup.
struct Accumulators {
  float values[128];
};
// The same of a 64 x 128 product.
struct HalfAccumulators {
  float values[64];
};

// Where and how a tile lies in shared memory. Bits: 0-13 address, 16-29 leading offset, 32-45 stride offset (all in
// units of 16 bytes), 62-63 swizzle (1: 128 bytes). Tiles begin at multiples of 1024 bytes, the period of that swizzle;
// slices of a tile are named by adding to the address. What the two offsets mean depends on the major dimension.
inline constexpr uint32_t kDescriptorUnit = 16;
__device__ constexpr uint64_t swizzled_layout(uint32_t leading_bytes, uint32_t stride_bytes) {
  return uint64_t{leading_bytes / kDescriptorUnit} << 16 | uint64_t{stride_bytes / kDescriptorUnit} << 32 |
         uint64_t{1} << 62;
}
__device__ __forceinline__ uint64_t swizzled_descriptor(const void* tile, uint64_t layout) {
  return uint64_t{(shared_address(tile) & 0x3ffff) / kDescriptorUnit} | layout;
}

// Along which dimension neighbouring elements of a factor lie: K, over which the product sums, or the other one.
enum class Major { kDepth = 0, kWidth = 1 };

// A tile whose rows are 128 bytes of the K dimension each: 8 rows are 1024 bytes. The leading offset is not used, since
// a slice of 32 bytes lies within one row.
inline constexpr uint64_t kDepthMajor = swizzled_layout(16, 1024);
__device__ __forceinline__ uint64_t depth_major_descriptor(const void* tile) {
  return swizzled_descriptor(tile, kDepthMajor);
}
// The same for who holds the lower half of a descriptor, which has the address: of what lies `bytes` further on.
__device__ __forceinline__ uint64_t depth_major_descriptor(uint32_t lower, uint32_t bytes) {
  return kDepthMajor >> 32 << 32 | (lower + bytes / kDescriptorUnit);
}

// A tile whose rows are 64 16-bit elements of the M or N dimension, one row for each k: 8 rows (values of k) are 1024
// bytes, and `block_bytes` lie between one block of 64 columns and the next.
__device__ __forceinline__ uint64_t width_major_descriptor(const void* tile, uint32_t block_bytes) {
  return swizzled_descriptor(tile, swizzled_layout(block_bytes, 1024));
}

// The descriptor of what lies `bytes` further on.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
  return descriptor + bytes / kDescriptorUnit;
}

// Orders earlier accesses to the accumulators before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After wait_products<0>(): keeps the compiler from reading accumulators before that wait, of which it knows nothing.
template <class Sums>
__device__ __forceinline__ void own_accumulators(Sums& accumulators) {
#pragma unroll
  for (float& value : accumulators.values) asm volatile("" : "+f"(value)::"memory");
}

// Sets all sums to zero, 64 instructions. The alternative, a first product that does not add, leaves the registers
// undefined before it; ptxas 13.0 then runs the products of some callers one after the other and says so in a line of
// information that is no warning ("C7515 ... wgmma.mma_async instructions are serialized"). No build may print it.
template <class Sums>
__device__ __forceinline__ void clear_accumulators(Sums& accumulators) {
#pragma unroll
  for (float& value : accumulators.values) value = 0.0f;
}

// accumulators += a * b. PTX takes the 128 registers one by one, and the element type is part of the instruction's
// name: both are spelled once, here.
#define JAXMOE_WGMMA_64X256(depth_and_types, majors)                                                           \
  asm volatile(                                                                                                \
      "{\n"                                                                                                    \
      ".reg .pred accumulate;\n"                                                                               \
      "setp.ne.b32 accumulate, %130, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n256" depth_and_types " {"                                              \
      JAXMOE_64_NAMES ", "                                                                                     \
      "%64, %65, %66, %67, %68, %69, %70, %71, "                                                               \
      "%72, %73, %74, %75, %76, %77, %78, %79, "                                                               \
      "%80, %81, %82, %83, %84, %85, %86, %87, "                                                               \
      "%88, %89, %90, %91, %92, %93, %94, %95, "                                                               \
      "%96, %97, %98, %99, %100, %101, %102, %103, "                                                           \
      "%104, %105, %106, %107, %108, %109, %110, %111, "                                                       \
      "%112, %113, %114, %115, %116, %117, %118, %119, "                                                       \
      "%120, %121, %122, %123, %124, %125, %126, %127"                                                         \
      "}, %128, %129, accumulate, 1, 1" majors ";\n"                                                           \
      "}"                                                                                                      \
      : JAXMOE_64_SUMS(0), JAXMOE_64_SUMS(64)                                                                  \
      : "l"(a), "l"(b), "n"(1), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB))                           \
      : "memory")

template <Major kA, Major kB>
__device__ __forceinline__ void multiply_bf16(Accumulators& accumulators, uint64_t a, uint64_t b) {
  float(&d)[128] = accumulators.values;
  JAXMOE_WGMMA_64X256("k16.f32.bf16.bf16", ", %131, %132");
}
template <Major kA, Major kB>
__device__ __forceinline__ void multiply_f16(Accumulators& accumulators, uint64_t a, uint64_t b) {
  float(&d)[128] = accumulators.values;
  JAXMOE_WGMMA_64X256("k16.f32.f16.f16", ", %131, %132");
}
// Both factors lie along the depth: the instruction takes no others.
__device__ __forceinline__ void multiply_e4m3(Accumulators& accumulators, uint64_t a, uint64_t b) {
  constexpr Major kA = Major::kDepth, kB = Major::kDepth;
  float(&d)[128] = accumulators.values;
  JAXMOE_WGMMA_64X256("k32.f32.e4m3.e4m3", "");
}

#undef JAXMOE_WGMMA_64X256

// accumulators = a * b, with what was in them where `add` is set: a constant for the compiler.
__device__ __forceinline__ void multiply_e4m3(HalfAccumulators& accumulators, uint64_t a, uint64_t b, bool add) {
  float(&d)[64] = accumulators.values;
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      JAXMOE_64_NAMES
      "}, %64, %65, accumulate, 1, 1;\n"
      "}"
      : JAXMOE_64_SUMS(0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add))
      : "memory");
}

}  // namespace jaxmoe::ptx
