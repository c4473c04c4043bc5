// The two ends of a launch, which concern the whole block: everything before the roles part, and what the last block
// does for the next launch. All threads of a block call these together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/early_sums.cuh"
#include "cuda/kernel/exchange/publish.cuh"
#include "cuda/kernel/exchange/sort.cuh"
#include "cuda/kernel/exchange/sums_at_experts.cuh"
#include "cuda/kernel/gemm/rehearsal.cuh"
#include "cuda/kernel/gemm/releaser.cuh"

namespace jaxmoe::ends {

// NaN in BF16 and in F16; two of them are NaN in float32.
inline constexpr uint16_t kNanHalf = 0x7fff;

// The counters that the next launch will use. Nobody else touches them in this one.
template <class Variant>
__device__ void clear_other_bank(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  uint32_t* bank = cta.peers.template here<uint32_t>(
      word_of(p.layout, p.head, cta.signals.launch_number() + 1, Signal::kHistogramsWritten, 0));
  const int64_t words = counter_words(p.head);
  for (int64_t i = thread_of(cta); i < words; i += threads_of(cta)) {
    bank[i] = 0;
  }
  if (thread_of(cta) == 0) cta.signals.control()->tasks_taken[(cta.signals.launch_number() + 1) & 1] = 0;
}

__device__ __forceinline__ uint64_t muster_ns_of(const RankParams&) { return crew::kMusterNs; }
__device__ __forceinline__ uint64_t muster_ns_of(const ExchangeParams& params) {
  return params.beside ? crew::kMusterBesideNs : crew::kMusterNs;
}

struct DoNothing {
  __device__ __forceinline__ void operator()(const crew::Enlisted&) const {}
};

// Gathers the crew, and copies what peers will read. First first(self) by one thread of every worker, as soon as it has
// started; then copy(team) by all of the team together, and rest() by the crew. `kCopiesEarly`: copies are made while
// the blocks start, dealt to all blocks of the launch, which nearly always are the crew. A crew that is not complete
// copies everything once more; what others copy as well is the same.
template <bool kCopiesEarly, class Variant, class First, class Copy, class Rest>
__device__ __forceinline__ void enroll(const Cta<Variant>& cta, First first, Copy copy, Rest rest) {
  crew::Enlisted self{};
  if (threadIdx.x == 0) {
    if (cta.cta_rank == 0) self = crew::enlist(cta.signals.control(), gridDim.x / Tiling::kBlocks);
    cta.signals.read_launch_number();
    if (cta.cta_rank == 0) first(self);
  }
  if constexpr (kCopiesEarly) {
    const Team all{int64_t{gridDim.x} * blockDim.x, int64_t{blockIdx.x} * blockDim.x + threadIdx.x};
    if (!cta.signals.gave_up_before()) copy(all);
  }
  crew::muster<Tiling::kBlocks>(cta.shared.crew, cta.signals, cta.cta_rank, self, muster_ns_of(cta.params));
  if (!cta.is_latecomer()) {
    const bool is_copied = kCopiesEarly && cta.blocks() == static_cast<int32_t>(gridDim.x);
    if (!is_copied) copy(Team{threads_of(cta), thread_of(cta)});
    clear_other_bank(cta);
    rest();
  }
}

// What the roles share in a block, before they part.
template <class Variant>
__device__ __forceinline__ void prepare_stages(const Cta<Variant>& cta) {
  if (threadIdx.x != 0) return;
  GemmShape<Variant>::Ring::init(cta.shared.gemm.ring);
  releaser::prepare(cta);
  ptx::fence_mbarrier_init();
  for (int32_t& number : cta.shared.task_numbers) number = -1;
  rehearsal::prepare(cta);
  if constexpr (kHasReleaser<Variant>) cta.shared.crew.dispatchers -= cta.blocks();  // a warp of each
  if constexpr (kAddsUpEarly<Variant>) {
    cta.shared.sums = {};
    if (combine::announces_alone(cta)) --cta.shared.crew.dispatchers;
  }
}

// Everything before the roles part, where tokens are dispatched. also() by the crew, before peers are told.
template <class Variant, class Also>
__device__ void prepare(const Cta<Variant>& cta, Also also) {
  const auto track = cta.timeline.template track<1024>(TrackRole::kBlock);
  cta.timeline.begin();
  track.start();
  // Not early in backward passes: a second copy of the code makes registers spill there.
  const auto copy_inputs = [&](Team team) { publish::copy_inputs(cta, team); };
  enroll<!Cta<Variant>::kBackward>(cta, DoNothing{}, copy_inputs, [&] {
    publish::forget_kept_tokens(cta);
    if constexpr (Cta<Variant>::kSumsAtExperts) sums_at_experts::forget(cta);
    track.mark(EventKind::kCopyInputs);
    sort::run(cta);
    track.mark(EventKind::kSort);
    also();
    publish::tell_peers(cta);
    track.mark(EventKind::kPublish);
  });
  prepare_stages(cta);
  ptx::fence_proxy_async_shared();  // the sorter's scratch lies where the stages will
  publish::wait_for_inputs(cta);      // with a barrier of the cluster, then one of the block
  if constexpr (Cta<Variant>::kSumsAtExperts) sums_at_experts::note_wanted(cta);
  track.mark(EventKind::kWaitInputs);
}

// The first worker to start tells all ranks that answers may be written here: the launch before, which read them, has
// ended. As the first() of enroll().
template <class Variant>
__device__ auto allow_answers(const Cta<Variant>& cta) {
  return [&cta](const crew::Enlisted& self) {
    // Pairs with the wait for kInputsReady of every rank.
    if (self.started == 0) cta.signals.release_to_all(Signal::kInputsReady);
  };
}

// The same where nothing is dispatched, and what is multiplied lies in the caller's array.
template <class Variant>
__device__ void prepare_for_answers(const Cta<Variant>& cta) {
  enroll<false>(cta, allow_answers(cta), [](Team) {}, [] {});
  prepare_stages(cta);
  publish::wait_for_room(cta);
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
    const int64_t size = p.wide_gradients ? sizeof(float) : sizeof(typename Cta<Variant>::Element);
    const int64_t vectors = elements * size / kVectorBytes;
    uint4* of_expert = static_cast<uint4*>(gradients) + expert * vectors;
    for (int64_t i = thread_of(cta); i < vectors; i += threads_of(cta)) of_expert[i] = uint4{0, 0, 0, 0};
  };
  const int64_t matrix = int64_t{p.shape.hidden} * p.shape.intermediate;
  // Gate's, and up's where that is in the same array.
  const int64_t width = p.gate_up_pitch(p.shape.intermediate);
  const bool fused = p.fused();
  for (int32_t first = 0; first < local; first += 32) {
    const bool is_unused = first + lane < local && cta.shared.rows_per_expert[first + lane] <= 0;
    for (uint32_t unused = __ballot_sync(0xffffffff, is_unused); unused != 0; unused &= unused - 1) {
      const int32_t expert = first + __ffs(unused) - 1;
      clear(p.dw_gate, width * p.shape.hidden, expert);
      clear(fused ? nullptr : p.dw_up, matrix, expert);
      clear(p.dw_down, matrix, expert);
      clear(p.db_gate, width, expert);
      clear(fused ? nullptr : p.db_up, p.shape.intermediate, expert);
      clear(p.db_down, p.shape.hidden, expert);
    }
  }
}

// What the backward pass may read of `saved` is written by gate_up tasks; the rest of it holds zeros, not what lay
// there before: the array is a result like any other, which may be printed, or searched for NaN.
template <class Variant>
__device__ void clear_unused_saved(const Cta<Variant>& cta) {
  const ForwardParams& p = cta.params;
  if (p.gate_up == nullptr || cta.is_latecomer()) return;
  using Element = typename Cta<Variant>::Element;
  const int64_t vectors = int64_t{p.shape.projections} * p.shape.intermediate *
                          static_cast<int64_t>(sizeof(Element)) / kVectorBytes;  // of a row
  const int64_t saved_rows = int64_t{p.schedule.saved_tiles} * p.schedule.tile.rows;
  uint4* saved = static_cast<uint4*>(p.gate_up);
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
template <class Params>
__device__ void poison_results(const Params& p) {
#pragma unroll 1
  for (int i = 0; i < kMaxResults; ++i) {
    auto* target = static_cast<uint16_t*>(p.results[i].data);
#pragma unroll 1
    for (int64_t j = threadIdx.x; j < p.results[i].bytes / 2; j += blockDim.x) target[j] = kNanHalf;
  }
}

// Blocks of a cluster leave together: until then each may read the other's shared memory (crew::muster). The last
// block to leave makes the arena ready for the next launch. Where a wait was given up it first overwrites all
// results, alone and slowly; the fence of every block puts what it has stored before that.
template <class Variant>
__device__ void leave(const Cta<Variant>& cta) {
  Control* control = cta.signals.control();
  sync_worker();
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
  control->launch_number = cta.signals.launch_number();
}

}  // namespace jaxmoe::ends
