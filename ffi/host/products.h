// What a task computes: the products of both passes; those over rows, of weight gradients, are in weight_gradients.h.
// Caller: host/rank.h.
//
// With h = activation(gate, up) of a row, w its routing weight and dy the gradient of its token's output, the answer of
// an expert is w (h w_down + b_down), so that
//
//   dh = w dy w_down^T           dw = h . (dy w_down^T) + dy . b_down
//   dgate, dup from dh           dx = dgate w_gate^T + dup w_up^T
//   dw_gate = x^T dgate          dw_up = x^T dup          dw_down = (w h)^T dy          biases: sums over rows
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/activation.h"
#include "common/scheduler.h"
#include "host/decode.h"
#include "host/rank_memory.h"
#include "host/scaled_rows.h"
#include "host/weight_gradients.h"

namespace jaxmoe::host {

template <class Precision>
class Products {
  using Storage = typename Precision::Storage;
  using RowStorage = typename Precision::Row::Storage;
  using Number = typename Precision::Number;

 public:
  explicit Products(const RankMemory<Precision>& memory) : m_(memory), weight_gradients_(memory) {}

  // `weight_slot` is that of weights that are decoded ahead; others need none.
  void compute(const Task& task, int32_t weight_slot) {
    if (task.gemm == Gemm::kGateUp) return gate_up(task, weight_slot);
    if (task.gemm == Gemm::kDown) return down(task, weight_slot);
    if constexpr (!Precision::kScaled) differentiate(task, weight_slot);
  }

 private:
  void differentiate(const Task& task, int32_t weight_slot) {
    switch (task.gemm) {
      case Gemm::kHGradient: return h_gradient(task, weight_slot);
      case Gemm::kTokenGradient: return token_gradient(task, weight_slot);
      case Gemm::kGateGradient:
        return weight_gradients_.add_up(task, tokens(), projection(0), gate_up_result(0, m_.arrays.dw_gate, m_.arrays.db_gate),
                               0, bias_sums());
      case Gemm::kUpGradient:
        return weight_gradients_.add_up(task, tokens(), projection(1), gate_up_result(1, m_.arrays.dw_up, m_.arrays.db_up),
                               matrix_size(), bias_sums() + m_.shape.intermediate);
      default:
        return weight_gradients_.add_up(task, h(), {m_.layout.rows, m_.row_width(), m_.shape.hidden, m_.shape.hidden},
                               {m_.arrays.dw_down, m_.arrays.db_down, 0, m_.shape.hidden, 1},
                               m_.shape.projections * matrix_size(),
                               bias_sums() + m_.shape.projections * m_.shape.intermediate);
    }
  }

  int64_t matrix_size() const { return int64_t{m_.shape.hidden} * m_.shape.intermediate; }
  // The answer to a row, at the rank that owns its token.
  Storage* answer_at(RowTarget target) const {
    return m_.template at<Storage>(target.source(), m_.layout.answers) + int64_t{target.slot()} * m_.shape.hidden;
  }
  int64_t bias_sums() const { return (m_.shape.projections + 1) * matrix_size(); }

  static Number bias_of(const Storage* bias, int64_t index) {
    return bias == nullptr ? 0 : Precision::load(bias[index]);
  }

  // Where columns of gate (0) or up (1) lie in a row of weights, of biases and of the gradients of both: column c of row
  // r is element first + r * pitch + c * stride of the array that is given as gate's or up's.
  struct Columns {
    int64_t first, pitch, stride;
  };
  Columns columns_of(int32_t which) const {
    const int64_t pitch = m_.arrays.gate_up_pitch(m_.shape.intermediate);
    // Up's array begins behind the first `intermediate` columns, whatever they are.
    if (m_.arrays.interleaved()) return {which == 0 ? 0 : 1 - m_.shape.intermediate, pitch, 2};
    return {0, pitch, 1};
  }

  Factor tokens() const { return {m_.layout.rows, m_.row_width(), 0, m_.shape.hidden}; }
  Factor h() const { return {m_.layout.h, m_.shape.intermediate, 0, m_.shape.intermediate}; }
  Factor projection(int32_t which) const {
    return {m_.layout.projections, m_.shape.projections * m_.shape.intermediate, which * m_.shape.intermediate,
            m_.shape.intermediate};
  }
  const RowStorage* row_of(const Factor& factor, const Task& task, int32_t tile_row) const {
    return m_.ring_row(factor.ring, task.ring_slot, tile_row, factor.width) + factor.first;
  }

  WeightResult gate_up_result(int32_t which, void* gradient, void* bias) const {
    const auto [first, pitch, stride] = columns_of(which);
    return {gradient, bias, first, pitch, stride};
  }

  // The matrix of a task's expert: element (row, column) is elements[row * row_stride + column * column_stride].
  // Decoded ones lie the other way round than wide ones.
  struct Matrix {
    const Storage* elements;
    int64_t row_stride, column_stride;
  };
  // Number `which` of gate, up and down.
  Matrix matrix_of(const Task& task, int32_t which, int32_t weight_slot) const {
    const bool is_down = which == m_.shape.projections;
    const int32_t rows = is_down ? m_.shape.intermediate : m_.shape.hidden;
    const int32_t columns = is_down ? m_.shape.hidden : m_.shape.intermediate;
    if constexpr (kDecodes<Precision>) {
      return {m_.decoded_matrix(which, weight_slot), 1, rows};
    } else {
      const auto& a = m_.arrays;
      if (is_down) return {a.w_down + task.expert * matrix_size(), columns, 1};
      const auto [first, pitch, stride] = columns_of(which);
      return {(which == 0 ? a.w_gate : a.w_up) + first + task.expert * rows * pitch, pitch, stride};
    }
  }

  // sums[row, c]: the rows of a task's tile times columns first + c of a matrix of its expert.
  std::vector<Number> multiply(const Task& task, const Factor& rows, int32_t which, int32_t weight_slot, int32_t first,
                               int32_t columns) const {
    if constexpr (Precision::kScaled) {
      const auto row_of_task = [&](int32_t i, int32_t depth) -> ScaledColumns {
        return {row_of(rows, task, i) + depth,
                m_.ring_row_scale(rows.ring, task.ring_slot, i, rows.width, depth / kScaleColumns)};
      };
      const bool is_down = which == m_.shape.projections;
      if (m_.schedule.decodes()) {
        const ScaledMatrix matrix{m_.decoded_matrix(which, weight_slot), m_.decoded_scales(which, task.expert),
                                  kDecodedBlocks, is_down ? m_.shape.hidden : m_.shape.intermediate, rows.columns};
        return multiply_scaled(matrix, rows.columns, m_.formats.accumulation, task.rows, first, columns, row_of_task);
      }
      if (m_.formats.weights.element == Element::kE2M1) {
        const PackedMatrix<Precision> matrix(m_, which, task.expert);
        return multiply_scaled(matrix, rows.columns, m_.formats.accumulation, task.rows, first, columns, row_of_task);
      }
      const auto& a = m_.arrays;
      const auto* const all = of_matrix(which, m_.shape.projections, a.w_gate, a.w_up, a.w_down);
      const float* const scales =
          of_matrix(which, m_.shape.projections, a.w_gate_scales, a.w_up_scales, a.w_down_scales);
      const auto matrix = ScaledMatrix::of_expert(all, scales, m_.formats.weights, task.expert,
                                                  is_down ? m_.shape.hidden : m_.shape.intermediate, rows.columns);
      return multiply_scaled(matrix, rows.columns, m_.formats.accumulation, task.rows, first, columns, row_of_task);
    } else {
      if constexpr (kDecodes<Precision>) {
        if (!m_.schedule.decodes()) return multiply_packed(task, rows, which, first, columns);
      }
      const Matrix matrix = matrix_of(task, which, weight_slot);
      std::vector<Number> sums(static_cast<size_t>(task.rows) * columns);
      for (int32_t i = 0; i < task.rows; ++i) {
        const Storage* const row = row_of(rows, task, i);
        Number* const of_row = sums.data() + int64_t{i} * columns;
        if constexpr (kDecodes<Precision>) {
          for (int32_t c = 0; c < columns; ++c) {
            of_row[c] = multiply_line(row, matrix.elements + (first + c) * matrix.column_stride, rows.columns);
          }
        } else {
          multiply_row(row, matrix, rows.columns, first, columns, of_row);
        }
      }
      return sums;
    }
  }

  // The same with columns that are decoded here, where a GPU has them in registers. The scale of all of a matrix is that
  // of the sums: what is multiplied is exact.
  std::vector<Number> multiply_packed(const Task& task, const Factor& rows, int32_t which, int32_t first,
                                      int32_t columns) const {
    const PackedMatrix<Precision> matrix(m_, which, task.expert);
    std::vector<Number> sums(static_cast<size_t>(task.rows) * columns);
    std::vector<Storage> line(rows.columns);
    for (int32_t c = 0; c < columns; ++c) {
      matrix.decode(first + c, false, line.data());
      for (int32_t i = 0; i < task.rows; ++i) {
        sums[int64_t{i} * columns + c] =
            multiply_line(row_of(rows, task, i), line.data(), rows.columns) * matrix.scale_of_sums();
      }
    }
    return sums;
  }

  // Adds row[k] * matrix[k, first + c] for all k to sums[c], for one row and `columns` columns of a matrix.
  static void multiply_row(const Storage* row, const Matrix& matrix, int32_t depth, int32_t first, int32_t columns,
                           Number* sums) {
    for (int32_t k = 0; k < depth; ++k) {
      const Number factor = Precision::load(row[k]);
      const int64_t stride = matrix.column_stride;
      const Storage* line = matrix.elements + k * matrix.row_stride + first * stride;
      if (stride != 1) {
        for (int32_t c = 0; c < columns; ++c) sums[c] += factor * Precision::load(line[c * stride]);
        continue;
      }
      // The same: but a compiler that knows the stride takes several at a time.
      for (int32_t c = 0; c < columns; ++c) sums[c] += factor * Precision::load(line[c]);
    }
  }

  // row . line, whose elements lie `stride` apart.
  static Number multiply_line(const Storage* row, const Storage* line, int32_t depth, int64_t stride = 1) {
    Number sum = 0;
    for (int32_t k = 0; k < depth; ++k) sum += Precision::load(row[k]) * Precision::load(line[k * stride]);
    return sum;
  }

  // --- rows ---------------------------------------------------------------------------------------------------------

  // Gate and up of rows: in a forward pass what the activation makes of them goes into the ring, and where they are
  // saved they too; in a backward pass they do.
  void gate_up(const Task& task, int32_t weight_slot) {
    const int32_t width = m_.shape.intermediate;
    const int32_t first = task.column_tile * m_.schedule.tile.h_columns;
    const int32_t columns = std::min(task.column_tiles * m_.schedule.tile.h_columns, width - first);
    const bool saves = !m_.schedule.backward() && task.row_tile < m_.schedule.saved_tiles;
    if (saves) {
      // The backward pass has rows of zeros behind the last row of an expert.
      for (int32_t i = task.rows; i < padded_rows(task.rows, m_.schedule.gradient_row_multiple()); ++i) {
        for (int32_t which = 0; which < m_.shape.projections; ++which) {
          std::fill_n(m_.saved_row(task.row_tile, i, which) + first, columns, Storage{0});
        }
      }
    }
    const Storage* const biases[] = {m_.arrays.b_gate, m_.arrays.b_up};
    const size_t results = static_cast<size_t>(task.rows) * columns;
    std::vector<Number> of_projection[] = {{}, std::vector<Number>(results, 1)}, activated(columns);
    for (int32_t which = 0; which < m_.shape.projections; ++which) {
      of_projection[which] = multiply(task, tokens(), which, weight_slot, first, columns);
    }
    for (int32_t i = 0; i < task.rows; ++i) {
      for (int32_t which = 0; which < m_.shape.projections; ++which) {
        const Columns in_bias = columns_of(which);
        Number* sums = of_projection[which].data() + int64_t{i} * columns;
        Storage* kept = saves ? m_.saved_row(task.row_tile, i, which) + first : nullptr;
        if constexpr (!Precision::kScaled) {
          if (m_.schedule.backward()) kept = m_.projection_row(task.ring_slot, i, which) + first;
        }
        for (int32_t c = 0; c < columns; ++c) {
          sums[c] += bias_of(biases[which], in_bias.first + task.expert * in_bias.pitch + (first + c) * in_bias.stride);
          if (kept != nullptr) kept[c] = Precision::store(sums[c]);
        }
      }
      if (m_.schedule.backward()) continue;
      const Number* gate = of_projection[0].data() + int64_t{i} * columns;
      const Number* up = of_projection[1].data() + int64_t{i} * columns;
      for (int32_t c = 0; c < columns; ++c) activated[c] = activate(m_.launch.activation, gate[c], up[c]);
      store_h(task, i, first, activated);
    }
  }

  // Columns of h from `first` on. Those of a task are whole groups where groups have scales (common/call_checks.h).
  void store_h(const Task& task, int32_t tile_row, int32_t first, const std::vector<Number>& numbers) {
    const int32_t width = m_.shape.intermediate;
    RowStorage* h = m_.ring_row(m_.layout.h, task.ring_slot, tile_row, width) + first;
    if constexpr (Precision::kScaled) {
      for (size_t c = 0; c < numbers.size(); c += kScaleColumns) {
        const int32_t block = (first + static_cast<int32_t>(c)) / kScaleColumns;
        m_.ring_row_scale(m_.layout.h, task.ring_slot, tile_row, width, block) =
            round_columns<F32>(numbers.data() + c, m_.launch.power_of_two_scales, m_.arrays.scale_of_h(), h + c);
      }
    } else {
      std::transform(numbers.begin(), numbers.end(), h, Precision::store);
    }
  }

  void down(const Task& task, int32_t weight_slot) {
    const int32_t first = task.column_tile * m_.schedule.tile.columns;
    const int32_t columns = std::min(task.column_tiles * m_.schedule.tile.columns, m_.shape.hidden - first);
    const int64_t bias = int64_t{task.expert} * m_.shape.hidden + first;
    const std::vector<Number> products = multiply(task, h(), m_.shape.projections, weight_slot, first, columns);
    for (int32_t i = 0; i < task.rows; ++i) {
      const Number* sums = products.data() + int64_t{i} * columns;
      const RowTarget target{*m_.target_of(task.ring_slot, i)};
      Storage* out = answer_at(target) + first;
      for (int32_t c = 0; c < columns; ++c) out[c] = Precision::store(sums[c] + bias_of(m_.arrays.b_down, bias + c));
    }
  }

  void h_gradient(const Task& task, int32_t weight_slot) {
    const Matrix weights = matrix_of(task, m_.shape.projections, weight_slot);
    for (int32_t tile = task.column_tile; tile < task.column_tile + task.column_tiles; ++tile) {
      const int32_t first = tile * m_.schedule.tile.columns;
      const int32_t end = std::min(first + m_.schedule.tile.columns, m_.shape.intermediate);
      for (int32_t i = 0; i < task.rows; ++i) {
        const Storage* dy = m_.ring_row(m_.layout.rows, task.ring_slot, i, m_.row_width()) + m_.shape.hidden;
        Storage* gate = m_.projection_row(task.ring_slot, i, 0);
        Storage* up = m_.shape.projections > 1 ? m_.projection_row(task.ring_slot, i, 1) : nullptr;
        // For down_gradient. Beside frozen experts there is none, and the region is empty.
        Storage* h = m_.schedule.has_weight_gradients()
                         ? m_.ring_row(m_.layout.h, task.ring_slot, i, m_.shape.intermediate)
                         : nullptr;
        const Number routing_weight = *m_.routing_weight_of(task.ring_slot, i);
        Number product = 0;
        const bool saved = (task.part & kSavedPart) != 0;
        const Storage* gate_value = saved ? m_.saved_row(task.row_tile, i, 0) : gate;
        const Storage* up_value = up != nullptr && saved ? m_.saved_row(task.row_tile, i, 1) : up;
        for (int32_t c = first; c < end; ++c) {
          const Number gradient = multiply_line(dy, weights.elements + c * weights.row_stride, m_.shape.hidden,
                                                weights.column_stride);
          const Slopes<Number> slopes = slopes_of(m_.launch.activation, Precision::load(gate_value[c]),
                                                  up == nullptr ? Number{1} : Precision::load(up_value[c]));
          product += slopes.h * gradient;
          if (h != nullptr) h[c] = Precision::store(routing_weight * slopes.h);
          gate[c] = Precision::store(routing_weight * gradient * slopes.gate);
          if (up != nullptr) up[c] = Precision::store(routing_weight * gradient * slopes.up);
        }
        m_.products_of(task.ring_slot, i)[tile] = product;
      }
    }
  }

  void token_gradient(const Task& task, int32_t weight_slot) {
    const int32_t first = task.column_tile * m_.schedule.tile.columns;
    const int32_t end = std::min(first + task.column_tiles * m_.schedule.tile.columns, m_.shape.hidden);
    for (int32_t i = 0; i < task.rows; ++i) {
      const RowTarget target{*m_.target_of(task.ring_slot, i)};
      if (target.packed == RowTarget::kNone) continue;
      Storage* out = answer_at(target);
      for (int32_t c = first; c < end; ++c) {
        Number sum = 0;
        for (int32_t which = 0; which < m_.shape.projections; ++which) {
          const Matrix weights = matrix_of(task, which, weight_slot);
          sum += multiply_line(m_.projection_row(task.ring_slot, i, which), weights.elements + c * weights.row_stride,
                               m_.shape.intermediate, weights.column_stride);
        }
        out[c] = Precision::store(sum);
      }
      if (task.column_tile == 0) {
        m_.template at<Number>(target.source(), m_.layout.routing_weight_gradients)[target.slot()] =
            routing_weight_gradient(task, i);
      }
    }
  }

  // Of the routing weight of a row.
  Number routing_weight_gradient(const Task& task, int32_t tile_row) {
    Number sum = 0;
    const Number* products = m_.products_of(task.ring_slot, tile_row);
    for (int32_t tile = 0; tile < gradient_tiles(m_.shape, m_.schedule.tile); ++tile) sum += products[tile];
    if (m_.arrays.b_down == nullptr) return sum;
    const Storage* dy = m_.ring_row(m_.layout.rows, task.ring_slot, tile_row, m_.row_width()) + m_.shape.hidden;
    return sum + multiply_line(dy, m_.arrays.b_down + int64_t{task.expert} * m_.shape.hidden, m_.shape.hidden);
  }

  const RankMemory<Precision>& m_;
  const WeightGradients<Precision> weight_gradients_;
};

}  // namespace jaxmoe::host
