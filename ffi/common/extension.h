// What one extension module offers to Python. Each module defines these two functions once (host/extension.cc for
// jaxmoe._native, cuda/extension.cc for jaxmoe._cuda); bindings.cc, compiled into both, is their only caller.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxmoe {

struct Registration {
  std::string target;         // name that jax.ffi.ffi_call uses
  std::string stage;          // "instantiate", "prepare", "initialize" or "execute"
  XLA_FFI_Handler* handler;
};

std::vector<Registration> registrations();

// Facts about this module's build that the other module does not share, by name.
std::map<std::string, std::string> part_build_info();

}  // namespace jaxmoe
