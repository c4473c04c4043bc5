// Handler of jaxmoe_device_info on CUDA devices. One thread writes the answer on XLA's stream, so that a right answer
// proves the whole path: build flags, module loading, device, stream and result buffer.
#include "common/device_info.h"

#include <cuda_runtime.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxmoe {
namespace {

__global__ void write_device_info(DeviceInfo info, DeviceInfo* result) {
#ifdef __CUDA_ARCH__
  info.compiled_arch = __CUDA_ARCH__;
#endif
  *result = info;
}

// The first failure among the calls that are made through it.
class CudaCalls {
 public:
  void operator()(cudaError_t status) {
    if (first_error_ == cudaSuccess) first_error_ = status;
  }

  ffi::Error error(const char* what) const {
    if (first_error_ == cudaSuccess) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(first_error_) + ".");
  }

 private:
  cudaError_t first_error_ = cudaSuccess;
};

ffi::Error execute(cudaStream_t stream, ffi::ResultBufferR1<ffi::S32> result) {
  if (const std::string error = device_info_size_error(result->element_count()); !error.empty()) {
    return ffi::Error::InvalidArgument(error);
  }
  CudaCalls cuda;
  // The stream's device, not the DeviceOrdinal of the call: that one counts only the devices JAX may see.
  int device = 0;
  int major = 0;
  int minor = 0;
  DeviceInfo info{};
  cuda(cudaStreamGetDevice(stream, &device));
  cuda(cudaDeviceGetAttribute(&info.num_processors, cudaDevAttrMultiProcessorCount, device));
  cuda(cudaDeviceGetAttribute(&info.block_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  info.compute_capability = 10 * major + minor;
  write_device_info<<<1, 1, 0, stream>>>(info, reinterpret_cast<DeviceInfo*>(result->typed_data()));
  cuda(cudaGetLastError());
  return cuda.error("jaxmoe_device_info");
}

}  // namespace
}  // namespace jaxmoe

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxmoeDeviceInfoCuda, jaxmoe::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>());
