// What the first tile of a token_gradient sends besides: the gradient of the routing weight of every row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/multiply.cuh"

namespace jaxmoe::epilogue {

// Gradients of routing weights to the ranks that own them: h times its gradient, summed tile by tile in order, and the
// gradient of the output times the bias that was added to it. `target` is that of the lane's row.
template <class Variant>
__device__ __forceinline__ void answer_routing_weights(const Cta<Variant>& cta, const Task& task,
                                                       const MathThread& thread, RowTarget target) {
  using Element = typename Cta<Variant>::Element;
  using Precision = typename Variant::Precision;
  const BackwardParams& p = cta.params;
  const int32_t first_row = Roles::kWarpRows * thread.warp;
  float answer = 0.0f;
  if (p.b_down != nullptr) {
    const auto* bias = reinterpret_cast<const uint32_t*>(static_cast<const Element*>(p.b_down) +
                                                         int64_t{task.expert} * p.shape.hidden);
    const int32_t pairs = p.shape.hidden / 2;
    const auto* rows = reinterpret_cast<const uint32_t*>(cta.template at<Element>(p.layout.rows));
    for (int32_t i = 0; i < Roles::kWarpRows && first_row + i < task.rows; ++i) {
      // Behind the token of the row lies the gradient of its output.
      const uint32_t* row = rows + (ring_row_of<Variant>(task, first_row + i) * 2 + 1) * pairs;
      float sum = 0.0f;
#pragma unroll 8
      for (int32_t pair = thread.lane; pair < pairs; pair += Roles::kWarpThreads) {
        const float2 gradient = Precision::unpack(__ldcg(row + pair));
        const float2 value = Precision::unpack(__ldg(bias + pair));
        sum += gradient.x * value.x + gradient.y * value.y;
      }
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
      if (thread.lane == i) answer = sum;
    }
  }
  if (thread.lane >= Roles::kWarpRows || target.source() >= p.shape.ranks || target.slot() >= p.shape.slots()) return;
  const int32_t tiles = gradient_tiles(p.shape, p.schedule.tile);
  const float* products =
      cta.template at<float>(p.layout.row_products) + ring_row_of<Variant>(task, thread.tile_row()) * tiles;
#pragma unroll 8
  for (int32_t tile = 0; tile < tiles; ++tile) answer += __ldcg(products + tile);
  cta.peers.template at<float>(target.source(), p.layout.routing_weight_gradients.offset)[target.slot()] = answer;
}

}  // namespace jaxmoe::epilogue
