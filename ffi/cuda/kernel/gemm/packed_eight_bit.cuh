// Products of rows in 8 bits with weights in 4 bits, decoded to E4M3 in the registers of the warps that multiply them. As
// packed.cuh, whose first lines say why, the factors change places; here warpgroups multiply them, since a warp alone has
// no product of 8 bits (docs/performance.md).
//
// An E2M1 number has 2^6 times its value as E4M3 with the same bits, subnormal ones too, so decoding moves bits alone. The
// scale of a group is a power of two, and a product of 32 along the depth is one group: scales multiply products, in
// float32, whatever their range. So do those of rows, one for each 128.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/stage.cuh"

namespace jaxmoe {

// Powers of two that stand for shifts. The compiler does not know them: it would make shifts of them, which take the pipe
// that masks take already, the busiest one.
struct ShiftFactors {
  uint32_t by_2, by_4;
  uint32_t of_byte[3];  // that bring byte 0, 1, 2 to the exponent of a float
};
static __constant__ ShiftFactors kShifts{1 << 2, 1 << 4, {1 << 23, 1 << 15, 1 << 7}};

// Numbers 0, 2, 4, 6 of the 8 of a word, and 1, 3, 5, 7, as E4M3, 2^6 times smaller.
struct EightNumbers {
  uint32_t even, odd;

  static __device__ __forceinline__ EightNumbers of_word(uint32_t word) {
    constexpr uint32_t kSign = 0x80808080, kMagnitude = 0x1c1c1c1c;
    return {(word * kShifts.by_4 & kSign) | (word * kShifts.by_2 & kMagnitude),
            (word & kSign) | (word >> 2 & kMagnitude)};
  }
};

// An Accumulate policy of the kind of FromPacked, with sums in the same places. A step is 128 along the depth: a line of
// rows, 64 bytes of each column, four groups. Of a group thread t of a quad has numbers 8 t to 8 t + 7, in 4 bytes; rows
// have theirs in the order that goes with that (turned.cuh).
//
// While products run, the words of the next ones are loaded. Then they are waited for, scaled and added up while the next
// factor is decoded; the tensor cores have the other warpgroup's meanwhile. Registers decide how many are under way
// at a time: of few rows all of a step, so that it has one wait for them.
class EightBitFromPacked {
 public:
  using Scales = PackedPartAndRows;
  static constexpr float kToSums = 0x1p6f;  // of a sum

  __device__ EightBitFromPacked(const Scales& part, int) : part_(part) {}

  __device__ __forceinline__ void begin(ptx::Accumulators&) { groups_.begin(part_); }

  // All steps of a tile: how many rows it has decides once which code runs.
  template <class Ring, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_tile(ptx::Accumulators& sums, const Ring& ring,
                                                typename Ring::Position& position, int32_t steps,
                                                const Meanwhile& meanwhile, const Track& track) {
    if (part_.one_block) {
      multiply_at_most<1, 1, 2, 4, 6, 8, 16>(sums, ring, position, steps, meanwhile, track);
    } else {
      multiply_at_most<2, 1, 2, 4, 6, 8, 16>(sums, ring, position, steps, meanwhile, track);
    }
  }

 private:
  static constexpr int32_t kLineBytes = 64;  // of PackedTile
  static constexpr int32_t kGroup = 32;      // numbers
  static constexpr int kGroups = 4;          // of a step
  // Row blocks of 8 that are multiplied at once, of at most kMostBlocks: of more there are no registers for so many
  // products beside sums.
  static constexpr int kMostBlocks = 8, kBlocksOfPart = 4;
  // Of no more there are registers for the products of two groups, and for scales of all groups of a step.
  static constexpr int kFewBlocks = 4;

  template <int kColumnBlocks, int kBlocks, int... kMore, class... Arguments>
  __device__ __forceinline__ void multiply_at_most(Arguments&&... arguments) {
    if constexpr (sizeof...(kMore) > 0) {
      if (part_.row_blocks > kBlocks) return multiply_at_most<kColumnBlocks, kMore...>(arguments...);
    }
    if constexpr (kBlocks <= kMostBlocks) {
      multiply_steps<kColumnBlocks, kBlocks>(arguments...);
    } else {
      multiply_in_parts<kColumnBlocks, kBlocks>(arguments...);
    }
  }

  // Of the first kBlocks row blocks, before their products.
  template <int kBlocks>
  static __device__ __forceinline__ void begin_sums(ptx::Accumulators& sums) {
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      if (i % 64 < 4 * kBlocks) sums.values[i] = 0.0f;
    }
  }
  // After them. Scales of groups that are NaN came as infinity (power_of_two()). Sums of other row blocks become zero only
  // now, so that no register held them meanwhile.
  template <int kBlocks>
  static __device__ __forceinline__ void end_sums(ptx::Accumulators& sums) {
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      float& sum = sums.values[i];
      sum = i % 64 < 4 * kBlocks ? fmaf(sum, 0.0f, sum) : 0.0f;
    }
  }

  // Of so many groups, and each block of columns: words of the quad's columns g and g + 8, the factor that they decode to,
  // and its products with rows.
  template <int kColumnBlocks, int kTogether>
  struct PackedWords {
    uint32_t of[kTogether][kColumnBlocks][2];
  };
  template <int kColumnBlocks, int kTogether>
  struct Columns {
    ptx::FactorWords words[kTogether][kColumnBlocks];
  };
  template <int kColumnBlocks, int kTogether, int kBlocks>
  struct Products {
    ptx::FewAccumulators<8 * kBlocks> of[kTogether][kColumnBlocks];
  };
  // Scales of the rows of this thread's columns of products: of each row block two.
  template <int kBlocks>
  struct RowScales {
    float2 of[kBlocks];
  };
  // Those of the groups of a step, a word for each of the quad's columns.
  template <int kColumnBlocks>
  struct StepScales {
    uint32_t words[2 * kColumnBlocks];
  };

  template <int kColumnBlocks, int kBlocks, class Ring, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_steps(ptx::Accumulators& sums, const Ring& ring,
                                                 typename Ring::Position& position, int32_t steps,
                                                 const Meanwhile& meanwhile, const Track& track) {
    constexpr int kTogether = kBlocks <= 2 ? 4 : kBlocks <= kFewBlocks ? 2 : 1;  // groups
    constexpr int kTimes = kGroups / kTogether;
    PackedWords<kColumnBlocks, kTogether> words;
    Columns<kColumnBlocks, kTogether> columns;
    Products<kColumnBlocks, kTogether, kBlocks> products;
    RowScales<kBlocks> rows;
    const float* row_scales = first_row_scale(0);
    load(rows, row_scales);
    clear(products);
    begin_sums<kBlocks>(sums);
    constexpr bool kKeeps = kBlocks <= kFewBlocks;  // else there are no registers for what can be found anew
    const Lane places(part_);
    track.stall([&] { ring.wait(position); });
    load(words, places, ring.stage(position), 0);
    decode(columns, words);
    groups_.take_first(part_);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      // With registers to spare the last step loads once more what it has, instead of branching around what others do.
      const bool more = step + 1 < steps, loads = kKeeps || more;
      const auto next = loads && !more ? position : position.after();
      const bool full = loads && ring.looks_full(next);
      auto& stage = ring.stage(position);
      StepScales<kColumnBlocks> scales;
      if constexpr (kKeeps) scales = find_scales<kColumnBlocks>();
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        issue(products, columns, stage, time * kTogether, 0);
        if (time + 1 < kTimes) {
          load(words, places, stage, (time + 1) * kTogether);
        } else if (loads) {
          if (!full) track.stall([&] { ring.wait(next); });
          load(words, places, ring.stage(next), 0);
        }
        finish(products, columns);
        if (time + 1 == kTimes) ring.release(position, ptx::read_lane());
        if constexpr (!kKeeps) scales = find_scales<kColumnBlocks>();
        add<0>(sums, products, scales, rows, time * kTogether);
        decode(columns, words);
      }
      if constexpr (kKeeps) {
        row_scales += more ? Tiling::kRows : 0;
      } else if (loads) {
        row_scales = first_row_scale(step + 1);
      }
      if (loads) {
        load(rows, row_scales);
        groups_.take<kGroup>(part_, step + 1);
      }
      meanwhile(step);
      position.advance();
    }
    end_sums<kBlocks>(sums);
  }

  // Of more rows, kBlocksOfPart at a time, and a block of columns at a time.
  template <int kColumnBlocks, int kBlocks, class Ring, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_in_parts(ptx::Accumulators& sums, const Ring& ring,
                                                    typename Ring::Position& position, int32_t steps,
                                                    const Meanwhile& meanwhile, const Track& track) {
    Products<1, 1, kBlocksOfPart> products;
    clear(products);
    begin_sums<kBlocks>(sums);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      track.stall([&] { ring.wait(position); });
      if (step == 0) {
        groups_.take_first(part_);
      } else {
        groups_.take<kGroup>(part_, step);
      }
      multiply_parts<kColumnBlocks, 0, kBlocks>(sums, products, ring.stage(position), step);
      ring.release(position, ptx::read_lane());
      meanwhile(step);
      position.advance();
    }
    end_sums<kBlocks>(sums);
  }
  // From row block kFirst on.
  template <int kColumnBlocks, int kFirst, int kBlocks, class Stage>
  __device__ __forceinline__ void multiply_parts(ptx::Accumulators& sums, Products<1, 1, kBlocksOfPart>& products,
                                                 Stage& stage, int32_t step) const {
    if constexpr (kFirst < kBlocks) {
      // Also keeps ptxas from beginning with a part before the one before is added up.
      if (kFirst >= part_.row_blocks) return;
      RowScales<kBlocksOfPart> rows;
      load(rows, first_row_scale(step) + 8 * kFirst);
      multiply_block<0, kFirst>(sums, products, rows, stage);
      if constexpr (kColumnBlocks > 1) multiply_block<1, kFirst>(sums, products, rows, stage);
      multiply_parts<kColumnBlocks, kFirst + kBlocksOfPart, kBlocks>(sums, products, stage, step);
    }
  }
  template <int kBlock, int kFirst, class Stage>
  __device__ __forceinline__ void multiply_block(ptx::Accumulators& sums, Products<1, 1, kBlocksOfPart>& products,
                                                 const RowScales<kBlocksOfPart>& rows, Stage& stage) const {
    const Lane places(part_);
    const StepScales<1> scales = find_scales<1>(2 * kBlock);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      PackedWords<1, 1> words;
      load(words, places, stage, group, kBlock);
      Columns<1, 1> columns;
      decode(columns, words);
      issue(products, columns, stage, group, kFirst);
      finish(products, columns);
      add<16 * kBlock + kFirst>(sums, products, scales, rows, group);
    }
  }

  // Where this lane finds its part of column g of each block, in a stage: as the copy engine swizzles lines of 64 bytes,
  // group 0 of it; those of others have its address with 16 times their number changed.
  struct Lane {
    int32_t columns[2];

    __device__ __forceinline__ explicit Lane(const PackedPart& part) {
      const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
      for (int block = 0; block < 2; ++block) columns[block] = (part.lines[block] + g) * kLineBytes + 16 * (g / 2) + 4 * t;
    }
  };

  // From the step's group `first` and the block of columns `first_block` on.
  template <int kColumnBlocks, int kTogether, class Stage>
  __device__ __forceinline__ void load(PackedWords<kColumnBlocks, kTogether>& words, const Lane& places,
                                       const Stage& stage, int first, int first_block = 0) const {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        const auto* const column = stage.b.lines[0] + (places.columns[first_block + block] ^ 16 * (first + i));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          words.of[i][block][half] = *reinterpret_cast<const uint32_t*>(column + half * 8 * kLineBytes);
        }
      }
    }
  }
  template <int kColumnBlocks, int kTogether>
  static __device__ __forceinline__ void decode(Columns<kColumnBlocks, kTogether>& columns,
                                                const PackedWords<kColumnBlocks, kTogether>& words) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const EightNumbers numbers = EightNumbers::of_word(words.of[i][block][half]);
          columns.words[i][block][half] = numbers.even;
          columns.words[i][block][half + 2] = numbers.odd;
        }
      }
    }
  }

  // With rows from row block `first_row_block` on.
  template <int kColumnBlocks, int kTogether, int kBlocks, class Stage>
  __device__ __forceinline__ void issue(Products<kColumnBlocks, kTogether, kBlocks>& products,
                                        const Columns<kColumnBlocks, kTogether>& columns, const Stage& stage, int first,
                                        int first_row_block) const {
    using Rows = typename Stage::A;
    constexpr ptx::Major kDepth = ptx::Major::kDepth;
    static_assert(Rows::kSliceDepth == kGroup);
    const uint64_t rows = stage.a.template descriptor<kDepth>(8 * first_row_block);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        ptx::multiply_e4m3(products.of[i][block], columns.words[i][block],
                           ptx::advance_descriptor(rows, (first + i) * Rows::template kSliceBytes<kDepth>));
      }
    }
    ptx::commit_products();
  }
  // Until then nothing is written to what they are made of.
  template <int kColumnBlocks, int kTogether, int kBlocks>
  __device__ __forceinline__ void finish(Products<kColumnBlocks, kTogether, kBlocks>& products,
                                         Columns<kColumnBlocks, kTogether>& columns) const {
    ptx::wait_products<0>();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        ptx::own_accumulators(products.of[i][block]);
#pragma unroll
        for (uint32_t& word : columns.words[i][block]) asm volatile("" : "+r"(word));
      }
    }
  }

  // To the sums of which row block 0 is number kFirst of all of a thread's: 16 for each block of columns.
  template <int kFirst, int kColumnBlocks, int kTogether, int kBlocks>
  __device__ __forceinline__ void add(ptx::Accumulators& sums, const Products<kColumnBlocks, kTogether, kBlocks>& products,
                                      const StepScales<kColumnBlocks>& scales, const RowScales<kBlocks>& rows,
                                      int first) const {
#pragma unroll
    for (int u = 0; u < 2 * kColumnBlocks; ++u) {
      const int block = u / 2, half = u % 2;
      float of_group[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) of_group[i] = power_of_two(scales.words[u], first + i);
#pragma unroll
      for (int row_block = 0; row_block < kBlocks; ++row_block) {
        const int at = 4 * row_block + 2 * half;
        float* const of_sums = sums.values + 4 * (kFirst + 16 * block + row_block) + 2 * half;
        float first_row = of_group[0] * products.of[0][block].values[at];
        float second_row = of_group[0] * products.of[0][block].values[at + 1];
#pragma unroll
        for (int i = 1; i < kTogether; ++i) {
          first_row += of_group[i] * products.of[i][block].values[at];
          second_row += of_group[i] * products.of[i][block].values[at + 1];
        }
        of_sums[0] += rows.of[row_block].x * first_row;
        of_sums[1] += rows.of[row_block].y * second_row;
      }
    }
  }

  // 2^(byte - 127) of byte `nth` of a word; zero for byte 0, which stands for 2^-127, and infinity for 255, which stands
  // for NaN: end_sums() makes that of it.
  static __device__ __forceinline__ float power_of_two(uint32_t word, int nth) {
    constexpr uint32_t kExponent = 0x7f800000;
    const uint32_t bits = nth == 3 ? word >> 1 : word * kShifts.of_byte[nth];
    return __uint_as_float(bits & kExponent);
  }

  // Those of the quad's columns from number `first` on.
  template <int kColumnBlocks>
  __device__ __forceinline__ StepScales<kColumnBlocks> find_scales(int first = 0) const {
    StepScales<kColumnBlocks> scales;
#pragma unroll
    for (int u = 0; u < 2 * kColumnBlocks; ++u) scales.words[u] = groups_.of_column(first + u);
    return scales;
  }
  // Where this thread finds those of row block 0.
  __device__ __forceinline__ const float* first_row_scale(int32_t step) const {
    return part_.rows + step * Tiling::kRows + 2 * (ptx::read_lane() % 4);
  }
  // Rows of a ring change within a launch, so their scales are never taken from L1.
  template <int kBlocks>
  static __device__ __forceinline__ void load(RowScales<kBlocks>& scales, const float* first) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) scales.of[i] = __ldcg(reinterpret_cast<const float2*>(first + 8 * i));
  }

  template <class Products>
  static __device__ __forceinline__ void clear(Products& products) {
    for (auto& of_group : products.of) {
#pragma unroll
      for (auto& of_block : of_group) ptx::clear_accumulators(of_block);
    }
  }

  const Scales& part_;
  GroupWords groups_;
};

}  // namespace jaxmoe
