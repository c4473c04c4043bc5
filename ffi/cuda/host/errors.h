// What CUDA says of a failed call, as text and as the error of a handler; and what all errors of arenas have in common.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
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

inline std::string bytes_text(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), bytes < (int64_t{1} << 30) ? "%.1f MiB" : "%.2f GiB",
                static_cast<double>(bytes) / (bytes < (int64_t{1} << 30) ? 1 << 20 : 1 << 30));
  return text;
}

// What a failed layer leaves behind, and what to do.
inline constexpr char kRestart[] =
    " The results of that call are not valid, and no layer of this process runs again. Restart all processes of the "
    "group. A rank that did not run the same program as the others, or that stopped, is the usual reason.";

}  // namespace jaxmoe
