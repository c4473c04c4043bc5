// See executor.h. Each role below is the CPU's version of the file of the same name in cuda/kernel/.
#include "host/executor.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "common/scheduler.h"
#include "host/signals.h"
#include "host/timeline.h"

namespace jaxmoe::host {
namespace {

template <class Format>
class Rank {
 public:
  using Storage = typename Format::Storage;
  using Number = typename Format::Number;

  Rank(const Launch& launch, int32_t rank, const LayerArrays<Format>& arrays, LaunchTimeline* timeline)
      : launch_(launch), shape_(launch.shape), schedule_(launch.schedule), arrays_(arrays), rank_(rank),
        layout_(layout_of(shape_, schedule_, launch.head, sizeof(Storage))),
        planners_(num_planners(shape_, schedule_)),
        epoch_(at<Control>(rank, layout_.control)->epoch + 1), signals_(launch, rank, layout_, epoch_),
        timeline_(timeline), recorder_(timeline != nullptr, schedule_.workers, schedule_.dispatchers) {}

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
    at<Control>(rank_, layout_.control)->epoch = epoch_;
    if (timeline_ != nullptr) *timeline_ = recorder_.collect(rank_, shape_.ranks, rank_, epoch_);
    return "";
  }

 private:
  // --- memory -------------------------------------------------------------------------------------------------------

  template <class T>
  T* at(int32_t rank, int64_t offset) const {
    return reinterpret_cast<T*>(launch_.arenas[rank] + offset);
  }
  template <class T>
  T* at(int32_t rank, const Region& region) const {
    return at<T>(rank, region.offset);
  }
  Storage* ring_row(const Region& ring, int32_t ring_slot, int32_t tile_row, int32_t width) const {
    return at<Storage>(rank_, ring) + (int64_t{ring_slot} * schedule_.tile.rows + tile_row) * width;
  }
  uint32_t* target_of(int32_t ring_slot, int32_t tile_row) const {
    return at<uint32_t>(rank_, layout_.row_targets) + int64_t{ring_slot} * schedule_.tile.rows + tile_row;
  }

  // --- a worker -----------------------------------------------------------------------------------------------------

  void work(int32_t worker) {
    LaneRecorder lane = recorder_.of_worker(worker);
    clear_other_bank(worker);
    plan(worker);
    lane.mark(EventKind::kPlan);
    stage(worker);
    lane.mark(EventKind::kStage);
    signals_.release({Signal::kInputsStaged, 0, 1});
    if (worker == 0) {
      // Pairs with the release that every worker has just done.
      signals_.wait({Signal::kInputsStaged, 0, static_cast<uint32_t>(schedule_.workers)}, Site::kPublish, worker);
      signals_.release_to_all(Signal::kInputsReady);
    }
    lane.mark(EventKind::kPublish);
    const RowCounts counts = wait_for_counts(worker);
    lane.mark(EventKind::kWaitInputs);
    lane.move_to(LaneRole::kMath);
    TaskWalk walk(shape_, schedule_, counts.rows_per_expert.data());
    const std::atomic_ref<uint32_t> taken(at<Control>(rank_, layout_.control)->tasks_taken[epoch_ & 1]);
    for (Task task; walk.seek(static_cast<int32_t>(taken.fetch_add(1, std::memory_order_relaxed)), task);) {
      // Gate/up pairs with the release in dispatch, down with that of gate/up below.
      const bool is_gate_up = task.gemm == Gemm::kGateUp;
      signals_.wait(wait_before(shape_, schedule_, task), is_gate_up ? Site::kGateUp : Site::kDown, worker);
      lane.mark(is_gate_up ? EventKind::kWaitRows : EventKind::kWaitHidden, task);
      if (is_gate_up) {
        gate_up(task);
      } else {
        down(task);
      }
      signals_.release(release_after(task));
      lane.mark(is_gate_up ? EventKind::kGateUp : EventKind::kDown, task);
    }
    signals_.release({Signal::kTasksDone, 0, 1});
    if (worker == 0) {
      // Pairs with the release that every worker has just done.
      signals_.wait({Signal::kTasksDone, 0, static_cast<uint32_t>(schedule_.workers)}, Site::kAnnounce, worker);
      signals_.release_to_all(Signal::kPartialsWritten);
      lane.mark(EventKind::kWaitTasks);
    }
    wait_for_answers(worker);
    lane.mark(EventKind::kWaitAnswers);
    combine(worker);
    lane.mark(EventKind::kCombine);
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
    uint32_t* bank = at<uint32_t>(rank_, word_of(layout_, launch_.head, epoch_ + 1, Signal::kHistogramsWritten, 0));
    std::fill(bank + words.begin, bank + words.end, 0);
    if (worker == 0) at<Control>(rank_, layout_.control)->tasks_taken[(epoch_ + 1) & 1] = 0;
  }

  // --- plan: sorts this rank's slots by expert, stably, and writes each owner its list and counts --------------------

  void plan(int32_t planner) {
    if (planner >= planners_) return;
    const Span slots = share(shape_.slots(), planner, planners_);
    int32_t* histograms = at<int32_t>(rank_, layout_.histograms);
    int32_t* own = histograms + int64_t{planner} * shape_.num_experts;
    std::fill(own, own + shape_.num_experts, 0);
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      if (arrays_.topk_ids[slot] >= 0) ++own[arrays_.topk_ids[slot]];
    }
    signals_.release({Signal::kHistogramsWritten, 0, 1});
    // Pairs with the release that every planner has just done.
    signals_.wait({Signal::kHistogramsWritten, 0, static_cast<uint32_t>(planners_)}, Site::kPlan, planner);

    const int32_t local = shape_.local_experts();
    std::vector<int32_t> next(shape_.num_experts);  // position in the owner's list of this planner's next slot
    for (int32_t owner = 0; owner < shape_.ranks; ++owner) {
      int32_t before = 0;
      for (int32_t expert = owner * local; expert < (owner + 1) * local; ++expert) {
        int32_t total = 0;
        for (int32_t other = 0; other < planners_; ++other) {
          if (other == planner) next[expert] = before + total;
          total += histograms[int64_t{other} * shape_.num_experts + expert];
        }
        before += total;
        if (planner == 0) {
          at<int32_t>(owner, rows_from_source(layout_, launch_.head, epoch_, rank_))[expert - owner * local] = total;
        }
      }
    }
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      const int32_t expert = arrays_.topk_ids[slot];
      if (expert < 0) continue;
      at<int32_t>(expert / local, slots_from_source(layout_, launch_.head, rank_))[next[expert]++] =
          static_cast<int32_t>(slot);
    }
  }

  // --- stage: copies tokens to where peers can read them -------------------------------------------------------------

  void stage(int32_t worker) {
    if (shape_.ranks == 1) return;
    // Before this rank says that its inputs are ready, which its own dispatchers wait for too.
    const Span states = share(layout_.kept_states.bytes / sizeof(uint32_t), worker, schedule_.workers);
    uint32_t* kept_states = at<uint32_t>(rank_, layout_.kept_states);
    std::fill(kept_states + states.begin, kept_states + states.end, static_cast<uint32_t>(KeptState::kAbsent));
    const Span tokens = share(shape_.tokens, worker, schedule_.workers);
    std::copy(arrays_.x + tokens.begin * shape_.hidden, arrays_.x + tokens.end * shape_.hidden,
              at<Storage>(rank_, layout_.tokens) + tokens.begin * shape_.hidden);
  }

  // --- what the walks need -------------------------------------------------------------------------------------------

  struct RowCounts {
    std::vector<int32_t> from_source;      // [ranks][local_experts]
    std::vector<int32_t> rows_per_expert;  // [local_experts], of all sources
    std::vector<int32_t> segment_start;    // [ranks][local_experts] of an expert's slots in a source's list
  };

  RowCounts wait_for_counts(int32_t worker) {
    const int32_t local = shape_.local_experts();
    RowCounts counts{std::vector<int32_t>(shape_.ranks * local), std::vector<int32_t>(local, 0),
                     std::vector<int32_t>(shape_.ranks * local)};
    for (int32_t source = 0; source < shape_.ranks; ++source) {
      // Pairs with release_to_all(kInputsReady) of the source's first worker.
      signals_.wait({Signal::kInputsReady, source, epoch_}, Site::kWalk, worker);
      const int32_t* rows = at<int32_t>(rank_, rows_from_source(layout_, launch_.head, epoch_, source));
      int32_t start = 0;
      for (int32_t expert = 0; expert < local; ++expert) {
        counts.from_source[source * local + expert] = rows[expert];
        counts.segment_start[source * local + expert] = start;
        counts.rows_per_expert[expert] += rows[expert];
        start += rows[expert];
      }
    }
    return counts;
  }

  // --- dispatch: pulls rows from their owners into the ring ----------------------------------------------------------

  void dispatch(int32_t dispatcher) {
    const int32_t worker = dispatcher / launch_.dispatchers_per_worker;
    LaneRecorder lane = recorder_.of_dispatcher(dispatcher, launch_.dispatchers_per_worker);
    const RowCounts counts = wait_for_counts(worker);
    lane.mark(EventKind::kWaitInputs);
    const int32_t local = shape_.local_experts();
    ChunkWalk walk(shape_, schedule_, counts.rows_per_expert.data(), dispatcher);
    for (Chunk chunk; walk.next(chunk);) {
      // The slot is free once its last tile has left. Pairs with the release after down().
      const EventSubject subject{chunk.expert, chunk.row_tile, chunk.tile_row};
      signals_.wait(wait_before(shape_, schedule_, chunk), Site::kDispatch, worker);
      lane.mark(EventKind::kWaitSlot, subject);
      for (int32_t i = 0; i < chunk.rows; ++i) {
        const RowSource from = source_of_row(counts.from_source.data() + chunk.expert, local, shape_.ranks, rank_,
                                             chunk.first_row + i);
        const int32_t slot = at<int32_t>(rank_, slots_from_source(layout_, launch_.head, from.source))
            [counts.segment_start[from.source * local + chunk.expert] + from.position];
        const Storage* tokens = shape_.ranks == 1 ? arrays_.x : at<Storage>(from.source, layout_.tokens);
        Storage* row = ring_row(layout_.rows, chunk.ring_slot, chunk.tile_row + i, shape_.hidden);
        copy_token(tokens + int64_t{slot / shape_.top_k} * shape_.hidden, from.source, slot / shape_.top_k, row);
        *target_of(chunk.ring_slot, chunk.tile_row + i) = RowTarget::of(from.source, slot).packed;
      }
      signals_.release(release_after(chunk));
      lane.mark(EventKind::kDispatch, subject);
    }
  }

  // The token as its owner has it, or as an earlier pull has kept it.
  void copy_token(const Storage* token, int32_t source, int32_t number, Storage* row) {
    if (!schedule_.keep_tokens || source == rank_) {
      std::copy(token, token + shape_.hidden, row);
      return;
    }
    const int64_t index = kept_index(shape_, rank_, source, number);
    Storage* kept = at<Storage>(rank_, layout_.kept_tokens) + index * shape_.hidden;
    const std::atomic_ref<uint32_t> state(at<uint32_t>(rank_, layout_.kept_states)[index]);
    uint32_t seen = static_cast<uint32_t>(KeptState::kAbsent);
    if (state.compare_exchange_strong(seen, static_cast<uint32_t>(KeptState::kComing), std::memory_order_acquire)) {
      std::copy(token, token + shape_.hidden, kept);
      signals_.delay();
      state.store(static_cast<uint32_t>(KeptState::kKept), std::memory_order_release);
    } else if (seen == static_cast<uint32_t>(KeptState::kKept)) {
      token = kept;
    }
    std::copy(token, token + shape_.hidden, row);
  }

  // --- the two GEMMs -------------------------------------------------------------------------------------------------

  static Number bias_of(const Storage* bias, int64_t index) { return bias == nullptr ? 0 : Format::load(bias[index]); }

  // sums[c] = sum over k of row[k] * weights[k, first + c], for one row and `columns` columns of a [depth, width]
  // matrix.
  static void multiply_row(const Storage* row, const Storage* weights, int32_t depth, int32_t width, int32_t first,
                           int32_t columns, Number* sums) {
    std::fill(sums, sums + columns, Number{0});
    for (int32_t k = 0; k < depth; ++k) {
      const Number factor = Format::load(row[k]);
      const Storage* line = weights + int64_t{k} * width + first;
      for (int32_t c = 0; c < columns; ++c) sums[c] += factor * Format::load(line[c]);
    }
  }

  void gate_up(const Task& task) {
    const int32_t width = shape_.intermediate;
    const int32_t first = task.column_tile * schedule_.tile.hidden_columns;
    const int32_t columns = std::min(task.column_tiles * schedule_.tile.hidden_columns, width - first);
    const int64_t matrix = int64_t{task.expert} * shape_.hidden * width;
    const int64_t bias = int64_t{task.expert} * width + first;
    std::vector<Number> gate(columns), up(columns);
    for (int32_t i = 0; i < task.rows; ++i) {
      const Storage* row = ring_row(layout_.rows, task.ring_slot, i, shape_.hidden);
      multiply_row(row, arrays_.w_gate + matrix, shape_.hidden, width, first, columns, gate.data());
      if (arrays_.w_up != nullptr) {
        multiply_row(row, arrays_.w_up + matrix, shape_.hidden, width, first, columns, up.data());
      }
      Storage* h = ring_row(layout_.hidden, task.ring_slot, i, width) + first;
      for (int32_t c = 0; c < columns; ++c) {
        const Number g = gate[c] + bias_of(arrays_.b_gate, bias + c);
        const Number u = arrays_.w_up == nullptr ? 1 : up[c] + bias_of(arrays_.b_up, bias + c);
        h[c] = Format::store(activate(launch_.activation, g, u));
      }
    }
  }

  void down(const Task& task) {
    const int32_t first = task.column_tile * schedule_.tile.output_columns;
    const int32_t columns = std::min(task.column_tiles * schedule_.tile.output_columns, shape_.hidden - first);
    const Storage* weights = arrays_.w_down + int64_t{task.expert} * shape_.intermediate * shape_.hidden;
    const int64_t bias = int64_t{task.expert} * shape_.hidden + first;
    std::vector<Number> sums(columns);
    for (int32_t i = 0; i < task.rows; ++i) {
      multiply_row(ring_row(layout_.hidden, task.ring_slot, i, shape_.intermediate), weights, shape_.intermediate,
                   shape_.hidden, first, columns, sums.data());
      const RowTarget target{*target_of(task.ring_slot, i)};
      Storage* out = at<Storage>(target.source(), layout_.partials) + int64_t{target.slot()} * shape_.hidden + first;
      for (int32_t c = 0; c < columns; ++c) out[c] = Format::store(sums[c] + bias_of(arrays_.b_down, bias + c));
    }
  }

  // --- combine: adds up the answers of each token's experts, in the order of its slots -------------------------------

  void wait_for_answers(int32_t worker) {
    for (int32_t source = 0; source < shape_.ranks; ++source) {
      // Pairs with release_to_all(kPartialsWritten) of the source's first worker.
      signals_.wait({Signal::kPartialsWritten, source, epoch_}, Site::kCombine, worker);
    }
  }

  void combine(int32_t worker) {
    const Span tokens = share(shape_.tokens, worker, schedule_.workers);
    std::vector<Number> sums(shape_.hidden);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      std::fill(sums.begin(), sums.end(), Number{0});
      for (int64_t slot = token * shape_.top_k; slot < (token + 1) * shape_.top_k; ++slot) {
        if (arrays_.topk_ids[slot] < 0) continue;
        const Storage* partial = at<Storage>(rank_, layout_.partials) + slot * shape_.hidden;
        for (int32_t c = 0; c < shape_.hidden; ++c) {
          sums[c] += arrays_.topk_weights[slot] * Format::load(partial[c]);
        }
      }
      std::transform(sums.begin(), sums.end(), arrays_.y + token * shape_.hidden, Format::store);
    }
  }

  const Launch& launch_;
  const Shape shape_;
  const Schedule schedule_;
  const LayerArrays<Format>& arrays_;
  const int32_t rank_;
  const ArenaLayout layout_;
  const int32_t planners_;
  const uint32_t epoch_;
  Signals signals_;
  LaunchTimeline* const timeline_;
  RankTimeline recorder_;
};

}  // namespace

template <class Format>
std::string run_rank(const Launch& launch, int32_t rank, const LayerArrays<Format>& arrays, LaunchTimeline* timeline) {
  return Rank<Format>(launch, rank, arrays, timeline).run();
}

template std::string run_rank<F32>(const Launch&, int32_t, const LayerArrays<F32>&, LaunchTimeline*);
template std::string run_rank<F64>(const Launch&, int32_t, const LayerArrays<F64>&, LaunchTimeline*);
template std::string run_rank<Bf16>(const Launch&, int32_t, const LayerArrays<Bf16>&, LaunchTimeline*);
template std::string run_rank<F16>(const Launch&, int32_t, const LayerArrays<F16>&, LaunchTimeline*);

}  // namespace jaxmoe::host
