// What cuda/host/extension.cc tells the handlers, and tells Python about them. Without CUDA's headers.
#pragma once

#include <cstdint>
#include <vector>

#include "common/extension.h"

namespace jaxmoe {

// What an instruction of a program remembers from one run to the next.
StateType instruction_type();

// What the handlers cannot ask XLA: the numbers by which all processes know the devices of this one, and whether there
// is another process. Of other processes than those that there were before, nothing is taken for known.
void know_devices(const std::vector<int64_t>& local, bool several_processes);

}  // namespace jaxmoe
