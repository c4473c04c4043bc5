// Where the scales of a product's factors lie, for the math warps: those of rows beside their ring (common/layout.h),
// those of weights as the caller has them, or where decoding has left them. With scales that differ along the depth
// products are scaled step by step (accumulate.cuh), with those of output channels at the end (stage_channels()).
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

// The columns of a task's product that a warp decodes, and where the scales of their groups lie. By a lane for each block of
// columns.
template <class Variant>
__device__ __forceinline__ void find_part(const Cta<Variant>& cta, const Task& task, int warp, int block,
                                          PackedPart& noted) {
  const auto& p = cta.params;
  constexpr int32_t kBlock = 16, kHalf = Tiling::kColumns / 2;
  const bool one_block = cta.shares_columns(task);
  const bool down = task.gemm == Gemm::kDown;
  const int32_t depth = down ? p.shape.intermediate : p.shape.hidden;
  const int32_t width = down ? p.shape.hidden : p.shape.intermediate;
  const int32_t row_bytes = p.groups_of_column(depth);
  const uint8_t* const first = down ? p.w_down_group_scales : p.w_gate_group_scales;
  const bool halves = p.gated && !down;  // gate and up of the same columns
  const int32_t first_column =
      down ? cta.first_answer_column(task) : task.column_tile * (halves ? kHalf : Tiling::kColumns);
  const int32_t in_tile = halves || one_block ? kBlock * warp : kBlock * (2 * warp + block);
  const int32_t column = first_column + in_tile;
  const uint8_t* const matrix = halves && block > 0 ? p.w_up_group_scales : first;
  noted.groups[block] = matrix + (int64_t{task.expert} * width + column) * row_bytes;
  noted.columns[block] = width - column;
  noted.lines[block] = halves ? kHalf * block + in_tile : in_tile;
  // The same from both lanes.
  const int32_t first_of_warpgroup = warp / Roles::kWarpgroupWarps * (halves || one_block ? kHalf / 2 : kHalf);
  noted.no_columns = first_column + first_of_warpgroup >= width;
  noted.row_bytes = row_bytes;
  noted.row_blocks = static_cast<int16_t>(ceil_div(task.rows, 8));
  noted.sixteen = p.weight_group_columns == 16;
  noted.one_block = one_block;
}

// Notes for this warp where those of a task's first step lie; of products without scales, nothing. `first_rows`: the
// second warpgroup multiplies the rows of the first one (shared_steps.cuh). Rows of the ring were written, with their scales,
// before what the producer has acquired on its way to the task. By all lanes.
template <class Scales, class Variant>
__device__ __forceinline__ const Scales& find_scales(const Cta<Variant>& cta, const Task& task,
                                                     const MathThread& thread, bool first_rows) {
  auto& noted = cta.shared.scales[thread.warp];
  if constexpr (std::is_same_v<Scales, PackedPart>) {
    __syncwarp();  // nobody reads those of the task before
    if (thread.lane < 2) find_part(cta, task, thread.warp, thread.lane, noted);
    __syncwarp();
  } else if constexpr (!std::is_empty_v<Scales>) {
    const auto& p = cta.params;
    const bool down = task.gemm == Gemm::kDown;
    const int32_t depth = down ? p.shape.intermediate : p.shape.hidden;
    const int32_t width = down ? p.shape.hidden : p.shape.intermediate;
    const int32_t steps = scale_blocks(depth), blocks = scale_blocks(width);
    const int warp_of_rows = first_rows ? thread.warp % Roles::kWarpgroupWarps : thread.warp;
    const int64_t row = ring_row_of<Variant>(task, Roles::kWarpRows * warp_of_rows);
    const float* const rows =
        ring_scales(cta, down ? p.layout.h : p.layout.rows, depth) + ring_scale(Tiling::kRows, row, steps, 0);
    const bool halves = p.gated && !down;  // of two matrices
    const auto in_blocks = [&](const float* first, const float* second, auto... step) -> Scales {
      const int32_t block = halves ? task.column_tile : cta.first_answer_column(task) / kScaleColumns;
      // Of columns behind the last block, which are not stored, any scale will do.
      const int32_t next = halves ? block : at_most(block + 1, blocks - 1);
      const int64_t of_expert = int64_t{task.expert} * blocks;
      return {rows, {first + (of_expert + block) * steps, second + (of_expert + next) * steps}, step...};
    };
    __syncwarp();  // nobody reads those of the task before
    if (thread.lane == 0) {
      if constexpr (std::is_same_v<Scales, ScalesOfDecoded>) {
        const float* const decoded = cta.template at<float>(p.layout.decoded_scales);
        const float* const first = decoded + first_decoded_scale(p.shape, down ? p.shape.projections : 0, 0);
        noted = in_blocks(first, halves ? decoded + first_decoded_scale(p.shape, 1, 0) : first);
      } else {
        const float* const first = down ? p.w_down_scales : p.w_gate_scales;
        const float* const second = halves ? p.w_up_scales : first;
        if (p.weight_scale_rows == kScaleColumns) {
          noted = in_blocks(first, second, 1);
        } else if (p.weight_scale_rows == kAllOfThem) {
          noted = {rows, {first + task.expert, second + task.expert}, 0};
        } else {
          noted = {rows, {&kNoScale, &kNoScale}, 0};
        }
      }
    }
    __syncwarp();
  }
  return noted;
}

}  // namespace jaxmoe
