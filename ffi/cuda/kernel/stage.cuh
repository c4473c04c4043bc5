// The ends of a launch that concern the whole block: staging inputs where peers reach them, publishing that they and
// the plan are there, waiting for everyone else's, and leaving. All threads of a block call these together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/dispatch.cuh"
#include "cuda/kernel/plan.cuh"

namespace jaxmoe::stage {

inline constexpr int kVectorBytes = 16;
// NaN in BF16 and in F16; two of them are NaN in float32.
inline constexpr uint16_t kNanHalf = 0x7fff;

// Threads of the crew, and this one's number.
template <class Variant>
__device__ __forceinline__ int64_t threads_of(const Cta<Variant>& cta) {
  return int64_t{cta.blocks()} * blockDim.x;
}
template <class Variant>
__device__ __forceinline__ int64_t thread_of(const Cta<Variant>& cta) {
  return int64_t{cta.block()} * blockDim.x + threadIdx.x;
}

// The counters that the next launch will use. Nobody else touches them in this one.
template <class Variant>
__device__ void clear_other_bank(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  uint32_t* bank = cta.template at<uint32_t>(
      p.rank, word_of(p.layout, p.head, cta.signals.epoch() + 1, Signal::kHistogramsWritten, 0));
  const int64_t words = counter_words(p.head);
  for (int64_t i = thread_of(cta); i < words; i += threads_of(cta)) {
    bank[i] = 0;
  }
  if (thread_of(cta) == 0) cta.signals.control()->tasks_taken[(cta.signals.epoch() + 1) & 1] = 0;
}

// Threads that share a piece of work, and this one's number.
struct Team {
  int64_t threads;
  int64_t thread;
};

// Copies `vectors` from one array to another, all of the team together.
__device__ inline void copy(Team team, uint4* target, const uint4* source, int64_t vectors) {
  const int64_t stride = team.threads;
  int64_t i = team.thread;
  for (; i + 3 * stride < vectors; i += 4 * stride) {
    const uint4 a = source[i], b = source[i + stride], c = source[i + 2 * stride], d = source[i + 3 * stride];
    target[i] = a;
    target[i + stride] = b;
    target[i + 2 * stride] = c;
    target[i + 3 * stride] = d;
  }
  for (; i < vectors; i += stride) target[i] = source[i];
}

// Copies into the arena what peers will read: tokens, in a backward pass each with the gradient of its output behind
// it, and the routing weights. One rank alone reads the tokens of a forward pass where they are.
template <class Variant>
__device__ void copy_inputs(const Cta<Variant>& cta, Team team) {
  const auto& p = cta.params;
  if (!stages_tokens(p.shape, p.schedule)) return;
  uint4* tokens = cta.template at<uint4>(p.layout.tokens);
  if constexpr (Cta<Variant>::kBackward) {
    using Element = typename Cta<Variant>::Element;
    const int32_t vectors = p.shape.hidden * static_cast<int32_t>(sizeof(Element)) / kVectorBytes;
    const int64_t warps = team.threads / 32;
    const int lane = threadIdx.x % 32;
    for (int64_t token = team.thread / 32; token < p.shape.tokens; token += warps) {
      uint4* row = tokens + token * 2 * vectors;
      dispatch::copy_row(row, nullptr, static_cast<const uint4*>(p.x) + token * vectors, vectors, lane);
      dispatch::copy_row(row + vectors, nullptr, static_cast<const uint4*>(p.dy) + token * vectors, vectors, lane);
    }
    float* weights = cta.template at<float>(p.layout.weights);
    for (int64_t i = team.thread; i < p.shape.slots(); i += team.threads) {
      weights[i] = p.topk_weights[i];
    }
  } else {
    copy(team, tokens, static_cast<const uint4*>(p.x), p.layout.tokens.bytes / kVectorBytes);
  }
}

// No token of a peer is here yet. Ordered before every pull by the flags that dispatch waits for, this rank's own among
// them.
template <class Variant>
__device__ void forget_kept_tokens(const Cta<Variant>& cta) {
  const Region& states = cta.params.layout.kept_states;
  uint32_t* target = cta.template at<uint32_t>(states);
  const int64_t words = states.bytes / static_cast<int64_t>(sizeof(uint32_t));
  for (int64_t i = thread_of(cta); i < words; i += threads_of(cta)) {
    target[i] = static_cast<uint32_t>(KeptState::kAbsent);
  }
}

// This block's part of tokens and lists is written; the first block tells all ranks once every block's is.
template <class Variant>
__device__ void publish(const Cta<Variant>& cta) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::fence_system();  // what went to peers is ordered before the flag that another block raises
  cta.signals.release({Signal::kInputsStaged, 0, 1});
  if (cta.block() != 0) return;
  // Pairs with the release above, of every block of the crew.
  cta.signals.wait({Signal::kInputsStaged, 0, static_cast<uint32_t>(cta.blocks())}, Site::kPublish);
  cta.signals.release_to_all(Signal::kInputsReady);
}

// Waits for the inputs of all ranks and adds up how many rows each local expert gets. Blocks of a cluster walk the same
// tasks and wait for each other's stages without a limit of time, so where the wait is given up they all have to know:
// the first block decides for its cluster. Also the barrier behind which blocks use each other's shared memory.
template <class Variant>
__device__ void wait_for_inputs(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  if (threadIdx.x < static_cast<uint32_t>(p.shape.ranks)) {
    // Pairs with release_to_all(kInputsReady) in publish() of that source.
    const int32_t source = threadIdx.x;
    cta.signals.wait({Signal::kInputsReady, source, cta.signals.epoch()}, Site::kWalk);
  }
  __syncthreads();
  if (threadIdx.x == 0 && cta.cta_rank == 0) {
    const int32_t usable = !cta.signals.given_up();
    cta.shared.inputs_usable = usable;
    for (uint32_t other = 1; other < Variant::config.cluster_size; ++other) {
      ptx::store_cluster(&cta.shared.inputs_usable, other, usable);
    }
  }
  if constexpr (Variant::config.cluster_size > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  // Counts of a rank that never came would be those of another launch. A latecomer without tasks walks none.
  const bool usable = cta.shared.inputs_usable != 0 && cta.shared.crew.tasks_left != 0;
  const int lane = threadIdx.x % 32;
  const int32_t local = p.shape.local_experts();
  for (int32_t first = threadIdx.x - lane; first < local; first += blockDim.x) {
    const int32_t expert = first + lane;
    int32_t rows = 0;
    for (int32_t source = 0; source < p.shape.ranks && expert < local; ++source) {
      const int64_t ends = rows_from_source(p.layout, p.head, cta.signals.epoch(), source);
      const int32_t* end = cta.template at<int32_t>(p.rank, ends) + expert;
      rows += __ldcg(end) - (expert > 0 ? __ldcg(end - 1) : 0);
    }
    const int32_t multiple = p.schedule.row_multiple();  // with rows of zeros behind them
    rows = usable ? padded_rows(rows, multiple) : 0;
    // As mark_experts_without_rows() does, up to the last of these 32.
    const uint32_t with_rows = __ballot_sync(0xffffffff, rows > 0) >> lane;
    const int32_t without = with_rows != 0 ? __ffs(with_rows) - 1 : at_most(local - first, 32) - lane;
    if (expert < local) cta.shared.rows_per_expert[expert] = rows > 0 ? rows : 1 - without;
  }
  __syncthreads();
}

// No task writes the gradients of an expert without rows.
template <class Variant>
__device__ void clear_unused_gradients(const Cta<Variant>& cta) {
  const BackwardParams& p = cta.params;
  if (cta.is_latecomer()) return;
  const int lane = threadIdx.x % 32;
  const int32_t local = p.shape.local_experts();
  const auto clear = [&](void* gradients, int64_t elements, int32_t expert) {
    if (gradients == nullptr) return;
    const int64_t size = p.float_gradients ? sizeof(float) : sizeof(typename Cta<Variant>::Element);
    const int64_t vectors = elements * size / kVectorBytes;
    uint4* of_expert = static_cast<uint4*>(gradients) + expert * vectors;
    for (int64_t i = thread_of(cta); i < vectors; i += threads_of(cta)) of_expert[i] = uint4{0, 0, 0, 0};
  };
  const int64_t matrix = int64_t{p.shape.hidden} * p.shape.intermediate;
  for (int32_t first = 0; first < local; first += 32) {
    const bool is_unused = first + lane < local && cta.shared.rows_per_expert[first + lane] <= 0;
    for (uint32_t unused = __ballot_sync(0xffffffff, is_unused); unused != 0; unused &= unused - 1) {
      const int32_t expert = first + __ffs(unused) - 1;
      clear(p.dw_gate, matrix, expert);
      clear(p.dw_up, matrix, expert);
      clear(p.dw_down, matrix, expert);
      clear(p.db_gate, p.shape.intermediate, expert);
      clear(p.db_up, p.shape.intermediate, expert);
      clear(p.db_down, p.shape.hidden, expert);
    }
  }
}

// Everything before the roles part: the same in both passes.
template <class Variant>
__device__ void prepare(const Cta<Variant>& cta) {
  const auto lane = cta.timeline.template lane<1024>(LaneRole::kBlock);
  cta.timeline.begin();
  lane.start();
  crew::Enlisted self{};
  if (threadIdx.x == 0) {
    if (cta.cta_rank == 0) self = crew::enlist(cta.signals.control(), gridDim.x / Variant::config.cluster_size);
    cta.signals.read_epoch();
  }
  // Dealt to all blocks of the launch, which nearly always are the crew, while they start. A crew that is not complete
  // copies everything once more; what others copy as well is the same. Not in backward passes: a second copy of the code
  // makes registers spill there.
  constexpr bool kCopiesEarly = !Cta<Variant>::kBackward;
  if constexpr (kCopiesEarly) {
    copy_inputs(cta, {int64_t{gridDim.x} * blockDim.x, int64_t{blockIdx.x} * blockDim.x + threadIdx.x});
  }
  crew::muster<Variant::config.cluster_size>(cta.shared.crew, cta.signals, cta.cta_rank, self);
  if (!cta.is_latecomer()) {
    const bool is_copied = kCopiesEarly && cta.blocks() == static_cast<int32_t>(gridDim.x);
    if (!is_copied) copy_inputs(cta, {threads_of(cta), thread_of(cta)});
    clear_other_bank(cta);
    forget_kept_tokens(cta);
    lane.mark(EventKind::kStage);
    plan::run(cta);
    lane.mark(EventKind::kPlan);
    publish(cta);
    lane.mark(EventKind::kPublish);
  }
  if (threadIdx.x == 0) {
    GemmShape<Variant>::Ring::init(cta.shared.gemm.ring);
    ptx::fence_mbarrier_init();
    for (int32_t& number : cta.shared.task_numbers) number = -1;
  }
  ptx::fence_proxy_async_shared();  // the planner's scratch lies where the stages will
  wait_for_inputs(cta);             // with a barrier of the cluster, then one of the block
  lane.mark(EventKind::kWaitInputs);
}

// What the backward pass may read of `saved` is written by gate_up tasks; the rest of it holds zeros, not what lay there
// before: the array is a result like any other, which may be printed, or searched for NaN.
template <class Variant>
__device__ void clear_unused_saved(const Cta<Variant>& cta) {
  const ForwardParams& p = cta.params;
  if (p.saved == nullptr || cta.is_latecomer()) return;
  using Element = typename Cta<Variant>::Element;
  const int64_t vectors = int64_t{p.shape.projections} * p.shape.intermediate *
                          static_cast<int64_t>(sizeof(Element)) / kVectorBytes;  // of a row
  const int64_t saved_rows = int64_t{p.schedule.saved_tiles} * p.schedule.tile.rows;
  uint4* saved = static_cast<uint4*>(p.saved);
  const auto clear = [&](int64_t first_row, int64_t end_row) {
    const int64_t end = at_most(end_row, saved_rows) * vectors;
    for (int64_t i = first_row * vectors + thread_of(cta); i < end; i += threads_of(cta)) saved[i] = uint4{0, 0, 0, 0};
  };
  int64_t first_row = 0;
  for (int32_t expert = 0; expert < p.shape.local_experts() && first_row < saved_rows; ++expert) {
    const int32_t counted = cta.shared.rows_per_expert[expert];
    const int32_t rows = counted > 0 ? counted : 0;
    const int64_t end_row = first_row + int64_t{ceil_div(rows, p.schedule.tile.rows)} * p.schedule.tile.rows;
    clear(first_row + padded_rows(rows, p.schedule.gradient_row_multiple()), end_row);
    first_row = end_row;
  }
  clear(first_row, saved_rows);
}

// Nothing of a launch that has given up a wait is to be taken for a result.
__device__ inline void poison_results(const LaunchParams& p) {
#pragma unroll 1
  for (int i = 0; i < kMaxResults; ++i) {
    auto* target = static_cast<uint16_t*>(p.results[i].data);
#pragma unroll 1
    for (int64_t j = threadIdx.x; j < p.results[i].bytes / 2; j += blockDim.x) target[j] = kNanHalf;
  }
}

// The last block to leave makes the arena ready for the next launch. Where a wait was given up it first overwrites all
// results, alone and slowly; the fence of every block puts what it has stored before that.
template <class Variant>
__device__ void leave(const Cta<Variant>& cta) {
  Control* control = cta.signals.control();
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&control->workers_left, 1u) == gridDim.x - 1;
  }
  if (!__syncthreads_or(is_last)) return;
  if (cta.signals.given_up()) poison_results(cta.params);
  if (threadIdx.x != 0) return;
  control->workers_left = 0;
  control->workers_started = 0;
  control->crew = 0;
  control->tasks_ended = 0;
  control->epoch = cta.signals.epoch();
}

}  // namespace jaxmoe::stage
