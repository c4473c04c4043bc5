#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_sums_e4m3_bf16() {
  return variant_of<ForwardWithSums<E4M3<Bf16>>>(moe_forward<ForwardWithSums<E4M3<Bf16>>>);
}

}  // namespace jaxmoe
