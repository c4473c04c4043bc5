// Products of rows in 8 bits with weights in MXFP4, decoded in the registers of the warps that multiply them: as in
// packed.cuh, for what is different there see here.
//
// E2M1 is E4M3 with fewer bits: an exponent and a mantissa bit at the right place are the number, 2^6 times smaller,
// subnormal ones too. So a word of 8 weights takes some seven instructions, where 16 bits take twice as many. The scale
// of a group of 32 is not in the numbers but multiplies their products, which are those of one instruction: nothing of
// the weights is ever rounded, however far from each other scales are.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/tiling.h"
#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/packed.cuh"

namespace jaxmoe {

struct PackedRowScales : PackedScales {
  const float* rows;  // those of the tile's first row and the first step, of kRows rows one after the other
};

// A step is 128 along the depth, a line of each row and 64 bytes of each column, which the copy engine has swizzled. Of
// each group of 32 a thread has 8 t to 8 t + 7, a word of weights and 8 bytes of a row.
class FromPackedEightBit : public PackedSums<FromPackedEightBit> {
 public:
  using Scales = PackedRowScales;
  static constexpr float kToSums = 0x1p6f;

  __device__ FromPackedEightBit(const Scales& scales, int) : PackedSums(scales), rows_(scales.rows) {}

  // A word of the column g + 8 t of the warp, for all four of its quad: those of a step.
  __device__ __forceinline__ void begin_groups() { load_groups(0); }
  __device__ __forceinline__ void take_groups(int32_t step, int32_t steps) {
    groups_ = next_groups_;
    if (step + 1 < steps) load_groups(step + 1);
  }
  __device__ __forceinline__ void skip_groups() const {}

  // Scales of rows change within a launch and never come from L1, so those of the first rows are on their way early.
  template <int kRowBlocks>
  __device__ __forceinline__ void prepare(int32_t step) {
    step_ = step;
    load_row_scales<at_most(kRowBlocks, kAtOnce), 0>();
  }

  template <int kRowBlocks, class Stage>
  __device__ __forceinline__ void multiply_step(ptx::Accumulators& sums, const Stage& stage) {
    multiply_from<kRowBlocks, 0>(sums, stage);
  }

  template <int kRowBlocks>
  __device__ __forceinline__ void finish(ptx::Accumulators&) const {}

 private:
  // Row blocks whose products are in hand at a time; of more, weights are decoded once for each so many.
  static constexpr int kAtOnce = 2;

  // Those from a row block on, whose scales are on their way.
  template <int kRowBlocks, int kFirstBlock, class Stage>
  __device__ __forceinline__ void multiply_from(ptx::Accumulators& sums, const Stage& stage) {
    multiply_rows<at_most(kRowBlocks, kAtOnce), kFirstBlock, kRowBlocks < 8 ? 2 : 1>(sums, stage);
    constexpr int kNext = kFirstBlock + kAtOnce;
    if constexpr (kRowBlocks > kNext) {
      if (scales_.row_blocks <= kNext) return;  // also keeps ptxas from having the rows of all in registers
      load_row_scales<kAtOnce, kNext>();
      multiply_from<kRowBlocks, kNext>(sums, stage);
    }
  }

  // Numbers 0, 2, 4 and 6 of a word, and the others, a byte each.
  static __device__ __forceinline__ void decode(uint32_t& even, uint32_t& odd, uint32_t word) {
    constexpr uint32_t kSigns = 0x80808080, kOthers = 0x1c1c1c1c;
    even = (word << 4 & kSigns) | (word << 2 & kOthers);
    odd = (word & kSigns) | (word >> 2 & kOthers);
  }

  // 2^(byte - 127) of a byte of a word; of byte 0, which is less than any normal number, zero; NaN of byte 255.
  static __device__ __forceinline__ float scale_of(uint32_t word, int byte) {
    const float scale = __uint_as_float(__byte_perm(word, 0, 0x0444 | byte << 12) >> 1);
    return fmaf(scale, 0.0f, scale);  // what is infinite becomes NaN
  }

  template <int kRowBlocks, int kFirstBlock>
  __device__ __forceinline__ void load_row_scales() {
    const float* const first = rows_ + step_ * Tiling::kRows + 8 * kFirstBlock + 2 * (ptx::read_lane() & 3);
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) row_scales_[i] = __ldcg(reinterpret_cast<const float2*>(first + 8 * i));
  }

  template <int kRowBlocks, int kFirstBlock, int kUnrolledGroups, class Stage>
  __device__ __forceinline__ void multiply_rows(ptx::Accumulators& sums, const Stage& stage) {
    uint32_t groups[4];
    const int quad = ptx::read_lane() & ~3;
#pragma unroll
    for (int u = 0; u < 4; ++u) groups[u] = __shfl_sync(0xffffffff, groups_, quad + u);
    float parts[2][kRowBlocks][4] = {};
    // Of many rows one group after the other: ptxas would have the products of all in registers.
#pragma unroll kUnrolledGroups
    for (int group = 0; group < 4; ++group) multiply_group<kRowBlocks, kFirstBlock>(parts, stage, groups, group);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        float* const of_block = sums.values + 4 * (16 * block + kFirstBlock + i);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          of_block[v] = fmaf(parts[block][i][v], v % 2 == 0 ? row_scales_[i].x : row_scales_[i].y, of_block[v]);
        }
      }
    }
  }

  // Adds the products of one group, times the scales of its columns.
  template <int kRowBlocks, int kFirstBlock, class Stage>
  __device__ __forceinline__ void multiply_group(float (&parts)[2][kRowBlocks][4], const Stage& stage,
                                                 const uint32_t (&groups)[4], int group) const {
    const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;  // asked anew: there is no register to keep it
    uint32_t a[2][4];
    float scales[2][2];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Lines begin at a multiple of 16, so the swizzle of 64 bytes depends on g alone.
        const std::byte* const line = stage.b.lines[scales_.lines[block] + g + 8 * half];
        const uint32_t word = *reinterpret_cast<const uint32_t*>(line + 16 * (group ^ (g >> 1 & 3)) + 4 * t);
        decode(a[block][half], a[block][2 + half], word);
        scales[block][half] = scale_of(groups[2 * block + half], group);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
      const auto* const line = reinterpret_cast<const std::byte*>(stage.a.lines[8 * (kFirstBlock + i) + g]);
      const uint2 eight =
          *reinterpret_cast<const uint2*>(line + 16 * ((2 * group + t / 2) ^ g) + 8 * (t % 2));
      const uint32_t b[2] = {__byte_perm(eight.x, eight.y, 0x6420), __byte_perm(eight.x, eight.y, 0x7531)};
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const ptx::Products products = ptx::multiply_e4m3(a[block], b);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          parts[block][i][v] = fmaf(products.values[v], scales[block][v / 2], parts[block][i][v]);
        }
      }
    }
  }

  __device__ __forceinline__ void load_groups(int32_t step) {
    const uint8_t* const column = groups_of_column();
    if (column == nullptr) return;
    next_groups_ = __ldg(reinterpret_cast<const uint32_t*>(column) + step);
  }

  uint32_t groups_ = 0, next_groups_ = 0;
  const float* const rows_;
  int32_t step_ = 0;
  float2 row_scales_[kAtOnce];  // of rows 2 t and 2 t + 1 of each block
};

}  // namespace jaxmoe
