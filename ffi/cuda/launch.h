// Starts the forward kernel. The handler (cuda/forward_handler.cu) calls prepare_forward() once per device and variant
// in initialize, and launch_forward() in execute.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "cuda/kernel/params.cuh"
#include "cuda/tensor_map.h"

namespace jaxmoe {

// Thread blocks of a launch on the current device, and how the schedule's workers follow from them. Loads the kernel
// and sets its attributes. Returns what went wrong, empty where nothing did.
std::string prepare_forward(ElementType type, int32_t* workers);

// Fills the tensor maps of `params` from its other fields and the three weight arrays. The schedule's tile sizes must
// be those of the kernel. Returns what is wrong, empty where nothing is.
std::string make_tensor_maps(ForwardParams* params, ElementType type, const void* w_gate, const void* w_up,
                             const void* w_down);

// Thread blocks that record a timeline, which params.timeline has to have room for; 0 where the kernel is compiled
// without.
int32_t timeline_blocks(const Schedule& schedule);

// Enqueues the kernel on `stream`.
cudaError_t launch_forward(const ForwardParams& params, ElementType type, cudaStream_t stream);

}  // namespace jaxmoe
