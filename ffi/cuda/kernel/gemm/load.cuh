// The producer's half of a product: one thread loads what all steps of one tile multiply into the ring of stages.
// producer.cuh waits for the signal before a task (and then calls ptx::fence_proxy_async_global()); multiply.cuh has
// the half that consumes the stages. Both halves, in every block of a cluster, take the same tasks in the same order; a
// block that has no row tile in a task of its cluster takes it with rows == 0.
#pragma once

#include <cstdint>

#include "common/scheduler.h"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/products.cuh"

namespace jaxmoe {

// How much of A this block loads in every step. Rows that nobody asked for stay as they are in the stage: they only
// reach accumulators that are never stored.
template <class Operand, class Tile>
class RowsOfA {
  // Of the forward pass, whose rows all lie along the depth: a whole tile is one copy, and few rows are few bytes.
  static constexpr bool kInTiles = requires { Operand::Tensor::kFewMap; };

 public:
  __device__ __forceinline__ RowsOfA(int32_t first, int32_t rows)
      : operand_{first},
        is_whole_(kInTiles && rows > Tiling::kRows / 2),
        boxes_(ceil_div(rows, kInTiles ? kFewRows : kBoxWidth)) {}

  __device__ __forceinline__ int32_t boxes() const { return boxes_; }
  __device__ __forceinline__ uint32_t bytes() const {
    constexpr uint32_t kBytes = kInTiles ? kFewRows * Tile::kLineBytes : Tile::kBoxBytes;
    return is_whole_ ? sizeof(Tile) : boxes_ * kBytes;
  }

  template <class Params>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t part, int32_t k, Tile& tile,
                                       uint64_t* full, uint64_t policy) const {
    if constexpr (!kInTiles) {
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box) {
        if (box >= boxes_) break;
        operand_.load(p, task, part, k, box, [&](const CUtensorMap& map, auto... at) {
          ptx::load_box(tile.box(box), &map, full, policy, at...);
        });
      }
    } else if (is_whole_) {
      ptx::load_box(tile.lines, &(p.*Operand::Tensor::kMap), full, policy, k, operand_.first);
    } else {
#pragma unroll 1
      for (int32_t i = 0; i < boxes_; ++i) {
        const int32_t row = i * kFewRows;
        ptx::load_box(tile.lines[row], &(p.*Operand::Tensor::kFewMap), full, policy, k, operand_.first + row);
      }
    }
  }

 private:
  const Operand operand_;
  const bool is_whole_;
  const int32_t boxes_;
};

// The row of A that this block's part of a task begins with.
template <class A, class Variant>
__device__ __forceinline__ int32_t first_row_of(const Cta<Variant>& cta, const Task& task) {
  if constexpr (A::kMajor == ptx::Major::kDepth) return task.ring_slot * Tiling::kRows;
  return first_weight_row(cta, task);
}

// `position` moves on by the steps of the product. `own_b`: the blocks of the cluster multiply other columns (or there
// is one block); otherwise all need the same B, and each loads a part of it for all. The policies are those of
// ptx/tma.cuh. For B: evict_first where these are weights of an expert with a single row tile, evict_normal where row
// tiles share them, which then find each other's lines in L2. `track` is that of the timeline.
template <class Product, class Variant, class Track>
__device__ __forceinline__ void load_tile(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                          typename GemmShape<Variant>::Ring::Position& position, const Task& task,
                                          bool own_b, uint64_t b_policy, uint64_t a_policy, const Track& track) {
  using Shape = GemmShape<Variant>;
  using Stage = typename Shape::Stage;
  using A = typename Product::A;
  using B = typename Product::B;
  constexpr int kBoxes = Stage::B::kBoxes;
  constexpr int kSharedBoxes = kBoxes / Shape::kClusterSize;
  const auto& p = cta.params;
  const RowsOfA<A, typename Stage::A> rows(first_row_of<A>(cta, task),
                                              A::kMajor == ptx::Major::kDepth ? task.rows : Tiling::kRows);
  // A block without rows has no use for B, but its copy of a shared one arrives all the same.
  const bool any_b = rows.boxes() > 0 || !own_b;
  const uint32_t bytes = rows.bytes() + (any_b ? sizeof(Stage::b) : 0);
  const B columns = B::columns_of(p, task);

  Product::Depth::for_each_step(p, task, [&](int32_t part, int32_t k) {
    track.stall([&] { ring.acquire(position); });
    ring.commit(position, bytes);
    Stage& stage = ring.stage(position);
    uint64_t* full = ring.full(position);
    if (!own_b) {
#pragma unroll
      for (int i = 0; i < kSharedBoxes; ++i) {
        const int box = cta.cta_rank * kSharedBoxes + i;
        columns.load(p, task, part, k, box, [&](const CUtensorMap& map, auto... at) {
          constexpr uint16_t kAll = (1u << Shape::kClusterSize) - 1;
          ptx::load_box_multicast(stage.b.box(box), &map, full, b_policy, kAll, at...);
        });
      }
    } else if (any_b) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        columns.load(p, task, part, k, box, [&](const CUtensorMap& map, auto... at) {
          ptx::load_box(stage.b.box(box), &map, full, b_policy, at...);
        });
      }
    }
    rows.load(p, task, part, k, stage.a, full, a_policy);
    position.advance();
  });
}

// The 4 stages after the depth of h_gradient, which are not multiplied: gate and up of the tile, 64 columns each, from
// their ring or from what the forward pass has saved. Epilogue HGradients uses them.
template <class Variant, class Track>
__device__ __forceinline__ void load_projections(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                                 typename GemmShape<Variant>::Ring::Position& position,
                                                 const Task& task, uint64_t policy, const Track& track) {
  using Stage = typename GemmShape<Variant>::Stage;
  const BackwardParams& p = cta.params;
  const int32_t boxes = ceil_div(task.rows, kBoxWidth);
  const bool saved = task.part == kSavedPart;
  const CUtensorMap& projections = saved ? p.saved_rows : p.projections;
  // Saved rows are not in a ring; this block's part of the tile begins as far from its start.
  constexpr int32_t kParts = Tiling::kBlocks;
  const int32_t first_saved_row = task.row_tile * p.schedule.tile.rows + task.ring_slot % kParts * Tiling::kRows;
  const int32_t first_row = saved ? first_saved_row : task.ring_slot * Tiling::kRows;
  const int32_t first_column = task.column_tile * Tiling::kColumns;
  for (int32_t column = first_column; column < first_column + Tiling::kColumns; column += kBoxWidth) {
    track.stall([&] { ring.acquire(position); });
    ring.commit(position, boxes * p.shape.projections * Stage::A::kBoxBytes);
    Stage& stage = ring.stage(position);
    uint64_t* full = ring.full(position);
#pragma unroll
    for (int box = 0; box < Stage::A::kBoxes; ++box) {
      if (box >= boxes) break;
      const int32_t row = first_row + kBoxWidth * box;
      ptx::load_box(stage.a.box(box), &projections, full, policy, column, 0, row);
      if (p.gated) ptx::load_box(stage.b.box(box), &projections, full, policy, column, 1, row);
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
