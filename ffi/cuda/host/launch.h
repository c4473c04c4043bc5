// Starts the kernels. The handler (cuda/host/layer_handler.cc) calls prepare_kernel() once per device and variant in
// initialize; the arena calls the rest in execute.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <variant>

#include "common/formats.h"
#include "common/exchange.h"
#include "common/layer_arrays.h"
#include "common/scheduler.h"
#include "cuda/kernel/params.cuh"

namespace jaxmoe {

// What the memory and the kernel of a launch follow from.
struct LaunchSizes {
  Shape shape;
  Schedule schedule;
  Formats formats;
  Pass pass;
};

// The kernel of a pass for these formats. Of the schedule it takes whether weights that are decoded are so into a ring,
// and whether sums are made at experts. Null where no kernel is compiled for that.
const void* kernel_of(Pass pass, const Formats& formats, const Schedule& schedule);

// Thread blocks of a launch on the current device, and how the schedule's workers follow from them. Loads that kernel
// and sets its attributes. Returns what went wrong, empty where nothing did.
std::string prepare_kernel(Pass pass, const Formats& formats, const Schedule& schedule, int32_t* workers);

// A launch whose parameters are complete.
struct ReadyLaunch {
  std::variant<ForwardParams, BackwardParams, ExchangeParams, MatmulParams> params;
  Pass pass;
  Formats formats;
};

// The arrays of a call of a layer, or of a dispatch or combine with the room that it has.
struct ExchangeRoom {
  ExchangeArrays<float> arrays;
  Room room;
  bool beside = false;  // the program
};
using LaunchArrays = std::variant<LayerArrays<void, float>, ExchangeRoom>;

// Completes `rank`, which says where everything lies, with the arrays of a call: tensor maps, results. The tile sizes
// of its schedule must be those of the kernels. `timeline` has room for timeline_blocks(), or is null where those are
// 0. Returns what is wrong, empty where nothing is.
std::string make_launch(const RankParams& rank, Pass pass, const Formats& formats, const LaunchArrays& arrays,
                        std::byte* timeline, ReadyLaunch* launch);

// Thread blocks that record a timeline; 0 where the kernel is compiled without.
int32_t timeline_blocks(const LaunchSizes& sizes);

// Enqueues the kernel on `stream`.
cudaError_t enqueue(const ReadyLaunch& launch, cudaStream_t stream);

}  // namespace jaxmoe
