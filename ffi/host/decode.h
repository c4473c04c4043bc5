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
      : m_(memory), dispatcher_(dispatcher), walk_(m_.schedule, rows_per_expert, m_.shape.local_experts()),
        before_(m_.schedule, rows_per_expert, m_.shape.local_experts()) {
    has_next_ = walk_.next(next_);
  }

  // Experts up to and with that one.
  void decode_up_to(int32_t expert, Signals& signals, int32_t worker) {
    while (has_next_ && next_.expert <= expert) {
      if (next_.nth >= m_.schedule.weight_slots) wait_for_slot(signals, worker);
      decode();
      signals.release(release_after(next_));
      has_next_ = walk_.next(next_);
    }
  }

 private:
  // Every task of the expert that had the slot is done: pairs with the releases after tasks in Rank::take_tasks().
  void wait_for_slot(Signals& signals, int32_t worker) {
    DecodedExpert had{};
    before_.next(had);
    for (int32_t tile = had.first_tile; tile < had.first_tile + had.tiles; ++tile) {
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
      const auto* const elements = is_down ? m_.arrays.w_down : which == 0 ? m_.arrays.w_gate : m_.arrays.w_up;
      const float* const scales = is_down      ? m_.arrays.w_down_scales
                                  : which == 0 ? m_.arrays.w_gate_scales
                                               : m_.arrays.w_up_scales;
      const auto matrix =
          ScaledMatrix::of_expert(elements, scales, m_.formats.weights, next_.expert, width, depth);
      auto* const decoded = m_.decoded_matrix(which, slot);
      for (; row < width; row += m_.schedule.dispatchers) {
        const int64_t first = int64_t{row} * depth;
        for (int32_t c = 0; c < depth; ++c) {
          decoded[first + c] = Precision::store(E4M3::load(matrix.elements[first + c]) * matrix.scale_of(row, c));
        }
      }
      row -= width;
    }
  }

  const RankMemory<Precision>& m_;
  const int32_t dispatcher_;
  ExpertWalk walk_;
  ExpertWalk before_;  // weight_slots behind it
  DecodedExpert next_{};
  bool has_next_ = false;
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
