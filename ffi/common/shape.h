// Sizes of one layer as one rank sees them, and the sizes of the tiles it is computed in. Everything in common/ is
// plain C++20 that the GPU kernel, the host executor and Python (through bindings.cc) share.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

// Functions that both a CPU and a GPU call.
#if defined(__CUDACC__)
#define JAXMOE_ANY __host__ __device__
#else
#define JAXMOE_ANY
#endif

namespace jaxmoe {

template <class Integer>
JAXMOE_ANY constexpr Integer ceil_div(Integer count, Integer size) {
  return (count + size - 1) / size;
}

// The same where `count` is rarely above `size`: then without a division, which takes a GPU some forty cycles.
JAXMOE_ANY constexpr int32_t few_parts(int32_t count, int32_t size) {
  return count <= size ? (count > 0 ? 1 : 0) : ceil_div(count, size);
}

// A quotient of numbers below 2^20, on a GPU without a division of integers: the half that is added keeps the exact one
// further from a whole number than two units in the last place, by which it may be wrong (tests/host/test_task_walk.py).
// Callers have row tiles of a rank (producer.cuh), tiles of a unit (launch.cu), and tiles of an expert's weights.
inline constexpr int32_t kMostOfSmallQuotient = 1 << 20;
JAXMOE_ANY inline int32_t small_quotient(int32_t number, int32_t divisor) {
#if defined(__CUDA_ARCH__)
  return static_cast<int32_t>(__fdividef(static_cast<float>(number) + 0.5f, static_cast<float>(divisor)));
#else
  return number / divisor;
#endif
}

// Tiles of that size over `count`, which is not negative. Those of a GPU are powers of two (tiling.h).
JAXMOE_ANY constexpr int32_t tiles_over(int32_t count, int32_t size) {
#if defined(__CUDA_ARCH__)
  return (count + size - 1) >> (31 - __clz(size));
#else
  return ceil_div(count, size);
#endif
}

// Quotients of numbers up to 2^31 - 1 by one divisor that is not known when this is compiled, without a division for
// each.
struct Quotient {
  uint32_t divisor;
  uint32_t inverse;  // of 2^32, rounded down: a quotient found with it is right or one too small

  JAXMOE_ANY constexpr explicit Quotient(uint32_t divisor) : divisor(divisor), inverse(UINT32_MAX / divisor) {}
  JAXMOE_ANY constexpr uint32_t of(uint32_t number) const {
    const auto found = static_cast<uint32_t>(uint64_t{number} * inverse >> 32);
    return found + (number - found * divisor >= divisor ? 1 : 0);
  }
};

template <class Integer>
JAXMOE_ANY constexpr Integer at_most(Integer value, Integer limit) {
  return value < limit ? value : limit;
}

// The fields of a struct that has nothing but int32, in order: for code that treats all alike.
template <class Struct>
constexpr std::array<int32_t, sizeof(Struct) / sizeof(int32_t)> numbers_of(const Struct& all) {
  return std::bit_cast<std::array<int32_t, sizeof(Struct) / sizeof(int32_t)>>(all);
}

struct Shape {
  int32_t ranks;         // of the expert-parallel group
  int32_t tokens;        // of this rank; the same on all ranks
  int32_t hidden;        // width of a token
  int32_t intermediate;  // width between the two GEMMs of an expert
  int32_t num_experts;   // of the group
  int32_t top_k;         // slots per token
  int32_t projections = 2;  // of an expert's tokens: 2, gate and up, or 1, gate alone

  JAXMOE_ANY constexpr int32_t local_experts() const { return num_experts / ranks; }
  // Whether an id names an expert. Any other, -1 among them, is that of a slot nobody uses. One unsigned comparison.
  JAXMOE_ANY constexpr bool has_expert(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_experts);
  }
  // A slot is one (token, k) pair of a rank, numbered token * top_k + k; with its expert it becomes a row.
  JAXMOE_ANY constexpr int32_t slots() const { return tokens * top_k; }
  // Rows of this rank if every slot of every rank names its experts.
  JAXMOE_ANY constexpr int64_t max_rows() const { return int64_t{ranks} * slots(); }
};

// The result of one task. Gate and up of a column share an accumulator, so a gated tile has half as many columns of h.
struct TileSizes {
  int32_t rows;
  int32_t h_columns;  // of h, for one gate/up task
  int32_t columns;    // of the result of any other task, such as an expert's answer
};

// Of the two products between tokens and answers, the one that a launch computes where it is not both: tokens with a
// matrix, to an array of the caller's, or rows of such an array with a matrix, to the ranks that own the tokens
// (common/exchange.h).
inline constexpr int32_t kFirstHalf = 1;
inline constexpr int32_t kSecondHalf = 2;

// How the work of a rank is ordered and how much memory it takes. Any legal value gives the same bits, but that weight
// gradients are summed by segments.
struct Schedule {
  TileSizes tile;
  int32_t unit_tiles;  // most row tiles of one expert that are worked on together, so that they share its weights
  int32_t lag_units;   // the down GEMM of a unit comes after the gate/up GEMM of the unit that many later
  int32_t ring_tiles;  // row tiles that the rings hold
  int32_t workers;     // thread blocks (clusters, where several share a task); CPU threads on the host
  int32_t chunk_rows;  // rows that a dispatcher pulls at a time
  int32_t dispatchers;  // over all workers
  int32_t narrow_rows;  // an expert's last tile of at most this many rows is computed two column tiles at a time
  int32_t keep_tokens;  // 1: a peer's token that was pulled is kept for the rows of further experts; 0: it is not
  // Of a backward pass: most row tiles of one expert whose weight gradients are summed at once. 0: a forward pass.
  int32_t segment_tiles;
  // Row tiles, the first ones of a rank, whose gate and up the forward pass leaves to the backward pass, which computes
  // those of the others again. 0: of all.
  int32_t saved_tiles;
  // Experts whose weights a ring holds, decoded from fewer bits than they are multiplied in. 0: there is no ring. What
  // is multiplied is then as the caller has it, but for weights in 4 bits beside wider rows, which the tasks decode that
  // multiply them.
  int32_t weight_slots;
  int32_t half;  // kFirstHalf or kSecondHalf; 0: a layer, or nothing is multiplied
  // 1: a backward pass makes no gradients of weights and biases, as beside experts that are not trained. One that
  // decodes weights never does.
  int32_t frozen;
  // 1: of a narrow tile an answer is computed one column tile at a time, whose columns the blocks of a worker share:
  // more tasks, for when with two at a time many workers have none. A forward pass alone does that.
  int32_t share_columns;
  // Row tiles, the first ones of a rank, whose answers stay here until they are added up token by token; what travels
  // to the owner of a token is their sum. Answers of the others travel each on its own. 0: all do. Of a forward pass.
  int32_t summed_tiles;

  JAXMOE_ANY constexpr bool backward() const { return segment_tiles > 0; }
  // Rows are dispatched or combined and nothing is multiplied, or what lies in the caller's array is: there is no ring.
  JAXMOE_ANY constexpr bool exchanges() const { return ring_tiles == 0; }
  JAXMOE_ANY constexpr bool is_first_half() const { return half == kFirstHalf; }
  JAXMOE_ANY constexpr bool is_second_half() const { return half == kSecondHalf; }
  // Ahead of the tasks that multiply them.
  JAXMOE_ANY constexpr bool decodes() const { return weight_slots > 0; }
  JAXMOE_ANY constexpr bool sums_at_experts() const { return summed_tiles > 0; }
  JAXMOE_ANY constexpr bool has_weight_gradients() const { return backward() && frozen == 0 && !decodes(); }
  // Weight gradients are sums over rows, several at a time: in a backward pass the rows of an expert are filled up with
  // rows of zeros to a multiple of this.
  JAXMOE_ANY constexpr int32_t gradient_row_multiple() const { return tile.rows % 4 == 0 ? tile.rows / 4 : 1; }
  JAXMOE_ANY constexpr int32_t row_multiple() const { return backward() ? gradient_row_multiple() : 1; }
  // Whether blocks may exchange halves of a tile of `rows` for columns: in the lower half one math warpgroup has them all,
  // and its products take little more than half the time.
  JAXMOE_ANY constexpr bool has_row_halves(int32_t rows) const {
    return rows > narrow_rows && rows <= narrow_rows + narrow_rows / 2;
  }
  // With fewer ring tiles a pull would wait for a task that comes after the tile it pulls: a deadlock.
  JAXMOE_ANY constexpr int32_t min_ring_tiles() const {
    return backward() ? segment_tiles + 2 * lag_units * unit_tiles : (lag_units + 1) * unit_tiles;
  }
  // Between the first GEMM of a unit and its last one come those of so many other units, each maybe of another expert.
  // With fewer slots, weights would be decoded only after a task that waits for them.
  JAXMOE_ANY constexpr int32_t min_weight_slots() const { return (backward() ? 2 : 1) * lag_units + 1; }
};

JAXMOE_ANY constexpr int64_t max_row_tiles(const Shape& shape, const TileSizes& tile) {
  return shape.max_rows() / tile.rows + shape.local_experts();
}
JAXMOE_ANY constexpr int32_t h_tiles(const Shape& shape, const TileSizes& tile) {
  return tiles_over(shape.intermediate, tile.h_columns);
}
JAXMOE_ANY constexpr int32_t answer_tiles(const Shape& shape, const TileSizes& tile) {
  return tiles_over(shape.hidden, tile.columns);
}
// Of a backward pass, whose tasks have as many columns of h as of an answer after the gate/up GEMM.
JAXMOE_ANY constexpr int32_t gradient_tiles(const Shape& shape, const TileSizes& tile) {
  return tiles_over(shape.intermediate, tile.columns);
}
// Rows that the backward pass counts for an expert or a part of a tile that has `rows`.
JAXMOE_ANY constexpr int32_t padded_rows(int32_t rows, int32_t multiple) { return ceil_div(rows, multiple) * multiple; }
// Tasks of one weight gradient of one segment, and of all of them.
JAXMOE_ANY constexpr int32_t weight_tiles(int32_t rows, int32_t columns, const TileSizes& tile) {
  return tiles_over(rows, tile.rows) * tiles_over(columns, tile.columns);
}
JAXMOE_ANY constexpr int32_t weight_tasks(const Shape& shape, const TileSizes& tile) {
  return shape.projections * weight_tiles(shape.hidden, shape.intermediate, tile) +
         weight_tiles(shape.intermediate, shape.hidden, tile);
}

}  // namespace jaxmoe
