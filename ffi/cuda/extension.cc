// jaxmoe._cuda: handlers for CUDA devices of compute capability 9.0.
#include "common/extension.h"

#include "common/build_config.h"
#include "common/device_info.h"
#include "xla/ffi/api/api.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxmoeDeviceInfoCuda);

namespace jaxmoe {

std::vector<Registration> registrations() {
  return {{kDeviceInfoTarget, "execute", JaxmoeDeviceInfoCuda}};
}

std::vector<StateType> state_types() { return {}; }

std::map<std::string, std::string> part_build_info() {
  return {{"cuda_toolkit", build_config::kNvccVersion},
          {"cuda_arch", build_config::kCudaArch},
          {"nvcc", build_config::kNvcc},
          {"nvcc_flags", build_config::kNvccFlags}};
}

// What Python asks about schedules and layouts is integer code that needs no GPU: _native, which is always built, has it.
void define_part(pybind11::module_&) {}

}  // namespace jaxmoe
