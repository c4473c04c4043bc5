// The math warpgroups: the products of every task of this block, and what becomes of their sums (products.cuh).
// producer.cuh has the half that fills the stages.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/epilogues/across.cuh"
#include "cuda/kernel/gemm/epilogues/across_eight_bit_h.cuh"
#include "cuda/kernel/gemm/epilogues/answers.cuh"
#include "cuda/kernel/gemm/epilogues/array_rows.cuh"
#include "cuda/kernel/gemm/epilogues/eight_bit_h.cuh"
#include "cuda/kernel/gemm/epilogues/h.cuh"
#include "cuda/kernel/gemm/epilogues/h_gradient.cuh"
#include "cuda/kernel/gemm/epilogues/weight_gradient.cuh"
#include "cuda/kernel/gemm/multiply.cuh"
#include "cuda/kernel/gemm/products.cuh"
#include "cuda/kernel/gemm/rehearsal.cuh"
#include "cuda/kernel/gemm/scales.cuh"
#include "cuda/kernel/gemm/shared_steps.cuh"
#include "cuda/kernel/gemm/steps.cuh"
#include "cuda/kernel/gemm/task_queue.cuh"

namespace jaxmoe::math {

// Rows of the tile, counted from the first of this warpgroup; none or negative: it has nothing to compute. Warpgroups
// that decode share a tile by its columns.
template <class Variant>
__device__ __forceinline__ int32_t rows_left(const Cta<Variant>& cta, const Task& task, const MathThread& thread) {
  int32_t rows = task.rows;
  if constexpr (Cta<Variant>::kWeightGradients) {
    if (is_weight_gradient(task.gemm)) rows = epilogue::weight_rows_left(cta, task);
  }
  if constexpr (Variant::Precision::kPacked) return rehearsal::is_one<Variant>(task) ? 0 : rows;
  return rows - Roles::kWarpgroupRows * thread.warpgroup;
}

// Whether rows go to where each has a target: at other ranks, or in the caller's array.
template <class Epilogue>
inline constexpr bool is_answer = std::is_same_v<Epilogue, epilogue::ArrayRows> ||
                                  std::is_same_v<Epilogue, epilogue::Answers> ||
                                  std::is_same_v<Epilogue, epilogue::AcrossAnswers> ||
                                  std::is_same_v<Epilogue, epilogue::TokenGradients>;

// The target of this thread's row of a tile whose rows have such. It was written before rows_arrived was released,
// which the producer has acquired on the way to this task; or the caller has it, whatever it holds.
template <class Variant>
__device__ __forceinline__ RowTarget target_of(const Cta<Variant>& cta, const Task& task, int32_t tile_row) {
  const bool has_target = ProductsOf<Variant>::template with<EpilogueOf>(
      task.gemm, [](auto epilogue) { return is_answer<decltype(epilogue)>; });
  if (!has_target || tile_row >= task.rows) return {RowTarget::kNone};
  if constexpr (Cta<Variant>::kSecondHalf) {
    return {static_cast<uint32_t>(cta.params.row_sources[ring_row_of<Variant>(task, tile_row)])};
  }
  return {__ldcg(cta.template at<uint32_t>(cta.params.layout.row_targets) + ring_row_of<Variant>(task, tile_row))};
}

// The row of a tile that this thread stores, the first one where there are several.
template <class Variant>
__device__ __forceinline__ int32_t stored_row(const MathThread& thread) {
  if constexpr (Variant::Precision::kPacked) return epilogue::Lines::row_of(thread);
  return thread.tile_row();
}

template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta) {
  using Ring = typename GemmShape<Variant>::Ring;
  using Products = ProductsOf<Variant>;
  constexpr bool kBackward = Cta<Variant>::kBackward;
  const auto& p = cta.params;
  const MathThread thread = MathThread::of_this_thread();
  const Ring ring(cta.shared.gemm.ring);
  typename Ring::Position position;

  const auto track = cta.timeline.template track<128>(TrackRole::kMath, thread.warpgroup);
  track.start();

  // A backward pass has no register for what epilogues could keep from one task to the next; sums beside products leave
  // none to any. With the code that decodes, whoever runs it, math has fewer as well.
  constexpr bool kDecoding = Variant::Precision::kDecodes || Variant::Precision::kPacked;
  constexpr bool kScaled = Variant::Precision::kTokens.is_scaled() && !Variant::Precision::kPacked;
  constexpr bool kFewRegisters = kBackward || kScaled || kDecoding;
  constexpr bool kLateTargets = kBackward || (kDecoding && !kScaled);
  const auto in_epilogue = [&] { return kFewRegisters ? thread.anew() : thread; };
  TaskQueue<Variant> queue(cta, thread);
  for (;;) {
    const Task& task = queue.next(ring, position);
    if (task.rows == kNoMoreTasks) break;
    // Asked of shared memory each time: there is no register for it.
    const auto rehearses = [&] { return rehearsal::is_one<Variant>(task); };
    if (!rehearses()) track.mark(EventKind::kWaitStages, task);
    const int32_t steps = rehearses() ? 0 : Products::template with<DepthOf>(
        task.gemm, [&](auto depth) { return decltype(depth)::steps(p, task); });
    const int32_t rows = rows_left(cta, task, thread);
    // Asked of shared memory again where recording leaves no register to hold it.
    const auto has_rows = [&] {
      return kScaled && Variant::config.timeline ? rows_left(cta, task, thread.anew()) > 0 : rows > 0;
    };
    // Before the products, which hide how long that takes, where there is a register to hold it meanwhile; where there
    // is none for so long, before the last of them.
    RowTarget target{RowTarget::kNone};
    if constexpr (!kLateTargets && !kScaled) target = target_of(cta, task, stored_row<Variant>(thread));
    const auto meanwhile = [&](int32_t step) {
      // Packed ones are only called where it is, and have no register for the number of steps.
      if (!Variant::Precision::kPacked && !is_due(step, steps)) return;
      queue.announce_meanwhile();
      if constexpr (kScaled) {
        if (step == steps - 1 && has_rows()) {
          target = target_of(cta, task, stored_row<Variant>(thread.anew()));
          stage_channels(cta, task, thread);
        }
      }
    };
    const auto in_deep = [&] { return (static_cast<const volatile Task&>(task).part & kDeepSteps) != 0; };
    ptx::Accumulators sums;
    // Whatever they are: a rehearsal multiplies nothing.
    if constexpr (rehearsal::kTasks<Variant> > 0) ptx::own_accumulators(sums);
    // Inlined whatever its size: of a call, sums would lie in memory.
    const auto multiply_task = [&](auto factors) __attribute__((always_inline)) {
      using Factors = decltype(factors);
      using Accumulate = typename Factors::Accumulate;
      const bool shared = shares_steps<Variant, Accumulate>(task.rows);
      const auto& scales = find_scales<typename Accumulate::Scales>(cta, task, thread, shared);
      const bool has_rows =
          multiply<Variant, Factors>(ring, position, thread, rows, shared, in_deep, steps, scales, sums, meanwhile, track);
      if constexpr (kCanShareSteps<Accumulate>) {
        // Asked again: no register is held for the answer.
        if (shares_steps<Variant, Accumulate>(task.rows)) unite_sums(cta, in_epilogue(), task.rows, sums);
      }
      return has_rows;
    };
    const bool computed = Products::template with<FactorsOf>(task.gemm, multiply_task);
    if (!rehearses()) track.mark(computed ? event_of(task.gemm) : EventKind::kNoRows, task);
    if constexpr (kLateTargets) target = target_of(cta, task, stored_row<Variant>(thread));
    // In a backward pass also without rows: stages and biases are left.
    if (kBackward || computed || rehearses()) {
      Products::template with<EpilogueOf>(task.gemm, [&](auto of_product) {
        using Epilogue = decltype(of_product);
        if constexpr (std::is_same_v<Epilogue, epilogue::HGradients>) {
          Epilogue::run(cta, ring, position, task, in_epilogue(), computed, sums);
        } else if (computed || rehearses()) {
          if constexpr (is_answer<Epilogue>) {
            if (!rehearses()) answers_track(cta, thread).start();
          }
          Epilogue::run(cta, task, in_epilogue(), target, sums);
        }
        if constexpr (requires { Epilogue::run_beside(cta, task, thread, target); }) {
          Epilogue::run_beside(cta, task, in_epilogue(), target);
        }
      });
      if (!rehearses()) track.mark(EventKind::kEpilogue, task);
    }
    if (rehearses()) {
      track.start();
    } else {
      queue.stored();
    }
  }
  queue.finish(ring, position);
}

}  // namespace jaxmoe::math
