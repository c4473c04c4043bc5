// load.cuh for tiles with few rows beside packed weights, whose steps come two to a stage (deep_stages.cuh). Their blocks have
// own columns, so nothing is loaded for another one.
#pragma once

#include <cstdint>

#include "common/scheduler.h"
#include "common/tiling.h"
#include "cuda/device/ptx/tma.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/load.cuh"
#include "cuda/kernel/gemm/products.cuh"

namespace jaxmoe {

// What a stage of a block's part of a task is given, of both its steps; k: the depth at which it begins.
template <class Product, class Deep, class Variant>
class DeepLoads {
  using Rows = typename Product::A::Tensor;
  static constexpr bool kDown = Product::kGemm == Gemm::kDown;
  static constexpr bool kRowScales = requires(Deep& deep) { deep.row_scales; };
  static constexpr int kSharedBoxes = GemmShape<Variant>::Stage::B::kBoxes / Tiling::kBlocks;

 public:
  static constexpr int32_t kDepth = Deep::B::kLine, kStepDepth = kDepth / Deep::kSteps;

  __device__ __forceinline__ DeepLoads(const Cta<Variant>& cta, const Task& task, uint64_t b_policy, uint64_t a_policy)
      : cta_(cta), task_(task), depth_(kDown ? cta.params.shape.intermediate : cta.params.shape.hidden),
        first_row_(first_row_of<Variant>(task)), row_boxes_(ceil_div(task.rows, kFewRows)),
        b_boxes_(task.rows == 0 ? 0 : kDown && cta.shares_columns(task) ? kSharedBoxes : Deep::B::kBoxes),
        b_policy_(b_policy), a_policy_(a_policy), b_(Product::DeepB::columns_of(cta.params, task)) {
    if constexpr (kDown) b_.first = cta.first_answer_column(task);
  }

  __device__ __forceinline__ int32_t stages() const { return ceil_div(depth_, kDepth); }

  __device__ __forceinline__ uint32_t weight_bytes() const { return b_boxes_ * Deep::B::kBoxBytes; }
  __device__ __forceinline__ void load_weights(Deep& stage, uint64_t* full, int32_t k) const {
#pragma unroll
    for (int box = 0; box < Deep::B::kBoxes; ++box) {
      if (box >= b_boxes_) break;
      b_.load(cta_.params, task_, 0, k, box, [&](const CUtensorMap& map, auto... at) {
        ptx::load_box(stage.b.box(box), &map, full, b_policy_, at...);
      });
    }
  }

  // Of the rows of all steps that there are.
  __device__ __forceinline__ uint32_t row_bytes(int32_t k) const {
    constexpr int32_t kOfBox = kFewRows * kStepDepth * sizeof(typename GemmShape<Variant>::Element);
    constexpr int32_t kScalesOfBox = kRowScales ? kFewRows * sizeof(float) : 0;
    return steps_at(k) * row_boxes_ * (kOfBox + kScalesOfBox);
  }
  __device__ __forceinline__ void load_rows(Deep& stage, uint64_t* full, int32_t k) const {
    using Step = typename Deep::A;
    const int32_t steps = steps_at(k);
#pragma unroll 1
    for (int32_t row = 0; row < row_boxes_ * kFewRows; row += kFewRows) {
#pragma unroll
      for (int step = 0; step < Deep::kSteps; ++step) {
        if (step >= steps) break;
#pragma unroll
        for (int panel = 0; panel < Step::kPanels; ++panel) {
          ptx::load_box(stage.a[step].panel(panel).lines[row], &(cta_.params.*Rows::kFewMap), full, a_policy_,
                        k + step * kStepDepth + panel * Step::kLine, first_row_ + row);
        }
      }
    }
    if constexpr (kRowScales) {
      if (row_boxes_ == 0) return;
#pragma unroll
      for (int step = 0; step < Deep::kSteps; ++step) {
        if (step >= steps) break;
        ptx::load_bytes(stage.row_scales[step], first_row_scale<Product>(cta_, task_, k + step * kStepDepth), full,
                        row_boxes_ * kFewRows * sizeof(float));
      }
    }
  }

 private:
  // The last stage may have one step alone.
  __device__ __forceinline__ int32_t steps_at(int32_t k) const {
    return at_most(ceil_div(depth_ - k, kStepDepth), static_cast<int32_t>(Deep::kSteps));
  }

  const Cta<Variant>& cta_;
  const Task& task_;
  const int32_t depth_, first_row_, row_boxes_, b_boxes_;
  const uint64_t b_policy_, a_policy_;
  typename Product::DeepB b_;
};

// Has the weights of a task's first stages on their way before its rows are waited for, `most` at most, and as far as stages
// are empty. Returns of how many: load_deep_tile() goes on from there.
template <class Product, class Deep, class Variant>
__device__ __forceinline__ int32_t load_deep_weights_first(const Cta<Variant>& cta,
                                                           const typename GemmShape<Variant>::Ring& ring,
                                                           typename GemmShape<Variant>::Ring::Position position,
                                                           const Task& task, uint64_t b_policy, int32_t most) {
  const DeepLoads<Product, Deep, Variant> loads(cta, task, b_policy, b_policy);
  const int32_t stages = at_most(loads.stages(), most);
  int32_t begun = 0;
#pragma unroll 1
  for (; begun < stages && ring.is_empty(position); ++begun) {
    ring.expect(position, loads.weight_bytes());
    loads.load_weights(ring.stage(position).template as<Deep>(), ring.full(position), begun * loads.kDepth);
    position.advance();
  }
  return begun;
}

// As load_tile(), near_end() before the last kDeepStagesLeft stages.
inline constexpr int32_t kDeepStagesLeft = 2;
template <class Product, class Deep, class Variant, class Track, class NearEnd>
__device__ __forceinline__ bool load_deep_tile(const Cta<Variant>& cta, const typename GemmShape<Variant>::Ring& ring,
                                               typename GemmShape<Variant>::Ring::Position& position, const Task& task,
                                               uint64_t b_policy, uint64_t a_policy, int32_t begun, const Track& track,
                                               const NearEnd& near_end) {
  const DeepLoads<Product, Deep, Variant> loads(cta, task, b_policy, a_policy);
  const int32_t stages = loads.stages();
#pragma unroll 1
  for (int32_t nth = 0; nth < stages; ++nth) {
    if (nth == stages - kDeepStagesLeft) near_end();
    const int32_t k = nth * loads.kDepth;
    auto& stage = ring.stage(position).template as<Deep>();
    uint64_t* const full = ring.full(position);
    if (nth < begun) {
      ring.commit(position, loads.row_bytes(k));
    } else {
      track.stall([&] { ring.acquire(position); });
      ring.commit(position, loads.weight_bytes() + loads.row_bytes(k));
      loads.load_weights(stage, full, k);
    }
    loads.load_rows(stage, full, k);
    position.advance();
  }
  return stages >= kDeepStagesLeft;
}

}  // namespace jaxmoe
