// One rank of a dispatch or a combine with a product, by CPU threads: what cuda/kernel/matmul_kernel.cuh does with
// thread blocks. Caller: host/exchange_handler.cc.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common/chunks.h"
#include "common/exchange.h"
#include "common/scheduler.h"
#include "host/exchange_rank.h"

namespace jaxmoe::host {

// A precision without scales.
template <class Precision>
class MatmulRank : ExchangeRank<Precision> {
  using Exchange = ExchangeRank<Precision>;
  using Roles = RankRoles<Precision>;
  using typename Roles::Number;
  using typename Roles::RowCounts;
  using typename Roles::Span;
  using typename Roles::Storage;
  using Exchange::call_;
  using Exchange::room_;
  using Roles::launch_number_;
  using Roles::m_;
  using Roles::share;
  using Roles::signals_;

 public:
  using Exchange::Exchange;

  std::string run() {
    std::vector<std::thread> threads;
    if (call_.y == nullptr) {
      Roles::start(threads, m_.schedule.workers, [this](int32_t worker) { dispatch_matmul(worker); });
      Roles::start(threads, m_.schedule.dispatchers, [this](int32_t dispatcher) { pull(dispatcher); });
    } else {
      Roles::start(threads, m_.schedule.workers, [this](int32_t worker) { matmul_combine(worker); });
    }
    return Roles::finish(threads);
  }

 private:
  void dispatch_matmul(int32_t worker) {
    Roles::clear_other_bank(worker);
    Roles::sort_slots(worker);
    Roles::forget_kept_tokens(worker);
    Roles::publish_tokens(worker);
    Exchange::forget_slots(worker);
    Roles::tell_all(worker, Signal::kInputsPublished, Signal::kInputsReady, Site::kPublish);
    const RowCounts counts = Roles::wait_for_counts(worker);
    take_tasks<Pass::kDispatchMatmul>(counts.rows_per_expert, [&](const Task& task) {
      // Pairs with the release in pull().
      signals_.wait(wait_before(m_.shape, m_.schedule, task), site_of(task.gemm), worker);
      multiply_tokens(task);
      signals_.release(release_after(task));
    });
    Roles::tell_all(worker, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    lay_out(counts.rows_per_expert, worker);
    Roles::wait_for_all(Signal::kAnswersReady, Site::kCombine, worker);
    Exchange::take_slots(worker);
  }

  void matmul_combine(int32_t worker) {
    Roles::clear_other_bank(worker);
    // That answers may be written here: the launch before, which read them, has ended.
    if (worker == 0) signals_.release_to_all(Signal::kInputsReady);
    Roles::wait_for_all(Signal::kInputsReady, Site::kWalk, worker);
    const int32_t local = m_.shape.local_experts();
    std::vector<int32_t> rows_per_expert(call_.known_rows_per_expert, call_.known_rows_per_expert + local);
    keep_rows_with_room(room_, rows_per_expert.data(), local);
    mark_experts_without_rows(rows_per_expert.data(), local);
    RoomWalk room(room_, m_.schedule.tile, rows_per_expert.data());
    const std::vector<uint32_t> sources = Exchange::known();
    take_tasks<Pass::kMatmulCombine>(rows_per_expert, [&](const Task& task) {
      room.move_to(task.expert);
      multiply_rows(task, room.row_of_tile(task.row_tile), sources);
    });
    Roles::tell_all(worker, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    Roles::wait_for_all(Signal::kAnswersReady, Site::kCombine, worker);
    Exchange::add_up(worker);
  }

  template <Pass kPass, class Compute>
  void take_tasks(const std::vector<int32_t>& rows_per_expert, const Compute& compute) {
    TaskWalk<kPass> walk(m_.shape, m_.schedule, rows_per_expert.data());
    const std::atomic_ref<uint32_t> taken(m_.control().tasks_taken[launch_number_ & 1]);
    for (Task task; walk.seek(static_cast<int32_t>(taken.fetch_add(1, std::memory_order_relaxed)), task);) {
      compute(task);
    }
  }

  // --- rows of tokens, and where their products go ------------------------------------------------------------------

  void pull(int32_t dispatcher) {
    const int32_t worker = dispatcher / m_.launch.dispatchers_per_worker, local = m_.shape.local_experts();
    const RowCounts counts = Roles::wait_for_counts(worker);
    ChunkWalk walk(m_.shape, m_.schedule, counts.rows_per_expert.data(), dispatcher);
    RoomWalk room(room_, m_.schedule.tile, counts.rows_per_expert.data());
    for (Chunk chunk; walk.next(chunk);) {
      // The slot is free once its last tile has been multiplied. Pairs with the release in dispatch_matmul().
      signals_.wait(wait_before(m_.shape, m_.schedule, chunk), Site::kDispatch, worker);
      room.move_to(chunk.expert);
      for (int32_t i = 0; i < chunk.rows; ++i) {
        const int32_t* const counts_of_expert = counts.from_source.data() + chunk.expert;
        const RowSource from =
            source_of_row(counts_of_expert, local, m_.shape.ranks, m_.rank, chunk.first_row + i);
        const int32_t slot = m_.template here<int32_t>(slots_from_source(m_.layout, m_.launch.head, from.source))
            [counts.first_slot[from.source * local + chunk.expert] + from.position];
        Roles::copy_token(from.source, slot / m_.shape.top_k, chunk.ring_slot, chunk.tile_row + i);
        int32_t row = room.first_row() + from.position;
        for (int32_t source = 0; source < from.source; ++source) row += counts_of_expert[source * local];
        const bool has_room = row < room.end();
        *m_.target_of(chunk.ring_slot, chunk.tile_row + i) = has_room ? row : RowTarget::kNone;
        if (!has_room) continue;
        call_.made_row_sources[row] = static_cast<int32_t>(RowTarget::of(from.source, slot).packed);
        m_.template at<int32_t>(from.source, m_.layout.slot_rows)[slot] = row;
      }
      signals_.release(release_after(chunk));
    }
  }

  // Tells the caller how many rows each expert has, and leaves what is nobody's row zero.
  void lay_out(const std::vector<int32_t>& rows_per_expert, int32_t worker) {
    const int32_t local = m_.shape.local_experts(), width = m_.shape.intermediate;
    RoomWalk room(room_, m_.schedule.tile, rows_per_expert.data());
    const Span own = share(room_.rows, worker, m_.schedule.workers);
    const auto clear = [&](int64_t begin, int64_t end) {
      begin = std::max(begin, own.begin);
      end = std::min(end, own.end);
      if (begin >= end) return;
      std::fill(call_.made_row_sources + begin, call_.made_row_sources + end, static_cast<int32_t>(RowTarget::kNone));
      std::fill_n(static_cast<Storage*>(call_.rows) + begin * width, (end - begin) * width, Storage{0});
    };
    for (int32_t expert = 0; expert < local; ++expert) {
      room.move_to(expert);
      const int32_t sent = room.rows_of(expert), first = room.first_row();
      const int32_t kept = std::min(sent, room.end() - first);
      if (worker == 0) {
        call_.rows_per_expert[expert] = kept;
        call_.dropped_rows[expert] = sent - kept;
      }
      room.move_to(expert + 1);
      clear(first + kept, room.first_row());
    }
    clear(room.first_row(), room_.rows);
  }

  // --- products ------------------------------------------------------------------------------------------------------

  // Columns [first, first + columns) of a row times the matrix of an expert.
  void multiply(const Storage* row, int32_t depth, int32_t expert, int32_t width, int32_t first, int32_t columns,
                Storage* result) const {
    const Storage* const matrix = static_cast<const Storage*>(call_.matrices) + int64_t{expert} * depth * width;
    std::vector<Number> sums(columns, Number{0});
    for (int32_t k = 0; k < depth; ++k) {
      const Number factor = Precision::load(row[k]);
      const Storage* const line = matrix + int64_t{k} * width + first;
      for (int32_t c = 0; c < columns; ++c) sums[c] += factor * Precision::load(line[c]);
    }
    std::transform(sums.begin(), sums.end(), result + first, Precision::store);
  }

  void multiply_tokens(const Task& task) {
    const int32_t width = m_.shape.intermediate, tile = m_.schedule.tile.h_columns, first = task.column_tile * tile;
    const int32_t columns = std::min(width - first, tile * task.column_tiles);
    for (int32_t i = 0; i < task.rows; ++i) {
      const uint32_t row = *m_.target_of(task.ring_slot, i);
      if (row == RowTarget::kNone) continue;
      multiply(m_.ring_row(m_.layout.rows, task.ring_slot, i, m_.shape.hidden), m_.shape.hidden, task.expert, width,
               first, columns, static_cast<Storage*>(call_.rows) + int64_t{row} * width);
    }
  }

  void multiply_rows(const Task& task, int32_t first_row, const std::vector<uint32_t>& sources) {
    const int32_t depth = m_.shape.intermediate, width = m_.shape.hidden, tile = m_.schedule.tile.columns;
    const int32_t first = task.column_tile * tile, columns = std::min(width - first, tile * task.column_tiles);
    for (int32_t i = 0; i < task.rows; ++i) {
      const RowTarget target{sources[first_row + i]};
      if (target.packed == RowTarget::kNone) continue;
      multiply(static_cast<const Storage*>(call_.outputs) + int64_t{first_row + i} * depth, depth, task.expert, width,
               first, columns,
               m_.template at<Storage>(target.source(), m_.layout.answers) + int64_t{target.slot()} * width);
    }
  }
};

}  // namespace jaxmoe::host
