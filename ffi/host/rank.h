// One rank of the host executor: its roles, each the CPU's version of the file of the same name in
// cuda/kernel/exchange/, and the walk over the tasks, which products.h computes. Caller: host/executor.cc.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "common/chunks.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "host/decode.h"
#include "host/executor.h"
#include "host/launch.h"
#include "host/products.h"
#include "host/rank_memory.h"
#include "host/scaled_rows.h"
#include "host/signals.h"
#include "host/timeline.h"

namespace jaxmoe::host {

template <Pass kPass, class Precision>
class Rank {
  using Storage = typename Precision::Storage;
  using RowStorage = typename Precision::Row::Storage;
  using Number = typename Precision::Number;

  static constexpr bool kBackward = kPass == Pass::kBackward;

 public:
  Rank(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays, LaunchTimeline* timeline)
      : m_(launch, rank, arrays), products_(m_), sorters_(num_sorters(m_.shape, m_.schedule)),
        launch_number_(m_.control().launch_number + 1), signals_(launch, rank, m_.layout, launch_number_),
        timeline_(timeline), recorder_(timeline != nullptr, m_.schedule.workers, m_.schedule.dispatchers) {}

  std::string run() {
    std::vector<std::thread> threads;
    for (int32_t worker = 0; worker < m_.schedule.workers; ++worker) {
      threads.emplace_back([this, worker] { signals_.guard([&] { work(worker); }); });
    }
    for (int32_t dispatcher = 0; dispatcher < m_.schedule.dispatchers; ++dispatcher) {
      threads.emplace_back([this, dispatcher] { signals_.guard([&] { dispatch(dispatcher); }); });
    }
    for (std::thread& thread : threads) thread.join();
    if (!signals_.failures().empty()) return signals_.failures();
    m_.control().launch_number = launch_number_;
    if (timeline_ != nullptr) {
      *timeline_ = recorder_.collect(m_.rank, m_.shape.ranks, m_.rank, launch_number_, m_.schedule.backward());
    }
    return "";
  }

 private:
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
      signals_.wait({Signal::kInputsPublished, 0, static_cast<uint32_t>(m_.schedule.workers)}, Site::kPublish, worker);
      signals_.release_to_all(Signal::kInputsReady);
    }
    track.mark(EventKind::kPublish);
    const RowCounts counts = wait_for_counts(worker);
    track.mark(EventKind::kWaitInputs);
    track.move_to(TrackRole::kMath);
    if constexpr (kBackward) clear_unused_gradients(counts.rows_per_expert, worker);
    take_tasks(counts, worker, track);
    signals_.release({Signal::kTasksDone, 0, 1});
    if (worker == 0) {
      // Pairs with the release that every worker has just done.
      signals_.wait({Signal::kTasksDone, 0, static_cast<uint32_t>(m_.schedule.workers)}, Site::kAnnounce, worker);
      signals_.release_to_all(Signal::kAnswersReady);
      track.mark(EventKind::kWaitTasks);
    }
    wait_for_answers(worker);
    track.mark(EventKind::kWaitAnswers);
    combine(worker);
    track.mark(EventKind::kCombine);
  }

  void take_tasks(const RowCounts& counts, int32_t worker, TrackRecorder& track) {
    TaskWalk<kPass> walk(m_.shape, m_.schedule, counts.rows_per_expert.data());
    const std::atomic_ref<uint32_t> taken(m_.control().tasks_taken[launch_number_ & 1]);
    for (Task task; walk.seek(static_cast<int32_t>(taken.fetch_add(1, std::memory_order_relaxed)), task);) {
      for (int32_t nth = 0; nth < num_waits(m_.schedule, task); ++nth) {
        // Gate/up pairs with the release in dispatch, every other GEMM with that of the one before it, below.
        const Wait wait = wait_before(m_.shape, m_.schedule, task, nth);
        if (wait.index >= 0) signals_.wait(wait, site_of(task.gemm), worker);
      }
      int32_t weight_slot = 0;
      if (m_.schedule.decodes()) {
        // Pairs with the releases in decode().
        signals_.wait(wait_before(walk.weights(), m_.schedule.dispatchers), site_of(task.gemm), worker);
        weight_slot = walk.weights().weight_slot(m_.schedule);
      }
      track.mark(wait_event_of(task.gemm), task);
      products_.compute(task, weight_slot);
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
    const Span words = share(counter_words(m_.launch.head), worker, m_.schedule.workers);
    const int64_t first = word_of(m_.layout, m_.launch.head, launch_number_ + 1, Signal::kHistogramsWritten, 0);
    uint32_t* bank = m_.template here<uint32_t>(first);
    std::fill(bank + words.begin, bank + words.end, 0);
    if (worker == 0) m_.control().tasks_taken[(launch_number_ + 1) & 1] = 0;
  }

  // --- sort: sorts this rank's slots by expert, stably, and writes each owner its list and counts --------------------

  void sort_slots(int32_t sorter) {
    if (sorter >= sorters_) return;
    const Span slots = share(m_.shape.slots(), sorter, sorters_);
    int32_t* histograms = m_.template here<int32_t>(m_.layout.histograms);
    int32_t* own = histograms + int64_t{sorter} * m_.shape.num_experts;
    std::fill(own, own + m_.shape.num_experts, 0);
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      if (m_.shape.has_expert(m_.arrays.topk_ids[slot])) ++own[m_.arrays.topk_ids[slot]];
    }
    signals_.release({Signal::kHistogramsWritten, 0, 1});
    // Pairs with the release that every sorter has just done.
    signals_.wait({Signal::kHistogramsWritten, 0, static_cast<uint32_t>(sorters_)}, Site::kSort, sorter);

    const int32_t local = m_.shape.local_experts();
    std::vector<int32_t> next(m_.shape.num_experts);  // position in the owner's list of this sorter's next slot
    for (int32_t owner = 0; owner < m_.shape.ranks; ++owner) {
      int32_t before = 0;
      for (int32_t expert = owner * local; expert < (owner + 1) * local; ++expert) {
        int32_t total = 0;
        for (int32_t other = 0; other < sorters_; ++other) {
          if (other == sorter) next[expert] = before + total;
          total += histograms[int64_t{other} * m_.shape.num_experts + expert];
        }
        before += total;
        if (sorter == 0) {
          const int64_t ends = rows_from_source(m_.layout, m_.launch.head, launch_number_, m_.rank);
          m_.template at<int32_t>(owner, ends)[expert - owner * local] = before;
        }
      }
    }
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      const int32_t expert = m_.arrays.topk_ids[slot];
      if (!m_.shape.has_expert(expert)) continue;
      m_.template at<int32_t>(expert / local, slots_from_source(m_.layout, m_.launch.head, m_.rank))[next[expert]++] =
          static_cast<int32_t>(slot);
    }
  }

  // --- publish -------------------------------------------------------------------------------------------------------

  // To where peers can read them: tokens; in a backward pass beside each the gradient of its output, and routing
  // weights. One rank alone reads its tokens where they lie in a forward pass, unless they are rounded on the way.
  void publish(int32_t worker) {
    if (!publishes_tokens(m_.shape, m_.schedule, m_.formats.tokens.is_scaled())) return;
    const int32_t hidden = m_.shape.hidden;
    const Span tokens = share(m_.shape.tokens, worker, m_.schedule.workers);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      const Storage* x = m_.arrays.x + token * hidden;
      RowStorage* row = m_.template here<RowStorage>(m_.layout.tokens) + token * m_.row_width();
      if constexpr (Precision::kScaled) {
        float* scales = m_.scales_of_token(m_.rank, m_.layout.tokens, m_.shape.tokens, token);
        for (int32_t c = 0; c < hidden; c += kScaleColumns) {
          scales[c / kScaleColumns] = round_columns<Precision>(x + c, m_.launch.power_of_two_scales, row + c);
        }
      } else {
        std::copy_n(x, hidden, row);
      }
      if constexpr (kBackward) {
        std::copy_n(m_.arrays.dy + token * hidden, hidden, row + hidden);
        const int64_t slots = token * m_.shape.top_k;
        std::copy_n(m_.arrays.topk_weights + slots, m_.shape.top_k,
                    m_.template here<Number>(m_.layout.routing_weights) + slots);
      }
    }
  }

  // Before this rank says that its inputs are ready, which its own dispatchers wait for too.
  void forget_kept_tokens(int32_t worker) {
    const Span states = share(m_.layout.kept_states.bytes / sizeof(uint32_t), worker, m_.schedule.workers);
    uint32_t* kept_states = m_.template here<uint32_t>(m_.layout.kept_states);
    std::fill(kept_states + states.begin, kept_states + states.end, static_cast<uint32_t>(KeptState::kAbsent));
  }

  // --- counts --------------------------------------------------------------------------------------------------------

  RowCounts wait_for_counts(int32_t worker) {
    const int32_t local = m_.shape.local_experts();
    RowCounts counts{std::vector<int32_t>(m_.shape.ranks * local), std::vector<int32_t>(local, 0),
                     std::vector<int32_t>(m_.shape.ranks * local)};
    for (int32_t source = 0; source < m_.shape.ranks; ++source) {
      // Pairs with release_to_all(kInputsReady) of the source's first worker.
      signals_.wait({Signal::kInputsReady, source, launch_number_}, Site::kWalk, worker);
      const int64_t offset = rows_from_source(m_.layout, m_.launch.head, launch_number_, source);
      const int32_t* ends = m_.template here<int32_t>(offset);
      int32_t start = 0;
      for (int32_t expert = 0; expert < local; ++expert) {
        counts.from_source[source * local + expert] = ends[expert] - start;
        counts.first_slot[source * local + expert] = start;
        counts.rows_per_expert[expert] += ends[expert] - start;
        start = ends[expert];
      }
    }
    const int32_t multiple = m_.schedule.row_multiple();
    for (int32_t& rows : counts.rows_per_expert) rows = padded_rows(rows, multiple);
    mark_experts_without_rows(counts.rows_per_expert.data(), local);
    return counts;
  }

  // No task writes the gradients of an expert without rows.
  void clear_unused_gradients(const std::vector<int32_t>& rows_per_expert, int32_t worker) {
    for (int32_t expert = 0; expert < m_.shape.local_experts(); ++expert) {
      if (rows_per_expert[expert] > 0) continue;
      const auto clear = [&](void* gradient, int64_t size) {
        if (gradient == nullptr) return;
        const int64_t bytes = size * static_cast<int64_t>(m_.arrays.wide_gradients ? sizeof(Number) : sizeof(Storage));
        const Span own = share(bytes, worker, m_.schedule.workers);
        std::memset(static_cast<std::byte*>(gradient) + expert * bytes + own.begin, 0, own.end - own.begin);
      };
      const int64_t matrix = int64_t{m_.shape.hidden} * m_.shape.intermediate;
      clear(m_.arrays.dw_gate, matrix);
      clear(m_.arrays.dw_up, matrix);
      clear(m_.arrays.dw_down, matrix);
      clear(m_.arrays.db_gate, m_.shape.intermediate);
      clear(m_.arrays.db_up, m_.shape.intermediate);
      clear(m_.arrays.db_down, m_.shape.hidden);
    }
  }

  // --- dispatch: pulls rows from their owners into the ring ----------------------------------------------------------

  void dispatch(int32_t dispatcher) {
    const int32_t worker = dispatcher / m_.launch.dispatchers_per_worker;
    TrackRecorder track = recorder_.of_dispatcher(dispatcher, m_.launch.dispatchers_per_worker);
    const RowCounts counts = wait_for_counts(worker);
    track.mark(EventKind::kWaitInputs);
    const int32_t local = m_.shape.local_experts();
    ChunkWalk walk(m_.shape, m_.schedule, counts.rows_per_expert.data(), dispatcher);
    SegmentWalk overwritten(m_.schedule, counts.rows_per_expert.data(), local);
    Segment segment{};  // that had the ring slot before
    DecoderOf<Precision> decoder(m_, counts.rows_per_expert.data(), dispatcher);
    for (Chunk chunk; walk.next(chunk);) {
      decoder.decode_up_to(chunk.expert, signals_, worker);
      // The slot is free once its last tile has left. Pairs with the release after its tasks, in take_tasks().
      const EventSubject subject{chunk.expert, chunk.row_tile, chunk.tile_row};
      const Wait wait = wait_before(m_.shape, m_.schedule, chunk);
      signals_.wait(wait, Site::kDispatch, worker);
      if (m_.schedule.has_weight_gradients() && wait.index >= 0) {
        while (segment.first_tile + segment.tiles <= wait.index) overwritten.next(segment);
        signals_.wait(wait_for_weight_gradients(m_.shape, m_.schedule, segment.first_tile), Site::kDispatch, worker);
      }
      track.mark(EventKind::kWaitSlot, subject);
      for (int32_t i = 0; i < chunk.rows; ++i) {
        const RowSource from = source_of_row(counts.from_source.data() + chunk.expert, local, m_.shape.ranks, m_.rank,
                                             chunk.first_row + i);
        if (from.source < 0) {  // behind the last row of the expert
          std::fill_n(m_.ring_row(m_.layout.rows, chunk.ring_slot, chunk.tile_row + i, m_.row_width()), m_.row_width(),
                      RowStorage{0});
          *m_.target_of(chunk.ring_slot, chunk.tile_row + i) = RowTarget::kNone;
          if constexpr (kBackward) *m_.routing_weight_of(chunk.ring_slot, chunk.tile_row + i) = Number{0};
          continue;
        }
        const int32_t slot = m_.template here<int32_t>(slots_from_source(m_.layout, m_.launch.head, from.source))
            [counts.first_slot[from.source * local + chunk.expert] + from.position];
        copy_token(from.source, slot / m_.shape.top_k, chunk.ring_slot, chunk.tile_row + i);
        *m_.target_of(chunk.ring_slot, chunk.tile_row + i) = RowTarget::of(from.source, slot).packed;
        if constexpr (kBackward) {
          *m_.routing_weight_of(chunk.ring_slot, chunk.tile_row + i) =
              m_.template at<Number>(from.source, m_.layout.routing_weights)[slot];
        }
      }
      signals_.release(release_after(chunk));
      track.mark(EventKind::kDispatch, subject);
    }
    decoder.decode_up_to(local, signals_, worker);
  }

  // A token as its owner has it, or as an earlier pull has kept it; scales where it has some.
  struct Token {
    const RowStorage* elements;
    const float* scales;
  };
  Token token_of_owner(int32_t owner, int32_t number) const {
    if constexpr (!Precision::kScaled) {
      if (!publishes_tokens(m_.shape, m_.schedule, m_.formats.tokens.is_scaled())) {
        return {m_.arrays.x + int64_t{number} * m_.row_width(), nullptr};
      }
    }
    return {m_.template at<RowStorage>(owner, m_.layout.tokens) + int64_t{number} * m_.row_width(),
            m_.scales_of_token(owner, m_.layout.tokens, m_.shape.tokens, number)};
  }

  void copy_token(int32_t source, int32_t number, int32_t ring_slot, int32_t tile_row) {
    Token token = token_of_owner(source, number);
    if (m_.schedule.keep_tokens && source != m_.rank) token = keep_token(token, source, number);
    std::copy_n(token.elements, m_.row_width(),
                m_.ring_row(m_.layout.rows, ring_slot, tile_row, m_.row_width()));
    for (int32_t block = 0; block < m_.token_scales(); ++block) {
      m_.ring_row_scale(m_.layout.rows, ring_slot, tile_row, m_.row_width(), block) = token.scales[block];
    }
  }

  // Keeps the token where nobody has begun to. Returns the kept one where that is there, else the owner's.
  Token keep_token(const Token& token, int32_t source, int32_t number) {
    const int64_t index = kept_index(m_.shape, m_.rank, source, number);
    RowStorage* elements = m_.template here<RowStorage>(m_.layout.kept_tokens) + index * m_.row_width();
    float* scales =
        m_.scales_of_token(m_.rank, m_.layout.kept_tokens, int64_t{m_.shape.ranks - 1} * m_.shape.tokens, index);
    const std::atomic_ref<uint32_t> state(m_.template here<uint32_t>(m_.layout.kept_states)[index]);
    uint32_t seen = static_cast<uint32_t>(KeptState::kAbsent);
    if (state.compare_exchange_strong(seen, static_cast<uint32_t>(KeptState::kComing), std::memory_order_acquire)) {
      std::copy_n(token.elements, m_.row_width(), elements);
      std::copy_n(token.scales, m_.token_scales(), scales);
      signals_.delay();
      state.store(static_cast<uint32_t>(KeptState::kKept), std::memory_order_release);
    } else if (seen == static_cast<uint32_t>(KeptState::kKept)) {
      return {elements, scales};
    }
    return token;
  }

  // --- combine: adds up the answers of each token's experts, in the order of its slots -------------------------------

  void wait_for_answers(int32_t worker) {
    for (int32_t source = 0; source < m_.shape.ranks; ++source) {
      // Pairs with release_to_all(kAnswersReady) of the source's first worker.
      signals_.wait({Signal::kAnswersReady, source, launch_number_}, Site::kCombine, worker);
    }
  }

  void combine(int32_t worker) {
    const Span tokens = share(m_.shape.tokens, worker, m_.schedule.workers);
    Storage* const results = kBackward ? m_.arrays.dx : m_.arrays.y;
    std::vector<Number> sums(m_.shape.hidden);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      std::fill(sums.begin(), sums.end(), Number{0});
      for (int64_t slot = token * m_.shape.top_k; slot < (token + 1) * m_.shape.top_k; ++slot) {
        const bool used = m_.shape.has_expert(m_.arrays.topk_ids[slot]);
        if constexpr (kBackward) {
          m_.arrays.dtopk_weights[slot] =
              used ? m_.template here<Number>(m_.layout.routing_weight_gradients)[slot] : Number{0};
        }
        if (!used) continue;
        const Storage* answer = m_.template here<Storage>(m_.layout.answers) + slot * m_.shape.hidden;
        const Number weight = kBackward ? Number{1} : m_.arrays.topk_weights[slot];  // in dx it is in each answer
        for (int32_t c = 0; c < m_.shape.hidden; ++c) sums[c] += weight * Precision::load(answer[c]);
      }
      std::transform(sums.begin(), sums.end(), results + token * m_.shape.hidden, Precision::store);
    }
  }

  const RankMemory<Precision> m_;  // sizes, arrays, arenas
  Products<Precision> products_;
  const int32_t sorters_;
  const uint32_t launch_number_;
  Signals signals_;
  LaunchTimeline* const timeline_;
  RankTimeline recorder_;
};

}  // namespace jaxmoe::host
