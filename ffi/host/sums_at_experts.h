// Sums at experts: answers of a rank's experts wait in its arena until they are added up token by token, and what
// travels to the owner of a token is their sum. The CPU's version of cuda/kernel/exchange/sums_at_experts.cuh; caller:
// host/rank.h, where Schedule::sums_at_experts().
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/layout.h"
#include "host/rank_memory.h"

namespace jaxmoe::host {

template <class Precision>
class SumsAtExperts {
  using Storage = typename Precision::Storage;
  using Number = typename Precision::Number;

 public:
  explicit SumsAtExperts(const RankMemory<Precision>& memory) : m_(memory) {}

  // No answer is here yet: numbers `begin` to `end` of all slots of all ranks. Before this rank's inputs_ready.
  void forget(int64_t begin, int64_t end) const {
    int32_t* const places = m_.template here<int32_t>(m_.layout.answer_places);
    std::fill(places + begin, places + end, int32_t{AnswerPlace::kNone});
  }
  int64_t num_places() const { return int64_t{m_.shape.ranks} * m_.shape.slots(); }

  // Of a row that dispatch pulls: notes where its answer will be, with its routing weight. Returns where it goes.
  RowTarget place(int32_t source, int32_t slot, int32_t row_tile, int32_t tile_row) const {
    const bool waits = row_tile < m_.schedule.summed_tiles;
    const int64_t row = waiting_answer(m_.shape, m_.schedule, row_tile, tile_row);
    place_of(source, slot) = waits ? static_cast<int32_t>(row) : AnswerPlace::kTravels;
    weight_of(source, slot) = m_.template at<Number>(source, m_.layout.routing_weights)[slot];
    return waits ? RowTarget::of(m_.rank, static_cast<int32_t>(row)) : RowTarget::of(source, slot);
  }

  // Adds up the answers to a token of `source` that wait here, in the order of its slots, and sends the owner the sum
  // and the slots that are in it.
  void add_up(int32_t source, int32_t token) const {
    const int32_t top_k = m_.shape.top_k;
    std::vector<Number> sums(m_.shape.hidden, Number{0});
    uint32_t summed = 0;
    bool wanted = false;
    for (int32_t k = 0; k < top_k; ++k) {
      const int32_t slot = token * top_k + k;
      const int32_t place = place_of(source, slot);
      wanted = wanted || place != AnswerPlace::kNone;
      if (place < 0) continue;
      summed |= uint32_t{1} << k;
      add(sums, weight_of(source, slot), place);
    }
    // Who wants none of these experts reads nothing.
    if (!wanted) return;
    m_.template at<uint32_t>(source, m_.layout.summed_slots)[int64_t{m_.rank} * m_.shape.tokens + token] = summed;
    const int64_t row = sum_row(m_.shape, m_.schedule, m_.rank, token);
    if (summed != 0) store(sums, m_.template at<Storage>(source, m_.layout.answers) + row * m_.shape.hidden);
  }

  // y of a token of this rank: the sums of all ranks in their order, then the answers that travelled on their own in the
  // order of their slots.
  void add_up_sums(int32_t token) const {
    const int32_t top_k = m_.shape.top_k, local = m_.shape.local_experts();
    const int32_t* const ids = m_.arrays.topk_ids + int64_t{token} * top_k;
    const uint32_t* const summed_slots = m_.template here<uint32_t>(m_.layout.summed_slots);
    const auto summed_by = [&](int32_t rank) { return summed_slots[int64_t{rank} * m_.shape.tokens + token]; };
    std::vector<Number> sums(m_.shape.hidden, Number{0});
    for (int32_t rank = 0; rank < m_.shape.ranks; ++rank) {
      const bool wanted = std::any_of(ids, ids + top_k, [&](int32_t id) {
        return m_.shape.has_expert(id) && id / local == rank;
      });
      if (wanted && summed_by(rank) != 0) add(sums, Number{1}, sum_row(m_.shape, m_.schedule, rank, token));
    }
    for (int32_t k = 0; k < top_k; ++k) {
      if (!m_.shape.has_expert(ids[k]) || (summed_by(ids[k] / local) >> k & 1) != 0) continue;
      const int64_t slot = int64_t{token} * top_k + k;
      add(sums, m_.arrays.topk_weights[slot], slot);
    }
    store(sums, m_.arrays.y + int64_t{token} * m_.shape.hidden);
  }

 private:
  int32_t& place_of(int32_t source, int32_t slot) const {
    return m_.template here<int32_t>(m_.layout.answer_places)[int64_t{source} * m_.shape.slots() + slot];
  }
  Number& weight_of(int32_t source, int32_t slot) const {
    return m_.template here<Number>(m_.layout.answer_weights)[int64_t{source} * m_.shape.slots() + slot];
  }

  // A row of `answers` here, times a weight.
  void add(std::vector<Number>& sums, Number weight, int64_t row) const {
    const Storage* const answer = m_.template here<Storage>(m_.layout.answers) + row * m_.shape.hidden;
    for (int32_t c = 0; c < m_.shape.hidden; ++c) sums[c] += weight * Precision::load(answer[c]);
  }
  static void store(const std::vector<Number>& sums, Storage* row) {
    std::transform(sums.begin(), sums.end(), row, Precision::store);
  }

  const RankMemory<Precision>& m_;
};

}  // namespace jaxmoe::host
