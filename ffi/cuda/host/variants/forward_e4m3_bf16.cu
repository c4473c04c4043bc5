#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_e4m3_bf16() { return variant_of<EightBitForward<Bf16>>(moe_forward<EightBitForward<Bf16>>); }

}  // namespace jaxmoe
