// Lines of columns, from how they lie packed in a stage to how the tensor cores read them: a column's numbers in a step of
// the depth, as many as 128 bytes hold, by one lane. Caller: stage_decoder.cuh.
//
// Both sides are swizzled, so that neither the lanes' loads nor their stores meet in a bank: a warp has 32 neighbouring
// columns of each half.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/formats.h"
#include "common/tiling.h"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/exchange/decode_blocks.cuh"
#include "cuda/kernel/gemm/packed.cuh"

namespace jaxmoe {

// A line of a column in shared memory, vector by vector of 16 bytes, as lines of kBytes are swizzled. The same line of the
// tile's other half is kOtherHalf bytes further on.
template <int kBytes>
class SwizzledLine {
 public:
  static constexpr int kOtherHalf = Tiling::kColumns / 2 * kBytes;

  __device__ __forceinline__ SwizzledLine(const void* line, int column)
      : start_(ptx::shared_address(line) + 16 * (column / kLinesOfPattern % kVectors)) {}

  template <int kHalf>
  __device__ __forceinline__ uint4 load(int nth) const {
    return ptx::load_shared<kHalf * kOtherHalf>(start_ ^ 16 * nth);
  }
  template <int kHalf>
  __device__ __forceinline__ void store(int nth, const uint4& vector) const {
    ptx::store_shared<kHalf * kOtherHalf>(start_ ^ 16 * nth, vector);
  }

 private:
  static constexpr int kVectors = kBytes / 16;
  static constexpr int kLinesOfPattern = 128 / kBytes;  // of all patterns: 128 bytes have one and the same swizzle
  const uint32_t start_;  // of vector 0
};

// A lane's two columns: one of each half of the tile. Everything that a lane loads of them, or as much as it has registers
// for, it loads before it stores: to the compiler they may be the same memory, and there is one warp to a scheduler, which
// would wait for each load.

// To BF16, 2^GroupScales::kLessened times too small: a line is 64 numbers. `scales` are those of its groups, from the
// lowest byte on.
template <int kGroup, int kHalf>
__device__ __forceinline__ void decode_half_to_bf16(const uint4 (&numbers)[2], const SwizzledLine<128>& target,
                                                    uint32_t scales) {
#pragma unroll
  for (int nth = 0; nth < 2; ++nth) {
    const uint32_t words[4] = {numbers[nth].x, numbers[nth].y, numbers[nth].z, numbers[nth].w};
    uint32_t scale = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kGroup == 32) {
        if (i == 0) scale = GroupScales::of_power_of_two(scales, nth);
      } else {
        if (i % 2 == 0) scale = GroupScales::of_e4m3(scales, 2 * nth + i / 2);
      }
      uint32_t pairs[4];  // of numbers j and j + 4
      decode_word(pairs, words[i], scale);
      constexpr uint32_t kLower = 0x5410, kUpper = 0x7632;
      target.store<kHalf>(4 * nth + i,
                          {__byte_perm(pairs[0], pairs[1], kLower), __byte_perm(pairs[2], pairs[3], kLower),
                           __byte_perm(pairs[0], pairs[1], kUpper), __byte_perm(pairs[2], pairs[3], kUpper)});
    }
  }
}

// The magnitudes of groups whose scales are powers of two, which are few beside the largest one of a block: a lane has
// those of one, and asks the others. To make them anew took half as many instructions again as the numbers of a group.
class PowerMagnitudes {
 public:
  // By all lanes of a warp, as everything here.
  __device__ PowerMagnitudes() : mine_(decode::PowerGroups::factor(byte_of(ptx::read_lane()), 0)) {}

  __device__ __forceinline__ decode::GroupMagnitudes of(uint32_t byte, int32_t exponent) const {
    // A scale that is NaN is above all of its block.
    const int32_t lane = min(max(kLargest + 127 + exponent - static_cast<int32_t>(byte), -1), kZeros);
    return {__shfl_sync(0xffffffff, mine_.lower, lane), __shfl_sync(0xffffffff, mine_.upper, lane)};
  }

 private:
  static constexpr int32_t kLargest = 6;  // of the powers beside a block's (decoded_block_exponent())
  static constexpr int32_t kZeros = 30;   // the lane of one beside which all numbers round to zero; the one behind it has NaN

  static __device__ __forceinline__ uint32_t byte_of(int lane) {
    return lane > kZeros ? decode::PowerGroups::kNaN : 127 + kLargest - lane;
  }

  const decode::GroupMagnitudes mine_;
};
// Those whose scales are E4M3.
struct ByteMagnitudes {
  __device__ __forceinline__ decode::GroupMagnitudes of(uint32_t byte, int32_t exponent) const {
    return decode::GroupMagnitudes(decode::ByteGroups::factor(byte, exponent));
  }
};

// To E4M3, beside the scale 2^exponent of the block: a line is 128 numbers, 32 of them to a vector; the scales of its groups
// are one word, or two. `numbers` are the first vectors, and become those of the other half's line.
inline constexpr int kVectorsAhead = 2;  // for more there are no registers
template <int kGroup, int kHalf, class Magnitudes>
__device__ __forceinline__ void decode_half_to_e4m3(const Magnitudes& magnitudes, uint4 (&numbers)[kVectorsAhead],
                                                    const SwizzledLine<64>& source, const SwizzledLine<128>& target,
                                                    uint32_t first, uint32_t second, int32_t exponent) {
  constexpr int kGroups = 32 / kGroup;  // of a vector of packed numbers
#pragma unroll
  for (int nth = 0; nth < 4; ++nth) {
    uint4& vector = numbers[nth % kVectorsAhead];
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    if (nth + kVectorsAhead < 4) {
      vector = source.load<kHalf>(nth + kVectorsAhead);
    } else if (kHalf == 0) {
      vector = source.load<1>(nth + kVectorsAhead - 4);
    }
    const uint32_t scales = kGroups == 1 || nth < 2 ? first : second;
    decode::GroupMagnitudes group = magnitudes.of(scales >> 8 * (kGroups * nth % 4) & 0xff, exponent);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (kGroups == 2 && i == 1) group = magnitudes.of(scales >> 8 * (kGroups * nth % 4 + 1) & 0xff, exponent);
      const uint2 one = decode::decode_word(words[2 * i], group), other = decode::decode_word(words[2 * i + 1], group);
      target.store<kHalf>(2 * nth + i, {one.x, one.y, other.x, other.y});
    }
  }
}

}  // namespace jaxmoe
