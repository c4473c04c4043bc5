// Handler of jaxmoe_device_info on XLA:CPU.
#include "common/device_info.h"

#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmoe {
namespace {

ffi::Error execute(ffi::ResultBufferR1<ffi::S32> result) {
  if (const std::string error = device_info_size_error(result->element_count()); !error.empty()) {
    return ffi::Error::InvalidArgument(error);
  }
  const DeviceInfo info{.compiled_arch = 0,
                        .num_processors = static_cast<int32_t>(std::thread::hardware_concurrency()),
                        .block_shared_bytes = 0,
                        .compute_capability = 0};
  std::memcpy(result->typed_data(), &info, sizeof(info));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeDeviceInfoHost, jaxmoe::execute,
                              xla::ffi::Ffi::Bind().Ret<xla::ffi::BufferR1<xla::ffi::S32>>());
