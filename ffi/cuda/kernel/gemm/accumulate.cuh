// Accumulate policies: how the products of a tile's steps become its sums, and when a stage has been read. Made for a
// tile, a policy offers
//
//   begin(sums)                 before the first step
//   multiply_stage(...)         issues the products of a step, calls meanwhile() while they run, and release(position)
//                               for stages that nothing reads any more
//   end(sums, position, release)
//
// All threads of a warpgroup make every call. Weights that are decoded in registers have a policy of another kind
// (packed.cuh), which has all steps.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/ptx/wgmma.cuh"
#include "cuda/kernel/gemm/stage.cuh"

namespace jaxmoe {

// The tensor cores add up the whole depth. The products of one step run while the next stage is awaited.
struct Direct {
  struct Scales {};  // of products: none
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

// Of 8-bit factors: the products of a step, 128 along the depth, are added to the sums in float32, times the scales of
// their rows and columns. Half of the tile's columns at a time, since there are no registers for all; these are also
// the columns that share a scale. Both factors lie along the depth.
//
// While one warpgroup adds, the tensor cores have the other one's products. By counting instructions a half takes them
// 256 cycles, and to add it about 110; it was not measured.
template <class Scales_>
class Promoted {
 public:
  using Scales = Scales_;

  __device__ Promoted(const Scales& scales, int lane) : scales_(scales), lane_(lane) {}

  __device__ __forceinline__ void begin(ptx::Accumulators& sums) {
    load_rows(0);
    ptx::clear_accumulators(sums);
    ptx::clear_accumulators(products_);
  }

  template <class Precision, ptx::Major kA, ptx::Major kB, class Stage, class Position, class Meanwhile, class Release>
  __device__ __forceinline__ void multiply_stage(ptx::Accumulators& sums, const Stage& stage, int first_row,
                                                 int32_t step, int32_t steps, Position position,
                                                 const Meanwhile& meanwhile, const Release& release) {
    static_assert(kA == ptx::Major::kDepth && kB == ptx::Major::kDepth);
    meanwhile();  // where the registers of the products are free
    const Step scales = load_scales(step);
    issue<Precision>(stage, first_row, 0);
    ptx::wait_products<0>();
    add<0>(sums, scales);
    issue<Precision>(stage, first_row, 1);
    const float of_rows[2] = {scales.rows[0], scales.rows[1]};
    if (step + 1 < steps) load_rows(step + 1);
    ptx::wait_products<0>();
    release(position);
    add<1>(sums, {{of_rows[0], of_rows[1]}, {0.0f, scales.columns[1]}});
  }

  template <class Position, class Release>
  __device__ __forceinline__ void end(ptx::Accumulators&, Position, const Release&) const {}

 private:
  static constexpr int kHalfColumns = Tiling::kColumns / 2;

  struct Step {
    float rows[2], columns[2];
  };

  // Those of columns come while the first half is multiplied, those of rows before it. Those of a ring change within a launch, so they are never taken from
  // L1.
  __device__ __forceinline__ Step load_scales(int32_t step) const {
    if constexpr (std::is_same_v<Scales, ScalesOfDecoded>) {
      return {{next_rows_[0], next_rows_[1]}, {__ldcg(scales_.columns[0] + step), __ldcg(scales_.columns[1] + step)}};
    } else {
      const int32_t column = step * scales_.columns_step;
      return {{next_rows_[0], next_rows_[1]}, {__ldg(scales_.columns[0] + column), __ldg(scales_.columns[1] + column)}};
    }
  }

  // Those of rows for the next step, while the last products of this one run: there are registers for these two, not for
  // those of columns too.
  __device__ __forceinline__ void load_rows(int32_t step) {
    const float* const rows = scales_.rows + step * Tiling::kRows + lane_ / 4;
    next_rows_[0] = __ldcg(rows);
    next_rows_[1] = __ldcg(rows + 8);
  }

  // The first product of a step does not add to what is in the accumulators.
  template <class Precision, class Stage>
  __device__ __forceinline__ void issue(const Stage& stage, int first_row, int half) {
    using A = typename Stage::A;
    using B = typename Stage::B;
    static_assert(A::kSliceDepth == B::kSliceDepth);
    constexpr ptx::Major kDepth = ptx::Major::kDepth;
    const uint64_t a = stage.a.template descriptor<kDepth>(first_row);
    const uint64_t b = stage.b.template descriptor<kDepth>(half * kHalfColumns);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < A::kLine / A::kSliceDepth; ++slice) {
      Precision::multiply_half(products_, ptx::advance_descriptor(a, slice * A::template kSliceBytes<kDepth>),
                               ptx::advance_descriptor(b, slice * B::template kSliceBytes<kDepth>), slice > 0);
    }
    ptx::commit_products();
  }

  template <int kHalf>
  __device__ __forceinline__ void add(ptx::Accumulators& sums, const Step& step) {
    ptx::own_accumulators(products_);
    const float factors[2] = {step.rows[0] * step.columns[kHalf], step.rows[1] * step.columns[kHalf]};
#pragma unroll
    for (int i = 0; i < 64; ++i) sums.values[64 * kHalf + i] += factors[i / 2 % 2] * products_.values[i];
  }

  const Scales& scales_;
  const int lane_;
  float next_rows_[2];
  ptx::HalfAccumulators products_;
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
