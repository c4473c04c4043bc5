#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant backward_decoded_bf16() {
  return variant_of<Backward<Decoded<Bf16>>>(moe_backward<Backward<Decoded<Bf16>>>);
}

}  // namespace jaxmoe
