// What the handlers of XLA:CPU share.
#pragma once

#include <cstdint>
#include <string>

#include "common/extension.h"
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

}  // namespace jaxmoe::host
