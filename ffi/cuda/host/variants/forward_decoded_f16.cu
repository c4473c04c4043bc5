#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_decoded_f16() { return variant_of<Forward<Decoded<F16>>>(moe_forward<Forward<Decoded<F16>>>); }

}  // namespace jaxmoe
