// Products of more than 32 rows in 8 bits with packed weights (packed_eight_bit.cuh). With many rows it would be the products
// of groups with their scales that take the time (packed_few_rows.cuh), four for each number of a step's sum. So here
// the scales of a column's four groups are made one: numbers become E4M3 with the exponents that are left, and the
// tensor cores add up the step.
//
// E2M1 times 2^s is a normal number of E4M3, or zero, for s from -5 to 6. The largest scale of the four groups gets 6, so
// groups up to 2^11 times smaller are exact. What is smaller still is left out, and added by products of its own: rare
// enough that their speed does not matter.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/packed_lines.cuh"

namespace jaxmoe {

// E4M3 of the 8 magnitudes of E2M1, times 2^s: magnitude i is byte i % 4 of the first or second word.
struct Magnitudes {
  static constexpr int32_t kMostShift = 6, kLeastShift = -5;

  uint32_t small, large;

  static __device__ __forceinline__ Magnitudes shifted(int32_t s) {
    // Of 0, 0.5, 1, 1.5 and 2, 3, 4, 6. An exponent has 3 bits of mantissa behind it; zero has none to add to.
    return {0x3c383000u + static_cast<uint32_t>(s) * 0x08080800u, 0x4c484440u + static_cast<uint32_t>(s) * 0x08080808u};
  }

  // Numbers 0 to 3 of the 8 of a word, or 4 to 7.
  template <bool kSecond>
  __device__ __forceinline__ uint32_t decode(uint32_t word) const {
    constexpr uint32_t kSign = 0x80808080;
    const uint32_t magnitudes = (word & 0x77777777) >> (kSecond ? 16 : 0);
    // The highest bit of a byte is the sign of its second number, and 4 bits further up that of its first.
    const uint32_t signs = ptx::permute(word, word * kShifts.by_4, kSecond ? 0xbfae : 0x9d8c);
    return (signs & kSign) | ptx::permute(small, large, magnitudes);
  }
};

// Of a group thread t of a quad has numbers 8 t to 8 t + 7, in 4 bytes, and multiplies the first four in the first half of
// the depth; rows have theirs in that order (turned.cuh).
template <int kColumnBlocks, int kBlocks>
class ManyPackedRows {
 public:
  __device__ explicit ManyPackedRows(const PackedPart& part) : part_(part) {}

  template <class Ring, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply(ptx::Accumulators& sums, const Ring& ring,
                                           typename Ring::Position& position, int32_t steps,
                                           const Meanwhile& meanwhile, const Track& track) {
    groups_.begin(part_);
    begin_sums<kBlocks>(sums);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      track.stall([&] { ring.wait(position); });
      groups_.take(part_, step);
      auto& stage = ring.stage(position);
      if constexpr (kBoth) {
        multiply_both(sums, stage);
      } else {
        multiply_block<0>(sums, stage);
        if constexpr (kColumnBlocks > 1) multiply_block<1>(sums, stage);
      }
      ring.release(position, ptx::read_lane());
      meanwhile(step);
      position.advance();
    }
    end_sums<kBlocks>(sums);
  }

 private:
  // Row blocks that are multiplied at once: of more there are no registers for products beside sums. Of 128 rows half of them,
  // since with 32 rows a product is waited for longer than it takes; of 96 the products of two parts run at a time.
  static constexpr int kOfPart = kBlocks <= 8 ? kBlocks : kBlocks == 16 ? 8 : 4;
  using Products = ptx::FewAccumulators<8 * kOfPart>;
  static constexpr bool kBoth = kOfPart == kBlocks;  // both blocks of columns are decoded at a time
  static constexpr bool kTwoAtATime = kBlocks <= 12;  // parts, whose products are under way

  // The scales of a step's groups of one column.
  struct ColumnScales {
    int32_t shifts[kGroupsOfStep];  // s of each
    float scale;                    // what all are multiplied with

    static __device__ __forceinline__ ColumnScales of_word(uint32_t word) {
      // These numbers are 2^kMostShift times too large, and sums are to be 2^6 times too small
      // (EightBitFromPacked::kToSums).
      constexpr float kOfNumbers = 0x1p-12f;
      static_assert(Magnitudes::kMostShift == 6);
      int32_t bytes[kGroupsOfStep], largest = 0;
#pragma unroll
      for (int i = 0; i < kGroupsOfStep; ++i) {
        bytes[i] = word >> 8 * i & 0xff;
        largest = max(largest, bytes[i]);
      }
      ColumnScales scales;
#pragma unroll
      for (int i = 0; i < kGroupsOfStep; ++i) scales.shifts[i] = bytes[i] - largest + Magnitudes::kMostShift;
      // Zero for byte 0, infinity for 255, as power_of_two().
      scales.scale = __uint_as_float(static_cast<uint32_t>(largest) << 23) * kOfNumbers;
      return scales;
    }
    __device__ __forceinline__ bool any_far() const {
      static_assert(kGroupsOfStep == 4);
      return min(min(shifts[0], shifts[1]), min(shifts[2], shifts[3])) < Magnitudes::kLeastShift;
    }
  };

  // A block of columns in a step, decoded.
  struct Columns {
    ptx::FactorWords groups[kGroupsOfStep];
    float scales[2];  // of columns g and g + 8
    bool far;         // some group of the warp is left out
  };

  template <int kBlock, class Stage>
  __device__ __forceinline__ void decode(Columns& columns, const Stage& stage) const {
    const PackedPlaces places(part_);
    const ColumnScales scales[2] = {ColumnScales::of_word(groups_.of_column(2 * kBlock)),
                                    ColumnScales::of_word(groups_.of_column(2 * kBlock + 1))};
    columns.far = __any_sync(0xffffffff, scales[0].any_far() || scales[1].any_far());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      columns.scales[half] = scales[half].scale;
#pragma unroll
      for (int group = 0; group < kGroupsOfStep; ++group) {
        uint32_t word = places.word(stage, kBlock, group, half);
        if (columns.far && scales[half].shifts[group] < Magnitudes::kLeastShift) word = 0;
        const auto magnitudes = Magnitudes::shifted(scales[half].shifts[group]);
        columns.groups[group][half] = magnitudes.template decode<false>(word);
        columns.groups[group][half + 2] = magnitudes.template decode<true>(word);
      }
    }
  }

  // Products of row blocks from kFirst on.
  template <int kFirst, class Stage>
  __device__ __forceinline__ void issue(Products& products, const Columns& columns, const Stage& stage) const {
    using Rows = typename Stage::A;
    constexpr ptx::Major kDepth = ptx::Major::kDepth;
    static_assert(Rows::kSliceDepth == kNumbersOfGroup);
    const uint64_t rows = stage.a.template descriptor<kDepth>(8 * kFirst);
    ptx::clear_accumulators(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int group = 0; group < kGroupsOfStep; ++group) {
      ptx::multiply_e4m3(products, columns.groups[group],
                         ptx::advance_descriptor(rows, group * Rows::template kSliceBytes<kDepth>), group > 0);
    }
    ptx::commit_products();
  }
  // Waits for them, while kPending later ones may be under way.
  template <int kBlock, int kFirst, int kPending, class Stage>
  __device__ __forceinline__ void add(ptx::Accumulators& sums, Products& products, const Columns& columns,
                                      const Stage& stage) const {
    ptx::wait_products<kPending>();
    ptx::own_accumulators(products);
#pragma unroll
    for (int i = 0; i < kOfPart; ++i) {
      const float2 row_scales = RowScales<1>::of(stage, kFirst + i).rows[0];
      float* const of_sums = sums.values + 4 * (16 * kBlock + kFirst + i);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float of_row = n % 2 == 0 ? row_scales.x : row_scales.y;
        of_sums[n] += columns.scales[n / 2] * of_row * products.values[4 * i + n];
      }
    }
  }
  // After all products of a block: what was left out.
  template <int kBlock, class Stage>
  __device__ __forceinline__ void end_block(ptx::Accumulators& sums, Columns& columns, const Stage& stage) const {
#pragma unroll
    for (auto& words : columns.groups) ptx::own_words(words);
    if (columns.far) add_far_groups<kBlock>(sums, stage);
  }

  // Of all rows, a block of columns after the other: the second is decoded while the products of the first run.
  template <class Stage>
  __device__ __forceinline__ void multiply_both(ptx::Accumulators& sums, const Stage& stage) const {
    Columns first;
    Products of_first;
    decode<0>(first, stage);
    issue<0>(of_first, first, stage);
    if constexpr (kColumnBlocks > 1) {
      Columns second;
      Products of_second;
      decode<1>(second, stage);
      issue<0>(of_second, second, stage);
      add<0, 0, 1>(sums, of_first, first, stage);
      end_block<0>(sums, first, stage);
      add<1, 0, 0>(sums, of_second, second, stage);
      end_block<1>(sums, second, stage);
    } else {
      add<0, 0, 0>(sums, of_first, first, stage);
      end_block<0>(sums, first, stage);
    }
  }
  // Of a block of columns, some rows after the others.
  template <int kBlock, class Stage>
  __device__ __forceinline__ void multiply_block(ptx::Accumulators& sums, const Stage& stage) const {
    Columns columns;
    decode<kBlock>(columns, stage);
    if constexpr (kTwoAtATime) {
      Products products;
      issue<0>(products, columns, stage);
      multiply_overlapped<kBlock, 0>(sums, products, columns, stage);
    } else {
      multiply_parts<kBlock, 0>(sums, columns, stage);
    }
    end_block<kBlock>(sums, columns, stage);
  }
  // Those of row blocks from kFirst on, whose products are under way: those of the next ones run while they are added up.
  template <int kBlock, int kFirst, class Stage>
  __device__ __forceinline__ void multiply_overlapped(ptx::Accumulators& sums, Products& products,
                                                      const Columns& columns, const Stage& stage) const {
    if constexpr (kFirst + kOfPart < kBlocks) {
      Products next;
      issue<kFirst + kOfPart>(next, columns, stage);
      add<kBlock, kFirst, 1>(sums, products, columns, stage);
      multiply_overlapped<kBlock, kFirst + kOfPart>(sums, next, columns, stage);
    } else {
      add<kBlock, kFirst, 0>(sums, products, columns, stage);
    }
  }
  // One after the other, from kFirst on.
  template <int kBlock, int kFirst, class Stage>
  __device__ __forceinline__ void multiply_parts(ptx::Accumulators& sums, const Columns& columns,
                                                 const Stage& stage) const {
    // Also keeps ptxas from beginning with a part before the one before is added up.
    if (kFirst > 0 && kFirst >= part_.row_blocks) return;
    Products products;
    issue<kFirst>(products, columns, stage);
    add<kBlock, kFirst, 0>(sums, products, columns, stage);
    if constexpr (kFirst + kOfPart < kBlocks) multiply_parts<kBlock, kFirst + kOfPart>(sums, columns, stage);
  }

  // What was left out: by products of this warp alone, a group at a time.
  template <int kBlock, class Stage>
  __device__ __forceinline__ void add_far_groups(ptx::Accumulators& sums, const Stage& stage) const {
    const PackedPlaces places(part_);
    constexpr float kOfNumbers = 0x1p-6f;  // as above, of numbers that are as large as they are
    const uint32_t bytes[2] = {groups_.of_column(2 * kBlock), groups_.of_column(2 * kBlock + 1)};
    const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;
    const auto magnitudes = Magnitudes::shifted(0);
#pragma unroll 1
    for (int group = 0; group < kGroupsOfStep; ++group) {
      ptx::FactorWords columns;
      float scales[2];
      uint32_t any = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t byte = bytes[half] >> 8 * group & 0xff;
        const auto of_step = ColumnScales::of_word(bytes[half]);
        int32_t shift = 0;  // not by an index that the compiler does not know
#pragma unroll
        for (int i = 0; i < kGroupsOfStep; ++i) shift = i == group ? of_step.shifts[i] : shift;
        const uint32_t word = shift < Magnitudes::kLeastShift ? places.word(stage, kBlock, group, half) : 0;
        any |= word & 0x77777777;
        columns[half] = magnitudes.template decode<false>(word);
        columns[half + 2] = magnitudes.template decode<true>(word);
        scales[half] = __uint_as_float(byte << 23) * kOfNumbers;
      }
      if (!__any_sync(0xffffffff, any != 0)) continue;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i >= part_.row_blocks) break;
        // Row g of the block, as the copy engine swizzles lines of 128 bytes.
        const auto* const line = reinterpret_cast<const std::byte*>(stage.a.lines[8 * i + g]) + 4 * t;
        const uint32_t rows[2] = {*reinterpret_cast<const uint32_t*>(line + 16 * (2 * group ^ g)),
                                  *reinterpret_cast<const uint32_t*>(line + 16 * (2 * group + 1 ^ g))};
        float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        ptx::multiply_e4m3(products, columns, rows);
        const float2 of_rows = RowScales<1>::of(stage, i).rows[0];
        float* const of_sums = sums.values + 4 * (16 * kBlock + i);
#pragma unroll
        for (int n = 0; n < 4; ++n) of_sums[n] += scales[n / 2] * (n % 2 == 0 ? of_rows.x : of_rows.y) * products[n];
      }
    }
  }

  const PackedPart& part_;
  OneGroupWord groups_;
};

}  // namespace jaxmoe
