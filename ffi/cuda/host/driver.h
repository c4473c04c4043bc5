// Functions of the CUDA driver, which is asked for them at run time: nothing links to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace jaxmoe {

// The one with this name, of CUDA 12.0 or older, as cuda.h declares it; null where the driver has none, which `status`
// may explain.
template <class Function>
Function* driver_function(const char* name, cudaError_t* status) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  *status = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  const bool is_there = *status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_there ? reinterpret_cast<Function*>(function) : nullptr;
}

// Makes a context the current one of this thread for a while, and none on any other device. cudaSetDevice would, when it
// sets the device back: on GPU 0 for a thread that has used none, where the memory of a context is then missing.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context) {
    cudaError_t status = cudaSuccess;
    static const auto push = driver_function<decltype(cuCtxPushCurrent)>("cuCtxPushCurrent", &status);
    is_pushed_ = push != nullptr && push(context) == CUDA_SUCCESS;
  }
  ~CurrentContext() {
    cudaError_t status = cudaSuccess;
    static const auto pop = driver_function<decltype(cuCtxPopCurrent)>("cuCtxPopCurrent", &status);
    CUcontext context = nullptr;
    if (is_pushed_ && pop != nullptr) pop(&context);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool is_pushed_ = false;
};

}  // namespace jaxmoe
