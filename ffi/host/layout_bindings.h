// Adds what common/layout.h says of the memory of a rank to the submodule `schedule` of jaxmoe._native; called where
// that is defined.
#pragma once

#include <pybind11/pybind11.h>

namespace jaxmoe {

void define_layout(pybind11::module_& module);

}  // namespace jaxmoe
