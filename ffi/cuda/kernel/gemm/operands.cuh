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

// Tensors, by their maps in the parameters. load(p, task, part, x, y, copy) calls copy(map, coordinates ...) for the
// box that begins at column x of row y; `part` is the projection, where the depth has both.
//
// Rows of the ring: [rows, columns], or [rows, planes, columns], of which plane kPlane or that of the projection.
inline constexpr int32_t kNoPlanes = -1, kPlaneOfPart = -2;
template <auto kMap, int32_t kPlane = kNoPlanes>
struct RingRows {
  template <class Params, class Copy>
  static __device__ __forceinline__ void load(const Params& p, const Task&, int32_t part, int32_t x, int32_t y,
                                              const Copy& copy) {
    if constexpr (kPlane == kNoPlanes) {
      copy(p.*kMap, x, y);
    } else {
      copy(p.*kMap, x, kPlane == kPlaneOfPart ? part : kPlane, y);
    }
  }
};
// The same for A alone: a tile of rows in one box, or few of them 16 at a time.
template <auto kMap_, auto kFewMap_>
struct TileRows {
  static constexpr auto kMap = kMap_, kFewMap = kFewMap_;
};
// Weights [experts, rows, columns], as they lie; of two matrices that of the projection.
template <auto kMap, auto kSecondMap = kMap>
struct OfExpert {
  template <class Params, class Copy>
  static __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t part, int32_t x, int32_t y,
                                              const Copy& copy) {
    copy(part == 0 ? p.*kMap : p.*kSecondMap, x, y, task.expert);
  }
};

// How a factor lies: in memory and in the stages, since nothing turns it on its way. Of one tile: `first` is its first
// row of A or column of B. load(p, task, part, k, box, copy) is one box; k is where the step begins along the depth.
template <class Tensor_, ptx::Major kMajor_>
struct Operand {
  using Tensor = Tensor_;
  static constexpr ptx::Major kMajor = kMajor_;

  template <class Params>
  static __device__ __forceinline__ Operand columns_of(const Params&, const Task& task) {
    return {task.column_tile * Tiling::kColumns};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t part, int32_t k, int box,
                                       const Copy& copy) const {
    const int32_t width = first + kBoxWidth * box;
    constexpr bool kByDepth = kMajor == ptx::Major::kDepth;
    Tensor::load(p, task, part, kByDepth ? k : width, kByDepth ? width : k, copy);
  }

  int32_t first;
};
template <class Tensor>
using ByDepth = Operand<Tensor, ptx::Major::kDepth>;
template <class Tensor>
using ByWidth = Operand<Tensor, ptx::Major::kWidth>;

// Half of the tile's columns are of the first matrix, the others the same of the second: gate and up of a column of h
// come to one thread. Experts without up take all of the first.
template <class Tensor, ptx::Major kMajor_ = ptx::Major::kWidth>
struct InHalves {
  static constexpr ptx::Major kMajor = kMajor_;

  template <class Params>
  static __device__ __forceinline__ InHalves columns_of(const Params& p, const Task& task) {
    // Of columns in turn both maps have all of them: a tile's are side by side, gate and up of a column in one thread.
    const bool both = p.gated && !p.interleaved();
    const int32_t first = task.column_tile * (both ? Tiling::kColumns / 2 : Tiling::kColumns);
    return {first, both ? first : first + Tiling::kColumns / 2};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t, int32_t k, int box,
                                       const Copy& copy) const {
    constexpr int kHalf = Tiling::kColumns / kBoxWidth / 2;
    const bool in_second = box >= kHalf;
    const int32_t width = (in_second ? second : first) + box % kHalf * kBoxWidth;
    constexpr bool kByDepth = kMajor == ptx::Major::kDepth;
    Tensor::load(p, task, in_second, kByDepth ? k : width, kByDepth ? width : k, copy);
  }

  const int32_t first, second;
};

// The same of columns packed two numbers to a byte, in boxes of half a tile (PackedTile).
template <class Tensor>
struct PackedColumns {
  static constexpr ptx::Major kMajor = ptx::Major::kDepth;
  static constexpr int32_t kHalf = Tiling::kColumns / 2;

  template <class Params>
  static __device__ __forceinline__ PackedColumns columns_of(const Params&, const Task& task) {
    return {task.column_tile * Tiling::kColumns};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t, int32_t k, int box,
                                       const Copy& copy) const {
    Tensor::load(p, task, 0, k / 2, first + kHalf * box, copy);
  }

  int32_t first;
};
template <class Tensor>
struct PackedInHalves {
  static constexpr ptx::Major kMajor = ptx::Major::kDepth;

  template <class Params>
  static __device__ __forceinline__ PackedInHalves columns_of(const Params& p, const Task& task) {
    const InHalves<Tensor> halves = InHalves<Tensor>::columns_of(p, task);
    return {halves.first, halves.second};
  }
  template <class Params, class Copy>
  __device__ __forceinline__ void load(const Params& p, const Task& task, int32_t, int32_t k, int box,
                                       const Copy& copy) const {
    // The second matrix of experts without up is the first one (LaunchParams::w_up_map).
    Tensor::load(p, task, box, k / 2, box == 0 ? first : second, copy);
  }

  const int32_t first, second;
};

// Where the boxes of 64 columns of gate and of up begin among the projections of a row, for h_gradient: in planes of
// their own, or of columns in turn in one.
struct ProjectionBoxes {
  __device__ __forceinline__ ProjectionBoxes(bool interleaved, int32_t column)
      : first_column(interleaved ? 2 * column : column),
        second_column(interleaved ? 2 * column + kBoxWidth : column),
        second_plane(interleaved ? 0 : 1) {}

  int32_t first_column, second_column, second_plane;
};

// Depths. steps() of a task are the stages that it multiplies, of kDepth elements along K each; for_each_step() calls
// body(part, k) with what they begin with.
template <int32_t Shape::*kExtent, int32_t kDepth = Tiling::kDepth>
struct Along {
  static constexpr int32_t kStepDepth = kDepth;

  template <class Params>
  static __device__ __forceinline__ int32_t steps(const Params& p, const Task&) {
    return ceil_div(p.shape.*kExtent, kDepth);
  }
  template <class Params, class Body>
  static __device__ __forceinline__ void for_each_step(const Params& p, const Task&, const Body& body) {
    for (int32_t k = 0; k < p.shape.*kExtent; k += kDepth) body(0, k);
  }
};
using Hidden = Along<&Shape::hidden>;
using Intermediate = Along<&Shape::intermediate>;
// Of elements of 8 bits or fewer twice as many fit in a stage.
using HiddenByTwo = Along<&Shape::hidden, 2 * Tiling::kDepth>;
using IntermediateByTwo = Along<&Shape::intermediate, 2 * Tiling::kDepth>;

// That of gate, then that of up.
struct EachProjection {
  template <class Params>
  static __device__ __forceinline__ int32_t steps(const Params& p, const Task& task) {
    return p.shape.projections * Intermediate::steps(p, task);
  }
  template <class Params, class Body>
  static __device__ __forceinline__ void for_each_step(const Params& p, const Task&, const Body& body) {
    for (int32_t part = 0; part < p.shape.projections; ++part) {
      for (int32_t k = 0; k < p.shape.intermediate; k += Tiling::kDepth) body(part, k);
    }
  }
};

// Rows of the segment, whose tiles may go on at the start of the ring.
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
