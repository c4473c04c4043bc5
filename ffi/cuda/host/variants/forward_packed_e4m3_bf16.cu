#include "cuda/host/variants/variant.cuh"

namespace jaxmoe {

KernelVariant forward_packed_e4m3_bf16() {
  using PackedBesideRows = Forward<Packed<E4M3<Bf16>>>;
  return variant_of<PackedBesideRows>(moe_forward<PackedBesideRows>);
}

}  // namespace jaxmoe
