// The producer's half of a GEMM: one thread loads all K steps of one output tile into the ring of stages. The role
// file around it waits for the signal before a task (and then calls ptx::fence_proxy_async_global()); multiply.cuh
// has the half that consumes the stages. Both halves, in every block of a cluster, take the same tasks in the same
// order; a block that has no row tile in a task of its cluster takes it with rows == 0.
#pragma once

#include <cstdint>

#include "common/scheduler.h"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/config.cuh"

namespace jaxmoe {

// What one of the two GEMMs reads: rows [ring_slots * 128, depth] and weights [experts, depth, columns], as they lie in
// memory. The maps are kernel parameters or constant memory.
struct GemmSource {
  const CUtensorMap* rows;            // box {64, 128}
  const CUtensorMap* few_rows;        // the same tensor, box {64, 16}
  const CUtensorMap* weights;         // box {64, 64, 1}
  const CUtensorMap* second_weights;  // of up, for gate and up in one accumulator; equal to `weights` otherwise
  int32_t depth_steps;                // ceil(depth / 64)
  bool gated;                         // half of the accumulator's columns come from second_weights
};

// Bytes that land in one stage of this block.
template <class Variant>
__device__ __forceinline__ uint32_t stage_bytes(int32_t row_boxes, bool full_tile) {
  using Shape = GemmShape<Variant>;
  using Stage = typename Shape::Stage;
  constexpr uint32_t kFewRowsBytes = Shape::kFewRows * Stage::A::kLineBytes;
  return sizeof(Stage::b) + (full_tile ? sizeof(Stage::a) : row_boxes * kFewRowsBytes);
}

// `position` moves on by source.depth_steps. `own_weights`: the blocks of the cluster multiply other columns (or there
// is one block); otherwise all need the same weights, and each loads a part of them for all. The policies are those of
// ptx/tma.cuh. For weights: evict_first where their expert has a single row tile, evict_normal where row tiles share
// them, which then find each other's lines in L2. `track` is that of the timeline.
template <class Variant, class Track>
__device__ __forceinline__ void load_tile(const typename GemmShape<Variant>::Ring& ring,
                                          typename GemmShape<Variant>::Ring::Position& position,
                                          const GemmSource& source, const Task& task, uint32_t cta_rank,
                                          bool own_weights, uint64_t weights_policy, uint64_t rows_policy,
                                          const Track& track) {
  using Shape = GemmShape<Variant>;
  using B = typename Shape::Stage::B;
  // Rows that nobody asked for stay as they are in the stage: they only reach accumulators that are never stored.
  const bool full_tile = task.rows > Shape::kTileRows / 2;
  const int32_t row_boxes = ceil_div(task.rows, Shape::kFewRows);
  // A block without rows has no use for weights, but its copy of shared ones arrives all the same.
  const bool any_weights = task.rows > 0 || !own_weights;
  const uint32_t bytes = any_weights ? stage_bytes<Variant>(row_boxes, full_tile) : 0;
  const int32_t first_row = task.ring_slot * Shape::kTileRows;
  const int32_t block_columns = source.gated ? Shape::kTileColumns / 2 : Shape::kTileColumns;
  const int32_t first_column = task.column_tile * block_columns;
  const int32_t second_column = source.gated ? first_column : first_column + Shape::kTileColumns / 2;
  // Of shared weights a block loads its part of the boxes for all blocks of the cluster.
  constexpr int kSharedBoxes = B::kBoxes / Shape::kClusterSize;

  for (int32_t step = 0; step < source.depth_steps; ++step) {
    track.stall([&] { ring.acquire(position); });
    ring.commit(position, bytes);
    typename Shape::Stage& stage = ring.stage(position);
    uint64_t* full = ring.full(position);
    const int32_t k = step * Tiling::kDepth;
    const auto load_weights = [&](int box, auto load) {
      const bool second = box >= B::kBoxes / 2;
      const CUtensorMap* map = second ? source.second_weights : source.weights;
      const int32_t column = (second ? second_column : first_column) + box % (B::kBoxes / 2) * B::kBoxWidth;
      load(stage.b.box(box), map, column);
    };
    if (own_weights) {
      if (any_weights) {
#pragma unroll
        for (int box = 0; box < B::kBoxes; ++box) {
          load_weights(box, [&](void* target, const CUtensorMap* map, int32_t column) {
            ptx::load_box(target, map, full, weights_policy, column, k, task.expert);
          });
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSharedBoxes; ++i) {
        load_weights(cta_rank * kSharedBoxes + i, [&](void* target, const CUtensorMap* map, int32_t column) {
          constexpr uint16_t kAll = (1u << Shape::kClusterSize) - 1;
          ptx::load_box_multicast(target, map, full, weights_policy, kAll, column, k, task.expert);
        });
      }
    }
    if (full_tile) {
      ptx::load_box(stage.a.lines, source.rows, full, rows_policy, k, first_row);
    } else {
#pragma unroll 1
      for (int32_t i = 0; i < row_boxes; ++i) {
        const int32_t row = i * Shape::kFewRows;
        ptx::load_box(stage.a.lines[row], source.few_rows, full, rows_policy, k, first_row + row);
      }
    }
    position.advance();
  }
}

// After the last tile, in clusters: waits until the stages of this block's last round have been released by all
// blocks, so that no copy or arrival is on its way to a block that has ended. Every block calls it before it leaves the
// kernel.
template <class Variant>
__device__ __forceinline__ void drain_stages(const typename GemmShape<Variant>::Ring& ring,
                                             typename GemmShape<Variant>::Ring::Position position) {
  for (int i = 0; i < Variant::config.stages; ++i) {
    ring.acquire(position);
    position.advance();
  }
}

}  // namespace jaxmoe
