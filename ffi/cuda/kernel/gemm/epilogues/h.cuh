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

template <class Variant>
__device__ __forceinline__ void add_gate_up_biases(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                                   ptx::Accumulators& sums) {
  constexpr int kColumns = Tiling::kColumns;
  const auto& p = cta.params;
  const TileColumns columns = h_columns_of(cta, task);
  if (p.gated) {
    add_bias<Variant, 0, kColumns / 2>(sums, thread, columns, p.b_gate, task.expert);
    add_bias<Variant, kColumns / 2, kColumns / 2>(sums, thread, columns, p.b_up, task.expert);
  } else {
    add_bias<Variant, 0, kColumns>(sums, thread, columns, p.b_gate, task.expert);
  }
}

struct H {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    const auto& p = cta.params;
    std::byte* staging = cta.shared.gemm.staging.of_warp(thread.warp);
    typename Cta<Variant>::Element* row = row_of(cta, task, thread.tile_row());
    const TileColumns columns = h_columns_of(cta, task);
    add_gate_up_biases(cta, task, thread, sums);
    const bool saves = task.row_tile < p.schedule.saved_tiles;
    if (p.gated) {
      if (saves) {
        store_projections<Variant>(sums, thread, staging, columns, saved_row_of(cta, task, thread.tile_row()),
                                   task.rows);
      }
      store_gated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
    } else {
      if (saves) {
        store_gate<Variant>(sums, thread, staging, columns, saved_row_of(cta, task, thread.tile_row()), task.rows);
      }
      store_activated_tile<Variant>(sums, thread, staging, columns, row, p.activation);
    }
  }

 private:
  // Where this thread's row of h begins. Null where there is none.
  template <class Variant>
  static __device__ __forceinline__ typename Cta<Variant>::Element* row_of(const Cta<Variant>& cta, const Task& task,
                                                                           int32_t tile_row) {
    if (tile_row >= task.rows) return nullptr;
    return cta.template at<typename Cta<Variant>::Element>(cta.params.layout.h) +
           ring_row_of<Variant>(task, tile_row) * cta.params.shape.intermediate;
  }

  // Where gate and up of the row go, if the tile is saved; rows after the last one, up to the multiple that the backward
  // pass counts, belong to it as well. Null beyond.
  template <class Variant>
  static __device__ __forceinline__ typename Cta<Variant>::Element* saved_row_of(const Cta<Variant>& cta,
                                                                                 const Task& task, int32_t tile_row) {
    using Element = typename Cta<Variant>::Element;
    constexpr int32_t kParts = Tiling::kBlocks;
    const auto& p = cta.params;
    if (tile_row >= padded_rows(task.rows, p.schedule.gradient_row_multiple())) return nullptr;
    const int64_t row = int64_t{task.row_tile} * p.schedule.tile.rows +
                        task.ring_slot % kParts * Tiling::kRows + tile_row;
    return static_cast<Element*>(p.saved) + row * p.shape.projections * p.shape.intermediate;
  }
};

struct Projections {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    using Element = typename Cta<Variant>::Element;
    const auto& p = cta.params;
    std::byte* staging = cta.shared.gemm.staging.of_warp(thread.warp);
    const TileColumns columns = h_columns_of(cta, task);
    Element* row = nullptr;
    if (thread.tile_row() < task.rows) {
      row = cta.template at<Element>(p.layout.projections) +
            ring_row_of<Variant>(task, thread.tile_row()) * p.shape.projections * p.shape.intermediate;
    }
    add_gate_up_biases(cta, task, thread, sums);
    if (p.gated) {
      store_projections<Variant>(sums, thread, staging, columns, row, task.rows);
    } else {
      store_plain_tile<Variant>(sums, thread, staging, columns, row);
    }
  }
};

}  // namespace jaxmoe::epilogue
