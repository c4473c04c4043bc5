// The producer of a backward pass: what the five products of gradient_math.cuh read, stage by stage. Everything comes
// in boxes of 64 x 64 elements, which a stage holds as 2 boxes of rows and 4 of weights:
//
//   GEMM              rows [128 or 64 deep]                weights [256 or 64 deep]           depth
//   gate_up           tokens                               w_gate, w_up, along columns        hidden
//   h_gradient   gradients of outputs                 w_down, along the depth            hidden
//   token_gradient    gradients of gate, then of up        w_gate, then w_up, along the depth intermediate, of each
//   gate_gradient     tokens, along columns                gradients of gate, along columns   rows of the segment
//   up_gradient       the same                             gradients of up                    the same
//   down_gradient     h times routing weights              gradients of outputs               the same
//
// After the depth of h_gradient come 4 stages that are not multiplied: gate and up of the tile, 64 columns each,
// from their ring or from what the forward pass has saved.
#pragma once

#include <cuda_runtime.h>

#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/load.cuh"
#include "cuda/kernel/gemm/producer.cuh"

namespace jaxmoe::gradient_producer {

inline constexpr int32_t kBox = 64;

// One task's way through the ring of stages. Both blocks of a cluster take the same steps.
template <class Variant, class Track>
class Loader {
  using Shape = GemmShape<Variant>;
  using Ring = typename Shape::Ring;
  using Stage = typename Shape::Stage;
  static constexpr uint32_t kBoxBytes = Stage::B::kBoxBytes;
  static constexpr int kRowBoxes = Shape::kTileRows / kBox;
  static constexpr int kSharedBoxes = Stage::B::kBoxes / Shape::kClusterSize;
  static_assert(Stage::A::kBoxes == kRowBoxes && Stage::A::kBoxBytes == kBoxBytes);

 public:
  // `row_boxes` of rows are loaded, and the weights of this block alone (`own_weights`) or a part for all blocks.
  __device__ Loader(const Cta<Variant>& cta, const Ring& ring, typename Ring::Position& position, const Track& track,
                    int32_t row_boxes, bool own_weights, uint64_t weights_policy, uint64_t rows_policy)
      : cta_(cta), ring_(ring), position_(position), track_(track), row_boxes_(row_boxes), own_weights_(own_weights),
        weights_policy_(weights_policy), rows_policy_(rows_policy) {}

  // The next stage. load_rows(target, full, box) and load_weights(box, load) name the coordinates; the latter calls
  // load(map, x, y, z).
  template <class LoadRows, class LoadWeights>
  __device__ __forceinline__ void step(const LoadRows& load_rows, const LoadWeights& load_weights) const {
    // A block without rows has no use for weights, but its copy of shared ones arrives all the same.
    const bool any_weights = row_boxes_ > 0 || !own_weights_;
    track_.stall([&] { ring_.acquire(position_); });
    ring_.commit(position_, row_boxes_ * kBoxBytes + (any_weights ? Stage::B::kBoxes * kBoxBytes : 0));
    Stage& stage = ring_.stage(position_);
    uint64_t* full = ring_.full(position_);
    if (!own_weights_) {
#pragma unroll
      for (int i = 0; i < kSharedBoxes; ++i) {
        const int box = cta_.cta_rank * kSharedBoxes + i;
        load_weights(box, [&](const CUtensorMap& map, int32_t x, int32_t y, int32_t z) {
          constexpr uint16_t kAll = (1u << Shape::kClusterSize) - 1;
          ptx::load_box_multicast(stage.b.box(box), &map, full, weights_policy_, kAll, x, y, z);
        });
      }
    } else if (any_weights) {
#pragma unroll
      for (int box = 0; box < Stage::B::kBoxes; ++box) {
        load_weights(box, [&](const CUtensorMap& map, int32_t x, int32_t y, int32_t z) {
          ptx::load_box(stage.b.box(box), &map, full, weights_policy_, x, y, z);
        });
      }
    }
    for (int box = 0; box < row_boxes_; ++box) load_rows(stage.a.box(box), full, box);
    position_.advance();
  }

  // A stage that is not multiplied: `boxes` boxes, of which load(stage, full) starts the loads.
  template <class Load>
  __device__ __forceinline__ void step_of_boxes(int32_t boxes, const Load& load) const {
    track_.stall([&] { ring_.acquire(position_); });
    ring_.commit(position_, boxes * kBoxBytes);
    load(ring_.stage(position_), ring_.full(position_));
    position_.advance();
  }

  __device__ int32_t row_boxes() const { return row_boxes_; }
  __device__ uint64_t rows_policy() const { return rows_policy_; }

 private:
  const Cta<Variant>& cta_;
  const Ring& ring_;
  typename Ring::Position& position_;
  const Track& track_;
  const int32_t row_boxes_;
  const bool own_weights_;
  const uint64_t weights_policy_;
  const uint64_t rows_policy_;
};

// gate_up, h_gradient and token_gradient: rows of the ring times weights. `task` is this block's part.
template <class Variant, class Loader>
__device__ __forceinline__ void load_tile(const Cta<Variant>& cta, const Loader& loader, const Task& task) {
  constexpr int32_t kRows = Tiling::kRows;
  constexpr int32_t kColumns = Tiling::kColumns;
  const BackwardParams& p = cta.params;
  const int32_t first_row = task.ring_slot * kRows;
  const auto rows_of = [&](const CUtensorMap& map, int32_t x, int32_t part) {
    return [&, x, part](void* target, uint64_t* full, int box) {
      ptx::load_box(target, &map, full, loader.rows_policy(), x, part, first_row + kBox * box);
    };
  };
  if (task.gemm == Gemm::kGateUp) {
    const int32_t second = p.gated ? 0 : kColumns / 2;  // columns between the halves of the accumulator
    const int32_t first_column = task.column_tile * (p.gated ? kColumns / 2 : kColumns);
    for (int32_t k = 0; k < p.shape.hidden; k += kBox) {
      loader.step(rows_of(p.rows, k, 0), [&](int box, const auto& load) {
        const bool is_second = box >= GemmShape<Variant>::Stage::B::kBoxes / 2;
        const int32_t column = first_column + (is_second ? second : 0) + box % (GemmShape<Variant>::Stage::B::kBoxes / 2) * kBox;
        load(is_second ? p.w_up : p.w_gate, column, k, task.expert);
      });
    }
    return;
  }
  const int32_t first_column = task.column_tile * kColumns;
  if (task.gemm == Gemm::kHGradient) {
    for (int32_t k = 0; k < p.shape.hidden; k += kBox) {
      loader.step(rows_of(p.rows, k, 1), [&](int box, const auto& load) {
        load(p.w_down, k, first_column + kBox * box, task.expert);
      });
    }
    const bool saved = task.part == kSavedPart;
    const CUtensorMap& projections = saved ? p.saved_rows : p.projections;
    // Saved rows are not in a ring; this block's part of the tile begins as far from its start.
    constexpr int32_t kParts = Tiling::kBlocks;
    const int32_t first_saved_row = task.row_tile * p.schedule.tile.rows + task.ring_slot % kParts * kRows;
    const int32_t first_projection = saved ? first_saved_row : first_row;
    for (int32_t column = first_column; column < first_column + kColumns; column += kBox) {
      loader.step_of_boxes(loader.row_boxes() * p.shape.projections, [&](auto& stage, uint64_t* full) {
        for (int box = 0; box < loader.row_boxes(); ++box) {
          const int32_t row = first_projection + kBox * box;
          ptx::load_box(stage.a.box(box), &projections, full, loader.rows_policy(), column, 0, row);
          if (p.gated) ptx::load_box(stage.b.box(box), &projections, full, loader.rows_policy(), column, 1, row);
        }
      });
    }
    return;
  }
  for (int32_t part = 0; part < p.shape.projections; ++part) {
    const CUtensorMap& weights = part == 0 ? p.w_gate : p.w_up;
    for (int32_t k = 0; k < p.shape.intermediate; k += kBox) {
      loader.step(rows_of(p.projections, k, part), [&](int box, const auto& load) {
        load(weights, k, first_column + kBox * box, task.expert);
      });
    }
  }
}

// The weight gradients: transposed rows of the segment times rows of the segment.
template <class Variant, class Loader>
__device__ __forceinline__ void load_weight_tile(const Cta<Variant>& cta, const Loader& loader, const Task& task) {
  const BackwardParams& p = cta.params;
  const int32_t tile_rows = p.schedule.tile.rows;
  const int32_t first_row = task.weight_row_tile * tile_rows + cta.cta_rank * Tiling::kRows;
  const int32_t first_column = task.column_tile * Tiling::kColumns;
  const bool is_down = task.gemm == Gemm::kDownGradient;
  const int32_t projection = task.gemm == Gemm::kUpGradient ? 1 : 0;
  int32_t ring_slot = task.ring_slot;
  for (int32_t row = 0; row < task.rows; row += kBox) {
    const int32_t in_tile = row % tile_rows;
    if (row > 0 && in_tile == 0 && ++ring_slot == p.schedule.ring_tiles) ring_slot = 0;
    const int32_t ring_row = ring_slot * tile_rows + in_tile;
    loader.step(
        [&](void* target, uint64_t* full, int box) {
          const int32_t x = first_row + kBox * box;
          if (is_down) {
            ptx::load_box(target, &p.h, full, loader.rows_policy(), x, ring_row);
          } else {
            ptx::load_box(target, &p.rows, full, loader.rows_policy(), x, 0, ring_row);
          }
        },
        [&](int box, const auto& load) {
          const int32_t x = first_column + kBox * box;
          if (is_down) {
            load(p.rows, x, 1, ring_row);
          } else {
            load(p.projections, x, projection, ring_row);
          }
        });
  }
}

template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  const BackwardParams& p = cta.params;
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;
  const uint64_t keep = ptx::evict_normal_policy();
  const uint64_t once = ptx::evict_first_policy();
  const auto track = cta.timeline.template track<1>(TrackRole::kProducer);
  track.start();
  TaskWalk<Pass::kBackward> walk(p.shape, p.schedule, cta.shared.rows_per_expert);
  int queued = 0;
  int32_t number = -1;
  int32_t complete_segment = -1;  // row tile of the segment whose gradients this thread has seen complete
  for (Task task;;) {
    number = producer::next_number(cta, queued, number);
    if (!walk.seek(number, task)) break;
    track.mark(EventKind::kTakeTask, task);
    const bool is_weight = is_weight_gradient(task.gemm);
    // Gate/up pairs with the release at the end of a chunk in dispatch::run(), the others with those after the tasks
    // before them in TaskQueue::announce_stored(). The fence orders what ordinary and bulk stores wrote before the
    // loads.
    if (!is_weight || complete_segment != task.row_tile) {
      const int32_t waits = num_waits(p.schedule, task);
      for (int32_t nth = 0; nth < waits; ++nth) {
        const Wait wait = wait_before(p.shape, p.schedule, task, nth);
        if (wait.index < 0) continue;
        cta.signals.wait_before_task(wait, site_of(task.gemm), wait.signal == Signal::kRowsArrived);
      }
      ptx::fence_proxy_async_global();
      if (is_weight) complete_segment = task.row_tile;
    }
    track.mark(wait_event_of(task.gemm), task);
    const Task own = cta.own_part(task);
    cta.shared.tasks[queued++ % kQueuedTasks] = own;
    const int32_t row_boxes = is_weight ? Tiling::kRows / kBox : ceil_div(own.rows, kBox);
    const bool one_tile = cta.shared.rows_per_expert[task.expert] <= p.schedule.tile.rows;
    const Loader<Variant, decltype(track)> loader(cta, ring, position, track, row_boxes,
                                                 Tiling::kBlocks == 1 || cta.is_narrow(task),
                                                 one_tile && !is_weight ? once : keep, keep);
    if (is_weight) {
      load_weight_tile(cta, loader, own);
    } else {
      load_tile(cta, loader, own);
    }
    track.mark(load_event_of(task.gemm), own);
  }
  producer::end_tasks(cta, ring, position, queued);
}

}  // namespace jaxmoe::gradient_producer
