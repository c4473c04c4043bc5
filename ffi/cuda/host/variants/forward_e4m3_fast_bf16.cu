#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_e4m3_fast_bf16() {
  using Fast = Forward<E4M3<Bf16, Accumulation::kFast>>;
  return variant_of<Fast>(moe_forward<Fast>);
}

}  // namespace jaxmoe
