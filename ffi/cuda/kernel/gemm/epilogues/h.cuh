// What becomes of the sums of gate_up: of a forward pass h, and gate and up where the backward pass wants them; of a
// backward pass gate and up, for h_gradient.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe::epilogue {

// The columns of h that the tile has.
template <class Variant>
__device__ __forceinline__ TileColumns h_columns_of(const Cta<Variant>& cta, const Task& task) {
  return {task.column_tile * cta.params.schedule.tile.h_columns, cta.params.shape.intermediate};
}

// Those of gate and up, where they are in turn.
__device__ __forceinline__ TileColumns pairs_of(TileColumns columns) { return {2 * columns.first, 2 * columns.count}; }

template <class Variant>
__device__ __forceinline__ void add_gate_up_biases(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                                   ptx::Accumulators& sums) {
  constexpr int kColumns = Tiling::kColumns;
  const auto& p = cta.params;
  const TileColumns columns = h_columns_of(cta, task);
  const int64_t first = int64_t{task.expert} * p.gate_up_pitch(columns.count);
  if (cta.interleaved()) {
    add_bias<Variant, 0, kColumns>(sums, thread, pairs_of(columns), p.b_gate, first);
  } else if (p.gated) {
    add_bias<Variant, 0, kColumns / 2>(sums, thread, columns, p.b_gate, first);
    add_bias<Variant, kColumns / 2, kColumns / 2>(sums, thread, columns, p.b_up, first);
  } else {
    add_bias<Variant, 0, kColumns>(sums, thread, columns, p.b_gate, first);
  }
}

// Where this thread's row of the tile begins in a ring whose rows have `width` elements. Null where there is none.
template <class Variant>
__device__ __forceinline__ auto* row_in_ring(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             const Region& ring, int32_t width) {
  using Element = typename Cta<Variant>::Element;
  Element* const rows = cta.template at<Element>(ring);
  return thread.tile_row() < task.rows ? rows + ring_row_of<Variant>(task, thread.tile_row()) * width : nullptr;
}

struct H {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    std::byte* staging = cta.shared.gemm.staging.of_warp(thread.warp);
    auto* row = row_in_ring(cta, task, thread, p.layout.h, p.shape.intermediate);
    const TileColumns columns = h_columns_of(cta, task);
    add_gate_up_biases(cta, task, thread, sums);
    const bool saves = task.row_tile < p.schedule.saved_tiles;
    if (cta.interleaved()) {
      if (saves) {
        auto* const saved = saved_row(cta, task, thread);
        store_projections<Variant, 1>(sums, thread, staging, pairs_of(columns), saved, task.rows);
      }
      store_paired_tile<Variant>(sums, thread, staging, columns, row, p.activation);
    } else if (p.gated) {
      if (saves) store_projections<Variant, 2>(sums, thread, staging, columns, saved_row(cta, task, thread), task.rows);
      store_gated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
    } else {
      if (saves) store_projections<Variant, 1>(sums, thread, staging, columns, saved_row(cta, task, thread), task.rows);
      store_activated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
    }
  }

 private:
  // Where gate and up of this thread's row go, of a tile that is saved; rows after the last one, up to the multiple
  // that the backward pass counts, belong to it as well. Null beyond.
  template <class Variant>
  static __device__ __forceinline__ auto* saved_row(const Cta<Variant>& cta, const Task& task,
                                                    const MathThread& thread) {
    using Element = typename Cta<Variant>::Element;
    constexpr int32_t kParts = Tiling::kBlocks;
    const auto& p = cta.params;
    const int32_t rows = padded_rows(task.rows, p.schedule.gradient_row_multiple());
    const int64_t row = int64_t{task.row_tile} * p.schedule.tile.rows + task.ring_slot % kParts * Tiling::kRows +
                        thread.tile_row();
    Element* const saved = static_cast<Element*>(p.gate_up) + row * p.shape.projections * p.shape.intermediate;
    return thread.tile_row() < rows ? saved : nullptr;
  }
};

struct Projections {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    std::byte* staging = cta.shared.gemm.staging.of_warp(thread.warp);
    auto* row = row_in_ring(cta, task, thread, p.layout.projections, p.shape.projections * p.shape.intermediate);
    const TileColumns columns = h_columns_of(cta, task);
    add_gate_up_biases(cta, task, thread, sums);
    if (p.gated && !cta.interleaved()) {
      store_projections<Variant, 2>(sums, thread, staging, columns, row, task.rows);
    } else {
      store_plain_tile<Variant>(sums, thread, staging, p.gated ? pairs_of(columns) : columns, row);
    }
  }
};

}  // namespace jaxmoe::epilogue
