// Combine: announces that this rank's experts have answered, waits for the experts of all ranks, and adds up the
// answers to each token with its routing weights, in float32 and in the order of its slots.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/early_sums.cuh"
#include "cuda/kernel/exchange/token_sum.cuh"

namespace jaxmoe::combine {

// One thread of the rank.
template <class Variant>
__device__ void announce(const Cta<Variant>& cta) {
  const uint32_t workers = cta.shared.crew.workers;
  const auto track = cta.timeline.template track<32>(TrackRole::kDispatch);
  track.start();
  // Pairs with the release of every math warp in TaskQueue::finish().
  cta.signals.wait_for_tasks({Signal::kTasksDone, 0, workers}, Site::kAnnounce);
  // The same of latecomers, some of whose tasks may not be done.
  const uint32_t all_workers = crew::workers_with_tasks(cta.signals.control());
  if (all_workers > workers) {
    cta.signals.wait_for_tasks({Signal::kTasksDone, 0, all_workers}, Site::kAnnounce);
  }
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

// Of few tokens: several math warps share one, when wait() has seen all answered. What does not depend on answers is
// asked for before.
template <int kGroups, class Variant, class Wait>
__device__ __forceinline__ void share_tokens(const Cta<Variant>& cta, int math_warp, int lane, const Wait& wait) {
  const auto& p = cta.params;
  const int32_t vectors = p.shape.hidden / 8;
  const int32_t parts = at_most(ceil_div(vectors, kVectorsAtOnce<kGroups>), warps_for_a_token(cta));
  const int32_t warps = cta.blocks() * Roles::kMathWarps;
  int32_t item = math_warp * cta.blocks() + cta.block();
  SlotOfLane of_lane = SlotOfLane::of(cta, item / parts, lane);
  wait();
  while (item < p.shape.tokens * parts) {
    sum_token<kGroups>(cta, item / parts, of_lane, item % parts, parts, lane);
    item += warps;
    of_lane = SlotOfLane::of(cta, item / parts, lane);
  }
}

// All lanes of a math warp without a further task. kRegisters are those of its role's threads.
template <int kRegisters, class Variant>
__device__ void run(const Cta<Variant>& cta, int math_warp, int lane) {
  constexpr int kGroups = kGroupsFor<kRegisters>;
  if (cta.is_latecomer()) return;  // tokens are dealt in advance
  const auto track = cta.timeline.template track<128>(TrackRole::kMath, math_warp / Roles::kWarpgroupWarps);
  if constexpr (kAddsUpEarly<Variant>) {
    if (adds_up_early(cta)) {
      if (math_warp == 0) {
        take_answers_ready(cta, lane);
        all_are_answered(cta, lane);
      }
      add_up_in_turn<kGroups>(cta, true, false, lane, track);
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
  }
  if constexpr (kAddsUpEarly<Variant>) {
    if (!early) return;
    const auto track = cta.timeline.template track<32>(TrackRole::kDispatch, dispatch_warp);
    track.start();
    add_up_in_turn<kGroupsFor<kRegisters>>(cta, false, dispatch_warp == Roles::kDispatchWarps - 1, lane, track);
  }
}

}  // namespace jaxmoe::combine
