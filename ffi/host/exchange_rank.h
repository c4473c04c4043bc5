// One rank of a dispatch or a combine on its own, by CPU threads: what cuda/kernel/exchange_kernel.cuh does with thread
// blocks. Caller: host/exchange_handler.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common/exchange.h"
#include "host/rank_roles.h"

namespace jaxmoe::host {

template <class Precision>
class ExchangeRank : protected RankRoles<Precision> {
 protected:
  using Roles = RankRoles<Precision>;
  using typename Roles::Number;
  using typename Roles::RowStorage;
  using typename Roles::Span;
  using typename Roles::Storage;
  using typename Roles::Token;
  using Roles::launch_number_;
  using Roles::m_;
  using Roles::share;
  using Roles::signals_;

 public:
  // `arrays` has x and topk_ids of the call, where it has them.
  ExchangeRank(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays,
               const ExchangeArrays<Number>& call, const Room& room)
      : Roles(launch, rank, arrays), call_(call), room_(room) {}

  std::string run() {
    std::vector<std::thread> threads;
    Roles::start(threads, m_.schedule.workers, [this](int32_t worker) {
      if (call_.y == nullptr) {
        dispatch(worker);
      } else {
        combine(worker);
      }
    });
    return Roles::finish(threads);
  }

 protected:
  void dispatch(int32_t worker) {
    Roles::clear_other_bank(worker);
    if (call_.topk_ids != nullptr) Roles::sort_slots(worker);
    Roles::publish_tokens(worker);
    if (call_.weights != nullptr) Roles::publish_weights(call_.weights, worker);
    forget_slots(worker);
    Roles::tell_all(worker, Signal::kInputsPublished, Signal::kInputsReady, Site::kPublish);
    Roles::wait_for_all(Signal::kInputsReady, Site::kWalk, worker);
    const std::vector<uint32_t> sources = call_.topk_ids != nullptr ? laid_out(worker) : known();
    pull(sources, worker);
    Roles::tell_all(worker, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    Roles::wait_for_all(Signal::kAnswersReady, Site::kCombine, worker);
    take_slots(worker);
  }

  void combine(int32_t worker) {
    Roles::clear_other_bank(worker);
    // That answers may be written here: the launch before, which read them, has ended.
    if (worker == 0) signals_.release_to_all(Signal::kInputsReady);
    Roles::wait_for_all(Signal::kInputsReady, Site::kWalk, worker);
    push(worker);
    Roles::tell_all(worker, Signal::kTasksDone, Signal::kAnswersReady, Site::kAnnounce);
    Roles::wait_for_all(Signal::kAnswersReady, Site::kCombine, worker);
    add_up(worker);
  }

  // --- where rows come from ------------------------------------------------------------------------------------------

  // RowTarget of every row of the array.
  std::vector<uint32_t> laid_out(int32_t worker) {
    std::vector<uint32_t> sources(room_.rows, RowTarget::kNone);
    std::vector<std::vector<int32_t>> lists;  // of each source, its slots that name local experts in their order
    for (int32_t source = 0; source < m_.shape.ranks; ++source) lists.push_back(list_of(source));
    int32_t start = 0;
    for (int32_t expert = 0; expert < m_.shape.local_experts(); ++expert) {
      const int32_t end = room_.end_from(start);
      int32_t row = start, sent = 0;
      for (int32_t source = 0; source < m_.shape.ranks; ++source) {
        const int64_t offset = rows_from_source(m_.layout, m_.launch.head, launch_number_, source);
        const int32_t* ends = m_.template here<int32_t>(offset) + expert;
        const int32_t first = expert > 0 ? ends[-1] : 0;
        for (int32_t i = first; i < *ends; ++i, ++sent) {
          if (row < end) sources[row++] = RowTarget::of(source, lists[source][i]).packed;
        }
      }
      if (worker == 0) {
        call_.rows_per_expert[expert] = row - start;
        call_.dropped_rows[expert] = sent - (row - start);
      }
      start = room_.start_behind(start, sent);
    }
    return sources;
  }

  std::vector<int32_t> list_of(int32_t source) const {
    std::vector<int32_t> list(m_.shape.slots());
    const int32_t* places = m_.template here<int32_t>(slots_from_source(m_.layout, m_.launch.head, source));
    for (int32_t slot = 0; slot < m_.shape.slots(); ++slot) {
      if (places[slot] >= 0) list[places[slot]] = slot;
    }
    return list;
  }

  // Those that the call brings, which may be anything.
  std::vector<uint32_t> known() const {
    std::vector<uint32_t> sources(call_.row_sources, call_.row_sources + room_.rows);
    for (uint32_t& packed : sources) {
      const RowTarget source{packed};
      const bool is_there = source.source() < m_.shape.ranks && source.slot() < m_.shape.slots();
      if (!is_there) packed = RowTarget::kNone;
    }
    return sources;
  }

  // --- what peers tell this rank about its slots: the row of each, or the gradient of its weight ---------------------

  void forget_slots(int32_t worker) {
    const Span slots = share(m_.shape.slots(), worker, m_.schedule.workers);
    const auto fill = [&](auto* words, auto nothing) { std::fill(words + slots.begin, words + slots.end, nothing); };
    if (call_.weight_gradients != nullptr) {
      fill(m_.template here<Number>(m_.layout.routing_weight_gradients), Number{0});
    } else {
      fill(m_.template here<int32_t>(m_.layout.slot_rows), int32_t{-1});
    }
  }

  void take_slots(int32_t worker) {
    const Span slots = share(m_.shape.slots(), worker, m_.schedule.workers);
    const auto take = [&](const auto* words, auto* result) {
      if (result != nullptr) std::copy(words + slots.begin, words + slots.end, result + slots.begin);
    };
    take(m_.template here<Number>(m_.layout.routing_weight_gradients), call_.weight_gradients);
    take(m_.template here<int32_t>(m_.layout.slot_rows), call_.made_slot_rows);
  }

  // --- rows ----------------------------------------------------------------------------------------------------------

  void pull(const std::vector<uint32_t>& sources, int32_t worker) {
    const int32_t hidden = m_.shape.hidden;
    const Span own = share(room_.rows, worker, m_.schedule.workers);
    for (int64_t row = own.begin; row < own.end; ++row) {
      const RowTarget source{sources[row]};
      const bool is_row = source.packed != RowTarget::kNone;
      RowStorage* target = static_cast<RowStorage*>(call_.rows) + row * hidden;
      if (call_.made_row_sources != nullptr) {
        call_.made_row_sources[row] = static_cast<int32_t>(source.packed);
        if (is_row) {
          m_.template at<int32_t>(source.source(), m_.layout.slot_rows)[source.slot()] = static_cast<int32_t>(row);
        }
      }
      float* scales = call_.scales == nullptr ? nullptr : call_.scales + row * m_.token_scales();
      if (!is_row) {
        std::fill_n(target, hidden, RowStorage{0});
        if (scales != nullptr) std::fill_n(scales, m_.token_scales(), 0.0f);
        continue;
      }
      const Token token = Roles::token_of_owner(source.source(), source.slot() / m_.shape.top_k);
      if (scales != nullptr) std::copy_n(token.scales, m_.token_scales(), scales);
      if (call_.weights == nullptr) {
        std::copy_n(token.elements, hidden, target);
      } else if constexpr (!Precision::kScaled) {
        const Number weight = m_.template at<Number>(source.source(), m_.layout.routing_weights)[source.slot()];
        const Storage* outputs = static_cast<const Storage*>(call_.outputs) + row * hidden;
        Number product{0};
        for (int32_t c = 0; c < hidden; ++c) {
          const Number element = Precision::load(token.elements[c]);
          target[c] = Precision::store(weight * element);
          product += element * Precision::load(outputs[c]);
        }
        m_.template at<Number>(source.source(), m_.layout.routing_weight_gradients)[source.slot()] = product;
      }
    }
  }

  void push(int32_t worker) {
    const int32_t hidden = m_.shape.hidden;
    const std::vector<uint32_t> sources = known();
    const Span own = share(room_.rows, worker, m_.schedule.workers);
    for (int64_t row = own.begin; row < own.end; ++row) {
      const RowTarget target{sources[row]};
      if (target.packed == RowTarget::kNone) continue;
      std::copy_n(static_cast<const Storage*>(call_.outputs) + row * hidden, hidden,
                  m_.template at<Storage>(target.source(), m_.layout.answers) + int64_t{target.slot()} * hidden);
    }
  }

  void add_up(int32_t worker) {
    const Span tokens = share(m_.shape.tokens, worker, m_.schedule.workers);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      Roles::add_up_answers(
          token, static_cast<Storage*>(call_.y), [&](int64_t slot) { return call_.slot_rows[slot] >= 0; },
          [&](int64_t slot) { return call_.weights == nullptr ? Number{1} : call_.weights[slot]; });
    }
  }

  const ExchangeArrays<Number>& call_;
  const Room room_;
};

}  // namespace jaxmoe::host
