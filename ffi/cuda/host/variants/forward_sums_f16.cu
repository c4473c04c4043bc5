#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_sums_f16() {
  return variant_of<ForwardWithSums<F16>>(moe_forward<ForwardWithSums<F16>>);
}

}  // namespace jaxmoe
