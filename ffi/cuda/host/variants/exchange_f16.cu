#include "cuda/host/variants/exchange.cuh"

namespace jaxmoe {

KernelVariant dispatch_f16() { return variant_of<Dispatch<F16>>(moe_dispatch<Dispatch<F16>>); }
KernelVariant combine_f16() { return variant_of<Combine<F16>>(moe_combine<Combine<F16>>); }

}  // namespace jaxmoe
