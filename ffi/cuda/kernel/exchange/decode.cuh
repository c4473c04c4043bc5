// Decoding: weights that have fewer bits than they are multiplied with become matrices of what is multiplied, expert by
// expert, in a ring: of 16 bits here, of 8 in decode_blocks.cuh. Each dispatch warp decodes its share of an expert before
// it pulls rows of it, so that this happens beside the products of the experts before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/formats.h"
#include "common/layout.h"
#include "common/protocol.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/decode_blocks.cuh"
#include "cuda/kernel/gemm/packed_words.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe::decode {

// A matrix of an expert, [width, depth], and where its elements go.
struct Matrix {
  const std::byte* elements;
  const uint8_t* groups;  // scales of groups of a row; null where there are none
  const float* scales;
  std::byte* decoded;
  int32_t width, depth;
  // Of elements that have no groups, 16 of them make a vector. A division takes a GPU some forty cycles, and to find the
  // scale of a vector by three of them took most of the time of decoding it.
  Quotient row_of_vector;
  int32_t rows_shift, vectors_shift;  // rows, and vectors of a row, that share a float32 scale, as powers of two
  int32_t blocks;                     // scales of a row
};

// Formats of weights. A lane takes 16 bytes of a matrix at a time, elements as they lie whatever row they are of:
// group_scale() is what it loads beside them, and decode() makes kElements numbers of both. kElementsFirst: whether a lane
// asks for the elements of all its vectors before the first scale. With that 4 bits took less time, and 8 bits more.
struct EightBits {
  static constexpr int kElements = 16;
  static constexpr bool kElementsFirst = false;
  using GroupScale = float;  // that of the block
  static __device__ __forceinline__ GroupScale group_scale(const Matrix& matrix, int32_t vector) {
    const uint32_t row = matrix.row_of_vector.of(vector);
    const uint32_t block = (vector - row * matrix.row_of_vector.divisor) >> matrix.vectors_shift;
    return __ldg(matrix.scales + (row >> matrix.rows_shift) * matrix.blocks + block);
  }
  template <class Precision>
  static __device__ __forceinline__ void decode(uint4* target, const uint4& elements, GroupScale scale, float) {
    const uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
      const float2 numbers = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
      pairs[i] = Precision::pack(numbers.x * scale, numbers.y * scale);
    }
    target[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    target[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }
};

// E2M1 by pairs of BF16: behind the sign, its bits are the exponent's lowest two and the mantissa's highest of a number
// that is 2^126 times smaller, subnormal ones too. Times that, and times the scale of their group, is exact: 2 bits and
// at most 4 of E4M3. Format says what a scale is, and whether matrices have one beside those of groups; Word how numbers lie
// in a word (packed_words.cuh).
template <class Format, class Word>
struct FourBits {
  static constexpr int kElements = 32;
  static constexpr bool kElementsFirst = true;
  using GroupScale = uint32_t;  // those of 32 elements
  static __device__ __forceinline__ GroupScale group_scale(const Matrix& matrix, int32_t vector) {
    return Format::load(matrix.groups, vector);
  }
  template <class Precision>
  static __device__ __forceinline__ void decode(uint4* target, const uint4& elements, GroupScale groups, float scale) {
    const uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const __nv_bfloat162 group = Format::scale(groups, 8 * word / Format::kGroup);
      uint32_t bits[4], pairs[4];
      spread(bits, words[word]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 unit = __halves2bfloat162(__ushort_as_bfloat16(0x7e80), __ushort_as_bfloat16(0x7e80));
        const __nv_bfloat162 number = __hmul2(__hmul2(reinterpret_cast<const __nv_bfloat162&>(bits[i]), unit), group);
        if constexpr (!Format::kHasOther && std::is_same_v<Precision, Bf16>) {
          pairs[i] = reinterpret_cast<const uint32_t&>(number);
        } else {
          const float2 numbers = __bfloat1622float2(number);
          pairs[i] = Precision::pack(numbers.x * scale, numbers.y * scale);
        }
      }
      target[word] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

 private:
  // The bits of numbers 2 i and 2 i + 1 of a word, where BF16 has them, become the halves of pairs[i].
  static __device__ __forceinline__ void spread(uint32_t (&pairs)[4], uint32_t word) {
    uint32_t bits[4];  // of numbers i and i + 4
    Word::spread(bits, word);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[i] = ptx::permute(bits[2 * i], bits[2 * i + 1], 0x5410);
      pairs[i + 2] = ptx::permute(bits[2 * i], bits[2 * i + 1], 0x7632);
    }
  }
};
struct Mxfp4 {
  static constexpr int32_t kGroup = group_columns_of(Element::kE8M0);
  static constexpr bool kHasOther = false;
  static __device__ __forceinline__ uint32_t load(const uint8_t* groups, int32_t vector) {
    return __ldg(groups + vector);
  }
  static __device__ __forceinline__ __nv_bfloat162 scale(uint32_t byte, int) {
    const uint32_t bits = byte == 0 ? 0x0040 : byte == 255 ? 0x7fc0 : byte << 7;
    return __bfloat162bfloat162(__ushort_as_bfloat16(static_cast<unsigned short>(bits)));
  }
};
struct Nvfp4 {
  static constexpr int32_t kGroup = group_columns_of(Element::kE4M3);
  static constexpr bool kHasOther = true;
  static __device__ __forceinline__ uint32_t load(const uint8_t* groups, int32_t vector) {
    return __ldg(reinterpret_cast<const uint16_t*>(groups) + vector);
  }
  static __device__ __forceinline__ __nv_bfloat162 scale(uint32_t bytes, int which) {
    const auto byte = static_cast<__nv_fp8_storage_t>(bytes >> (8 * which));
    return __float2bfloat162_rn(__half2float(__half(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3))));
  }
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
  // Blocks of 128 x 128, or a scale for each row, or one for all.
  const bool in_blocks = p.weight_scale_rows == kScaleColumns;
  constexpr int32_t kAll = 31, kRowsShift = 7, kVectorsShift = 3;
  static_assert(1 << kRowsShift == kScaleColumns && EightBits::kElements << kVectorsShift == kScaleColumns);
  const int32_t rows_shift = in_blocks ? kRowsShift : p.weight_scale_rows == 1 ? 0 : kAll;
  const int32_t blocks = in_blocks ? ceil_div(depth, kScaleColumns) : 1;
  const int32_t scales = (((width - 1) >> rows_shift) + 1) * blocks;
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
          width, depth, Quotient(depth / EightBits::kElements), rows_shift,
          in_blocks ? kVectorsShift : kAll, blocks};
}

// By a warp: every `parts`th piece of a matrix, from number `piece` on, which it leaves at that of the next matrix.
// Elements are read once, and results are left to L2.
template <class Format, class Precision>
__device__ __forceinline__ void decode_pieces(const Matrix& matrix, int32_t& piece, const int32_t& parts) {
  constexpr int kLoadsInFlight = 4;
  constexpr int kPiece = 32 * kLoadsInFlight;
  constexpr int kPiecesAhead = 2;
  const int32_t vectors = matrix.width * (matrix.depth / 16) / (Format::kElements / 16);
  const auto* const source = reinterpret_cast<const uint4*>(matrix.elements);
  auto* const target = reinterpret_cast<uint4*>(matrix.decoded);
  const float scale = __ldg(matrix.scales);  // of all, where elements have others too
#pragma unroll 1
  for (; piece * kPiece < vectors; piece += parts) {
    // There are no registers for more loads in flight, so that a warp would wait for memory as long as it decodes. What it
    // takes next comes to L2 meanwhile.
    const int32_t next = (piece + kPiecesAhead * parts) * kPiece;
    if (next < vectors && ptx::read_lane() == 0) {
      ptx::prefetch_bytes(source + next, at_most(vectors - next, kPiece) * sizeof(uint4));
    }
    const int32_t first = piece * kPiece + ptx::read_lane();
    uint4 elements[kLoadsInFlight];
    typename Format::GroupScale groups[kLoadsInFlight];
    if constexpr (Format::kElementsFirst) {
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        ptx::load_once_if(first + 32 * i < vectors, elements[i], source + first + 32 * i);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = first + 32 * i;
      if (vector >= vectors) continue;
      if constexpr (!Format::kElementsFirst) elements[i] = __ldcs(source + vector);
      groups[i] = Format::group_scale(matrix, vector);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t vector = first + 32 * i;
      if (vector >= vectors) continue;
      Format::template decode<Precision>(target + int64_t{vector} * (Format::kElements / 8), elements[i], groups[i],
                                         scale);
    }
  }
  piece -= ceil_div(vectors, kPiece);
}

// One dispatch warp's share of all decoding: every `dispatchers`th piece, or block, of all matrices of an expert. How far
// it has come lies in shared memory, since there are no registers for it beside those of dispatch.
template <class Variant>
class Decoder {
 public:
  // By all lanes, as everything here.
  __device__ Decoder(const Cta<Variant>& cta, int dispatch_warp) : cta_(cta), warp_(dispatch_warp) {
    if (ptx::read_lane() == 0) {
      next() = {};
      advance();
    }
    __syncwarp();
  }

  // Experts up to and with that one.
  __device__ __forceinline__ void decode_up_to(int32_t expert) {
    for (;;) {
      const DecodedExpert weights = next();
      if (weights.expert > expert || weights.expert >= cta_.params.shape.local_experts()) return;
      if (weights.nth >= cta_.params.schedule.weight_slots) {
        if (ptx::read_lane() == 0) wait_for_slot();
        __syncwarp();
      }
      decode(weights.expert, weights.weight_slot(cta_.params.schedule));
      __syncwarp();
      if (ptx::read_lane() == 0) {
        // The tasks that multiply these weights acquire it (producer.cuh), with a fence for the copy engine.
        cta_.signals.release(release_after(next()));
        advance();
      }
      __syncwarp();
    }
  }

 private:
  __device__ __forceinline__ DecodedExpert& next() const { return cta_.shared.to_decode[warp_]; }
  __device__ __forceinline__ void advance() const {
    next().advance(cta_.params.schedule, cta_.shared.rows_per_expert, cta_.params.shape.local_experts());
  }

  // By one lane. Every task of the expert that had the slot is done. Pairs with the releases after them in
  // TaskQueue::announce_stored().
  __device__ __forceinline__ void wait_for_slot() {
    const auto& p = cta_.params;
    const DecodedExpert had = next().before_in_slot(p.schedule, cta_.shared.rows_per_expert);
    for (int32_t tile = had.first_tile; tile < had.first_tile + had.tiles; ++tile) {
      cta_.signals.wait_for_tasks(wait_for_answers(p.shape, p.schedule, tile), Site::kDecode, kLongNapNs);
    }
  }

  __device__ __forceinline__ void decode(int32_t expert, int32_t weight_slot) const {
    const int32_t part = cta_.block() * Roles::kDispatchWarps + warp_;
    if constexpr (Variant::Precision::kTokens.is_scaled()) {
      decode_blocks(cta_, expert, weight_slot, part, cta_.shared.crew.dispatchers);
    } else {
      if (!cta_.params.weights_repacked) {
        decode_pieces_of<NibbleWord>(expert, weight_slot, part);
      } else {
        decode_pieces_of<RepackedWord>(expert, weight_slot, part);
      }
    }
  }

  template <class Word>
  __device__ __forceinline__ void decode_pieces_of(int32_t expert, int32_t weight_slot, int32_t piece) const {
    const auto& p = cta_.params;
    const int32_t& parts = cta_.shared.crew.dispatchers;
    using Wide = typename Variant::Precision::Wide;
#pragma unroll 1
    for (int32_t which = 0; which <= p.shape.projections; ++which) {
      const Matrix matrix = matrix_of(cta_, which, expert, weight_slot);
      switch (p.weight_group_columns) {
        case 0:
          if constexpr (std::is_same_v<Word, NibbleWord>) decode_pieces<EightBits, Wide>(matrix, piece, parts);
          break;
        case Mxfp4::kGroup: decode_pieces<FourBits<Mxfp4, Word>, Wide>(matrix, piece, parts); break;
        default: decode_pieces<FourBits<Nvfp4, Word>, Wide>(matrix, piece, parts);
      }
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
