#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_repacked_bf16() { return variant_of<Forward<Repacked<Bf16>>>(moe_forward<Forward<Repacked<Bf16>>>); }

}  // namespace jaxmoe
