// The stage decoder: a warpgroup that stands between the producer and the math warps where weights in 4 bits are decoded in
// shared memory. It takes packed columns from one ring, and writes the columns that are multiplied to another.
//
//   producer -> packed columns -> stage decoder -> columns -> math
//   producer -> rows --------------------------------------^
//
// So products are those of weights that nobody decodes, while memory and L2 see 4 bits; and a weight is decoded once for
// each tile, however many rows that has.
//
// A lane has two columns, one of each half of the tile, so both halves of gate and up. Each step is handed on, also those
// of tasks without rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/formats.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/ptx/registers.cuh"
#include "cuda/kernel/cta.cuh"
#include "cuda/kernel/gemm/decoded_lines.cuh"
#include "cuda/kernel/gemm/group_words.cuh"
#include "cuda/kernel/gemm/products.cuh"

namespace jaxmoe::stage_decoder {

// A column of a half of a task's tile, number `column` of it, and where the scales of its groups lie. That is found anew
// where they are loaded, every few steps, since there are no registers to keep it.
template <class Variant, int kGroup>
struct TileColumn {
  // Of GroupWords.
  struct Source {
    const uint8_t* groups;
    int32_t bytes;      // none of a column behind the last one
    int32_t row_bytes;  // of any other

    __device__ __forceinline__ explicit Source(const TileColumn& of) {
      constexpr int32_t kHalf = Tiling::kColumns / 2;
      const auto& p = of.cta.params;
      const bool down = of.task.gemm == Gemm::kDown, halves = p.gated && !down;
      const int32_t depth = down ? p.shape.intermediate : p.shape.hidden;
      const int32_t width = down ? p.shape.hidden : p.shape.intermediate;
      const int32_t first = down ? of.cta.first_answer_column(of.task)
                                 : of.task.column_tile * (halves ? kHalf : Tiling::kColumns);
      const int32_t in_matrix = first + of.column + (halves ? 0 : kHalf * of.half);
      const uint8_t* const matrix = down                     ? p.w_down_group_scales
                                    : halves && of.half == 1 ? p.w_up_group_scales
                                                             : p.w_gate_group_scales;
      row_bytes = depth / kGroup;
      bytes = in_matrix < width ? row_bytes : 0;
      groups = matrix + (int64_t{of.task.expert} * width + in_matrix) * row_bytes;
    }
  };

  const Cta<Variant>& cta;
  const Task& task;
  int column, half;
};

template <class Variant>
class StageDecoder {
  using InStages = typename GemmShape<Variant>::InStages;
  using PackedRing = typename InStages::PackedRing;
  using ColumnRing = typename InStages::ColumnRing;
  static constexpr bool kToE4M3 = Variant::Precision::kTokens.is_scaled();
  static constexpr int kHalf = Tiling::kColumns / 2;
  using Groups = GroupWordsOf<kToE4M3>;  // whose depth is whole blocks of 128
  static_assert(Roles::kStageDecoderThreads == kHalf);

 public:
  __device__ StageDecoder(const Cta<Variant>& cta, int warp)
      : cta_(cta), packed_(cta.shared.gemm.ring.packed_ring()), columns_(cta.shared.gemm.ring.column_ring()), warp_(warp) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t nth = 0;; ++nth) {
      packed_.wait(packed_at());
      const Task& task = cta_.shared.tasks[nth % kQueuedTasks<Variant>];
      if (task.rows == kNoMoreTasks) break;
      const int32_t steps = ProductsOf<Variant>::template with<DepthOf>(
          task.gemm, [&](auto depth) { return decltype(depth)::steps(cta_.params, task); });
      if (task.rows <= 0) {
        skip_task(steps);
      } else if (cta_.params.weight_group_columns == group_columns_of(jaxmoe::Element::kE8M0)) {
        run_task<group_columns_of(jaxmoe::Element::kE8M0)>(task, steps);
      } else {
        run_task<group_columns_of(jaxmoe::Element::kE4M3)>(task, steps);
      }
    }
    // The end mark has packed columns and columns, of no bytes.
    columns_.acquire(at());
    hand_on();
  }

 private:
  // All steps of a task, whose first packed columns are there.
  template <int kGroup>
  __device__ __forceinline__ void run_task(const Task& task, int32_t steps) {
    const auto of_half = [&](int half) { return TileColumn<Variant, kGroup>{cta_, task, column(), half}; };
    const std::conditional_t<kGroup == 32, PowerMagnitudes, ByteMagnitudes> magnitudes{};
    Groups groups[2];
    groups[0].begin(of_half(0));
    groups[1].begin(of_half(1));
    if (kToE4M3 && column() == 0) note_factors(task);
    groups[0].take_first(of_half(0));
    groups[1].take_first(of_half(1));
    if constexpr (kToE4M3) note_largest<kGroup>(groups);
    const bool one_half = cta_.shares_columns(task);
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      if (step > 0) packed_.wait(packed_at());
      auto& packed = packed_.stage(packed_at()).b.lines;
      auto& columns = columns_.stage(at()).b.lines;
      const SwizzledLine<sizeof(packed[0])> source(packed[column()], column());
      const SwizzledLine<sizeof(columns[0])> target(columns[column()], column());
      if constexpr (kToE4M3) {
        uint4 numbers[kVectorsAhead];
#pragma unroll
        for (int nth = 0; nth < kVectorsAhead; ++nth) numbers[nth] = source.template load<0>(nth);
        columns_.acquire(at());
        ptx::named_barrier<kBarrier, Roles::kStageDecoderThreads>();  // all warps have noted their scales
        decode_half<kGroup, 0>(magnitudes, numbers, source, target, groups[0]);
        if (!one_half) {
          decode_half<kGroup, 1>(magnitudes, numbers, source, target, groups[1]);
        }
      } else {
        const uint4 first[2] = {source.template load<0>(0), source.template load<0>(1)};
        const uint4 second[2] = {source.template load<1>(0), source.template load<1>(1)};
        columns_.acquire(at());
        decode_half_to_bf16<kGroup, 0>(first, target, scales_of<kGroup>(groups[0], step));
        if (!one_half) {
          decode_half_to_bf16<kGroup, 1>(second, target, scales_of<kGroup>(groups[1], step));
        }
      }
      hand_on();
      // A step of BF16 is half as deep as words are for.
      const int32_t next = step + 1;
      if (next < steps && (kToE4M3 || next % 2 == 0)) {
        groups[0].template take<kGroup>(of_half(0), kToE4M3 ? next : next / 2);
        groups[1].template take<kGroup>(of_half(1), kToE4M3 ? next : next / 2);
        if constexpr (kToE4M3) note_largest<kGroup>(groups);
      }
    }
  }
  // The same of one that has no rows.
  __device__ __forceinline__ void skip_task(int32_t steps) {
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      packed_.wait(packed_at());
      columns_.acquire(at());
      hand_on();
    }
    // So that note_largest() may count on a meeting of all warps since they read what it overwrites.
    if constexpr (kToE4M3) ptx::named_barrier<kBarrier, Roles::kStageDecoderThreads>();
  }

  // This lane's, of a half of the tile. Asked anew each time: no register is held for it.
  __device__ __forceinline__ int column() const { return Roles::kWarpThreads * warp_ + ptx::read_lane(); }

  // Both rings have the same steps.
  __device__ __forceinline__ typename ColumnRing::Position at() const { return {steps_}; }
  __device__ __forceinline__ typename PackedRing::Position packed_at() const { return {steps_}; }

  // The tensor cores read what these warps have stored. Pairs with the waits of the math warps, and with acquire() of the
  // producer: nothing of the packed columns is read any more.
  __device__ __forceinline__ void hand_on() {
    ptx::fence_proxy_async_shared();
    columns_.commit_stores(at(), ptx::read_lane());
    packed_.release(packed_at(), ptx::read_lane());
    ++steps_;
  }

  // The scales of a half of a step's line of BF16.
  template <int kGroup>
  __device__ __forceinline__ static uint32_t scales_of(const Groups& groups, int32_t step) {
    const bool second = step % 2 == 1;
    return kGroup == 16 ? groups.word(second) : groups.word(false) >> (second ? 16 : 0);
  }

  // The scales of the matrices of both halves, for the one lane that multiplies them.
  __device__ __forceinline__ void note_factors(const Task& task) const {
    const auto& p = cta_.params;
    const bool down = task.gemm == Gemm::kDown;
    const float* const first = down ? p.w_down_scales : p.w_gate_scales;
    float(&factors)[2] = cta_.shared.gemm.ring.factors;
    factors[0] = __ldg(first + task.expert);
    factors[1] = __ldg((p.gated && !down ? p.w_up_scales : first) + task.expert);
  }

  template <int kGroup>
  using GroupsOf = std::conditional_t<kGroup == 32, decode::PowerGroups, decode::ByteGroups>;

  // The largest scales of this warp's columns in a step, of each half. All warps meet before they are read; and of the
  // step before the last, whose numbers were read between two such meetings, nobody is left who does.
  template <int kGroup>
  __device__ __forceinline__ void note_largest(const Groups (&groups)[2]) const {
    auto& largest = cta_.shared.gemm.ring.largest[steps_ % 2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t of_lane = decode::largest_of<GroupsOf<kGroup>>(groups[half].word(false), 0);
      if (kGroup == 16) of_lane = decode::largest_of<GroupsOf<kGroup>>(groups[half].word(true), of_lane);
      const uint32_t of_warp = __reduce_max_sync(0xffffffff, of_lane);
      if (ptx::read_lane() == 0) largest[half][warp_] = static_cast<uint8_t>(of_warp);
    }
  }

  // A half of a step, to E4M3 and one scale.
  template <int kGroup, int kHalf, class Magnitudes, class Source, class Target>
  __device__ __forceinline__ void decode_half(const Magnitudes& magnitudes, uint4 (&numbers)[kVectorsAhead],
                                              const Source& source, const Target& target, const Groups& groups) const {
    auto& storage = cta_.shared.gemm.ring;
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t of_warp : storage.largest[steps_ % 2][kHalf]) largest = max(largest, of_warp);
    const int32_t exponent = decoded_block_exponent(GroupsOf<kGroup>::kScale, static_cast<int32_t>(largest));
    if (column() == 0) {
      storage.column_scales[at().stage()][kHalf] =
          __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23) * storage.factors[kHalf];
    }
    decode_half_to_e4m3<kGroup, kHalf>(magnitudes, numbers, source, target, groups.word(false), groups.word(true),
                                       exponent);
  }

  static constexpr int kBarrier = 5;  // 1 to 4 are combine's and epilogues'

  const Cta<Variant>& cta_;
  const PackedRing packed_;
  const ColumnRing columns_;
  const int warp_;
  uint32_t steps_ = 0;
};

template <class Variant>
__device__ __forceinline__ void run(const Cta<Variant>& cta, int warp) {
  StageDecoder<Variant>(cta, warp).run();
}

}  // namespace jaxmoe::stage_decoder
