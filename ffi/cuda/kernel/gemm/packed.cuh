// Products of rows with weights in 4 bits that are decoded in the registers of the warps that multiply them: for
// experts with few rows, where a launch takes as long as its weights take to be read. What decode.cuh makes of them, in
// a ring in memory, is written and read once more; here nothing leaves the multiprocessor.
//
// The factors change places: columns of weights are the rows of what the tensor cores multiply, so that few rows of
// tokens cost them little. A warp has 32 columns of a tile, in two blocks of 16, of all its rows, so every weight is
// decoded once. (wgmma takes the same factor from registers as well, but between products nobody may write to those.)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/formats.h"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/ptx/mma.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/stage.cuh"

namespace jaxmoe {

// Scales of groups, and how numbers are made of E2M1 with them. Behind the sign, the bits of E2M1 are the exponent's
// lowest two and the mantissa's highest of a BF16 number that is 2^126 times smaller, subnormal ones too. Times a scale
// that is 2^126 times larger it is exact, but the largest scales have no BF16 number so large: all are 2^kLessened
// times smaller, and the sums are multiplied with that.
struct GroupScales {
  static constexpr int kLessened = 16;
  static constexpr float kToSums = 0x1p16f;

  // Both halves are the scale, whose E8M0 byte is number `byte` of a word. Exact from 2^-108 to 2^17; NaN above and
  // where it is NaN; numbers with a smaller one are rounded, at last to zero.
  static __device__ __forceinline__ uint32_t of_power_of_two(uint32_t word, uint32_t byte) {
    constexpr uint32_t kBias = (126 - kLessened) << 7, kNan = 0x7fc0;
    const uint32_t pair = __byte_perm(word, 0, 0x4040 | byte | byte << 8);
    return __vminu2(pair * 128 + (kBias << 16 | kBias), kNan << 16 | kNan);
  }
  // The same of an E4M3 byte.
  static __device__ __forceinline__ uint32_t of_e4m3(uint32_t word, uint32_t byte) {
    constexpr float kEnlarged = 0x1p110f;
    static_assert(126 - kLessened == 110);
    const auto scale = static_cast<__nv_fp8_storage_t>(__byte_perm(word, 0, 0x4440 | byte));
    const float number = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)));
    const __nv_bfloat162 pair = __float2bfloat162_rn(number * kEnlarged);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

// What nibbles 0 and 1 of halves of a word are multiplied with, to have their sign and their other bits where BF16 has
// them. The compiler does not know them: it would make shifts of them, which take the pipe that masks take already.
struct Spread {
  uint32_t first, second;
};
static __constant__ Spread kSpread{(1 << 12) + (1 << 6), (1 << 8) + (1 << 2)};

// Numbers i and i + 4 of the 8 of a word become the halves of pairs[i].
__device__ __forceinline__ void decode_word(uint32_t (&pairs)[4], uint32_t word, uint32_t scale) {
  const __nv_bfloat162& factor = reinterpret_cast<const __nv_bfloat162&>(scale);
  constexpr uint32_t kFirst = 0x000f000f, kSecond = 0x00f000f0, kBits = 0x81c081c0;
  const uint32_t upper = word >> 8;
  const uint32_t bits[4] = {(word & kFirst) * kSpread.first & kBits, (word & kSecond) * kSpread.second & kBits,
                            (upper & kFirst) * kSpread.first & kBits, (upper & kSecond) * kSpread.second & kBits};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits[i]), factor);
    pairs[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// The Accumulate policy (accumulate.cuh), with the loop over steps in it, so that it is chosen once for a tile by its
// rows. Scales through shared memory, by asynchronous copies, took 4 % longer (docs/performance.md).
//
// With g = lane / 4 and t = lane % 4, sums.values[4 (16 b + i) + 2 h + j] is column g + 8 h of the warp's block b of
// columns, and row 8 i + 2 t + j.
//
// A step is 128 along the depth: two panels of rows, 64 bytes of each column. Of 64 along the depth a thread has 16 t
// to 16 t + 15, in 8 bytes of a column and 32 of a row, all of one group; so 8 neighbouring numbers are a word of
// weights and 16 bytes of a row.
class FromPacked {
 public:
  // Of a warp. In shared memory, as those of other policies.
  struct Scales {
    const uint8_t* groups[2];  // of its first column of each block
    int32_t columns[2];        // that the matrix has from there on
    int32_t row_bytes;         // groups of a column
    int32_t lines[2];          // of the stage, where its columns of each block begin
    int16_t row_blocks;        // of 8, up to a power of two
    bool sixteen;              // to a group, else 32
  };

  __device__ FromPacked(const Scales& scales, int) : scales_(scales), now_{}, next_{} {}

  __device__ __forceinline__ void begin(ptx::Accumulators& sums) {
    ptx::clear_accumulators(sums);
    load_groups(0);
    take_groups();
    load_groups(1);
  }

  // All steps of a tile: how many rows it has decides once which code runs.
  template <class Ring, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_tile(ptx::Accumulators& sums, const Ring& ring,
                                                typename Ring::Position& position, int lane, int32_t steps,
                                                const Meanwhile& meanwhile, const Track& track) {
    const auto multiply = [&](auto row_blocks) {
      constexpr int kRowBlocks = decltype(row_blocks)::value;
      bool full = false;  // the stage of the step, as was seen while the one before was multiplied
      for (int32_t step = 0; step < steps; ++step) {
        if (!full) track.stall([&] { ring.wait(position); });
        const int log_steps = scales_.sixteen ? 1 : 2;  // that a load is for
        if (step > 0 && (step & ((1 << log_steps) - 1)) == 0) {
          take_groups();
          load_groups((step >> log_steps) + 1);
        }
        const auto& stage = ring.stage(position);
        full = step + 1 < steps && ring.looks_full(position.after());
        multiply_rows<at_most(kRowBlocks, 8)>(sums, stage);
        if constexpr (kRowBlocks > 8) multiply_rows<8, 8>(sums, stage);
        ring.release(position, lane);
        skip_groups();
        meanwhile(step);
        position.advance();
      }
      if constexpr (kRowBlocks <= kSplitBlocks) add_split<kRowBlocks>(sums);
    };
    switch (scales_.row_blocks) {
      case 1: return multiply(std::integral_constant<int, 1>{});
      case 2: return multiply(std::integral_constant<int, 2>{});
      case 4: return multiply(std::integral_constant<int, 4>{});
      case 8: return multiply(std::integral_constant<int, 8>{});
      default: return multiply(std::integral_constant<int, 16>{});
    }
  }

 private:
  // A lane loads groups for all four of its quad, 16 bytes of the column g + 8 t of the warp at a time, ahead of the
  // steps that they are for: memory is as far away as a stage takes. Nothing touches what comes before take_groups().
  static constexpr int32_t kLoadBytes = 16;

  // Where the groups of this lane's column begin, null of a column behind the last one.
  __device__ __forceinline__ const uint8_t* groups_of_column() const {
    const int lane = ptx::read_lane();
    const int block = lane / 2 % 2, column = lane / 4 + 8 * (lane % 2);
    if (column >= scales_.columns[block]) return nullptr;
    return scales_.groups[block] + int64_t{column} * scales_.row_bytes;
  }

  // Columns that are no whole number of loads begin at multiples of two bytes, since they have groups of 64 numbers:
  // their words are loaded from the multiple of four before. Behind the last group of such a column may come the first
  // ones of the next column: numbers there are zeros, so that only a scale that is no number reaches this column too.
  __device__ __forceinline__ void load_groups(int32_t nth) {
    const uint8_t* const column = groups_of_column();
    const int32_t first = kLoadBytes * nth;
    const int32_t left = column == nullptr ? 0 : scales_.row_bytes - first;
    const auto* source = column + first;
    if (scales_.row_bytes % kLoadBytes == 0) {
      ptx::load_if(left > 0, next_, reinterpret_cast<const uint4*>(source));
    } else {
      const int32_t before = reinterpret_cast<uintptr_t>(source) % 4;
      source -= before;
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        ptx::load_if(left + before > 4 * i, next_[i], reinterpret_cast<const uint32_t*>(source) + i);
      }
    }
  }
  __device__ __forceinline__ void take_groups() {
    const int32_t before = 8 * (reinterpret_cast<uintptr_t>(groups_of_column()) % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) now_[i] = __funnelshift_r(next_[i], next_[i + 1], before);
  }

  // Those of the step that was multiplied are gone.
  __device__ __forceinline__ void skip_groups() {
    const bool two = scales_.sixteen;  // words to a step
    now_[0] = two ? now_[2] : now_[1];
    now_[1] = two ? now_[3] : now_[2];
    now_[2] = now_[3];
  }

  // The products of the two slices of a word have sums of their own where these are free: those of row blocks behind
  // the ones that there are. So neighbouring products do not wait for each other.
  static constexpr int kSplitBlocks = 4;
  template <int kRowBlocks>
  static __device__ __forceinline__ void add_split(ptx::Accumulators& sums) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int i = 0; i < 4 * kRowBlocks; ++i) {
        float* const of_block = sums.values + 64 * block;
        of_block[i] += of_block[4 * kSplitBlocks + i];
      }
    }
  }

  // scales[u]: of column g + 8 u of the warp's 32, in one half of the step.
  __device__ __forceinline__ void find_scales(uint32_t (&scales)[4], int half) const {
    const int lane = ptx::read_lane(), quad = lane & ~3, t = lane & 3;
    const bool sixteen = scales_.sixteen;
    uint32_t words[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) words[u] = __shfl_sync(0xffffffff, sixteen && half > 0 ? now_[1] : now_[0], quad + u);
    if (sixteen) {
#pragma unroll
      for (int u = 0; u < 4; ++u) scales[u] = GroupScales::of_e4m3(words[u], t);
    } else {
#pragma unroll
      for (int u = 0; u < 4; ++u) scales[u] = GroupScales::of_power_of_two(words[u], 2 * half + t / 2);
    }
  }

  // Of so many blocks of 8 rows, from the one that is named on. More than 8 would spill: of more rows weights are
  // decoded twice, which is less than what the products then take.
  template <int kRowBlocks, int kFirstBlock = 0, class Stage>
  __device__ __forceinline__ void multiply_rows(ptx::Accumulators& sums, const Stage& stage) const {
    constexpr int kInTurn = kRowBlocks < 4 ? kRowBlocks : 4;
    const int lane = ptx::read_lane(), g = lane / 4, t = lane % 4;  // asked anew: there is no register to keep it
#pragma unroll kRowBlocks < 8 ? 2 : 1
    for (int half = 0; half < Stage::A::kPanels; ++half) {
      uint32_t scales[4];
      find_scales(scales, half);
      uint2 columns[4];  // u: column g + 8 u of the warp's 32
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const std::byte* const line = stage.b.lines[scales_.lines[u / 2] + g + 8 * (u % 2)];
        columns[u] = *reinterpret_cast<const uint2*>(line + 32 * half + 8 * t);
      }
      const auto* const rows = reinterpret_cast<const std::byte*>(stage.a.panel(half).lines[8 * kFirstBlock + g]);
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        // As the copy engine swizzles a line of 128 bytes.
        const std::byte* const of_word = rows + 16 * ((2 * t + word) ^ g);
        uint32_t a[2][2][4];  // of each block of columns: two slices
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const uint2 &first = columns[2 * block], &second = columns[2 * block + 1];
          uint32_t upper[4], lower[4];
          decode_word(upper, word == 0 ? first.x : first.y, scales[2 * block]);
          decode_word(lower, word == 0 ? second.x : second.y, scales[2 * block + 1]);
#pragma unroll
          for (int slice = 0; slice < 2; ++slice) {
            a[block][slice][0] = upper[2 * slice];
            a[block][slice][1] = lower[2 * slice];
            a[block][slice][2] = upper[2 * slice + 1];
            a[block][slice][3] = lower[2 * slice + 1];
          }
        }
#pragma unroll
        for (int i = 0; i < kRowBlocks; i += kInTurn) {
          uint4 lines[kInTurn];
#pragma unroll
          for (int j = 0; j < kInTurn; ++j) {
            lines[j] = *reinterpret_cast<const uint4*>(of_word + 8 * (i + j) * Stage::A::kLineBytes);
          }
          // Products that add to the same sums as far apart as can be.
#pragma unroll
          for (int slice = 0; slice < 2; ++slice) {
#pragma unroll
            for (int j = 0; j < kInTurn; ++j) {
              const uint32_t early = slice == 0 ? lines[j].x : lines[j].y;
              const uint32_t late = slice == 0 ? lines[j].z : lines[j].w;
              const uint32_t b[2] = {__byte_perm(early, late, 0x5410), __byte_perm(early, late, 0x7632)};
#pragma unroll
              for (int block = 0; block < 2; ++block) {
                const int apart = kRowBlocks <= kSplitBlocks ? slice * kSplitBlocks : 0;
                ptx::multiply_bf16(sums.values + 4 * (16 * block + kFirstBlock + apart + i + j), a[block][slice], b);
              }
            }
          }
        }
      }
    }
  }

  const Scales& scales_;
  uint32_t now_[4], next_[5];  // groups of this step and those after it; what is being loaded
};

}  // namespace jaxmoe
