// Accumulate policies: how the products of a tile's steps become its sums, and when a stage has been read. A policy
// offers begin() of a tile, end_step() after the products of each step were issued, end() of the tile. The last two
// call release(position) for the stages that nothing reads any more. All threads of a warpgroup make every call.
#pragma once

#include "cuda/device/ptx/wgmma.cuh"

namespace jaxmoe {

// The tensor cores add up the whole depth. The products of one step run while the next stage is awaited.
struct Direct {
  static __device__ __forceinline__ void begin(ptx::Accumulators& sums) { ptx::clear_accumulators(sums); }

  // Invariant: the products of stages before position.before() are complete and released, those of that one under way.
  template <class Position, class Release>
  static __device__ __forceinline__ void end_step(bool first, Position position, const Release& release) {
    ptx::wait_products<1>();
    if (!first) release(position.before());
  }

  template <class Position, class Release>
  static __device__ __forceinline__ void end(ptx::Accumulators& sums, Position position, const Release& release) {
    ptx::wait_products<0>();
    ptx::own_accumulators(sums);
    release(position.before());
  }
};

}  // namespace jaxmoe
