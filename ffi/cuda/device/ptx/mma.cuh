// mma.sync: one warp multiplies a 16 x 16 slice of A with a 16 x 8 slice of B, all in its registers. Slower than wgmma
// (wgmma.cuh), but factors can be made by the threads that multiply them, with no barrier between. Used by
// kernel/gemm/packed.cuh and packed_many_rows.cuh.
#pragma once

#include <cstdint>

namespace jaxmoe::ptx {

// sums += a * b. With g = lane / 4 and t = lane % 4, a thread has
//   a[0], a[2]   row g of A, places 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 along the depth; a[1], a[3] those of row g + 8
//   b[0], b[1]   the same places of column g of B
//   sums         row g, columns 2 t and 2 t + 1; then those of row g + 8
// Which element of the depth has which place is free, as long as it is the same in both.
__device__ __forceinline__ void multiply_bf16(float* sums, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of 16 x 32 with 32 x 8 numbers of 8 bits, for what is rare: ptxas makes it of conversions and products of F16.
// A word has 4 places side by side: a[0] row g, places 4 t to 4 t + 3; a[1] row g + 8; a[2], a[3] those 16 further on.
__device__ __forceinline__ void multiply_e4m3(float* sums, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace jaxmoe::ptx
