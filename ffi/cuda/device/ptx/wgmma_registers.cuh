// Products of warpgroups whose first factor comes from registers: made by the threads that multiply it, and not to be
// written before the products are done. The second one lies in shared memory, along the depth (wgmma.cuh). Used by
// kernel/gemm/packed*.cuh.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_lists.cuh"

namespace jaxmoe::ptx {

// This thread's part of a 64 x kRows product: as Accumulators have theirs, for fewer columns.
template <int kRows>
struct FewAccumulators {
  float values[kRows / 2];
};

// Of a thread's part of 64 x 32 numbers of 8 bits: with g = lane / 4 and t = lane % 4, words 0 and 2 are row g of the
// warp's 16, places 4 t to 4 t + 3 and 16 further on along the depth; words 1 and 3 the same of row g + 8.
using FactorWords = uint32_t[4];

// After wait_products<0>(): keeps the compiler from writing to them before that wait.
__device__ __forceinline__ void own_words(FactorWords& words) {
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word)::"memory");
}

// products = a * rows, with what was in them where `add` is set: a constant for the compiler. They must have been set
// before, see clear_accumulators().
__device__ __forceinline__ void multiply_e4m3(FewAccumulators<8>& products, const FactorWords& a, uint64_t rows,
                                              bool add) {
  float(&d)[4] = products.values;
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3"
      "}, {%4, %5, %6, %7}, %8, accumulate, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(static_cast<int>(add))
      : "memory");
}
__device__ __forceinline__ void multiply_e4m3(FewAccumulators<16>& products, const FactorWords& a, uint64_t rows,
                                              bool add) {
  float(&d)[8] = products.values;
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, accumulate, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(static_cast<int>(add))
      : "memory");
}
__device__ __forceinline__ void multiply_e4m3(FewAccumulators<32>& products, const FactorWords& a, uint64_t rows,
                                              bool add) {
  float(&d)[16] = products.values;
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, accumulate, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(static_cast<int>(add))
      : "memory");
}
__device__ __forceinline__ void multiply_e4m3(FewAccumulators<40>& products, const FactorWords& a, uint64_t rows,
                                              bool add) {
  float(&d)[20] = products.values;
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %25, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n40k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19"
      "}, {%20, %21, %22, %23}, %24, accumulate, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(static_cast<int>(add))
      : "memory");
}
__device__ __forceinline__ void multiply_e4m3(FewAccumulators<48>& products, const FactorWords& a, uint64_t rows,
                                              bool add) {
  float(&d)[24] = products.values;
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %29, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23"
      "}, {%24, %25, %26, %27}, %28, accumulate, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(static_cast<int>(add))
      : "memory");
}
__device__ __forceinline__ void multiply_e4m3(FewAccumulators<64>& products, const FactorWords& a, uint64_t rows,
                                              bool add) {
  float(&d)[32] = products.values;
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"(static_cast<int>(add))
      : "memory");
}

// The same of BF16: sums, which begin with d[0], += a * rows, a slice of 16 along the depth and 128 rows. Of a word the two
// numbers are neighbours along the depth: words 0 and 2 are row g of the warp's 16, places 2 t and 2 t + 8.
__device__ __forceinline__ void multiply_bf16_with_128(float* d, const FactorWords& a, uint64_t rows) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      JAXMOE_64_NAMES
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;\n"
      : JAXMOE_64_SUMS(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows)
      : "memory");
}

}  // namespace jaxmoe::ptx
