#include "cuda/host/variants/exchange.cuh"

namespace jaxmoe {

KernelVariant dispatch_bf16() { return variant_of<Dispatch<Bf16>>(moe_dispatch<Dispatch<Bf16>>); }
KernelVariant combine_bf16() { return variant_of<Combine<Bf16>>(moe_combine<Combine<Bf16>>); }

}  // namespace jaxmoe
