// The consumers' half of a GEMM: two warpgroups multiply the stages of one output tile, 64 rows each or, where they decode
// weights, half of its columns each. load.cuh has the half that fills the stages, epilogues/ what becomes of the
// accumulators.
#pragma once

#include <cstdint>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/config.cuh"
#include "cuda/kernel/gemm/deep_stages.cuh"
#include "cuda/kernel/gemm/packed.cuh"
#include "cuda/kernel/gemm/steps.cuh"

namespace jaxmoe {

// Which part of the tiles this thread computes; all fields but `lane` are the same in a whole warp.
struct MathThread {
  int warpgroup;  // 0 or 1: rows 64 * warpgroup and on; of packed weights, that half of the columns
  int warp;       // 0 .. 7: rows 16 * warp and on; of packed weights, its columns (PackedPart)
  int lane;

  // The row of the tile whose address this thread has to know in the epilogue; lanes 16 and on repeat it, unused.
  __device__ __forceinline__ int32_t tile_row() const { return Roles::kWarpRows * warp + lane % Roles::kWarpRows; }

  // The same, and the compiler does not know: nothing that follows from it is kept in a register from one task to the
  // next.
  __device__ __forceinline__ MathThread anew() const { return {warpgroup, warp, ptx::read_lane()}; }

  // For threads behind the first warpgroup of the block.
  static __device__ __forceinline__ MathThread of_this_thread() {
    const int warp = Roles::warp() - Roles::kFirstMathWarp;
    return {warp / Roles::kWarpgroupWarps, warp, static_cast<int>(threadIdx.x) % 32};
  }
};

// Takes part in the hand-over of the stages of the next `steps` without using them; in_deep: of two steps each.
template <class Variant, class Meanwhile>
__device__ __forceinline__ void hand_on(const typename GemmShape<Variant>::Ring& ring,
                                        typename GemmShape<Variant>::Ring::Position& position,
                                        const MathThread& thread, int32_t steps, const Meanwhile& meanwhile,
                                        bool in_deep = false) {
  const auto hand_on_stage = [&] {
    ring.release(position, thread.lane);
    position.advance();
  };
  for (int32_t step = 0; step < steps; ++step) {
    const bool second = in_deep && step % 2 != 0;
    if (!second) ring.wait(position);
    if (is_due(step, steps)) meanwhile(step);
    if (!in_deep || second || step == steps - 1) hand_on_stage();
  }
}

// Multiplies the next `depth_steps` steps; `position` moves on by their stages. A warpgroup whose `rows` of this tile are
// none computes nothing, but takes part in every hand-over: rows is task.rows - 64 * warpgroup, of packed weights
// task.rows, and may be negative. One that decodes and has none of the matrix's columns does so too, and its sums are
// zeros. Where warpgroups share the steps (shared_steps.cuh) both have sums of the first one's rows, which are still to be
// united. Returns whether there are rows, the same answer in the whole warpgroup.
// meanwhile(step) is called in every step, or at least where something is due (steps.cuh), while its products run. `track`
// is that of the timeline. Factors (products.cuh) says how they lie in the stages and what becomes of their products;
// `scales` are those that this takes. in_deep(): whether the steps come two to a stage (deep_stages.cuh), asked where no
// register has to hold it.
template <class Variant, class Factors, class InDeep, class Meanwhile, class Track>
__device__ __forceinline__ bool multiply(const typename GemmShape<Variant>::Ring& ring,
                                         typename GemmShape<Variant>::Ring::Position& position,
                                         const MathThread& thread, int32_t rows, bool shared, const InDeep& in_deep,
                                         int32_t depth_steps,
                                         const typename Factors::Accumulate::Scales& scales, ptx::Accumulators& sums,
                                         const Meanwhile& meanwhile, const Track& track) {
  static_assert(kBoxWidth == Roles::kWarpgroupRows);

  bool idle = rows <= 0 && !shared;
  if constexpr (Variant::Precision::kPacked) {
    idle |= scales.no_columns;
    if (idle && Factors::Accumulate::kBeginsWithZeros) ptx::clear_accumulators(sums);
  }
  if (idle) {
    hand_on<Variant>(ring, position, thread, depth_steps, meanwhile, in_deep());
    // Of policies that do not begin with zeros not before that, where the compiler made 128 selects of it, for every task; of
    // others not here, where math warps spilled (docs/performance/four_bits.md).
    if constexpr (Variant::Precision::kPacked) {
      if constexpr (!Factors::Accumulate::kBeginsWithZeros) ptx::clear_accumulators(sums);
    }
    return rows > 0;
  }
  typename Factors::Accumulate accumulate(scales, thread.lane);
  accumulate.begin(sums);
  const int first_row = Roles::kWarpgroupRows * thread.warpgroup;
  if constexpr (kCanShareSteps<typename Factors::Accumulate>) {
    if (shared) {
      accumulate.template multiply_tile<typename Variant::Precision, Roles::kMathWarpgroups>(
          sums, ring, position, 0, depth_steps, meanwhile, track, thread.warpgroup);
      return rows > 0;
    }
  }
  if constexpr (Variant::Precision::kPacked) {
    using Ring = typename GemmShape<Variant>::Ring;
    const auto multiply_steps = [&](const auto& steps) __attribute__((always_inline)) {
      accumulate.template multiply_tile<typename Variant::Precision>(sums, steps, position, first_row, depth_steps,
                                                                     meanwhile, track);
    };
    if constexpr (GemmShape<Variant>::kTakesDeepSteps) {
      using Stage = typename Ring::Stage;
      if (in_deep()) {
        if constexpr (kHasDeepHalf<Stage>) {
          if (scales.one_block) {
            multiply_steps(StepsOfStages<Ring, typename Stage::DeepHalf>(ring));
            return true;
          }
        }
        multiply_steps(StepsOfStages<Ring, typename Stage::Deep>(ring));
        return true;
      }
    }
    multiply_steps(StepsOfStages<Ring, void>(ring));
  } else if constexpr (Factors::Accumulate::kTakesTiles) {
    accumulate.template multiply_tile<typename Variant::Precision>(sums, ring, position, first_row, depth_steps, meanwhile,
                                                                   track);
  } else {
    const auto release = [&](auto stage) { ring.release(stage, thread.lane); };
    for (int32_t step = 0; step < depth_steps; ++step) {
      track.stall([&] { ring.wait(position); });
      accumulate.template multiply_stage<typename Variant::Precision, Factors::kA, Factors::kB>(
          sums, ring.stage(position), first_row, step, depth_steps, position, [&] { meanwhile(step); }, release);
      position.advance();
    }
    accumulate.end(sums, position, release);
  }
  return true;
}

}  // namespace jaxmoe
