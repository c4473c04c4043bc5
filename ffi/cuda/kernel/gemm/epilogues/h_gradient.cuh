// What becomes of the sums of h_gradient: with gate and up, which come in the stages after its products, they turn
// into the gradients of both, and h is computed again.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/activation.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/multiply.cuh"
#include "cuda/kernel/gemm/operands.cuh"

namespace jaxmoe::epilogue {

// 8 rows x 8 columns of a 16 x 64 box that lies in shared memory as a copy with a swizzle of 128 bytes leaves it: where
// the lane's row of 16 bytes of the tile begins, for tiles in the order of the accumulators (rows 0 to 7, rows 8 to 15
// of one block of columns, then of the next).
template <int kLineBytes>
__device__ __forceinline__ int32_t swizzled_offset(int first_block, int lane) {
  const int row = lane % Roles::kWarpRows;
  const int block = first_block + lane / Roles::kWarpRows;
  return row * kLineBytes + ((block ^ row % 8) << 4);
}

// The same of columns of gate and up in turn, 32 columns of both in each of two such boxes, of tile i of two blocks: the
// 8 bytes of this lane's row that are gate and up of its two columns. No other lane has a part of them. The lane is asked
// of the hardware each time: kept addresses would cost a backward pass registers that it does not have.
template <class Tile>
__device__ __forceinline__ uint2* pairs_of_lane(std::byte* projections, int first_block, int i, int lane) {
  const int row = lane / 4, block = first_block + i / 2;
  const int in_first_block = row * Tile::kLineBytes + (((lane % 4 / 2) ^ row) << 4) + 8 * (lane % 2);
  std::byte* const tile = projections + block / 4 * sizeof(Tile) + 8 * (i % 2) * Tile::kLineBytes;
  return reinterpret_cast<uint2*>(tile + (in_first_block ^ (block % 4 << 5)));
}
template <class Tile>
__device__ __forceinline__ void load_pairs(uint32_t (&gates)[4], uint32_t (&ups)[4], std::byte* projections,
                                           int first_block, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint2 pairs = *pairs_of_lane<Tile>(projections, first_block, i, lane);
    gates[i] = __byte_perm(pairs.x, pairs.y, 0x5410);
    ups[i] = __byte_perm(pairs.x, pairs.y, 0x7632);
  }
}
template <class Tile>
__device__ __forceinline__ void store_pairs(std::byte* projections, const uint32_t (&gates)[4],
                                            const uint32_t (&ups)[4], int first_block, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *pairs_of_lane<Tile>(projections, first_block, i, lane) = {__byte_perm(gates[i], ups[i], 0x5410),
                                                               __byte_perm(gates[i], ups[i], 0x7632)};
  }
}

// The 64 columns of one stage: gate and up become their gradients where they lie, h goes behind them for down_gradient
// (kKeepsH). `products` are sums over columns of h times its gradient, of the thread's two rows; `routing_weights`
// theirs. One Tile has gate, the next up, or both have columns of both in turn; a third one has room for h.
template <ActivationKind kKind, class Precision, int kStep, class Tile, bool kKeepsH>
__device__ __forceinline__ void differentiate(const ptx::Accumulators& sums, const Activation& activation,
                                              std::byte* gate, bool gated, bool interleaved,
                                              const float (&routing_weights)[2], float (&products)[2], int lane) {
#pragma unroll
  for (int block = 0; block < 8; block += 2) {
    std::byte* const gate_row = gate + swizzled_offset<Tile::kLineBytes>(block, lane);
    std::byte* const up_row = gate_row + sizeof(Tile);
    std::byte* const h_row = up_row + sizeof(Tile);
    uint32_t gates[4], ups[4], h_values[4];
    if (interleaved) {
      load_pairs<Tile>(gates, ups, gate, block, ptx::read_lane());
    } else {
      ptx::load_tiles(gates, gate_row);
      if (gated) ptx::load_tiles(ups, up_row);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = sums.values + 4 * (8 * kStep + block + i / 2) + 2 * (i % 2);
      const float routing_weight = routing_weights[i % 2];
      const float2 g = Precision::unpack(gates[i]);
      const float2 u = gated ? Precision::unpack(ups[i]) : float2{1.0f, 1.0f};
      const Slopes<float> first = slopes_as<kKind>(activation, g.x, u.x);
      const Slopes<float> second = slopes_as<kKind>(activation, g.y, u.y);
      products[i % 2] += first.h * pair[0];
      products[i % 2] += second.h * pair[1];
      const float of_first = routing_weight * pair[0], of_second = routing_weight * pair[1];
      h_values[i] = Precision::pack(routing_weight * first.h, routing_weight * second.h);
      gates[i] = Precision::pack(of_first * first.gate, of_second * second.gate);
      if (gated) ups[i] = Precision::pack(of_first * first.up, of_second * second.up);
    }
    if (interleaved) {
      store_pairs<Tile>(gate, gates, ups, block, ptx::read_lane());
    } else {
      ptx::store_tiles(gate_row, gates);
      if (gated) ptx::store_tiles(up_row, ups);
    }
    if constexpr (kKeepsH) ptx::store_tiles(h_row, h_values);
  }
}

// The 4 stages after the products of h_gradient; each warp turns its 16 rows of them into gradients in place and
// sends them off. A warpgroup without rows (`computed` false) takes part in the hand-over alone.
struct HGradients {
  template <class Variant>
  static __device__ __forceinline__ void run(const Cta<Variant>& cta,
                                             const typename GemmShape<Variant>::Ring& ring,
                                             typename GemmShape<Variant>::Ring::Position& position,
                                             const Task& task, const MathThread& thread, bool computed,
                                             const ptx::Accumulators& sums) {
    using Shape = GemmShape<Variant>;
    using Stage = typename Shape::Stage;
    using Precision = typename Variant::Precision;
    constexpr int kStepColumns = Tiling::kDepth;
    constexpr int kSteps = Tiling::kColumns / kStepColumns;
    // A stage holds three times 64 columns of all rows: gate where A lies, up and room for h where B does.
    constexpr int32_t kColumnsBytes = sizeof(typename Stage::A);
    static_assert(sizeof(typename Stage::B) == 2 * kColumnsBytes);
    const BackwardParams& p = cta.params;
    if (!computed) {
      hand_on<Variant>(ring, position, thread, kSteps, [](int32_t) {});
      return;
    }
    const int32_t first_row = Roles::kWarpRows * thread.warp;
    const auto first_ring_row = [&] { return ring_row_of<Variant>(task, first_row + thread.lane / 4); };
    const float* row_routing_weights = cta.template at<float>(p.layout.row_routing_weights) + first_ring_row();
    const float routing_weights[2] = {__ldcg(row_routing_weights), __ldcg(row_routing_weights + 8)};
    float products[2] = {0.0f, 0.0f};
    // The step is a number that the compiler knows: accumulators are registers.
    const auto finish_step = [&](auto step) {
      constexpr int kStep = decltype(step)::value;
      ring.wait(position);
      std::byte* gate = reinterpret_cast<std::byte*>(&ring.stage(position)) + first_row * Stage::A::kLineBytes;
      with_activation_kind(p.activation.kind, [&](auto kind) {
        differentiate<decltype(kind)::value, Precision, kStep, typename Stage::A, Cta<Variant>::kWeightGradients>(
            sums, p.activation, gate, p.gated, cta.interleaved(), routing_weights, products, thread.lane);
      });
      ptx::fence_proxy_async_shared();
      __syncwarp();
      // The stage before is free once its stores have read it, which they had this one's time for.
      if (thread.lane == 0) {
        const int32_t column = task.column_tile * Tiling::kColumns + kStep * kStepColumns;
        const int32_t row = static_cast<int32_t>(ring_row_of<Variant>(task, first_row));
        const ProjectionBoxes at(cta.interleaved(), column);
        ptx::store_box(&p.few_projections, gate, at.first_column, 0, row);
        if (p.gated) {
          ptx::store_box(&p.few_projections, gate + kColumnsBytes, at.second_column, at.second_plane, row);
        }
        // For down_gradient. Beside frozen experts there is none, and the region is empty.
        if (Cta<Variant>::kWeightGradients && p.schedule.has_weight_gradients()) {
          ptx::store_box(&p.few_h, gate + 2 * kColumnsBytes, column, row);
        }
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
};

}  // namespace jaxmoe::epilogue
