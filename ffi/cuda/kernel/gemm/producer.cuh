// The producer: one thread of warp 0 walks this block's tasks, waits until what a task reads is there, and has the copy
// engine load it stage by stage (products.cuh). math.cuh uses the stages.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/block_part.h"
#include "common/exchange.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/load.cuh"
#include "cuda/kernel/gemm/load_deep.cuh"
#include "cuda/kernel/gemm/products.cuh"

namespace jaxmoe::producer {

// All row tiles of a rank: the walk over tasks has quotients of them.
static_assert(int64_t{kMaxPeers} * kMaxSlots / (Tiling::kRows * Tiling::kBlocks) + kMaxLocalExperts <
              kMostOfSmallQuotient);

// The numbers of the cluster's tasks. Its first block draws them and hands them on. All of it is one thread's.
//
// A number is drawn while the last stages of the task before are loaded, which hides the way to L2 and back, about 1 us
// of the 7 between two tasks of a short launch. Not sooner: who draws a task is who multiplies it, and others may be
// free sooner.
template <class Variant>
class TaskNumbers {
 public:
  __device__ explicit TaskNumbers(const Cta<Variant>& cta) : cta_(cta) {}

  // Draws the next number: at most once before it is taken.
  __device__ __forceinline__ void draw() {
    if (cta_.cta_rank != 0) return;
    uint32_t* const taken = &cta_.signals.control()->tasks_taken[cta_.signals.launch_number() & 1];
    next_ = static_cast<int32_t>(atomicAdd(taken, 1u));
  }

  // The nth number, drawn here where it is not `drawn` yet. Since numbers rise, one that is not above the one before is an old one
  // that still lies there.
  __device__ __forceinline__ int32_t take(int nth, bool drawn) {
    if (cta_.cta_rank == 0) {
      if (!drawn) draw();
      for (uint32_t other = 1; other < Tiling::kBlocks; ++other) {
        ptx::store_cluster(&cta_.shared.task_numbers[nth % kQueuedTasks], other, next_);
      }
      return next_;
    }
    const int32_t last = next_;
    while (next_ <= last) next_ = ptx::load_cluster(&cta_.shared.task_numbers[nth % kQueuedTasks]);
    return next_;
  }

 private:
  const Cta<Variant>& cta_;
  int32_t next_ = -1;
};

// After the last task, the `queued`th. The end takes a stage too, of no bytes.
template <class Variant>
__device__ __forceinline__ void end_tasks(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                          typename GemmShape<Variant>::Ring::Position position, int queued) {
  if (cta.cta_rank == 0) {
    // After the draw of a number that no task has. With the fence of a latecomer between its count and its first draw:
    // who has seen the end of all tasks has seen every worker that took one.
    __threadfence();
    *const_cast<volatile uint32_t*>(&cta.signals.control()->tasks_ended) = 1;
  }
  ring.acquire(position);
  cta.shared.tasks[queued % kQueuedTasks].rows = kNoMoreTasks;
  ring.commit(position, 0);
  position.advance();
  if constexpr (Tiling::kBlocks == 1) return;
  // Until all blocks have released the stages of this block's last round: no copy or arrival is on its way to a block
  // that has ended.
  for (int i = 0; i < Variant::config.stages; ++i) {
    ring.acquire(position);
    position.advance();
  }
}

// Before a task that multiplies decoded weights. Pairs with the releases of all dispatchers in Decoder::decode_up_to();
// `seen` counts the experts that this thread has seen decoded, which are so in order.
template <class Variant>
__device__ __forceinline__ void wait_for_weights(const Cta<Variant>& cta, const Task& task,
                                                 const DecodedExpert& weights, int32_t& seen) {
  if (weights.nth < seen) return;
  cta.signals.wait(wait_before(weights, cta.shared.crew.dispatchers), site_of(task.gemm));
  seen = weights.nth + 1;
}

// Has the scales that math warps will load on their own, and wait for, brought into L2, before rows are waited for. Those
// of a tile's columns lie side by side. They come column by column, while the first step wants some of each: where that is
// long to wait for, lanes ask for what they want next (PackedPart::lanes_ask).
template <class Variant>
__device__ __forceinline__ void prefetch_group_scales(const Cta<Variant>& cta, const Task& own) {
  const auto& p = cta.params;
  if (own.rows == 0) return;
  const bool down = own.gemm == Gemm::kDown, halves = p.gated && !down;
  const int32_t depth = down ? p.shape.intermediate : p.shape.hidden;
  const int32_t width = down ? p.shape.hidden : p.shape.intermediate;
  const int32_t row_bytes = p.groups_of_column(depth);
  if constexpr (!Variant::Precision::kTokens.is_scaled()) {
    if (PackedPart::lanes_ask(p.weight_group_columns == 16, row_bytes, ceil_div(own.rows, 8))) return;
  }
  const int32_t columns = halves || cta.shares_columns(own) ? Tiling::kColumns / 2 : Tiling::kColumns;
  const int32_t first = down ? cta.first_answer_column(own) : own.column_tile * columns;
  const int64_t offset = (int64_t{own.expert} * width + first) * row_bytes;
  const uint32_t bytes = at_most(width - first, columns) * row_bytes;
  ptx::prefetch_bytes((down ? p.w_down_group_scales : p.w_gate_group_scales) + offset, bytes);
  if (halves) ptx::prefetch_bytes(p.w_up_group_scales + offset, bytes);
}

// Where the rows of tasks lie that have no ring: in the caller's array, whole tile after whole tile of an expert.
template <class Variant>
class ArrayTiles {
 public:
  explicit __device__ ArrayTiles(const Cta<Variant>& cta)
      : walk_(cta.params.room, cta.params.schedule.tile, cta.shared.rows_per_expert) {}

  // Of tasks in stream order.
  __device__ __forceinline__ void find(Task& task) {
    walk_.move_to(task.expert);
    task.ring_slot = walk_.row_of_tile(task.row_tile);
  }

 private:
  RoomWalk walk_;
};
template <class Variant>
struct RingTiles {
  explicit __device__ RingTiles(const Cta<Variant>&) {}
  __device__ __forceinline__ void find(Task&) {}
};
template <class Variant>
using TilesOf = std::conditional_t<Cta<Variant>::kSecondHalf, ArrayTiles<Variant>, RingTiles<Variant>>;

// Whether a stage of a block's part of a task with packed weights has whole lines of L2: a deep one of columns that begin with
// one.
template <class Variant>
__device__ __forceinline__ bool reads_whole_lines(const Cta<Variant>& cta, const Task& own) {
  constexpr int32_t kLineNumbers = 256;  // 128 bytes
  const auto& shape = cta.params.shape;
  return (own.part & kDeepSteps) != 0 && (own.gemm == Gemm::kDown ? shape.intermediate : shape.hidden) % kLineNumbers == 0;
}

// Whether no other row tile multiplies the weights of the task.
template <class Variant>
__device__ __forceinline__ bool has_one_tile(const Cta<Variant>& cta, const Task& task) {
  return cta.shared.rows_per_expert[task.expert] <= cta.params.schedule.tile.rows;
}

// Weights that only one task needs are read once: then they take no room in L2 from rows and h. Where those are decoded
// to 8 bits there is no register to ask. Lines of packed weights that more than one stage reads must not be evicted before the
// last of these does: that matters where memory is the limit, with few rows.
template <class Variant>
__device__ __forceinline__ uint64_t weights_policy(const Cta<Variant>& cta, const Task& task) {
  constexpr int32_t kMemoryBoundRows = 16;
  if constexpr (kParksWalks<Variant>) return ptx::evict_normal_policy();
  if (Variant::Precision::kPacked && task.rows <= kMemoryBoundRows && !reads_whole_lines(cta, task)) {
    return ptx::evict_normal_policy();
  }
  const bool exchanges = Cta<Variant>::kExchangesHalves && (task.part & kRowHalves) != 0;
  return has_one_tile(cta, task) && !exchanges ? ptx::evict_first_policy() : ptx::evict_normal_policy();
}

// Returns body(kind): std::type_identity of the deep stages in which the steps of a block's part of a task come, or of void.
template <class Variant, class Body>
__device__ __forceinline__ auto with_steps_of(const Task& own, const Body& body) {
  if constexpr (GemmShape<Variant>::kTakesDeepSteps) {
    using Stage = typename GemmShape<Variant>::Stage;
    if (own.part & kDeepSteps) {
      if constexpr (kHasDeepHalf<Stage>) {
        if (Cta<Variant>::shares_columns(own)) return body(std::type_identity<typename Stage::DeepHalf>{});
      }
      return body(std::type_identity<typename Stage::Deep>{});
    }
  }
  return body(std::type_identity<void>{});
}

// Rows and h are read again for every pair of column tiles. Where weights are read once, L2 keeps rows before weights and
// answers, until the tasks of the last columns give that room back, also to what comes behind the layer. With 512 and 1024
// tokens, where weights stream through L2 fastest, launches are shorter by up to a hundredth (docs/performance/forward.md).
// Where row tiles share weights a unit's h can be larger than L2, and would keep these out. Of a backward pass, whose weight
// gradients read rows too, and of few rows in deep stages it has not been measured.
template <class Variant>
__device__ __forceinline__ uint64_t rows_policy(const Cta<Variant>& cta, const Task& own) {
  if constexpr (kParksWalks<Variant> || Cta<Variant>::kBackward) return ptx::evict_normal_policy();
  if (!has_one_tile(cta, own)) return ptx::evict_normal_policy();
  const auto& p = cta.params;
  const int32_t behind_pair = (own.column_tile | 1) + 1;  // a block may have either column tile of a pair
  const bool last = own.gemm == Gemm::kDown ? behind_pair * p.schedule.tile.columns >= p.shape.hidden
                                            : behind_pair * p.schedule.tile.h_columns >= p.shape.intermediate;
  return last ? ptx::evict_first_policy() : ptx::evict_last_policy();
}

// Weights on their way before the rows of their task are waited for. Tasks are known as soon as rows are counted; the first rows
// come 10 to 25 us later, which is enough for all stages. Of later tasks it is one, in 16 bits and in deep stages: rows would
// queue behind the weights of more. Returns of how many stages.
template <class Variant>
__device__ __forceinline__ int32_t begin_weights(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                                 typename GemmShape<Variant>::Ring::Position position, const Task& task,
                                                 bool first) {
  using Products = ProductsOf<Variant>;
  const Task own = cta.own_part(task);
  return with_steps_of<Variant>(own, [&](auto kind) {
    using Deep = typename decltype(kind)::type;
    if constexpr (!std::is_void_v<Deep>) {
      const uint64_t policy = weights_policy(cta, own);
      return Products::template with<AllOf>(own.gemm, [&](auto product) {
        return load_deep_weights_first<decltype(product), Deep>(cta, ring, position, own, policy,
                                                                first ? Variant::config.stages : 1);
      });
    } else if constexpr (kWeightsFirst<Variant> && !Variant::Precision::kTokens.is_scaled() && !Variant::Precision::kPacked) {
      return Products::template with<AllOf>(own.gemm, [&](auto product) {
        return load_weights_first<decltype(product)>(cta, ring, position, own, weights_policy(cta, own),
                                                     first ? Variant::config.stages : 1);
      });
    } else if constexpr (kWeightsFirst<Variant>) {
      using First = typename Products::template FirstOf<AllOf>;
      if (!first || own.gemm != First::kGemm) return 0;
      return load_weights_first<First>(cta, ring, position, own, weights_policy(cta, own), Variant::config.stages);
    } else {
      return 0;
    }
  });
}

template <class Variant>
__device__ __forceinline__ NarrowExperts narrow_experts(const Cta<Variant>& cta) {
  if constexpr (kMasksExperts<Variant>) {
    return {cta.shared.experts.narrow, cta.shared.experts.with_rows};
  }
  return {};
}

// A backward kernel that decodes weights and records what it does has no registers for that.
template <class Variant>
using TaskWalkOf = TaskWalk<Variant::kPass, !(Cta<Variant>::kBackward && Cta<Variant>::kDecodes && Variant::config.timeline)>;

template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  const auto& p = cta.params;
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;
  const auto track = cta.timeline.template track<1>(TrackRole::kProducer);
  track.start();
  TaskWalkOf<Variant> walk(p.shape, p.schedule, cta.shared.rows_per_expert, narrow_experts(cta));
  int queued = 0;
  TaskNumbers<Variant> numbers(cta);
  TilesOf<Variant> tiles(cta);
  int32_t decoded_experts = 0;  // that have rows, and whose weights this thread has seen decoded
  if constexpr (kParksWalks<Variant>) cta.shared.seen_decoded.experts = 0;  // for which it has no register
  int32_t complete_segment = -1;  // row tile of the segment whose gradients this thread has seen complete
  bool drawn = false;  // the number of the next task
  for (Task task;;) {
    // By now the math warps still have stages to multiply, which hides part of this.
    if (!walk.seek(numbers.take(queued, drawn), task)) break;
    track.mark(EventKind::kTakeTask, task);
    const bool is_weight = Cta<Variant>::kWeightGradients && is_weight_gradient(task.gemm);
    const int32_t begun = begin_weights(cta, ring, position, task, queued == 0);
    if constexpr (Variant::Precision::kPacked) prefetch_group_scales(cta, cta.own_part(task));
    // Waits for rows pair with the release at the end of a chunk in dispatch::run(), the others with those after tasks
    // in TaskQueue::announce_stored() or, where there is a releaser, in releaser::run(). The fence orders what ordinary and
    // bulk stores wrote before the loads.
    tiles.find(task);
    // What lies in the caller's array was there before the launch.
    if (!Cta<Variant>::kSecondHalf && (!is_weight || complete_segment != task.row_tile)) {
      const int32_t waits = is_weight ? num_waits(p.schedule, task) : 1;
      for (int32_t nth = 0; nth < waits; ++nth) {
        const Wait wait = wait_before(p.shape, p.schedule, task, nth);
        if (wait.index < 0) continue;
        cta.signals.wait_before_task(wait, site_of(task.gemm), wait.signal == Signal::kRowsArrived);
      }
      if constexpr (Cta<Variant>::kDecodes) {
        if constexpr (kParksWalks<Variant>) {
          wait_for_weights(cta, task, walk.weights(), cta.shared.seen_decoded.experts);
        } else {
          wait_for_weights(cta, task, walk.weights(), decoded_experts);
        }
      }
      ptx::fence_proxy_async_global();
      if (is_weight) complete_segment = task.row_tile;
    }
    const Task own = cta.own_part(task);
    cta.shared.tasks[queued++ % kQueuedTasks] = own;
    track.mark(wait_event_of(own), own);
    Task to_load = own;
    if constexpr (Cta<Variant>::kDecodes) to_load.expert = walk.weights().weight_slot(p.schedule);
    // Made anew for each task: no registers are held for them.
    const uint64_t keep = ptx::evict_normal_policy();
    const uint64_t a_policy = rows_policy(cta, own), b_policy = is_weight ? keep : weights_policy(cta, own);
    ProductsOf<Variant>::template with<AllOf>(own.gemm, [&](auto product) {
      using Product = decltype(product);
      const auto draw = [&] { numbers.draw(); };
      drawn = with_steps_of<Variant>(own, [&](auto kind) {
        using Deep = typename decltype(kind)::type;
        if constexpr (!std::is_void_v<Deep>) {
          return load_deep_tile<Product, Deep>(cta, ring, position, to_load, b_policy, keep, begun, track, draw);
        } else {
          return load_tile<Product>(cta, ring, position, to_load, b_policy, a_policy, begun, track, draw);
        }
      });
      if constexpr (std::is_same_v<typename Product::Epilogue, epilogue::HGradients>) {
        load_projections(cta, ring, position, own, keep, track);
      }
    });
    const Task& loaded = cta.shared.tasks[(queued - 1) % kQueuedTasks];  // for a recording, so that no register holds it
    track.mark(load_event_of(loaded.gemm), loaded);
  }
  end_tasks(cta, ring, position, queued);
}

}  // namespace jaxmoe::producer
