// Which GPUs of this host reach each other's memory, for jaxmoe/reach.py, which asks before anything is compiled.
// Creates no CUDA context. GPUs have the numbers of the CUDA runtime. Both functions throw std::runtime_error where
// CUDA fails.
#pragma once

#include <vector>

namespace jaxmoe {

// The GPUs that this process sees and that the kernels are compiled for.
std::vector<int> visible_gpus();

// Whether a kernel on `gpu` can read and write the memory of `peer`, another one.
bool peer_access(int gpu, int peer);

}  // namespace jaxmoe
