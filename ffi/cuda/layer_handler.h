// The FFI handlers of jaxmoe_forward and jaxmoe_backward on CUDA devices, for cuda/extension.cc.
#pragma once

#include "common/extension.h"

namespace jaxmoe {

// What an instruction of a program remembers from one run to the next.
StateType layer_instruction_type();

}  // namespace jaxmoe
