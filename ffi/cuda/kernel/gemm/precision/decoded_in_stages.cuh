// Precision policies of weights in 4 bits that are loaded as they are and decoded in shared memory, by warps that do
// nothing else (gemm/stage_decoder.cuh): everything as `Rows` has it, and its products. See sixteen_bit.cuh.
#pragma once

#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe {

template <class Rows>
struct DecodedInStages : Rows {
  static constexpr bool kInStages = true;
};

}  // namespace jaxmoe
