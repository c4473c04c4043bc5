// What products.cuh names: the tensors of which boxes become factors, how a factor lies, and the depth that a product
// sums over.
#pragma once

#include <cstdint>

#include "common/scheduler.h"
#include "common/tiling.h"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/params.cuh"

namespace jaxmoe {

// Tensors, by their maps in the parameters. load_box(p, task, part, box, x, y, load) calls load(map, coordinates ...) for
// the box that begins at column x of row y; `part` says which projection, where the depth has both, `box` which one of
// the tile it is.
//
// [rows, columns]
template <auto kMap>
struct Matrix {
  template <class Params, class Load>
  static __device__ __forceinline__ void load_box(const Params& p, const Task&, int32_t, int, int32_t x, int32_t y,
                                                  const Load& load) {
    load(p.*kMap, x, y);
  }
};
// [rows, planes, columns], one of the planes
template <auto kMap, int32_t kPlane>
struct Plane {
  template <class Params, class Load>
  static __device__ __forceinline__ void load_box(const Params& p, const Task&, int32_t, int, int32_t x, int32_t y,
                                                  const Load& load) {
    load(p.*kMap, x, kPlane, y);
  }
};
// The same, that of the projection.
template <auto kMap>
struct PlaneOfPart {
  template <class Params, class Load>
  static __device__ __forceinline__ void load_box(const Params& p, const Task&, int32_t part, int, int32_t x, int32_t y,
                                                  const Load& load) {
    load(p.*kMap, x, part, y);
  }
};
// [experts, rows, columns]
template <auto kMap>
struct OfExpert {
  template <class Params, class Load>
  static __device__ __forceinline__ void load_box(const Params& p, const Task& task, int32_t, int, int32_t x,
                                                  int32_t y, const Load& load) {
    load(p.*kMap, x, y, task.expert);
  }
};

// Gate and up, so that both of a column of h come to one thread: half of the tile's columns are of gate, the others the
// same of up. Without up all are of gate.
struct GateUpWeights {};

namespace forward_pass {
using Tokens = Matrix<&ForwardParams::rows>;
using HOfTokens = Matrix<&ForwardParams::h>;
using DownWeights = OfExpert<&ForwardParams::w_down>;
}  // namespace forward_pass

namespace backward_pass {
using Tokens = Plane<&BackwardParams::rows, 0>;
using OutputGradients = Plane<&BackwardParams::rows, 1>;
using GateGradients = Plane<&BackwardParams::projections, 0>;
using UpGradients = Plane<&BackwardParams::projections, 1>;
using ProjectionGradients = PlaneOfPart<&BackwardParams::projections>;
using WeightedH = Matrix<&BackwardParams::h>;
using DownWeights = OfExpert<&BackwardParams::w_down>;
struct ProjectionWeights {};
}  // namespace backward_pass

// How a factor lies: in memory and in the stages, since nothing turns it on its way.
template <class Tensor_>
struct ByDepth {
  using Tensor = Tensor_;
  static constexpr ptx::Major kMajor = ptx::Major::kDepth;
};
template <class Tensor_>
struct ByWidth {
  using Tensor = Tensor_;
  static constexpr ptx::Major kMajor = ptx::Major::kWidth;
};

// Depths. steps() of a task are the stages that it multiplies; for_each_step() calls body(part, first) with what they
// begin with.
struct Hidden {
  template <class Params>
  static __device__ __forceinline__ int32_t steps(const Params& p, const Task&) {
    return ceil_div(p.shape.hidden, Tiling::kDepth);
  }
  template <class Params, class Body>
  static __device__ __forceinline__ void for_each_step(const Params& p, const Task&, const Body& body) {
    for (int32_t k = 0; k < p.shape.hidden; k += Tiling::kDepth) body(0, k);
  }
};
struct Intermediate {
  template <class Params>
  static __device__ __forceinline__ int32_t steps(const Params& p, const Task&) {
    return ceil_div(p.shape.intermediate, Tiling::kDepth);
  }
  template <class Params, class Body>
  static __device__ __forceinline__ void for_each_step(const Params& p, const Task&, const Body& body) {
    for (int32_t k = 0; k < p.shape.intermediate; k += Tiling::kDepth) body(0, k);
  }
};
// First over that of gate, then over that of up.
struct EachProjection {
  template <class Params>
  static __device__ __forceinline__ int32_t steps(const Params& p, const Task&) {
    return p.shape.projections * ceil_div(p.shape.intermediate, Tiling::kDepth);
  }
  template <class Params, class Body>
  static __device__ __forceinline__ void for_each_step(const Params& p, const Task&, const Body& body) {
    for (int32_t part = 0; part < p.shape.projections; ++part) {
      for (int32_t k = 0; k < p.shape.intermediate; k += Tiling::kDepth) body(part, k);
    }
  }
};
// Those of the segment, whose tiles may go on at the start of the ring.
struct SegmentRows {
  template <class Params>
  static __device__ __forceinline__ int32_t steps(const Params&, const Task& task) {
    return ceil_div(task.rows, Tiling::kDepth);
  }
  template <class Params, class Body>
  static __device__ __forceinline__ void for_each_step(const Params& p, const Task& task, const Body& body) {
    const int32_t tile_rows = p.schedule.tile.rows;
    int32_t ring_slot = task.ring_slot;
    for (int32_t row = 0; row < task.rows; row += Tiling::kDepth) {
      const int32_t in_tile = row % tile_rows;
      if (row > 0 && in_tile == 0 && ++ring_slot == p.schedule.ring_tiles) ring_slot = 0;
      body(0, ring_slot * tile_rows + in_tile);
    }
  }
};

}  // namespace jaxmoe
