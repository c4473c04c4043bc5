// Starts the kernels. The handler (cuda/host/layer_handler.cu) calls prepare_kernel() once per device and variant in
// initialize; the arena calls the rest in execute.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "common/scheduler.h"
#include "cuda/kernel/params.cuh"
#include "cuda/host/tensor_map.h"

namespace jaxmoe {

// Thread blocks of a launch on the current device, and how the schedule's workers follow from them. Loads the kernel
// and sets its attributes. Returns what went wrong, empty where nothing did.
std::string prepare_kernel(Pass pass, ElementType type, int32_t* workers);

// The arrays that the copy engine reads as they are; `up` is null for experts without it.
struct Weights {
  const void* gate;
  const void* up;
  const void* down;
};

// Fills the tensor maps and the results of `params` from its other fields and the weights. The schedule's tile sizes
// must be those of the kernels. Returns what is wrong, empty where nothing is.
std::string complete_params(ForwardParams* params, ElementType type, const Weights& weights);
std::string complete_params(BackwardParams* params, ElementType type, const Weights& weights);

// Thread blocks that record a timeline, which params.timeline has to have room for; 0 where the kernels are compiled
// without.
int32_t timeline_blocks(const Schedule& schedule);

// Enqueues the kernel on `stream`.
cudaError_t launch_kernel(const ForwardParams& params, ElementType type, cudaStream_t stream);
cudaError_t launch_kernel(const BackwardParams& params, ElementType type, cudaStream_t stream);

}  // namespace jaxmoe
