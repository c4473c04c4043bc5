// What a launch of a kernel is given: sizes, where everything lies, and the tensor maps of what the copy
// engine reads. Filled by the host (cuda/host/launch.cu), read-only for every role.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "common/exchange.h"
#include "common/layer_arrays.h"
#include "cuda/device/rank_params.cuh"

namespace jaxmoe {

// An array that a launch writes.
struct Result {
  void* data;
  int64_t bytes;
};
inline constexpr int kMaxResults = 8;

// Both passes. Elements are those of the variant's format.
struct LaunchParams : RankParams, LayerArrays<void, float> {
  bool gated;  // experts have an up projection
  int32_t weight_scale_rows;  // of weights with scales: Format::scale_rows
  int32_t weight_group_columns;  // of weights in 4 bits: Format::group_columns, 16 or 32; else 0
  bool weights_repacked;         // Format::repacked

  // Of 8-bit elements matrices are the other way round, and the innermost box size of all maps is 128. So they are of
  // packed ones, with boxes of {128, 128, 1}.
  CUtensorMap w_gate_map;  // [local_experts, hidden, intermediate], box {64, 64, 1}; of columns in turn twice as many
  CUtensorMap w_up_map;    // the same; that of w_gate where there is no up projection, or columns are in turn
  CUtensorMap w_down_map;  // [local_experts, intermediate, hidden], box {64, 64, 1}

  Result results[kMaxResults];  // all that the launch writes for its caller; those that are not there have no bytes

  std::byte* timeline;  // timeline_bytes() of common/timeline.h; null where the kernel is compiled without

  // Of weights in 4 bits: groups of a column that is so deep. A division by what the compiler does not know is a long row of
  // instructions, for which every math warp would wait in every task.
  __device__ __forceinline__ int32_t groups_of_column(int32_t depth) const {
    return depth >> (weight_group_columns == 16 ? 4 : 5);
  }
};

struct ForwardParams : LaunchParams {
  CUtensorMap rows;         // [ring rows, hidden], box {64, 128}
  CUtensorMap few_rows;     // the same, box {64, 16}
  CUtensorMap h;            // [ring rows, intermediate], box {64, 128}
  CUtensorMap few_h;        // the same, box {64, 16}

  // Of packed weights, for deep stages (kernel/gemm/deep_stages.cuh): as the maps without `deep`, box {256, 128, 1}.
  CUtensorMap deep_w_gate_map;
  CUtensorMap deep_w_up_map;
  CUtensorMap deep_w_down_map;
};

struct BackwardParams : LaunchParams {
  // Gate and up as they are multiplied with their gradients, plane by plane: [local_experts, hidden, intermediate], box
  // {64, 64, 1}. Of columns in turn the first and the second half of all.
  CUtensorMap w_gate_plane;
  CUtensorMap w_up_plane;
  // A factor of a product, 64 x 64 whichever way it is turned; and the same tensors 16 rows at a time, to be written.
  CUtensorMap rows;             // [ring rows, 2, hidden], box {64, 1, 64}: tokens, gradients of their outputs
  CUtensorMap projections;      // [ring rows, projections, intermediate], box {64, 1, 64}
  CUtensorMap h;                // [ring rows, intermediate], box {64, 64}
  // The same as h_gradient reads and writes them: of columns in turn [ring rows, 1, 2 * intermediate].
  CUtensorMap read_projections;
  CUtensorMap saved_rows;       // so, of the saved rows; unused where none are
  CUtensorMap few_projections;  // so, box {64, 1, 16}
  CUtensorMap few_h;            // box {64, 16}
};

// One half of a layer. Elements of all arrays are those of the variant's format.
struct MatmulParams : RankParams, ExchangeArrays<float> {
  Room room;
  Result results[kMaxResults];  // as above
  std::byte* timeline;          // none is recorded
  CUtensorMap multiplied_rows;      // [ring rows, hidden] or the caller's [rows, intermediate], box {64, 128}
  CUtensorMap few_multiplied_rows;  // the same, box {64, 16}
  CUtensorMap matrices_map;         // [local_experts, depth, width], box {64, 64, 1}
};

// A dispatch or a combine on its own. Elements of rows are those of the variant's format.
struct ExchangeParams : RankParams, ExchangeArrays<float> {
  Room room;
  bool beside;  // the program, on few multiprocessors
  Result results[kMaxResults];  // as above
  std::byte* timeline;          // none is recorded
};

}  // namespace jaxmoe
