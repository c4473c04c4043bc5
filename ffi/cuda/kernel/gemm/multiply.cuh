// The consumers' half of a GEMM: two warpgroups multiply the stages of one output tile, 64 rows each. load.cuh has the
// half that fills the stages, epilogues/ what becomes of the accumulators.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/config.cuh"

namespace jaxmoe {

// Which part of the tiles this thread computes; all fields but `lane` are the same in a whole warp.
struct MathThread {
  int warpgroup;  // 0 or 1: rows 64 * warpgroup and on
  int warp;       // 0 .. 7: rows 16 * warp and on
  int lane;

  // The row of the tile whose address this thread has to know in the epilogue; lanes 16 and on repeat it, unused.
  __device__ __forceinline__ int32_t tile_row() const { return 16 * warp + lane % 16; }

  // The same, and the compiler does not know: nothing that follows from it is kept in a register from one task to the
  // next.
  __device__ __forceinline__ MathThread anew() const { return {warpgroup, warp, ptx::read_lane()}; }

  // For threads behind the first warpgroup of the block.
  static __device__ __forceinline__ MathThread of_this_thread() {
    const int warp = Roles::warp() - Roles::kFirstMathWarp;
    return {warp / Roles::kWarpgroupWarps, warp, static_cast<int>(threadIdx.x) % 32};
  }
};

// Takes part in the hand-over of the next `steps` stages without using them.
template <class Variant, class Meanwhile>
__device__ __forceinline__ void hand_on(const typename GemmShape<Variant>::Ring& ring,
                                        typename GemmShape<Variant>::Ring::Position& position,
                                        const MathThread& thread, int32_t steps, const Meanwhile& meanwhile) {
  for (int32_t step = 0; step < steps; ++step) {
    ring.wait(position);
    meanwhile(step);
    ring.release(position, thread.lane);
    position.advance();
  }
}

// Multiplies the next `depth_steps` stages; `position` moves on by as many. A warpgroup whose `rows` of this tile are
// none computes nothing, but takes part in every hand-over: rows is task.rows - 64 * warpgroup, and may be negative.
// Returns whether the accumulators were computed, the same answer in the whole warpgroup.
// meanwhile(step) is called in every step while its products run. `track` is that of the timeline. Rows and weights lie
// in the stages as kRows and kWeights say: forward, rows along K and weights along N.
template <class Variant, ptx::Major kRows = ptx::Major::kDepth, ptx::Major kWeights = ptx::Major::kWidth,
          class Meanwhile, class Track>
__device__ __forceinline__ bool multiply_tile(const typename GemmShape<Variant>::Ring& ring,
                                              typename GemmShape<Variant>::Ring::Position& position,
                                              const MathThread& thread, int32_t rows, int32_t depth_steps,
                                              ptx::Accumulators& sums, const Meanwhile& meanwhile,
                                              const Track& track) {
  using Shape = GemmShape<Variant>;
  using Stage = typename Shape::Stage;
  constexpr int kSliceDepth = 16;
  constexpr auto slice_bytes = [](ptx::Major major) {
    return major == ptx::Major::kDepth ? kSliceDepth * sizeof(typename Shape::Element)
                                       : kSliceDepth * sizeof(Stage::weights[0][0]);
  };
  constexpr uint32_t kRowsSliceBytes = slice_bytes(kRows);
  constexpr uint32_t kWeightsSliceBytes = slice_bytes(kWeights);

  if (rows <= 0) {
    hand_on<Variant>(ring, position, thread, depth_steps, meanwhile);
    return false;
  }
  // Invariant: the products of stages before position.before() are complete and released, those of that one under way.
  ptx::clear_accumulators(sums);
  for (int32_t step = 0; step < depth_steps; ++step) {
    track.stall([&] { ring.wait(position); });
    Stage& stage = ring.stage(position);
    // 64 rows of 64 are as many bytes either way round.
    const void* rows_of_warpgroup = stage.rows[64 * thread.warpgroup];
    const uint64_t a = kRows == ptx::Major::kDepth
                           ? ptx::depth_major_descriptor(rows_of_warpgroup)
                           : ptx::width_major_descriptor(rows_of_warpgroup, sizeof(Stage::weights[0]));
    const uint64_t b = kWeights == ptx::Major::kDepth
                           ? ptx::depth_major_descriptor(stage.weights)
                           : ptx::width_major_descriptor(stage.weights, sizeof(Stage::weights[0]));
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Shape::kTileDepth / kSliceDepth; ++slice) {
      Variant::Precision::template multiply<kRows, kWeights>(sums, ptx::advance_descriptor(a, slice * kRowsSliceBytes),
                                                             ptx::advance_descriptor(b, slice * kWeightsSliceBytes));
    }
    ptx::commit_products();
    meanwhile(step);
    ptx::wait_products<1>();
    if (step > 0) ring.release(position.before(), thread.lane);
    position.advance();
  }
  ptx::wait_products<0>();
  ptx::own_accumulators(sums);
  ring.release(position.before(), thread.lane);
  return true;
}

}  // namespace jaxmoe
