#include "cuda/host/variants/exchange.cuh"

namespace jaxmoe {

KernelVariant dispatch_e4m3_bf16() { return variant_of<Dispatch<E4M3<Bf16>>>(moe_dispatch<Dispatch<E4M3<Bf16>>>); }
KernelVariant dispatch_e4m3_f16() { return variant_of<Dispatch<E4M3<F16>>>(moe_dispatch<Dispatch<E4M3<F16>>>); }

}  // namespace jaxmoe
