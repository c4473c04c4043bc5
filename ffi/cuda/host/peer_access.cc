#include "cuda/host/peer_access.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/host/errors.h"

namespace jaxmoe {
namespace {

void check(const char* what, cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error("jaxmoe: " + cuda_text(what, status));
}

int attribute(cudaDeviceAttr name, int gpu) {
  int value = 0;
  check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&value, name, gpu));
  return value;
}

}  // namespace

std::vector<int> visible_gpus() {
  int count = 0;
  check("cudaGetDeviceCount", cudaGetDeviceCount(&count));
  std::vector<int> gpus;
  for (int gpu = 0; gpu < count; ++gpu) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, gpu);
    if (major == 9 && attribute(cudaDevAttrComputeCapabilityMinor, gpu) == 0) gpus.push_back(gpu);
  }
  return gpus;
}

bool peer_access(int gpu, int peer) {
  int can_reach = 0;
  check("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can_reach, gpu, peer));
  return can_reach != 0;
}

}  // namespace jaxmoe
