#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant backward_bf16() { return variant_of<Backward<Bf16>>(moe_backward<Backward<Bf16>>); }

}  // namespace jaxmoe
