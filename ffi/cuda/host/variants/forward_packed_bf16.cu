#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_packed_bf16() { return variant_of<Forward<Packed<Bf16>>>(moe_forward<Forward<Packed<Bf16>>>); }

}  // namespace jaxmoe
