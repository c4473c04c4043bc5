// What a rank does in a forward pass; see host/rank.h. Caller: host/executor.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/rank.h"

namespace jaxmoe::host {

template <class Precision>
class ForwardRank final : public Rank<Precision> {
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

  // Tokens to where peers can read them.
  void publish(int32_t worker) override {
    if (shape_.ranks == 1) return;
    const Span tokens = share(shape_.tokens, worker, schedule_.workers);
    std::copy(arrays_.x + tokens.begin * shape_.hidden, arrays_.x + tokens.end * shape_.hidden,
              at<Storage>(launch_, rank_, layout_.tokens) + tokens.begin * shape_.hidden);
  }

  void compute(const Task& task) override {
    if (task.gemm == Gemm::kGateUp) {
      gate_up(task);
    } else {
      down(task);
    }
  }

  void gate_up(const Task& task) {
    const int32_t width = shape_.intermediate;
    const int32_t first = task.column_tile * schedule_.tile.h_columns;
    const int32_t columns = std::min(task.column_tiles * schedule_.tile.h_columns, width - first);
    const int64_t matrix = int64_t{task.expert} * shape_.hidden * width;
    const int64_t bias = int64_t{task.expert} * width + first;
    if (task.row_tile < schedule_.saved_tiles) {
      // The backward pass has rows of zeros behind the last row of an expert.
      for (int32_t i = task.rows; i < padded_rows(task.rows, schedule_.gradient_row_multiple()); ++i) {
        for (int32_t which = 0; which < shape_.projections; ++which) {
          std::fill_n(saved_row(task.row_tile, i, which) + first, columns, Storage{0});
        }
      }
    }
    std::vector<Number> gate(columns), up(columns);
    for (int32_t i = 0; i < task.rows; ++i) {
      const Storage* row = ring_row(layout_.rows, task.ring_slot, i, shape_.hidden);
      multiply_row(row, arrays_.w_gate + matrix, shape_.hidden, width, first, columns, gate.data());
      if (arrays_.w_up != nullptr) {
        multiply_row(row, arrays_.w_up + matrix, shape_.hidden, width, first, columns, up.data());
      }
      Storage* h = ring_row(layout_.h, task.ring_slot, i, width) + first;
      for (int32_t c = 0; c < columns; ++c) {
        const Number g = gate[c] + bias_of(arrays_.b_gate, bias + c);
        const Number u = arrays_.w_up == nullptr ? 1 : up[c] + bias_of(arrays_.b_up, bias + c);
        h[c] = Precision::store(activate(launch_.activation, g, u));
        if (task.row_tile >= schedule_.saved_tiles) continue;
        saved_row(task.row_tile, i, 0)[first + c] = Precision::store(g);
        if (arrays_.w_up != nullptr) saved_row(task.row_tile, i, 1)[first + c] = Precision::store(u);
      }
    }
  }

  void down(const Task& task) {
    const int32_t first = task.column_tile * schedule_.tile.columns;
    const int32_t columns = std::min(task.column_tiles * schedule_.tile.columns, shape_.hidden - first);
    const Storage* weights = arrays_.w_down + int64_t{task.expert} * shape_.intermediate * shape_.hidden;
    const int64_t bias = int64_t{task.expert} * shape_.hidden + first;
    std::vector<Number> sums(columns);
    for (int32_t i = 0; i < task.rows; ++i) {
      multiply_row(ring_row(layout_.h, task.ring_slot, i, shape_.intermediate), weights, shape_.intermediate,
                   shape_.hidden, first, columns, sums.data());
      const RowTarget target{*target_of(task.ring_slot, i)};
      Storage* out =
          at<Storage>(launch_, target.source(), layout_.answers) + int64_t{target.slot()} * shape_.hidden + first;
      for (int32_t c = 0; c < columns; ++c) out[c] = Precision::store(sums[c] + bias_of(arrays_.b_down, bias + c));
    }
  }

  // The answers of each token's experts, in the order of its slots.
  void combine(int32_t worker) override {
    const Span tokens = share(shape_.tokens, worker, schedule_.workers);
    std::vector<Number> sums(shape_.hidden);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      std::fill(sums.begin(), sums.end(), Number{0});
      for (int64_t slot = token * shape_.top_k; slot < (token + 1) * shape_.top_k; ++slot) {
        if (!shape_.has_expert(arrays_.topk_ids[slot])) continue;
        const Storage* answer = at<Storage>(launch_, rank_, layout_.answers) + slot * shape_.hidden;
        for (int32_t c = 0; c < shape_.hidden; ++c) {
          sums[c] += arrays_.topk_weights[slot] * Precision::load(answer[c]);
        }
      }
      std::transform(sums.begin(), sums.end(), arrays_.y + token * shape_.hidden, Precision::store);
    }
  }
};

}  // namespace jaxmoe::host
