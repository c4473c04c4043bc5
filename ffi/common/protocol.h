// The signals between roles, workers and ranks: who releases, who waits, for how much, and when a word starts anew.
// The roles of the GPU kernel (cuda/kernel/), the host executor (host/executor.cc) and the property tests all take
// their waits and releases from here.
//
//   signal                    word at    released by (amount)                waited for by (target)
//   histograms_written        this rank  sort, per sorter (1)                sort, all sorters (sorters)
//   inputs_published          this rank  sort and publish, per worker (1)    the worker that publishes (workers)
//   inputs_ready              each peer  publish, per source (the launch)    dispatch, gate_up, down of every worker
//   rows_arrived              this rank  dispatch, per chunk (its rows)      gate_up (rows of the tile)
//   h_written                 this rank  gate_up, per task (its column       down, h_gradient (column tiles of h)
//                                        tiles)
//   h_gradients_written       this rank  h_gradient, per task (its column    token_gradient, and weight gradients of
//                                        tiles)                              each tile of the segment (column tiles
//                                                                            of h)
//   answers_written           this rank  down, token_gradient, per task      dispatch of the tile that has the ring
//                                        (its column tiles)                  slot next; announce, which tells
//                                                                            experts_answered (column tiles of an
//                                                                            answer)
//   weight_gradients_written  this rank  weight gradients, per task (1)      the same dispatch; weight gradients of
//                                                                            the next segment that adds up (its
//                                                                            tasks)
//   weights_decoded           this rank  dispatch, each dispatcher (1)       all tasks of the expert but weight
//                                                                            gradients (dispatchers)
//   tasks_done                this rank  every worker after its last task    the worker that announces (workers); where
//                                        (1)                                 sums are made at experts combine too
//   experts_wanted            this rank  walk, per worker (1), where sums    combine that makes sums beside products
//                                        are made at experts (on a GPU)      (workers)
//   sums_written              this rank  combine, per worker, after its last the worker that announces (workers)
//                                        sum for a peer (1)
//   experts_answered          each peer  announce, per source, after each    nobody: sums that can be made before
//                                        expert (the launch and its number)  answers_ready look at it (on a GPU)
//   answers_ready             each peer  announce, per source (the launch)   combine of every worker
//
// A dispatch with a product has all that brings rows to gate_up; its ring slots are free where h_written is complete. A
// combine with one has no signal of a tile: its rows are there when it starts.
//
// A dispatch or a combine on its own has those of its rank's inputs and of its end alone: histograms_written (dispatch),
// inputs_published and inputs_ready as above (a combine raises inputs_ready at once: that answers may come), tasks_done
// by every worker (on a GPU every thread block) when its rows are pulled or pushed, answers_ready as above.
//
// h_written announces h, and in a backward pass what the activation turns into h. weight_gradients_written belongs
// to a segment and has the word of its first row tile, as weights_decoded that of an expert.
//
// A release orders everything its thread did or acquired before it, on this rank and on peers; the wait that it pairs
// with acquires. Words at this rank are counters: there are two banks, a launch uses the bank of its number's parity
// and clears the other one, which nobody else touches in that launch. Words at a peer hold the number of a launch and
// are never cleared. On a GPU each warp of a task releases its own part, so those that tasks release count warps
// (cuda/device/signals.cuh). There inputs_published counts thread blocks, of which a worker may have several.
//
// Where sums are made at experts a rank announces answers_ready when its sums are written at the owners of the tokens,
// and answers that travel on their own are.
//
// Why no barrier is needed at the end: a rank ends a launch only when every peer has announced answers_ready, that
// is, has finished all its tasks, and so no longer reads this rank's tokens or slot lists. What a rank that is one
// launch ahead may write at a peer that is still in combine are row counts (two banks, by parity: a dispatcher that
// gets no chunk may be late and still read them), slot lists (read by pulls only, all done) and flags (numbers of
// launches). It writes answers and sums only after that peer's inputs_ready of the new launch. No rank can be two launches
// ahead.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "common/chunks.h"
#include "common/scheduler.h"
#include "common/shape.h"

namespace jaxmoe {

enum class Signal : int32_t {
  kHistogramsWritten = 0,
  kInputsPublished,
  kTasksDone,
  kExpertsWanted,
  kSumsWritten,
  kRowsArrived,     // from here on one word per row tile
  kHWritten,
  kHGradientsWritten,
  kAnswersWritten,
  kWeightGradientsWritten,
  kWeightsDecoded,
  kInputsReady,     // from here on one word per source, at each peer
  kExpertsAnswered,
  kAnswersReady,
  kCount
};
inline constexpr int32_t kNumSignals = static_cast<int32_t>(Signal::kCount);
inline constexpr const char* kSignalNames[kNumSignals] = {
    "histograms_written",       "inputs_published",   "tasks_done", "experts_wanted", "sums_written",
    "rows_arrived",             "h_written",  "h_gradients_written", "answers_written",
    "weight_gradients_written", "weights_decoded", "inputs_ready", "experts_answered", "answers_ready"};
inline constexpr int32_t kSignalsOfRank = static_cast<int32_t>(Signal::kRowsArrived);  // one word each
inline constexpr int32_t kSignalsPerTile =
    static_cast<int32_t>(Signal::kInputsReady) - static_cast<int32_t>(Signal::kRowsArrived);
inline constexpr int32_t kSignalsFromPeers = kNumSignals - static_cast<int32_t>(Signal::kInputsReady);

JAXMOE_ANY constexpr bool is_per_tile(Signal signal) {
  return signal >= Signal::kRowsArrived && signal < Signal::kInputsReady;
}
JAXMOE_ANY constexpr bool is_from_peers(Signal signal) { return signal >= Signal::kInputsReady; }

// Where in the code a wait stands.
enum class Site : int32_t {
  kSort = 0,
  kPublish,
  kWalk,
  kDecode,
  kDispatch,
  kGateUp,
  kDown,
  kHGradient,
  kTokenGradient,
  kWeightGradient,
  kAnnounce,
  kCombine,
  kCount
};
inline constexpr const char* kSiteNames[static_cast<int32_t>(Site::kCount)] = {
    "sort",           "publish",         "walk",     "decode", "dispatch", "gate_up", "down", "h_gradient",
    "token_gradient", "weight_gradient", "announce", "combine"};

JAXMOE_ANY constexpr Site site_of(Gemm gemm) {
  if (is_weight_gradient(gemm)) return Site::kWeightGradient;
  return static_cast<Site>(static_cast<int32_t>(Site::kGateUp) + static_cast<int32_t>(gemm));
}
static_assert(site_of(Gemm::kTokenGradient) == Site::kTokenGradient);

// What a source has told of its experts in a launch, as its experts_answered: all of them that are numbered below
// `experts` have written all their answers. It is a hint that saves a wait and is itself never waited for, so it need
// not be raised in every launch: a word of 64 bits names its launch.
struct ExpertsAnswered {
  uint32_t launch_number;
  uint32_t experts;

  JAXMOE_ANY static constexpr ExpertsAnswered of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word)};
  }
  JAXMOE_ANY constexpr uint64_t word() const { return uint64_t{launch_number} << 32 | experts; }
  JAXMOE_ANY constexpr uint32_t in_launch(uint32_t number) const { return number == launch_number ? experts : 0; }
};
static_assert(ExpertsAnswered::of(ExpertsAnswered{7, 3}.word()).in_launch(7) == 3);
static_assert(ExpertsAnswered::of(ExpertsAnswered{7, 3}.word()).in_launch(8) == 0);

// A word that must reach `target`. `index` is the row tile or the source, 0 where there is one word.
struct Wait {
  Signal signal;
  int32_t index;
  uint32_t target;
};

struct Release {
  Signal signal;
  int32_t index;
  uint32_t amount;
};

// All tasks of a row tile are done: nobody reads its slot of the rings any more. Of decoded weights, a slot is free
// where that holds for every row tile of the expert that had it.
JAXMOE_ANY constexpr Wait wait_for_answers(const Shape& shape, const Schedule& schedule, int32_t row_tile) {
  return {Signal::kAnswersWritten, row_tile, static_cast<uint32_t>(answer_tiles(shape, schedule.tile))};
}
// The waits before an item of the stream, and the release after it. An index below zero stands for no wait.
template <bool kFirstHalf>
JAXMOE_ANY constexpr Wait wait_before(const Shape& shape, const Schedule& schedule, const Chunk& chunk) {
  const int32_t had_slot = chunk.row_tile - schedule.ring_tiles;
  if constexpr (!kFirstHalf) return wait_for_answers(shape, schedule, had_slot);
  return {Signal::kHWritten, had_slot, static_cast<uint32_t>(h_tiles(shape, schedule.tile))};
}
constexpr Wait wait_before(const Shape& shape, const Schedule& schedule, const Chunk& chunk) {
  return schedule.is_first_half() ? wait_before<true>(shape, schedule, chunk)
                                  : wait_before<false>(shape, schedule, chunk);
}
// A second one in backward passes: for the segment that held the ring slot, which the caller has to find.
JAXMOE_ANY constexpr Wait wait_for_weight_gradients(const Shape& shape, const Schedule& schedule, int32_t first_tile) {
  return {Signal::kWeightGradientsWritten, first_tile, static_cast<uint32_t>(weight_tasks(shape, schedule.tile))};
}
// Before every task that multiplies decoded weights, and the release by each dispatcher once its share is there.
JAXMOE_ANY constexpr Wait wait_before(const DecodedExpert& weights, int32_t dispatchers) {
  return {Signal::kWeightsDecoded, weights.first_tile, static_cast<uint32_t>(dispatchers)};
}
JAXMOE_ANY constexpr Release release_after(const DecodedExpert& weights) {
  return {Signal::kWeightsDecoded, weights.first_tile, 1};
}
JAXMOE_ANY constexpr Release release_after(const Chunk& chunk) {
  return {Signal::kRowsArrived, chunk.row_tile, static_cast<uint32_t>(chunk.rows)};
}

// One wait, but for weight gradients: one for every row tile of the segment, and one for the sums of the segment
// before.
JAXMOE_ANY constexpr int32_t num_waits(const Schedule& schedule, const Task& task) {
  if (!is_weight_gradient(task.gemm)) return 1;
  return tiles_over(task.rows, schedule.tile.rows) + (task.part == (kFirstPart | kLastPart) ? 0 : 1);
}
JAXMOE_ANY constexpr Wait wait_before(const Shape& shape, const Schedule& schedule, const Task& task, int32_t nth = 0) {
  const auto all = [](int32_t column_tiles) { return static_cast<uint32_t>(column_tiles); };
  switch (task.gemm) {
    case Gemm::kGateUp: return {Signal::kRowsArrived, task.row_tile, static_cast<uint32_t>(task.rows)};
    case Gemm::kHGradient:
      if (task.part & kSavedPart) {
        return {Signal::kRowsArrived, task.row_tile, static_cast<uint32_t>(task.rows)};
      }
      [[fallthrough]];
    case Gemm::kDown:
      return {Signal::kHWritten, task.row_tile, all(h_tiles(shape, schedule.tile))};
    case Gemm::kTokenGradient:
      return {Signal::kHGradientsWritten, task.row_tile, all(gradient_tiles(shape, schedule.tile))};
    default: break;
  }
  if (nth < tiles_over(task.rows, schedule.tile.rows)) {
    return {Signal::kHGradientsWritten, task.row_tile + nth, all(gradient_tiles(shape, schedule.tile))};
  }
  return wait_for_weight_gradients(shape, schedule, task.sums_tile);
}
JAXMOE_ANY constexpr Release release_after(const Task& task) {
  const Signal signal = task.gemm == Gemm::kGateUp           ? Signal::kHWritten
                        : task.gemm == Gemm::kHGradient ? Signal::kHGradientsWritten
                        : is_weight_gradient(task.gemm)      ? Signal::kWeightGradientsWritten
                                                             : Signal::kAnswersWritten;
  return {signal, task.row_tile, static_cast<uint32_t>(task.column_tiles)};
}

// Counters may wrap around after 2^32 launches: "at least" is a signed distance.
JAXMOE_ANY constexpr bool has_reached(uint32_t seen, uint32_t target) {
  return static_cast<int32_t>(seen - target) >= 0;
}

// A wait that was given up.
struct WaitFailure {
  int32_t rank;
  int32_t worker;  // SM of a GPU
  Site site;
  Wait wait;
  uint32_t seen;
};

inline std::string describe(const WaitFailure& failure, double seconds, const char* worker_name) {
  const int32_t signal = static_cast<int32_t>(failure.wait.signal);
  char waited[32];
  std::snprintf(waited, sizeof(waited), "%g", seconds);  // 10, 0.5; std::to_string would say 10.000000
  std::string text = "jaxmoe: rank " + std::to_string(failure.rank) + " " + worker_name + " " +
                     std::to_string(failure.worker) + " " + kSiteNames[static_cast<int32_t>(failure.site)] +
                     " waited " + waited + " s for " + kSignalNames[signal] + "[" +
                     std::to_string(failure.wait.index) + "]: seen " + std::to_string(failure.seen) + " of " +
                     std::to_string(failure.wait.target);
  if (is_from_peers(failure.wait.signal)) text += " (from rank " + std::to_string(failure.wait.index) + ")";
  return text + ".";
}

}  // namespace jaxmoe
