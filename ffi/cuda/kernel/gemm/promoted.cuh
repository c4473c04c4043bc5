// The Accumulate policy (accumulate.cuh) of 8-bit factors whose sums leave the tensor cores at every step, with the loop
// over steps in it: what a step needs is made ready while products run, those of the step before among them.
//
// A step is 128 along the depth. Its products are added to the sums in float32, times the scales of their rows and columns,
// half of the tile's columns at a time: for all there are no registers, and these are the columns that share a scale.
//
//   products      | half 0 |          | half 1 |          | half 0 |
//   instructions           add half 0          add half 1
//                                     next step's stage, scales, descriptors
//
// Where warpgroups share the steps half 1 is added, and the stage given back, before the next stage is awaited.
//
// While one warpgroup adds, the tensor cores have the other one's products. A half takes them 256 cycles, so a warpgroup may
// be as long without products of its own. What stood between two steps before took longer
// (docs/performance/eight_bits.md, "What stood between products").
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx/registers.cuh"
#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/accumulate.cuh"
#include "cuda/kernel/gemm/stage.cuh"
#include "cuda/kernel/gemm/steps.cuh"
#include "cuda/kernel/roles.cuh"

namespace jaxmoe {

template <class Scales_>
class Promoted {
 public:
  using Scales = Scales_;
  static constexpr bool kTakesTiles = true;

  __device__ Promoted(const Scales& scales, int) : scales_(scales) {}

  // Two warpgroups can multiply the same rows, every second step each (shared_steps.cuh). Not where weights are decoded:
  // few tiles have so few rows then.
  static constexpr bool kCanShareSteps = std::is_same_v<Scales, ScalesOfProducts>;

  __device__ __forceinline__ void begin(ptx::Accumulators& sums) const { ptx::clear_accumulators(sums); }

  // All steps of a tile, or every second one, from `first_step` on; the stages of the others are handed on. Both factors
  // lie along the depth; `first_row` is that of A, of the warpgroup.
  template <class Precision, int kEvery = 1, class Ring, class Meanwhile, class Track>
  __device__ __forceinline__ void multiply_tile(ptx::Accumulators& sums, const Ring& ring,
                                                typename Ring::Position& position, int first_row, int32_t steps,
                                                const Meanwhile& meanwhile, const Track& track, int32_t first_step = 0) {
    using Stage = typename Ring::Stage;
    const auto hand_on = [&](auto of_others) {
      ring.wait(of_others);
      ring.release(of_others, ptx::read_lane());
    };
    if (kEvery > 1 && first_step > 0) {
      hand_on(position);
      position.advance();
    }
    if (first_step >= steps) return meanwhile(steps - 1);
    load_scales(first_step);
    ptx::clear_accumulators(products_);
    track.stall([&] { ring.wait(position); });
    uint32_t place = descriptor_place(ring.stage(position).a);
    const auto multiply_step = [&](int32_t step) __attribute__((always_inline)) {
      const uint32_t of_all_lanes = ptx::as_uniform(place);
      issue<Precision, Stage>(of_all_lanes, first_row, 0);
      ptx::wait_products<0>();
      add<0>(sums, next_.rows[0] * next_.columns[0], next_.rows[1] * next_.columns[0]);
      issue<Precision, Stage>(of_all_lanes, first_row, 1);
      const float factors[2] = {next_.rows[0] * next_.columns[1], next_.rows[1] * next_.columns[1]};
      const auto finish = [&]() __attribute__((always_inline)) {
        ptx::wait_products<0>();
        ring.release(position, ptx::read_lane());
        add<1>(sums, factors[0], factors[1]);
      };
      // Of few rows loads are the limit: the stage is given back before the next two are awaited. Otherwise up to half of
      // the ring is empty meanwhile (docs/performance/eight_bits.md, "Few rows in 8 bits").
      if constexpr (kEvery > 1) finish();
      if (step + kEvery < steps) {
        // In a recording this wait counts as one, though products of this step run beside it.
        load_scales(step + kEvery);
        track.stall([&] {
          if constexpr (kEvery > 1) hand_on(position.after());
          ring.wait(position.after(kEvery));
        });
        place = descriptor_place(ring.stage(position.after(kEvery)).a);
      }
      if constexpr (kEvery == 1) finish();
      position = position.after(kEvery);
    };
    // Where something is due the registers of the products are free. Recording leaves too few.
    if constexpr (kEvery == 1) {
      for_each_step<Track::kRecords>(steps, meanwhile, multiply_step);
    } else {
      static_assert(kEvery == 2);
      int32_t step = first_step;
#pragma unroll 1
      for (; step < steps; step += kEvery) {
        const int32_t next = step + 1;
        meanwhile(next < steps && is_due(next, steps) ? next : step);
        multiply_step(step);
      }
      // `position` is that of `step`, and the tile ends at `steps`.
      if (step > steps) {
        position = position.before();
      } else {
        hand_on(position.before());
      }
    }
  }

 private:
  static constexpr int kHalfColumns = Tiling::kColumns / 2;

  // Of a step, for the rows and columns of a thread.
  struct StepScales {
    float rows[2], columns[2];
  };

  // Those of a ring change within a launch, and so do those of decoded weights: they are never taken from L1. Offsets have
  // no sign and the lane is read anew: an index that is extended, and what follows from a lane, would be held in registers.
  __device__ __forceinline__ void load_scales(int32_t step) {
    const float* const rows = scales_.rows + static_cast<uint32_t>(step * Tiling::kRows + ptx::read_lane() / 4);
    next_.rows[0] = __ldcg(rows);
    next_.rows[1] = __ldcg(rows + 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (std::is_same_v<Scales, ScalesOfDecoded>) {
        next_.columns[half] = __ldcg(scales_.columns[half] + static_cast<uint32_t>(step));
      } else {
        next_.columns[half] = __ldg(scales_.columns[half] + static_cast<uint32_t>(step * scales_.columns_step));
      }
    }
  }

  // The first product of a step does not add to what is in the accumulators.
  template <class Precision, class Stage>
  __device__ __forceinline__ void issue(uint32_t place, int first_row, int half) {
    using A = typename Stage::A;
    using B = typename Stage::B;
    static_assert(A::kSliceDepth == B::kSliceDepth && offsetof(Stage, b) == sizeof(A));
    constexpr ptx::Major kDepth = ptx::Major::kDepth;
    const uint32_t rows = place + first_row * (A::kLineBytes / ptx::kDescriptorUnit);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < A::kLine / A::kSliceDepth; ++slice) {
      const uint32_t a = slice * A::template kSliceBytes<kDepth>;
      const uint32_t b = sizeof(A) + half * kHalfColumns * B::kLineBytes + slice * B::template kSliceBytes<kDepth>;
      Precision::multiply_half(products_, ptx::depth_major_descriptor(rows, a), ptx::depth_major_descriptor(place, b),
                               slice > 0);
    }
    ptx::commit_products();
  }

  template <int kHalf>
  __device__ __forceinline__ void add(ptx::Accumulators& sums, float of_first_row, float of_second_row) {
    ptx::own_accumulators(products_);
    const float factors[2] = {of_first_row, of_second_row};
#pragma unroll
    for (int i = 0; i < 64; ++i) sums.values[64 * kHalf + i] += factors[i / 2 % 2] * products_.values[i];
  }

  const Scales& scales_;
  StepScales next_;
  ptx::HalfAccumulators products_;
};

}  // namespace jaxmoe
