// The FFI handlers of jaxmoe_forward on CUDA devices, for cuda/extension.cc.
#pragma once

#include "common/extension.h"

namespace jaxmoe {

// What an instruction of a program remembers from one run to the next.
StateType forward_instruction_type();

}  // namespace jaxmoe
