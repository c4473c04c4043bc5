// What makes a kernel of one half of a layer. Included by the files of this folder that compile them.
#pragma once

#include "cuda/host/variants/variant_of.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"
#include "cuda/kernel/matmul_kernel.cuh"

namespace jaxmoe {

template <class Precision_, Pass kPass_>
struct Matmul {
  using Precision = Precision_;
  using Params = MatmulParams;
  static constexpr Pass kPass = kPass_;
  static constexpr KernelConfig config{};
};
template <class Precision>
using DispatchMatmul = Matmul<Precision, Pass::kDispatchMatmul>;
template <class Precision>
using MatmulCombine = Matmul<Precision, Pass::kMatmulCombine>;

}  // namespace jaxmoe
