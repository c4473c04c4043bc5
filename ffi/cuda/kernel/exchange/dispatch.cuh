// Dispatch: pulls the rows of this rank's experts from the ranks that own the tokens into the ring, sorted by expert,
// and notes where the answer to each goes, or its product in a first half. Warps 1 to 3 of every block, each on its own
// chunks of a tile. Where weights have to be decoded, the same warps do that (decode.cuh).
//
// A rank has 396 such warps. Each has 2 or 4 KiB in flight (kLoadsOfRow), which together cover NVLink's latency.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/chunks.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/device/copies.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/exchange/decode.cuh"
#include "cuda/kernel/exchange/places.cuh"
#include "cuda/kernel/exchange/scaled_rows.cuh"
#include "cuda/kernel/exchange/sums_at_experts.cuh"
#include "cuda/kernel/gemm/turned.cuh"

namespace jaxmoe::dispatch {

// Where the slots that name an expert lie in the list of a source.
struct SlotsOfExpert {
  int32_t start, count;
};

// Of the source that the lane has the number of.
template <class Variant>
__device__ __forceinline__ SlotsOfExpert slots_of_expert(const Cta<Variant>& cta, int32_t expert, int lane) {
  const auto& p = cta.params;
  if (lane >= p.shape.ranks) return {0, 0};
  const int32_t* end =
      cta.peers.template here<int32_t>(rows_from_source(p.layout, p.head, cta.signals.launch_number(), lane)) + expert;
  const int32_t start = expert > 0 ? __ldcg(end - 1) : 0;
  return {start, __ldcg(end) - start};
}

// Where a token lies: as number `number` of those that rank `owner` has published, or of those kept here.
inline constexpr int32_t kHere = -1;
inline constexpr int32_t kNoToken = -1;
struct TokenPlace {
  int32_t owner, number;

  // Of lane `lane`.
  __device__ __forceinline__ TokenPlace of_lane(int lane) const {
    return {__shfl_sync(0xffffffff, owner, lane), __shfl_sync(0xffffffff, number, lane)};
  }
};

// The elements of tokens, and behind them their scales where they have any.
template <class Variant>
class Tokens {
 public:
  explicit __device__ Tokens(const Cta<Variant>& cta) : cta_(cta) {}

  // Of a row of elements.
  __device__ __forceinline__ int32_t vectors() const {
    const int32_t columns = row_parts(cta_.params.schedule) * cta_.params.shape.hidden;
    return columns * static_cast<int32_t>(sizeof(Element)) / kVectorBytes;
  }
  __device__ __forceinline__ uint4* at(TokenPlace place) const {
    const auto& p = cta_.params;
    // The owner's own x is only read.
    void* const first = place.owner == kHere ? cta_.template at<void>(p.layout.kept_tokens)
                        : publishes_tokens(p.shape, p.schedule, kScaled)
                            ? cta_.peers.template at<void>(place.owner, p.layout.tokens.offset)
                            : const_cast<void*>(p.x);
    return static_cast<uint4*>(first) + int64_t{place.number} * vectors();
  }
  __device__ __forceinline__ float* scales_at(TokenPlace place) const {
    const auto& p = cta_.params;
    const bool kept = place.owner == kHere;
    const int64_t rows = kept ? int64_t{p.shape.ranks - 1} * p.shape.tokens : p.shape.tokens;
    const Region& region = kept ? p.layout.kept_tokens : p.layout.tokens;
    return cta_.peers.template at<float>(kept ? cta_.peers.rank() : place.owner,
                                         scales_of(region, rows, p.shape.hidden)) +
           int64_t{place.number} * scale_blocks(p.shape.hidden);
  }

  static constexpr bool kScaled = Variant::Precision::kTokens.is_scaled();

 private:
  using Element = typename Variant::Precision::Element;
  const Cta<Variant>& cta_;
};

// The segments whose ring slots a dispatcher overwrites: in a backward pass a slot is also held by the weight gradients
// of the segment that its tile belongs to. A dispatcher asks for tiles in order. A forward pass has none of this.
template <class Variant>
class OverwrittenSegments {
 public:
  explicit __device__ OverwrittenSegments(const Cta<Variant>& cta)
      : cta_(cta), walk_(cta.params.schedule, cta.shared.rows_per_expert, cta.params.shape.local_experts()) {}

  // By one thread.
  __device__ __forceinline__ void wait(int32_t row_tile) {
    if (!cta_.params.schedule.has_weight_gradients()) return;
    bool moved = false;
    while (segment_.first_tile + segment_.tiles <= row_tile && walk_.next(segment_)) moved = true;
    if (!moved) return;  // it has waited for that segment before
    // Pairs with the releases after weight gradients in TaskQueue::announce_stored().
    cta_.signals.wait_for_tasks(wait_for_weight_gradients(cta_.params.shape, cta_.params.schedule, segment_.first_tile),
                                Site::kDispatch, kLongNapNs);
  }

 private:
  const Cta<Variant>& cta_;
  SegmentWalk walk_;
  Segment segment_{};
};

// Where what is made of each row goes: to its slot, at the rank that it comes from.
template <class Variant>
struct Slots {
  explicit __device__ Slots(const Cta<Variant>&) {}

  // Of a lane's row; a negative slot is none.
  __device__ __forceinline__ uint32_t place(int32_t, const int32_t*, RowSource from, int32_t slot) const {
    return slot >= 0 ? RowTarget::of(from.source, slot).packed : RowTarget::kNone;
  }
  __device__ __forceinline__ void finish(int, int) const {}
};
template <class Variant>
using TargetsOf = std::conditional_t<Cta<Variant>::kFirstHalf, places::Places<Variant>, Slots<Variant>>;

// Passes the experts before the first chunk of a warp, 32 at a time. One after the other, a warp needed 9 us on average
// to find its first rows among 64 experts (find_rows in a timeline), where the first warps needed 3, and the first tiles
// of a decode batch wait for some of them.
__device__ __forceinline__ void pass_experts(ChunkWalk& walk, int32_t num_experts, int lane) {
  while (walk.first_expert() < num_experts) {
    const int32_t expert = walk.first_expert() + lane;
    ChunkWalk::Parts sum{0, 0};
    if (expert < num_experts) sum = walk.parts_of(expert);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t chunks = __shfl_up_sync(0xffffffff, sum.chunks, distance);
      const int32_t tiles = __shfl_up_sync(0xffffffff, sum.tiles, distance);
      if (lane >= distance) sum = {sum.chunks + chunks, sum.tiles + tiles};
    }
    const int passed = __popc(__ballot_sync(0xffffffff, expert < num_experts && sum.chunks <= walk.chunks_ahead()));
    if (passed == 0) return;
    walk.pass_experts(passed, {__shfl_sync(0xffffffff, sum.chunks, passed - 1),
                               __shfl_sync(0xffffffff, sum.tiles, passed - 1)});
    if (passed < 32) return;
  }
}

// By a warp: copies a row to `target`, turned (gemm/turned.cuh), and to `kept` as it is, unless that is null. Numbers
// have 8 bits, with an order that depends on the tile, or 16.
template <bool kBytes>
__device__ __forceinline__ void copy_turned_row(uint4* target, uint4* kept, const uint4* source, int32_t vectors,
                                                int lane, bool even_first = true) {
  constexpr int kLoadsInFlight = 4;
  const int place = (lane & ~7) + (kBytes ? turned::vector_of_bytes(lane, even_first) : turned::vector_of(lane));
#pragma unroll 1
  for (int32_t first = 0; first < vectors; first += 32 * kLoadsInFlight) {
    uint4 values[kLoadsInFlight];  // those behind the last vector are turned too, and stored nowhere
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + 32 * i + lane < vectors) values[i] = ptx::load_once(source + first + 32 * i + lane);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const uint4 turned =
          kBytes ? turned::turn_vector_of_bytes(values[i], lane, even_first) : turned::turn_vector(values[i], lane);
      if (first + 32 * i + lane >= vectors) continue;  // the same for all that turn theirs together
      target[first + 32 * i + place] = turned;
      if (kept != nullptr) kept[first + 32 * i + lane] = values[i];
    }
  }
}

// Rows that the block of threads multiplies whose part of a tile has row `row` of an expert. A chunk can have rows of two.
template <class Variant>
__device__ __forceinline__ int32_t rows_beside(const Cta<Variant>& cta, int32_t expert, int32_t row) {
  const int32_t first = row - row % Tiling::kRows;
  return at_most(cta.shared.rows_per_expert[expert] - first, static_cast<int32_t>(Tiling::kRows));
}

// A warp's walk over its chunks: in registers, or in shared memory, where all lanes write the same.
template <class Variant>
struct HeldWalk {
  __device__ __forceinline__ HeldWalk(const Cta<Variant>& cta, int, int32_t dispatcher)
      : walk(cta.params.shape, cta.params.schedule, cta.shared.rows_per_expert, dispatcher,
             cta.shared.crew.dispatchers) {}
  ChunkWalk walk;
};
template <class Variant>
struct WalkInSharedMemory {
  __device__ __forceinline__ WalkInSharedMemory(const Cta<Variant>& cta, int dispatch_warp, int32_t dispatcher)
      : walk(*new (cta.shared.walks[dispatch_warp].bytes)
                 ChunkWalk(cta.params.shape, cta.params.schedule, cta.shared.rows_per_expert, dispatcher,
                           cta.shared.crew.dispatchers)) {}
  ChunkWalk& walk;
};
template <class Variant>
using WalkOf = std::conditional_t<kParksWalks<Variant>, WalkInSharedMemory<Variant>, HeldWalk<Variant>>;

// Vectors of a row that a lane has on its way, as far as there are registers. Together warps have enough of them with four; what
// eight shorten is the way of the first rows of a launch, for which all multiprocessors wait.
template <class Variant>
inline constexpr int kLoadsOfRow =
    Variant::kPass == Pass::kForward && !Cta<Variant>::kDecodes && !Cta<Variant>::kSumsAtExperts ? 8 : 4;

// By warp `dispatch_warp` of the block, which is number `dispatcher` of the crew's.
template <class Variant>
__device__ void run(const Cta<Variant>& cta, int dispatch_warp, int32_t dispatcher) {
  const auto& p = cta.params;
  const Schedule& schedule = p.schedule;
  const int lane = threadIdx.x % 32;
  const Tokens<Variant> all_tokens(cta);
  const int32_t vectors = all_tokens.vectors();
  const int32_t slots = p.shape.slots();
  int32_t* counts = cta.shared.source_counts[dispatch_warp];
  uint32_t* targets = cta.template at<uint32_t>(p.layout.row_targets);
  uint4* ring = cta.template at<uint4>(p.layout.rows);
  uint32_t* kept_states = cta.template at<uint32_t>(p.layout.kept_states);
  const auto track = cta.timeline.template track<32>(TrackRole::kDispatch, dispatch_warp);
  track.start();

  if (cta.is_latecomer()) return;  // chunks are dealt in advance
  WalkOf<Variant> held(cta, dispatch_warp, dispatcher);
  ChunkWalk& walk = held.walk;
  pass_experts(walk, p.shape.local_experts(), lane);
  decode::DecoderOf<Variant> decoder(cta, dispatch_warp);
  OverwrittenSegments overwritten(cta);
  TargetsOf<Variant> rows_go_to(cta);
  for (;;) {
    // All lanes write the same to a walk that is in shared memory, and none may be a step ahead of another.
    if constexpr (kParksWalks<Variant>) __syncwarp();
    const bool ends = !walk.seek();
    decoder.decode_up_to(ends ? p.shape.local_experts() : walk.expert());
    if (ends) break;
    const Chunk chunk = walk.take();
    const SlotsOfExpert named = slots_of_expert(cta, chunk.expert, lane);
    __syncwarp();
    // Read anew, or its address is held in a register that there is not.
    if (lane < p.shape.ranks) counts[ptx::read_lane()] = named.count;
    __syncwarp();
    RowSource from{-1, 0};
    if (lane < chunk.rows) from = source_of_row(counts, 1, p.shape.ranks, cta.peers.rank(), chunk.first_row + lane);
    const int32_t start = __shfl_sync(0xffffffff, named.start, from.source < 0 ? 0 : from.source);
    int32_t slot = -1;
    if (from.source >= 0) {
      slot = __ldcg(cta.peers.template here<int32_t>(slots_from_source(p.layout, p.head, from.source)) + start +
                    from.position);
      if (slot < 0 || slot >= slots) slot = -1;  // only where a wait was given up
    }
    const bool is_row = slot >= 0;
    TokenPlace place{from.source, is_row ? slot / p.shape.top_k : kNoToken};

    const EventSubject subject{chunk.expert, chunk.row_tile, chunk.tile_row};
    track.mark(EventKind::kFindRows, subject);

    // The ring slot is free once the tile that had it has left. Pairs with the releases after down tasks in
    // TaskQueue::announce_stored() or releaser::run().
    const Wait freed = wait_before<Cta<Variant>::kFirstHalf>(p.shape, schedule, chunk);
    if (freed.index >= 0) {
      if (lane == 0) {
        cta.signals.wait_for_tasks(freed, Site::kDispatch, kLongNapNs);
        if constexpr (Cta<Variant>::kWeightGradients) overwritten.wait(freed.index);
      }
      track.mark(EventKind::kWaitSlot, subject);
      __syncwarp();
    }
    int32_t kept = kNoToken;  // the number under which this lane's row is kept, where that is this warp's to do
    if (schedule.keep_tokens && is_row && from.source != cta.peers.rank()) {
      const int32_t index =
          static_cast<int32_t>(kept_index(p.shape, cta.peers.rank(), from.source, slot / p.shape.top_k));
      // Pairs with the release at the end of the chunk that keeps the token.
      const uint32_t seen = ptx::compare_and_swap_acquire_gpu(kept_states + index,
                                                              static_cast<uint32_t>(KeptState::kAbsent),
                                                              static_cast<uint32_t>(KeptState::kComing));
      if (seen == static_cast<uint32_t>(KeptState::kKept)) place = {kHere, index};
      if (seen == static_cast<uint32_t>(KeptState::kAbsent)) kept = index;
    }
    __syncwarp();  // after one lane's acquire, since all lanes read the kept token
    const int64_t ring_row = int64_t{chunk.ring_slot} * schedule.tile.rows + chunk.tile_row;
    [[maybe_unused]] float weight = 0.0f;
    if (lane < chunk.rows) {
      if constexpr (Cta<Variant>::kSumsAtExperts) {
        if (is_row) weight = sums_at_experts::pull_weight(cta, from.source, slot);
        targets[ring_row + lane] =
            is_row ? sums_at_experts::place(cta, from.source, slot, chunk.row_tile, chunk.tile_row + lane)
                   : RowTarget::kNone;
      } else {
        targets[ring_row + lane] = rows_go_to.place(chunk.expert, counts, from, slot);
      }
      if constexpr (Cta<Variant>::kBackward) {
        cta.template at<float>(p.layout.row_routing_weights)[ring_row + lane] =
            is_row ? __ldcg(cta.peers.template at<float>(from.source, p.layout.routing_weights.offset) + slot) : 0.0f;
      }
    }
    for (int32_t i = 0; i < chunk.rows; ++i) {
      const TokenPlace row = place.of_lane(i);
      const TokenPlace kept_row{kHere, __shfl_sync(0xffffffff, kept, i)};
      const bool keeps = kept_row.number != kNoToken;
      uint4* const target = ring + (ring_row + i) * vectors;
      if (row.number != kNoToken) {
        uint4* const kept_elements = keeps ? all_tokens.at(kept_row) : nullptr;
        if constexpr (Tokens<Variant>::kScaled) {
          const int32_t blocks = scale_blocks(p.shape.hidden);
          const PulledScales pulled(all_tokens.scales_at(row), blocks, lane);
          if constexpr (Variant::Precision::kPacked) {
            copy_turned_row<true>(target, kept_elements, all_tokens.at(row), vectors, lane,
                                  turned::has_even_first(rows_beside(cta, chunk.expert, chunk.first_row + i)));
          } else {
            copy_row(target, kept_elements, all_tokens.at(row), vectors, lane);
          }
          pulled.store(ring_scales(cta, p.layout.rows, p.shape.hidden) +
                           ring_scale(Tiling::kRows, ring_row + i, blocks, 0),
                       Tiling::kRows, keeps ? all_tokens.scales_at(kept_row) : nullptr);
        } else if constexpr (Variant::Precision::kPacked) {
          copy_turned_row<false>(target, kept_elements, all_tokens.at(row), vectors, lane);
        } else {
          copy_row<kLoadsOfRow<Variant>>(target, kept_elements, all_tokens.at(row), vectors, lane);
        }
      } else if constexpr (Cta<Variant>::kBackward) {
        for (int32_t v = lane; v < vectors; v += 32) target[v] = uint4{0, 0, 0, 0};  // behind the last of the expert
      }
    }
    if constexpr (Cta<Variant>::kSumsAtExperts) {
      if (is_row) sums_at_experts::note_weight(cta, from.source, slot, weight);
    }
    __syncwarp();
    if (kept != kNoToken) ptx::store_release_gpu(kept_states + kept, static_cast<uint32_t>(KeptState::kKept));
    if (lane == 0) {
      if constexpr (Cta<Variant>::kFirstHalf) ptx::fence_system();  // rows of slots were written at their owners
      cta.signals.release(release_after(chunk));
    }
    track.mark(EventKind::kDispatch, subject);
  }
  rows_go_to.finish(dispatch_warp, lane);
}

}  // namespace jaxmoe::dispatch
