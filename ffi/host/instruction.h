// What the handlers of XLA:CPU share.
#pragma once

#include <cstdint>
#include <string>

#include "common/extension.h"
#include "common/formats.h"
#include "host/precision.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmoe::host {

// One per instruction of an executable, the same object for all devices that run it: it tells the calls of one program
// apart, which XLA:CPU may run in another order on every device.
struct Instruction {
  static xla::ffi::TypeId id;
};
StateType instruction_type();

// What is wrong with the rank in `place`, which only a CPU reads; empty where nothing is.
inline std::string place_error(int32_t rank, int32_t ranks) {
  if (rank >= 0 && rank < ranks) return "";
  return "jaxmoe: place names rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
         " ranks; it must be from 0 on and below that.";
}

// body(policy) with that of the elements of x, y and biases; the checks let no others come here.
template <class Body>
xla::ffi::Error with_wide(Element element, const Body& body) {
  switch (element) {
    case Element::kF32: return body(F32{});
    case Element::kF64: return body(F64{});
    case Element::kBf16: return body(Bf16{});
    case Element::kF16: return body(F16{});
    case Element::kE4M3:
    case Element::kE8M0:
    case Element::kE2M1:
    case Element::kCount: break;
  }
  return xla::ffi::Error::Internal("jaxmoe: an element type that the checks know and the executor does not.");
}

}  // namespace jaxmoe::host
