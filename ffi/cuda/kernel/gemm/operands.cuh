// What products.cuh names: the tensors of which boxes become factors, how a factor lies, and the depth that a product
// sums over.
#pragma once

#include <cstdint>

#include "common/scheduler.h"
#include "common/tiling.h"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/stage.cuh"
#include "cuda/kernel/params.cuh"

namespace jaxmoe {

// Tensors, by their maps in the parameters. load(p, task, part, x, y, copy) calls copy(map, coordinates ...) for the box
// that begins at column x of row y; `part` is the projection, where the depth has both.
//
// [rows, columns], in boxes of 64 rows.
template <auto kMap_>
struct Matrix {
  static constexpr auto kMap = kMap_;
  template <class Params, class Copy>
  static __device__ __forceinline__ void load(const Params& p, const Task&, int32_t, int32_t x, int32_t y,
                                              const Copy& copy) {
    copy(p.*kMap, x, y);
  }
};
// The same: all rows of a block's tile in one box, or 16 at a time.
template <auto kMap_, auto kFewMap_>
struct TileRows : Matrix<kMap_> {
  static constexpr auto kFewMap = kFewMap_;
};
// [rows, planes, columns], one of the planes.
template <auto kMap, int32_t kPlane>
struct Plane {
  template <class Params, class Copy>
  static __device__ __forceinline__ void load(const Params& p, const Task&, int32_t, int32_t x, int32_t y,
                                              const Copy& copy) {
    copy(p.*kMap, x, kPlane, y);
  }
};
// The plane of the projection.
template <auto kMap>
struct PlaneOfPart {
  template <class Params, class Copy>
  static __device__ __forceinline__ void load(const Params& p, const Task&, int32_t part, int32_t x, int32_t y,
                                              const Copy& copy) {
    copy(p.*kMap, x, part, y);
  }
};
// [experts, rows, columns], that of the projection where there are two.
template <auto kMap, auto kSecondMap = kMap>
struct OfExpert {
  template <class Params, class Copy>
  static __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t part, int32_t x, int32_t y,
                                              const Copy& copy) {
    copy(part == 0 ? p.*kMap : p.*kSecondMap, x, y, task.expert);
  }
};

using GateUpWeights = OfExpert<&LaunchParams::w_gate, &LaunchParams::w_up>;
using DownWeights = OfExpert<&LaunchParams::w_down>;

namespace forward_pass {
using Tokens = TileRows<&ForwardParams::rows, &ForwardParams::few_rows>;
using HOfTokens = TileRows<&ForwardParams::h, &ForwardParams::few_h>;
}  // namespace forward_pass

namespace backward_pass {
using Tokens = Plane<&BackwardParams::rows, 0>;
using OutputGradients = Plane<&BackwardParams::rows, 1>;
using GateGradients = Plane<&BackwardParams::projections, 0>;
using UpGradients = Plane<&BackwardParams::projections, 1>;
using BothGradients = PlaneOfPart<&BackwardParams::projections>;  // of gate, of up
using WeightedH = Matrix<&BackwardParams::h>;
}  // namespace backward_pass

// How a factor lies: in memory and in the stages, since nothing turns it on its way. Of one tile: `first` is its first row
// of A or column of B. load(p, task, part, k, box, copy) is one box; k is where the step begins along the depth.
template <class Tensor_>
struct ByDepth {
  using Tensor = Tensor_;
  static constexpr ptx::Major kMajor = ptx::Major::kDepth;

  // Of B.
  template <class Params>
  static __device__ __forceinline__ ByDepth columns_of(const Params&, const Task& task) {
    return {task.column_tile * Tiling::kColumns};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t part, int32_t k, int box,
                                       const Copy& copy) const {
    Tensor::load(p, task, part, k, first + kBoxWidth * box, copy);
  }

  const int32_t first;
};
template <class Tensor>
struct ByWidth {
  static constexpr ptx::Major kMajor = ptx::Major::kWidth;

  template <class Params>
  static __device__ __forceinline__ ByWidth columns_of(const Params&, const Task& task) {
    return {task.column_tile * Tiling::kColumns};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t part, int32_t k, int box,
                                       const Copy& copy) const {
    Tensor::load(p, task, part, first + kBoxWidth * box, k, copy);
  }

  const int32_t first;
};
// Half of the tile's columns are of the first matrix, the others the same of the second: gate and up of a column of h
// come to one thread. Experts without up take all of the first.
template <class Tensor>
struct ByWidthInHalves {
  static constexpr ptx::Major kMajor = ptx::Major::kWidth;

  template <class Params>
  static __device__ __forceinline__ ByWidthInHalves columns_of(const Params& p, const Task& task) {
    constexpr int32_t kColumns = Tiling::kColumns;
    const int32_t first = task.column_tile * (p.gated ? kColumns / 2 : kColumns);
    return {first, p.gated ? first : first + kColumns / 2};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t, int32_t k, int box,
                                       const Copy& copy) const {
    constexpr int kHalf = Tiling::kColumns / kBoxWidth / 2;
    const bool in_second = box >= kHalf;
    Tensor::load(p, task, in_second, (in_second ? second : first) + box % kHalf * kBoxWidth, k, copy);
  }

  const int32_t first, second;
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
