// The shared memory of a block: of the kernels of a layer, and of those that dispatch and combine on their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/chunks.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/device/rank_params.cuh"
#include "cuda/device/timeline.cuh"
#include "cuda/kernel/config.cuh"
#include "cuda/kernel/crew.cuh"
#include "cuda/kernel/gemm/products.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

// Of a sorter (exchange/sort.cuh).
struct SortScratch {
  int32_t next[kMaxExperts];  // position in the owner's list of the next slot of this sorter
  int32_t total[kMaxExperts];  // of all sorters
  // Of one round of the block over its slots; all zero between rounds.
  uint16_t slots_of_warp[Roles::kWarps][kMaxExperts];
};

// Tasks on their way from the producer, which walks the schedule, to the math warps, which have no registers for it. A
// task is written before the commit of its first stage and read after the wait for that stage; the producer is never
// more tasks ahead than there are stages.
inline constexpr int kQueuedTasks = 8;
inline constexpr int32_t kNoMoreTasks = -1;  // as the rows of a task

// Whether tasks follow from their numbers where experts have one narrow tile each (NarrowExperts in common/units.h): of
// weights that math warps decode, whose tasks are so short that a worker's way to the next one counts. In 16 and 8 bits
// memory is the limit.
template <class Variant>
inline constexpr bool kMasksExperts = Variant::Precision::kPacked;
template <int32_t kExperts>
struct ExpertMasks {
  uint32_t with_rows[NarrowExperts::words(kExperts)];
  int32_t narrow;  // experts with rows, if none has more than a narrow tile; else 0
};
struct NoExpertMasks {};

struct NothingToDecode {};

// Where a dispatch warp decodes to 8 bits, it has no registers for its walk over chunks meanwhile: those of math warps
// that add up products in float32 are missing.
template <class Variant>
inline constexpr bool kParksWalks = Variant::Precision::kDecodes && Variant::Precision::kTokens.is_scaled();
// And the producer none for the number of experts whose weights it has seen decoded.
struct SeenDecoded {
  int32_t experts;
};
struct ParkedWalk {
  alignas(ChunkWalk) std::byte bytes[sizeof(ChunkWalk)];
};
struct NoParkedWalk {};

// Which of its tokens a block has added up, or is about to (exchange/early_sums.cuh). A bit stands for a token, or for
// several where there are more of them.
struct TakenSums {
  static constexpr int32_t kWords = 16;
  uint32_t experts_answered;  // by every source: those numbered below it; kAllAnswered once all is there
  uint32_t words[kWords];
};

struct NoTakenSums {};

// Local experts that a block has room for: fewer where it holds scales of weights decoded ahead, or holds scales or
// decodes in registers and also records what it does.
template <class Variant>
inline constexpr int32_t kRoomForExperts =
    kParksWalks<Variant> ||
            (Variant::config.timeline && (Variant::Precision::kTokens.is_scaled() || Variant::Precision::kPacked))
        ? kMaxLocalExpertsAhead
        : kMaxLocalExperts;

// Whether tokens are added up beside products (exchange/early_sums.cuh). A half of a layer has no signal that says when
// an expert has answered; weights decoded in registers are for few tokens.
template <class Variant>
inline constexpr bool kAddsUpEarly = (Variant::kPass == Pass::kForward || Variant::kPass == Pass::kBackward) &&
                                     !Variant::Precision::kPacked;

// Whether a warp of its own releases what tasks release (gemm/releaser.cuh), and what it shares with math warps. Otherwise the
// last of these does that (gemm/task_queue.cuh).
template <class Variant>
inline constexpr bool kHasReleaser = Variant::Precision::kPacked;
struct StoredTasks {
  uint64_t stored[kQueuedTasks];  // mbarriers, at the places of tasks in the queue: all math warps have stored theirs
  int32_t released;               // tasks
};
struct StoredParts {
  uint32_t warps;  // that have stored their part of a task, 4 bits for each place of the queue
};

template <class Variant>
struct KernelStorage {
  // The task in hand and the one before it stay, while the producer writes the one that has no stage yet; with a releaser one
  // more, which it reads (releaser::tell()).
  static_assert(Variant::config.stages + 3 + kHasReleaser<Variant> <= kQueuedTasks);
  typename GemmShape<Variant>::Storage gemm;                // first: it wants the alignment
  // Lies where the stages will be.
  __device__ __forceinline__ SortScratch& sort_scratch() {
    static_assert(sizeof(SortScratch) <= sizeof(gemm.ring.stages));
    return *reinterpret_cast<SortScratch*>(&gemm);
  }
  Task tasks[kQueuedTasks];                                 // this block's parts
  int32_t task_numbers[kQueuedTasks];                       // from the first block of a cluster to the others
  uint32_t launch_number;                                   // of this launch
  Crew crew;
  int32_t tasks_begun[GemmShape<Variant>::kMathWarps];      // by each math warp
  typename ProductsOf<Variant>::Scales scales[GemmShape<Variant>::kMathWarps];  // of the task in hand
  // Here, or ptxas spills registers of dispatch in the kernel that makes sums at experts beside rows in 8 bits.
  std::conditional_t<kHasReleaser<Variant>, StoredTasks, StoredParts> stored_tasks;
  int32_t inputs_usable;                                    // of the launch; 0 where the wait for them was given up
  int32_t rows_per_expert[kRoomForExperts<Variant>];        // of all sources, marked where an expert has none
  [[no_unique_address]] std::conditional_t<kMasksExperts<Variant>, ExpertMasks<kRoomForExperts<Variant>>,
                                           NoExpertMasks> experts;
  int32_t source_counts[Roles::kDispatchWarps][kMaxPeers];  // slots of each source for the expert in hand
  [[no_unique_address]] std::conditional_t<kAddsUpEarly<Variant>, TakenSums, NoTakenSums> sums;
  // The next expert of each dispatch warp.
  std::conditional_t<Variant::Precision::kDecodes, DecodedExpert, NothingToDecode>
      to_decode[Variant::Precision::kDecodes ? Roles::kDispatchWarps : 1];
  std::conditional_t<kParksWalks<Variant>, SeenDecoded, NothingToDecode> seen_decoded;
  std::conditional_t<kParksWalks<Variant>, ParkedWalk, NoParkedWalk>
      walks[kParksWalks<Variant> ? Roles::kDispatchWarps : 1];
  TimelineStorage<Variant::config.timeline> timeline;
};

// Pieces of rows on their way through shared memory, one of each warp (exchange/row_engine.cuh).
struct RowPieces {
  static constexpr int kBytes = 14336;  // all of a row of 7168 elements of 16 bits
  alignas(128) std::byte bytes[Roles::kWarps][kBytes];
  uint64_t full[Roles::kWarps];  // mbarriers
};

// Of a dispatch or a combine. Most of it is idle in a combine, which needs none.
struct ExchangeStorage {
  struct Arrivals {
    int32_t first_row[kMaxExperts];    // in the array, of local expert e from rank s at e * ranks + s
    int32_t rows[kMaxExperts];         // before any is dropped, likewise
    int32_t first_place[kMaxExperts];  // in the order of the slots of s, at s * local_experts + e
  };
  // The sorter is done when this is filled.
  struct Pulled {
    Arrivals arrivals;
    RowPieces pieces;
  };
  union {
    SortScratch sorter;
    Pulled pulled;
  };
  uint32_t launch_number;
  Crew crew;
  TimelineStorage<false> timeline;

  __device__ __forceinline__ SortScratch& sort_scratch() { return sorter; }
};

template <class Variant>
inline constexpr bool kIsExchange = Variant::kPass == Pass::kDispatch || Variant::kPass == Pass::kCombine;

template <class Variant, bool = kIsExchange<Variant>>
struct StorageChoice {
  using Type = KernelStorage<Variant>;
};
template <class Variant>
struct StorageChoice<Variant, true> {
  using Type = ExchangeStorage;
};
template <class Variant>
using StorageOf = typename StorageChoice<Variant>::Type;

}  // namespace jaxmoe
