// jaxmoe._cuda: handlers for CUDA devices of compute capability 9.0.
#include "common/extension.h"

#include "common/build_config.h"
#include "common/device_info.h"
#include "common/forward_call.h"
#include "cuda/forward_handler.h"
#include "cuda/timelines.h"
#include "xla/ffi/api/api.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeDeviceInfoCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeForwardInstantiateCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeForwardPrepareCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeForwardInitializeCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeForwardCuda);

namespace jaxmoe {

std::vector<Registration> registrations() {
  return {{kDeviceInfoTarget, "execute", JaxmoeDeviceInfoCuda},
          {kForwardTarget, "instantiate", JaxmoeForwardInstantiateCuda},
          {kForwardTarget, "prepare", JaxmoeForwardPrepareCuda},
          {kForwardTarget, "initialize", JaxmoeForwardInitializeCuda},
          {kForwardTarget, "execute", JaxmoeForwardCuda}};
}

std::vector<StateType> state_types() { return {forward_instruction_type()}; }

std::map<std::string, std::string> part_build_info() {
  return {{"cuda_toolkit", build_config::kNvccVersion},
          {"cuda_arch", build_config::kCudaArch},
          {"timeline", build_config::kTimeline},
          {"nvcc", build_config::kNvcc},
          {"nvcc_flags", build_config::kNvccFlags}};
}

std::vector<LaunchTimeline> timelines() { return arena_timelines(); }

// What Python asks about schedules and layouts is integer code that needs no GPU: _native, which is always built, has
// it.
void define_part(pybind11::module_&) {}

}  // namespace jaxmoe
