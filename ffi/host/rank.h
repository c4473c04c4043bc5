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
#include "host/masked_experts.h"
#include "host/products.h"
#include "host/rank_memory.h"
#include "host/rank_roles.h"
#include "host/sums_at_experts.h"
#include "host/timeline.h"

namespace jaxmoe::host {

template <Pass kPass, class Precision>
class Rank : RankRoles<Precision> {
  using Roles = RankRoles<Precision>;
  using typename Roles::Number;
  using typename Roles::RowCounts;
  using typename Roles::RowStorage;
  using typename Roles::Span;
  using typename Roles::Storage;
  using Roles::launch_number_;
  using Roles::m_;
  using Roles::share;
  using Roles::signals_;

  static constexpr bool kBackward = kPass == Pass::kBackward;

 public:
  Rank(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays, LaunchTimeline* timeline)
      : Roles(launch, rank, arrays), products_(m_), sums_(m_), timeline_(timeline), recorder_(timeline != nullptr, m_.schedule.workers, m_.schedule.dispatchers) {}

  std::string run() {
    std::vector<std::thread> threads;
    Roles::start(threads, m_.schedule.workers, [this](int32_t worker) { work(worker); });
    Roles::start(threads, m_.schedule.dispatchers, [this](int32_t dispatcher) { dispatch(dispatcher); });
    if (std::string failures = Roles::finish(threads); !failures.empty()) return failures;
    if (timeline_ != nullptr) {
      *timeline_ = recorder_.collect(m_.rank, m_.shape.ranks, m_.rank, launch_number_, m_.schedule.backward());
    }
    return "";
  }

 private:
  // --- a worker -----------------------------------------------------------------------------------------------------

  void work(int32_t worker) {
    TrackRecorder track = recorder_.of_worker(worker);
    Roles::clear_other_bank(worker);
    Roles::sort_slots(worker);
    track.mark(EventKind::kSort);
    Roles::forget_kept_tokens(worker);
    Roles::publish_tokens(worker);
    if (kBackward || m_.schedule.sums_at_experts()) Roles::publish_weights(m_.arrays.topk_weights, worker);
    if (m_.schedule.sums_at_experts()) {
      const Span places = share(sums_.num_places(), worker, m_.schedule.workers);
      sums_.forget(places.begin, places.end);
    }
    track.mark(EventKind::kCopyInputs);
    Roles::tell_all(worker, Signal::kInputsPublished, Signal::kInputsReady, Site::kPublish);
    track.mark(EventKind::kPublish);
    const RowCounts counts = Roles::wait_for_counts(worker);
    track.mark(EventKind::kWaitInputs);
    track.move_to(TrackRole::kMath);
    if constexpr (kBackward) clear_unused_gradients(counts.rows_per_expert, worker);
    take_tasks(counts, worker, track);
    if (m_.schedule.sums_at_experts()) {
      add_up_for_peers(worker, track);
      Roles::tell_all(worker, Signal::kSumsWritten, Signal::kAnswersReady, Site::kAnnounce);
    } else {
      Roles::tell_all(worker, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    }
    if (worker == 0) track.mark(EventKind::kWaitTasks);
    Roles::wait_for_all(Signal::kAnswersReady, Site::kCombine, worker);
    track.mark(EventKind::kWaitAnswers);
    combine(worker);
    track.mark(EventKind::kCombine);
  }

  void take_tasks(const RowCounts& counts, int32_t worker, TrackRecorder& track) {
    const MaskedExperts masked(m_.schedule, counts.rows_per_expert.data(), m_.shape.local_experts());
    TaskWalk<kPass> walk(m_.shape, m_.schedule, counts.rows_per_expert.data(), masked.narrow());
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
      track.mark(wait_event_of(task), task);
      products_.compute(task, weight_slot);
      signals_.release(release_after(task));
      track.mark(event_of(task.gemm), task);
    }
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
      // Gate's, and up's where that is in the same array.
      const int64_t width = m_.arrays.gate_up_pitch(m_.shape.intermediate);
      const bool fused = m_.arrays.fused();
      clear(m_.arrays.dw_gate, m_.shape.hidden * width);
      clear(fused ? nullptr : m_.arrays.dw_up, matrix);
      clear(m_.arrays.dw_down, matrix);
      clear(m_.arrays.db_gate, width);
      clear(fused ? nullptr : m_.arrays.db_up, m_.shape.intermediate);
      clear(m_.arrays.db_down, m_.shape.hidden);
    }
  }

  // --- dispatch: pulls rows from their owners into the ring ----------------------------------------------------------

  void dispatch(int32_t dispatcher) {
    const int32_t worker = dispatcher / m_.launch.dispatchers_per_worker;
    TrackRecorder track = recorder_.of_dispatcher(dispatcher, m_.launch.dispatchers_per_worker);
    const RowCounts counts = Roles::wait_for_counts(worker);
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
        Roles::copy_token(from.source, slot / m_.shape.top_k, chunk.ring_slot, chunk.tile_row + i);
        const RowTarget target = m_.schedule.sums_at_experts()
                                     ? sums_.place(from.source, slot, chunk.row_tile, chunk.tile_row + i)
                                     : RowTarget::of(from.source, slot);
        *m_.target_of(chunk.ring_slot, chunk.tile_row + i) = target.packed;
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

  // --- combine: adds up the answers of each token's experts, in the order of its slots -------------------------------

  // Where sums are made here: those of the tokens of all ranks, once all answers are there.
  void add_up_for_peers(int32_t worker, TrackRecorder& track) {
    signals_.release({Signal::kTasksDone, 0, 1});
    // Pairs with the release that every worker has just done.
    signals_.wait({Signal::kTasksDone, 0, static_cast<uint32_t>(m_.schedule.workers)}, Site::kCombine, worker);
    track.mark(EventKind::kWaitTasks);
    const Span items = share(int64_t{m_.shape.ranks} * m_.shape.tokens, worker, m_.schedule.workers);
    for (int64_t item = items.begin; item < items.end; ++item) {
      sums_.add_up(static_cast<int32_t>(item / m_.shape.tokens), static_cast<int32_t>(item % m_.shape.tokens));
    }
    track.mark(EventKind::kCombine);
  }

  void combine(int32_t worker) {
    const Span tokens = share(m_.shape.tokens, worker, m_.schedule.workers);
    if (m_.schedule.sums_at_experts()) {
      for (int64_t token = tokens.begin; token < tokens.end; ++token) sums_.add_up_sums(static_cast<int32_t>(token));
      return;
    }
    const auto is_used = [&](int64_t slot) { return m_.shape.has_expert(m_.arrays.topk_ids[slot]); };
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      // In dx the weight is in each answer.
      Roles::add_up_answers(token, kBackward ? m_.arrays.dx : m_.arrays.y, is_used, [&](int64_t slot) {
        return kBackward ? Number{1} : m_.arrays.topk_weights[slot];
      });
    }
    if constexpr (kBackward) {
      const Number* gradients = m_.template here<Number>(m_.layout.routing_weight_gradients);
      for (int64_t slot = tokens.begin * m_.shape.top_k; slot < tokens.end * m_.shape.top_k; ++slot) {
        m_.arrays.dtopk_weights[slot] = is_used(slot) ? gradients[slot] : Number{0};
      }
    }
  }

  Products<Precision> products_;
  const SumsAtExperts<Precision> sums_;
  LaunchTimeline* const timeline_;
  RankTimeline recorder_;
};

}  // namespace jaxmoe::host
