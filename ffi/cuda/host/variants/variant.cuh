// What makes a kernel of a pass and a precision. Included by the files of this folder alone, which compile one each.
#pragma once

#include "cuda/host/variants/variant.h"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"
#include "cuda/kernel/kernel.cuh"

namespace jaxmoe {

template <class Precision_>
struct Forward {
  using Precision = Precision_;
  using Params = ForwardParams;
  static constexpr Pass kPass = Pass::kForward;
  // Recording takes the math warps a few registers.
  static constexpr KernelConfig config{.registers = kTimeline ? RoleRegisters{88, 208} : RoleRegisters{},
                                       .timeline = kTimeline};
};

template <class Precision_>
struct Backward {
  using Precision = Precision_;
  using Params = BackwardParams;
  static constexpr Pass kPass = Pass::kBackward;
  static constexpr KernelConfig config{.timeline = kTimeline};
};

template <class Variant, class Kernel>
KernelVariant variant_of(Kernel* kernel) {
  constexpr std::size_t kSharedBytes = sizeof(KernelStorage<Variant>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  return {Variant::kPass, Variant::Precision::kElement, reinterpret_cast<const void*>(kernel), kSharedBytes};
}

}  // namespace jaxmoe
