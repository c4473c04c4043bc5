#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_e4m3_f16() { return variant_of<Forward<E4M3<F16>>>(moe_forward<Forward<E4M3<F16>>>); }

}  // namespace jaxmoe
