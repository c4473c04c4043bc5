// The FFI handlers of jaxmoe_forward and jaxmoe_backward on CUDA devices, for cuda/host/extension.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "common/extension.h"

namespace jaxmoe {

// What the handlers cannot ask XLA: the numbers by which all processes know the devices of this one, and whether there
// is another process.
void know_devices(const std::vector<int64_t>& local, bool several_processes);

// What an instruction of a program remembers from one run to the next.
StateType layer_instruction_type();

}  // namespace jaxmoe
