// What the host knows of a kernel, read off its variant. Included by those who make variants: variant.cuh, exchange.cuh,
// matmul.cuh.
#pragma once

#include <cstddef>

#include "cuda/host/variants/variant.h"
#include "cuda/kernel/config.cuh"
#include "cuda/kernel/storage.cuh"

namespace jaxmoe {

template <class Variant, class Kernel>
KernelVariant variant_of(Kernel* kernel) {
  using Precision = typename Variant::Precision;
  constexpr std::size_t kSharedBytes = sizeof(StorageOf<Variant>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  static_assert(Variant::config.registers.fit());
  return {Variant::kPass,       Precision::kTokens.element, Precision::Wide::kElement,
          Precision::kPacked ? Decoding::kInRegisters : Precision::kDecodes ? Decoding::kAhead : Decoding::kNone,
          Precision::kAccumulation, reinterpret_cast<const void*>(kernel), kSharedBytes, Variant::config.timeline,
          kRoomForExperts<Variant>, requires { requires Variant::kSumsAtExperts; },
          requires { requires Precision::kRepacked; }};
}

}  // namespace jaxmoe
