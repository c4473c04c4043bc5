// Adds the submodule `executor` to jaxmoe._native; called where that module is defined.
#pragma once

#include <pybind11/pybind11.h>

namespace jaxmoe {

void define_executor(pybind11::module_& module);

}  // namespace jaxmoe
