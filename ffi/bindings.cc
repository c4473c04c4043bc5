// The Python face of an extension module. Compiled once per module with JAXMOE_MODULE set to its name; what differs
// between the modules comes through common/extension.h.
#include <map>
#include <string>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/build_config.h"
#include "common/device_info.h"
#include "common/extension.h"
#include "xla/ffi/api/c_api.h"

#if __has_include("xla/ffi/api/collectives_c_api.h")
#include "xla/ffi/api/collectives_c_api.h"
#endif

namespace py = pybind11;

namespace jaxmoe {
namespace {

std::string version_text(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

std::string compiler_text() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

// {target: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
py::dict registrations_dict() {
  py::dict targets;
  for (const Registration& entry : registrations()) {
    py::str target(entry.target);
    if (!targets.contains(target)) targets[target] = py::dict();
    // XLA accepts only capsules of this name.
    targets[target][py::str(entry.stage)] =
        py::capsule(reinterpret_cast<void*>(entry.handler), "xla._CUSTOM_CALL_TARGET");
  }
  return targets;
}

// {name: {"type_id": capsule, "type_info": capsule}}, as jax.ffi.register_ffi_type takes it.
py::dict state_types_dict() {
  py::dict types;
  for (const StateType& type : state_types()) {
    py::dict entry;
    entry["type_id"] = py::capsule(static_cast<void*>(type.id));
    entry["type_info"] = py::capsule(static_cast<const void*>(type.info));
    types[py::str(type.name)] = entry;
  }
  return types;
}

std::map<std::string, std::string> build_info() {
  std::map<std::string, std::string> info = part_build_info();
  info["compiler"] = compiler_text();
  info["cpp_standard"] = std::to_string(__cplusplus);
  info["jaxlib"] = build_config::kJaxlibVersion;
  info["ffi_api"] = version_text(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef XLA_FFI_Extension_Collectives
  info["collectives_api"] =
      version_text(XLA_FFI_Extension_Collectives_MajorVersion, XLA_FFI_Extension_Collectives_MinorVersion);
#else
  info["collectives_api"] = "";
#endif
  return info;
}

py::tuple device_info_fields() {
  py::tuple names(kDeviceInfoFields.size());
  for (size_t i = 0; i < kDeviceInfoFields.size(); ++i) {
    names[i] = py::str(kDeviceInfoFields[i].data(), kDeviceInfoFields[i].size());
  }
  return names;
}

}  // namespace
}  // namespace jaxmoe

PYBIND11_MODULE(JAXMOE_MODULE, module) {
  module.def("registrations", &jaxmoe::registrations_dict, "FFI handlers: {target: {stage: capsule}}.");
  module.def("state_types", &jaxmoe::state_types_dict, "Types kept between stages: {name: {fact: capsule}}.");
  module.def("build_info", &jaxmoe::build_info, "How this module was compiled: {fact: text}.");
  module.def("device_info_fields", &jaxmoe::device_info_fields, "Names of the words that jaxmoe_device_info writes.");
  jaxmoe::define_part(module);
}
