#include "cuda/host/variants/matmul.cuh"

namespace jaxmoe {

KernelVariant dispatch_matmul_f16() {
  return variant_of<DispatchMatmul<F16>>(moe_dispatch_matmul<DispatchMatmul<F16>>);
}
KernelVariant matmul_combine_f16() {
  return variant_of<MatmulCombine<F16>>(moe_matmul_combine<MatmulCombine<F16>>);
}

}  // namespace jaxmoe
