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
  using Number = typename Precision::Number;

  RankMemory(const Launch& launch, int32_t rank, const ArraysOf<Precision>& arrays)
      : launch(launch), shape(launch.shape), schedule(launch.schedule), arrays(arrays), rank(rank),
        formats(Formats::of(Precision::kElement)), layout(layout_of(shape, schedule, formats, launch.head)) {}

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
  Storage* ring_row(const Region& ring, int32_t ring_slot, int32_t tile_row, int32_t width) const {
    return here<Storage>(ring) + ring_index(ring_slot, tile_row) * width;
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
  Storage* projection_row(int32_t ring_slot, int32_t tile_row, int32_t which) const {
    return ring_row(layout.projections, ring_slot, tile_row, shape.projections * shape.intermediate) +
           which * shape.intermediate;
  }
};

}  // namespace jaxmoe::host
