// What CUDA says of a failed call, as text and as the error of a handler.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxmoe {

inline std::string cuda_text(const std::string& what, cudaError_t status) {
  cudaGetLastError();  // so that the failure is not reported a second time, by whoever asks next
  return what + ": " + cudaGetErrorString(status) + ".";
}

inline xla::ffi::Error cuda_error(const std::string& what, cudaError_t status) {
  return xla::ffi::Error::Internal("jaxmoe: " + cuda_text(what, status));
}

}  // namespace jaxmoe
