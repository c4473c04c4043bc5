// What a rank does in a backward pass; see host/rank.h. Caller: host/executor.cc.
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
#include <cstring>
#include <vector>

#include "host/rank.h"

namespace jaxmoe::host {

template <class Precision>
class BackwardRank final : public Rank<Precision> {
 public:
  using Base = Rank<Precision>;
  using typename Base::Number;
  using typename Base::Span;
  using typename Base::Storage;

  using Base::Base;

 private:
  using Base::arrays_;
  using Base::bias_of;
  using Base::launch_;
  using Base::layout_;
  using Base::multiply_row;
  using Base::rank_;
  using Base::ring_row;
  using Base::saved_row;
  using Base::schedule_;
  using Base::shape_;
  using Base::share;
  using Base::target_of;
  using Base::row_width;

  // Tokens and the gradients of their outputs side by side, and routing weights, to where peers can read them.
  void publish(int32_t worker) override {
    const Span tokens = share(shape_.tokens, worker, schedule_.workers);
    const int32_t hidden = shape_.hidden;
    Number* routing_weights = at<Number>(launch_, rank_, layout_.routing_weights);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      Storage* row = at<Storage>(launch_, rank_, layout_.tokens) + token * row_width();
      std::copy(arrays_.x + token * hidden, arrays_.x + (token + 1) * hidden, row);
      std::copy(arrays_.dy + token * hidden, arrays_.dy + (token + 1) * hidden, row + hidden);
      const int64_t slots = token * shape_.top_k;
      std::copy(arrays_.topk_weights + slots, arrays_.topk_weights + slots + shape_.top_k, routing_weights + slots);
    }
  }

  // No task writes the gradients of an expert without rows.
  void begin(const std::vector<int32_t>& rows_per_expert, int32_t worker) override {
    for (int32_t expert = 0; expert < shape_.local_experts(); ++expert) {
      if (rows_per_expert[expert] > 0) continue;
      const auto clear = [&](void* gradient, int64_t size) {
        if (gradient == nullptr) return;
        const int64_t bytes = size * static_cast<int64_t>(arrays_.wide_gradients ? sizeof(Number) : sizeof(Storage));
        const Span own = share(bytes, worker, schedule_.workers);
        std::memset(static_cast<std::byte*>(gradient) + expert * bytes + own.begin, 0, own.end - own.begin);
      };
      const int64_t matrix = int64_t{shape_.hidden} * shape_.intermediate;
      clear(arrays_.dw_gate, matrix);
      clear(arrays_.dw_up, matrix);
      clear(arrays_.dw_down, matrix);
      clear(arrays_.db_gate, shape_.intermediate);
      clear(arrays_.db_up, shape_.intermediate);
      clear(arrays_.db_down, shape_.hidden);
    }
  }

  void note_row(int32_t ring_slot, int32_t tile_row, int32_t source, int32_t slot) override {
    *routing_weight_of(ring_slot, tile_row) =
        source < 0 ? Number{0} : at<Number>(launch_, source, layout_.routing_weights)[slot];
  }

  void compute(const Task& task) override {
    switch (task.gemm) {
      case Gemm::kGateUp: return gate_up(task);
      case Gemm::kHGradient: return h_gradient(task);
      case Gemm::kTokenGradient: return token_gradient(task);
      case Gemm::kGateGradient:
        return weight_gradient(task, {layout_.rows, row_width(), 0, shape_.hidden}, projection(0), arrays_.dw_gate,
                               arrays_.db_gate, 0, bias_sums());
      case Gemm::kUpGradient:
        return weight_gradient(task, {layout_.rows, row_width(), 0, shape_.hidden}, projection(1), arrays_.dw_up,
                               arrays_.db_up, matrix_size(), bias_sums() + shape_.intermediate);
      default:
        return weight_gradient(task, {layout_.h, shape_.intermediate, 0, shape_.intermediate},
                               {layout_.rows, row_width(), shape_.hidden, shape_.hidden}, arrays_.dw_down,
                               arrays_.db_down, shape_.projections * matrix_size(),
                               bias_sums() + shape_.projections * shape_.intermediate);
    }
  }

  void combine(int32_t worker) override {
    const Span tokens = share(shape_.tokens, worker, schedule_.workers);
    std::vector<Number> sums(shape_.hidden);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      std::fill(sums.begin(), sums.end(), Number{0});
      for (int64_t slot = token * shape_.top_k; slot < (token + 1) * shape_.top_k; ++slot) {
        const bool used = shape_.has_expert(arrays_.topk_ids[slot]);
        arrays_.dtopk_weights[slot] =
            used ? at<Number>(launch_, rank_, layout_.routing_weight_gradients)[slot] : Number{0};
        if (!used) continue;
        const Storage* answer = at<Storage>(launch_, rank_, layout_.answers) + slot * shape_.hidden;
        for (int32_t c = 0; c < shape_.hidden; ++c) sums[c] += Precision::load(answer[c]);
      }
      std::transform(sums.begin(), sums.end(), arrays_.dx + token * shape_.hidden, Precision::store);
    }
  }

  // --- where things lie ----------------------------------------------------------------------------------------------

  int64_t ring_index(int32_t ring_slot, int32_t tile_row) const {
    return int64_t{ring_slot} * schedule_.tile.rows + tile_row;
  }
  Number* routing_weight_of(int32_t ring_slot, int32_t tile_row) const {
    return at<Number>(launch_, rank_, layout_.row_routing_weights) + ring_index(ring_slot, tile_row);
  }
  Number* products_of(int32_t ring_slot, int32_t tile_row) const {
    return at<Number>(launch_, rank_, layout_.row_products) +
           ring_index(ring_slot, tile_row) * gradient_tiles(shape_, schedule_.tile);
  }
  // Gate (0) or up (1) of a row.
  Storage* projection_row(int32_t ring_slot, int32_t tile_row, int32_t which) const {
    return ring_row(layout_.projections, ring_slot, tile_row, shape_.projections * shape_.intermediate) +
           which * shape_.intermediate;
  }
  int64_t matrix_size() const { return int64_t{shape_.hidden} * shape_.intermediate; }
  int64_t bias_sums() const { return (shape_.projections + 1) * matrix_size(); }

  // --- gate, up and their gradients ----------------------------------------------------------------------------------

  void gate_up(const Task& task) {
    const int32_t width = shape_.intermediate;
    const int32_t first = task.column_tile * schedule_.tile.h_columns;
    const int32_t columns = std::min(task.column_tiles * schedule_.tile.h_columns, width - first);
    std::vector<Number> sums(columns);
    for (int32_t i = 0; i < task.rows; ++i) {
      const Storage* row = ring_row(layout_.rows, task.ring_slot, i, row_width());
      const auto project = [&](int32_t which, const Storage* weights, const Storage* bias) {
        multiply_row(row, weights + task.expert * matrix_size(), shape_.hidden, width, first, columns, sums.data());
        Storage* out = projection_row(task.ring_slot, i, which) + first;
        for (int32_t c = 0; c < columns; ++c) {
          out[c] = Precision::store(sums[c] + bias_of(bias, int64_t{task.expert} * width + first + c));
        }
      };
      project(0, arrays_.w_gate, arrays_.b_gate);
      if (shape_.projections > 1) project(1, arrays_.w_up, arrays_.b_up);
    }
  }

  // row . line for a line of a [width, depth] matrix.
  static Number multiply_line(const Storage* row, const Storage* line, int32_t depth) {
    Number sum = 0;
    for (int32_t k = 0; k < depth; ++k) sum += Precision::load(row[k]) * Precision::load(line[k]);
    return sum;
  }

  void h_gradient(const Task& task) {
    const Storage* weights = arrays_.w_down + task.expert * matrix_size();
    for (int32_t tile = task.column_tile; tile < task.column_tile + task.column_tiles; ++tile) {
      const int32_t first = tile * schedule_.tile.columns;
      const int32_t end = std::min(first + schedule_.tile.columns, shape_.intermediate);
      for (int32_t i = 0; i < task.rows; ++i) {
        const Storage* dy = ring_row(layout_.rows, task.ring_slot, i, row_width()) + shape_.hidden;
        Storage* gate = projection_row(task.ring_slot, i, 0);
        Storage* up = shape_.projections > 1 ? projection_row(task.ring_slot, i, 1) : nullptr;
        Storage* h = ring_row(layout_.h, task.ring_slot, i, shape_.intermediate);
        const Number routing_weight = *routing_weight_of(task.ring_slot, i);
        Number product = 0;
        const bool saved = task.part == kSavedPart;
        const Storage* gate_value = saved ? saved_row(task.row_tile, i, 0) : gate;
        const Storage* up_value = up != nullptr && saved ? saved_row(task.row_tile, i, 1) : up;
        for (int32_t c = first; c < end; ++c) {
          const Number gradient = multiply_line(dy, weights + int64_t{c} * shape_.hidden, shape_.hidden);
          const Slopes<Number> slopes = slopes_of(launch_.activation, Precision::load(gate_value[c]),
                                                  up == nullptr ? Number{1} : Precision::load(up_value[c]));
          product += slopes.h * gradient;
          h[c] = Precision::store(routing_weight * slopes.h);
          gate[c] = Precision::store(routing_weight * gradient * slopes.gate);
          if (up != nullptr) up[c] = Precision::store(routing_weight * gradient * slopes.up);
        }
        products_of(task.ring_slot, i)[tile] = product;
      }
    }
  }

  void token_gradient(const Task& task) {
    const int32_t first = task.column_tile * schedule_.tile.columns;
    const int32_t end = std::min(first + task.column_tiles * schedule_.tile.columns, shape_.hidden);
    for (int32_t i = 0; i < task.rows; ++i) {
      const RowTarget target{*target_of(task.ring_slot, i)};
      if (target.packed == RowTarget::kNone) continue;
      Storage* out = at<Storage>(launch_, target.source(), layout_.answers) + int64_t{target.slot()} * shape_.hidden;
      for (int32_t c = first; c < end; ++c) {
        Number sum = 0;
        for (int32_t which = 0; which < shape_.projections; ++which) {
          const Storage* weights = (which == 0 ? arrays_.w_gate : arrays_.w_up) + task.expert * matrix_size();
          sum += multiply_line(projection_row(task.ring_slot, i, which), weights + int64_t{c} * shape_.intermediate,
                               shape_.intermediate);
        }
        out[c] = Precision::store(sum);
      }
      if (task.column_tile == 0) {
        at<Number>(launch_, target.source(), layout_.routing_weight_gradients)[target.slot()] =
            routing_weight_gradient(task, i);
      }
    }
  }

  // Of the routing weight of a row.
  Number routing_weight_gradient(const Task& task, int32_t tile_row) {
    Number sum = 0;
    const Number* products = products_of(task.ring_slot, tile_row);
    for (int32_t tile = 0; tile < gradient_tiles(shape_, schedule_.tile); ++tile) sum += products[tile];
    if (arrays_.b_down == nullptr) return sum;
    const Storage* dy = ring_row(layout_.rows, task.ring_slot, tile_row, row_width()) + shape_.hidden;
    return sum + multiply_line(dy, arrays_.b_down + int64_t{task.expert} * shape_.hidden, shape_.hidden);
  }

  // --- weight gradients ----------------------------------------------------------------------------------------------

  // Columns `first` to `first + columns` of a ring whose rows are `width` wide.
  struct Factor {
    Region ring;
    int32_t width, first, columns;
  };
  Factor projection(int32_t which) const {
    return {layout_.projections, shape_.projections * shape_.intermediate, which * shape_.intermediate,
            shape_.intermediate};
  }

  // gradient = rows^T columns, a tile of it, and behind it the bias gradient of its columns. `sums` and `bias_sums` are
  // where those of an expert with several segments lie in the weight sums.
  void weight_gradient(const Task& task, const Factor& rows, const Factor& columns, void* gradient, void* bias,
                       int64_t sums, int64_t bias_sums) {
    const int32_t first_row = task.weight_row_tile * schedule_.tile.rows;
    const int32_t end_row = std::min(first_row + schedule_.tile.rows, rows.columns);
    const int32_t first = task.column_tile * schedule_.tile.columns;
    const int32_t count = std::min(schedule_.tile.columns, columns.columns - first);
    std::vector<Number> line(count);
    const auto add_rows = [&](auto factor_of) {
      std::fill(line.begin(), line.end(), Number{0});
      for (int32_t i = 0; i < task.rows; ++i) {
        const int32_t slot = (task.ring_slot + i / schedule_.tile.rows) % schedule_.ring_tiles;
        const int32_t tile_row = i % schedule_.tile.rows;
        const Number factor = factor_of(slot, tile_row);
        const Storage* row = ring_row(columns.ring, slot, tile_row, columns.width) + columns.first + first;
        for (int32_t c = 0; c < count; ++c) line[c] += factor * Precision::load(row[c]);
      }
    };
    for (int32_t row = first_row; row < end_row; ++row) {
      add_rows([&](int32_t slot, int32_t tile_row) {
        return Precision::load(ring_row(rows.ring, slot, tile_row, rows.width)[rows.first + row]);
      });
      const int64_t offset = int64_t{row} * columns.columns + first;
      finish(task, line, gradient, task.expert * matrix_size() + offset, sums + offset);
    }
    if (bias != nullptr && task.weight_row_tile == 0) {
      // Gradients of gate and up have their routing weight in them already; those of outputs have not.
      const bool weighted = task.gemm == Gemm::kDownGradient;
      add_rows([&](int32_t slot, int32_t tile_row) {
        return weighted ? *routing_weight_of(slot, tile_row) : Number{1};
      });
      finish(task, line, bias, int64_t{task.expert} * columns.columns + first, bias_sums + first);
    }
  }

  // Adds what earlier segments of the expert have left, and leaves the sum to the next one or rounds it.
  // Gradients as wide as sums are their own sums.
  void finish(const Task& task, const std::vector<Number>& line, void* gradients, int64_t offset,
              int64_t sums_offset) {
    Number* sums = arrays_.wide_gradients ? static_cast<Number*>(gradients) + offset
                                          : at<Number>(launch_, rank_, layout_.weight_sums) + sums_offset;
    for (size_t c = 0; c < line.size(); ++c) {
      const Number sum = task.part & kFirstPart ? line[c] : sums[c] + line[c];
      if (task.part & kLastPart && !arrays_.wide_gradients) {
        static_cast<Storage*>(gradients)[offset + c] = Precision::store(sum);
      } else {
        sums[c] = sum;
      }
    }
  }
};

}  // namespace jaxmoe::host
