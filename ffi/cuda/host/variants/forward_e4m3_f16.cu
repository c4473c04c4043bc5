#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_e4m3_f16() { return variant_of<EightBitForward<F16>>(moe_forward<EightBitForward<F16>>); }

}  // namespace jaxmoe
