// Plain structs as Python classes: one argument and one readable attribute per field.
// Callers: host/schedule_bindings.cc, host/layout_bindings.cc.
#pragma once

#include <cstddef>
#include <string>

#include <pybind11/pybind11.h>

namespace jaxmoe {

template <class Struct, class Type, bool kMayBeLeftOut>
struct Field {
  const char* name;
  Type Struct::*member;
  Type fallback{};  // where it is left out

  auto argument() const {
    if constexpr (kMayBeLeftOut) {
      return pybind11::arg(name) = fallback;
    } else {
      return pybind11::arg(name);
    }
  }
};
template <class Struct, class Type>
Field(const char*, Type Struct::*) -> Field<Struct, Type, false>;
template <class Struct, class Type>
Field(const char*, Type Struct::*, Type) -> Field<Struct, Type, true>;

// A class with one argument and one readable attribute per field, in the order of the struct; values are equal where
// all fields are.
template <class Struct, class... Types, bool... kMayBeLeftOut>
pybind11::class_<Struct> define_struct(pybind11::module_& module, const char* name, const char* doc,
                                 Field<Struct, Types, kMayBeLeftOut>... fields) {
  const auto as_tuple = [=](const Struct& self) { return pybind11::make_tuple(self.*(fields.member)...); };
  pybind11::class_<Struct> type(module, name, doc);
  type.def(pybind11::init([](Types... values) { return Struct{values...}; }), fields.argument()...);
  (type.def_readonly(fields.name, fields.member), ...);
  type.def("__eq__", [=](const Struct& self, const pybind11::object& other) {
    return pybind11::isinstance<Struct>(other) && as_tuple(self).equal(as_tuple(other.cast<const Struct&>()));
  });
  type.def("__hash__", [=](const Struct& self) { return pybind11::hash(as_tuple(self)); });
  type.def("__repr__", [=](const Struct& self) {
    const char* const names[] = {fields.name...};
    const pybind11::tuple values = as_tuple(self);
    std::string text;
    for (size_t i = 0; i < values.size(); ++i) {
      text += (i == 0 ? "" : ", ") + std::string(names[i]) + "=" + std::string(pybind11::str(values[i]));
    }
    return std::string(name) + "(" + text + ")";
  });
  return type;
}

}  // namespace jaxmoe
