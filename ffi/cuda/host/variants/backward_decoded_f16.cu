#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant backward_decoded_f16() {
  return variant_of<Backward<Decoded<F16>>>(moe_backward<Backward<Decoded<F16>>>);
}

}  // namespace jaxmoe
