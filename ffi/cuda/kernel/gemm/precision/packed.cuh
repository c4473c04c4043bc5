// Precision policies of weights that stay packed until the warps that multiply them have them in registers: everything
// as `Wide` has it, but stages hold 4-bit numbers, and products are those of gemm/packed.cuh. See sixteen_bit.cuh.
#pragma once

#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe {

template <class Wide_>
struct Packed : Wide_ {
  using Wide = Wide_;
  static constexpr bool kPacked = true;
};

}  // namespace jaxmoe
