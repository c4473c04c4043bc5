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

// A matrix of an expert, [width, depth] in 8 bits, and where its elements go.
struct Matrix {
  const uint4* elements;
  const float* scales;
  uint4* decoded;
  int32_t width, depth;
  int32_t scale_rows, scale_columns;  // that share a scale

  __device__ __forceinline__ int32_t vectors() const { return depth / static_cast<int32_t>(sizeof(uint4)); }
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
  const int64_t size = int64_t{width} * depth;
  const void* const elements = is_down ? p.w_down : which == 0 ? p.w_gate : p.w_up;
  const float* const all_scales = is_down ? p.w_down_scales : which == 0 ? p.w_gate_scales : p.w_up_scales;
  Element* const ring = cta.template at<Element>(p.layout.decoded_weights);
  return {reinterpret_cast<const uint4*>(static_cast<const std::byte*>(elements) + expert * size),
          all_scales + int64_t{expert} * scales,
          reinterpret_cast<uint4*>(ring + (int64_t{which} * p.schedule.weight_slots + weight_slot) * size),
          width, depth, scale_rows, scale_columns};
}

// 16 elements in 8 bits times their scale, rounded once.
template <class Precision>
__device__ __forceinline__ void decode_vector(uint4* decoded, const uint4& vector, float scale) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
    const float2 numbers = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
    pairs[i] = Precision::pack(numbers.x * scale, numbers.y * scale);
  }
  decoded[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  decoded[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

// By a warp: a row of a matrix. Elements are read once, and results are left to L2.
template <class Precision>
__device__ __forceinline__ void decode_row(const Matrix& matrix, int32_t row, int lane) {
  constexpr int kLoadsInFlight = 4;
  const int32_t vectors = matrix.vectors();
  const uint4* const source = matrix.elements + int64_t{row} * vectors;
  uint4* const target = matrix.decoded + int64_t{row} * 2 * vectors;
  const int32_t scale_row = matrix.scale_rows == kAllOfThem ? 0 : row / matrix.scale_rows;
  const float* const scales = matrix.scales + scale_row * ceil_div(matrix.depth, matrix.scale_columns);
  const int32_t vectors_of_scale = matrix.scale_columns / static_cast<int32_t>(sizeof(uint4));
#pragma unroll 1
  for (int32_t start = lane; start < vectors; start += 32 * kLoadsInFlight) {
    uint4 loaded[kLoadsInFlight];
    float scale[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = start + 32 * i;
      if (vector >= vectors) continue;
      loaded[i] = __ldcs(source + vector);
      scale[i] = __ldg(scales + vector / vectors_of_scale);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = start + 32 * i;
      if (vector < vectors) decode_vector<Precision>(target + 2 * vector, loaded[i], scale[i]);
    }
  }
}

// One dispatch warp's share of all decoding: every `dispatchers`th row of all matrices of an expert.
template <class Variant>
class Decoder {
 public:
  __device__ Decoder(const Cta<Variant>& cta, int32_t dispatcher)
      : cta_(cta), dispatcher_(dispatcher),
        walk_(cta.params.schedule, cta.shared.rows_per_expert, cta.params.shape.local_experts()),
        before_(cta.params.schedule, cta.shared.rows_per_expert, cta.params.shape.local_experts()),
        has_next_(walk_.next(next_)) {}

  // By all lanes: experts up to and with that one.
  __device__ __forceinline__ void decode_up_to(int32_t expert, int lane) {
    while (has_next_ && next_.expert <= expert) {
      if (next_.nth >= cta_.params.schedule.weight_slots) {
        if (lane == 0) wait_for_slot();
        __syncwarp();
      }
      decode(lane);
      __syncwarp();
      // The tasks that multiply these weights acquire it (producer.cuh), with a fence for the copy engine.
      if (lane == 0) cta_.signals.release(release_after(next_));
      has_next_ = walk_.next(next_);
    }
  }

 private:
  // Every task of the expert that had the slot is done. Pairs with the releases after them in
  // TaskQueue::announce_stored().
  __device__ __forceinline__ void wait_for_slot() {
    const auto& p = cta_.params;
    // One lane walks it: it stays weight_slots behind.
    DecodedExpert had{};
    before_.next(had);
    for (int32_t tile = had.first_tile; tile < had.first_tile + had.tiles; ++tile) {
      cta_.signals.wait_for_tasks(wait_for_answers(p.shape, p.schedule, tile), Site::kDecode, kLongNapNs);
    }
  }

  __device__ __forceinline__ void decode(int lane) const {
    const auto& p = cta_.params;
    int32_t row = dispatcher_;
#pragma unroll 1
    for (int32_t which = 0; which <= p.shape.projections; ++which) {
      const Matrix matrix = matrix_of(cta_, which, next_.expert, next_.weight_slot(p.schedule));
#pragma unroll 1
      for (; row < matrix.width; row += cta_.shared.crew.dispatchers) {
        decode_row<typename Variant::Precision::Wide>(matrix, row, lane);
      }
      row -= matrix.width;
    }
  }

  const Cta<Variant>& cta_;
  const int32_t dispatcher_;
  ExpertWalk walk_;
  ExpertWalk before_;
  DecodedExpert next_{};
  bool has_next_;
};

// Of weights that are multiplied as they are.
struct Nothing {
  template <class Variant>
  __device__ Nothing(const Cta<Variant>&, int32_t) {}
  __device__ __forceinline__ void decode_up_to(int32_t, int) const {}
};
template <class Variant>
using DecoderOf = std::conditional_t<Variant::Precision::kDecodes, Decoder<Variant>, Nothing>;

}  // namespace jaxmoe::decode
