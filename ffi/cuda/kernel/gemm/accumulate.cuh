// Accumulate policies: how the products of a tile's steps become its sums, and when a stage has been read. Made for a
// tile, a policy offers
//
//   begin(sums)                 before the first step
//   multiply_stage(...)         issues the products of a step, calls meanwhile() while they run, and release(position)
//                               for stages that nothing reads any more
//   end(sums, position, release)
//
// All threads of a warpgroup make every call. A policy that kTakesTiles has all steps in one call, multiply_tile(), since
// it makes one ready while another is multiplied: Promoted (promoted.cuh), and those of weights that are decoded in registers
// (packed.cuh, packed_eight_bit.cuh). Of those Promoted may have every second step in it (kCanShareSteps).
#pragma once

#include <cstdint>

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/stage.cuh"

namespace jaxmoe {

// The tensor cores add up the whole depth. The products of one step run while the next stage is awaited.
struct Direct {
  struct Scales {};  // of products: none
  static constexpr bool kTakesTiles = false;

  __device__ Direct(const Scales&, int) {}

  __device__ __forceinline__ void begin(ptx::Accumulators& sums) const { ptx::clear_accumulators(sums); }

  // Invariant: the products of stages before position.before() are complete and released, those of that one under way.
  // `first_row` is that of A, of the warpgroup.
  template <class Precision, ptx::Major kA, ptx::Major kB, class Stage, class Position, class Meanwhile, class Release>
  __device__ __forceinline__ void multiply_stage(ptx::Accumulators& sums, const Stage& stage, int first_row,
                                                 int32_t step, int32_t, Position position,
                                                 const Meanwhile& meanwhile, const Release& release) const {
    using A = typename Stage::A;
    using B = typename Stage::B;
    static_assert(A::kSliceDepth == B::kSliceDepth);
    const uint64_t a = stage.a.template descriptor<kA>(first_row);
    const uint64_t b = stage.b.template descriptor<kB>(0);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < A::kLine / A::kSliceDepth; ++slice) {
      Precision::template multiply<kA, kB>(sums, ptx::advance_descriptor(a, slice * A::template kSliceBytes<kA>),
                                           ptx::advance_descriptor(b, slice * B::template kSliceBytes<kB>));
    }
    ptx::commit_products();
    meanwhile();
    ptx::wait_products<1>();
    if (step > 0) release(position.before());
  }

  template <class Position, class Release>
  __device__ __forceinline__ void end(ptx::Accumulators& sums, Position position, const Release& release) const {
    ptx::wait_products<0>();
    ptx::own_accumulators(sums);
    release(position.before());
  }
};

template <class Accumulate>
inline constexpr bool kCanShareSteps = [] {
  if constexpr (requires { Accumulate::kCanShareSteps; }) return Accumulate::kCanShareSteps;
  return false;
}();

// Where the scales of 8-bit factors lie, for a warp: of the first step, of its first row and of the columns of each half.
// In shared memory, since sums and products leave 16 registers.
struct ScalesOfProducts {
  const float* rows;
  const float* columns[2];
  int32_t columns_step;  // from the scale of one step to that of the next: 1, or 0 where all steps have the same
};
// The same of weights that were decoded, whose steps have one each. Those of columns are written within the launch.
struct ScalesOfDecoded {
  const float* rows;
  const float* columns[2];
};

// Of 8-bit factors, each of which has the same scale all along the depth: the tensor cores add up all of it, and the sums
// are scaled at the end. They keep some 13 bits behind the binary point of the largest number on the way.
class ScaledAtEnd : public Direct {
 public:
  using Scales = ScalesOfProducts;

  __device__ ScaledAtEnd(const Scales& scales, int lane) : Direct({}, lane), scales_(scales), lane_(lane) {}

  template <class Position, class Release>
  __device__ __forceinline__ void end(ptx::Accumulators& sums, Position position, const Release& release) const {
    Direct::end(sums, position, release);
    const float* const rows = scales_.rows + lane_ / 4;
    const float of_rows[2] = {__ldcg(rows), __ldcg(rows + 8)};
    const float of_columns[2] = {__ldg(scales_.columns[0]), __ldg(scales_.columns[1])};
#pragma unroll
    for (int i = 0; i < 128; ++i) sums.values[i] *= of_rows[i / 2 % 2] * of_columns[i / 64];
  }

 private:
  const Scales& scales_;
  const int lane_;
};

}  // namespace jaxmoe
