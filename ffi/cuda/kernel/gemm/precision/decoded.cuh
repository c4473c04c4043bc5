// Precision policies of weights that are decoded before they are multiplied: everything as `Wide` has it, but that
// dispatch makes matrices of its elements of weights in 8 or 4 bits (exchange/decode.cuh). See sixteen_bit.cuh.
#pragma once

#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe {

template <class Wide_>
struct Decoded : Wide_ {
  using Wide = Wide_;
  static constexpr bool kDecodes = true;
};

}  // namespace jaxmoe
