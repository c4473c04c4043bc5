// Compiled and linked at configure time to see whether an nvcc can build the CUDA part. It uses what the real sources
// need from a toolkit: the runtime, the half-precision headers (which pull in the C++ core libraries), C++20, sm_90a.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <concepts>

#if CUDART_VERSION < 13000
#error jaxmoe needs CUDA 13.0 or newer
#endif

template <std::integral Count>
__global__ void probe(__nv_bfloat16* values, Count count) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if (threadIdx.x < count) values[threadIdx.x] = __float2bfloat16(1.0f);
}

extern "C" int jaxmoe_probe(__nv_bfloat16* values) {
  probe<unsigned><<<1, 32>>>(values, 32u);
  return cudaGetLastError() == cudaSuccess;
}
