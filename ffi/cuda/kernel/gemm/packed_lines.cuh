// What all ways to multiply packed weights with rows in 8 bits share (packed_eight_bit.cuh): where a lane finds its part of a
// stage, the scales of rows, the products of a step, and what becomes of sums before products and after them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/tiling.h"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/group_words.cuh"

namespace jaxmoe {

// A step is 128 along the depth: four groups, 64 bytes of each column (PackedTile), a line of each row.
inline constexpr int kGroupsOfStep = 4;
inline constexpr int kSlicesOfStep = 4;  // of the depth, one to a product of the tensor cores
inline constexpr int32_t kNumbersOfGroup = 32;

// Where this lane finds its part of column g of each block, in a stage: as the copy engine swizzles lines of so many bytes, of
// the first step in a line. With g = lane / 4 and t = lane % 4.
template <int kLineBytes>
struct PlacesOfLane {
  static_assert(kLineBytes == 64 || kLineBytes == 128);

  int32_t columns[2];

  // `vector` of the line, of 16 bytes, and so many bytes in it.
  __device__ __forceinline__ PlacesOfLane(const PackedPart& part, int vector, int bytes) {
    const int g = ptx::read_lane() / 4;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      columns[block] = (part.lines[block] + g) * kLineBytes + 16 * (vector ^ (kLineBytes == 64 ? g / 2 : g)) + bytes;
    }
  }
};

// Where a lane multiplies 8 numbers of each group, in 4 bytes: those of group 0 have these places, those of others the same
// with 16 times their number changed.
template <int kLineBytes>
struct PackedPlaces : PlacesOfLane<kLineBytes> {
  __device__ __forceinline__ explicit PackedPlaces(const PackedPart& part)
      : PlacesOfLane<kLineBytes>(part, 0, 4 * (ptx::read_lane() % 4)) {}

  // Of column g of a block, or of g + 8.
  template <class Stage>
  __device__ __forceinline__ uint32_t word(const Stage& stage, int block, int group, int half) const {
    const std::byte* const of_column = stage.b.at(this->columns[block] ^ 16 * group);
    return *reinterpret_cast<const uint32_t*>(of_column + half * 8 * kLineBytes);
  }
};

// Where a lane multiplies one group of a step: group t, and word i of it in the product of slice i of the depth. So a scale is
// made a table of magnitudes (packed_many_rows.cuh) once for 32 numbers of a lane and not for 8, and these come in one load
// instead of four.
template <int kLineBytes>
struct GroupPlaces : PlacesOfLane<kLineBytes> {
  __device__ __forceinline__ explicit GroupPlaces(const PackedPart& part)
      : PlacesOfLane<kLineBytes>(part, ptx::read_lane() % 4, 0) {}

  // Of column g of a block, or of g + 8.
  template <class Stage>
  __device__ __forceinline__ uint4 words(const Stage& stage, int block, int half) const {
    return *reinterpret_cast<const uint4*>(stage.b.at(this->columns[block]) + half * 8 * kLineBytes);
  }
  // One of them, where there are no registers for all.
  template <class Stage>
  __device__ __forceinline__ uint32_t word(const Stage& stage, int block, int half, int slice) const {
    return reinterpret_cast<const uint32_t*>(stage.b.at(this->columns[block]) + half * 8 * kLineBytes)[slice];
  }
};

// Of a word with a byte for each group of a step, that of the lane's.
__device__ __forceinline__ uint32_t group_of_lane(uint32_t word) {
  return ptx::permute(word, 0, 0x4440 + ptx::read_lane() % 4);
}

// Scales of the rows of this thread's columns of products: of each row block two.
template <int kBlocks>
struct RowScales {
  float2 rows[kBlocks];

  // From row block `first` on.
  template <class Stage>
  static __device__ __forceinline__ RowScales of(const Stage& stage, int first = 0) {
    const float* const of_lane = stage.row_scales + 8 * first + 2 * (ptx::read_lane() % 4);
    RowScales scales;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) scales.rows[i] = *reinterpret_cast<const float2*>(of_lane + 8 * i);
    return scales;
  }
};

// Multiplies the columns of a step with its rows from row block `first` on, whose lines begin at `rows`: descriptor_place() of
// the step's, as uniform. `Rows` is their type.
template <class Rows, class Products>
__device__ __forceinline__ void issue_step(Products& products, const ptx::FactorWords (&columns)[kSlicesOfStep],
                                           uint32_t rows, int first) {
  static_assert(Rows::kSliceDepth == kNumbersOfGroup);
  constexpr uint32_t kSliceBytes = Rows::template kSliceBytes<ptx::Major::kDepth>;
  ptx::wgmma_fence();
#pragma unroll
  for (int slice = 0; slice < kSlicesOfStep; ++slice) {
    const uint32_t bytes = 8 * first * Rows::kLineBytes + slice * kSliceBytes;
    ptx::multiply_e4m3(products, columns[slice], ptx::depth_major_descriptor(rows, bytes), slice > 0);
  }
  ptx::commit_products();
}

// The sums of the first kBlocks row blocks, before their products.
template <int kBlocks>
__device__ __forceinline__ void begin_sums(ptx::Accumulators& sums) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    if (i % 64 < 4 * kBlocks) sums.values[i] = 0.0f;
  }
}
// After them. Scales of groups that are NaN came as infinity (power_of_two()). Sums of other row blocks become zero only now,
// so that no register held them meanwhile.
template <int kBlocks>
__device__ __forceinline__ void end_sums(ptx::Accumulators& sums) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    float& sum = sums.values[i];
    sum = i % 64 < 4 * kBlocks ? fmaf(sum, 0.0f, sum) : 0.0f;
  }
}

// Multiplies the sums of one of the quad's columns.
template <int kBlocks>
__device__ __forceinline__ void scale_column(ptx::Accumulators& sums, int column, float factor) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) sums.values[4 * (16 * (column / 2) + i) + 2 * (column % 2) + n] *= factor;
  }
}

// Powers of two that stand for shifts. The compiler does not know them: it would make shifts of them, which take the pipe
// that masks take already, the busiest one.
struct ShiftFactors {
  uint32_t by_2, by_4;
  uint32_t of_byte[3];  // that bring byte 0, 1, 2 to the exponent of a float
};
static __constant__ ShiftFactors kShifts{1 << 2, 1 << 4, {1 << 23, 1 << 15, 1 << 7}};

// 2^(byte - 127) of byte `nth` of a word; zero for byte 0, which stands for 2^-127, and infinity for 255, which stands for
// NaN: end_sums() makes that of it.
__device__ __forceinline__ float power_of_two(uint32_t word, int nth) {
  constexpr uint32_t kExponent = 0x7f800000;
  const uint32_t bits = nth == 3 ? word >> 1 : word * kShifts.of_byte[nth];
  return __uint_as_float(bits & kExponent);
}

}  // namespace jaxmoe
