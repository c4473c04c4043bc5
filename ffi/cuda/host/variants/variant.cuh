// What makes a kernel of a pass and a precision. Included by the files of this folder alone, which compile one each.
#pragma once

#include "cuda/host/variants/variant_of.cuh"
#include "cuda/kernel/gemm/precision/decoded.cuh"
#include "cuda/kernel/gemm/precision/eight_bit.cuh"
#include "cuda/kernel/gemm/precision/packed.cuh"
#include "cuda/kernel/gemm/precision/sixteen_bit.cuh"
#include "cuda/kernel/kernel.cuh"

namespace jaxmoe {

template <class Precision_>
struct Forward {
  using Precision = Precision_;
  using Params = ForwardParams;
  static constexpr Pass kPass = Pass::kForward;
  // Products that are added up in float32 take half a tile of registers, and so do weights that math warps decode.
  static constexpr bool kScaled = Precision::kTokens.is_scaled();
  static constexpr bool kMostForMath = kScaled != Precision::kPacked;
  // Both together leave dispatch too few, which then turns rows of bytes. Recording takes the math warps a few, and so
  // does code that decodes, though other warps run it.
  static constexpr bool kMoreForMath = kScaled || kTimeline || Precision::kDecodes;
  static constexpr RoleRegisters kRegisters = kMostForMath   ? RoleRegisters{72, 216}
                                              : kMoreForMath ? RoleRegisters{88, 208}
                                                             : RoleRegisters{};
  // Of weights that are decoded ahead nothing is recorded: there is no event for it, and in 8 bits no register.
  static constexpr KernelConfig config{.registers = kRegisters, .timeline = kTimeline && !Precision::kDecodes};
};

// Answers are added up at experts. A kernel of its own: few plans want it, and in the others the code would take
// registers, of dispatch and of the math warps. With tokens in 8 bits it has none left to record with.
template <class Precision_>
struct ForwardWithSums : Forward<Precision_> {
  using Base = Forward<Precision_>;
  static constexpr bool kSumsAtExperts = true;
  static constexpr KernelConfig config{.registers = Base::kRegisters,
                                       .timeline = Base::config.timeline && !Base::kScaled};
};

template <class Precision_>
struct Backward {
  using Precision = Precision_;
  using Params = BackwardParams;
  static constexpr Pass kPass = Pass::kBackward;
  static constexpr KernelConfig config{.timeline = kTimeline};
};

}  // namespace jaxmoe
