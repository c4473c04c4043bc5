// Decoding of weights in 4 bits to E4M3, beside rows in 8 bits: matrices of an expert in blocks of 128 x 128, each with
// one scale (kDecodedBlocks). A warp takes a block at a time. Caller: decode.cuh.
//
// There are eight magnitudes of E2M1, so a group's elements of E4M3 are eight bytes: made of the group's scale by four
// conversions of pairs, and then chosen by byte permutes, four weights at a time.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/formats.h"
#include "common/layout.h"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::decode {

// A matrix of an expert, [width, depth], and where its elements and scales go.
struct BlockedMatrix {
  const uint8_t* elements;  // two weights in a byte
  const uint8_t* groups;    // their scales
  float factor;             // the scale of all of it
  uint8_t* decoded;
  float* scales;
  int32_t depth;
};

// Formats of groups. factor(): the scale of one beside the block's, which is 2^exponent, as a number of F16; exact, but
// that what is below 2^-24 is zero, beside which every weight of E4M3 is.
struct PowerGroups {
  static constexpr Element kScale = Element::kE8M0;
  static constexpr uint32_t kNaN = 0xff, kMagnitude = 0xff;
  static __device__ __forceinline__ __half2 factor(uint32_t byte, int32_t exponent) {
    const int32_t power = max(static_cast<int32_t>(byte) - 127 - exponent, -126);
    const float number = __uint_as_float(static_cast<uint32_t>(power + 127) << 23);
    return __float2half2_rn(byte == kNaN ? __uint_as_float(0x7fffffff) : number);
  }
};
struct ByteGroups {
  static constexpr Element kScale = Element::kE4M3;
  static constexpr uint32_t kNaN = 0x7f, kMagnitude = 0x7f;
  static __device__ __forceinline__ __half2 factor(uint32_t byte, int32_t exponent) {
    const __half scale = __half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(byte), __NV_E4M3));
    // 2^-exponent, which is 2^-3 to 2^11.
    return __half2half2(__hmul(scale, __ushort_as_half(static_cast<unsigned short>((15 - exponent) << 10))));
  }
};

// The magnitudes of a group's elements times `factor`, which may be negative.
struct GroupMagnitudes {
  uint32_t lower, upper;

  __device__ explicit GroupMagnitudes(__half2 factor)
      : lower(two(0x3800'0000, factor) | two(0x3e00'3c00, factor) << 16),   // 0, 0.5; 1, 1.5
        upper(two(0x4200'4000, factor) | two(0x4600'4400, factor) << 16) {}  // 2, 3; 4, 6

  // Four weights, which are the lower half of a word or all of the lower bits of `magnitudes`; and their signs, of which the
  // table has that of the group's scale.
  __device__ __forceinline__ uint32_t of(uint32_t magnitudes, uint32_t signs) const {
    return __byte_perm(lower, upper, magnitudes) ^ (signs & 0x80808080);
  }

 private:
  static __device__ __forceinline__ uint32_t two(uint32_t halves, __half2 factor) {
    const __half2 products = __hmul2(reinterpret_cast<const __half2&>(halves), factor);
    return __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(products), __NV_SATFINITE, __NV_E4M3);
  }
};

// Eight weights of a group, from the lowest bits on.
__device__ __forceinline__ uint2 decode_word(uint32_t word, const GroupMagnitudes& group) {
  const uint32_t magnitudes = word & 0x77777777, even = word << 4;
  // Signs of even weights are the highest bits of the bytes of `even`, of odd ones those of `word`.
  return {group.of(magnitudes, __byte_perm(even, word, 0x5140)),
          group.of(magnitudes >> 16, __byte_perm(even, word, 0x7362))};
}

// The largest of four magnitudes that is a number.
template <class Groups>
__device__ __forceinline__ uint32_t largest_of(uint32_t bytes, uint32_t largest) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = bytes >> 8 * i & Groups::kMagnitude;
    largest = max(largest, byte == Groups::kNaN ? 0 : byte);
  }
  return largest;
}

// Number `block` of a matrix, by all lanes of a warp. A lane takes 32 weights of a row at a time: eight rows by one load
// of all lanes, whose elements are whole lines of memory.
template <class Groups>
__device__ __forceinline__ void decode_block(const BlockedMatrix& matrix, int32_t block) {
  constexpr int32_t kGroup = group_columns_of(Groups::kScale), kWords = kScaleColumns / kGroup / 4;
  constexpr int kRowsAtOnce = 8, kLoads = 4;
  const int32_t lane = ptx::read_lane();
  const int32_t blocks = matrix.depth / kScaleColumns;
  const int32_t first_row = block / blocks * kScaleColumns, first_column = block % blocks * kScaleColumns;
  const int32_t row_groups = matrix.depth / kGroup;
  const auto words_of = [&](int32_t row, int word) {
    const uint8_t* const groups = matrix.groups + int64_t{first_row + row} * row_groups + first_column / kGroup;
    return __ldg(reinterpret_cast<const uint32_t*>(groups) + word);
  };
  uint32_t largest = 0;
#pragma unroll
  for (int row = 0; row < kScaleColumns; row += 32) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) largest = largest_of<Groups>(words_of(row + lane, word), largest);
  }
  const int32_t exponent =
      decoded_block_exponent(Groups::kScale, static_cast<int32_t>(__reduce_max_sync(0xffffffff, largest)));
  if (lane == 0) matrix.scales[block] = __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23) * matrix.factor;

  // Of this lane. Its scales were loaded above, so they come from L1.
  const int64_t first = int64_t{first_row + lane / 4} * matrix.depth + first_column + lane % 4 * 32;
  const uint8_t* source = matrix.elements + first / 2;
  const uint8_t* groups = matrix.groups + first / kGroup;
  uint8_t* target = matrix.decoded + first;
  const int32_t stride = kRowsAtOnce * matrix.depth;
#pragma unroll 1
  for (int row = 0; row < kScaleColumns; row += kLoads * kRowsAtOnce) {
    uint4 elements[kLoads];
    uint32_t scales[kLoads];  // of 32 weights: a byte, or two
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      elements[i] = __ldcs(reinterpret_cast<const uint4*>(source + i * stride / 2));
      const uint8_t* const scale = groups + i * stride / kGroup;
      scales[i] = kGroup == 32 ? __ldg(scale) : __ldg(reinterpret_cast<const uint16_t*>(scale));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint32_t words[4] = {elements[i].x, elements[i].y, elements[i].z, elements[i].w};
      GroupMagnitudes group(Groups::factor(scales[i] & 0xff, exponent));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kGroup == 16 && half == 1) group = GroupMagnitudes(Groups::factor(scales[i] >> 8, exponent));
        const uint2 one = decode_word(words[2 * half], group), other = decode_word(words[2 * half + 1], group);
        reinterpret_cast<uint4*>(target + i * stride)[half] = {one.x, one.y, other.x, other.y};
      }
    }
    source += kLoads * stride / 2;
    groups += kLoads * stride / kGroup;
    target += kLoads * stride;
  }
}

// Number `which` of gate, up and down of an expert, for slot `weight_slot` of the ring.
template <class Groups, class Variant>
__device__ __forceinline__ BlockedMatrix blocked_matrix_of(const Cta<Variant>& cta, int32_t which, int32_t expert,
                                                           int32_t weight_slot) {
  const auto& p = cta.params;
  const bool is_down = which == p.shape.projections;
  const int64_t size = int64_t{p.shape.hidden} * p.shape.intermediate;
  const void* const elements = is_down ? p.w_down : which == 0 ? p.w_gate : p.w_up;
  const uint8_t* const groups = is_down      ? p.w_down_group_scales
                                : which == 0 ? p.w_gate_group_scales
                                             : p.w_up_group_scales;
  const float* const factors = is_down ? p.w_down_scales : which == 0 ? p.w_gate_scales : p.w_up_scales;
  return {static_cast<const uint8_t*>(elements) + expert * (size / 2),
          groups + expert * (size / group_columns_of(Groups::kScale)),
          __ldg(factors + expert),
          cta.template at<uint8_t>(p.layout.decoded_weights) +
              (int64_t{which} * p.schedule.weight_slots + weight_slot) * size,
          cta.template at<float>(p.layout.decoded_scales) + first_decoded_scale(p.shape, which, expert),
          is_down ? p.shape.intermediate : p.shape.hidden};
}

// By a warp, number `part` of `parts`: its share of all matrices of an expert.
template <class Groups, class Variant>
__device__ __forceinline__ void decode_share(const Cta<Variant>& cta, int32_t expert, int32_t weight_slot, int32_t part,
                                             const int32_t& parts) {
  const auto blocks = static_cast<int32_t>(decoded_blocks(cta.params.shape));
  const int32_t all_blocks = (cta.params.shape.projections + 1) * blocks;
#pragma unroll 1
  for (int32_t number = part; number < all_blocks; number += parts) {
    const int32_t which = number < blocks ? 0 : number < 2 * blocks ? 1 : 2;
    decode_block<Groups>(blocked_matrix_of<Groups>(cta, which, expert, weight_slot), number - which * blocks);
  }
}
template <class Variant>
__device__ __forceinline__ void decode_blocks(const Cta<Variant>& cta, int32_t expert, int32_t weight_slot,
                                              int32_t part, const int32_t& parts) {
  if (cta.params.weight_group_columns == group_columns_of(Element::kE8M0)) {
    decode_share<PowerGroups>(cta, expert, weight_slot, part, parts);
  } else {
    decode_share<ByteGroups>(cta, expert, weight_slot, part, parts);
  }
}

}  // namespace jaxmoe::decode
