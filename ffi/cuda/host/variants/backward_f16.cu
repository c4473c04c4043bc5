#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant backward_f16() { return variant_of<Backward<F16>>(moe_backward<Backward<F16>>); }

}  // namespace jaxmoe
