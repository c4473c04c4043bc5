// Decoding of weights that have fewer bits than they are multiplied with: expert by expert, ahead of the tasks that
// multiply them, into a ring of matrices. Caller: dispatch of host/rank.h, where each dispatcher decodes its share of an
// expert before it pulls rows of it.
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "common/protocol.h"
#include "common/scheduler.h"
#include "host/rank_memory.h"
#include "host/scaled_rows.h"
#include "host/signals.h"

namespace jaxmoe::host {

// One dispatcher's part of all decoding.
template <class Precision>
class Decoder {
 public:
  Decoder(const RankMemory<Precision>& memory, const int32_t* rows_per_expert, int32_t dispatcher)
      : m_(memory), dispatcher_(dispatcher), rows_per_expert_(rows_per_expert), has_next_(advance(next_)) {}

  // Experts up to and with that one.
  void decode_up_to(int32_t expert, Signals& signals, int32_t worker) {
    while (has_next_ && next_.expert <= expert) {
      if (next_.nth >= m_.schedule.weight_slots) wait_for_slot(signals, worker);
      decode();
      signals.release(release_after(next_));
      has_next_ = advance(next_);
    }
  }

 private:
  bool advance(DecodedExpert& expert) const {
    return expert.advance(m_.schedule, rows_per_expert_, m_.shape.local_experts());
  }

  // Every task of the expert that had the slot is done: pairs with the releases after tasks in Rank::take_tasks().
  void wait_for_slot(Signals& signals, int32_t worker) {
    advance(had_);
    for (int32_t tile = had_.first_tile; tile < had_.first_tile + had_.tiles; ++tile) {
      signals.wait(wait_for_answers(m_.shape, m_.schedule, tile), Site::kDecode, worker);
    }
  }

  // Every `dispatchers`th row of all matrices.
  void decode() const {
    const int32_t slot = next_.weight_slot(m_.schedule);
    int32_t row = dispatcher_;
    for (int32_t which = 0; which <= m_.shape.projections; ++which) {
      const bool is_down = which == m_.shape.projections;
      const int32_t width = is_down ? m_.shape.hidden : m_.shape.intermediate;
      const int32_t depth = is_down ? m_.shape.intermediate : m_.shape.hidden;
      const auto& a = m_.arrays;
      const int32_t projections = m_.shape.projections;
      const auto* const elements = of_matrix(which, projections, a.w_gate, a.w_up, a.w_down);
      const float* const scales = of_matrix(which, projections, a.w_gate_scales, a.w_up_scales, a.w_down_scales);
      const uint8_t* const groups =
          of_matrix(which, projections, a.w_gate_group_scales, a.w_up_group_scales, a.w_down_group_scales);
      const auto matrix =
          ScaledMatrix::of_expert(elements, scales, m_.formats.weights, next_.expert, width, depth);
      auto* const decoded = m_.decoded_matrix(which, slot);
      for (; row < width; row += m_.schedule.dispatchers) {
        for (int32_t c = 0; c < depth; ++c) {
          const int64_t index = (int64_t{next_.expert} * width + row) * depth + c;
          decoded[int64_t{row} * depth + c] =
              Precision::store(element(elements, groups, index) * matrix.scale_of(row, c));
        }
      }
      row -= width;
    }
  }

  // The index-th of all experts, times the scale of its group where it has one. Exact.
  float element(const uint8_t* elements, const uint8_t* groups, int64_t index) const {
    const Format& format = m_.formats.weights;
    if (format.group_columns == 0) return E4M3::load(elements[index]);
    const uint8_t scale = groups[index / format.group_columns];
    const float value = load_4_bits(elements[index / 2] >> index % 2 * 4);
    return value * (format.group_scale == Element::kE8M0 ? load_power_of_two(scale) : E4M3::load(scale));
  }

  const RankMemory<Precision>& m_;
  const int32_t dispatcher_;
  const int32_t* const rows_per_expert_;
  DecodedExpert next_;
  DecodedExpert had_;  // the slot of the next one: weight_slots behind it
  bool has_next_;
};

// Of weights that are multiplied as they are.
struct NoDecoder {
  template <class Memory>
  NoDecoder(const Memory&, const int32_t*, int32_t) {}
  void decode_up_to(int32_t, Signals&, int32_t) {}
};

template <class Precision>
using DecoderOf = std::conditional_t<kDecodes<Precision>, Decoder<Precision>, NoDecoder>;

}  // namespace jaxmoe::host
