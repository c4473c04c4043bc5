// What one extension module offers to Python. Each module defines these functions once (host/extension.cc for
// jaxmoe._native, cuda/host/extension.cc for jaxmoe._cuda); bindings.cc, compiled into both, is their only caller.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "common/timeline.h"
#include "xla/ffi/api/c_api.h"

namespace jaxmoe {

struct Registration {
  std::string target;         // name that jax.ffi.ffi_call uses
  std::string handler_stage;          // "instantiate", "prepare", "initialize" or "execute"
  XLA_FFI_Handler* handler;
};

std::vector<Registration> registrations();

// A type whose objects XLA keeps from one stage of a handler to the next.
struct StateType {
  std::string name;  // unique in the process
  XLA_FFI_TypeId* id;
  const XLA_FFI_TypeInfo* info;
};

std::vector<StateType> state_types();

// Facts about this module's build that the other module does not share, by name.
std::map<std::string, std::string> part_build_info();

// The last launch of every rank that this module has a timeline of. Throws where one cannot be read.
std::vector<LaunchTimeline> timelines();

// Adds to `module` what only this module offers.
void define_part(pybind11::module_& module);

}  // namespace jaxmoe
