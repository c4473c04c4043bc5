// Products of few rows in 8 bits, 16 at most, with packed weights (packed_eight_bit.cuh): the scale of a group multiplies
// its product.
//
// An E2M1 number has 2^6 times its value as E4M3 with the same bits, subnormal ones too, so decoding moves bits alone. A
// product of 32 along the depth is one group: its scale, and those of rows, multiply it in float32, whatever their range.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/packed_lines.cuh"

namespace jaxmoe {

// Numbers 0, 2, 4, 6 of the 8 of a word, and 1, 3, 5, 7, as E4M3, 2^6 times smaller.
struct EightNumbers {
  uint32_t even, odd;

  static __device__ __forceinline__ EightNumbers of_word(uint32_t word) {
    constexpr uint32_t kSign = 0x80808080, kMagnitude = 0x1c1c1c1c;
    return {(word * kShifts.by_4 & kSign) | (word * kShifts.by_2 & kMagnitude),
            (word & kSign) | (word >> 2 & kMagnitude)};
  }
};

// Of a group thread t of a quad has numbers 8 t to 8 t + 7, in 4 bytes, and multiplies the even ones in the first half of
// the depth; rows have theirs in that order (turned.cuh).
//
// While the products of a step run, the words of the next one are loaded. Then they are waited for, scaled and added up while
// the next factor is decoded; the tensor cores have the other warpgroup's meanwhile.
template <int kColumnBlocks, int kBlocks>
class FewPackedRows {
 public:
  __device__ explicit FewPackedRows(const PackedPart& part) : part_(part) {}

  template <class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply(ptx::Accumulators& sums, const Steps& ring,
                                           typename Steps::Position& position, int32_t steps,
                                           const Meanwhile& meanwhile, const Track& track) {
    groups_.begin(part_);
    for (auto& of_group : products_) {
#pragma unroll
      for (auto& of_block : of_group) ptx::clear_accumulators(of_block);
    }
    begin_sums<kBlocks>(sums);
    const PackedPlaces<Steps::kLineBytes> places(part_);
    const typename Steps::First first{position};
    track.stall([&] { ring.wait(first); });
    load(places, ring.stage(first));
    decode();
    groups_.take(part_, 0);
    ring.for_each(steps, position, meanwhile, [&](auto place, int32_t step, bool more) __attribute__((always_inline)) {
      const auto& stage = ring.stage(place);
      const uint32_t lines = ptx::as_uniform(descriptor_place(stage.a));  // first, since it takes some forty cycles
      // The last step loads once more what it has, instead of branching around what the others do.
      const auto next = Steps::after_or_there(place, more);
      const bool full = ring.looks_full(next);
      uint32_t scales[2 * kColumnBlocks];  // of the step's groups, a word for each of the quad's columns
#pragma unroll
      for (int u = 0; u < 2 * kColumnBlocks; ++u) scales[u] = groups_.of_column(u);
      issue<typename Steps::A>(lines);
      const auto rows = RowScales<kBlocks>::of(stage);
      if (!full) track.stall([&] { ring.wait(next); });
      load(places, ring.stage(next));
      finish();
      ring.release(place, ptx::read_lane());
      add(sums, scales, rows);
      decode();
      groups_.take(part_, step + 1);
    });
    end_sums<kBlocks>(sums);
  }

 private:
  template <class Places, class Stage>
  __device__ __forceinline__ void load(const Places& places, const Stage& stage) {
#pragma unroll
    for (int i = 0; i < kGroupsOfStep; ++i) {
#pragma unroll
      for (int u = 0; u < 2 * kColumnBlocks; ++u) words_[i][u / 2][u % 2] = places.word(stage, u / 2, i, u % 2);
    }
  }
  __device__ __forceinline__ void decode() {
#pragma unroll
    for (int i = 0; i < kGroupsOfStep; ++i) {
#pragma unroll
      for (int u = 0; u < 2 * kColumnBlocks; ++u) {
        const EightNumbers numbers = EightNumbers::of_word(words_[i][u / 2][u % 2]);
        columns_[i][u / 2][u % 2] = numbers.even;
        columns_[i][u / 2][u % 2 + 2] = numbers.odd;
      }
    }
  }

  // Of rows whose lines begin there.
  template <class Rows>
  __device__ __forceinline__ void issue(uint32_t lines) {
    constexpr ptx::Major kDepth = ptx::Major::kDepth;
    static_assert(Rows::kSliceDepth == kNumbersOfGroup);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroupsOfStep; ++i) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        ptx::multiply_e4m3(products_[i][block], columns_[i][block],
                           ptx::depth_major_descriptor(lines, i * Rows::template kSliceBytes<kDepth>), false);
      }
    }
    ptx::commit_products();
  }
  // Until then nothing is written to what they are made of.
  __device__ __forceinline__ void finish() {
    ptx::wait_products<0>();
#pragma unroll
    for (int i = 0; i < kGroupsOfStep; ++i) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        ptx::own_accumulators(products_[i][block]);
        ptx::own_words(columns_[i][block]);
      }
    }
  }

  __device__ __forceinline__ void add(ptx::Accumulators& sums, const uint32_t (&scales)[2 * kColumnBlocks],
                                      const RowScales<kBlocks>& rows) const {
#pragma unroll
    for (int u = 0; u < 2 * kColumnBlocks; ++u) {
      const int block = u / 2, half = u % 2;
      float of_group[kGroupsOfStep];
#pragma unroll
      for (int i = 0; i < kGroupsOfStep; ++i) of_group[i] = power_of_two(scales[u], i);
#pragma unroll
      for (int row_block = 0; row_block < kBlocks; ++row_block) {
        const int at = 4 * row_block + 2 * half;
        float* const of_sums = sums.values + 4 * (16 * block + row_block) + 2 * half;
        float first_row = of_group[0] * products_[0][block].values[at];
        float second_row = of_group[0] * products_[0][block].values[at + 1];
#pragma unroll
        for (int i = 1; i < kGroupsOfStep; ++i) {
          first_row += of_group[i] * products_[i][block].values[at];
          second_row += of_group[i] * products_[i][block].values[at + 1];
        }
        of_sums[0] += rows.rows[row_block].x * first_row;
        of_sums[1] += rows.rows[row_block].y * second_row;
      }
    }
  }

  const PackedPart& part_;
  OneGroupWord<true> groups_;
  // Of each group and block of columns: words of the quad's columns g and g + 8, the factor that they decode to, and its
  // products with rows.
  uint32_t words_[kGroupsOfStep][kColumnBlocks][2];
  ptx::FactorWords columns_[kGroupsOfStep][kColumnBlocks];
  ptx::FewAccumulators<8 * kBlocks> products_[kGroupsOfStep][kColumnBlocks];
};

}  // namespace jaxmoe
