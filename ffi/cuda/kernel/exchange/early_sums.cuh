// Sums beside products. A token can be added up as soon as the experts of its slots have answered, long before the last
// expert of the launch: with 8 of 128 experts a quarter of the tokens when five sixths of the experts are done. Memory
// has time for that then, and so have the warps of dispatch, which have pulled everything, and math warps without a
// further task. What is left when all ranks have announced is added up by the math warps.
//
//   announce_experts   one warp of the rank tells all ranks how far its experts are      -> experts_answered
//   TokensInTurn       hands out the tokens of a block that can be added up, to its dispatch and math warps: those of
//                      this rank, or where sums are made at experts those of all ranks (sums_at_experts.cuh)
//
// Each token is added up by one warp, in the order of its slots, so it has the same bits whoever does it and when.
// Nothing here waits for a peer: who finds nothing to add up looks again, until the first math warp of its block, which
// waits for answers_ready with a limit (for tasks_done, where sums are made at experts), says that all is there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/protocol.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/token_sum.cuh"

namespace jaxmoe::combine {

inline constexpr uint32_t kAllAnswered = UINT32_MAX;

// Whether a launch adds up tokens before all is answered. Of few tokens several warps share one, and the sums take no
// time that could be hidden; those of peers are always added up so. The same answer in all blocks of the crew.
template <class Variant>
__device__ __forceinline__ bool adds_up_early(const Cta<Variant>& cta) {
  return Cta<Variant>::kSumsAtExperts || warps_for_a_token(cta) == 1;
}

// Whether the first dispatch warp of a rank pulls no rows, so that it can announce from the first expert on: with rows
// to pull it began after five sixths of a launch. Where weights are decoded every dispatcher has a share of each
// expert; there it announces when it has done that.
template <class Variant>
__device__ __forceinline__ bool announces_alone(const Cta<Variant>& cta) {
  return kAddsUpEarly<Variant> && !Variant::Precision::kDecodes && adds_up_early(cta);
}

// By the one warp of the rank that announces: tells how many experts have answered, whenever it would have to wait for
// the next one. All answers of a row tile are there when answers_written is complete, which a launch needs anyway.
template <class Variant>
__device__ __forceinline__ void announce_experts(const Cta<Variant>& cta, int lane) {
  const auto& p = cta.params;
  const int32_t local = p.shape.local_experts();
  const auto max_tiles = static_cast<int32_t>(max_row_tiles(p.shape, p.schedule.tile));
  int32_t answered_tiles = 0;  // the tiles below it have
  int32_t expert = 0;          // those below it have, and their tiles end at `end`
  int32_t end = 0;
  uint32_t told = 0;
  for (;;) {
    const auto tiles_of = [&](int32_t e) { return few_parts(cta.shared.rows_per_expert[e], p.schedule.tile.rows); };
    while (expert < local && end + tiles_of(expert) <= answered_tiles) end += tiles_of(expert++);
    if (expert == local) break;
    const int32_t tile = answered_tiles + lane;
    // Pairs with the releases of every math warp in TaskQueue::announce_stored().
    const bool has_answered =
        tile < max_tiles && cta.signals.tasks_have_reached(wait_for_answers(p.shape, p.schedule, tile));
    const uint32_t waiting = ~__ballot_sync(0xffffffff, has_answered);
    const int32_t passed = waiting == 0 ? 32 : __ffs(static_cast<int>(waiting)) - 1;
    answered_tiles += passed;
    if (passed > 0) continue;
    __syncwarp();  // what all lanes have acquired comes before what the first one tells
    if (lane == 0) {
      if (told < static_cast<uint32_t>(expert)) cta.signals.tell_experts_answered(expert);
      cta.signals.wait_for_tasks(wait_for_answers(p.shape, p.schedule, answered_tiles), Site::kAnnounce, kLongNapNs);
    }
    told = expert;
    __syncwarp();
    if (cta.signals.given_up()) return;
  }
  __syncwarp();  // the same for the last ones
  if (lane == 0) cta.signals.tell_experts_answered(local);
  __syncwarp();
}

// The tokens of this rank, each to be added up when all that its experts anywhere have to say is here. What
// TokensInTurn hands out; sums_at_experts::TokensOfPeers is the other kind.
template <class Variant>
struct OwnTokens {
  static __device__ __forceinline__ int32_t count(const Cta<Variant>& cta) { return cta.params.shape.tokens; }
  static __device__ __forceinline__ void prepare(const Cta<Variant>&, int) {}

  // The experts of every rank that have to have answered are those with a local number below this. 0: it has no answer.
  static __device__ __forceinline__ int32_t needed_experts(const Cta<Variant>& cta, int32_t token) {
    const auto& p = cta.params;
    const int32_t local = p.shape.local_experts(), top_k = p.shape.top_k;
    const int32_t* const ids = p.topk_ids + int64_t{token} * top_k;
    int32_t needed = 0;
#pragma unroll 4
    for (int32_t k = 0; k < top_k; ++k) {
      const int32_t id = __ldg(ids + k);
      const int32_t of_id = p.shape.has_expert(id) ? id % local + 1 : 0;
      needed = of_id > needed ? of_id : needed;
    }
    return needed;
  }

  // Of the source that the lane has the number of, how many experts have answered.
  static __device__ __forceinline__ uint32_t experts_answered(const Cta<Variant>& cta, int lane) {
    return lane < cta.params.shape.ranks ? cta.signals.experts_answered(lane) : kAllAnswered;
  }

  template <int kGroups>
  static __device__ __forceinline__ void add_up(const Cta<Variant>& cta, int32_t token, int lane) {
    sum_token<kGroups>(cta, token, SlotOfLane::of(cta, token, lane), 0, 1, lane);
  }
};

// The tokens of a block: every blocks()-th. Several that follow each other share a bit of TakenSums where there are
// more of them than bits.
template <class Variant, class Kind>
class TokensOfBlock {
  static constexpr int32_t kBits = 32 * TakenSums::kWords;

 public:
  explicit __device__ TokensOfBlock(const Cta<Variant>& cta)
      : cta_(cta), of_bit_(few_parts(ceil_div(Kind::count(cta), cta.blocks()), kBits)) {}

  __device__ __forceinline__ int32_t of_bit() const { return of_bit_; }
  // Number `nth` of a bit; from Kind::count() on there is none.
  __device__ __forceinline__ int32_t token(int32_t bit, int32_t nth) const {
    return (bit * of_bit_ + nth) * cta_.blocks() + cta_.block();
  }

  // Of all tokens of a bit; 0: there is none, or none that has an answer.
  __device__ __forceinline__ uint32_t needed_experts(int32_t bit) const {
    int32_t needed = 0;
    for (int32_t nth = 0; nth < of_bit_; ++nth) {
      const int32_t first = token(bit, nth);
      if (first >= Kind::count(cta_)) break;
      const int32_t of_token = Kind::needed_experts(cta_, first);
      needed = of_token > needed ? of_token : needed;
    }
    return needed;
  }

 private:
  const Cta<Variant>& cta_;
  const int32_t of_bit_;
};

// What sources have told, for the warps of this block.
template <class Kind, class Variant>
__device__ __forceinline__ void look_for_answers(const Cta<Variant>& cta, int lane) {
  const uint32_t of_source = Kind::experts_answered(cta, lane);
  const uint32_t of_all = __reduce_min_sync(0xffffffff, of_source);
  __syncwarp();  // as in announce_experts()
  if (lane == 0) {
    __threadfence_block();
    atomicMax(&cta.shared.sums.experts_answered, of_all);
  }
}

// Takes a bit of `ready` that nobody has taken; returns its number in the word, or -1. All lanes.
__device__ __forceinline__ int32_t take_bit(uint32_t& taken, uint32_t ready, int lane) {
  int32_t found = -1;
  if (lane == 0) {
    for (uint32_t free = ready & ~*const_cast<const volatile uint32_t*>(&taken); free != 0;) {
      const uint32_t bit = free & -free;
      const uint32_t before = atomicOr(&taken, bit);
      if ((before & bit) == 0) {
        found = __ffs(static_cast<int>(bit)) - 1;
        break;
      }
      free = ready & ~before;
    }
  }
  return __shfl_sync(0xffffffff, found, 0);
}

// Hands out the tokens of a block, each to one of its warps, as they can be added up. A warp that finds none looks
// again until all is answered and taken. A dispatch warp takes none any more when the last sixteenth of the experts is
// left: with fewer loads in flight a token takes it several times as long as a math warp, and everybody would wait for
// it at the end. All lanes call everything here.
template <class Variant, class Kind>
class TokensInTurn {
 public:
  // `looks`: this warp looks for what peers tell, for all of its block.
  __device__ TokensInTurn(const Cta<Variant>& cta, bool of_math, bool looks, int lane)
      : cta_(cta), tokens_(cta), of_math_(of_math), looks_(looks), lane_(lane) {
    Kind::prepare(cta, lane);
  }

  // The next bit of TakenSums for this warp; -1 when all is answered, and there is none left for it.
  template <class Track>
  __device__ __forceinline__ int32_t next(const Track& track) {
    for (;;) {
      while (word_ < TakenSums::kWords && takes_more()) {
        const int32_t taken = take_bit(cta_.shared.sums.words[word_], ready_, lane_);
        if (taken >= 0) return 32 * word_ + taken;
        begin_word(word_ + 1);
      }
      if (answered_ != 0) track.mark(EventKind::kCombine);
      if (answered_ == kAllAnswered) return -1;
      wait_for_more();
      track.mark(EventKind::kWaitAnswers);
      begin_word(0);
    }
  }

  __device__ __forceinline__ int32_t of_bit() const { return tokens_.of_bit(); }
  __device__ __forceinline__ int32_t token(int32_t bit, int32_t nth) const { return tokens_.token(bit, nth); }

 private:
  __device__ __forceinline__ void begin_word(int32_t word) {
    word_ = word;
    const int32_t bit = 32 * word + lane_;
    const bool there = word < TakenSums::kWords && tokens_.token(bit, 0) < Kind::count(cta_);
    ready_ = __ballot_sync(0xffffffff,
                           there && (answered_ == kAllAnswered || tokens_.needed_experts(bit) <= answered_));
    if (__ballot_sync(0xffffffff, there) == 0) word_ = TakenSums::kWords;
  }

  // How many experts have answered as far as this block knows, acquired.
  __device__ __forceinline__ uint32_t experts_answered() const {
    if (looks_) look_for_answers<Kind>(cta_, lane_);
    __syncwarp();
    const uint32_t seen = *const_cast<const volatile uint32_t*>(&cta_.shared.sums.experts_answered);
    const uint32_t of_warp = __shfl_sync(0xffffffff, seen, 0);
    __threadfence_block();  // pairs with those before the two places that raise it
    __syncwarp();
    return of_warp;
  }

  __device__ __forceinline__ bool takes_more() const {
    const int32_t local = cta_.params.shape.local_experts();
    return of_math_ || experts_answered() < static_cast<uint32_t>(local - local / 16);
  }

  __device__ __forceinline__ void wait_for_more() {
    uint32_t found;
    while ((found = experts_answered()) == answered_) __nanosleep(kLongNapNs);
    answered_ = found;
  }

  const Cta<Variant>& cta_;
  const TokensOfBlock<Variant, Kind> tokens_;
  const bool of_math_, looks_;
  const int lane_;
  uint32_t answered_ = 0;             // of the pass over all words that goes on
  int32_t word_ = TakenSums::kWords;  // in hand
  uint32_t ready_ = 0;                // tokens of it that can be added up
};

// By the first math warp of a block, when all that its kind of tokens needs has answered.
template <class Variant>
__device__ __forceinline__ void all_are_answered(const Cta<Variant>& cta, int lane) {
  if (lane != 0) return;
  __threadfence_block();
  atomicMax(&cta.shared.sums.experts_answered, kAllAnswered);
}

// By all dispatch and math warps of the block. Behind its math warps every token of it is added up or taken.
template <int kGroups, class Kind, class Variant, class Track>
__device__ __forceinline__ void add_up_in_turn(const Cta<Variant>& cta, bool of_math, bool looks, int lane,
                                               const Track& track) {
  TokensInTurn<Variant, Kind> turns(cta, of_math, looks, lane);
  for (int32_t bit; (bit = turns.next(track)) >= 0;) {
    for (int32_t nth = 0; nth < turns.of_bit(); ++nth) {
      const int32_t token = turns.token(bit, nth);
      if (token >= Kind::count(cta)) break;
      Kind::template add_up<kGroups>(cta, token, lane);
    }
  }
}

}  // namespace jaxmoe::combine
