// Decoding: weights that have fewer bits than they are multiplied with become matrices of what is multiplied, expert by
// expert, in a ring. Each dispatch warp decodes its share of an expert before it pulls rows of it, so that this happens
// beside the products of the experts before.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/formats.h"
#include "common/layout.h"
#include "common/protocol.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::decode {

// A matrix of an expert, [width, depth], and where its elements go.
struct Matrix {
  const std::byte* elements;
  const uint8_t* groups;  // scales of groups of a row; null where there are none
  const float* scales;
  std::byte* decoded;
  int32_t width, depth;
  int32_t scale_rows, scale_columns;  // that share a float32 scale
};

// Number `which` of gate, up and down of an expert, for slot `weight_slot` of the ring.
template <class Variant>
__device__ __forceinline__ Matrix matrix_of(const Cta<Variant>& cta, int32_t which, int32_t expert,
                                            int32_t weight_slot) {
  using Element = typename Variant::Precision::Element;
  const auto& p = cta.params;
  const bool is_down = which == p.shape.projections;
  const int32_t width = is_down ? p.shape.hidden : p.shape.intermediate;
  const int32_t depth = is_down ? p.shape.intermediate : p.shape.hidden;
  const int32_t scale_rows = p.weight_scale_rows, scale_columns = scale_rows == kScaleColumns ? kScaleColumns : depth;
  const int32_t scales = (scale_rows == kAllOfThem ? 1 : ceil_div(width, scale_rows)) * ceil_div(depth, scale_columns);
  const int32_t group = p.weight_group_columns;
  const int64_t size = int64_t{width} * depth;
  const void* const elements = is_down ? p.w_down : which == 0 ? p.w_gate : p.w_up;
  const float* const all_scales = is_down ? p.w_down_scales : which == 0 ? p.w_gate_scales : p.w_up_scales;
  const uint8_t* const groups = is_down      ? p.w_down_group_scales
                                : which == 0 ? p.w_gate_group_scales
                                             : p.w_up_group_scales;
  Element* const ring = cta.template at<Element>(p.layout.decoded_weights);
  return {static_cast<const std::byte*>(elements) + expert * (group > 0 ? size / 2 : size),
          group > 0 ? groups + expert * (size / group) : nullptr,
          all_scales + int64_t{expert} * scales,
          reinterpret_cast<std::byte*>(ring + (int64_t{which} * p.schedule.weight_slots + weight_slot) * size),
          width, depth, scale_rows, scale_columns};
}

// Formats of weights: a Vector of 16 elements as it lies, which four() takes apart into numbers of e4m3 that are kUnit
// times too small, and the scale of the group that it is in, of vector number `vector` of a row.
struct EightBits {
  static constexpr int32_t kGroup = 16;  // there are none
  using Vector = uint4;
  static constexpr float kUnit = 1.0f;
  static __device__ __forceinline__ float group_scale(const uint8_t*, int32_t) { return 1.0f; }
  // Four elements in e4m3, numbers 4 * i and on.
  static __device__ __forceinline__ uint32_t four(const Vector& vector, int i) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
    return words[i];
  }
};

// The bits of E2M1 behind those of the sign are the exponent's lowest two and the mantissa's highest of an e4m3 number
// that is 64 times smaller, subnormal ones too.
struct FourBits {
  using Vector = uint2;
  static constexpr float kUnit = 64.0f;
  static __device__ __forceinline__ uint32_t four(const Vector& vector, int i) {
    const uint32_t word = i < 2 ? vector.x : vector.y;
    const uint32_t even = spread(word), odd = spread(word >> 4);
    return __byte_perm(even, odd, i % 2 == 0 ? 0x5140 : 0x7362);
  }

 private:
  static __device__ __forceinline__ uint32_t spread(uint32_t word) {
    return (word & 0x07070707) << 2 | (word & 0x08080808) << 4;
  }
};
struct Mxfp4 : FourBits {
  static constexpr int32_t kGroup = group_columns_of(Element::kE8M0);
  static __device__ __forceinline__ float group_scale(const uint8_t* groups, int32_t vector) {
    const uint32_t byte = __ldg(groups + vector / 2);
    return __uint_as_float(byte == 0 ? 0x00400000 : byte == 255 ? 0x7fc00000 : byte << 23);
  }
};
struct Nvfp4 : FourBits {
  static constexpr int32_t kGroup = group_columns_of(Element::kE4M3);
  static __device__ __forceinline__ float group_scale(const uint8_t* groups, int32_t vector) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(__ldg(groups + vector), __NV_E4M3)));
  }
};

// By a warp: a row of a matrix. Elements are read once, and results are left to L2. A number is its value times the scale
// of its group, which is exact, times the other scale, rounded once.
template <class Format, class Precision>
__device__ __forceinline__ void decode_row(const Matrix& matrix, int32_t row) {
  using Vector = typename Format::Vector;
  constexpr int kLoadsInFlight = 4;
  constexpr int kElements = 16;  // of a vector
  const int32_t vectors = matrix.depth / kElements;
  const int64_t first = int64_t{row} * vectors;
  const Vector* const source = reinterpret_cast<const Vector*>(matrix.elements) + first;
  uint4* const target = reinterpret_cast<uint4*>(matrix.decoded) + 2 * first;
  const int32_t scale_row = row / matrix.scale_rows;  // of all of them: 0
  const float* const scales = matrix.scales + scale_row * ceil_div(matrix.depth, matrix.scale_columns);
  const int32_t vectors_of_scale = matrix.scale_columns / kElements;
  const uint8_t* const groups = matrix.groups + first * kElements / Format::kGroup;
#pragma unroll 1
  for (int32_t start = ptx::read_lane(); start < vectors; start += 32 * kLoadsInFlight) {
    Vector loaded[kLoadsInFlight];
    float scale[kLoadsInFlight], group[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = start + 32 * i;
      if (vector >= vectors) continue;
      loaded[i] = __ldcs(source + vector);
      scale[i] = __ldg(scales + vector / vectors_of_scale);
      group[i] = Format::group_scale(groups, vector);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = start + 32 * i;
      if (vector >= vectors) continue;
      uint32_t pairs[8];
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        const auto two =
            static_cast<__nv_fp8x2_storage_t>(Format::four(loaded[i], pair / 2) >> (pair % 2 * 16));
        const float2 numbers = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
        const auto number = [&](float in_units) { return in_units * Format::kUnit * group[i] * scale[i]; };
        pairs[pair] = Precision::pack(number(numbers.x), number(numbers.y));
      }
      target[2 * vector] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      target[2 * vector + 1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
    }
  }
}

// One dispatch warp's share of all decoding: every `dispatchers`th row of all matrices of an expert. How far it has come
// lies in shared memory, since there are no registers for it beside those of dispatch.
template <class Variant>
class Decoder {
 public:
  // By all lanes, as everything here.
  __device__ Decoder(const Cta<Variant>& cta, int dispatch_warp) : cta_(cta), warp_(dispatch_warp) {
    if (ptx::read_lane() == 0) {
      progress() = {};
      advance(progress().next);
    }
    __syncwarp();
  }

  // Experts up to and with that one.
  __device__ __forceinline__ void decode_up_to(int32_t expert) {
    for (;;) {
      const DecodedExpert next = progress().next;
      if (next.expert > expert || next.expert >= cta_.params.shape.local_experts()) return;
      if (next.nth >= cta_.params.schedule.weight_slots) {
        if (ptx::read_lane() == 0) wait_for_slot();
        __syncwarp();
      }
      decode(next.expert, next.weight_slot(cta_.params.schedule));
      __syncwarp();
      if (ptx::read_lane() == 0) {
        // The tasks that multiply these weights acquire it (producer.cuh), with a fence for the copy engine.
        cta_.signals.release(release_after(progress().next));
        advance(progress().next);
      }
      __syncwarp();
    }
  }

 private:
  __device__ __forceinline__ DecodingProgress& progress() const { return cta_.shared.decoding[warp_]; }
  __device__ __forceinline__ void advance(DecodedExpert& expert) const {
    expert.advance(cta_.params.schedule, cta_.shared.rows_per_expert, cta_.params.shape.local_experts());
  }

  // By one lane. Every task of the expert that had the slot is done. Pairs with the releases after them in
  // TaskQueue::announce_stored().
  __device__ __forceinline__ void wait_for_slot() {
    const auto& p = cta_.params;
    DecodedExpert& had = progress().had;
    advance(had);
    for (int32_t tile = had.first_tile; tile < had.first_tile + had.tiles; ++tile) {
      cta_.signals.wait_for_tasks(wait_for_answers(p.shape, p.schedule, tile), Site::kDecode, kLongNapNs);
    }
  }

  __device__ __forceinline__ void decode(int32_t expert, int32_t weight_slot) const {
    const auto& p = cta_.params;
    int32_t row = cta_.block() * Roles::kDispatchWarps + warp_;
#pragma unroll 1
    for (int32_t which = 0; which <= p.shape.projections; ++which) {
      const Matrix matrix = matrix_of(cta_, which, expert, weight_slot);
      const auto decode_rows = [&](auto format) {
#pragma unroll 1
        for (; row < matrix.width; row += cta_.shared.crew.dispatchers) {
          decode_row<decltype(format), typename Variant::Precision::Wide>(matrix, row);
        }
      };
      switch (p.weight_group_columns) {
        case 0: decode_rows(EightBits{}); break;
        case Mxfp4::kGroup: decode_rows(Mxfp4{}); break;
        default: decode_rows(Nvfp4{});
      }
      row -= matrix.width;
    }
  }

  const Cta<Variant>& cta_;
  const int warp_;
};

// Of weights that are multiplied as they are.
struct Nothing {
  template <class Variant>
  __device__ Nothing(const Cta<Variant>&, int) {}
  __device__ __forceinline__ void decode_up_to(int32_t) const {}
};
template <class Variant>
using DecoderOf = std::conditional_t<Variant::Precision::kDecodes, Decoder<Variant>, Nothing>;

}  // namespace jaxmoe::decode
