// What makes a kernel of a dispatch or a combine. Included by the files of this folder that compile them.
#pragma once

#include "cuda/host/variants/variant_of.cuh"
#include "cuda/kernel/exchange_kernel.cuh"
#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"

namespace jaxmoe {

template <class Precision_, Pass kPass_>
struct Exchange {
  using Precision = Precision_;
  using Params = ExchangeParams;
  static constexpr Pass kPass = kPass_;
  static constexpr KernelConfig config{};
};
template <class Precision>
using Dispatch = Exchange<Precision, Pass::kDispatch>;
template <class Precision>
using Combine = Exchange<Precision, Pass::kCombine>;

}  // namespace jaxmoe
