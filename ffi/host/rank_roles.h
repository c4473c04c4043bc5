// What the passes of the host executor share: the threads of a rank, and the roles between ranks that both a layer
// (host/rank.h) and a dispatch or combine on its own (host/exchange_rank.h) have. Each is the CPU's version of the file
// of the same name in cuda/kernel/exchange/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "common/layout.h"
#include "host/launch.h"
#include "host/rank_memory.h"
#include "host/scaled_rows.h"
#include "host/signals.h"

namespace jaxmoe::host {

template <class Precision>
class RankRoles {
 protected:
  using Storage = typename Precision::Storage;
  using RowStorage = typename Precision::Row::Storage;
  using Number = typename Precision::Number;

  RankRoles(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays)
      : m_(launch, rank, arrays), sorters_(num_sorters(m_.shape, m_.schedule)),
        launch_number_(m_.control().launch_number + 1), signals_(launch, rank, m_.layout, launch_number_) {}

  // Runs body(number) in so many threads. Where one of them cannot begin, those before it stop, and finish() says why.
  template <class Body>
  void start(std::vector<std::thread>& threads, int32_t count, Body body) {
    try {
      for (int32_t number = 0; number < count; ++number) {
        threads.emplace_back([this, body, number] { signals_.guard([&] { body(number); }); });
      }
    } catch (const std::exception& thrown) {
      char why[128];
      std::snprintf(why, sizeof why, "no thread beside the %d that it has: %s", static_cast<int>(threads.size()),
                    thrown.what());
      signals_.break_off(why);
    }
  }
  // After all threads. Returns what went wrong, empty where nothing did.
  std::string finish(std::vector<std::thread>& threads) {
    for (std::thread& thread : threads) thread.join();
    std::string failures = signals_.failures();
    if (failures.empty()) m_.control().launch_number = launch_number_;
    return failures;
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

  // --- sort: sorts this rank's slots by expert, stably, and writes each owner its list and counts; in an exchange the
  // place that every slot has in such a list, to all owners ----------------------------------------------------------

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
    const int64_t list = slots_from_source(m_.layout, m_.launch.head, m_.rank);
    for (int64_t slot = slots.begin; slot < slots.end; ++slot) {
      const int32_t expert = m_.arrays.topk_ids[slot];
      const int32_t owner = m_.shape.has_expert(expert) ? expert / local : -1;
      const int32_t place = owner < 0 ? -1 : next[expert]++;
      if (m_.schedule.exchanges()) {
        for (int32_t rank = 0; rank < m_.shape.ranks; ++rank) {
          m_.template at<int32_t>(rank, list)[slot] = rank == owner ? place : -1;
        }
      } else if (owner >= 0) {
        m_.template at<int32_t>(owner, list)[place] = static_cast<int32_t>(slot);
      }
    }
  }

  // --- publish -------------------------------------------------------------------------------------------------------

  // To where peers can read them: tokens, and in a backward pass beside each the gradient of its output. One rank alone
  // reads its tokens where they lie in a forward pass, unless they are rounded on the way.
  void publish_tokens(int32_t worker) {
    if (!publishes_tokens(m_.shape, m_.schedule, m_.formats.tokens.is_scaled())) return;
    const int32_t hidden = m_.shape.hidden;
    const Span tokens = share(m_.shape.tokens, worker, m_.schedule.workers);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      const Storage* x = m_.arrays.x + token * hidden;
      RowStorage* row = m_.template here<RowStorage>(m_.layout.tokens) + token * m_.row_width();
      if constexpr (Precision::kScaled) {
        float* scales = m_.scales_of_token(m_.rank, m_.layout.tokens, m_.shape.tokens, token);
        for (int32_t c = 0; c < hidden; c += kScaleColumns) {
          scales[c / kScaleColumns] =
              round_columns<Precision>(x + c, m_.launch.power_of_two_scales, m_.arrays.scale_of_tokens(), row + c);
        }
      } else {
        std::copy_n(x, hidden, row);
      }
      if constexpr (!Precision::kScaled) {
        if (m_.schedule.backward()) std::copy_n(m_.arrays.dy + token * hidden, hidden, row + hidden);
      }
    }
  }

  void publish_weights(const Number* weights, int32_t worker) {
    const Span slots = share(m_.shape.slots(), worker, m_.schedule.workers);
    std::copy(weights + slots.begin, weights + slots.end,
              m_.template here<Number>(m_.layout.routing_weights) + slots.begin);
  }

  // This worker's part is done; the first one raises a flag at all ranks once every worker's is, as `counter` counts.
  void tell_all(int32_t worker, Signal counter, Signal flag, Site site) {
    signals_.release({counter, 0, 1});
    if (worker != 0) return;
    // Pairs with the release that every worker has just done.
    signals_.wait({counter, 0, static_cast<uint32_t>(m_.schedule.workers)}, site, worker);
    signals_.release_to_all(flag);
  }
  void wait_for_all(Signal flag, Site site, int32_t worker) {
    // Pairs with release_to_all() of each source's first worker.
    for (int32_t source = 0; source < m_.shape.ranks; ++source) {
      signals_.wait({flag, source, launch_number_}, site, worker);
    }
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

  // --- rows that are coming to the experts of this rank --------------------------------------------------------------

  struct RowCounts {
    std::vector<int32_t> from_source;      // [ranks][local_experts]
    std::vector<int32_t> rows_per_expert;  // [local_experts], of all sources, and rows of zeros; marked where none
    std::vector<int32_t> first_slot;    // [ranks][local_experts] of an expert's slots in a source's list
  };

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

  // --- tokens, copied into the ring and kept where the schedule wants it ---------------------------------------------

  // Before this rank says that its inputs are ready, which its own dispatchers wait for too.
  void forget_kept_tokens(int32_t worker) {
    const Span states = share(m_.layout.kept_states.bytes / sizeof(uint32_t), worker, m_.schedule.workers);
    uint32_t* kept_states = m_.template here<uint32_t>(m_.layout.kept_states);
    std::fill(kept_states + states.begin, kept_states + states.end, static_cast<uint32_t>(KeptState::kAbsent));
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

  // Adds up the answers of a token's experts, in the order of its slots.
  template <class IsUsed, class WeightOf>
  void add_up_answers(int64_t token, Storage* results, IsUsed is_used, WeightOf weight_of) {
    std::vector<Number> sums(m_.shape.hidden, Number{0});
    for (int64_t slot = token * m_.shape.top_k; slot < (token + 1) * m_.shape.top_k; ++slot) {
      if (!is_used(slot)) continue;
      const Storage* answer = m_.template here<Storage>(m_.layout.answers) + slot * m_.shape.hidden;
      const Number weight = weight_of(slot);
      for (int32_t c = 0; c < m_.shape.hidden; ++c) sums[c] += weight * Precision::load(answer[c]);
    }
    std::transform(sums.begin(), sums.end(), results + token * m_.shape.hidden, Precision::store);
  }

  const RankMemory<Precision> m_;  // sizes, arrays, arenas
  const int32_t sorters_;
  const uint32_t launch_number_;
  Signals signals_;
};

}  // namespace jaxmoe::host
