// Where the scales of a product's factors lie, for the math warps: those of rows beside their ring (common/layout.h),
// those of weights as the caller has them. With scales that differ along the depth products are scaled step by step
// (accumulate.cuh), with those of output channels at the end (multiply_channels()).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/formats.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/multiply.cuh"
#include "cuda/kernel/gemm/products.cuh"

namespace jaxmoe {

static __device__ const float kNoScale = 1.0f;

// Notes for this warp where those of a task's first step lie; of products without scales, nothing. Rows of the ring were
// written, with their scales, before what the producer has acquired on its way to the task. By all lanes.
template <class Scales, class Variant>
__device__ __forceinline__ Scales find_scales(const Cta<Variant>& cta, const Task& task, const MathThread& thread) {
  if constexpr (std::is_empty_v<Scales>) {
    return {};
  } else {
    auto& noted = cta.shared.scales[thread.warp];
    const auto& p = cta.params;
    const bool down = task.gemm == Gemm::kDown;
    const int32_t depth = down ? p.shape.intermediate : p.shape.hidden;
    const int32_t width = down ? p.shape.hidden : p.shape.intermediate;
    const int32_t steps = scale_blocks(depth), blocks = scale_blocks(width);
    const int64_t row = ring_row_of<Variant>(task, Roles::kWarpRows * thread.warp);
    const float* const rows =
        ring_scales(cta, down ? p.layout.h : p.layout.rows, depth) + ring_scale(Tiling::kRows, row, steps, 0);
    const float* const first = down ? p.w_down_scales : p.w_gate_scales;
    const bool halves = p.gated && !down;  // of two matrices
    const float* const second = halves ? p.w_up_scales : first;
    __syncwarp();  // nobody reads those of the task before
    if (thread.lane == 0) {
      if (p.weight_scale_rows == kScaleColumns) {
        const int32_t block = halves ? task.column_tile : 2 * task.column_tile;
        // Of columns behind the last block, which are not stored, any scale will do.
        const int32_t next = halves ? block : at_most(block + 1, blocks - 1);
        const int64_t of_expert = int64_t{task.expert} * blocks;
        noted = {rows, {first + (of_expert + block) * steps, second + (of_expert + next) * steps}};
      } else if (p.weight_scale_rows == kAllOfThem) {
        noted = {rows, {first + task.expert, second + task.expert}};
      } else {
        noted = {rows, {&kNoScale, &kNoScale}};
      }
    }
    __syncwarp();
    return {noted, p.weight_scale_rows == kScaleColumns ? 1 : 0};
  }
}

}  // namespace jaxmoe
