// Sums at experts (KernelPlan.sum_at_experts): answers of this rank's experts wait in its arena until they are added up
// token by token, beside products, and what travels to the owner of a token is their sum.
//
//   forget, note_wanted    before the roles part: tables are cleared, then every slot of this rank's experts is noted
//   place, note_weight     dispatch, of a row: where its answer waits, or that it travels on its own; its routing weight
//   TokensOfPeers          the tokens of all ranks in turn (early_sums.cuh), each added up by a warp and sent
//   add_up_sums            what is left for the owner of a token: a sum for each rank, and answers without one
//
// A rank announces answers_ready when all of its warps have sent their sums: tell_sums() and wait_for_sums().
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/chunks.h"
#include "common/layout.h"
#include "common/protocol.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/token_sum.cuh"

namespace jaxmoe::sums_at_experts {

// All threads of the crew. Ordered before everything else that touches these tables by the flags that dispatch waits
// for, this rank's own among them.
template <class Variant>
__device__ void forget(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const auto fill = [&](const Region& region, int32_t value) {
    auto* words = cta.template at<int32_t>(region);
    const int64_t count = region.bytes / static_cast<int64_t>(sizeof(int32_t));
    for (int64_t i = thread_of(cta); i < count; i += threads_of(cta)) words[i] = value;
  };
  fill(p.layout.answer_places, AnswerPlace::kNone);
  fill(p.layout.wanted_experts, 0);
}

// All threads of the crew, once the lists of all sources are here: up to which expert of this rank each token wants some.
template <class Variant>
__device__ void note_wanted(const Cta<Variant>& cta) {
  if (cta.is_latecomer()) return;
  const auto& p = cta.params;
  const int32_t local = p.shape.local_experts();
  auto* const wanted = cta.template at<uint32_t>(p.layout.wanted_experts);
  for (int32_t source = 0; source < p.shape.ranks; ++source) {
    const int32_t* const ends =
        cta.peers.template here<int32_t>(rows_from_source(p.layout, p.head, cta.signals.launch_number(), source));
    const int32_t* const slots = cta.peers.template here<int32_t>(slots_from_source(p.layout, p.head, source));
    const int32_t count = at_most(__ldcg(ends + local - 1), p.shape.slots());
    for (int64_t i = thread_of(cta); i < count; i += threads_of(cta)) {
      int32_t first = 0, last = local - 1;  // the expert whose slots the i-th is one of is not outside of these
      while (first < last) {
        const int32_t middle = (first + last) / 2;
        if (__ldcg(ends + middle) > i) {
          last = middle;
        } else {
          first = middle + 1;
        }
      }
      const int32_t slot = __ldcg(slots + i);
      if (slot < 0 || slot >= p.shape.slots()) continue;  // only where a wait was given up
      atomicMax(wanted + int64_t{source} * p.shape.tokens + slot / p.shape.top_k, static_cast<uint32_t>(first) + 1);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) cta.signals.release({Signal::kExpertsWanted, 0, 1});
}

// The number of a slot of `source` in tables of the slots of all ranks.
template <class Variant>
__device__ __forceinline__ int64_t number_of(const Cta<Variant>& cta, int32_t source, int32_t slot) {
  return int64_t{source} * cta.params.shape.slots() + slot;
}

// Of a row that dispatch pulls, for a slot of `source`: notes where its answer will be. Returns where it goes.
template <class Variant>
__device__ __forceinline__ uint32_t place(const Cta<Variant>& cta, int32_t source, int32_t slot, int32_t row_tile,
                                          int32_t tile_row) {
  const auto& p = cta.params;
  const bool waits = row_tile < p.schedule.summed_tiles;
  const auto row = static_cast<int32_t>(waiting_answer(p.shape, p.schedule, row_tile, tile_row));
  cta.template at<int32_t>(p.layout.answer_places)[number_of(cta, source, slot)] = waits ? row : AnswerPlace::kTravels;
  return (waits ? RowTarget::of(cta.peers.rank(), row) : RowTarget::of(source, slot)).packed;
}

// Its routing weight, and a note of it. Dispatch copies rows in between: on its way over NVLink the weight would be
// waited for.
template <class Variant>
__device__ __forceinline__ float pull_weight(const Cta<Variant>& cta, int32_t source, int32_t slot) {
  return __ldcg(cta.peers.template at<float>(source, cta.params.layout.routing_weights.offset) + slot);
}
template <class Variant>
__device__ __forceinline__ void note_weight(const Cta<Variant>& cta, int32_t source, int32_t slot, float weight) {
  cta.template at<float>(cta.params.layout.answer_weights)[number_of(cta, source, slot)] = weight;
}

// Tokens of all ranks, as TokensInTurn takes them: neighbouring ones are of different ranks, so that sums go over all
// links at once.
template <class Variant>
struct TokensOfPeers {
  static __device__ __forceinline__ int32_t count(const Cta<Variant>& cta) {
    return cta.params.shape.ranks * cta.params.shape.tokens;
  }

  // Before any of the others, by all lanes of a warp.
  static __device__ __forceinline__ void prepare(const Cta<Variant>& cta, int lane) {
    // Pairs with the release of every block of the crew in note_wanted().
    if (lane == 0) {
      cta.signals.wait({Signal::kExpertsWanted, 0, static_cast<uint32_t>(cta.blocks())}, Site::kCombine);
    }
    __syncwarp();
  }

  // 0: its token wants none.
  static __device__ __forceinline__ int32_t needed_experts(const Cta<Variant>& cta, int32_t item) {
    const auto [source, token] = find(cta, item);
    return static_cast<int32_t>(__ldcg(cta.template at<uint32_t>(cta.params.layout.wanted_experts) +
                                       int64_t{source} * cta.params.shape.tokens + token));
  }

  // How many experts of this rank have answered.
  static __device__ __forceinline__ uint32_t experts_answered(const Cta<Variant>& cta, int lane) {
    return lane == 0 ? cta.signals.experts_answered(cta.peers.rank()) : UINT32_MAX;
  }

  // Adds up what waits here, in the order of slots, and sends it with the slots that are in it. All lanes of a warp.
  template <int kGroups>
  static __device__ __forceinline__ void add_up(const Cta<Variant>& cta, int32_t item, int lane) {
    const auto& p = cta.params;
    const auto [source, token] = find(cta, item);
    const int32_t top_k = p.shape.top_k, vectors = p.shape.hidden / 8;
    int32_t row = AnswerPlace::kNone;
    float weight = 0.0f;
    if (lane < top_k) {
      const int64_t number = number_of(cta, source, token * top_k + lane);
      row = __ldcg(cta.template at<int32_t>(p.layout.answer_places) + number);
      weight = __ldcg(cta.template at<float>(p.layout.answer_weights) + number);
    }
    if (__ballot_sync(0xffffffff, row != AnswerPlace::kNone) == 0) return;  // its owner reads nothing
    const bool waits = row >= 0 && row < p.layout.answer_rows;
    const uint32_t summed = __ballot_sync(0xffffffff, waits);
    if (lane == 0) {
      cta.peers.template at<uint32_t>(
          source, p.layout.summed_slots.offset)[int64_t{cta.peers.rank()} * p.shape.tokens + token] = summed;
    }
    if (summed == 0) return;
    uint4* const sum = cta.peers.template at<uint4>(source, p.layout.answers.offset) +
                       sum_row(p.shape, p.schedule, cta.peers.rank(), token) * vectors;
    combine::add_up<kGroups, Variant>(cta.template at<uint4>(p.layout.answers), combine::RowsOfLanes{row}, sum, 0,
                                      combine::kVectorsAtOnce<kGroups>, vectors, top_k, weight, summed,
                                      ptx::read_lane());
  }

 private:
  struct Item {
    int32_t source, token;
  };
  static __device__ __forceinline__ Item find(const Cta<Variant>& cta, int32_t item) {
    const int32_t ranks = cta.params.shape.ranks;
    return {(item + cta.peers.rank()) % ranks, item / ranks};
  }
};

// By every warp that takes tokens of peers in turn, after its last one.
template <class Variant>
__device__ __forceinline__ void tell_sums(const Cta<Variant>& cta, int lane) {
  __syncwarp();
  if (lane != 0) return;
  ptx::fence_system();  // what went to peers is ordered before the flag that another warp raises
  cta.signals.release({Signal::kSumsWritten, 0, 1});
}

// By the thread that announces. It takes none itself: one warp less than there are for dispatch and products.
template <class Variant>
__device__ __forceinline__ void wait_for_sums(const Cta<Variant>& cta) {
  const int32_t warps = cta.blocks() * (Roles::kDispatchWarps + Roles::kMathWarps) - 1;
  // Pairs with the releases in tell_sums().
  cta.signals.wait({Signal::kSumsWritten, 0, static_cast<uint32_t>(warps)}, Site::kAnnounce, kLongNapNs);
}

// y of a token of this rank: the sums of all ranks in their order, then the answers that travelled on their own in the
// order of their slots. Part `part` of `parts` of its columns, by all lanes of a warp, after answers_ready of all ranks.
template <int kGroups, class Variant>
__device__ __forceinline__ void add_up_sums(const Cta<Variant>& cta, int32_t token, int32_t part, int32_t parts,
                                            int lane) {
  const auto& p = cta.params;
  const int32_t ranks = p.shape.ranks, top_k = p.shape.top_k, vectors = p.shape.hidden / 8;
  const int32_t slot = token * top_k + lane;
  const int32_t id = lane < top_k ? p.topk_ids[slot] : -1;
  const int32_t owner = p.shape.has_expert(id) ? id / p.shape.local_experts() : -1;
  // First lane `rank` has the slots that are in that rank's sum.
  uint32_t wanted = 0;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const bool wants = __ballot_sync(0xffffffff, owner == rank) != 0;
    if (wants && lane == rank) wanted = 1;
  }
  const uint32_t summed =
      wanted != 0 ? __ldcg(cta.template at<uint32_t>(p.layout.summed_slots) + int64_t{lane} * p.shape.tokens + token)
                  : 0;
  const uint32_t of_owner = __shfl_sync(0xffffffff, summed, owner < 0 ? 0 : owner);
  const bool travelled = owner >= 0 && (of_owner >> lane & 1) == 0;
  // Then lane `rank` has the row of a sum, and lane ranks + k that of an answer to slot k.
  const int32_t from = lane < ranks ? lane : lane - ranks;
  const bool answer_is_used = __shfl_sync(0xffffffff, travelled, from);
  const bool is_sum = lane < ranks;
  const bool is_used = is_sum ? summed != 0 : lane < ranks + top_k && answer_is_used;
  const auto row = static_cast<int32_t>(is_sum ? sum_row(p.shape, p.schedule, lane, token) : token * top_k + from);
  const float weight = is_sum || lane >= ranks + top_k ? 1.0f : p.topk_weights[token * top_k + from];
  uint4* const y = static_cast<uint4*>(p.y) + int64_t{token} * vectors;
  combine::add_up<kGroups, Variant>(cta.template at<uint4>(p.layout.answers), combine::RowsOfLanes{row}, y,
                                    part * combine::kVectorsAtOnce<kGroups>,
                                    parts * combine::kVectorsAtOnce<kGroups>, vectors, ranks + top_k, weight,
                                    __ballot_sync(0xffffffff, is_used), lane);
}

}  // namespace jaxmoe::sums_at_experts
