#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_decoded_bf16() { return variant_of<Forward<Decoded<Bf16>>>(moe_forward<Forward<Decoded<Bf16>>>); }

}  // namespace jaxmoe
