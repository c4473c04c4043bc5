#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_sums_bf16() {
  return variant_of<ForwardWithSums<Bf16>>(moe_forward<ForwardWithSums<Bf16>>);
}

}  // namespace jaxmoe
