// Products of more than 16 rows in 8 bits with packed weights (packed_eight_bit.cuh). With many rows it would be the products
// of groups with their scales that take the time (packed_few_rows.cuh), four for each number of a step's sum. So here a
// column has one scale for all steps, its base, and the exponents by which its groups differ from that go into their
// numbers: the tensor cores add up the step, and the sums are scaled once, at the end.
//
// E2M1 times 2^s is a normal number of E4M3, or zero, for s from -5 to 6: one base is for groups of which the largest is
// 2^11 times the smallest. A group that is too large for it raises the base, and sums are scaled then. One that is too small
// is left out, and added by products of its own: rare enough that their speed does not matter. So all are exact, up to some
// 2^100 between the groups of a column, beyond which float32 has no exponents for the sums of small ones.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/packed_lines.cuh"

namespace jaxmoe {

// E4M3 of the 8 magnitudes of E2M1, times 2^s: magnitude i is byte i % 4 of the first or second word.
struct Magnitudes {
  static constexpr int32_t kLeastShift = -5, kMostShift = 6;

  uint32_t small, large;

  // For s = kLeastShift + above.
  static __device__ __forceinline__ Magnitudes shifted(uint32_t above) {
    // Of 0, 0.5, 1, 1.5 and 2, 3, 4, 6, as they are. An exponent has 3 bits of mantissa behind it; zero has none to add to.
    constexpr uint32_t kSmall = 0x3c383000, kLarge = 0x4c484440, kOfSmall = 0x08080800, kOfLarge = 0x08080808;
    return {kSmall + static_cast<uint32_t>(kLeastShift) * kOfSmall + above * kOfSmall,
            kLarge + static_cast<uint32_t>(kLeastShift) * kOfLarge + above * kOfLarge};
  }

  // Numbers 0 to 3 of the 8 of a word, and 4 to 7.
  __device__ __forceinline__ void decode(uint32_t word, uint32_t& first, uint32_t& second) const {
    constexpr uint32_t kSign = 0x80808080;
    const uint32_t magnitudes = word & 0x77777777;
    // The highest bit of a byte is the sign of its second number, and 4 bits further up that of its first.
    const uint32_t further_up = word * kShifts.by_4;
    first = (ptx::permute(word, further_up, 0x9d8c) & kSign) | ptx::permute(small, large, magnitudes);
    // Not by a shift, before which the compiler would mask once more.
    second = (ptx::permute(word, further_up, 0xbfae) & kSign) |
             ptx::permute(small, large, ptx::permute(magnitudes, 0, 0x4432));
  }

  // All numbers of a group, as those of a lane's column in the first factor of all slices: the first of the quad's two in a
  // block (half 0) or the second.
  __device__ __forceinline__ void decode_group(const uint4& group, ptx::FactorWords (&slices)[kSlicesOfStep], int half) const {
    const uint32_t words[kSlicesOfStep] = {group.x, group.y, group.z, group.w};
#pragma unroll
    for (int slice = 0; slice < kSlicesOfStep; ++slice) decode(words[slice], slices[slice][half], slices[slice][half + 2]);
  }
};

// The bases of the quad's columns: what a group's byte may be at least. Numbers of such a group are multiplied with
// 2^kLeastShift.
class ColumnBases {
 public:
  // What a byte may be above its base.
  static constexpr int32_t kWindow = Magnitudes::kMostShift - Magnitudes::kLeastShift;

  // How far the four groups of a word lie above the base of their column: a byte each, if none is_outside().
  __device__ __forceinline__ uint32_t above(uint32_t word, int column) const {
    return word - ptx::permute(bytes_, bytes_, 0x1111 * column);
  }
  // The highest bit of a byte is set where one of them is below 0 or above kWindow. The lowest one that is below 0 borrows
  // from the next, and is then more than 255 - kMost.
  static __device__ __forceinline__ uint32_t is_outside(uint32_t above) {
    static_assert(255 - kMost > kWindow);
    return (above | above + 0x01010101 * (127 - kWindow)) & 0x80808080;
  }
  __device__ __forceinline__ int32_t of_column(int column) const { return bytes_ >> 8 * column & 0xff; }

  // Raises a column's base where a group is too large for it; returns what its sums have to be multiplied with.
  __device__ __forceinline__ float raise(uint32_t word, int column) {
    int32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kGroupsOfStep; ++i) {
      const int32_t byte = word >> 8 * i & 0xff;
      largest = max(largest, byte == kNaN ? 0 : byte);
    }
    const int32_t base = of_column(column);
    if (largest <= base + kWindow) return 1.0f;
    const int32_t raised = min(largest + kHeadroom - kWindow, kMost);
    bytes_ += static_cast<uint32_t>(raised - base) << 8 * column;
    return power_of_two_of(127 + base - raised);
  }

  // What a column's sums are multiplied with at the end. They are to be 2^6 times too small
  // (EightBitFromPacked::kToSums).
  __device__ __forceinline__ float scale(int column) const { return scale_of(of_column(column)); }
  static __device__ __forceinline__ float scale_of(int32_t base) {
    constexpr int32_t kToNumbers = -Magnitudes::kLeastShift - 6;
    return power_of_two_of(base + kToNumbers);
  }
  // What products of a group's numbers as they are, which is left out, are multiplied with before they are added to sums.
  __device__ __forceinline__ float of_left_out(int32_t byte, int column) const {
    if (byte == kNaN) return __uint_as_float(0x7f800000);  // end_sums()
    return power_of_two_of(127 + byte - of_column(column) + Magnitudes::kLeastShift);
  }

  static constexpr int32_t kNaN = 255;   // of a group's byte
  static constexpr int32_t kMost = 240;  // of a base

 private:
  // A group may be so much larger than those that came before it.
  static constexpr int32_t kHeadroom = 3;

  // 2^(exponent - 127); what is too small even for a subnormal number is zero.
  static __device__ __forceinline__ float power_of_two_of(int32_t exponent) {
    constexpr int32_t kMantissa = 23;
    if (exponent > 0) return __uint_as_float(static_cast<uint32_t>(exponent) << kMantissa);
    return __uint_as_float(exponent > -kMantissa ? 1u << (kMantissa - 1 + exponent) : 0u);
  }

  // A byte for each column. No weight is so small that it would have to be the first base: raise() finds that.
  uint32_t bytes_ = 0;
};

// Thread t of a quad has group t of a step, in 16 bytes, and multiplies 8 numbers of it with each slice of the depth; rows have
// theirs in that order (turned.cuh).
//
// The work of a step is items: a block of columns with a part of the rows. The first item of a block decodes it. Of up to 96
// rows two items are under way at a time, so that one is multiplied while the other is decoded or added up.
// `kLineBytes`: of packed columns in a stage.
template <int kColumnBlocks, int kBlocks, int kLineBytes>
class ManyPackedRows {
 public:
  __device__ explicit ManyPackedRows(const PackedPart& part) : part_(part), places_(part) {}

  template <class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply(ptx::Accumulators& sums, const Steps& ring,
                                           typename Steps::Position& position, int32_t steps,
                                           const Meanwhile& meanwhile, const Track& track) {
    groups_.begin(part_);
    begin_sums<kBlocks>(sums);
    const auto take_step = [&](auto place, int32_t step, bool) __attribute__((always_inline)) {
      track.stall([&] { ring.wait(place); });
      groups_.take(part_, step);
      multiply_step(sums, ring.stage(place));
      __syncwarp();  // all lanes have read their last scales of rows
      ring.release(place, ptx::read_lane());
    };
    ring.template for_each<kAtATime == 1>(steps, position, meanwhile, take_step);
    end_sums<kBlocks>(sums);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) scale_column<kBlocks>(sums, column, bases_.scale(column));
  }

 private:
  static constexpr int kColumns = 2 * kColumnBlocks;  // of a quad
  // Row blocks of an item, and items under way. With 128 rows there are no registers for the products of two items.
  static constexpr int kOfItem = kBlocks <= 8 ? kBlocks : kBlocks == 12 ? 6 : 8;
  static constexpr int kAtATime = kBlocks <= 12 ? 2 : 1;
  static constexpr int kItemsOfBlock = kBlocks / kOfItem, kItems = kItemsOfBlock * kColumnBlocks;
  static_assert(kBlocks % kOfItem == 0);
  // Whether registers hold what a step has in common with the next, some forty instructions of five hundred; and scales of
  // rows before products are waited for.
  static constexpr bool kHolds = kBlocks <= 8, kHoldsScales = kBlocks <= 12;

  static __device__ constexpr int block_of(int item) { return item / kItemsOfBlock; }
  static __device__ constexpr int first_row_block(int item) { return item % kItemsOfBlock * kOfItem; }
  // Whether the next item is begun before this one is waited for.
  static __device__ constexpr bool is_beside_next(int item) { return kAtATime > 1 && item + 1 < kItems; }

  using Places = GroupPlaces<kLineBytes>;
  struct NoPlaces {
    __device__ explicit NoPlaces(const PackedPart&) {}
  };
  __device__ __forceinline__ Places places() const {
    if constexpr (kHolds) {
      return places_;
    } else {
      return Places(part_);
    }
  }

  using Products = ptx::FewAccumulators<8 * kOfItem>;

  // A block of columns in a step: of columns g and g + 8 the bytes of their groups, or how far these are above their base;
  // and what they decode to.
  struct Columns {
    uint32_t of_groups[2];
    ptx::FactorWords words[kSlicesOfStep];
  };
  // Both blocks, and the products under way. Not as arrays, which would lie in memory.
  struct Step {
    Columns first, second;
    Products even, odd;
    bool some_left_out;  // groups of the warp's columns
    uint32_t rows;       // where they lie, for descriptors

    template <int kBlock>
    __device__ __forceinline__ Columns& columns() {
      if constexpr (kBlock == 0) return first;
      return second;
    }
    template <int kItem>
    __device__ __forceinline__ Products& products() {
      if constexpr (kItem % kAtATime == 0) return even;
      return odd;
    }
  };

  template <class Stage>
  __device__ __forceinline__ void multiply_step(ptx::Accumulators& sums, const Stage& stage) {
    Step step;
    step.rows = ptx::as_uniform(descriptor_place(stage.a));
    uint32_t outside = look_at_groups<0>(step.first);
    if constexpr (kColumnBlocks > 1) outside |= look_at_groups<1>(step.second);
    step.some_left_out = __any_sync(0xffffffff, outside);
    if (step.some_left_out) {
      raise_bases<0>(sums, step.first);
      if constexpr (kColumnBlocks > 1) raise_bases<1>(sums, step.second);
    }
    if constexpr (kAtATime > 1) begin_item<0>(step, stage);
    multiply_items_from<0>(sums, step, stage);
    if (step.some_left_out) {
      add_left_out<0>(sums, stage);
      if constexpr (kColumnBlocks > 1) add_left_out<1>(sums, stage);
    }
  }
  // Not zero where a group is outside.
  template <int kBlock>
  __device__ __forceinline__ uint32_t look_at_groups(Columns& columns) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      columns.of_groups[half] = bases_.above(groups_.of_column(2 * kBlock + half), 2 * kBlock + half);
    }
    return ColumnBases::is_outside(columns.of_groups[0]) | ColumnBases::is_outside(columns.of_groups[1]);
  }
  template <int kBlock>
  __device__ __forceinline__ void raise_bases(ptx::Accumulators& sums, Columns& columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = 2 * kBlock + half;
      columns.of_groups[half] = groups_.of_column(column);
      scale_column<kBlocks>(sums, column, bases_.raise(columns.of_groups[half], column));
    }
  }

  template <int kItem, class Stage>
  __device__ __forceinline__ void multiply_items_from(ptx::Accumulators& sums, Step& step, const Stage& stage) const {
    if constexpr (kItem < kItems) {
      if constexpr (kAtATime > 1) {
        if constexpr (is_beside_next(kItem)) begin_item<kItem + 1>(step, stage);
        finish_item<kItem>(sums, step, stage);
      } else if (first_row_block(kItem) == 0 || first_row_block(kItem) < part_.row_blocks) {
        // It always is: that keeps ptxas from beginning with an item before the one before is added up.
        begin_item<kItem>(step, stage);
        finish_item<kItem>(sums, step, stage);
      }
      multiply_items_from<kItem + 1>(sums, step, stage);
    }
  }
  template <int kItem, class Stage>
  __device__ __forceinline__ void begin_item(Step& step, const Stage& stage) const {
    if constexpr (kItem < kItems) {
      constexpr int kBlock = block_of(kItem), kFirst = first_row_block(kItem);
      if constexpr (kFirst == 0) {
        // Products stay outside of the branch: in it ptxas would wait for each of them.
        auto& columns = step.template columns<kBlock>();
        if (step.some_left_out) {
          decode<true, kBlock>(columns, stage);
        } else {
          decode<false, kBlock>(columns, stage);
        }
      }
      auto& products = step.template products<kItem>();
      ptx::clear_accumulators(products);
      issue_step<typename Stage::A>(products, step.template columns<kBlock>().words, step.rows, kFirst);
    }
  }
  template <int kItem, class Stage>
  __device__ __forceinline__ void finish_item(ptx::Accumulators& sums, Step& step, const Stage& stage) const {
    constexpr int kBlock = block_of(kItem), kFirst = first_row_block(kItem);
    RowScales<kOfItem> scales;
    if constexpr (kHoldsScales) scales = RowScales<kOfItem>::of(stage, kFirst);
    ptx::wait_products<is_beside_next(kItem) ? 1 : 0>();
    auto& products = step.template products<kItem>();
    ptx::own_accumulators(products);
    if constexpr (kFirst + kOfItem == kBlocks) {
#pragma unroll
      for (auto& of_slice : step.template columns<kBlock>().words) ptx::own_words(of_slice);
    }
#pragma unroll
    for (int i = 0; i < kOfItem; ++i) {
      const float2 of_rows = kHoldsScales ? scales.rows[i] : RowScales<1>::of(stage, kFirst + i).rows[0];
      float* const of_sums = sums.values + 4 * (16 * kBlock + kFirst + i);
#pragma unroll
      for (int n = 0; n < 4; ++n) of_sums[n] += (n % 2 == 0 ? of_rows.x : of_rows.y) * products.values[4 * i + n];
    }
  }

  // kSomeLeftOut: groups that are outside are, and of_groups has bytes.
  template <bool kSomeLeftOut, int kBlock, class Stage>
  __device__ __forceinline__ void decode(Columns& columns, const Stage& stage) const {
    const Places places = this->places();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t above = group_of_lane(columns.of_groups[half]);
      uint32_t kept = ~0u;
      if constexpr (kSomeLeftOut) {
        above -= bases_.of_column(2 * kBlock + half);
        if (above > ColumnBases::kWindow) above = kept = 0;
      }
      const auto magnitudes = Magnitudes::shifted(above);
#pragma unroll
      for (int slice = 0; slice < kSlicesOfStep; ++slice) {
        auto& words = columns.words[slice];
        magnitudes.decode(places.word(stage, kBlock, half, slice) & kept, words[half], words[half + 2]);
      }
    }
  }

  // What was left out: by products of this warp alone, a slice of one group at a time, so that all lanes but one of a quad have
  // zeros.
  template <int kBlock, class Stage>
  __device__ __forceinline__ void add_left_out(ptx::Accumulators& sums, const Stage& stage) const {
    const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;
    const auto magnitudes = Magnitudes::shifted(-Magnitudes::kLeastShift);
#pragma unroll 1
    for (int nth = 0; nth < kGroupsOfStep * kSlicesOfStep; ++nth) {
      const int group = nth / kSlicesOfStep, slice = nth % kSlicesOfStep;
      ptx::FactorWords columns;
      float scales[2];
      uint32_t any = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 2 * kBlock + half;
        const int32_t byte = groups_.of_column(column) >> 8 * group & 0xff;
        const bool left_out = static_cast<uint32_t>(byte - bases_.of_column(column)) > ColumnBases::kWindow;
        const uint32_t word = left_out && t == group ? places().word(stage, kBlock, half, slice) : 0;
        any |= left_out && byte == ColumnBases::kNaN ? 1 : word & 0x77777777;
        magnitudes.decode(word, columns[half], columns[half + 2]);
        scales[half] = left_out ? bases_.of_left_out(byte, column) : 0.0f;
      }
      if (!__any_sync(0xffffffff, any != 0)) continue;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i >= part_.row_blocks) break;
        // Row g of the block, as the copy engine swizzles lines of 128 bytes.
        const auto* const line = reinterpret_cast<const std::byte*>(stage.a.lines[8 * i + g]) + 4 * t;
        const uint32_t rows[2] = {*reinterpret_cast<const uint32_t*>(line + 16 * (2 * slice ^ g)),
                                  *reinterpret_cast<const uint32_t*>(line + 16 * (2 * slice + 1 ^ g))};
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
  const std::conditional_t<kHolds, Places, NoPlaces> places_;
  OneGroupWord<kHolds> groups_;
  ColumnBases bases_;
};

}  // namespace jaxmoe
