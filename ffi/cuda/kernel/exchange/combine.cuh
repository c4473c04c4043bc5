// Combine: announces that this rank's experts have answered, waits for the experts of all ranks, and adds up the
// answers to each token with its routing weights, in float32 and in the order of its slots. Where sums are made at
// experts it adds up those first, and then the sums.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/layout.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/early_sums.cuh"
#include "cuda/kernel/exchange/sums_at_experts.cuh"
#include "cuda/kernel/exchange/token_sum.cuh"

namespace jaxmoe::combine {

// What is added up beside products: tokens of this rank, or what waits here for those of all ranks.
template <class Variant>
using TokensToAddUp =
    std::conditional_t<Cta<Variant>::kSumsAtExperts, sums_at_experts::TokensOfPeers<Variant>, OwnTokens<Variant>>;

// One thread. All answers of this rank's experts are written: as many workers are done as have started.
//
// Latecomers count too, with tasks or without. So who starts after the others were counted could stand for one of them that
// still multiplies: they are counted again, until no one has come meanwhile. Each has counted itself as started before it is
// done, so then all that were counted are. Who starts still later finds no task. tests/unit/test_crew.py is a model of it.
template <class Variant>
__device__ __forceinline__ void wait_for_all_tasks(const Cta<Variant>& cta, Site site) {
  for (uint32_t counted = cta.shared.crew.workers;;) {
    // Pairs with the release of every math warp in TaskQueue::finish().
    cta.signals.wait_for_tasks({Signal::kTasksDone, 0, counted}, site);
    const uint32_t started = crew::workers_started(cta.signals.control());
    if (started == counted) return;
    counted = started;
  }
}

// One thread of the rank.
template <class Variant>
__device__ void announce(const Cta<Variant>& cta) {
  const auto track = cta.timeline.template track<32>(TrackRole::kDispatch);
  track.start();
  wait_for_all_tasks(cta, Site::kAnnounce);
  if constexpr (Cta<Variant>::kSumsAtExperts) sums_at_experts::wait_for_sums(cta);
  track.mark(EventKind::kWaitTasks);
  cta.signals.release_to_all(Signal::kAnswersReady);
}

// Until all ranks have announced. All lanes of a warp.
template <class Variant>
__device__ __forceinline__ void take_answers_ready(const Cta<Variant>& cta, int lane) {
  if (lane < cta.params.shape.ranks) {
    // Pairs with release_to_all(kAnswersReady) in announce() of that source.
    cta.signals.wait({Signal::kAnswersReady, lane, cta.signals.launch_number()}, Site::kCombine, kLongNapNs);
  }
  __syncwarp();
}

// The same for all lanes of every math warp of the crew.
template <class Variant>
__device__ __forceinline__ void wait_for_answers(const Cta<Variant>& cta, int math_warp, int lane) {
  if (math_warp == 0) take_answers_ready(cta, lane);
  ptx::named_barrier<1, Roles::kMathThreads>();
}

// The tokens of this rank, dealt to math warps; of few tokens several warps share one.
template <int kGroups, class Variant>
struct SharedTokens {
  __device__ SharedTokens(const Cta<Variant>& cta, int math_warp)
      : parts(at_most(ceil_div(cta.params.shape.hidden / 8, kVectorsAtOnce<kGroups>), warps_for_a_token(cta))),
        item(math_warp * cta.blocks() + cta.block()) {}

  __device__ __forceinline__ int32_t token() const { return item / parts; }
  __device__ __forceinline__ int32_t part() const { return item % parts; }
  __device__ __forceinline__ bool has_more(const Cta<Variant>& cta) const {
    return item < cta.params.shape.tokens * parts;
  }
  __device__ __forceinline__ void advance(const Cta<Variant>& cta) { item += cta.blocks() * Roles::kMathWarps; }

  const int32_t parts;
  int32_t item;
};

// Adds them up when wait() has seen all answered. What does not depend on answers is asked for before, and a sum rehearsed, as
// epilogues are (gemm/rehearsal.cuh): the first one of a launch took several times as long as one way to memory
// (docs/performance/scans.md).
template <int kGroups, class Variant, class Wait>
__device__ __forceinline__ void share_tokens(const Cta<Variant>& cta, int math_warp, int lane, const Wait& wait) {
  SharedTokens<kGroups, Variant> own(cta, math_warp);
  SlotOfLane of_lane = SlotOfLane::of(cta, own.token(), lane);
  // By the same code: the compiler does not know that there are parts, or it would make a copy of it.
#pragma unroll 1
  for (bool rehearses = kRehearsesSums<Variant> && own.parts > 0;; rehearses = false) {
    if (!rehearses) wait();
    while (own.has_more(cta)) {
      sum_token<kGroups>(cta, own.token(), of_lane, own.part(), own.parts, lane, rehearses);
      if (rehearses) break;
      own.advance(cta);
      of_lane = SlotOfLane::of(cta, own.token(), lane);
    }
    if (!rehearses) return;
  }
}

// Where sums are made at experts, by math warps: what waits here for tokens of all ranks, then the sums for this rank's.
template <int kGroups, class Variant, class Track>
__device__ __forceinline__ void make_sums_at_experts(const Cta<Variant>& cta, int math_warp, int lane,
                                                     const Track& track) {
  if (math_warp == 0) {
    if (lane == 0) wait_for_all_tasks(cta, Site::kCombine);
    __syncwarp();
    all_are_answered(cta, lane);
  }
  add_up_in_turn<kGroups, TokensToAddUp<Variant>>(cta, true, false, lane, track);
  sums_at_experts::tell_sums(cta, lane);
  wait_for_answers(cta, math_warp, lane);
  track.mark(EventKind::kWaitAnswers);
  for (SharedTokens<kGroups, Variant> own(cta, math_warp); own.has_more(cta); own.advance(cta)) {
    sums_at_experts::add_up_sums<kGroups>(cta, own.token(), own.part(), own.parts, lane);
  }
  track.mark(EventKind::kCombine);
}

// All lanes of a math warp without a further task. kRegisters are those of its role's threads.
template <int kRegisters, class Variant>
__device__ void run(const Cta<Variant>& cta, int math_warp, int lane) {
  constexpr int kGroups = kGroupsFor<kRegisters>;
  if (cta.is_latecomer()) return;  // tokens are dealt in advance
  const auto track = cta.timeline.template track<128>(TrackRole::kMath, math_warp / Roles::kWarpgroupWarps);
  if constexpr (Cta<Variant>::kSumsAtExperts) {
    make_sums_at_experts<kGroups>(cta, math_warp, lane, track);
    return;
  }
  if constexpr (kAddsUpEarly<Variant>) {
    if (adds_up_early(cta)) {
      if (math_warp == 0) {
        take_answers_ready(cta, lane);
        all_are_answered(cta, lane);
      }
      add_up_in_turn<kGroups, TokensToAddUp<Variant>>(cta, true, false, lane, track);
      return;
    }
  }
  share_tokens<kGroups>(cta, math_warp, lane, [&] {
    wait_for_answers(cta, math_warp, lane);
    track.mark(EventKind::kWaitAnswers);
  });
  track.mark(EventKind::kCombine);
}

// All lanes of a dispatch warp that has pulled all of its rows. The first one of the rank announces.
template <int kRegisters, class Variant>
__device__ void run_beside_products(const Cta<Variant>& cta, int dispatch_warp, int lane) {
  const bool early = kAddsUpEarly<Variant> && !cta.is_latecomer() && adds_up_early(cta);
  if (cta.block() == 0 && dispatch_warp == 0) {
    if constexpr (kAddsUpEarly<Variant>) {
      if (early) announce_experts(cta, lane);
    }
    if (lane == 0) announce(cta);
    __syncwarp();
    if constexpr (Cta<Variant>::kSumsAtExperts) return;  // announced when all were made
  }
  if constexpr (kAddsUpEarly<Variant>) {
    if (!early) return;
    const auto track = cta.timeline.template track<32>(TrackRole::kDispatch, dispatch_warp);
    track.start();
    add_up_in_turn<kGroupsFor<kRegisters>, TokensToAddUp<Variant>>(
        cta, false, dispatch_warp == Roles::kDispatchWarps - 1, lane, track);
    if constexpr (Cta<Variant>::kSumsAtExperts) sums_at_experts::tell_sums(cta, lane);
  }
}

}  // namespace jaxmoe::combine
