#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_decoded_e4m3_bf16() {
  using DecodedBesideRows = Forward<Decoded<E4M3<Bf16>>>;
  return variant_of<DecodedBesideRows>(moe_forward<DecodedBesideRows>);
}

}  // namespace jaxmoe
