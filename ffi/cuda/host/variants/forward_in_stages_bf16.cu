#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_in_stages_bf16() {
  using InStages = Forward<DecodedInStages<Bf16>>;
  return variant_of<InStages>(moe_forward<InStages>);
}

}  // namespace jaxmoe
