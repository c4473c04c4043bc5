// What every role of a kernel is handed: parameters, this block's shared memory, its place in the schedule.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/block_part.h"
#include "common/layout.h"
#include "common/scheduler.h"
#include "cuda/device/ptx/fence.cuh"
#include "cuda/device/signals.cuh"
#include "cuda/device/timeline.cuh"
#include "cuda/kernel/crew.cuh"
#include "cuda/kernel/params.cuh"
#include "cuda/kernel/roles.cuh"
#include "cuda/kernel/storage.cuh"

namespace jaxmoe {

template <class Variant>
struct Cta {
  using Element = typename Variant::Precision::Wide::Element;  // of x, biases and answers
  using Params = typename Variant::Params;
  static constexpr KernelConfig config = Variant::config;
  static constexpr bool kBackward = Variant::kPass == Pass::kBackward;
  static constexpr bool kFirstHalf = Variant::kPass == Pass::kDispatchMatmul;
  static constexpr bool kSecondHalf = Variant::kPass == Pass::kMatmulCombine;
  static constexpr bool kDecodes = Variant::Precision::kDecodes;
  static constexpr bool kWeightGradients = kBackward && !kDecodes;
  // Whether columns of gate and up may take turns: in weights that are multiplied as they are. Recording leaves a forward
  // pass no register for it; cuda/host/launch.cu refuses such a call.
  static constexpr bool kTakesTurns = !kFirstHalf && !kSecondHalf && !kDecodes && !Variant::Precision::kPacked &&
                                      !Variant::Precision::kTokens.is_scaled() &&
                                      (kBackward || !Variant::config.timeline);
  // Whether blocks may share the columns of a task, half of a column tile each. Not of weights that are decoded ahead,
  // for which few rows are the wrong case.
  static constexpr bool kSharesColumns = Variant::kPass == Pass::kForward && Tiling::kBlocks == 2 &&
                                         !Variant::Precision::kDecodes;
  // Whether blocks exchange halves of the rows of a tile for columns. Then they share no loads of weights: of 16 bits,
  // which are loaded for as long as they are multiplied, that took longer (docs/performance.md).
  static constexpr bool kExchangesHalves =
      Variant::kPass == Pass::kForward && (Variant::Precision::kPacked || Variant::Precision::kTokens.is_scaled());
  // Whether answers are added up at experts before they travel (exchange/sums_at_experts.cuh).
  static constexpr bool kSumsAtExperts = requires { requires Variant::kSumsAtExperts; };
  // Whether zeros lie behind the rows of a tile (gemm/load.cuh). Beside packed weights rows are the second factor, of which a
  // product takes hardly more than there are. Recording leaves tokens in 8 bits no register for it.
  static constexpr bool kZerosBehindRows =
      !Variant::Precision::kPacked && !(Variant::config.timeline && Variant::Precision::kTokens.is_scaled());
  // Warps that store a part of a task each.
  static constexpr uint32_t kTaskParts = Roles::kMathWarps * Tiling::kBlocks;

  __device__ Cta(const Params& params, StorageOf<Variant>& shared)
      : params(params), peers(params), shared(shared), signals(params, shared.launch_number),
        timeline(shared.timeline, params.timeline), cta_rank(static_cast<uint32_t>(blockIdx.x) % Tiling::kBlocks) {}

  // Blocks of the crew, and this block's number among them: what is dealt in advance is dealt by these. Known after
  // crew::muster().
  __device__ __forceinline__ int32_t blocks() const { return shared.crew.workers * Tiling::kBlocks; }
  __device__ __forceinline__ int32_t block() const {
    return shared.crew.worker * Tiling::kBlocks + static_cast<int32_t>(cta_rank);
  }
  __device__ __forceinline__ bool is_latecomer() const { return shared.crew.worker >= shared.crew.workers; }

  // In this rank's own arena; `peers` has those of the others.
  template <class T>
  __device__ __forceinline__ T* at(const Region& region) const {
    return peers.here<T>(region.offset);
  }

  // Whether columns of gate and of up take turns in weights, and with them in sums and projections.
  __device__ __forceinline__ bool interleaved() const {
    if constexpr (kTakesTurns) return params.interleaved();
    return false;
  }

  // Columns of an answer that this block's part of a down task has: those of a tile, or a half of them.
  __device__ __forceinline__ static bool shares_columns(const Task& own) {
    return kSharesColumns && (own.part & kSharedColumns) != 0;
  }
  __device__ __forceinline__ int32_t first_answer_column(const Task& own) const {
    const int32_t half = shares_columns(own) ? ptx::read_cluster_rank() : 0;
    return own.column_tile * Tiling::kColumns + half * (Tiling::kColumns / 2);
  }

  // This block's part of a task of its cluster.
  __device__ __forceinline__ Task own_part(const Task& task) const {
    if (is_weight_gradient(task.gemm)) return task;  // rows of the matrix, not of the ring: first_weight_row()
    Task own = part_of_block<kSharesColumns, kExchangesHalves, !kSecondHalf>(params.schedule, params.shape.hidden, task,
                                                                             static_cast<int32_t>(cta_rank));
    // Told by the rows of the task: a block may have none of its columns, and hands the same stages on.
    if constexpr (GemmShape<Variant>::kTakesDeepSteps) {
      using Shape = GemmShape<Variant>;
      const int32_t most = shares_columns(own) ? Shape::kDeepRowsOfHalf : Shape::kDeepRows;
      if (has_own_columns(own) && task.rows <= most) own.part |= kDeepSteps;
    }
    return own;
  }

  const Params& params;
  const Peers peers;
  StorageOf<Variant>& shared;
  const Signals<kTaskParts> signals;
  const Timeline<config.timeline> timeline;
  const uint32_t cta_rank;  // in the cluster
};

// The row of the ring that this block's part of a tile begins with; of the caller's array where the rows lie in one,
// which the producer has put in the place of the slot.
template <class Variant>
__device__ __forceinline__ int32_t first_row_of(const Task& task) {
  return Cta<Variant>::kSecondHalf ? task.ring_slot : task.ring_slot * Tiling::kRows;
}
template <class Variant>
__device__ __forceinline__ int64_t ring_row_of(const Task& task, int32_t tile_row) {
  if constexpr (Cta<Variant>::kSecondHalf) return int64_t{task.ring_slot} + tile_row;
  // Not first_row_of(): with a product of 32 bits the forward kernels that decode weights spill.
  return int64_t{task.ring_slot} * Tiling::kRows + tile_row;
}

// The scales of the rows of a ring whose rows have `columns` elements; ring_scale() says in which order.
template <class Variant>
__device__ __forceinline__ float* ring_scales(const Cta<Variant>& cta, const Region& ring, int32_t columns) {
  const auto& p = cta.params;
  const int64_t rows = int64_t{p.schedule.ring_tiles} * p.schedule.tile.rows;
  return cta.peers.template here<float>(scales_of(ring, rows, columns));
}

// The first row of the weight matrix that this block computes of a weight gradient.
template <class Variant>
__device__ __forceinline__ int32_t first_weight_row(const Cta<Variant>& cta, const Task& task) {
  return task.weight_row_tile * cta.params.schedule.tile.rows +
         static_cast<int32_t>(cta.cta_rank) * Tiling::kRows;
}

// All threads of all blocks of a worker.
__device__ __forceinline__ void sync_worker() {
  if constexpr (Tiling::kBlocks > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Threads of the crew, and this one's number.
template <class Variant>
__device__ __forceinline__ int64_t threads_of(const Cta<Variant>& cta) {
  return int64_t{cta.blocks()} * blockDim.x;
}
template <class Variant>
__device__ __forceinline__ int64_t thread_of(const Cta<Variant>& cta) {
  return int64_t{cta.block()} * blockDim.x + threadIdx.x;
}

// An even share of `count` for part `part` of `parts`.
struct Share {
  int64_t begin, end;
};
__device__ __forceinline__ Share share_of(int64_t count, int32_t part, int32_t parts) {
  const int64_t size = ceil_div(count, int64_t{parts});
  return {at_most(size * part, count), at_most(size * (part + 1), count)};
}

}  // namespace jaxmoe
