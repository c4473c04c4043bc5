// What a rank of the host executor works with: its sizes, its arrays, and where everything in the arenas lies. The
// roles (host/rank.h) and the products (host/products.h) share one.
#pragma once

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "host/executor.h"
#include "host/launch.h"

namespace jaxmoe::host {

template <class Precision>
struct RankMemory {
  using Storage = typename Precision::Storage;
  using RowStorage = typename Precision::Row::Storage;
  using Number = typename Precision::Number;

  RankMemory(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays)
      : launch(launch), shape(launch.shape), schedule(launch.schedule), arrays(arrays), rank(rank),
        formats(launch.formats), layout(layout_of(shape, schedule, formats, launch.head)) {}

  const Launch& launch;
  const Shape shape;
  const Schedule schedule;
  const ArraysOf<Precision>& arrays;
  const int32_t rank;
  const Formats formats;
  const ArenaLayout layout;

  // In the arena of any rank, and in its own.
  template <class T>
  T* at(int32_t owner, int64_t offset) const {
    return reinterpret_cast<T*>(launch.arenas[owner] + offset);
  }
  template <class T>
  T* at(int32_t owner, const Region& region) const {
    return at<T>(owner, region.offset);
  }
  template <class T>
  T* here(int64_t offset) const {
    return at<T>(rank, offset);
  }
  template <class T>
  T* here(const Region& region) const {
    return at<T>(rank, region.offset);
  }
  Control& control() const { return *here<Control>(layout.control); }

  // Of a row of tokens, and of one of the ring.
  int32_t row_width() const { return row_parts(schedule) * shape.hidden; }
  int64_t ring_index(int32_t ring_slot, int32_t tile_row) const {
    return int64_t{ring_slot} * schedule.tile.rows + tile_row;
  }
  RowStorage* ring_row(const Region& ring, int32_t ring_slot, int32_t tile_row, int32_t width) const {
    return here<RowStorage>(ring) + ring_index(ring_slot, tile_row) * width;
  }
  // Of the columns from block * kScaleColumns on of such a row.
  float& ring_row_scale(const Region& ring, int32_t ring_slot, int32_t tile_row, int32_t width, int32_t block) const {
    const int64_t rows = int64_t{schedule.ring_tiles} * schedule.tile.rows;
    return here<float>(scales_of(ring, rows, width))[ring_scale(
        schedule.tile.rows, ring_index(ring_slot, tile_row), scale_blocks(width), block)];
  }
  // Scales of a token, 0 where tokens have none; and those of one of the `tokens` that a region has.
  int32_t token_scales() const { return formats.tokens.is_scaled() ? scale_blocks(shape.hidden) : 0; }
  float* scales_of_token(int32_t owner, const Region& region, int64_t tokens, int64_t number) const {
    return at<float>(owner, scales_of(region, tokens, shape.hidden)) + number * token_scales();
  }
  // Gate (0), up (1) or down (projections) of the expert whose decoded weights are in a slot.
  RowStorage* decoded_matrix(int32_t which, int32_t weight_slot) const {
    const int64_t matrix = int64_t{shape.hidden} * shape.intermediate;
    return here<RowStorage>(layout.decoded_weights) + (int64_t{which} * schedule.weight_slots + weight_slot) * matrix;
  }
  // The scales of its blocks, where it is decoded to 8 bits.
  float* decoded_scales(int32_t which, int32_t expert) const {
    return here<float>(layout.decoded_scales) + first_decoded_scale(shape, which, expert);
  }
  uint32_t* target_of(int32_t ring_slot, int32_t tile_row) const {
    return here<uint32_t>(layout.row_targets) + ring_index(ring_slot, tile_row);
  }
  // Gate (0) or up (1) of a row of a tile that a forward pass leaves to the backward pass.
  Storage* saved_row(int32_t row_tile, int32_t tile_row, int32_t which) const {
    return arrays.gate_up + (ring_index(row_tile, tile_row) * shape.projections + which) * shape.intermediate;
  }

  // Of a backward pass.
  Number* routing_weight_of(int32_t ring_slot, int32_t tile_row) const {
    return here<Number>(layout.row_routing_weights) + ring_index(ring_slot, tile_row);
  }
  Number* products_of(int32_t ring_slot, int32_t tile_row) const {
    return here<Number>(layout.row_products) + ring_index(ring_slot, tile_row) * gradient_tiles(shape, schedule.tile);
  }
  RowStorage* projection_row(int32_t ring_slot, int32_t tile_row, int32_t which) const {
    return ring_row(layout.projections, ring_slot, tile_row, shape.projections * shape.intermediate) +
           which * shape.intermediate;
  }
};

}  // namespace jaxmoe::host
