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
  // Recording takes the math warps a few registers. So does code that decodes, though other warps run it; with both
  // there are none left.
  static constexpr bool kMoreForMath = kTimeline || Precision::kDecodes;
  // Nor where they decode themselves, and have sums of 128 rows beside it; dispatch then turns rows, of bytes with more.
  static constexpr bool kTurnsBytes = Precision::kPacked && Precision::kTokens.is_scaled();
  // Products that are added up in float32 take half a tile of registers.
  static constexpr bool kPromotes = Precision::kTokens.is_scaled() && !Precision::kPacked;
  static constexpr RoleRegisters kRegisters = kPromotes                   ? RoleRegisters{72, 216}
                                              : kTurnsBytes || kMoreForMath ? RoleRegisters{88, 208}
                                              : Precision::kPacked        ? RoleRegisters{72, 216}
                                                                          : RoleRegisters{};
  static constexpr KernelConfig config{.registers = kRegisters,
                                       .timeline = kTimeline && !Precision::kDecodes && !Precision::kPacked};
};

// Adding products up in float32 takes the math warps half a tile of registers.
template <class Wide, Accumulation kAccumulation = Accumulation::kPromoted>
struct EightBitForward {
  using Precision = E4M3<Wide, kAccumulation>;
  using Params = ForwardParams;
  static constexpr Pass kPass = Pass::kForward;
  static constexpr KernelConfig config{.registers = RoleRegisters{72, 216}, .timeline = kTimeline};
};

template <class Precision_>
struct Backward {
  using Precision = Precision_;
  using Params = BackwardParams;
  static constexpr Pass kPass = Pass::kBackward;
  static constexpr KernelConfig config{.timeline = kTimeline};
};

}  // namespace jaxmoe
