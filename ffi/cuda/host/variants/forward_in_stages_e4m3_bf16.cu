#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_in_stages_e4m3_bf16() {
  using InStagesBesideRows = Forward<DecodedInStages<E4M3<Bf16>>>;
  return variant_of<InStagesBesideRows>(moe_forward<InStagesBesideRows>);
}

}  // namespace jaxmoe
