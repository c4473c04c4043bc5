// What a backward pass does with its sums, tile by tile. Called by gradient_math.cuh; the epilogues that both passes
// have are in gemm_math.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm_math.cuh"

namespace jaxmoe::gradient_math {

// A row of this block's part of a tile, counted over the ring.
template <class Variant>
__device__ __forceinline__ int64_t ring_row_of(const Task& task, int32_t tile_row) {
  return int64_t{task.ring_slot} * Variant::config.tile_rows + tile_row;
}

// The first row of the weight matrix that this block computes of a weight gradient.
template <class Variant>
__device__ __forceinline__ int32_t first_weight_row(const Cta<Variant>& cta, const Task& task) {
  return task.weight_row_tile * cta.params.schedule.tile.rows +
         static_cast<int32_t>(cta.cta_rank) * Variant::config.tile_rows;
}

// --- hidden_gradient -------------------------------------------------------------------------------------------------

// 8 rows x 8 columns of a 16 x 64 box that lies in shared memory as a copy with a swizzle of 128 bytes leaves it: where
// the lane's row of 16 bytes of the tile begins, for tiles in the order of the accumulators (rows 0 to 7, rows 8 to 15
// of one block of columns, then of the next).
__device__ __forceinline__ int32_t swizzled_offset(int first_block, int lane) {
  const int row = lane % 16;
  const int block = first_block + lane / 16;
  return row * 128 + ((block ^ row % 8) << 4);
}

// Bytes of 64 columns of all rows of a tile. A stage holds three: gate, up, and room for h.
inline constexpr int32_t kBoxOf64Columns = 128 * 128;

// The 64 columns of one stage: gate and up become their gradients where they lie, h goes behind them. `products` are
// sums over columns of h times its gradient, of the thread's two rows; `weights` their routing weights.
template <ActivationKind kKind, class Precision, int kStep>
__device__ __forceinline__ void differentiate(const ptx::Accumulators& sums, const Activation& activation,
                                              std::byte* gate, bool gated, const float (&weights)[2],
                                              float (&products)[2], int lane) {
#pragma unroll
  for (int block = 0; block < 8; block += 2) {
    std::byte* const gate_row = gate + swizzled_offset(block, lane);
    std::byte* const up_row = gate_row + kBoxOf64Columns;
    std::byte* const hidden_row = up_row + kBoxOf64Columns;
    uint32_t gates[4], ups[4], hiddens[4];
    ptx::load_tiles(gates, gate_row);
    if (gated) ptx::load_tiles(ups, up_row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = sums.values + 4 * (8 * kStep + block + i / 2) + 2 * (i % 2);
      const float weight = weights[i % 2];
      const float2 g = Precision::unpack(gates[i]);
      const float2 u = gated ? Precision::unpack(ups[i]) : float2{1.0f, 1.0f};
      const Slopes<float> first = slopes_as<kKind>(activation, g.x, u.x);
      const Slopes<float> second = slopes_as<kKind>(activation, g.y, u.y);
      products[i % 2] += first.hidden * pair[0];
      products[i % 2] += second.hidden * pair[1];
      const float of_first = weight * pair[0], of_second = weight * pair[1];
      hiddens[i] = Precision::pack(weight * first.hidden, weight * second.hidden);
      gates[i] = Precision::pack(of_first * first.gate, of_second * second.gate);
      if (gated) ups[i] = Precision::pack(of_first * first.up, of_second * second.up);
    }
    ptx::store_tiles(gate_row, gates);
    if (gated) ptx::store_tiles(up_row, ups);
    ptx::store_tiles(hidden_row, hiddens);
  }
}

// The 4 stages behind the products of hidden_gradient; each warp turns its 16 rows of them into gradients in place and
// sends them off. A warpgroup without rows (`computed` false) takes part in the hand-over alone.
template <class Variant>
__device__ __forceinline__ void finish_hidden_gradient(const Cta<Variant>& cta,
                                                       const typename GemmShape<Variant>::Ring& ring,
                                                       typename GemmShape<Variant>::Ring::Position& position,
                                                       const Task& task, const MathThread& thread, bool computed,
                                                       const ptx::Accumulators& sums) {
  using Shape = GemmShape<Variant>;
  using Stage = typename Shape::Stage;
  using Precision = typename Variant::Precision;
  constexpr int kSteps = Shape::kTileColumns / Shape::kBoxColumns;
  static_assert(sizeof(Stage::rows) == kBoxOf64Columns && offsetof(Stage, weights) == kBoxOf64Columns &&
                sizeof(Stage) == 3 * kBoxOf64Columns);
  const BackwardParams& p = cta.params;
  if (!computed) {
    hand_on<Variant>(ring, position, thread, kSteps, [](int32_t) {});
    return;
  }
  const int32_t first_row = 16 * thread.warp;
  const auto first_ring_row = [&] { return ring_row_of<Variant>(task, first_row + thread.lane / 4); };
  const float* row_weights = cta.template at<float>(p.layout.row_weights) + first_ring_row();
  const float weights[2] = {__ldcg(row_weights), __ldcg(row_weights + 8)};
  float products[2] = {0.0f, 0.0f};
  // The step is a number that the compiler knows: accumulators are registers.
  const auto finish_step = [&](auto step) {
    constexpr int kStep = decltype(step)::value;
    ring.wait(position);
    std::byte* gate = reinterpret_cast<std::byte*>(&ring.stage(position)) + first_row * 128;
    with_activation_kind(p.activation.kind, [&](auto kind) {
      differentiate<decltype(kind)::value, Precision, kStep>(sums, p.activation, gate, p.gated, weights, products,
                                                             thread.lane);
    });
    ptx::fence_proxy_async_shared();
    __syncwarp();
    // The stage before is free once its stores have read it, which they had this one's time for.
    if (thread.lane == 0) {
      const int32_t column = task.column_tile * Shape::kTileColumns + kStep * Shape::kBoxColumns;
      const int32_t row = static_cast<int32_t>(ring_row_of<Variant>(task, first_row));
      ptx::store_box(&p.few_projections, gate, column, 0, row);
      if (p.gated) ptx::store_box(&p.few_projections, gate + kBoxOf64Columns, column, 1, row);
      ptx::store_box(&p.few_hidden, gate + 2 * kBoxOf64Columns, column, row);
      ptx::commit_stores();
      ptx::wait_stores_read<1>();
    }
    __syncwarp();
    if (kStep > 0) ring.release(position.before(), thread.lane);
    position.advance();
  };
  finish_step(std::integral_constant<int, 0>{});
  finish_step(std::integral_constant<int, 1>{});
  finish_step(std::integral_constant<int, 2>{});
  finish_step(std::integral_constant<int, 3>{});
  static_assert(kSteps == 4);
  if (thread.lane == 0) ptx::wait_stores_read<0>();
  __syncwarp();
  ring.release(position.before(), thread.lane);

  // Four lanes have columns of a row.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    products[half] += __shfl_xor_sync(0xffffffff, products[half], 1);
    products[half] += __shfl_xor_sync(0xffffffff, products[half], 2);
  }
  if (thread.lane % 4 == 0) {
    const int32_t tiles = gradient_tiles(p.shape, p.schedule.tile);
    float* row_products = cta.template at<float>(p.layout.row_products) + first_ring_row() * tiles + task.column_tile;
    row_products[0] = products[0];
    row_products[8 * tiles] = products[1];
  }
}

// --- token_gradient --------------------------------------------------------------------------------------------------

// Gradients of routing weights to the ranks that own them: h times its gradient, summed tile by tile in order, and the
// gradient of the output times the bias that was added to it. `target` is that of the lane's row.
template <class Variant>
__device__ __forceinline__ void answer_weights(const Cta<Variant>& cta, const Task& task, const MathThread& thread,
                                               RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  using Precision = typename Variant::Precision;
  const BackwardParams& p = cta.params;
  const int32_t first_row = 16 * thread.warp;
  float answer = 0.0f;
  if (p.b_down != nullptr) {
    const auto* bias = reinterpret_cast<const uint32_t*>(static_cast<const Element*>(p.b_down) +
                                                         int64_t{task.expert} * p.shape.hidden);
    const int32_t pairs = p.shape.hidden / 2;
    const auto* rows = reinterpret_cast<const uint32_t*>(cta.template at<Element>(p.layout.rows));
    for (int32_t i = 0; i < 16 && first_row + i < task.rows; ++i) {
      // Behind the token of the row lies the gradient of its output.
      const uint32_t* row = rows + (ring_row_of<Variant>(task, first_row + i) * 2 + 1) * pairs;
      float sum = 0.0f;
#pragma unroll 8
      for (int32_t pair = thread.lane; pair < pairs; pair += 32) {
        const float2 gradient = Precision::unpack(__ldcg(row + pair));
        const float2 value = Precision::unpack(__ldg(bias + pair));
        sum += gradient.x * value.x + gradient.y * value.y;
      }
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
      if (thread.lane == i) answer = sum;
    }
  }
  if (thread.lane >= 16 || target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return;
  const int32_t tiles = gradient_tiles(p.shape, p.schedule.tile);
  const float* products =
      cta.template at<float>(p.layout.row_products) + ring_row_of<Variant>(task, thread.tile_row()) * tiles;
#pragma unroll 8
  for (int32_t tile = 0; tile < tiles; ++tile) answer += __ldcg(products + tile);
  cta.template at<float>(target.source(), p.layout.weight_answers.offset)[target.slot()] = answer;
}

// --- weight gradients ------------------------------------------------------------------------------------------------

// A weight matrix of an expert, or its gradient.
struct Matrix {
  void* gradient;      // of all experts
  void* bias_gradient;
  int64_t sums;        // where its sums begin in the weight sums, in numbers
  int64_t bias_sums;
  int32_t rows, columns;
};

__device__ __forceinline__ Matrix matrix_of(const BackwardParams& p, Gemm gemm) {
  const int32_t hidden = p.shape.hidden, intermediate = p.shape.intermediate;
  const int64_t size = int64_t{hidden} * intermediate;
  const int64_t biases = (p.shape.projections + 1) * size;
  if (gemm == Gemm::kGateGradient) return {p.dw_gate, p.db_gate, 0, biases, hidden, intermediate};
  if (gemm == Gemm::kUpGradient) return {p.dw_up, p.db_up, size, biases + intermediate, hidden, intermediate};
  return {p.dw_down, p.db_down, p.shape.projections * size, biases + int64_t{p.shape.projections} * intermediate,
          intermediate, hidden};
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

template <class Variant>
__device__ __forceinline__ void store_weight_gradient(const Cta<Variant>& cta, const Task& task,
                                                      const MathThread& thread, ptx::Accumulators& sums) {
  using Element = typename Cta<Variant>::Element;
  const BackwardParams& p = cta.params;
  const Matrix matrix = matrix_of(p, task.gemm);
  const TileColumns columns{task.column_tile * Variant::config.tile_columns, matrix.columns};
  const int32_t first_row = first_weight_row(cta, task);
  // Gradients in float32 are their own sums: every segment adds to them in place.
  const bool in_place = p.float_gradients;
  if (in_place || task.part != (kFirstPart | kLastPart)) {
    float* of_matrix = in_place ? static_cast<float*>(matrix.gradient) +
                                      int64_t{task.expert} * matrix.rows * matrix.columns
                                : cta.template at<float>(p.layout.weight_sums) + matrix.sums;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + 16 * thread.warp + 8 * half + thread.lane / 4;
      if (row >= matrix.rows) continue;
      float* of_row = of_matrix + int64_t{row} * matrix.columns;
#pragma unroll
      for (int block = 0; block < Variant::config.tile_columns / 8; ++block) {
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
                                             (int64_t{task.expert} * matrix.rows + row) * matrix.columns;
  store_plain_tile<Variant>(sums, thread, cta.shared.gemm.staging.of_warp(thread.warp), columns, target);
}

// Of the tile's columns, by the tasks of the first row of tiles: sums over the rows of the segment of what the weights'
// gradient is a product of. A warp has 32 columns, 8 lanes of 4; the four groups of lanes take rows in turn.
template <class Variant>
__device__ __forceinline__ void store_bias_gradient(const Cta<Variant>& cta, const Task& task,
                                                    const MathThread& thread) {
  using Element = typename Cta<Variant>::Element;
  using Precision = typename Variant::Precision;
  const BackwardParams& p = cta.params;
  const Matrix matrix = matrix_of(p, task.gemm);
  if (matrix.bias_gradient == nullptr || first_weight_row(cta, task) != 0) return;
  const int32_t column = task.column_tile * Variant::config.tile_columns + 32 * thread.warp + 4 * (thread.lane % 8);
  const bool is_down = task.gemm == Gemm::kDownGradient;
  const int64_t width = is_down ? 2 * p.shape.hidden : p.shape.projections * p.shape.intermediate;
  const int64_t first = is_down ? p.shape.hidden : task.gemm == Gemm::kUpGradient ? p.shape.intermediate : 0;
  const Element* ring = cta.template at<Element>(is_down ? p.layout.rows : p.layout.projections) + first + column;
  const float* row_weights = cta.template at<float>(p.layout.row_weights);
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
      const float weight = is_down ? __ldcg(row_weights + row) : 1.0f;
      const float2 low = Precision::unpack(values.x), high = Precision::unpack(values.y);
      sums[0] += weight * low.x;
      sums[1] += weight * low.y;
      sums[2] += weight * high.x;
      sums[3] += weight * high.y;
    }
  }
#pragma unroll
  for (float& sum : sums) {
    sum += __shfl_xor_sync(0xffffffff, sum, 8);
    sum += __shfl_xor_sync(0xffffffff, sum, 16);
  }
  if (thread.lane >= 8 || column >= matrix.columns) return;
  float pairs[2][2] = {{sums[0], sums[1]}, {sums[2], sums[3]}};
  const bool in_place = p.float_gradients;
  if (in_place || task.part != (kFirstPart | kLastPart)) {
    const int32_t part = in_place ? task.part & ~kLastPart : task.part;
    float* of_bias = (in_place ? static_cast<float*>(matrix.bias_gradient) + int64_t{task.expert} * matrix.columns
                               : cta.template at<float>(p.layout.weight_sums) + matrix.bias_sums) +
                     column;
    add_up_segments(pairs[0], of_bias, part);
    add_up_segments(pairs[1], of_bias + 2, part);
  }
  if (in_place || !(task.part & kLastPart)) return;
  Element* target = static_cast<Element*>(matrix.bias_gradient) + int64_t{task.expert} * matrix.columns + column;
  *reinterpret_cast<uint2*>(target) = {Precision::pack(pairs[0][0], pairs[0][1]),
                                       Precision::pack(pairs[1][0], pairs[1][1])};
}

}  // namespace jaxmoe::gradient_math
