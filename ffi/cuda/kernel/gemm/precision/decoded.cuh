// Precision policies of weights that are decoded before they are loaded: everything as `Rows` has it, but that dispatch
// makes matrices of its elements of weights in 8 or 4 bits (exchange/decode.cuh). See sixteen_bit.cuh.
#pragma once

#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe {

template <class Rows>
struct Decoded : Rows {
  static constexpr bool kDecodes = true;
};

}  // namespace jaxmoe
