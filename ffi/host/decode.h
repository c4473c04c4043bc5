// Decoding of weights that have fewer bits than they are multiplied with. Ahead of the tasks that multiply them, expert
// by expert into a ring of matrices: by dispatch of host/rank.h, where each dispatcher decodes its share of an expert
// before it pulls rows of it. Or, without a ring, by these tasks (host/products.h).
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "common/protocol.h"
#include "common/scheduler.h"
#include "host/rank_memory.h"
#include "host/scaled_rows.h"
#include "host/signals.h"

namespace jaxmoe::host {

// A matrix of an expert, [width, depth]: number `which` of gate, up and down.
template <class Precision>
class PackedMatrix {
 public:
  PackedMatrix(const RankMemory<Precision>& memory, int32_t which, int32_t expert)
      : format_(memory.formats.weights), expert_(expert) {
    const bool is_down = which == memory.shape.projections;
    width_ = is_down ? memory.shape.hidden : memory.shape.intermediate;
    depth_ = is_down ? memory.shape.intermediate : memory.shape.hidden;
    const auto& a = memory.arrays;
    const int32_t projections = memory.shape.projections;
    elements_ = of_matrix(which, projections, a.w_gate, a.w_up, a.w_down);
    scales_ = of_matrix(which, projections, a.w_gate_scales, a.w_up_scales, a.w_down_scales);
    groups_ = of_matrix(which, projections, a.w_gate_group_scales, a.w_up_group_scales, a.w_down_group_scales);
  }

  int32_t width() const { return width_; }

  // One line of it. `whole`: with all scales; otherwise with those of groups alone, which leaves what can be stored
  // exactly, and scale_of_sums() to multiply sums with.
  void decode(int32_t line, bool whole, typename Precision::Storage* decoded) const {
    const auto matrix = ScaledMatrix::of_expert(elements_, scales_, format_, expert_, width_, depth_);
    for (int32_t c = 0; c < depth_; ++c) {
      const int64_t index = (int64_t{expert_} * width_ + line) * depth_ + c;
      decoded[c] = Precision::store(element(index) * (whole ? matrix.scale_of(line, c) : 1.0f));
    }
  }
  // Of a format that has one for all of a matrix.
  float scale_of_sums() const { return scales_[expert_]; }

  // As multiply_scaled() takes a matrix (host/scaled_rows.h), where the scales of groups are powers of two: kScaleColumns
  // elements of a line from a depth on, exact with those scales.
  void load(int32_t line, int32_t first, float* numbers) const {
    const int64_t index = (int64_t{expert_} * width_ + line) * depth_ + first;
    for (int32_t k = 0; k < kScaleColumns; ++k) numbers[k] = element(index + k);
  }
  static constexpr bool scales_are_of_columns() { return false; }
  float scale_of(int32_t, int32_t) const { return scale_of_sums(); }

 private:
  // The index-th of all experts, times the scale of its group where it has one. Exact.
  float element(int64_t index) const {
    if (format_.group_columns == 0) return E4M3::load(elements_[index]);
    const uint8_t scale = groups_[index / format_.group_columns];
    const float value = load_4_bits(elements_[index / 2] >> index % 2 * 4);
    return value * (format_.group_scale == Element::kE8M0 ? load_power_of_two(scale) : E4M3::load(scale));
  }

  const Format format_;
  const int32_t expert_;
  int32_t width_, depth_;
  const uint8_t* elements_;
  const float* scales_;
  const uint8_t* groups_;
};

// One dispatcher's part of all decoding ahead.
template <class Precision>
class Decoder {
 public:
  Decoder(const RankMemory<Precision>& memory, const int32_t* rows_per_expert, int32_t dispatcher)
      : m_(memory), dispatcher_(dispatcher), rows_per_expert_(rows_per_expert),
        has_next_(memory.schedule.decodes() && advance(next_)) {}

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

  // Every `dispatchers`th line of all matrices.
  void decode() const {
    const int32_t slot = next_.weight_slot(m_.schedule);
    int32_t line = dispatcher_;
    for (int32_t which = 0; which <= m_.shape.projections; ++which) {
      const PackedMatrix<Precision> matrix(m_, which, next_.expert);
      const int64_t depth = int64_t{m_.shape.hidden} * m_.shape.intermediate / matrix.width();
      auto* const decoded = m_.decoded_matrix(which, slot);
      for (; line < matrix.width(); line += m_.schedule.dispatchers) {
        matrix.decode(line, true, decoded + line * depth);
      }
      line -= matrix.width();
    }
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
