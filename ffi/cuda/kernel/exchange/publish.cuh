// Publishing: inputs go where peers reach them, all ranks are told that they and the slot lists are there, and every
// block waits for everyone else's. All threads of a block call these together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/scaled_rows.cuh"

namespace jaxmoe::publish {

// Where tokens in 8 bits have one scale that is given; null where each 128 columns of them have their own, as those of
// an exchange.
__device__ __forceinline__ const float* given_scale_of_tokens(const LayerArrays<void, float>& layer) {
  return layer.scale_of_tokens();
}
__device__ __forceinline__ const float* given_scale_of_tokens(const ExchangeArrays<float>&) { return nullptr; }

// Rounds all tokens to 8 bits, in pieces that are dealt to blocks in turn: of few tokens many warps have one each. With a
// token to a warp, the warps of one block after those of another, 64 tokens of 7168 columns took six blocks 14 us, for
// which all others waited. While a warp rounds a piece it has the next one on its way.
template <class Variant>
__device__ __forceinline__ void round_tokens(const Cta<Variant>& cta, Team team) {
  using Precision = typename Variant::Precision;
  const auto& p = cta.params;
  const int32_t hidden = p.shape.hidden, blocks = scale_blocks(hidden);
  auto* values = cta.template at<typename Precision::Element>(p.layout.tokens);
  float* scales = cta.peers.template here<float>(scales_of(p.layout.tokens, p.shape.tokens, hidden));
  const auto* x = static_cast<const typename Precision::Wide::Element*>(p.x);
  const int lane = threadIdx.x % 32;
  const auto warps = static_cast<int32_t>(team.threads / 32), warp = static_cast<int32_t>(team.thread / 32);
  const int32_t team_blocks = warps / Roles::kWarps;
  const int32_t pieces = ceil_div(hidden, kRoundedAtOnce);

  struct Piece {
    int32_t token, of_token;
  };
  const auto find = [&](int32_t number) { return Piece{number / pieces, number % pieces}; };
  const Piece stride = find(warps);
  Piece piece = find(warp % Roles::kWarps * team_blocks + warp / Roles::kWarps);
  const auto first = [&] { return piece.of_token * kRoundedAtOnce; };
  const auto count = [&] { return at_most(hidden - first(), kRoundedAtOnce); };
  ColumnsToRound<Precision> columns;
  const auto load = [&] {
    if (piece.token < p.shape.tokens) columns.load(x + int64_t{piece.token} * hidden + first(), count(), lane);
  };
  load();
#pragma unroll 1
  while (piece.token < p.shape.tokens) {
    const ColumnsToRound<Precision> loaded = columns;
    auto* const target = values + int64_t{piece.token} * hidden + first();
    float* const its_scales = scales + int64_t{piece.token} * blocks + first() / kScaleColumns;
    const int32_t loaded_count = count();
    piece = {piece.token + stride.token, piece.of_token + stride.of_token};
    if (piece.of_token >= pieces) piece = {piece.token + 1, piece.of_token - pieces};
    load();
    loaded.round(target, its_scales, loaded_count, p.power_of_two_scales, given_scale_of_tokens(p), lane);
  }
}

// A weight for each slot.
template <class Variant>
__device__ __forceinline__ void publish_weights(const Cta<Variant>& cta, const float* weights, Team team) {
  float* const published = cta.template at<float>(cta.params.layout.routing_weights);
  for (int64_t i = team.thread; i < cta.params.shape.slots(); i += team.threads) published[i] = weights[i];
}

// Copies into the arena what peers will read: tokens, in a backward pass each with the gradient of its output behind
// it, and the routing weights. One rank alone reads the tokens of a forward pass where they are, unless it has to round
// them.
template <class Variant>
__device__ void copy_inputs(const Cta<Variant>& cta, Team team) {
  const auto& p = cta.params;
  constexpr bool kScaled = Variant::Precision::kTokens.is_scaled();
  if (!publishes_tokens(p.shape, p.schedule, kScaled)) return;
  uint4* tokens = cta.template at<uint4>(p.layout.tokens);
  if constexpr (Cta<Variant>::kBackward) {
    using Element = typename Cta<Variant>::Element;
    const int32_t vectors = p.shape.hidden * static_cast<int32_t>(sizeof(Element)) / kVectorBytes;
    const int64_t warps = team.threads / 32;
    const int lane = threadIdx.x % 32;
    for (int64_t token = team.thread / 32; token < p.shape.tokens; token += warps) {
      uint4* row = tokens + token * 2 * vectors;
      copy_row(row, nullptr, static_cast<const uint4*>(p.x) + token * vectors, vectors, lane);
      copy_row(row + vectors, nullptr, static_cast<const uint4*>(p.dy) + token * vectors, vectors, lane);
    }
    publish_weights(cta, p.topk_weights, team);
  } else if constexpr (kScaled) {
    round_tokens(cta, team);
  } else {
    copy(team, tokens, static_cast<const uint4*>(p.x), p.layout.tokens.bytes / kVectorBytes);
  }
  if constexpr (Cta<Variant>::kSumsAtExperts) publish_weights(cta, p.topk_weights, team);
}

// The routing weights, which a dispatch by known routes multiplies rows with.
template <class Variant>
__device__ void copy_weights(const Cta<Variant>& cta, Team team) {
  if (cta.params.weights != nullptr) publish_weights(cta, cta.params.weights, team);
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

// This block's part is written; the first block raises a flag at all ranks once every block's is, as `counter` counts.
template <class Variant>
__device__ __forceinline__ void tell_all(const Cta<Variant>& cta, Signal counter, Signal flag, Site site) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::fence_system();  // what went to peers is ordered before the flag that another block raises
  cta.signals.release({counter, 0, 1});
  if (cta.block() != 0) return;
  // Pairs with the release above, of every block of the crew.
  cta.signals.wait({counter, 0, static_cast<uint32_t>(cta.blocks())}, site);
  cta.signals.release_to_all(flag);
}

// Tokens and lists are written.
template <class Variant>
__device__ void tell_peers(const Cta<Variant>& cta) {
  tell_all(cta, Signal::kInputsPublished, Signal::kInputsReady, Site::kPublish);
}

// Waits until all ranks have raised a flag here. All threads of the block.
template <class Variant>
__device__ __forceinline__ void wait_for_all(const Cta<Variant>& cta, Signal flag, Site site) {
  if (threadIdx.x < static_cast<uint32_t>(cta.params.shape.ranks)) {
    // Pairs with the release_to_all() of that source: in tell_all(), or where a combine allows answers.
    const int32_t source = threadIdx.x;
    cta.signals.wait({flag, source, cta.signals.launch_number()}, site);
  }
  __syncthreads();
}

// Waits for the inputs of all ranks. Returns whether they are there. Blocks of a cluster walk the same tasks and wait
// for each other's stages without a limit of time, so where the wait is given up they all have to know: the first block
// decides for its cluster. Also the barrier after which blocks use each other's shared memory.
template <class Variant>
__device__ __forceinline__ bool are_inputs_usable(const Cta<Variant>& cta) {
  wait_for_all(cta, Signal::kInputsReady, Site::kWalk);
  if (threadIdx.x == 0 && cta.cta_rank == 0) {
    const int32_t usable = !cta.signals.given_up();
    cta.shared.inputs_usable = usable;
    for (uint32_t other = 1; other < Tiling::kBlocks; ++other) {
      ptx::store_cluster(&cta.shared.inputs_usable, other, usable);
    }
  }
  sync_worker();
  // A latecomer without tasks walks none.
  return cta.shared.inputs_usable != 0 && cta.shared.crew.tasks_left != 0;
}

// Waits for the inputs of all ranks and adds up how many rows each local expert gets.
template <class Variant>
__device__ void wait_for_inputs(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  // Counts of a rank that never came would be those of another launch.
  const bool usable = are_inputs_usable(cta);
  const int lane = threadIdx.x % 32;
  const int32_t local = p.shape.local_experts();
  bool has_more = false;  // some expert that this thread has counted
  for (int32_t first = threadIdx.x - lane; first < local; first += blockDim.x) {
    const int32_t expert = first + lane;
    int32_t rows = 0;
    for (int32_t source = 0; source < p.shape.ranks && expert < local; ++source) {
      const int64_t ends = rows_from_source(p.layout, p.head, cta.signals.launch_number(), source);
      const int32_t* end = cta.peers.template here<int32_t>(ends) + expert;
      rows += __ldcg(end) - (expert > 0 ? __ldcg(end - 1) : 0);
    }
    const int32_t multiple = p.schedule.row_multiple();  // with rows of zeros behind them
    rows = usable ? padded_rows(rows, multiple) : 0;
    const uint32_t with_rows = __ballot_sync(0xffffffff, rows > 0);
    if constexpr (kMasksExperts<Variant>) {
      static_assert(NarrowExperts::kOfWord == Roles::kWarpThreads);
      if (lane == 0) cta.shared.experts.with_rows[first / NarrowExperts::kOfWord] = with_rows;
      has_more |= rows > p.schedule.narrow_rows;
    }
    // As mark_experts_without_rows() does, up to the last of these 32.
    const uint32_t behind = with_rows >> lane;
    const int32_t without = behind != 0 ? __ffs(behind) - 1 : at_most(local - first, 32) - lane;
    if (expert < local) cta.shared.rows_per_expert[expert] = rows > 0 ? rows : 1 - without;
  }
  if constexpr (kMasksExperts<Variant>) {
    const int some_have_more = __syncthreads_or(has_more);
    if (threadIdx.x == 0) {  // for the producer, whose warp this is
      auto& experts = cta.shared.experts;
      experts.narrow = 0;
      for (int32_t i = 0; i < NarrowExperts::words(local) && !some_have_more; ++i) {
        experts.narrow += NarrowExperts::bits_of(experts.with_rows[i]);
      }
    }
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Waits until answers may be written at all ranks, and takes the rows that each expert has in the caller's array.
template <class Variant>
__device__ void wait_for_room(const Cta<Variant>& cta) {
  const auto& p = cta.params;
  const bool usable = are_inputs_usable(cta);
  const int32_t local = p.shape.local_experts();
  int32_t* const rows = cta.shared.rows_per_expert;
  for (int32_t expert = threadIdx.x; expert < local; expert += blockDim.x) {
    rows[expert] = usable ? __ldg(p.known_rows_per_expert + expert) : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    keep_rows_with_room(p.room, rows, local);
    mark_experts_without_rows(rows, local);
  }
  __syncthreads();
}

}  // namespace jaxmoe::publish
