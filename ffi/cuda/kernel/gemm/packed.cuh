// Products of rows with weights in 4 bits that are decoded in the registers of the warps that multiply them. What
// decode.cuh makes of them, in a ring in memory, is written and read once more; here nothing leaves the multiprocessor, but
// a weight is decoded again for every tile of rows.
//
// The factors change places: columns of weights are the rows of what the tensor cores multiply, so that few rows of
// tokens cost them little. A warp has 32 columns of a tile, in two blocks of 16, of all its rows, so every weight is
// decoded once for a tile. Of more than 64 rows warpgroups multiply (wgmma takes this factor from registers as well); of
// fewer that was slower (docs/performance.md).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/formats.h"
#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/device/ptx/wgmma_registers.cuh"
#include "cuda/kernel/gemm/deep_stages.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/packed_words.cuh"
#include "cuda/kernel/gemm/stage.cuh"

namespace jaxmoe {

// Scales of groups, and how numbers are made of E2M1 with them. Behind the sign, the bits of E2M1 are the exponent's
// lowest two and the mantissa's highest of a BF16 number that is 2^126 times smaller, subnormal ones too. Times a scale
// that is 2^126 times larger it is exact, but the largest scales have no BF16 number so large: all are 2^kLessened
// times smaller, and the sums are multiplied with that.
struct GroupScales {
  static constexpr int kLessened = 16;
  static constexpr float kToSums = 0x1p16f;

  // The halves are those of two groups, the first one whose E8M0 byte is number `byte` of a word, 0 or 1, and the one two
  // bytes further on. Exact from 2^-108 to 2^17; infinity where it is 2^18, NaN above and where it is NaN; numbers with a
  // smaller one are rounded, at last to zero.
  static __device__ __forceinline__ uint32_t of_powers_of_two(uint32_t word, uint32_t byte) {
    constexpr uint32_t kBias = (126 - kLessened) << 7, kNan = 0x7fc0;
    const uint32_t pair = __byte_perm(word, 0, 0x4240 + 0x0101 * byte);
    return __vminu2(pair * 128 + (kBias << 16 | kBias), kNan << 16 | kNan);
  }
  // The halves are those of two groups whose E4M3 bytes have the same number in two words.
  static __device__ __forceinline__ uint32_t of_e4m3(uint32_t first, uint32_t second, uint32_t byte) {
    constexpr float kEnlarged = 0x1p110f;
    static_assert(126 - kLessened == 110);
    const auto bytes = static_cast<__nv_fp8x2_storage_t>(__byte_perm(first, second, 0x40 + 0x11 * byte));
    const float2 numbers = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(bytes, __NV_E4M3)));
    const __nv_bfloat162 pair = __hmul2(__float22bfloat162_rn(numbers), __float2bfloat162_rn(kEnlarged));
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

template <class Precision>
using WordOf = std::conditional_t<requires { requires Precision::kRepacked; }, RepackedWord, NibbleWord>;

// Numbers i and i + 4 of the 8 of a word become the halves of pairs[i], times half `nth` of `scales`.
template <class Word>
__device__ __forceinline__ void decode_word(uint32_t (&pairs)[4], uint32_t word, uint32_t scales, int nth) {
  const __nv_bfloat162& both = reinterpret_cast<const __nv_bfloat162&>(scales);
  const __nv_bfloat162 factor = nth == 0 ? __low2bfloat162(both) : __high2bfloat162(both);
  uint32_t bits[4];
  Word::spread(bits, word);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits[i]), factor);
    pairs[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// The Accumulate policy (accumulate.cuh), with the loop over steps in it, so that it is chosen once for a tile by its
// rows. A step is 128 along the depth: two panels of rows, 64 bytes of each column. Of 64 along the depth a thread has
// numbers 16 t to 16 t + 15 of a column, in 8 bytes, all of one group; rows have theirs in the order that goes with that
// (turned.cuh).
//
// With g = lane / 4 and t = lane % 4, sums.values[4 (16 b + i) + 2 h + j] is column g + 8 h of the warp's block b of
// columns, and row 8 i + 2 t + j.
//
// While one half of a step is multiplied, what the next one needs is on its way from shared memory: there are two warps
// to a scheduler, too few to wait for each other.
template <class Word>
class FromPacked {
 public:
  using Scales = PackedPart;
  static constexpr bool kTakesTiles = true;
  static constexpr bool kBeginsWithZeros = true;  // all sums
  static constexpr float kToSums = GroupScales::kToSums;  // of a sum

  __device__ FromPacked(const Scales& part, int) : part_(part) {}

  __device__ __forceinline__ void begin(ptx::Accumulators& sums) {
    ptx::clear_accumulators(sums);
  }

  // All steps of a tile: how many rows it has decides once which code runs.
  template <class Precision, class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_tile(ptx::Accumulators& sums, const Steps& ring,
                                                typename Steps::Position& position, int, int32_t steps,
                                                const Meanwhile& meanwhile, const Track& track) {
    // Inlined whatever its size: of a call, sums would lie in memory.
    const auto multiply = [&](auto columns, auto rows) __attribute__((always_inline)) {
      constexpr int kColumnBlocks = decltype(columns)::value, kBlocks = decltype(rows)::value;
      if (part_.sixteen) {
        multiply_steps<kColumnBlocks, kBlocks, 16>(sums, ring, position, steps, meanwhile, track);
      } else {
        multiply_steps<kColumnBlocks, kBlocks, 32>(sums, ring, position, steps, meanwhile, track);
      }
    };
    // A tile with as few rows as a deep stage has room for is in deep stages, but for what is left of a larger one.
    if constexpr (Steps::kDeep) {
      part_.template with_blocks<1, 2, 4>(multiply);
    } else {
      part_.template with_blocks<kFewBlocks, 6, kMostBlocks, kManyBlocks>(multiply);
    }
  }

 private:
  static constexpr int kHalves = 2;  // of a step

  // Of so few row blocks there are registers for rows that are loaded early, and the products of the two slices of a word
  // have sums of their own, those of row blocks behind the ones that there are: so neighbouring products do not wait for
  // each other.
  static constexpr int kFewBlocks = 2;
  // Of more warpgroups multiply, 128 rows at a time.
  static constexpr int kMostBlocks = 8, kManyBlocks = 16;

  // What a half of a step needs, but for rows of many blocks. A quad has two columns in each block of columns
  // (group_words.cuh).
  template <int kColumnBlocks, int kBlocks>
  struct Half {
    uint2 columns[2 * kColumnBlocks];
    uint32_t scales[2 * kColumnBlocks];  // half h of each is that of half h of the step
    uint32_t rows[kBlocks <= kFewBlocks ? kBlocks : 1][2][4];  // of each block and word
  };

  // Those of the quad's columns for both halves of a step.
  template <int kColumnBlocks>
  struct StepScales {
    uint32_t pairs[2 * kColumnBlocks];
  };

  template <int kColumnBlocks, int kBlocks, int kGroup, class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_steps(ptx::Accumulators& sums, const Steps& ring,
                                                 typename Steps::Position& position, int32_t steps,
                                                 const Meanwhile& meanwhile, const Track& track) {
    using OfHalf = Half<kColumnBlocks, kBlocks>;
    GroupWords<kGroup, (kBlocks <= kFewBlocks)> groups;
    groups.begin(part_);
    StepScales<kColumnBlocks> scales{};
    const typename Steps::First start{position};
    track.stall([&] { ring.wait(start); });
    groups.take_first();
    if constexpr (kBlocks <= kMostBlocks) {
      const Lane<Steps::kLineBytes> places(part_);
      OfHalf first, second;
      load<kColumnBlocks, kBlocks, kGroup>(first, scales, groups, places, ring.stage(start), 0);
      ring.for_each(steps, position, meanwhile, [&](auto place, int32_t step, bool more) __attribute__((always_inline)) {
        // The last step loads once more what it has, instead of branching around what the others do.
        const auto next = Steps::after_or_there(place, more);
        const bool full = ring.looks_full(next);
        const auto& stage = ring.stage(place);
        load<kColumnBlocks, kBlocks, kGroup>(second, scales, groups, places, stage, 1);
        multiply_half<kColumnBlocks, kBlocks>(sums, first, places, stage, 0);
        if (!full) track.stall([&] { ring.wait(next); });
        groups.template take<decltype(next)::kNth, Steps::kSteps>(step + 1);
        load<kColumnBlocks, kBlocks, kGroup>(first, scales, groups, places, ring.stage(next), 0);
        multiply_half<kColumnBlocks, kBlocks>(sums, second, places, stage, 1);
        ring.release(place, ptx::read_lane());
      });
    } else {
      multiply_many<kColumnBlocks, kGroup>(sums, ring, position, steps, scales, groups, meanwhile, track);
    }
    if constexpr (kBlocks <= kFewBlocks) {
#pragma unroll
      for (int block = 0; block < kColumnBlocks; ++block) {
        float* const of_block = sums.values + 64 * block;
#pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i) of_block[i] += of_block[4 * kFewBlocks + i];
      }
    }
  }

  // Of many rows, by products of the warpgroup, whose decoded factor is in registers. A block of columns of this warp is its
  // part of the 64 of a product. While they run, what the next half needs comes from shared memory; it is decoded when they
  // are done, since ptxas would run products one after the other whose factors are made meanwhile (C7513). By then the
  // tensor cores have those of the other warpgroup.
  template <int kColumnBlocks, int kGroup, class Steps, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_many(ptx::Accumulators& sums, const Steps& ring,
                                                typename Steps::Position& position, int32_t steps,
                                                StepScales<kColumnBlocks>& scales, GroupWords<kGroup, false>& groups,
                                                const Meanwhile& meanwhile, const Track& track) {
    constexpr int kWordBytes = 64, kSliceBytes = 32;  // of a line of rows
    ptx::FactorWords factors[2][2][kColumnBlocks];  // of each word, slice and block of columns
    Half<kColumnBlocks, kManyBlocks> loaded;
    using OfLane = Lane<Steps::kLineBytes>;
    const typename Steps::First start{position};
    load<kColumnBlocks, kManyBlocks, kGroup>(loaded, scales, groups, OfLane(part_), ring.stage(start), 0);
    ring.for_each(steps, position, meanwhile, [&](auto place, int32_t step, bool more) __attribute__((always_inline)) {
      const auto& stage = ring.stage(place);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        decode<kColumnBlocks>(factors[0], loaded, half, 0);
        decode<kColumnBlocks>(factors[1], loaded, half, 1);
        const uint32_t rows = ptx::as_uniform(descriptor_place(stage.a.panel(half)));
        ptx::wgmma_fence();
#pragma unroll
        for (int word = 0; word < 2; ++word) {
#pragma unroll
          for (int slice = 0; slice < 2; ++slice) {
            const uint64_t of_slice = ptx::depth_major_descriptor(rows, kWordBytes * word + kSliceBytes * slice);
#pragma unroll
            for (int block = 0; block < kColumnBlocks; ++block) {
              ptx::multiply_bf16_with_128(sums.values + 64 * block, factors[word][slice][block], of_slice);
            }
          }
        }
        ptx::commit_products();
        if (half == 0) {
          load<kColumnBlocks, kManyBlocks, kGroup>(loaded, scales, groups, OfLane(part_), stage, 1);
        } else if (more) {
          const auto next = Steps::after(place);
          track.stall([&] { ring.wait(next); });
          groups.template take<0, 1>(step + 1);
          load<kColumnBlocks, kManyBlocks, kGroup>(loaded, scales, groups, OfLane(part_), ring.stage(next), 0);
        }
        ptx::wait_products<0>();
        ptx::own_accumulators(sums);
#pragma unroll
        for (auto& of_word : factors) {
#pragma unroll
          for (auto& of_slice : of_word) {
#pragma unroll
            for (auto& words : of_slice) ptx::own_words(words);
          }
        }
      }
      ring.release(place, ptx::read_lane());
    });
  }

  // A word of each of the lane's columns, as factors of its two slices.
  template <int kColumnBlocks, int kBlocks>
  __device__ __forceinline__ static void decode(uint32_t (&factors)[2][kColumnBlocks][4],
                                                const Half<kColumnBlocks, kBlocks>& loaded, int half, int word) {
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
      const uint2 &first = loaded.columns[2 * block], &second = loaded.columns[2 * block + 1];
      uint32_t upper[4], lower[4];
      decode_word<Word>(upper, word == 0 ? first.x : first.y, loaded.scales[2 * block], half);
      decode_word<Word>(lower, word == 0 ? second.x : second.y, loaded.scales[2 * block + 1], half);
#pragma unroll
      for (int slice = 0; slice < 2; ++slice) {
        factors[slice][block][0] = upper[2 * slice];
        factors[slice][block][1] = lower[2 * slice];
        factors[slice][block][2] = upper[2 * slice + 1];
        factors[slice][block][3] = lower[2 * slice + 1];
      }
    }
  }

  // Where this lane finds what it multiplies, in a stage with lines of so many bytes: those of 128 are swizzled.
  template <int kLineBytes>
  struct Lane {
    int32_t columns[2];  // its part of column g of each block, in the first half of the first step in a line
    int32_t rows;        // in a panel: the row whose address it names

    __device__ __forceinline__ explicit Lane(const PackedPart& part) {
      const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        columns[block] = (part.lines[block] + g) * kLineBytes + (kLineBytes == 128 ? 8 * t ^ 16 * g : 8 * t);
      }
      // As the copy engine swizzles a line of 128 bytes.
      rows = lane % 8 * 128 + 16 * (lane / 8 ^ lane % 8);
    }
  };

  template <int kColumnBlocks, int kBlocks, int kGroup, int kLineBytes, class Stage>
  __device__ __forceinline__ void load(Half<kColumnBlocks, kBlocks>& loaded, StepScales<kColumnBlocks>& scales,
                                       const GroupWords<kGroup, (kBlocks <= kFewBlocks)>& groups,
                                       const Lane<kLineBytes>& places, const Stage& stage, int half) const {
    constexpr int32_t kHalfBytes = 32;
#pragma unroll
    for (int u = 0; u < 2 * kColumnBlocks; ++u) {
      const std::byte* const of_block = stage.b.at(places.columns[u / 2] ^ kHalfBytes * half);
      loaded.columns[u] = *reinterpret_cast<const uint2*>(of_block + u % 2 * 8 * kLineBytes);
    }
    if constexpr (kBlocks <= kFewBlocks) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int word = 0; word < 2; ++word) load_rows(loaded.rows[i][word], places, stage, half, i, word);
      }
    }
    const int t = ptx::read_lane() & 3;
#pragma unroll
    for (int u = 0; u < 2 * kColumnBlocks; ++u) {
      if (half == 0) {
        scales.pairs[u] = kGroup == 16 ? GroupScales::of_e4m3(groups.of_column(u), groups.of_column(u, true), t)
                                       : GroupScales::of_powers_of_two(groups.of_column(u), t / 2);
      }
      loaded.scales[u] = scales.pairs[u];
    }
  }
  // Of 8 rows, for the two slices of a word.
  template <int kLineBytes, class Stage>
  __device__ __forceinline__ void load_rows(uint32_t (&rows)[4], const Lane<kLineBytes>& places, const Stage& stage,
                                            int half, int block, int word) const {
    const auto* const lines = reinterpret_cast<const std::byte*>(stage.a.panel(half).lines[8 * block]);
    ptx::load_tiles(rows, lines + (places.rows ^ 64 * word));
  }

  template <int kColumnBlocks, int kBlocks, int kLineBytes, class Stage>
  __device__ __forceinline__ void multiply_half(ptx::Accumulators& sums, const Half<kColumnBlocks, kBlocks>& loaded,
                                                const Lane<kLineBytes>& places, const Stage& stage, int half) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t a[2][kColumnBlocks][4];  // of each slice and block of columns
      decode<kColumnBlocks>(a, loaded, half, word);
      constexpr int kInTurn = kBlocks < 2 ? 1 : 2;  // so that products that add to the same sums are further apart
#pragma unroll
      for (int i = 0; i < kBlocks; i += kInTurn) {
        uint32_t rows[kInTurn][4];
#pragma unroll
        for (int j = 0; j < kInTurn; ++j) {
          if constexpr (kBlocks <= kFewBlocks) {
#pragma unroll
            for (int r = 0; r < 4; ++r) rows[j][r] = loaded.rows[i + j][word][r];
          } else {
            load_rows(rows[j], places, stage, half, i + j, word);
          }
        }
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
          constexpr int kApart = kBlocks <= kFewBlocks ? kFewBlocks : 0;
#pragma unroll
          for (int j = 0; j < kInTurn; ++j) {
#pragma unroll
            for (int block = 0; block < kColumnBlocks; ++block) {
              ptx::multiply_bf16(sums.values + 4 * (16 * block + i + j + slice * kApart),
                                 a[slice][block], rows[j] + 2 * slice);
            }
          }
        }
      }
    }
  }

  const PackedPart& part_;
};

}  // namespace jaxmoe
