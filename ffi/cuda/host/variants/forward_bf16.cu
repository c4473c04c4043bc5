#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_bf16() { return variant_of<Forward<Bf16>>(moe_forward<Forward<Bf16>>); }

}  // namespace jaxmoe
