#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_f16() { return variant_of<Forward<F16>>(moe_forward<Forward<F16>>); }

}  // namespace jaxmoe
