// What becomes of the sums of gate_gradient, up_gradient and down_gradient: results of the layer, or sums for the next
// segment of the expert; and the gradients of biases.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/rows.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe::epilogue {

template <class Variant>
__device__ __forceinline__ int32_t weight_rows_left(const Cta<Variant>& cta, const Task& task) {
  const Shape& shape = cta.params.shape;
  return (task.gemm == Gemm::kDownGradient ? shape.intermediate : shape.hidden) - first_weight_row(cta, task);
}

// A weight matrix of an expert, or its gradient.
struct Matrix {
  void* gradient;      // of all experts
  void* bias_gradient;
  int64_t sums;        // where its sums begin in the weight sums, in numbers
  int64_t bias_sums;
  int32_t rows, columns;
  int32_t pitch;  // columns from one row of the gradient to the next
};

__device__ __forceinline__ Matrix matrix_of(const BackwardParams& p, Gemm gemm) {
  const int32_t hidden = p.shape.hidden, intermediate = p.shape.intermediate;
  const int64_t size = int64_t{hidden} * intermediate;
  const int64_t biases = (p.shape.projections + 1) * size;
  const int32_t pitch = p.gate_up_pitch(intermediate);
  // Of columns in turn not of gate and of up, but of the first and of the second half of both.
  if (gemm == Gemm::kGateGradient) return {p.dw_gate, p.db_gate, 0, biases, hidden, intermediate, pitch};
  if (gemm == Gemm::kUpGradient) return {p.dw_up, p.db_up, size, biases + intermediate, hidden, intermediate, pitch};
  return {p.dw_down, p.db_down, p.shape.projections * size, biases + int64_t{p.shape.projections} * intermediate,
          intermediate, hidden, hidden};
}

// Adds what earlier segments of the expert have left in `sums`, and leaves the result to the next one, if there is one.
__device__ __forceinline__ void add_up_segments(float (&pair)[2], float* sums, int32_t part) {
  auto* at = reinterpret_cast<float2*>(sums);
  if (!(part & kFirstPart)) {
    const float2 earlier = __ldcg(at);
    pair[0] = earlier.x + pair[0];
    pair[1] = earlier.y + pair[1];
  }
  if (!(part & kLastPart)) __stcg(at, float2{pair[0], pair[1]});
}

struct WeightGradients {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                             RowTarget, ptx::Accumulators& sums) {
    using Element = typename Cta<Variant>::Element;
    const BackwardParams& p = cta.params;
    const Matrix matrix = matrix_of(p, task.gemm);
    const TileColumns columns{task.column_tile * Tiling::kColumns, matrix.columns};
    const int32_t first_row = first_weight_row(cta, task);
    // Gradients in float32 are their own sums: every segment adds to them in place.
    const bool in_place = p.wide_gradients;
    if (in_place || task.part != (kFirstPart | kLastPart)) {
      const int32_t pitch = in_place ? matrix.pitch : matrix.columns;
      float* of_matrix = in_place ? static_cast<float*>(matrix.gradient) + int64_t{task.expert} * matrix.rows * pitch
                                  : cta.template at<float>(p.layout.weight_sums) + matrix.sums;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row + Roles::kWarpRows * thread.warp + 8 * half + thread.lane / 4;
        if (row >= matrix.rows) continue;
        float* of_row = of_matrix + int64_t{row} * pitch;
#pragma unroll
        for (int block = 0; block < Tiling::kColumns / 8; ++block) {
          const int32_t column = columns.first + 8 * block + 2 * (thread.lane % 4);
          if (column >= matrix.columns) continue;
          float* values = sums.values + 4 * block + 2 * half;
          float pair[2] = {values[0], values[1]};
          add_up_segments(pair, of_row + column, in_place ? task.part & ~kLastPart : task.part);
          values[0] = pair[0];
          values[1] = pair[1];
        }
      }
      if (in_place || !(task.part & kLastPart)) return;
    }
    const int32_t row = first_row + thread.tile_row();
    Element* target = row >= matrix.rows ? nullptr
                                         : static_cast<Element*>(matrix.gradient) +
                                               (int64_t{task.expert} * matrix.rows + row) * matrix.pitch;
    store_plain_tile<Variant>(sums, thread, cta.shared.gemm.staging.of_warp(thread.warp), columns, target);
  }

  // The gradient of a bias, by the tasks of the first row of tiles, also by a warpgroup without rows of the matrix:
  // sums over the rows of the segment of what the weights' gradient is a product of. A warp has 32 columns, 8 lanes of
  // 4; the four groups of lanes take rows in turn.
  template <class Variant>
  static __device__ __forceinline__ void run_beside(const Cta<Variant>& cta, const Task& task,
                                                    const MathThread& thread, RowTarget) {
    using Element = typename Cta<Variant>::Element;
    using Precision = typename Variant::Precision;
    const BackwardParams& p = cta.params;
    const Matrix matrix = matrix_of(p, task.gemm);
    if (matrix.bias_gradient == nullptr || first_weight_row(cta, task) != 0) return;
    constexpr int kWarpColumns = Tiling::kColumns / Roles::kMathWarps;
    const int32_t column = task.column_tile * Tiling::kColumns + kWarpColumns * thread.warp + 4 * (thread.lane % 8);
    const bool is_down = task.gemm == Gemm::kDownGradient;
    const int64_t width = is_down ? 2 * p.shape.hidden : p.shape.projections * p.shape.intermediate;
    const int64_t first = is_down ? p.shape.hidden : task.gemm == Gemm::kUpGradient ? p.shape.intermediate : 0;
    const Element* ring = cta.template at<Element>(is_down ? p.layout.rows : p.layout.projections) + first + column;
    const float* row_routing_weights = cta.template at<float>(p.layout.row_routing_weights);
    const int64_t ring_rows = int64_t{p.schedule.ring_tiles} * p.schedule.tile.rows;
    const int64_t first_ring_row = int64_t{task.ring_slot} * p.schedule.tile.rows;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (column < matrix.columns) {
#pragma unroll 8
      for (int32_t i = thread.lane / 8; i < task.rows; i += 4) {
        int64_t row = first_ring_row + i;
        if (row >= ring_rows) row -= ring_rows;
        const uint2 values = __ldcg(reinterpret_cast<const uint2*>(ring + row * width));
        // Gradients of gate and up have the routing weight in them already; those of outputs have not.
        const float routing_weight = is_down ? __ldcg(row_routing_weights + row) : 1.0f;
        const float2 low = Precision::unpack(values.x), high = Precision::unpack(values.y);
        sums[0] += routing_weight * low.x;
        sums[1] += routing_weight * low.y;
        sums[2] += routing_weight * high.x;
        sums[3] += routing_weight * high.y;
      }
    }
#pragma unroll
    for (float& sum : sums) {
      sum += __shfl_xor_sync(0xffffffff, sum, 8);
      sum += __shfl_xor_sync(0xffffffff, sum, 16);
    }
    if (thread.lane >= 8 || column >= matrix.columns) return;
    float pairs[2][2] = {{sums[0], sums[1]}, {sums[2], sums[3]}};
    const bool in_place = p.wide_gradients;
    if (in_place || task.part != (kFirstPart | kLastPart)) {
      const int32_t part = in_place ? task.part & ~kLastPart : task.part;
      float* of_bias = (in_place ? static_cast<float*>(matrix.bias_gradient) + int64_t{task.expert} * matrix.pitch
                                 : cta.template at<float>(p.layout.weight_sums) + matrix.bias_sums) +
                       column;
      add_up_segments(pairs[0], of_bias, part);
      add_up_segments(pairs[1], of_bias + 2, part);
    }
    if (in_place || !(task.part & kLastPart)) return;
    Element* target = static_cast<Element*>(matrix.bias_gradient) + int64_t{task.expert} * matrix.pitch + column;
    *reinterpret_cast<uint2*>(target) = {Precision::pack(pairs[0][0], pairs[0][1]),
                                         Precision::pack(pairs[1][0], pairs[1][1])};
  }
};

}  // namespace jaxmoe::epilogue
