// Precision policies of weights that stay packed until the warps that multiply them have them in registers: everything
// as `Rows` has it, but stages hold 4-bit numbers, and products are those of gemm/packed.cuh, or of rows in 8 bits
// gemm/packed_eight_bit.cuh. See sixteen_bit.cuh.
#pragma once

#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe {

template <class Rows>
struct Packed : Rows {
  static constexpr bool kPacked = true;
};

// Whose words lie as registers take them (common/repacked.h).
template <class Rows>
struct Repacked : Packed<Rows> {
  static constexpr bool kRepacked = true;
};

}  // namespace jaxmoe
