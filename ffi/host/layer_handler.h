// The FFI handlers of jaxmoe_forward and jaxmoe_backward on XLA:CPU, for host/extension.cc.
#pragma once

#include "common/extension.h"
#include "common/layer_call.h"

namespace jaxmoe::host {

// The state that tells the instructions of a program apart.
StateType instruction_type();

}  // namespace jaxmoe::host
