// Sorts this rank's slots by expert and tells every owner of experts which slots are coming: a stable counting sort
// over a few blocks (sorters), so that the same routing gives the same lists in every run. All threads of a block call
// it, before the roles part.
//
//   count     each sorter counts its slots by expert           -> histograms, histograms_written
//   position  sums over sorters and over an owner's experts give each its first position; sorter 0 tells the owner
//                                                              -> rows_from
//   write     slots into the owners' lists                     -> source_slots
//             or, in a dispatch on its own, the place in such a list of every slot, to all owners
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/kernel/cta.cuh"

namespace jaxmoe::sort {

template <class Variant>
__device__ void count(const Cta<Variant>& cta, SortScratch& scratch, Share slots, int32_t sorter, int32_t sorters) {
  const Shape& shape = cta.params.shape;
  for (int32_t e = threadIdx.x; e < shape.num_experts; e += blockDim.x) scratch.next[e] = 0;
  __syncthreads();
#pragma unroll 4  // as many on their way at once
  for (int64_t slot = slots.begin + threadIdx.x; slot < slots.end; slot += blockDim.x) {
    const int32_t expert = __ldg(cta.params.topk_ids + slot);
    if (shape.has_expert(expert)) atomicAdd(&scratch.next[expert], 1);
  }
  __syncthreads();
  int32_t* histogram = cta.template at<int32_t>(cta.params.layout.histograms) + int64_t{sorter} * shape.num_experts;
  for (int32_t e = threadIdx.x; e < shape.num_experts; e += blockDim.x) histogram[e] = scratch.next[e];
  __syncthreads();
  // The threads of a single sorter read what they have written themselves.
  if (threadIdx.x == 0 && sorters > 1) cta.signals.release({Signal::kHistogramsWritten, 0, 1});
}

template <class Variant>
__device__ void position(const Cta<Variant>& cta, SortScratch& scratch, int32_t sorter, int32_t sorters) {
  const auto& p = cta.params;
  if (threadIdx.x == 0 && sorters > 1) {
    // Pairs with the release at the end of count() of every sorter.
    cta.signals.wait({Signal::kHistogramsWritten, 0, static_cast<uint32_t>(sorters)}, Site::kSort);
  }
  __syncthreads();
  const int32_t* histograms = cta.template at<int32_t>(p.layout.histograms);
  for (int32_t e = threadIdx.x; e < p.shape.num_experts; e += blockDim.x) {
    int32_t before = 0;
    int32_t total = 0;
    // Of up to 64 sorters, whose counts are in L2: four at a time are one way to L2 and back
    // after the other, in which nothing else happens.
#pragma unroll 16
    for (int32_t other = 0; other < sorters; ++other) {
      const int32_t count = __ldcg(histograms + int64_t{other} * p.shape.num_experts + e);
      before += other < sorter ? count : 0;
      total += count;
    }
    scratch.next[e] = before;
    scratch.total[e] = total;
    for (int warp = 0; warp < Roles::kWarps; ++warp) scratch.slots_of_warp[warp][e] = 0;
  }
  __syncthreads();
  // A warp for each owner sums up its experts, a few neighbouring ones by every lane.
  static_assert(kMaxPeers <= Roles::kWarps);
  constexpr int32_t kExpertsOfLane = 4;
  const int32_t owner = threadIdx.x / 32;
  if (owner < p.shape.ranks) {
    const int lane = threadIdx.x % 32;
    const int32_t local = p.shape.local_experts();
    int32_t* const ends =
        cta.peers.template at<int32_t>(owner,
                                       rows_from_source(p.layout, p.head, cta.signals.launch_number(),
                                                        cta.peers.rank()));
    int32_t earlier = 0;  // slots of the experts before those of this round
    for (int32_t first = 0; first < local; first += 32 * kExpertsOfLane) {
      const int32_t of_lane = first + kExpertsOfLane * lane;
      const int32_t experts = at_most(local - of_lane, kExpertsOfLane);
      int32_t slots = 0;
      for (int i = 0; i < experts; ++i) slots += scratch.total[owner * local + of_lane + i];
      int32_t sum = slots;  // of this lane and those before it
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t before = __shfl_up_sync(0xffffffff, sum, distance);
        sum += lane >= distance ? before : 0;
      }
      int32_t end = earlier + sum - slots;
      for (int i = 0; i < experts; ++i) {
        scratch.next[owner * local + of_lane + i] += end;
        end += scratch.total[owner * local + of_lane + i];
        if (sorter == 0) ends[of_lane + i] = end;
      }
      earlier += __shfl_sync(0xffffffff, sum, 31);
    }
  }
  __syncthreads();
}

inline constexpr int32_t kNobody = -1;
inline constexpr int32_t kNoPlace = -1;

// The owner of a slot's expert is told its place, all others that they have none.
template <class Variant>
__device__ __forceinline__ void tell_place(const Cta<Variant>& cta, int64_t slot, int32_t owner, int32_t place) {
  const auto& p = cta.params;
  const int64_t places = slots_from_source(p.layout, p.head, cta.peers.rank());
  for (int32_t rank = 0; rank < p.shape.ranks; ++rank) {
    cta.peers.template at<int32_t>(rank, places)[slot] = rank == owner ? place : kNoPlace;
  }
}

template <class Variant>
__device__ void write(const Cta<Variant>& cta, SortScratch& scratch, Share slots) {
  const auto& p = cta.params;
  const int32_t local = p.shape.local_experts();
  const int warp = threadIdx.x / 32;
  const uint32_t lanes_before = (1u << threadIdx.x % 32) - 1;
  const auto expert_of = [&](int64_t slot) { return slot < slots.end ? __ldg(p.topk_ids + slot) : -1; };
  int32_t next = expert_of(slots.begin + threadIdx.x);  // on its way while the slots before are written
  for (int64_t first = slots.begin; first < slots.end; first += blockDim.x) {
    const int64_t slot = first + threadIdx.x;
    const int32_t expert = next;
    next = expert_of(slot + blockDim.x);
    // Slots of one expert keep their order: by warp, then by lane.
    const uint32_t same = __match_any_sync(0xffffffff, expert);
    const int32_t in_warp = __popc(same & lanes_before);
    const bool is_used = p.shape.has_expert(expert);
    const bool first_of_expert = is_used && in_warp == 0;
    if (first_of_expert) scratch.slots_of_warp[warp][expert] = static_cast<uint16_t>(__popc(same));
    __syncthreads();
    if (is_used) {
      int32_t position = scratch.next[expert] + in_warp;
      for (int earlier = 0; earlier < warp; ++earlier) position += scratch.slots_of_warp[earlier][expert];
      const int32_t owner = expert / local;
      if constexpr (kIsExchange<Variant>) {
        tell_place(cta, slot, owner, position);
      } else if (static_cast<uint32_t>(position) < static_cast<uint32_t>(p.shape.slots())) {  // else a wait was given up
        cta.peers.template at<int32_t>(owner, slots_from_source(p.layout, p.head, cta.peers.rank()))[position] =
            static_cast<int32_t>(slot);
      }
    }
    if constexpr (kIsExchange<Variant>) {
      if (!is_used && slot < slots.end) tell_place(cta, slot, kNobody, kNoPlace);
    }
    __syncthreads();
    if (first_of_expert) {
      atomicAdd(&scratch.next[expert], __popc(same));
      scratch.slots_of_warp[warp][expert] = 0;
    }
    __syncthreads();
  }
}

template <class Variant>
__device__ void run(const Cta<Variant>& cta) {
  const int32_t sorter = cta.block();
  const int32_t sorters = num_sorters(cta.params.shape, cta.shared.crew.workers);
  if (sorter >= sorters) return;
  SortScratch& scratch = cta.shared.sort_scratch();
  const Share slots = share_of(cta.params.shape.slots(), sorter, sorters);
  count(cta, scratch, slots, sorter, sorters);
  position(cta, scratch, sorter, sorters);
  write(cta, scratch, slots);
}

}  // namespace jaxmoe::sort
