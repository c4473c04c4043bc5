// What becomes of the sums of packed weights (gemm/packed.cuh), of which a thread has columns of several rows: h, and
// answers. The four warps of a warpgroup fill lines together, 32 rows at a time, and each stores a quarter of them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/activation.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/gemm/epilogues/answers.cuh"
#include "cuda/kernel/gemm/epilogues/h.cuh"
#include "cuda/kernel/gemm/products.cuh"
#include "cuda/kernel/gemm/turned.cuh"

namespace jaxmoe::epilogue {

// Where lines are filled. A line is a row of the warpgroup's columns, 128 at most; 16 bytes behind each let 8 of them
// lie in 8 different groups of banks.
struct Lines {
  static constexpr int kRows = 32;
  static constexpr int kRowsOfWarp = kRows / Roles::kWarpgroupWarps;
  static constexpr int kColumns = Tiling::kColumns / Roles::kMathWarpgroups;
  static constexpr int kStride = kColumns * 2 + 16;

  // The row that a lane stores in a pass over the tile, counted from the pass's first; lanes 8 and on repeat it.
  static __device__ __forceinline__ int32_t row_of(const MathThread& thread) {
    return kRowsOfWarp * (thread.warp % Roles::kWarpgroupWarps) + thread.lane % kRowsOfWarp;
  }
};

// All warps of a warpgroup. Barrier 1 is combine's.
__device__ __forceinline__ void meet_warpgroup(const MathThread& thread) {
  constexpr int kThreads = Roles::kWarpgroupWarps * Roles::kWarpThreads;
  static_assert(Roles::kMathWarpgroups == 2);
  __syncwarp();
  if (thread.warpgroup == 0) {
    ptx::named_barrier<2, kThreads>();
  } else {
    ptx::named_barrier<3, kThreads>();
  }
}

// Stores this warp's lines, of each `columns` where `to` of the lane with its number says; nothing of lines where that is null.
// By ordinary stores: of the copy engine lanes ask for their lines one after the other, in a loop that the compiler makes, and
// the next pass would wait until it has read them.
template <class Element>
__device__ __forceinline__ void store_lines_of_warp(const std::byte* lines, int lane, int32_t columns, Element* to) {
  constexpr int kOfLane = sizeof(uint4) / sizeof(Element);
  constexpr int kLanesOfLine = Lines::kColumns / kOfLane, kLinesAtOnce = Roles::kWarpThreads / kLanesOfLine;
  const int32_t column = lane % kLanesOfLine * kOfLane;
#pragma unroll
  for (int first = 0; first < Lines::kRowsOfWarp; first += kLinesAtOnce) {
    const int line = first + lane / kLanesOfLine;
    Element* const of_line = row_of_lane(to, line);
    if (of_line == nullptr || column >= columns) continue;
    *reinterpret_cast<uint4*>(of_line + column) =
        *reinterpret_cast<const uint4*>(lines + line * Lines::kStride + column * sizeof(Element));
  }
}

// For each 32 rows of the tile: fill(lines, first row block, rows left) fills lines, and of each `columns`, turned
// (gemm/turned.cuh) if so, go to target(row) + first_column, where there is one.
template <bool kTurned, class Variant, class Fill, class Target>
__device__ __forceinline__ void store_across(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             int32_t first_column, int32_t columns, const Fill& fill,
                                             const Target& target) {
  static_assert(Lines::kRows * Lines::kStride <= GemmShape<Variant>::Staging::kHalfBytes);
  std::byte* const lines = cta.shared.gemm.staging.of_warpgroup(thread.warpgroup);
  const int32_t first_of_warp = Lines::kRowsOfWarp * (thread.warp % Roles::kWarpgroupWarps);
  std::byte* const of_warp = lines + first_of_warp * Lines::kStride;
#pragma unroll
  for (int pass = 0; pass < Tiling::kRows / Lines::kRows; ++pass) {
    const int32_t first_row = pass * Lines::kRows;
    if (first_row >= task.rows) break;
    // Looked up before lines are filled, which hides how long that takes.
    const int32_t row = first_row + Lines::row_of(thread);
    auto* to = row < task.rows && columns > 0 ? target(row) : nullptr;
    if (to != nullptr) to += first_column;
    meet_warpgroup(thread);  // all have stored what lay there
    fill(lines, pass * (Lines::kRows / 8), task.rows - first_row);
    meet_warpgroup(thread);
    const int32_t rows = at_most(task.rows - first_row - first_of_warp, Lines::kRowsOfWarp);
    if (rows <= 0) continue;
    if constexpr (kTurned) {
      turned::turn_rows(of_warp, rows, Lines::kStride, columns, thread.lane);
      __syncwarp();
    }
    store_lines_of_warp(of_warp, thread.lane, columns, to);
  }
}

// Scale and bias of the columns g and g + 8 of a block of this thread's, of which the matrix has `count`.
struct ColumnTerms {
  float scale;
  float bias[2];

  template <class Variant>
  static __device__ __forceinline__ ColumnTerms of(const Cta<Variant>&, const void* biases, const float* scales,
                                                   int32_t expert, int32_t first, int32_t count) {
    using Element = typename Variant::Precision::Wide::Element;
    constexpr float kToSums = ProductsOf<Variant>::template FirstOf<AllOf>::Accumulate::kToSums;
    ColumnTerms terms{__ldg(scales + expert) * kToSums, {0.0f, 0.0f}};
    if (biases == nullptr) return terms;
    const auto* const of_expert = static_cast<const Element*>(biases) + int64_t{expert} * count;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first + 8 * i < count) terms.bias[i] = static_cast<float>(of_expert[first + 8 * i]);
    }
    return terms;
  }
  // Sum number i of a thread's four of a block: columns g, g, g + 8, g + 8.
  __device__ __forceinline__ float complete(float sum, int i) const { return sum * scale + bias[i / 2]; }
};

// Of a gate_up task those of gate and up of this thread's columns, or, of experts without up, of both of its blocks of
// columns.
struct GateUpTerms {
  ColumnTerms first, second;

  template <class Variant>
  static __device__ __forceinline__ GateUpTerms of(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                                   const TileColumns& tile, bool gated) {
    const auto& p = cta.params;
    const int32_t column = tile.first + (gated ? 16 : 32) * thread.warp + thread.lane / 4;
    return {ColumnTerms::of(cta, p.b_gate, p.w_gate_scales, task.expert, column, tile.count),
            gated ? ColumnTerms::of(cta, p.b_up, p.w_up_scales, task.expert, column, tile.count)
                  : ColumnTerms::of(cta, p.b_gate, p.w_gate_scales, task.expert, column + 16, tile.count)};
  }
};

// Fills lines from row block `i` of the pass on with two row blocks of 16 columns of each warp: pair(row block, half) has
// two neighbours of column g + 8 * half, packed.
template <class Pair>
__device__ __forceinline__ void fill_16_columns(const MathThread& thread, std::byte* lines, int i, const Pair& pair) {
  uint32_t tiles[4];
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) tiles[tile] = pair(i + tile / 2, tile % 2);
  std::byte* const address = lines + (thread.lane % 8 + 8 * (thread.lane / 16)) * Lines::kStride +
                             2 * (16 * (thread.warp % Roles::kWarpgroupWarps) + 8 * (thread.lane / 8 % 2));
  ptx::store_turned_tiles(address + 8 * i * Lines::kStride, tiles);
}

// Fills `rows` lines, 32 at most, with transform(sum, number of the sum) of the first block: 16 columns of each warp.
template <class Variant, class Transform>
__device__ __forceinline__ void fill_first_block(const ptx::Accumulators& sums, const MathThread& thread,
                                                 std::byte* lines, int first_block, int32_t rows,
                                                 const Transform& transform) {
  using Wide = typename Variant::Precision::Wide;
#pragma unroll
  for (int i = 0; i < Lines::kRows / 8; i += 2) {
    if (8 * i >= rows) break;
    fill_16_columns(thread, lines, i, [&](int row_block, int half) {
      const float* const pair = sums.values + 4 * (first_block + row_block) + 2 * half;
      return Wide::pack(transform(pair[0], 2 * half), transform(pair[1], 2 * half));
    });
  }
}

// Fills `rows` lines, 32 at most, with transform(sum, number of the sum, block): 32 columns of each warp.
template <class Variant, class Transform>
__device__ __forceinline__ void fill_whole(const ptx::Accumulators& sums, const MathThread& thread, std::byte* lines,
                                           int first_block, int32_t rows, const Transform& transform) {
  using Wide = typename Variant::Precision::Wide;
  std::byte* const address = lines + thread.lane % 8 * Lines::kStride +
                             2 * (32 * (thread.warp % Roles::kWarpgroupWarps) + 8 * (thread.lane / 8));
#pragma unroll
  for (int i = 0; i < Lines::kRows / 8; ++i) {
    if (8 * i >= rows) break;
    uint32_t tiles[4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int block = tile / 2, half = tile % 2;
      const float* const pair = sums.values + 4 * (16 * block + first_block + i) + 2 * half;
      tiles[tile] = Wide::pack(transform(pair[0], 2 * half, block), transform(pair[1], 2 * half, block));
    }
    ptx::store_turned_tiles(address + 8 * i * Lines::kStride, tiles);
  }
}

// The target of the row that this thread stores first is looked up by the caller; those of others here.
struct AcrossAnswers {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget target, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    const TileColumns tile = answer_columns_of(cta, task);
    // Of columns that the blocks of the cluster share a warp has one block.
    const bool shares = cta.shares_columns(task);
    const int32_t columns = shares ? Lines::kColumns / 2 : Lines::kColumns;  // of the warpgroup
    const int32_t first = tile.first + columns * thread.warpgroup;
    const int32_t first_of_thread = tile.first + (shares ? 16 : 32) * thread.warp + thread.lane / 4;
    const auto terms_of = [&](int32_t column) {
      return ColumnTerms::of(cta, p.b_down, p.w_down_scales, task.expert, column, p.shape.hidden);
    };
    const ColumnTerms terms[2] = {terms_of(first_of_thread), terms_of(first_of_thread + 16)};
    const auto fill = [&](std::byte* lines, int first_block, int32_t rows) {
      if (shares) {
        fill_first_block<Variant>(sums, thread, lines, first_block, rows,
                                  [&](float sum, int i) { return terms[0].complete(sum, i); });
      } else {
        fill_whole<Variant>(sums, thread, lines, first_block, rows,
                            [&](float sum, int i, int block) { return terms[block].complete(sum, i); });
      }
    };
    store_across<false>(cta, task, thread, first, at_most(tile.count - first, columns), fill, [&](int32_t row) {
      if (row < Lines::kRows) return answer_of(cta, target);
      const int64_t ring_row = ring_row_of<Variant>(task, row);
      return answer_of(cta, {__ldcg(cta.template at<uint32_t>(p.layout.row_targets) + ring_row)});
    });
  }
};

// Turned, as the tokens in the ring are.
struct AcrossH {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    using Wide = typename Variant::Precision::Wide;
    const auto& p = cta.params;
    const TileColumns tile = h_columns_of(cta, task);
    const auto target = [&](int32_t row) {
      return cta.template at<typename Wide::Element>(p.layout.h) +
             ring_row_of<Variant>(task, row) * p.shape.intermediate;
    };
    const int32_t columns = p.gated ? Lines::kColumns / 2 : Lines::kColumns;  // of the warpgroup
    const int32_t first = tile.first + columns * thread.warpgroup;
    const GateUpTerms terms = GateUpTerms::of(cta, task, thread, tile, p.gated);
    with_activation_kind(p.activation.kind, [&](auto kind) {
      const auto activate = [&](float gate_value, float up_value) {
        return activate_as<decltype(kind)::value>(p.activation, gate_value, up_value);
      };
      const auto fill = [&](std::byte* lines, int first_block, int32_t rows) {
        if (!p.gated) {
          fill_whole<Variant>(sums, thread, lines, first_block, rows, [&](float sum, int i, int block) {
            return activate((block == 0 ? terms.first : terms.second).complete(sum, i), 1.0f);
          });
          return;
        }
#pragma unroll
        for (int i = 0; i < Lines::kRows / 8; i += 2) {
          if (8 * i >= rows) break;
          fill_16_columns(thread, lines, i, [&](int row_block, int half) {
            const float* const gates = sums.values + 4 * (first_block + row_block) + 2 * half;
            const float* const ups = gates + 4 * 16;
            return Wide::pack(activate(terms.first.complete(gates[0], 2 * half), terms.second.complete(ups[0], 2 * half)),
                              activate(terms.first.complete(gates[1], 2 * half), terms.second.complete(ups[1], 2 * half)));
          });
        }
      };
      store_across<true>(cta, task, thread, first, at_most(tile.count - first, columns), fill, target);
    });
  }
};

}  // namespace jaxmoe::epilogue
