// The failures of this process's layers (cuda/host/arena.h), for those who know nothing of CUDA.
#pragma once

#include <string>
#include <vector>

namespace jaxmoe {

// All after which no layer of this process runs again; and those that no call has returned and that nobody has asked
// for with either function. Neither waits: a launch that is still under way has not failed.
std::vector<std::string> failures();
std::vector<std::string> untold_failures();

}  // namespace jaxmoe
