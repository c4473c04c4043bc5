// One rank of the host executor: the roles that forward and backward passes share, each the CPU's version of the file
// of the same name in cuda/kernel/ (exchange/, gemm/). What differs between the passes is virtual: host/forward_rank.h,
// host/backward_rank.h.
//
// Caller: host/executor.cc.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common/chunks.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "host/executor.h"
#include "host/launch.h"
#include "host/signals.h"
#include "host/timeline.h"

namespace jaxmoe::host {

// What lies in the arena of a rank. Free functions, since derived templates name them with a type.
template <class T>
T* at(const Launch& launch, int32_t rank, int64_t offset) {
  return reinterpret_cast<T*>(launch.arenas[rank] + offset);
}
template <class T>
T* at(const Launch& launch, int32_t rank, const Region& region) {
  return at<T>(launch, rank, region.offset);
}

template <class Precision>
class Rank {
 public:
  using Storage = typename Precision::Storage;
  using Number = typename Precision::Number;

  Rank(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays, LaunchTimeline* timeline)
      : launch_(launch), shape_(launch.shape), schedule_(launch.schedule), arrays_(arrays), rank_(rank),
        layout_(layout_of(shape_, schedule_, Formats::of(Precision::kElement), launch.head)),
        sorters_(num_sorters(shape_, schedule_)),
        launch_number_(at<Control>(launch, rank, layout_.control)->launch_number + 1),
        signals_(launch, rank, layout_, launch_number_),
        timeline_(timeline), recorder_(timeline != nullptr, schedule_.workers, schedule_.dispatchers) {}

  virtual ~Rank() = default;

  std::string run() {
    std::vector<std::thread> threads;
    for (int32_t worker = 0; worker < schedule_.workers; ++worker) {
      threads.emplace_back([this, worker] { signals_.guard([&] { work(worker); }); });
    }
    for (int32_t dispatcher = 0; dispatcher < schedule_.dispatchers; ++dispatcher) {
      threads.emplace_back([this, dispatcher] { signals_.guard([&] { dispatch(dispatcher); }); });
    }
    for (std::thread& thread : threads) thread.join();
    if (!signals_.failures().empty()) return signals_.failures();
    at<Control>(launch_, rank_, layout_.control)->launch_number = launch_number_;
    if (timeline_ != nullptr) {
      *timeline_ = recorder_.collect(rank_, shape_.ranks, rank_, launch_number_, schedule_.backward());
    }
    return "";
  }

 protected:
  // --- what a pass does its own way

  // After clear_other_bank(): what peers will read, by every worker its share.
  virtual void publish(int32_t worker) = 0;
  // Once the counts are known, by every worker its share.
  virtual void begin(const std::vector<int32_t>& /*rows_per_expert*/, int32_t /*worker*/) {}
  virtual void compute(const Task& task) = 0;
  // Fills a row of the ring, beyond what copy_token() has put there. `slot` is -1 for a row of zeros.
  virtual void note_row(int32_t /*ring_slot*/, int32_t /*tile_row*/, int32_t /*source*/, int32_t /*slot*/) {}
  virtual void combine(int32_t worker) = 0;

  // --- memory -------------------------------------------------------------------------------------------------------

  // Of a row of tokens, and of one of the ring.
  int32_t row_width() const { return row_parts(schedule_) * shape_.hidden; }
  Storage* ring_row(const Region& ring, int32_t ring_slot, int32_t tile_row, int32_t width) const {
    return at<Storage>(launch_, rank_, ring) + (int64_t{ring_slot} * schedule_.tile.rows + tile_row) * width;
  }
  uint32_t* target_of(int32_t ring_slot, int32_t tile_row) const {
    return at<uint32_t>(launch_, rank_, layout_.row_targets) + int64_t{ring_slot} * schedule_.tile.rows + tile_row;
  }

  // --- what the walks need -------------------------------------------------------------------------------------------

  struct RowCounts {
    std::vector<int32_t> from_source;      // [ranks][local_experts]
    std::vector<int32_t> rows_per_expert;  // [local_experts], of all sources, and rows of zeros; marked where none
    std::vector<int32_t> first_slot;    // [ranks][local_experts] of an expert's slots in a source's list
  };

  // --- a worker -----------------------------------------------------------------------------------------------------

  void work(int32_t worker) {
    TrackRecorder track = recorder_.of_worker(worker);
    clear_other_bank(worker);
    sort_slots(worker);
    track.mark(EventKind::kSort);
    forget_kept_tokens(worker);
    publish(worker);
    track.mark(EventKind::kCopyInputs);
    signals_.release({Signal::kInputsPublished, 0, 1});
    if (worker == 0) {
      // Pairs with the release that every worker has just done.
      signals_.wait({Signal::kInputsPublished, 0, static_cast<uint32_t>(schedule_.workers)}, Site::kPublish, worker);
      signals_.release_to_all(Signal::kInputsReady);
    }
    track.mark(EventKind::kPublish);
    const RowCounts counts = wait_for_counts(worker);
    track.mark(EventKind::kWaitInputs);
    track.move_to(TrackRole::kMath);
    begin(counts.rows_per_expert, worker);
    if (schedule_.backward()) {
      take_tasks<Pass::kBackward>(counts, worker, track);
    } else {
      take_tasks<Pass::kForward>(counts, worker, track);
    }
    signals_.release({Signal::kTasksDone, 0, 1});
    if (worker == 0) {
      // Pairs with the release that every worker has just done.
      signals_.wait({Signal::kTasksDone, 0, static_cast<uint32_t>(schedule_.workers)}, Site::kAnnounce, worker);
      signals_.release_to_all(Signal::kAnswersReady);
      track.mark(EventKind::kWaitTasks);
    }
    wait_for_answers(worker);
    track.mark(EventKind::kWaitAnswers);
    combine(worker);
    track.mark(EventKind::kCombine);
  }

  template <Pass kPass>
  void take_tasks(const RowCounts& counts, int32_t worker, TrackRecorder& track) {
    TaskWalk<kPass> walk(shape_, schedule_, counts.rows_per_expert.data());
    Control& control = *at<Control>(launch_, rank_, layout_.control);
    const std::atomic_ref<uint32_t> taken(control.tasks_taken[launch_number_ & 1]);
    for (Task task; walk.seek(static_cast<int32_t>(taken.fetch_add(1, std::memory_order_relaxed)), task);) {
      for (int32_t nth = 0; nth < num_waits(schedule_, task); ++nth) {
        // Gate/up pairs with the release in dispatch, every other GEMM with that of the one before it, below.
        const Wait wait = wait_before(shape_, schedule_, task, nth);
        if (wait.index >= 0) signals_.wait(wait, site_of(task.gemm), worker);
      }
      track.mark(wait_event_of(task.gemm), task);
      compute(task);
      signals_.release(release_after(task));
      track.mark(event_of(task.gemm), task);
    }
  }

  struct Span {
    int64_t begin, end;
  };
  static Span share(int64_t count, int32_t part, int32_t parts) {
    const int64_t size = ceil_div(count, int64_t{parts});
    return {std::min(count, size * part), std::min(count, size * (part + 1))};
  }

  void clear_other_bank(int32_t worker) {
    const Span words = share(counter_words(launch_.head), worker, schedule_.workers);
    const int64_t first = word_of(layout_, launch_.head, launch_number_ + 1, Signal::kHistogramsWritten, 0);
    uint32_t* bank = at<uint32_t>(launch_, rank_, first);
    std::fill(bank + words.begin, bank + words.end, 0);
    if (worker == 0) at<Control>(launch_, rank_, layout_.control)->tasks_taken[(launch_number_ + 1) & 1] = 0;
  }

  // --- sort: sorts this rank's slots by expert, stably, and writes each owner its list and counts --------------------

  void sort_slots(int32_t sorter) {
    if (sorter >= sorters_) return;
    const Span slots = share(shape_.slots(), sorter, sorters_);
    int32_t* histograms = at<int32_t>(launch_, rank_, layout_.histograms);
    int32_t* own = histograms + int64_t{sorter} * shape_.num_experts;
    std::fill(own, own + shape_.num_experts, 0);
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      if (shape_.has_expert(arrays_.topk_ids[slot])) ++own[arrays_.topk_ids[slot]];
    }
    signals_.release({Signal::kHistogramsWritten, 0, 1});
    // Pairs with the release that every sorter has just done.
    signals_.wait({Signal::kHistogramsWritten, 0, static_cast<uint32_t>(sorters_)}, Site::kSort, sorter);

    const int32_t local = shape_.local_experts();
    std::vector<int32_t> next(shape_.num_experts);  // position in the owner's list of this sorter's next slot
    for (int32_t owner = 0; owner < shape_.ranks; ++owner) {
      int32_t before = 0;
      for (int32_t expert = owner * local; expert < (owner + 1) * local; ++expert) {
        int32_t total = 0;
        for (int32_t other = 0; other < sorters_; ++other) {
          if (other == sorter) next[expert] = before + total;
          total += histograms[int64_t{other} * shape_.num_experts + expert];
        }
        before += total;
        if (sorter == 0) {
          const int64_t ends = rows_from_source(layout_, launch_.head, launch_number_, rank_);
          at<int32_t>(launch_, owner, ends)[expert - owner * local] = before;
        }
      }
    }
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      const int32_t expert = arrays_.topk_ids[slot];
      if (!shape_.has_expert(expert)) continue;
      at<int32_t>(launch_, expert / local, slots_from_source(layout_, launch_.head, rank_))[next[expert]++] =
          static_cast<int32_t>(slot);
    }
  }

  // --- publish -------------------------------------------------------------------------------------------------------

  // Before this rank says that its inputs are ready, which its own dispatchers wait for too.
  void forget_kept_tokens(int32_t worker) {
    const Span states = share(layout_.kept_states.bytes / sizeof(uint32_t), worker, schedule_.workers);
    uint32_t* kept_states = at<uint32_t>(launch_, rank_, layout_.kept_states);
    std::fill(kept_states + states.begin, kept_states + states.end, static_cast<uint32_t>(KeptState::kAbsent));
  }

  // --- what a forward pass leaves to the backward pass ---------------------------------------------------------------

  // Gate (0) or up (1) of a row of a tile that is saved.
  Storage* saved_row(int32_t row_tile, int32_t tile_row, int32_t which) const {
    const int64_t row = int64_t{row_tile} * schedule_.tile.rows + tile_row;
    return arrays_.gate_up + (row * shape_.projections + which) * shape_.intermediate;
  }

  // --- counts --------------------------------------------------------------------------------------------------------

  RowCounts wait_for_counts(int32_t worker) {
    const int32_t local = shape_.local_experts();
    RowCounts counts{std::vector<int32_t>(shape_.ranks * local), std::vector<int32_t>(local, 0),
                     std::vector<int32_t>(shape_.ranks * local)};
    for (int32_t source = 0; source < shape_.ranks; ++source) {
      // Pairs with release_to_all(kInputsReady) of the source's first worker.
      signals_.wait({Signal::kInputsReady, source, launch_number_}, Site::kWalk, worker);
      const int64_t offset = rows_from_source(layout_, launch_.head, launch_number_, source);
      const int32_t* ends = at<int32_t>(launch_, rank_, offset);
      int32_t start = 0;
      for (int32_t expert = 0; expert < local; ++expert) {
        counts.from_source[source * local + expert] = ends[expert] - start;
        counts.first_slot[source * local + expert] = start;
        counts.rows_per_expert[expert] += ends[expert] - start;
        start = ends[expert];
      }
    }
    const int32_t multiple = schedule_.row_multiple();
    for (int32_t& rows : counts.rows_per_expert) rows = padded_rows(rows, multiple);
    mark_experts_without_rows(counts.rows_per_expert.data(), local);
    return counts;
  }

  // --- dispatch: pulls rows from their owners into the ring ----------------------------------------------------------

  void dispatch(int32_t dispatcher) {
    const int32_t worker = dispatcher / launch_.dispatchers_per_worker;
    TrackRecorder track = recorder_.of_dispatcher(dispatcher, launch_.dispatchers_per_worker);
    const RowCounts counts = wait_for_counts(worker);
    track.mark(EventKind::kWaitInputs);
    const int32_t local = shape_.local_experts();
    ChunkWalk walk(shape_, schedule_, counts.rows_per_expert.data(), dispatcher);
    SegmentWalk overwritten(schedule_, counts.rows_per_expert.data(), local);
    Segment segment{};  // that had the ring slot before
    for (Chunk chunk; walk.next(chunk);) {
      // The slot is free once its last tile has left. Pairs with the release after its tasks, in take_tasks().
      const EventSubject subject{chunk.expert, chunk.row_tile, chunk.tile_row};
      const Wait wait = wait_before(shape_, schedule_, chunk);
      signals_.wait(wait, Site::kDispatch, worker);
      if (schedule_.backward() && wait.index >= 0) {
        while (segment.first_tile + segment.tiles <= wait.index) overwritten.next(segment);
        signals_.wait(wait_for_weight_gradients(shape_, schedule_, segment.first_tile), Site::kDispatch, worker);
      }
      track.mark(EventKind::kWaitSlot, subject);
      for (int32_t i = 0; i < chunk.rows; ++i) {
        const RowSource from = source_of_row(counts.from_source.data() + chunk.expert, local, shape_.ranks, rank_,
                                             chunk.first_row + i);
        Storage* row = ring_row(layout_.rows, chunk.ring_slot, chunk.tile_row + i, row_width());
        if (from.source < 0) {  // behind the last row of the expert
          std::fill(row, row + row_width(), Storage{0});
          *target_of(chunk.ring_slot, chunk.tile_row + i) = RowTarget::kNone;
          note_row(chunk.ring_slot, chunk.tile_row + i, -1, -1);
          continue;
        }
        const int32_t slot = at<int32_t>(launch_, rank_, slots_from_source(layout_, launch_.head, from.source))
            [counts.first_slot[from.source * local + chunk.expert] + from.position];
        const Storage* tokens =
            publishes_tokens(shape_, schedule_) ? at<Storage>(launch_, from.source, layout_.tokens) : arrays_.x;
        copy_token(tokens + int64_t{slot / shape_.top_k} * row_width(), from.source, slot / shape_.top_k, row);
        *target_of(chunk.ring_slot, chunk.tile_row + i) = RowTarget::of(from.source, slot).packed;
        note_row(chunk.ring_slot, chunk.tile_row + i, from.source, slot);
      }
      signals_.release(release_after(chunk));
      track.mark(EventKind::kDispatch, subject);
    }
  }

  // The token as its owner has it, or as an earlier pull has kept it.
  void copy_token(const Storage* token, int32_t source, int32_t number, Storage* row) {
    if (!schedule_.keep_tokens || source == rank_) {
      std::copy(token, token + row_width(), row);
      return;
    }
    const int64_t index = kept_index(shape_, rank_, source, number);
    Storage* kept = at<Storage>(launch_, rank_, layout_.kept_tokens) + index * row_width();
    const std::atomic_ref<uint32_t> state(at<uint32_t>(launch_, rank_, layout_.kept_states)[index]);
    uint32_t seen = static_cast<uint32_t>(KeptState::kAbsent);
    if (state.compare_exchange_strong(seen, static_cast<uint32_t>(KeptState::kComing), std::memory_order_acquire)) {
      std::copy(token, token + row_width(), kept);
      signals_.delay();
      state.store(static_cast<uint32_t>(KeptState::kKept), std::memory_order_release);
    } else if (seen == static_cast<uint32_t>(KeptState::kKept)) {
      token = kept;
    }
    std::copy(token, token + row_width(), row);
  }

  // --- products ------------------------------------------------------------------------------------------------------

  static Number bias_of(const Storage* bias, int64_t index) { return bias == nullptr ? 0 : Precision::load(bias[index]); }

  // sums[c] = sum over k of row[k] * weights[k, first + c], for one row and `columns` columns of a [depth, width]
  // matrix.
  static void multiply_row(const Storage* row, const Storage* weights, int32_t depth, int32_t width, int32_t first,
                           int32_t columns, Number* sums) {
    for (int32_t c = 0; c < columns; ++c) sums[c] = 0;  // of std::fill g++ 13 thinks that columns may be negative
    for (int32_t k = 0; k < depth; ++k) {
      const Number factor = Precision::load(row[k]);
      const Storage* line = weights + int64_t{k} * width + first;
      for (int32_t c = 0; c < columns; ++c) sums[c] += factor * Precision::load(line[c]);
    }
  }

  // --- combine: adds up the answers of each token's experts, in the order of its slots -------------------------------

  void wait_for_answers(int32_t worker) {
    for (int32_t source = 0; source < shape_.ranks; ++source) {
      // Pairs with release_to_all(kAnswersReady) of the source's first worker.
      signals_.wait({Signal::kAnswersReady, source, launch_number_}, Site::kCombine, worker);
    }
  }

  const Launch& launch_;
  const Shape shape_;
  const Schedule schedule_;
  const ArraysOf<Precision>& arrays_;
  const int32_t rank_;
  const ArenaLayout layout_;
  const int32_t sorters_;
  const uint32_t launch_number_;
  Signals signals_;
  LaunchTimeline* const timeline_;
  RankTimeline recorder_;
};

}  // namespace jaxmoe::host
