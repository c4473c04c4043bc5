#include "cuda/host/variants/matmul.cuh"

namespace jaxmoe {

KernelVariant dispatch_matmul_bf16() {
  return variant_of<DispatchMatmul<Bf16>>(moe_dispatch_matmul<DispatchMatmul<Bf16>>);
}
KernelVariant matmul_combine_bf16() {
  return variant_of<MatmulCombine<Bf16>>(moe_matmul_combine<MatmulCombine<Bf16>>);
}

}  // namespace jaxmoe
