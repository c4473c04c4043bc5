// Decoding of weights that have fewer bits than they are multiplied with. Ahead of the tasks that multiply them, expert
// by expert into a ring of matrices: by dispatch of host/rank.h, where each dispatcher decodes its share of an expert
// before it pulls rows of it. Or, without a ring, by these tasks (host/products.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/formats.h"
#include "common/protocol.h"
#include "common/repacked.h"
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
  int32_t depth() const { return depth_; }

  // One line of it. `whole`: with all scales; otherwise with those of groups alone, which leaves what can be stored
  // exactly, and scale_of_sums() to multiply sums with.
  void decode(int32_t line, bool whole, typename Precision::Storage* decoded) const {
    const auto matrix = ScaledMatrix::of_expert(elements_, scales_, format_, expert_, width_, depth_);
    for (int32_t c = 0; c < depth_; ++c) {
      decoded[c] = Precision::store(element(index_of(line, c)) * (whole ? matrix.scale_of(line, c) : 1.0f));
    }
  }
  // One of kDecodedBlocks, which begins with that line and depth: its elements go into `decoded`, [width, depth], and
  // what is returned is its scale.
  float decode_block(int32_t first_line, int32_t first, E4M3::Storage* decoded) const {
    const bool power_of_two = format_.group_scale == Element::kE8M0;
    const int32_t largest_number = power_of_two ? 0xfe : 0x7e;
    int32_t largest = 0;
    for (int32_t line = first_line; line < first_line + kScaleColumns; ++line) {
      for (int32_t c = first; c < first + kScaleColumns; c += format_.group_columns) {
        const int32_t scale = groups_[index_of(line, c) / format_.group_columns] & (power_of_two ? 0xff : 0x7f);
        if (scale <= largest_number) largest = std::max(largest, scale);
      }
    }
    const float scale = std::ldexp(1.0f, decoded_block_exponent(format_.group_scale, largest));
    for (int32_t line = first_line; line < first_line + kScaleColumns; ++line) {
      for (int32_t c = first; c < first + kScaleColumns; ++c) {
        decoded[int64_t{line} * depth_ + c] = E4M3::store(element(index_of(line, c)) / scale);
      }
    }
    return scale * scale_of_sums();
  }

  // Of a format that has one for all of a matrix.
  float scale_of_sums() const { return scales_[expert_]; }

  // As multiply_scaled() takes a matrix (host/scaled_rows.h), where the scales of groups are powers of two: kScaleColumns
  // elements of a line from a depth on, exact with those scales.
  void load(int32_t line, int32_t first, float* numbers) const {
    for (int32_t k = 0; k < kScaleColumns; ++k) numbers[k] = element(index_of(line, first + k));
  }
  static constexpr bool scales_are_of_columns() { return false; }
  float scale_of(int32_t, int32_t) const { return scale_of_sums(); }

 private:
  int64_t index_of(int32_t line, int32_t column) const {
    return (int64_t{expert_} * width_ + line) * depth_ + column;
  }
  // The index-th of all experts, times the scale of its group where it has one. Exact.
  float element(int64_t index) const {
    if (format_.group_columns == 0) return E4M3::load(elements_[index]);
    const uint8_t scale = groups_[index / format_.group_columns];
    const bool repacked = format_.repacked != 0;
    const float value = load_4_bits(repacked ? repacked_code(index) : elements_[index / 2] >> index % 2 * 4);
    return value * (format_.group_scale == Element::kE8M0 ? load_power_of_two(scale) : E4M3::load(scale));
  }

  uint32_t repacked_code(int64_t index) const {
    uint32_t word, bits[4];
    std::memcpy(&word, elements_ + index / 8 * sizeof(word), sizeof(word));
    spread_repacked(bits, word, kRepackedFactors);
    const uint32_t number = bits[index % 4] >> (index % 8 / 4 * 16);
    return (number >> 12 & 8) | (number >> 6 & 7);
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
      if constexpr (Precision::kScaled) {
        decode_blocks();
      } else {
        decode_lines();
      }
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
    const DecodedExpert had = next_.before_in_slot(m_.schedule, rows_per_expert_);
    for (int32_t tile = had.first_tile; tile < had.first_tile + had.tiles; ++tile) {
      signals.wait(wait_for_answers(m_.shape, m_.schedule, tile), Site::kDecode, worker);
    }
  }

  // Every `dispatchers`th line of all matrices.
  void decode_lines() const {
    const int32_t slot = next_.weight_slot(m_.schedule);
    int32_t line = dispatcher_;
    for (int32_t which = 0; which <= m_.shape.projections; ++which) {
      const PackedMatrix<Precision> matrix(m_, which, next_.expert);
      auto* const decoded = m_.decoded_matrix(which, slot);
      for (; line < matrix.width(); line += m_.schedule.dispatchers) {
        matrix.decode(line, true, decoded + int64_t{line} * matrix.depth());
      }
      line -= matrix.width();
    }
  }

  // Every `dispatchers`th block of all matrices, which have as many each.
  void decode_blocks() const {
    const int32_t slot = next_.weight_slot(m_.schedule);
    const auto blocks = static_cast<int32_t>(decoded_blocks(m_.shape));
    for (int32_t number = dispatcher_; number < (m_.shape.projections + 1) * blocks; number += m_.schedule.dispatchers) {
      const int32_t which = number / blocks, block = number % blocks;
      const PackedMatrix<Precision> matrix(m_, which, next_.expert);
      const int32_t of_line = scale_blocks(matrix.depth());
      m_.decoded_scales(which, next_.expert)[block] =
          matrix.decode_block(block / of_line * kScaleColumns, block % of_line * kScaleColumns,
                              m_.decoded_matrix(which, slot));
    }
  }

  const RankMemory<Precision>& m_;
  const int32_t dispatcher_;
  const int32_t* const rows_per_expert_;
  DecodedExpert next_;
  bool has_next_;
};

// Where all weights are multiplied as they are.
struct NoDecoder {
  template <class Memory>
  NoDecoder(const Memory&, const int32_t*, int32_t) {}
  void decode_up_to(int32_t, Signals&, int32_t) {}
};

template <class Precision>
using DecoderOf = std::conditional_t<kDecodes<Precision> || Precision::kScaled, Decoder<Precision>, NoDecoder>;

}  // namespace jaxmoe::host
