// Weight gradients of the host executor: products whose sums go over the rows of a segment, added up from one segment of
// an expert to the next. Caller: host/products.h, which has the formulas.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/scheduler.h"
#include "host/rank_memory.h"

namespace jaxmoe::host {

// Columns `first` to `first + columns` of a ring whose rows are `width` wide.
struct Factor {
  Region ring;
  int32_t width, first, columns;
};

// Gradients of a matrix and of its bias, of all experts. Column c of row r is element first + r * pitch + c * stride.
struct WeightResult {
  void* gradient;
  void* bias;
  int64_t first, pitch, stride;

  int64_t at(int64_t row, int64_t column) const { return first + row * pitch + column * stride; }
};

template <class Precision>
class WeightGradients {
  using Storage = typename Precision::Storage;
  using Number = typename Precision::Number;

 public:
  explicit WeightGradients(const RankMemory<Precision>& memory) : m_(memory) {}

  // result = rows^T columns, a tile of it, and behind it the bias gradient of its columns. `sums` and `bias_sums` are
  // where those of an expert with several segments lie in the weight sums.
  void add_up(const Task& task, const Factor& rows, const Factor& columns, const WeightResult& result, int64_t sums,
              int64_t bias_sums) const {
    const int32_t first_row = task.weight_row_tile * m_.schedule.tile.rows;
    const int32_t end_row = std::min(first_row + m_.schedule.tile.rows, rows.columns);
    const int32_t first = task.column_tile * m_.schedule.tile.columns;
    const int32_t count = std::min(m_.schedule.tile.columns, columns.columns - first);
    std::vector<Number> line(count);
    const auto add_rows = [&](auto factor_of) {
      std::fill(line.begin(), line.end(), Number{0});
      for (int32_t i = 0; i < task.rows; ++i) {
        const int32_t slot = (task.ring_slot + i / m_.schedule.tile.rows) % m_.schedule.ring_tiles;
        const int32_t tile_row = i % m_.schedule.tile.rows;
        const Number factor = factor_of(slot, tile_row);
        const Storage* row = m_.ring_row(columns.ring, slot, tile_row, columns.width) + columns.first + first;
        for (int32_t c = 0; c < count; ++c) line[c] += factor * Precision::load(row[c]);
      }
    };
    for (int32_t row = first_row; row < end_row; ++row) {
      add_rows([&](int32_t slot, int32_t tile_row) {
        return Precision::load(m_.ring_row(rows.ring, slot, tile_row, rows.width)[rows.first + row]);
      });
      const int64_t at = result.at(int64_t{task.expert} * rows.columns + row, first);
      finish(task, line, result.gradient, at, result.stride, sums + int64_t{row} * columns.columns + first);
    }
    if (result.bias != nullptr && task.weight_row_tile == 0) {
      // Gradients of gate and up have their routing weight in them already; those of outputs have not.
      const bool weighted = task.gemm == Gemm::kDownGradient;
      add_rows([&](int32_t slot, int32_t tile_row) {
        return weighted ? *m_.routing_weight_of(slot, tile_row) : Number{1};
      });
      finish(task, line, result.bias, result.at(task.expert, first), result.stride, bias_sums + first);
    }
  }

 private:
  // Adds what earlier segments of the expert have left, and leaves the sum to the next one or rounds it.
  // Gradients as wide as sums are their own sums. Those of the line are `stride` elements apart.
  void finish(const Task& task, const std::vector<Number>& line, void* gradients, int64_t offset, int64_t stride,
              int64_t sums_offset) const {
    const bool in_place = m_.arrays.wide_gradients;
    Number* sums = in_place ? static_cast<Number*>(gradients) + offset
                            : m_.template here<Number>(m_.layout.weight_sums) + sums_offset;
    const int64_t sums_stride = in_place ? stride : 1;
    for (size_t c = 0; c < line.size(); ++c) {
      Number& earlier = sums[c * sums_stride];
      const Number sum = task.part & kFirstPart ? line[c] : earlier + line[c];
      if (task.part & kLastPart && !in_place) {
        static_cast<Storage*>(gradients)[offset + c * stride] = Precision::store(sum);
      } else {
        earlier = sum;
      }
    }
  }

  const RankMemory<Precision>& m_;
};

}  // namespace jaxmoe::host
