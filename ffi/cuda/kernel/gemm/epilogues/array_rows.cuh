// What becomes of the sums of a first half: rows of the caller's array.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe::epilogue {

struct ArrayRows {
  // `target` holds the number of the row (exchange/places.cuh).
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget target, ptx::Accumulators& sums) {
    using Element = typename Cta<Variant>::Element;
    const auto& p = cta.params;
    const TileColumns columns{task.column_tile * Tiling::kColumns, p.shape.intermediate};
    // Beyond the array where there is none, or a wait was given up.
    const bool is_row = target.packed < static_cast<uint32_t>(p.room.rows);
    Element* const row = static_cast<Element*>(p.rows) + int64_t{target.packed} * columns.count;
    store_plain_tile<Variant>(sums, thread, cta.shared.gemm.staging.of_warp(thread.warp), columns,
                              is_row ? row : nullptr);
  }
};

}  // namespace jaxmoe::epilogue
